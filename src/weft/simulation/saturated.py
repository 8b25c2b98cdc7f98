"""``simulate``: from profiles, a device and a policy to a trace and a report; all commands simulate through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.base.errors import WorkloadError
from weft.base.version import __version__
from weft.devices import Npu, check_activations
from weft.devices.costs.layer_costs import Profile, spill_together
from weft.devices.costs.program import MAX_TICKS, Clock, lower
from weft.engine.compiled import compiled_order, replay_order
from weft.engine.engine import Engine
from weft.engine.policies import Option, Policy, Setting, described, make_policy
from weft.engine.saturated import SaturatedStreams
from weft.engine.simulated_npu import SimulatedNpu
from weft.engine.trial import best_contender
from weft.reports.pictures import Shown
from weft.reports.trace import Trace
from weft.simulation.report import Report, report
from weft.workloads import Saturated

Ints = npt.NDArray[np.int64]

DEFAULT_QUERIES = 100
"""Queries per stream: begin and end of the run, in which not all streams weave, are then 1 % of it."""
MOST_PIECES = 1024
"""Most pieces of the buffer; smaller pieces would cost more time in decisions than they can save."""


@dataclass(frozen=True, slots=True, eq=False)
class Run(Shown):
    """One simulated run."""

    trace: Trace
    report: Report

    def __repr__(self) -> str:
        return f"Run({self.report}, {self.trace})"


def simulate(
    profiles: Sequence[Profile],
    npu: Npu,
    policy: str,
    workload: Saturated | None = None,
    *,
    options: Mapping[str, Option] | None = None,
    spill: bool = False,
    pieces: int | None = None,
    compiled: bool = True,
) -> Run:
    """Run saturated streams of these profiles on a simulated NPU.

    options: of the policy. spill: models whose activations do not fit together pay for them on the memory channel;
    otherwise they are refused. pieces: cut layers so that none takes more than 1 / pieces of the weight buffer; None
    leaves it to the policy. compiled: use a kernel if the policy has one; the result is the same.
    """
    workload = workload or Saturated(DEFAULT_QUERIES)
    setting = make_setting(profiles, npu, workload, spill=spill, pieces=pieces)
    requested_policy = make_policy(policy, setting, options)
    chosen_policy = best_contender(requested_policy)
    setting = chosen_policy.setting
    order = compiled_order(chosen_policy, setting.work, setting.quota) if compiled else None
    if order is not None:
        times = replay_order(chosen_policy, order)
    else:
        order, times = _run_plain(chosen_policy)
    clock = Clock.of(npu)
    settings = _settings(profiles, npu, policy, workload, options) | {"pieces": setting.pieces or 1}
    trace = _trace(setting, clock, order, times, settings)
    remark = chosen_policy.remark or _describe_choice(requested_policy, chosen_policy)
    return Run(trace, report(trace, setting, clock, fixed_mix=setting.quota, band=chosen_policy.band, remark=remark))


def _describe_choice(requested: Policy, chosen: Policy) -> str:
    """Return the decisions of a trial before the run as a text; empty if it changed nothing."""
    changes = [f"as {described(chosen)}"] if described(chosen) != described(requested) else []
    if chosen.setting.kept_mix:
        changes.append(f"kept at a mix of {':'.join(f'{part:.3g}' for part in chosen.setting.kept_mix)}")
    if chosen.setting.pieces != requested.setting.pieces and chosen.setting.pieces != 1:
        changes.append(f"layers in pieces of at most 1/{chosen.setting.pieces} of the weight buffer")
    return f"after a trial: {', '.join(changes)}" if changes else ""


def make_setting(
    profiles: Sequence[Profile], npu: Npu, workload: Saturated, *, spill: bool = False, pieces: int | None = None
) -> Setting:
    """Check that the models fit on the device together, and lower them to its clock; parameters as of ``simulate``."""
    if not profiles:
        raise WorkloadError("nothing to run: give at least one model or profile")
    if pieces is not None and not 1 <= pieces <= MOST_PIECES:
        raise WorkloadError(f"pieces = {pieces} must be from 1, which leaves layers whole, to {MOST_PIECES}")
    if spill:
        profiles = spill_together(list(profiles), npu)
    else:
        check_activations(npu, [(profile.model, profile.peak_activation_bytes) for profile in profiles])
    mix = workload.rounds_of_mix(len(profiles)) if workload.mix else None
    programs, clock = tuple(lower(profile, npu) for profile in profiles), Clock.of(npu)
    piece_cost = clock.ticks(npu.piece_cycles / npu.clock_hz)
    setting = Setting(programs, clock.buffer, workload.rounds, mix, workload.max_lag, piece_cost=piece_cost)
    if 4 * setting.work * len(programs) > MAX_TICKS:
        raise WorkloadError("the run is too long for the clock; lower --queries or check the profile's times and sizes")
    return setting if pieces is None else setting.cut(pieces)


def _run_plain(policy: Policy) -> tuple[Ints, Ints]:
    """Run the plain loop; return the stream of each issue, and the times (issues, 4) of ``replay_order``."""
    setting = policy.setting
    executor = SimulatedNpu(setting)
    Engine(SaturatedStreams(setting, policy.band, setting.work, setting.quota), policy, executor).run()
    order = np.array([head.stream for head, _ in executor.log], np.int64)
    times = np.array([tuple(issue) for _, issue in executor.log], np.int64)
    return order, times


def _trace(setting: Setting, clock: Clock, order: Ints, times: Ints, settings: dict[str, Any]) -> Trace:
    """Build a trace from the stream of each issue and from the times of ``replay_order``."""
    query, layer, sizes = np.empty_like(order), np.empty_like(order), np.empty_like(order)
    for stream, program in enumerate(setting.programs):
        issues = order == stream
        query[issues], layer[issues] = np.divmod(np.arange(int(issues.sum())), len(program))
        sizes[issues] = np.array(program.weight_bytes, np.int64)[layer[issues]]
    models, names = zip(*((program.model, program.names) for program in setting.programs), strict=True)
    fetch_start, fetch_end, compute_start, compute_end = (times * clock.tick_s).T.copy()
    return Trace(
        models, names, order, query, layer, fetch_start, fetch_end, compute_start, compute_end, sizes, settings
    )


def _settings(
    profiles: Sequence[Profile], npu: Npu, policy: str, workload: Saturated, options: Mapping[str, Option] | None
) -> dict[str, Any]:
    """Return the settings of a run as its trace stores them."""
    return {
        "weft": __version__,
        "device": npu.name,
        "weight_buffer_bytes": npu.weight_buffer_bytes,
        "bandwidth_bytes_per_s": npu.bandwidth_bytes_per_s,
        "policy": policy,
        "options": dict(options or {}),
        "models": [profile.model for profile in profiles],
        "batch": [profile.batch for profile in profiles],
        "queries": workload.rounds,
        "mix": list(workload.mix) if workload.mix else None,
        "max_lag": workload.max_lag,
    }

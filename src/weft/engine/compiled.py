"""The same runs, compiled: the order of issues from a kernel instead of from the plain loop.

Only the order comes from here; its times are replayed like any other order's. Policies without a
kernel, and runs a kernel does not cover, go through the plain engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from weft.base.errors import WorkloadError
from weft.devices.costs.program import Program
from weft.engine.engine import Engine
from weft.engine.policies.aimt import AiMt
from weft.engine.policies.base import Policy, Setting
from weft.engine.policies.in_order import DoubleBuffer, Fair, Fifo, RoundRobin
from weft.engine.policies.layerweaver import Layerweaver
from weft.engine.policies.weft import Weft
from weft.engine.saturated import SaturatedStreams
from weft.engine.simulated_npu import SimulatedNpu
from weft.kernels.aimt import weave_aimt
from weft.kernels.band import KernelBand
from weft.kernels.greedy import weave_greedy
from weft.kernels.replay import replay
from weft.kernels.rollout import RolloutRules, RolloutStreams, weave_rollout

Ints = npt.NDArray[np.int64]

MOST_ISSUES = 50_000_000


def layer_arrays(setting: Setting) -> tuple[Ints, Ints, Ints]:
    """Fetch and compute ticks of all streams one after another, and where each stream begins."""
    fetch = np.concatenate([np.array(program.fetch, np.int64) for program in setting.programs])
    compute = np.concatenate([np.array(program.compute, np.int64) for program in setting.programs])
    first = np.cumsum([0, *(len(program) for program in setting.programs)], dtype=np.int64)
    return fetch, compute, first


def replayed(policy: Policy, chosen: Ints) -> Ints:
    """Times of an order of issues under its policy, shape (issues, 4)."""
    times, setting = np.empty((len(chosen), 4), np.int64), policy.setting
    replay(*layer_arrays(setting), setting.buffer, chosen, times, in_step=type(policy) is DoubleBuffer)
    return times


def compiled_order(policy: Policy, work: int, quota: Sequence[int] | None) -> Ints | None:
    """Stream of each issue as the policy's kernel chooses it, or None where no kernel applies."""
    kernel = _kernel(policy, work, quota)
    if kernel is None:
        return None
    setting = policy.setting
    capacity = 1024 + 2 * setting.rounds * sum(len(program) for program in setting.programs)
    while capacity <= MOST_ISSUES:
        chosen = np.empty(capacity, np.int64)
        issues = kernel(chosen)
        if issues < capacity:
            return chosen[:issues]
        capacity *= 2
    raise WorkloadError(f"the run would issue more than {MOST_ISSUES} layers; lower --queries")


def _kernel(policy: Policy, work: int, quota: Sequence[int] | None) -> Callable[[Ints], int] | None:
    setting = policy.setting
    fetch, compute, first = layer_arrays(setting)
    heavy = np.array([program.compute_bound for program in setting.programs])
    if type(policy) is Weft:  # a subclass may decide otherwise, and is asked
        streams = RolloutStreams(fetch, compute, np.concatenate(policy.gains).astype(np.int64), first, heavy)
        rules = RolloutRules(
            setting.buffer, int(fetch.max()), *policy.prices, *policy.distances, policy.band.max_lag_units
        )
        limits = np.array(quota if quota else [-1] * len(setting.programs), np.int64)
        return lambda chosen: weave_rollout(streams, rules, policy.length, policy.commit, work, limits, chosen)
    if type(policy) is Layerweaver and not policy.disabled:
        return lambda chosen: weave_greedy(
            fetch, compute, first, heavy, setting.buffer, work, chosen, _kernel_band(policy, quota)
        )
    if type(policy) is AiMt:
        return lambda chosen: weave_aimt(
            fetch, compute, first, setting.buffer, *policy.thresholds, work, chosen, _kernel_band(policy, quota)
        )
    if policy.band:
        simple = type(policy) in (Fifo, DoubleBuffer, RoundRobin, Fair, Layerweaver)
        return (lambda chosen: _plain_order(policy, work, quota, chosen)) if simple else None
    if type(policy) is Fair:
        return lambda chosen: _least_served(policy, work, chosen)
    if type(policy) in (Fifo, DoubleBuffer, RoundRobin, Layerweaver):  # layerweaver's failsafe is fifo
        in_a_row = 1 if type(policy) is RoundRobin else setting.rounds
        return lambda chosen: _whole_queries(setting.programs, in_a_row, work, chosen)
    return None


def _kernel_band(policy: Policy, quota: Sequence[int] | None) -> KernelBand | None:
    """The policy's band as its kernel keeps it, from the start of a run; None where it has none."""
    if policy.band is None:
        return None
    gains = np.concatenate(policy.band.gains(policy.setting.programs)).astype(np.int64)
    return KernelBand.at_start(gains, policy.band.max_lag_units, quota, len(policy.setting.programs))


def _plain_order(policy: Policy, work: int, quota: Sequence[int] | None, chosen: Ints) -> int:
    """What the engine's own loop issues, for policies so simple that nothing is gained by a kernel with a band."""
    executor = SimulatedNpu(policy.setting)
    Engine(SaturatedStreams(policy.setting, policy.band, work, quota), policy, executor).run()
    order = [head.stream for head, _ in executor.log]
    chosen[: len(order)] = order[: len(chosen)]
    return len(order)


def _whole_queries(programs: Sequence[Program], in_a_row: int, work: int, chosen: Ints) -> int:
    """So many queries of each stream in turn until *work* is issued; returns the number of issues."""
    turn = np.repeat(np.arange(len(programs)), [in_a_row * len(program) for program in programs])
    done = np.concatenate([np.tile(np.array(program.work, np.int64), in_a_row) for program in programs]).cumsum()
    turns, rest = divmod(work - 1, int(done[-1]))
    chosen[:] = np.resize(turn, len(chosen))
    return turns * len(turn) + int(np.searchsorted(done, rest, side="right")) + 1


def _least_served(policy: Fair, work: int, chosen: Ints) -> int:
    """Whole queries, each of the stream that was served least, until *work* is issued; the number of issues."""
    programs, queries = policy.setting.programs, [0] * len(policy.setting.programs)
    done = [np.cumsum(program.work) for program in programs]
    issues = 0
    while work > 0 and issues < len(chosen):
        stream = min(range(len(programs)), key=lambda stream: (policy.share(stream, queries[stream]), stream))
        count = min(int(np.searchsorted(done[stream], work)) + 1, len(programs[stream]), len(chosen) - issues)
        chosen[issues : issues + count] = stream
        issues, work = issues + count, work - int(done[stream][count - 1])
        queries[stream] += 1
    return issues

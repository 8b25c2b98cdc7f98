"""Compiled runs of saturated streams: the order of issues from a kernel instead of from the plain loop.

Only the order comes from here; its times are replayed like any other order's. Policies without a
kernel, and runs a kernel does not cover, go through the plain engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from weft.base.errors import WorkloadError
from weft.engine.policies.aimt import AiMt
from weft.engine.policies.base import Policy, Setting
from weft.engine.policies.in_order import DoubleBuffer, Fair, Fifo, RoundRobin
from weft.engine.policies.layerweaver import Layerweaver
from weft.engine.policies.least_shares import WithLeastShares
from weft.engine.policies.weft import Weft
from weft.kernels.aimt import weave_aimt
from weft.kernels.band import KernelBand
from weft.kernels.buffer import StreamLayers
from weft.kernels.greedy import weave_greedy
from weft.kernels.in_order import order_queries
from weft.kernels.replay import COMPUTE_END, replay
from weft.kernels.rollout import RolloutRules, RolloutStreams, weave_rollout

Ints = npt.NDArray[np.int64]

MOST_ISSUES = 50_000_000
"""Most layers that a run may issue: its order and its replayed times take 40 bytes per issue, 2 GB at this limit."""


def layer_arrays(setting: Setting) -> StreamLayers:
    """Return the layers of all streams as arrays."""
    fetch = np.concatenate([np.array(program.fetch, np.int64) for program in setting.programs])
    compute = np.concatenate([np.array(program.compute, np.int64) for program in setting.programs])
    offsets = np.cumsum([0, *(len(program) for program in setting.programs)], dtype=np.int64)
    return StreamLayers(fetch, compute, offsets)


def replay_order(policy: Policy, chosen: Ints) -> Ints:
    """Return the times at which the device runs the order that a policy chose; *chosen*: the stream of each issue.

    Shape (issues, 4), in ticks: start and end of the fetch, start and end of the compute (COMPUTE_END).
    """
    times, setting = np.empty((len(chosen), 4), np.int64), policy.setting
    replay(*layer_arrays(setting), setting.buffer, chosen, times, in_step=type(policy) is DoubleBuffer)
    return times


def compiled_order(policy: Policy, work: int, quota: Sequence[int] | None) -> Ints | None:
    """Return the stream of each issue as the policy's kernel chooses it; None if no kernel covers the policy.

    work: ticks of work to issue (``Program.work``). quota: the queries that each stream may issue; None: no limit.
    Raises WorkloadError beyond ``MOST_ISSUES``.
    """
    if type(policy) is WithLeastShares:
        return _insert_least_shares(policy, work)
    kernel = _select_kernel(policy, work, quota)
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


def _insert_least_shares(policy: WithLeastShares, work: int) -> Ints | None:
    """Return the order of the woven streams with the layers of the other streams inserted where they are due.

    work: ticks of work to issue. None if no kernel covers the policy that weaves.
    """
    programs, weave = policy.setting.programs, compiled_order(policy.rule, work, quota=None)
    if weave is None:
        return None
    # A layer goes behind the woven layer in whose time it becomes due, as ``WithLeastShares.decide`` issues it.
    ends = replay_order(policy.rule, weave)[:, COMPUTE_END]
    dues = [policy.dues(stream, int(ends[-1])) for stream in policy.at_least]
    streams = np.repeat(policy.at_least, [len(layers) for layers in dues])
    all_dues = np.concatenate(dues)
    places = np.where(all_dues > 0, np.searchsorted(ends, all_dues) + 1, 0)
    order = np.insert(np.array(policy.woven)[weave], places, streams)
    ticks = np.zeros(len(order), np.int64)
    for stream, program in enumerate(programs):
        issues = order == stream
        ticks[issues] = np.resize(np.array(program.work, np.int64), int(issues.sum()))
    return order[: np.searchsorted(np.cumsum(ticks), work) + 1]


def _select_kernel(policy: Policy, work: int, quota: Sequence[int] | None) -> Callable[[Ints], int] | None:
    """Return a function that fills an array with the stream of each issue and returns the number of issues.

    None if no kernel covers the policy. work, quota: as of ``compiled_order``.
    """
    setting = policy.setting
    layers = layer_arrays(setting)
    compute_bound = np.array([program.compute_bound for program in setting.programs])
    fresh_band = partial(_kernel_band, policy, quota)
    if type(policy) is Weft:  # not isinstance: a subclass may decide otherwise, so it runs in the plain loop
        gains = np.concatenate(policy.gains).astype(np.int64)
        streams = RolloutStreams(layers.fetch, layers.compute, gains, layers.offsets, compute_bound)
        rules = RolloutRules(
            setting.buffer, int(layers.fetch.max()), *policy.prices, *policy.distances, policy.band.max_lag_units
        )
        limits = np.array(quota if quota else [-1] * len(setting.programs), np.int64)
        return lambda chosen: weave_rollout(streams, rules, policy.length, policy.commit, work, limits, chosen)
    if type(policy) is Layerweaver and not policy.disabled:
        return lambda chosen: weave_greedy(layers, compute_bound, setting.buffer, work, chosen, fresh_band())
    if type(policy) is AiMt:
        return lambda chosen: weave_aimt(layers, setting.buffer, policy.thresholds, work, chosen, fresh_band())
    if type(policy) in (Fifo, DoubleBuffer, RoundRobin, Fair, Layerweaver):  # layerweaver's failsafe is fifo
        ticks = np.concatenate([np.array(program.work, np.int64) for program in setting.programs])
        turns = _turn_factors(policy)
        return lambda chosen: order_queries(ticks, layers.offsets, *turns, work, chosen, fresh_band())
    return None


def _turn_factors(policy: Policy) -> tuple[Ints, int]:
    """Return the factors and the divisor of ``order_queries``: next is the least ``queries * factor // divisor``."""
    setting = policy.setting
    if type(policy) is Fair:
        totals = [program.total_work for program in setting.programs]
        return np.array(totals) * len(totals), setting.rounds * sum(totals)
    # The next stream follows after a query (round robin), or after all queries of a stream (fifo).
    return np.ones(len(setting.programs), np.int64), 1 if type(policy) is RoundRobin else setting.rounds


def _kernel_band(policy: Policy, quota: Sequence[int] | None) -> KernelBand | None:
    """Return the policy's band in its kernel's form, at the start of a run; None for a policy without one."""
    if policy.band is None:
        return None
    gains = np.concatenate(policy.band.gains(policy.setting.programs)).astype(np.int64)
    return KernelBand.at_start(gains, policy.band.max_lag_units, quota, len(policy.setting.programs))

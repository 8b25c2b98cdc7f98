"""Runs of streams that always have work, by the plain engine and by the compiled loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.engine import Engine, SaturatedStreams, SimulatedNpu
from weft.engine.compiled import compiled_order, replay_order
from weft.engine.policies import Option, Setting, make_policy

OPTIONS: dict[str, Mapping[str, Option]] = {
    "layerweaver": {"failsafe": False},
    "aimt": {},
    "weft": {"horizon": 3, "commit": 3},
    "fifo": {},
    "round-robin": {},
    "fair": {},
    "double-buffer": {},
}
"""The policies whose orders come from ``compiled``, so that it is used, and the plain twin is done in time."""


def ticks_of_work(setting: Setting, quota: Sequence[int] | None) -> int:
    """Ticks of work of a run."""
    counts = quota or [setting.rounds] * len(setting.programs)
    return sum(count * p.total_work for count, p in zip(counts, setting.programs, strict=True))


def plain_run(name: str, setting: Setting, quota: Sequence[int] | None, options: Mapping[str, Option]):
    """Order and times from the plain engine."""
    executor = SimulatedNpu(setting)
    policy = make_policy(name, setting, options)
    Engine(SaturatedStreams(setting, policy.band, ticks_of_work(setting, quota), quota), policy, executor).run()
    return [task.stream for task, _ in executor.log], [tuple(times) for _, times in executor.log]


def compiled_run(name: str, setting: Setting, quota: Sequence[int] | None, options: Mapping[str, Option]):
    """Order and times from the kernels."""
    policy = make_policy(name, setting, options)
    order = compiled_order(policy, ticks_of_work(setting, quota), quota)
    assert order is not None, "no kernel was used"
    return order.tolist(), [tuple(times) for times in replay_order(policy, order).tolist()]

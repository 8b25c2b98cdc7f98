"""The best thresholds for AI-MT on a set of workloads: a grid over both, as Layerweaver tuned it (section IV-B).

One pair of thresholds serves all workloads of a device; the pair with the best geometric mean of
system throughput wins. Every grid point is one run of the compiled rule per workload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.bound import alone_ticks
from weft.devices import Npu
from weft.errors import WorkloadError
from weft.kernels.aimt import weave_aimt
from weft.kernels.replay import replay
from weft.policies.aimt import AiMt
from weft.policies.base import Setting
from weft.profiles import Profile
from weft.program import Clock, lower

Ints = npt.NDArray[np.int64]

COMPUTE_THRESHOLDS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.2)
MEMORY_THRESHOLDS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)


class GridPoint(NamedTuple):
    """One pair of thresholds (shares of the weight buffer) and what it came to."""

    compute_threshold: float
    memory_threshold: float
    stp: float
    """Geometric mean over the workloads."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Every point of the grid, by compute threshold and then by memory threshold."""

    points: tuple[GridPoint, ...]

    @property
    def best(self) -> GridPoint:
        """The highest throughput; among equals the first."""
        return max(self.points, key=lambda point: point.stp)

    @property
    def options(self) -> dict[str, float]:
        """The best pair as options of the policy ``aimt``."""
        return {"compute_threshold": self.best.compute_threshold, "memory_threshold": self.best.memory_threshold}


class _Workload(NamedTuple):
    """Co-located streams as the kernels take them, and how long each query takes alone."""

    setting: Setting
    fetch: Ints
    compute: Ints
    first: Ints
    alone: tuple[float, ...]
    issue_work: int


def sweep_aimt(
    workloads: Sequence[Sequence[Profile]],
    npu: Npu,
    *,
    queries: int = 20,
    compute_thresholds: Sequence[float] = COMPUTE_THRESHOLDS,
    memory_thresholds: Sequence[float] = MEMORY_THRESHOLDS,
    progress: Callable[[int, int], None] | None = None,
) -> Sweep:
    """Run ``aimt`` at every pair of thresholds on every workload, *queries* rounds each.

    progress: called with the grid points done and their number.
    """
    if not workloads or not compute_thresholds or not memory_thresholds:
        raise WorkloadError("a sweep needs at least one workload and one value of each threshold")
    prepared = [_prepare(profiles, npu, queries) for profiles in workloads]
    grid = [(compute, memory) for compute in compute_thresholds for memory in memory_thresholds]
    points = []
    for done, (compute, memory) in enumerate(grid):
        if progress:
            progress(done, len(grid))
        logs = [math.log(_stp(workload, compute, memory)) for workload in prepared]
        points.append(GridPoint(compute, memory, math.exp(math.fsum(logs) / len(logs))))
    return Sweep(tuple(points))


def _prepare(profiles: Sequence[Profile], npu: Npu, queries: int) -> _Workload:
    programs = tuple(lower(profile, npu) for profile in profiles)
    setting = Setting(programs, Clock.of(npu).buffer, queries)
    return _Workload(
        setting,
        np.concatenate([np.array(program.fetch, np.int64) for program in programs]),
        np.concatenate([np.array(program.compute, np.int64) for program in programs]),
        np.cumsum([0, *map(len, programs)], dtype=np.int64),
        tuple(alone_ticks(program, setting.buffer) for program in programs),
        queries * sum(program.total_work for program in programs),
    )


def _stp(workload: _Workload, compute_threshold: float, memory_threshold: float) -> float:
    """System throughput of one run; the queries in flight at its end count by their share of the model's work."""
    setting = workload.setting
    thresholds = AiMt(setting, compute_threshold, memory_threshold).thresholds
    layers = (workload.fetch, workload.compute, workload.first)
    chosen = np.empty(1024 + 2 * setting.rounds * len(workload.fetch), np.int64)
    while (issues := weave_aimt(*layers, setting.buffer, *thresholds, workload.issue_work, chosen)) == len(chosen):
        chosen = np.empty(2 * len(chosen), np.int64)
    times = np.empty((issues, 4), np.int64)
    replay(*layers, setting.buffer, chosen[:issues], times)
    served = 0.0
    for stream, (program, alone) in enumerate(zip(setting.programs, workload.alone, strict=True)):
        queries, layers_left = divmod(int((chosen[:issues] == stream).sum()), len(program))
        served += (queries + sum(program.work[:layers_left]) / program.total_work) * alone
    return served / float(times[-1, 3])

"""The best thresholds for AI-MT on a set of workloads: a grid over both, as Layerweaver tuned it (section IV-B).

One pair of thresholds serves all workloads of a device; the pair with the best geometric mean of
system throughput wins. Every grid point is one run of the compiled rule per workload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.base.errors import WorkloadError
from weft.devices import Npu
from weft.devices.costs.layer_costs import Profile
from weft.engine.policies.aimt import AiMt
from weft.engine.trial import TrialJudge
from weft.simulation.saturated import make_setting
from weft.workloads import Saturated

COMPUTE_THRESHOLDS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.2)
MEMORY_THRESHOLDS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
"""Values that are tried, closer together where results change most: near 0 and 1."""


class GridPoint(NamedTuple):
    """A pair of thresholds (shares of the weight buffer) and its throughput."""

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
        """The point with the highest throughput; among equals the first."""
        return max(self.points, key=lambda point: point.stp)

    @property
    def options(self) -> dict[str, float]:
        """The best pair as options of the policy ``aimt``."""
        return {"compute_threshold": self.best.compute_threshold, "memory_threshold": self.best.memory_threshold}


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

    progress: called with the number of grid points done and the number of all.
    """
    if not workloads or not compute_thresholds or not memory_thresholds:
        raise WorkloadError("a sweep needs at least one workload and one value of each threshold")
    workload = Saturated(queries)
    settings = [make_setting(profiles, npu, workload, spill=True) for profiles in workloads]
    judges = [TrialJudge.of(setting) for setting in settings]
    grid = [(compute, memory) for compute in compute_thresholds for memory in memory_thresholds]
    points = []
    for done, (compute, memory) in enumerate(grid):
        if progress:
            progress(done, len(grid))
        stps = [sum(judge.shares(AiMt(s, compute, memory))) for s, judge in zip(settings, judges, strict=True)]
        logs = list(map(math.log, stps))
        points.append(GridPoint(compute, memory, math.exp(math.fsum(logs) / len(logs))))
    return Sweep(tuple(points))

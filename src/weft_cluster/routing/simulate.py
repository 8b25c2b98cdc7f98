"""``simulate_cluster``: a placement and a router under sampled or recorded requests, and what it came to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError
from weft.kernels import request_state as k
from weft_cluster.placing.demand import CLOCK
from weft_cluster.routing import compiled as compiled_run
from weft_cluster.routing import plain as plain_run
from weft_cluster.routing.cluster import Cluster, ClusterSetting
from weft_cluster.routing.lowered import ClusterTally, LoweredCluster, in_ticks, lower_cluster
from weft_cluster.routing.traffic import Day, RequestBlock, generated

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ClusterRun:
    """What became of the requests, warm-up left out."""

    setting: ClusterSetting
    models: tuple[str, ...]
    machines: tuple[str, ...]
    duration_s: float
    arrived: Ints
    """(models)."""
    late: Ints
    """(models): answered after their deadlines."""
    refused: Ints
    """(models): found no place in a queue."""
    lost: Ints
    """(models): on a machine that went down, or sent to one that was down."""
    latency_s: Floats
    """(models): the mean from a client's request to its answer; NaN where nothing was answered."""
    by_machine: Ints
    """(machines): requests that were sent there."""
    missed_by_machine: Ints
    busy: Floats
    """(machines): share of the time until it was through that its array, as simulated, was taken."""

    def __repr__(self) -> str:
        return f"ClusterRun({self.setting.router}: {self.arrived.sum()} requests, {self.missed:.3%} missed)"

    @property
    def missed_by_model(self) -> Floats:
        """(models): share of the requests that were late, refused or lost."""
        return np.asarray((self.late + self.refused + self.lost) / np.maximum(1, self.arrived))

    @property
    def missed(self) -> float:
        """The same of all requests."""
        return float((self.late + self.refused + self.lost).sum() / max(1, self.arrived.sum()))

    @property
    def attainment(self) -> float:
        """Share of the requests that were on time."""
        return 1 - self.missed

    @property
    def mean_latency_s(self) -> float | None:
        answered = self.arrived - self.refused - self.lost
        return float(np.nansum(self.latency_s * answered) / answered.sum()) if answered.sum() else None

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the JSON file (docs/formats.md)."""
        missed, latency = (
            self.missed_by_model,
            [None if np.isnan(seconds) else seconds for seconds in self.latency_s.tolist()],
        )
        return {
            "router": self.setting.router,
            "attainment": self.attainment,
            "requests": int(self.arrived.sum()),
            "late": int(self.late.sum()),
            "refused": int(self.refused.sum()),
            "lost": int(self.lost.sum()),
            "mean_latency_s": self.mean_latency_s,
            "models": [
                {"model": model, "requests": count, "missed": share, "mean_latency_s": mean}
                for model, count, share, mean in zip(
                    self.models, self.arrived.tolist(), missed.tolist(), latency, strict=True
                )
            ],
            "machines": [
                {"machine": name, "requests": count, "missed": missed, "busy": busy}
                for name, count, missed, busy in zip(
                    self.machines,
                    self.by_machine.tolist(),
                    (self.missed_by_machine / np.maximum(1, self.by_machine)).tolist(),
                    self.busy.tolist(),
                    strict=True,
                )
            ],
        }


def simulate_cluster(
    cluster: Cluster,
    setting: ClusterSetting | None = None,
    *,
    duration_s: float = 60.0,
    day: Day | None = None,
    requests: Iterable[RequestBlock] | None = None,
    seed: int = 0,
    compiled: bool = True,
) -> ClusterRun:
    """Route requests to the machines of a cluster and serve them there.

    day: how all rates rise and fall. requests: in place of those that are sampled by the cluster's rates; for models by
    their numbers. compiled: False runs the plain engine, with the same answers.
    """
    how = setting or ClusterSetting()
    if how.warmup_s >= duration_s:
        raise InputError(f"warmup_s = {how.warmup_s:g} leaves nothing of duration_s = {duration_s:g}")
    sampled = generated(cluster.rates, cluster.cv, day or Day(), duration_s, seed) if requests is None else requests
    lowered, ticked = lower_cluster(cluster, how), in_ticks(sampled, seed)
    run = compiled_run.serve if compiled else plain_run.serve
    return _count_run(cluster, how, lowered, run(lowered, how, ticked), duration_s)


def _count_run(
    cluster: Cluster, setting: ClusterSetting, lowered: LoweredCluster, tally: ClusterTally, duration_s: float
) -> ClusterRun:
    counts, models = tally.counts, np.array(lowered.models, np.int64)
    nodes = np.array([placed.node for placed in cluster.placed], np.int64)
    late = counts[:, k.VIOLATED] - counts[:, k.DROPPED] - counts[:, k.REFUSED]
    answered = counts[:, k.COMPLETED]
    passed = (counts[:, k.LATENCY_SUM] + answered * np.array(lowered.besides, np.int64)) * CLOCK.tick_s

    def summed(values: npt.NDArray[Any], by: Ints, size: int) -> npt.NDArray[Any]:
        sums = np.zeros(size, values.dtype)
        np.add.at(sums, by, values)
        return sums

    def by_model(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return summed(values, models, len(cluster.models))

    with np.errstate(invalid="ignore"):
        latency = by_model(passed) / by_model(answered)
    return ClusterRun(
        setting=setting,
        models=cluster.models,
        machines=tuple(node.name for node in cluster.nodes),
        duration_s=duration_s,
        arrived=by_model(counts[:, k.ARRIVED]),
        late=by_model(late),
        refused=by_model(counts[:, k.REFUSED]),
        lost=by_model(counts[:, k.DROPPED]),
        latency_s=latency,
        by_machine=summed(counts[:, k.ARRIVED], nodes, len(cluster.nodes)),
        missed_by_machine=summed(counts[:, k.VIOLATED], nodes, len(cluster.nodes)),
        busy=np.asarray(tally.busy / np.maximum(tally.through, CLOCK.ticks(duration_s)), np.float64),
    )

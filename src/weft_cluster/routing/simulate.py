"""``simulate_cluster``: a placement and a router under sampled or recorded requests, and the counts of the run."""

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
    """The results of a simulated run, without the warm-up."""

    setting: ClusterSetting
    models: tuple[str, ...]
    machines: tuple[str, ...]
    duration_s: float
    arrived: Ints
    """(models): requests."""
    late: Ints
    """(models): requests answered after their deadlines."""
    refused: Ints
    """(models): requests that found a full queue."""
    lost: Ints
    """(models): requests on a machine that failed, or sent to one that was down."""
    latency_s: Floats
    """(models): mean time from a client's request to its answer; NaN if no request was answered."""
    by_machine: Ints
    """(machines): requests that were sent to it."""
    missed_by_machine: Ints
    """(machines): requests sent to it that were late, refused or lost."""
    busy: Floats
    """(machines): share of the time, until its last work ended, in which the simulated array was busy."""

    def __repr__(self) -> str:
        return f"ClusterRun({self.setting.router}: {self.arrived.sum()} requests, {self.missed:.3%} missed)"

    @property
    def missed_by_model(self) -> Floats:
        """The share of each model's requests that were late, refused or lost."""
        return np.asarray((self.late + self.refused + self.lost) / np.maximum(1, self.arrived))

    @property
    def missed(self) -> float:
        """Share of all requests that were late, refused or lost."""
        return float((self.late + self.refused + self.lost).sum() / max(1, self.arrived.sum()))

    @property
    def attainment(self) -> float:
        """Share of the requests that were on time."""
        return 1 - self.missed

    @property
    def mean_latency_s(self) -> float | None:
        """Mean latency of all answered requests; None if there is none."""
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

    day: how all rates rise and fall. requests: blocks of requests to use instead of sampling by the cluster's rates;
    models are given by number. compiled: False runs the plain engine, with the same results. InputError if the warm-up
    is longer than the run.
    """
    setting = setting or ClusterSetting()
    if setting.warmup_s >= duration_s:
        raise InputError(f"warmup_s = {setting.warmup_s:g} leaves nothing of duration_s = {duration_s:g}")
    sampled = generated(cluster.rates, cluster.cv, day or Day(), duration_s, seed) if requests is None else requests
    lowered, ticked = lower_cluster(cluster, setting), in_ticks(sampled, seed)
    run = compiled_run.serve if compiled else plain_run.serve
    return _count_run(cluster, setting, lowered, run(lowered, setting, ticked), duration_s)


def _count_run(
    cluster: Cluster, setting: ClusterSetting, lowered: LoweredCluster, tally: ClusterTally, duration_s: float
) -> ClusterRun:
    """Sum the counts of a run by model and by machine, and add the time in the network to latencies."""
    counts, models = tally.counts, np.array(lowered.models, np.int64)
    nodes = np.array([placed.node for placed in cluster.placed], np.int64)
    late = counts[:, k.VIOLATED] - counts[:, k.DROPPED] - counts[:, k.REFUSED]
    answered = counts[:, k.COMPLETED]
    latency_sums_s = (counts[:, k.LATENCY_SUM] + answered * np.array(lowered.overhead, np.int64)) * CLOCK.tick_s

    def summed(values: npt.NDArray[Any], by: Ints, size: int) -> npt.NDArray[Any]:
        """Sum *values*, one per stream, by the group number of each stream."""
        sums = np.zeros(size, values.dtype)
        np.add.at(sums, by, values)
        return sums

    def by_model(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return summed(values, models, len(cluster.models))

    with np.errstate(invalid="ignore"):
        latency = by_model(latency_sums_s) / by_model(answered)
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

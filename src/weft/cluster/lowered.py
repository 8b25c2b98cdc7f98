"""A cluster in ticks: what every replica takes, is due by, and is taken to take by gates. For the plain run and the
compiled one alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.cluster.cluster import Cluster
from weft.cluster.pieces import AHEAD, CLOCK, Work, program_of, work_of
from weft.cluster.router import Replica
from weft.cluster.setting import ClusterSetting
from weft.engine.tickets import Terms
from weft.policies import Policy, Setting, make_request_policy
from weft.policies.base import UNBOUNDED_ROUNDS

Ints = npt.NDArray[np.int64]

LONGEST_DEADLINE = 1 << 60
"""Of requests that are never late."""


@dataclass(frozen=True, slots=True, eq=False)
class LoweredCluster:
    """Streams are models on nodes, those of a node beside each other."""

    policies: tuple[Policy, ...]
    """Of each node, with the programs of its streams in order."""
    terms: tuple[Terms, ...]
    """Of each stream; its program is counted from its node's first."""
    replicas: tuple[tuple[Replica, ...], ...]
    """Of each model, as gates see them..."""
    streams: tuple[tuple[int, ...], ...]
    """... and which streams they are."""
    begin: tuple[int, ...]
    """The first stream of each node, and the number of them all."""
    models: tuple[int, ...]
    """(streams): whose requests it serves."""
    besides: tuple[int, ...]
    """(streams): ticks from a client's request to its answer in which its machine does nothing for it."""
    failures: tuple[tuple[int, int, int], ...]
    """Node, and the periods from which and until which it is down."""
    period: int
    warm: int


def lower_cluster(cluster: Cluster, setting: ClusterSetting) -> LoweredCluster:
    """Price every replica on its node."""
    setting.check(cluster)
    counts = np.bincount([each.node for each in cluster.placed], minlength=len(cluster.nodes))
    begin = (0, *np.cumsum(counts).tolist())
    nodes = [cluster.nodes[each.node] for each in cluster.placed]
    works = [work_of(each.need, node.overlap, node.speed) for each, node in zip(cluster.placed, nodes, strict=True)]
    believed = works
    if not setting.knows_speeds:
        believed = [work_of(each.need, node.overlap) for each, node in zip(cluster.placed, nodes, strict=True)]
    ways = [2 * CLOCK.ticks(setting.hop_of(node)) for node in nodes]
    besides = [way + work.besides for way, work in zip(ways, works, strict=True)]
    dues = [_due(cluster.deadlines_s[each.model]) - more for each, more in zip(cluster.placed, besides, strict=True)]
    terms = [
        Terms(programs=stream - begin[each.node], deadline=max(1, due), max_batch=1, timeout=0, priority=1)
        for stream, (each, due) in enumerate(zip(cluster.placed, dues, strict=True))
    ]
    streams: list[list[int]] = [[] for _ in cluster.models]
    for stream, each in enumerate(cluster.placed):
        streams[each.model].append(stream)
    period = CLOCK.ticks(setting.report_s)
    return LoweredCluster(
        policies=tuple(_policy(cluster, setting, works, begin, node) for node in range(len(cluster.nodes))),
        terms=tuple(terms),
        replicas=tuple(_replicas(cluster, believed, ways, own) for own in streams),
        streams=tuple(map(tuple, streams)),
        begin=begin,
        models=tuple(each.model for each in cluster.placed),
        besides=tuple(besides),
        failures=_failures(cluster, setting, period),
        period=period,
        warm=CLOCK.ticks(setting.warmup_s),
    )


def _due(deadline_s: float) -> int:
    return CLOCK.ticks(deadline_s) if deadline_s < LONGEST_DEADLINE * CLOCK.tick_s else LONGEST_DEADLINE


def _policy(
    cluster: Cluster, setting: ClusterSetting, works: Sequence[Work], begin: Sequence[int], node: int
) -> Policy:
    own = range(begin[node], begin[node + 1])
    programs = tuple(program_of(cluster.models[cluster.placed[stream].model], works[stream]) for stream in own)
    buffer = AHEAD * max((program.largest_fetch for program in programs), default=1)
    return make_request_policy(setting.policy, Setting(programs, buffer, UNBOUNDED_ROUNDS))


def _replicas(
    cluster: Cluster, believed: Sequence[Work], ways: Sequence[int], streams: Sequence[int]
) -> tuple[Replica, ...]:
    found, until = [], 0.0
    for stream in streams:
        work, each = believed[stream], cluster.placed[stream]
        until += each.share
        found.append(Replica(each.node, work.compute, work.fetch, ways[stream] + work.besides, until))
    return tuple(found)


def _failures(cluster: Cluster, setting: ClusterSetting, period: int) -> tuple[tuple[int, int, int], ...]:
    """In whole periods, one at least."""
    names = {node.name: number for number, node in enumerate(cluster.nodes)}
    found = []
    for failure in setting.failures:
        begin = CLOCK.ticks(failure.start_s) // period
        end = max(begin + 1, CLOCK.ticks(failure.start_s + failure.length_s) // period)
        found.append((names[failure.machine], begin, end))
    return tuple(found)

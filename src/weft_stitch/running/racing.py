"""Stitched graphs against the clock, in ONNX Runtime: ``race`` runs them in turn, ``GraphTimer`` costs them for a plan.

Contenders are run one after another in every round, so that what else the machine does meets all of them alike. A
plan goes by processor time as long as one thread does the work: others on the machine make a run late, not busy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import StitchError
from weft.runtime.onnxruntime_cpu.sessions import first_line, open_session
from weft.runtime.tensors import Array
from weft_stitch.graph import DYNAMIC, Graph
from weft_stitch.onnx_writer import to_onnx

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Times:
    """One contender's rounds."""

    seconds: tuple[float, ...]
    """By the clock on the wall."""
    busy: tuple[float, ...]
    """Processor time, of all threads together."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def least_s(self) -> float:
        return min(self.seconds)

    @property
    def busy_median_s(self) -> float:
        return statistics.median(self.busy)


class GraphRunner:
    """A graph loaded in ONNX Runtime, with made-up inputs."""

    def __init__(self, graph: Graph, *, threads: int = 1, rows: int = 1, seed: int = 0) -> None:
        self._name = graph.name
        self._session = opened(to_onnx(graph).SerializeToString(), threads, graph.name, optimise=True)
        rng = np.random.default_rng(seed)
        self.feed: dict[str, Array] = {
            each.name: rng.standard_normal([rows if size == DYNAMIC else size for size in each.shape], np.float32)
            for each in graph.inputs
        }

    def __call__(self) -> list[Array]:
        """Run once."""
        return answers(self._session, None, self.feed, self._name)


def opened(source: Path | bytes, threads: int, title: str, *, optimise: bool) -> Any:
    """A session over a graph or a model's file; *title* is what messages call it."""
    try:
        return open_session(source, threads, optimise=optimise)
    except Exception as error:  # the C++ side raises a dozen unrelated kinds
        raise StitchError(f"{title} cannot be loaded by ONNX Runtime: {first_line(error)}") from error


def answers(session: Any, names: Sequence[str] | None, feed: Mapping[str, Array], title: str) -> list[Array]:
    """The outputs *names*, or all, for *feed*."""
    try:
        found: list[Array] = session.run(names, feed)
    except Exception as error:  # see above
        raise StitchError(f"{title} cannot be run by ONNX Runtime: {first_line(error)}") from error
    return found


def race(
    contenders: Mapping[str, Sequence[Graph]],
    *,
    rounds: int = 10,
    warm_ups: int = 2,
    threads: int = 1,
    rows: int = 1,
    clock: Clock = time.perf_counter,
) -> dict[str, Times]:
    """How long each contender takes, round by round; one of several graphs runs them one after another."""
    if rounds < 1:
        raise StitchError(f"{rounds} rounds measure nothing; run at least 1")
    runners = {
        name: [GraphRunner(graph, threads=threads, rows=rows) for graph in graphs]
        for name, graphs in contenders.items()
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for turn in range(warm_ups + rounds):
        for name, mine in runners.items():
            began = clock(), time.process_time()
            for run in mine:
                run()
            ended = clock(), time.process_time()
            if turn >= warm_ups:
                found[name].append((ended[0] - began[0], ended[1] - began[1]))
    columns = {name: zip(*each, strict=True) for name, each in found.items()}
    return {name: Times(*each) for name, each in columns.items()}


def least_seconds(
    contenders: Mapping[str, Sequence[Callable[[], object]]],
    *,
    rounds: int = 10,
    warm_ups: int = 2,
    threads: int = 1,
) -> dict[str, float]:
    """The least time of each contender, which runs all of its parts; processor time, where one thread does the work."""
    clock = time.process_time if threads == 1 else time.perf_counter
    found: dict[str, float] = dict.fromkeys(contenders, inf)
    for turn in range(warm_ups + rounds):
        for name, runs in contenders.items():
            began_s = clock()
            for run in runs:
                run()
            if turn >= warm_ups:
                found[name] = min(found[name], clock() - began_s)
    return found


@dataclass(frozen=True, slots=True)
class GraphTimer:
    """The cost of graphs as they run: the least of several rounds, as whatever disturbs a run adds to it."""

    threads: int = 1
    rounds: int = 10
    warm_ups: int = 2
    rows: int = 1
    """Given for a dimension that is known only at run time."""

    def seconds(self, graphs: Sequence[Graph]) -> list[float]:
        contenders = {str(number): [graph] for number, graph in enumerate(graphs)}
        found = race(contenders, rounds=self.rounds, warm_ups=self.warm_ups, threads=self.threads, rows=self.rows)
        return [min(times.busy if self.threads == 1 else times.seconds) for times in found.values()]

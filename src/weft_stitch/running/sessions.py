"""Time and check stitched graphs in ONNX Runtime: ``race``, ``GraphTimer`` for plans, ``largest_difference``.

A run with one thread is costed by processor time, which other processes on the machine do not lengthen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft.runtime.onnxruntime_cpu.sessions import first_line, open_session
from weft.runtime.tensors import Array
from weft.runtime.timing import Clock, Run, Turns, measure_in_turns, run_all
from weft_stitch.family import Family
from weft_stitch.graph import DYNAMIC, Graph
from weft_stitch.graph_steps import plain_graph
from weft_stitch.lowering import port_name
from weft_stitch.net import Net
from weft_stitch.onnx_writer import to_onnx
from weft_stitch.reading.onnx_source import HALF_TYPES


class GraphRunner:
    """A graph loaded in ONNX Runtime, with random inputs of *rows* rows where sizes are open; a call runs it once."""

    def __init__(self, graph: Graph, *, threads: int = 1, rows: int = 1) -> None:
        self._name = graph.name
        self._session = graph_session(graph, threads, optimise=True)
        rng = np.random.default_rng(0)
        self.feed: dict[str, Array] = {
            tensor.name: rng.standard_normal([rows if size == DYNAMIC else size for size in tensor.shape], np.float32)
            for tensor in graph.inputs
        }

    def __call__(self) -> list[Array]:
        """Run once; return the outputs."""
        return run_session(self._session, None, self.feed, self._name)


def load_session(source: Path | bytes, threads: int, title: str, *, optimise: bool) -> Any:
    """Load a graph or a model's file; ``StitchError`` if ONNX Runtime cannot.

    *source*: the file, or the bytes of the graph. *title*: its name in the message. *optimise*: let ONNX Runtime
    rewrite the graph.
    """
    try:
        return open_session(source, threads, optimise=optimise)
    except Exception as error:  # the C++ side raises a dozen unrelated kinds
        raise StitchError(f"{title} cannot be loaded by ONNX Runtime: {first_line(error)}") from error


def graph_session(graph: Graph, threads: int, *, optimise: bool) -> Any:
    """Load a graph that fits into one protobuf message (2 GB)."""
    return load_session(to_onnx(graph).SerializeToString(), threads, graph.name, optimise=optimise)


def run_session(session: Any, names: Sequence[str] | None, feed: Mapping[str, Array], title: str) -> list[Array]:
    """The outputs *names* (None: all) for the inputs *feed*; ``StitchError``, with the name *title*, if a run fails."""
    try:
        outputs: list[Array] = session.run(names, feed)
    except Exception as error:  # of unrelated kinds, as when loading
        raise StitchError(f"{title} cannot be run by ONNX Runtime: {first_line(error)}") from error
    return outputs


def race(
    contenders: Mapping[str, Sequence[Graph]],
    *,
    rounds: int = 10,
    warm_ups: int = 2,
    threads: int = 1,
    rows: int = 1,
    clock: Clock = time.perf_counter,
) -> dict[str, Turns]:
    """Time contenders in turns; a contender is one graph, or several that run one after another.

    *contenders*: by name. *rows*: the value of sizes that are known only at run time. Returns wall and processor
    seconds of every round.
    """
    if rounds < 1:
        raise StitchError(f"{rounds} rounds measure nothing; run at least 1")
    runners = [[GraphRunner(graph, threads=threads, rows=rows) for graph in graphs] for graphs in contenders.values()]
    measures = [partial(_wall_and_busy_s, runs, clock) for runs in runners]
    times = measure_in_turns(measures, rounds, warm_ups=warm_ups)  # for each contender, a pair of seconds per round
    return {name: Turns(*zip(*pairs, strict=True)) for name, pairs in zip(contenders, times, strict=True)}


def _wall_and_busy_s(runs: Sequence[Run], clock: Clock) -> tuple[float, float]:
    """Run all; return the seconds by *clock*, and the processor seconds of all threads."""
    began_s, busy_s = clock(), time.process_time()
    run_all(runs)
    return clock() - began_s, time.process_time() - busy_s


@dataclass(frozen=True, slots=True)
class GraphTimer:
    """A ``GraphCost`` by running graphs: the fastest of several rounds, as disturbances only add time."""

    threads: int = 1
    rounds: int = 10
    warm_ups: int = 2
    rows: int = 1
    """The value of a size that is known only at run time."""

    def seconds(self, graphs: Sequence[Graph]) -> list[float]:
        """The seconds of each graph: of a processor with one thread, else of the wall clock."""
        contenders = {str(number): [graph] for number, graph in enumerate(graphs)}
        results = race(contenders, rounds=self.rounds, warm_ups=self.warm_ups, threads=self.threads, rows=self.rows)
        return [min(times.busy if self.threads == 1 else times.seconds) for times in results.values()]


_FEED_TYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
"""Types of inputs with which a model's own file is compared; other models are compared as they were read."""

_CHECKED_BATCHES = 3
"""Batches that ``tied_rows`` runs at once, to see whether the answer for a row depends on other rows."""

Feed = Mapping[str, Array]
"""Inputs by name."""


CLOSE = 1e-5
"""Largest difference of an output relative to its largest number: that of float32 sums in another order."""


class Difference(NamedTuple):
    """The largest difference of a graph's outputs to the separate models'."""

    relative: float
    """Relative to the largest number in that output of the separate model.

    A model in half precision is computed in float32 for this.
    """
    output: str
    """The graph's name of the output."""
    rounding_difference: float = 0.0
    """The largest difference to models in half precision, or with rounding, as their files compute."""

    def require(self, allowed: float) -> None:
        """Raise ``StitchError`` if the difference is larger than *allowed*."""
        if self.relative > allowed:
            raise StitchError(
                f"{self.output} differs by {self.relative:.2g} of its largest number from the model alone, "
                f"{allowed:g} is allowed; nothing is made of it (check = False takes it all the same)"
            )


def largest_difference(
    graph: Graph, family: Family, sources: Sequence[Path | None], rows: Sequence[int], *, threads: int = 1
) -> Difference:
    """Run *graph* and its models on the same random inputs; return by how much outputs differ.

    *sources*: the models' files, which ONNX Runtime runs as they are; None: the net as it was read. *rows*: for each
    model, its number of rows, a multiple of its batch.
    """
    rng = np.random.default_rng(0)
    feeds = [
        {port.name: _draw_input(rng, (count, *port.shape), net) for port in net.inputs}
        for net, count in zip(family.nets, rows, strict=True)
    ]
    outputs = _stitched_answers(graph, family, feeds, threads)
    worst, from_files = Difference(0.0, ""), 0.0
    for task, (net, source) in enumerate(zip(family.nets, sources, strict=True)):
        # a file in half precision rounds by itself: the graph is judged by the net in float32, and the difference to
        # the file is reported in addition
        reference = None if net.stored in HALF_TYPES else source
        for port, expected in zip(net.outputs, _answers_alone(net, reference, feeds[task], threads), strict=True):
            name = port_name(family, task, port)
            worst = max(worst, Difference(relative_difference(outputs[name], expected), name))
        if source != reference:
            for port, expected in zip(net.outputs, _answers_alone(net, source, feeds[task], threads), strict=True):
                from_files = max(from_files, relative_difference(outputs[port_name(family, task, port)], expected))
    return worst._replace(rounding_difference=from_files)


def tied_rows(net: Net, close: float, *, threads: int = 1) -> str:
    """The reason why *net* cannot take any number of rows; empty if no answer depends on the other rows of a batch.

    *close*: the relative difference up to which answers are equal.
    """
    rng = np.random.default_rng(0)
    feed = {port.name: _draw_input(rng, (_CHECKED_BATCHES * net.batch, *port.shape), net) for port in net.inputs}
    separate = _answers_alone(net, None, feed, threads)
    session = graph_session(plain_graph(net, dynamic=True), threads, optimise=False)
    names = [port.name for port in net.outputs]
    try:
        together = run_session(session, names, feed, net.name)
    except StitchError:
        return f"runs with the number of rows in its file ({net.batch}) only"
    tied = (name for name, *pair in zip(names, together, separate, strict=True) if relative_difference(*pair) > close)
    return next((f"needs the other rows of a batch for its output {name}" for name in tied), "")


def _draw_input(rng: np.random.Generator, shape: tuple[int, ...], net: Net) -> Array:
    """Random numbers, which half precision can represent if the model is in half precision."""
    drawn = rng.standard_normal(shape, np.float32)
    return drawn.astype(np.float16).astype(np.float32) if net.stored in HALF_TYPES else drawn


def _stitched_answers(graph: Graph, family: Family, feeds: Sequence[Feed], threads: int) -> dict[str, Array]:
    """The outputs of *graph*, by its names, for the inputs of each model."""
    session = graph_session(graph, threads, optimise=True)
    feed = {
        port_name(family, task, port): feeds[task][port.name]
        for task, net in enumerate(family.nets)
        for port in net.inputs
    }
    names = [tensor.name for tensor in graph.outputs]
    return dict(zip(names, run_session(session, names, feed, graph.name), strict=True))


def _answers_alone(net: Net, source: Path | None, feed: Feed, threads: int) -> list[Array]:
    """The outputs of the separate model, computed batch by batch; *source*: its file, or None for the net as read."""
    session = None if source is None else load_session(source, threads, source.name, optimise=False)
    types = {port.name: port.type for port in session.get_inputs()} if session else {}
    if session is None or not all(input_type in _FEED_TYPES for input_type in types.values()):  # run the net as read
        session, types = graph_session(plain_graph(net), threads, optimise=False), {}
    names = [port.name for port in net.outputs]
    batch_outputs = []
    for batch in _batches(feed, net.batch):
        typed = {name: array.astype(_FEED_TYPES[types.get(name, "tensor(float)")]) for name, array in batch.items()}
        batch_outputs.append(run_session(session, names, typed, net.name))
    return [np.concatenate(outputs) for outputs in zip(*batch_outputs, strict=True)]


def _batches(feed: Feed, rows: int) -> Iterator[Feed]:
    """*feed* in batches of *rows* rows."""
    total = len(next(iter(feed.values())))
    for start in range(0, total, rows):
        yield {name: array[start : start + rows] for name, array in feed.items()}


def relative_difference(actual: Array, wanted: Array) -> float:
    """The largest difference, relative to the largest finite number of *wanted*; 0 between equal infinities or NaN.

    Infinite if the shapes differ, or if only one of two numbers is finite.
    """
    if actual.shape != wanted.shape:
        return np.inf
    same = (actual == wanted) | (np.isnan(actual) & np.isnan(wanted))
    if bool(same.all()):
        return 0.0
    differences = np.abs(actual[~same].astype(np.float64) - wanted[~same].astype(np.float64))
    if not bool(np.isfinite(differences).all()):
        return np.inf
    numbers = np.abs(wanted[np.isfinite(wanted)])
    largest = max(float(numbers.max(initial=0.0)), np.finfo(np.float32).tiny)  # never zero
    return float(differences.max() / largest)

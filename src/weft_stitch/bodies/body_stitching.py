"""Joins model files to one body and compares it with the models: ``stitch_body`` returns a ``BodyStitching``.

A *crew* is models with equal weights in a step, a *part* a model's own difference to a shared weight (``body``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from weft.base.errors import StitchError
from weft.runtime.metadata import servable
from weft.runtime.timing import Run, clock_for, least_seconds
from weft_stitch.bodies.adapters import AdaptedBase, LoraAdapter, is_adapter, read_adapter
from weft_stitch.bodies.body import Aligner, Body, BodyValue, Crew, LowRank, crews
from weft_stitch.bodies.body_description import body_metadata
from weft_stitch.bodies.equal_weights import Reference, put_in_order
from weft_stitch.bodies.joining import JoinedBody, join, model_graph, port_name, value_name
from weft_stitch.bodies.probing import (
    MORE,
    SMALL,
    BodyPlace,
    BodySamples,
    Feed,
    Fill,
    find_padding,
    locate_outputs,
    locate_values,
)
from weft_stitch.file_description import tasks_metadata
from weft_stitch.graph import Graph
from weft_stitch.net import Array
from weft_stitch.onnx_writer import refuse_overwriting, write_onnx
from weft_stitch.reading.onnx_program import Constants, ModelProgram, read_program
from weft_stitch.running.sessions import CLOSE, Difference, load_session, relative_difference, run_session

MOST_RACED = 8
"""Limit on the models that are loaded at once for timing, to bound memory; the others are assumed to be as fast."""

ModelRun = Callable[[Feed], list[Array]]
"""Runs a loaded model: inputs by name -> outputs, in order."""


class BodyBench:
    """Runs the models' files for comparison. One model is loaded at a time, since a body may be made of dozens."""

    def __init__(self, body: Body, files: Sequence[Path], threads: int) -> None:
        self._body, self._files, self._threads = body, files, threads
        self._loaded: tuple[int, ModelRun] | None = None
        """The number of the model that is loaded, and how to run it."""

    def alone(self, task: int, feed: Feed) -> dict[str, Array]:
        """Run one model alone: its own file, or the base with its adapter. Returns outputs by name."""
        if self._loaded is None or self._loaded[0] != task:
            self._loaded = None
            self._loaded = task, self._open_alone(task, optimise=False)
        return dict(zip(self._body.outputs[task], self._loaded[1](feed), strict=True))

    def values(self, samples: BodySamples) -> Callable[[int, int, int], dict[BodyValue, Array]]:
        """Return a function that runs a model, given its number, rows and length, and returns all its values."""

        def run(task: int, rows: int, length: int) -> dict[BodyValue, Array]:
            values = self._body.values(task)
            graph = model_graph(self._body, task, values)
            session = self._session(graph, optimise=False)
            # always the largest number of rows, so that runs of fewer have the first of them
            drawn = samples.draw(np.random.default_rng(0), task, MORE[0], length)
            feed = self._rename_feed(task, {name: array[:rows] for name, array in drawn.items()})
            try:
                arrays = run_session(session, [value_name(value) for value in values], feed, graph.name)
            except StitchError as error:
                raise StitchError(f"{error} (with {rows} rows; export it so that it takes any number)") from error
            return dict(zip(values, arrays, strict=True))

        return run

    def outputs(self, samples: BodySamples) -> dict[str, BodyPlace]:
        """Find the axes of rows and lengths in all models' outputs, by the graph's names."""

        def run(task: int, rows: int, length: int) -> dict[str, Array]:
            return self.alone(task, samples.draw(np.random.default_rng(0), task, rows, length))

        return {
            port_name(self._body, task, name): place
            for task in range(self._body.tasks)
            for name, place in locate_outputs(self._body, task, run).items()
        }

    def difference(self, graph: Graph, samples: BodySamples) -> Difference:
        """The largest difference of *graph*'s outputs to those of the separate models.

        Batches have different numbers of rows and, where padding is possible, different lengths.
        """
        session, tasks = self._session(graph, optimise=True), range(self._body.tasks)
        names = [output.name for output in graph.outputs]
        batches, results = [], []
        for seed, lengths in enumerate(_comparison_lengths(samples, len(tasks))):
            rng = np.random.default_rng(seed)
            batches.append([samples.draw(rng, task, 1 + (task + seed) % 3, lengths[task]) for task in tasks])
            outputs = run_session(session, names, self._join_feeds(batches[-1]), graph.name)
            results.append(dict(zip(names, outputs, strict=True)))
        worst = Difference(0.0, "")
        for task in tasks:
            for feeds, joined in zip(batches, results, strict=True):
                for port, expected in self.alone(task, feeds[task]).items():
                    name = port_name(self._body, task, port)
                    worst = max(worst, Difference(relative_difference(joined[name], expected), name))
        return worst

    def unchanged(self, task: int, samples: BodySamples, close: Callable[[Array, Array], bool]) -> bool:
        """Whether a model gives the outputs of its own file if it is computed with the body's weights.

        *close*: compares an output with the expected one.
        """
        feed = samples.draw(np.random.default_rng(0), task, *SMALL)
        session = self._session(model_graph(self._body, task), optimise=False)
        outputs = run_session(session, self._output_names(task), self._rename_feed(task, feed), self._body.names[task])
        pairs = zip(outputs, self.alone(task, feed).values(), strict=True)
        return all(output.shape == expected.shape and close(output, expected) for output, expected in pairs)

    def times_s(self, graph: Graph, samples: BodySamples, length: int) -> dict[str, float]:
        """Seconds of one row of each model: "sequential" one model after another, "stitched" all as one body.

        *length*: tokens per row. The two are timed in turns. Of the separate models only the first
        ``MOST_RACED`` are run, and their time is scaled up to all.
        """
        rng = np.random.default_rng(0)
        feeds = [samples.draw(rng, task, 1, length) for task in range(self._body.tasks)]
        loaded = [self._open_alone(task, optimise=True) for task in range(min(MOST_RACED, len(feeds)))]
        body_session = self._session(graph, optimise=True)
        contenders: dict[str, list[Run]] = {
            "sequential": [partial(model, feed) for model, feed in zip(loaded, feeds, strict=False)],
            "stitched": [partial(body_session.run, None, self._join_feeds(feeds))],
        }
        seconds = least_seconds(contenders, clock=clock_for(self._threads))
        return seconds | {"sequential": seconds["sequential"] * len(feeds) / len(loaded)}

    def _open_alone(self, task: int, *, optimise: bool) -> ModelRun:
        """Load one model; a folder of an adapter is loaded as the base's weights with the adapter."""
        ports, name = list(self._body.outputs[task]), self._body.names[task]
        if not self._files[task].is_dir():
            session = load_session(self._files[task], self._threads, self._files[task].name, optimise=optimise)
            return lambda feed: run_session(session, ports, feed, name)
        session = self._session(model_graph(self._body, task), optimise=optimise)
        output_names = self._output_names(task)
        return lambda feed: run_session(session, output_names, self._rename_feed(task, feed), name)

    def _session(self, graph: Graph, *, optimise: bool) -> Any:
        """Open a session over a graph of any size, by a temporary file (protobuf in memory ends at 2 GB)."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "body.onnx"
            write_onnx(graph, path)
            return load_session(path, self._threads, graph.name, optimise=optimise)

    def _output_names(self, task: int) -> list[str]:
        """The graph's names of a model's outputs."""
        return [port_name(self._body, task, name) for name in self._body.outputs[task]]

    def _join_feeds(self, feeds: Sequence[Feed]) -> Feed:
        """The inputs of all models, by the graph's names."""
        return {name: array for task, feed in enumerate(feeds) for name, array in self._rename_feed(task, feed).items()}

    def _rename_feed(self, task: int, feed: Feed) -> Feed:
        """The inputs of one model, by the graph's names."""
        return {port_name(self._body, task, name): array for name, array in feed.items()}


def _comparison_lengths(samples: BodySamples, tasks: int) -> list[list[int]]:
    """Lengths for each comparison, one per model; unequal ones only if rows can be padded."""
    if samples.fill is None:
        return [[6] * tasks, [9] * tasks]
    return [[6] * tasks, [3 + 5 * task % 7 for task in range(tasks)]]  # equal ones, and from 3 to 9 in no order


BASE = -1
"""The number of the base model while programs are aligned."""
USUAL_LENGTH = 16
"""Tokens per row for timing, and for the warm-up of a server."""

OnStage = Callable[[str, int, int | None], None]
"""Progress callback: the stage, its finished steps, and the number of its steps if known."""


@dataclass(frozen=True, slots=True)
class SharedStep:
    """A step with weights, and the groups of models that share the weights."""

    name: str
    op: str
    bytes: int
    """Bytes of one model's weights."""
    crews: tuple[Crew, ...]
    rank: int = 0
    """The highest rank of the models' low-rank parts; 0 if no model has one."""
    own: tuple[str, ...] = ()
    """Other differences to the shared weights, as text."""


@dataclass(frozen=True, eq=False)
class BodyStitching:
    """Models stitched to one body, with the results of comparing and timing it."""

    body: Body
    files: Mapping[str, Path]
    """Model -> its file, or the folder of its adapter."""
    joined: JoinedBody
    fill: Fill | None
    """The padding value of each input; None where all rows of a batch must have one length."""
    apart_bytes: int
    """Bytes of the weights of the separate models."""
    difference: Difference | None
    """The largest difference to the outputs of the separate models; None if it was not checked."""
    times_s: Mapping[str, float]
    """Seconds for one row of each model, separately and as one body; empty if nothing was timed."""
    reordered: int = 0
    """Number of products whose weights equal another model's except for the order of channels."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.body.names

    @property
    def graph(self) -> Graph:
        return self.joined.graph

    @property
    def long(self) -> bool:
        """Whether rows may have any length."""
        return any(port.long for ports in self.body.ports for port in ports.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the graph's constants."""
        return sum(array.nbytes for array in self.graph.constants.values())

    @cached_property
    def shared(self) -> tuple[SharedStep, ...]:
        """All steps with weights, in order."""
        return tuple(_shared_steps(self.body))

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the ONNX file: the models in it, and how they share weights."""
        entries = tasks_metadata([self._task_entry(task) for task in range(self.body.tasks)])
        return entries | body_metadata(self.body, self.joined) if self.long else entries

    def _task_entry(self, task: int) -> dict[str, Any]:
        """What the server reads about one model."""
        ports, outputs = self.body.ports[task], self.body.outputs[task]
        entry: dict[str, Any] = {
            "name": self.names[task],
            "inputs": {port: port_name(self.body, task, port) for port in ports},
            "outputs": {port: port_name(self.body, task, port) for port in outputs},
        }
        if self.body.exits[task]:
            entry["exits"] = self.body.exits[task]
        if self.long:
            entry["length"] = USUAL_LENGTH
            entry["fill"] = None if self.fill is None else {port: self.fill[port] for port in ports}
        return entry

    def outputs(self, path: str | os.PathLike[str]) -> tuple[Path, ...]:
        """The files that ``to_onnx`` writes."""
        return (Path(path),)

    def to_onnx(self, path: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Write an ONNX file, which ``weft serve`` serves as the separate models."""
        target = Path(path)
        refuse_overwriting(self.files.values(), [target])
        write_onnx(self.graph, target, self.metadata)
        return self.outputs(path)


def stitch_body(
    files: Sequence[str | os.PathLike[str]],
    names: Sequence[str] | None = None,
    *,
    tolerance: float = 0.0,
    base: str | os.PathLike[str] | None = None,
    check: bool = True,
    measure: bool = True,
    threads: int = 1,
    on_stage: OnStage = lambda stage, done, of: None,
) -> BodyStitching:
    """Stitch models that share whole weights to one body.

    *files*: ONNX files, and folders of adapters, for which *base* is needed. *tolerance*: the fraction of a weight that
    may be lost where a model differs from *base*, or else from the first model, by something of low rank. With 0 only
    equal weights are shared, and answers are the models' own. Raises ``StitchError`` if models cannot be joined or,
    without tolerance, answer differently.
    """
    body, separate_bytes = _read_body(files, names, tolerance, base, on_stage)
    bench = BodyBench(body, [Path(file) for file in files], threads)
    samples = find_padding(body, bench.alone, _close)
    places = locate_values(body, bench.values(samples))
    reordered = put_in_order(body, places, lambda task: bench.unchanged(task, samples, _close))
    outputs = bench.outputs(samples)
    joined = join(body, places, samples.fill, outputs)
    on_stage("comparing with the models", 0, None)
    difference = bench.difference(joined.graph, samples) if check else None
    if difference and not tolerance:
        difference.require(CLOSE)
    on_stage("racing", 0, None)
    times = bench.times_s(joined.graph, samples, USUAL_LENGTH) if measure else {}
    paths = dict(zip(body.names, map(Path, files), strict=True))
    return BodyStitching(body, paths, joined, samples.fill, separate_bytes, difference, times, reordered)


def _close(one: Array, other: Array) -> bool:
    return relative_difference(one, other) <= CLOSE


def _read_body(
    files: Sequence[str | os.PathLike[str]],
    names: Sequence[str] | None,
    tolerance: float,
    base: str | os.PathLike[str] | None,
    on_stage: OnStage,
) -> tuple[Body, int]:
    """Read the models into one body; return it, and the total bytes of the separate models."""
    constants, separate_bytes = Constants(), 0
    aligner = Aligner(constants)
    reference = adapted_base = None
    if base is not None:
        program = read_program(base, constants)
        aligner.assign(BASE, program)
        reference = Reference(aligner.steps, BASE, constants) if tolerance else None
        adapted_base = AdaptedBase(program, aligner.steps_of_nodes[BASE], constants)
    taken_names: list[str] = []
    for number, file in enumerate(files):
        on_stage("reading", number, len(files))
        adapter = read_adapter(Path(file)) if adapted_base and is_adapter(file) else None
        name = names[number] if names else ""
        if adapted_base and adapter:
            program = adapted_base.named(name or Path(file).name)
        else:
            program = read_program(file, constants, name)
        if not servable(program.name) or program.name in taken_names:
            raise StitchError(f"{program.name!r} is no name for one model, or for two; give names = a,b,c")
        taken_names.append(program.name)
        separate_bytes += _weight_bytes(program, constants)
        task = aligner.add(program)
        if adapted_base and adapter:
            _adapt(adapted_base, aligner, task, adapter, file)
        elif reference:
            reference.bring_near(aligner.steps, task, tolerance)
        reference = reference or Reference(aligner.steps, task, constants)  # without a base, the first model
    for step in aligner.steps:
        step.contents.pop(BASE, None)  # the base is no model of the body
    return aligner.body(), separate_bytes


def _adapt(base: AdaptedBase, aligner: Aligner, task: int, adapter: LoraAdapter, file: str | os.PathLike[str]) -> None:
    """Give model *task* the weights of its adapter; messages begin with the adapter's folder."""
    try:
        base.adapt(aligner.steps, task, adapter)
    except StitchError as error:
        raise StitchError(f"{file}: {error}") from error


def _weight_bytes(program: ModelProgram, constants: Constants) -> int:
    """Bytes of the constants that a model stores; equal arrays count once."""
    return sum(constants.arrays[key].nbytes for key in constants.source_arrays(program.constants.values()))


def _shared_steps(body: Body) -> Iterator[SharedStep]:
    """The steps that have weights, in order."""
    arrays = body.constants.arrays
    for step in body.steps:
        if not step.contents:
            continue
        task = min(step.contents)
        weights = [arrays[key] for key in step.contents[task] if key in arrays and arrays[key].dtype.kind == "f"]
        size = sum(array.nbytes for array in weights if array.ndim)
        if size:
            parts, lines = step.parts.values(), max((len(table.indices) for table in step.lines.values()), default=0)
            rank = max((part.rank for part in parts if part.kind == "low rank"), default=0)
            differences = dict.fromkeys(_part_text(part) for part in parts if part.kind != "low rank")
            own = (*differences, *([f"{lines} lines"] if step.lines else []))
            yield SharedStep(step.names[task], step.node.op, size, crews(step.contents), rank, own)


def _part_text(part: LowRank) -> str:
    return f"{part.rank} {part.kind}" if part.rank else part.kind

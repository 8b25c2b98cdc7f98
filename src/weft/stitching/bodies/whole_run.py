"""From files to one body that was compared with them: ``stitch_body``, and ``BodyStitching``, what is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import StitchError
from weft.stitching.bodies.body import Aligner, Body, BodyValue, Crew, crews
from weft.stitching.bodies.joining import Fill, alone, exposed, join, port_name
from weft.stitching.bodies.nearness import Reference
from weft.stitching.bodies.places import see
from weft.stitching.bodies.samples import BodySamples, Feed, find
from weft.stitching.graph import Graph
from weft.stitching.metadata import of_tasks, servable
from weft.stitching.net import Array
from weft.stitching.onnx_writer import to_onnx, write_onnx
from weft.stitching.reading.onnx_program import Constants, ModelProgram, read_program
from weft.stitching.running.checking import Difference, relative_difference
from weft.stitching.running.racing import answers, least_seconds, opened

CLOSE = 1e-5
"""By so much of its largest number an output may differ from the model's own."""
BASE = -1
"""The number of the model that the others were made from, where it is given."""
USUAL_LENGTH = 16
"""Of inputs that are timed, and that a server warms up at."""

OnStage = Callable[[str, int, int | None], None]
"""Called with a stage, the steps of it that are done, and of how many."""


@dataclass(frozen=True, slots=True)
class SharedStep:
    """A step that reads weights, and who has them in common."""

    name: str
    op: str
    bytes: int
    """Of the weights of one model."""
    crews: tuple[Crew, ...]
    rank: int = 0
    """The highest of what models add to them."""


@dataclass(frozen=True, eq=False)
class BodyStitching:
    """Models as one body."""

    body: Body
    files: Mapping[str, Path]
    """The models' files by their names."""
    graph: Graph
    fill: Fill | None
    """What makes the inputs of a model longer; None where all must be of one length."""
    apart_bytes: int
    """What the models hold, each by itself."""
    difference: Difference | None
    """The largest to the models alone."""
    times_s: Mapping[str, float]
    """A row of each model, one after another and as one body; empty where nothing was measured."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.body.names

    @property
    def weight_bytes(self) -> int:
        """What the graph holds."""
        return sum(each.nbytes for each in self.graph.constants.values())

    @cached_property
    def shared(self) -> tuple[SharedStep, ...]:
        """All steps with weights, in order."""
        return tuple(_shared_steps(self.body))

    @property
    def metadata(self) -> dict[str, str]:
        """What an ONNX file of it says of its models."""
        return of_tasks([self._told(task) for task in range(self.body.tasks)])

    def _told(self, task: int) -> dict[str, Any]:
        ports, outputs = self.body.ports[task], self.body.outputs[task]
        told: dict[str, Any] = {
            "name": self.names[task],
            "inputs": {port: port_name(self.body, task, port) for port in ports},
            "outputs": {port: port_name(self.body, task, port) for port in outputs},
        }
        if any(port.long for port in ports.values()):
            told["length"] = USUAL_LENGTH
            told["fill"] = None if self.fill is None else {port: self.fill[port] for port in ports}
        return told

    def outputs(self, path: str | os.PathLike[str]) -> tuple[Path, ...]:
        """The files that ``to_onnx`` writes."""
        return (Path(path),)

    def to_onnx(self, path: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Write it as an ONNX file, which ``weft serve`` serves as the models it is made of."""
        target = Path(path)
        if target.resolve() in [file.resolve() for file in self.files.values()]:
            raise StitchError(f"{target} is one of the models; write to another file")
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
    """Make one body of models that share whole weights.

    tolerance: the part of a weight that may be lost where models differ from *base*, or from the first of them, by
    something of low rank; 0: only what is equal is shared, and answers are the models' own.
    """
    body, apart = _read(files, names, tolerance, base, on_stage)
    bench = _BodyBench(body, [Path(file) for file in files], threads)
    samples = find(body, bench.alone, lambda one, other: relative_difference(one, other) <= CLOSE)
    places = see(body, bench.values(samples))
    graph = join(body, places, samples.fill)
    on_stage("comparing with the models", 0, None)
    difference = bench.difference(graph, samples) if check else None
    if difference and difference.relative > CLOSE and not tolerance:
        raise StitchError(
            f"{difference.output} differs by {difference.relative:.2g} of its largest number from the model alone, "
            f"{CLOSE:g} is allowed; nothing is made of it (check = False takes it all the same)"
        )
    on_stage("racing", 0, None)
    times = bench.times_s(graph, samples) if measure else {}
    paths = dict(zip(body.names, map(Path, files), strict=True))
    return BodyStitching(body, paths, graph, samples.fill, apart, difference, times)


def _read(
    files: Sequence[str | os.PathLike[str]],
    names: Sequence[str] | None,
    tolerance: float,
    base: str | os.PathLike[str] | None,
    on_stage: OnStage,
) -> tuple[Body, int]:
    """The body of the models, and what they hold apart."""
    constants, apart = Constants(), 0
    aligner = Aligner(constants)
    reference = None
    if base is not None:
        aligner.over(BASE, read_program(base, constants))
        reference = Reference(aligner.steps, BASE, constants)
    called: list[str] = []
    for number, file in enumerate(files):
        on_stage("reading", number, len(files))
        program = read_program(file, constants, names[number] if names else "")
        if not servable(program.name) or program.name in called:
            raise StitchError(f"{program.name!r} is no name for one model, or for two; give names = a,b,c")
        called.append(program.name)
        apart += _held_bytes(program, constants)
        task = aligner.add(program)
        if reference and tolerance:
            reference.bring_near(aligner.steps, task, tolerance)
        reference = reference or Reference(aligner.steps, task, constants)
    for step in aligner.steps:
        step.contents.pop(BASE, None)
    return aligner.body(), apart


def _held_bytes(program: ModelProgram, constants: Constants) -> int:
    """What a model stores, equal arrays once."""
    return sum(constants.arrays[key].nbytes for key in set(program.constants.values()) if key in constants.arrays)


def _shared_steps(body: Body) -> Iterator[SharedStep]:
    arrays = body.constants.arrays
    for step in body.steps:
        if not step.contents:
            continue
        task = min(step.contents)
        held = [arrays[key] for key in step.contents[task] if key in arrays and arrays[key].dtype.kind == "f"]
        size = sum(each.nbytes for each in held if each.ndim)
        if size:
            rank = max((part.rank for part in step.parts.values()), default=0)
            yield SharedStep(step.names[task], step.node.op, size, crews(step.contents), rank)


class _BodyBench:
    """Runs the models and what is made of them."""

    def __init__(self, body: Body, files: Sequence[Path], threads: int) -> None:
        self._body, self._files, self._threads = body, files, threads

    def alone(self, task: int, feed: Feed) -> dict[str, Array]:
        """What a model's own file answers."""
        names = list(self._body.outputs[task])
        session = opened(self._files[task], self._threads, self._files[task].name, optimise=False)
        return dict(zip(names, answers(session, names, feed, self._body.names[task]), strict=True))

    def values(self, samples: BodySamples) -> Callable[[int, int, int], dict[BodyValue, Array]]:
        """Runs that show all values of a model."""

        def run(task: int, rows: int, length: int) -> dict[BodyValue, Array]:
            wanted = self._body.values(task)
            graph = alone(self._body, task, wanted)
            session = opened(to_onnx(graph).SerializeToString(), self._threads, graph.name, optimise=False)
            drawn = samples.draw(np.random.default_rng(0), task, rows, length)
            found = answers(session, [exposed(value) for value in wanted], self._named(task, drawn), graph.name)
            return dict(zip(wanted, found, strict=True))

        return run

    def difference(self, graph: Graph, samples: BodySamples) -> Difference:
        """The largest over rows and lengths that differ as far as they may."""
        session = opened(to_onnx(graph).SerializeToString(), self._threads, graph.name, optimise=True)
        worst = Difference(0.0, "")
        for seed, lengths in enumerate(_lengths(samples, self._body.tasks)):
            rng = np.random.default_rng(seed)
            feeds = [samples.draw(rng, task, 1 + (task + seed) % 3, each) for task, each in enumerate(lengths)]
            joined = {name: array for task, feed in enumerate(feeds) for name, array in self._named(task, feed).items()}
            names = [each.name for each in graph.outputs]
            found = dict(zip(names, answers(session, names, joined, graph.name), strict=True))
            for task, feed in enumerate(feeds):
                for port, wanted in self.alone(task, feed).items():
                    name = port_name(self._body, task, port)
                    worst = max(worst, Difference(relative_difference(found[name], wanted), name))
        return worst

    def times_s(self, graph: Graph, samples: BodySamples) -> dict[str, float]:
        """A row of each model, one model after another and all as one body, in turns."""
        rng = np.random.default_rng(0)
        feeds = [samples.draw(rng, task, 1, USUAL_LENGTH) for task in range(self._body.tasks)]
        sessions = [opened(file, self._threads, file.name, optimise=True) for file in self._files]
        whole = opened(to_onnx(graph).SerializeToString(), self._threads, graph.name, optimise=True)
        joined = {name: array for task, feed in enumerate(feeds) for name, array in self._named(task, feed).items()}
        contenders: dict[str, list[Callable[[], object]]] = {
            "sequential": [partial(each.run, None, feed) for each, feed in zip(sessions, feeds, strict=True)],
            "stitched": [partial(whole.run, None, joined)],
        }
        return least_seconds(contenders, threads=self._threads)

    def _named(self, task: int, feed: Feed) -> Feed:
        return {port_name(self._body, task, name): array for name, array in feed.items()}


def _lengths(samples: BodySamples, tasks: int) -> list[list[int]]:
    """Lengths of each model, to compare at."""
    if samples.fill is None:
        return [[6] * tasks, [9] * tasks]
    return [[6] * tasks, [3 + 5 * task % 7 for task in range(tasks)]]

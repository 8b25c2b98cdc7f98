"""From files to one body, compared with its models: ``stitch_body`` makes a ``BodyStitching``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.base.errors import StitchError
from weft.runtime.metadata import servable
from weft_stitch.bodies.adapters import AdaptedBase, LoraAdapter, is_adapter, read_adapter
from weft_stitch.bodies.bench import BodyBench
from weft_stitch.bodies.body import Aligner, Body, Crew, crews
from weft_stitch.bodies.body_description import body_metadata
from weft_stitch.bodies.differences import LowRank
from weft_stitch.bodies.equal_weights import Reference, put_in_order
from weft_stitch.bodies.joining import JoinedBody, join, port_name
from weft_stitch.bodies.probing import Fill, find_padding, locate_values
from weft_stitch.file_description import tasks_metadata
from weft_stitch.graph import Graph
from weft_stitch.net import Array
from weft_stitch.onnx_writer import keep_models, write_onnx
from weft_stitch.reading.onnx_program import Constants, ModelProgram, read_program
from weft_stitch.running.sessions import CLOSE, Difference, relative_difference

BASE = -1
"""The number of the base model, where one is given."""
USUAL_LENGTH = 16
"""Tokens of inputs for timing, and for the warm-up of a server."""

OnStage = Callable[[str, int, int | None], None]
"""Progress callback: the stage, its finished steps, and the number of its steps if known."""


@dataclass(frozen=True, slots=True)
class SharedStep:
    """A step with weights, and the groups of models that share them."""

    name: str
    op: str
    bytes: int
    """Size of one model's weights."""
    crews: tuple[Crew, ...]
    rank: int = 0
    """The highest rank of the models' low-rank parts."""
    own: tuple[str, ...] = ()
    """Other differences to the shared weights, in words."""


@dataclass(frozen=True, eq=False)
class BodyStitching:
    """Models stitched to one body, with what was compared and timed."""

    body: Body
    files: Mapping[str, Path]
    """The models' files, or the folders of their adapters, by their names."""
    joined: JoinedBody
    fill: Fill | None
    """The padding value of each input; None where all rows of a batch must have one length."""
    apart_bytes: int
    """Weights of the separate models."""
    difference: Difference | None
    """The largest difference to the models alone; None where it was not checked."""
    times_s: Mapping[str, float]
    """Seconds for a row of each model, one model after another and as one body; empty where nothing was timed."""
    reordered: int = 0
    """Count of products whose weights equal another model's except for their order."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.body.names

    @property
    def graph(self) -> Graph:
        return self.joined.graph

    @property
    def long(self) -> bool:
        """Whether rows may be of any length."""
        return any(port.long for ports in self.body.ports for port in ports.values())

    @property
    def weight_bytes(self) -> int:
        """Size of the graph's constants."""
        return sum(array.nbytes for array in self.graph.constants.values())

    @cached_property
    def shared(self) -> tuple[SharedStep, ...]:
        """All steps with weights, in order."""
        return tuple(_shared_steps(self.body))

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of its ONNX file: the models in it, and how they share weights."""
        entries = tasks_metadata([self._task_entry(task) for task in range(self.body.tasks)])
        return entries | body_metadata(self.body, self.joined) if self.long else entries

    def _task_entry(self, task: int) -> dict[str, Any]:
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
        """Write it as an ONNX file, which ``weft serve`` serves as the models it is made of."""
        target = Path(path)
        keep_models(self.files.values(), [target])
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

    files: ONNX files, and folders of adapters of *base*, which is then needed.
    tolerance: the part of a weight that may be lost where models differ from *base*, or from the first of them, by
    something of low rank; 0: only what is equal is shared, and answers are the models' own.
    """
    body, apart = _read(files, names, tolerance, base, on_stage)
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
    return BodyStitching(body, paths, joined, samples.fill, apart, difference, times, reordered)


def _close(one: Array, other: Array) -> bool:
    return relative_difference(one, other) <= CLOSE


def _read(
    files: Sequence[str | os.PathLike[str]],
    names: Sequence[str] | None,
    tolerance: float,
    base: str | os.PathLike[str] | None,
    on_stage: OnStage,
) -> tuple[Body, int]:
    """Return the body of the models, and the bytes that they hold separately."""
    constants, apart = Constants(), 0
    aligner = Aligner(constants)
    reference = adapted = None
    if base is not None:
        program = read_program(base, constants)
        aligner.over(BASE, program)
        reference = Reference(aligner.steps, BASE, constants) if tolerance else None
        adapted = AdaptedBase(program, aligner.walked[BASE], constants)
    called: list[str] = []
    for number, file in enumerate(files):
        on_stage("reading", number, len(files))
        adapter = read_adapter(Path(file)) if adapted and is_adapter(file) else None
        name = names[number] if names else ""
        program = adapted.named(name or Path(file).name) if adapted and adapter else read_program(file, constants, name)
        if not servable(program.name) or program.name in called:
            raise StitchError(f"{program.name!r} is no name for one model, or for two; give names = a,b,c")
        called.append(program.name)
        apart += _held_bytes(program, constants)
        task = aligner.add(program)
        if adapted and adapter:
            _adapt(adapted, aligner, task, adapter, file)
        elif reference:
            reference.bring_near(aligner.steps, task, tolerance)
        reference = reference or Reference(aligner.steps, task, constants)
    for step in aligner.steps:
        step.contents.pop(BASE, None)
    return aligner.body(), apart


def _adapt(base: AdaptedBase, aligner: Aligner, task: int, adapter: LoraAdapter, file: str | os.PathLike[str]) -> None:
    try:
        base.adapt(aligner.steps, task, adapter)
    except StitchError as error:
        raise StitchError(f"{file}: {error}") from error


def _held_bytes(program: ModelProgram, constants: Constants) -> int:
    """Bytes that a model stores, equal arrays once."""
    return sum(constants.arrays[key].nbytes for key in constants.behind(program.constants.values()))


def _shared_steps(body: Body) -> Iterator[SharedStep]:
    arrays = body.constants.arrays
    for step in body.steps:
        if not step.contents:
            continue
        task = min(step.contents)
        held = [arrays[key] for key in step.contents[task] if key in arrays and arrays[key].dtype.kind == "f"]
        size = sum(array.nbytes for array in held if array.ndim)
        if size:
            parts, lines = step.parts.values(), max((len(table.at) for table in step.lines.values()), default=0)
            rank = max((part.rank for part in parts if part.kind == "low rank"), default=0)
            own = dict.fromkeys(_said(part) for part in parts if part.kind != "low rank")
            said = (*own, *([f"{lines} lines"] if step.lines else []))
            yield SharedStep(step.names[task], step.node.op, size, crews(step.contents), rank, said)


def _said(part: LowRank) -> str:
    return f"{part.rank} {part.kind}" if part.rank else part.kind

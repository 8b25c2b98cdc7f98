"""A stitched model on a device, computed in rounds: as many rows of every task at a time.

What was captured has its shapes, and a batch has rows of any of the tasks. So a rung of a stitched model is a *round*
of so many rows of each. A batch goes to the smallest round that holds the rows of its busiest task, or through several
of the largest. Rows that nobody asks for are computed as well, of what lies there: made-up samples at first, later what
earlier requests left. Every row is kept apart, so that changes nothing but the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import exp
from pathlib import PurePath
from typing import Any

import numpy as np

from weft.devices.shares import GpuLikeness
from weft.runtime.backend import BatchPart, StepOutput
from weft.runtime.cuda.device import Tensor, as_array
from weft.runtime.cuda.model import DeviceModel, ladder
from weft.runtime.cuda.rung import DeviceValues, Rung
from weft.runtime.onnxruntime_cpu.model import Blueprint, SegmentSpec
from weft.runtime.tensors import DATATYPES, Array

SHAPES = "shapes.json"
"""In the folder of a model whose rounds torch runs: how its kernels are arranged."""

Times = tuple[float, ...]
"""Seconds of each segment."""


def rung_sizes(blueprint: Blueprint) -> list[int]:
    """The rows that a model is captured with; of a stitched one, those of each task."""
    return ladder(blueprint.round_rows or blueprint.max_batch)


def segments_at(blueprint: Blueprint, rows: int) -> tuple[SegmentSpec, ...]:
    """The segments that so many rows are computed by: a stitched model has its own for each size of its rounds."""
    if not blueprint.tasks:
        return blueprint.segments
    if blueprint.segments[0].nodes is not None:
        return tuple(each.model_copy(update={"rows": rows}) for each in blueprint.segments)
    return tuple(each.model_copy(update={"file": file_at(each.file, rows)}) for each in blueprint.segments)


def file_at(file: str | None, rows: int) -> str:
    """The name of a segment's file for so many rows of each task, given that for one."""
    assert file is not None
    return file if rows == 1 else f"{PurePath(file).stem}x{rows}.onnx"


def busiest(rows: int, tasks: int) -> int:
    """How many rows the busiest task of a batch has in about half of all cases, and no more than that.

    Each row is taken to be of any task alike, so that those of a task are nearly Poisson's.
    """
    load = rows / tasks
    term = below = exp(-load)
    for most in range(1, rows if tasks > 1 else 1):
        term *= load / most
        below += term
        if below**tasks >= 0.5:
            return most
    return rows


def rounds(most: int, sizes: Sequence[int]) -> list[int]:
    """The sizes of the rounds in which the busiest task has so many rows; *sizes* are those there are."""
    full, rest = divmod(most, sizes[-1])
    last = [next(size for size in sizes if size >= rest)] if rest or not full else []
    return [sizes[-1]] * full + last


def round_times(found: Mapping[int, Times], max_batch: int, tasks: int) -> dict[int, Times]:
    """What batches of so many rows, of all tasks together, mostly take, given what rounds of each size do."""
    sizes = sorted(found)
    times = {most: _summed([found[size] for size in rounds(most, sizes)]) for most in range(1, max_batch + 1)}
    return {rows: times[busiest(rows, tasks)] for rows in range(1, max_batch + 1)}


def like_by_rows(blueprint: Blueprint) -> dict[int, GpuLikeness]:
    """What batches are like, by their rows, given what the sizes are like that it was captured with."""
    sizes, tasks = rung_sizes(blueprint), len(blueprint.tasks)
    captured = {
        rows: rounds(busiest(rows, tasks), sizes)[0] if tasks else next(size for size in sizes if size >= rows)
        for rows in range(1, blueprint.max_batch + 1 if blueprint.like else 1)
    }
    return {rows: blueprint.like[size] for rows, size in captured.items() if size in blueprint.like}


def _summed(times: Sequence[Times]) -> Times:
    return tuple(map(sum, zip(*times, strict=True)))


class RoundValues(DeviceValues):
    """What a round holds between two segments, and how many rows of each input somebody asked for."""

    __slots__ = ("counts",)

    def __init__(self, rung: Rung, tensors: dict[str, Tensor], counts: Mapping[str, int]) -> None:
        super().__init__(rung, rung.rows, tensors)
        self.counts = counts

    def onward(self, tensors: dict[str, Tensor]) -> RoundValues:
        return RoundValues(self.rung, tensors, self.counts)


class StitchedDeviceModel(DeviceModel):
    """A stitched model on a device; what a batch holds between segments are its rounds."""

    @cached_property
    def _asked_by(self) -> dict[str, str]:
        """Output -> an input of its task, which has as many rows."""
        tasks = self.blueprint.tasks
        return {output: next(iter(task.inputs.values())) for task in tasks for output in task.outputs.values()}

    @cached_property
    def _nothing(self) -> dict[str, Array]:
        """All outputs, without rows."""
        tensors = self._rungs[0].tensors
        return {spec.name: _no_rows(tensors[spec.name].shape, spec.datatype) for spec in self.outputs}

    def come_back(self) -> None:
        """Have all of it there again; rows that nobody asks for must hold something that can be computed."""
        super().come_back()
        for rung in self._rungs:
            rung.clear([spec.name for spec in self.inputs])

    def _advanced(self, segment: int, parts: list[BatchPart]) -> StepOutput:
        batch = self._begun(parts) if segment == 0 else self._ongoing(segment, parts)
        if segment < len(self.segments) - 1:
            return StepOutput([self._computed(segment, each).values for each in batch], {})
        found: list[dict[str, Tensor]] = []
        for values in batch:
            if found:  # the next round is about to write over it
                found[-1] = {name: self._device.clone(each) for name, each in found[-1].items()}
            found.append(self._computed(segment, values).answers)
        return StepOutput({}, self._told_of(found))

    def _ongoing(self, segment: int, parts: list[BatchPart]) -> Iterator[DeviceValues]:
        (part,) = parts
        return (self._gathered(segment, [BatchPart(each)]) for each in part.values)

    def _begun(self, parts: list[BatchPart]) -> Iterator[RoundValues]:
        """The rounds of a new batch, each in the memory of its rung when it is asked for."""
        given: dict[str, list[Any]] = {}
        for part in parts:
            for name, each in part.values.items():
                given.setdefault(name, []).append(each if part.rows is None else as_array(each)[list(part.rows)])
        tensors: dict[str, Tensor] = {}
        for alike in _by_kind(given):
            tensors |= _apart(self._device.copy_in([each for arrays in alike.values() for each in arrays]), alike)
        first, most = 0, max([each.shape[0] for each in tensors.values()], default=0)
        for size in rounds(most, [each.rows for each in self._rungs]):
            mine = {name: each[first : first + size] for name, each in tensors.items() if each.shape[0] > first}
            yield self._entered_round(size, mine)
            first += size

    def _entered_round(self, size: int, tensors: Mapping[str, Tensor]) -> RoundValues:
        """A round with these rows of inputs; all others are left as they lie there."""
        rung = self._rung(size)
        assert rung is not None
        inputs = {spec.name: rung.tensors[spec.name] for spec in self.inputs}
        values = RoundValues(rung, inputs, {name: each.shape[0] for name, each in tensors.items()})
        for name, each in tensors.items():
            rung.secure(name)
            self._device.copy(inputs[name][: each.shape[0]], each)
        return values

    def _answers(self, values: DeviceValues, made: Mapping[str, Tensor]) -> dict[str, Any]:
        """The rows of outputs that somebody asked for, where they lie."""
        assert isinstance(values, RoundValues)
        counts = {name: values.counts.get(source, 0) for name, source in self._asked_by.items()}
        return {name: made[name][:count] for name, count in counts.items() if count}

    def _told_of(self, found: Sequence[Mapping[str, Tensor]]) -> dict[str, Array]:
        """All outputs, given what they are in each round."""
        rows = {spec.name: [each[spec.name] for each in found if spec.name in each] for spec in self.outputs}
        answers = dict(self._nothing)
        for alike in _by_kind(rows):
            each, *others = [piece for pieces in alike.values() for piece in pieces]
            whole = self._device.taken([(one, None, one.shape[0]) for one in (each, *others)]) if others else each
            answers |= _apart(self._device.copy_out(whole), alike)
        return answers


def _by_kind(given: Mapping[str, Sequence[Any]]) -> list[dict[str, Sequence[Any]]]:
    """Tensors by name, those together that are of one shape and type but for their rows; without those of no rows."""
    found: dict[Any, dict[str, Sequence[Any]]] = {}
    for name, tensors in given.items():
        if any(each.shape[0] for each in tensors):
            found.setdefault((tuple(tensors[0].shape[1:]), tensors[0].dtype), {})[name] = tensors
    return list(found.values())


def _apart(together: Any, tensors: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The rows of each, which lie one after another."""
    found, first = {}, 0
    for name, each in tensors.items():
        rows = sum(one.shape[0] for one in each)
        found[name] = together[first : first + rows]
        first += rows
    return found


def _no_rows(shape: Sequence[int], datatype: str) -> Array:
    return np.empty((0, *shape[1:]), DATATYPES[datatype])

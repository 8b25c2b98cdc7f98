"""A stitched model on a device, computed in rounds: the same number of rows of every task at a time.

The *tasks* are the models that were stitched; each has inputs and outputs of its own in the graph.

Captured graphs have fixed shapes, but a batch has rows of any of the tasks. So a rung of a stitched model is a *round*
with the same number of rows for each task. A batch goes to the smallest round that holds the rows of its busiest task,
or through several of the largest. Padding rows are computed as well, on the present content of the memory: random
samples at first, later rows of earlier requests. Rows do not mix, so padding changes nothing but the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import exp
from pathlib import PurePath
from typing import Any

import numpy as np

from weft.devices.shares import GpuLikeness
from weft.runtime.backend import BatchPart, OutputTarget, StepOutput
from weft.runtime.cuda.device import Tensor, as_array
from weft.runtime.cuda.model import DeviceModel, ladder
from weft.runtime.cuda.rung import DeviceValues, Rung
from weft.runtime.onnxruntime_cpu.model import Blueprint, SegmentSpec
from weft.runtime.tensors import DATATYPES, Array

SHAPES = "shapes.json"
"""File of a model whose rounds torch runs: how its kernels are arranged."""

Times = tuple[float, ...]
"""Seconds of each segment."""


def rung_sizes(blueprint: Blueprint) -> list[int]:
    """The batch sizes that a model is captured with; for a stitched model, rows of each task."""
    return ladder(blueprint.round_rows or blueprint.max_batch)


def segments_at(blueprint: Blueprint, rows: int) -> tuple[SegmentSpec, ...]:
    """The segments for a batch size: a stitched model has other segments for each size of its rounds."""
    if not blueprint.tasks:
        return blueprint.segments
    if blueprint.segments[0].nodes is not None:
        return tuple(spec.model_copy(update={"rows": rows}) for spec in blueprint.segments)
    return tuple(spec.model_copy(update={"file": file_at(spec.file, rows)}) for spec in blueprint.segments)


def file_at(file: str | None, rows: int) -> str:
    """The name of a segment's file for *rows* rows of each task, given the name of the file for one row."""
    assert file is not None
    return file if rows == 1 else f"{PurePath(file).stem}x{rows}.onnx"


def busiest(rows: int, tasks: int) -> int:
    """The median number of rows of the busiest of *tasks* tasks in a batch of *rows* rows, at least 1.

    Each row belongs to any task with the same probability, so that the rows of a task are nearly Poisson-distributed.
    """
    load = rows / tasks
    term = below = exp(-load)  # the Poisson probability of just ``most`` rows, and of at most ``most``
    for most in range(1, rows if tasks > 1 else 1):
        term *= load / most
        below += term
        if below**tasks >= 0.5:  # the probability that no task has more rows than ``most``
            return most
    return rows


def rounds(most: int, sizes: Sequence[int]) -> list[int]:
    """The sizes of the rounds for a batch whose busiest task has *most* rows; *sizes*: captured sizes, ascending."""
    full_rounds, rest = divmod(most, sizes[-1])
    remainder = [next(size for size in sizes if size >= rest)] if rest or not full_rounds else []
    return [sizes[-1]] * full_rounds + remainder


def round_times(by_size: Mapping[int, Times], max_batch: int, tasks: int) -> dict[int, Times]:
    """Rows of all tasks together -> the usual seconds of each segment for such a batch.

    *by_size*: the times of a round of each captured size.
    """
    sizes = sorted(by_size)
    # Rows of the busiest task -> the times of all rounds that they need.
    times_by_most = {
        most: _sum_times([by_size[size] for size in rounds(most, sizes)]) for most in range(1, max_batch + 1)
    }
    return {rows: times_by_most[busiest(rows, tasks)] for rows in range(1, max_batch + 1)}


def likeness_by_rows(blueprint: Blueprint) -> dict[int, GpuLikeness]:
    """Rows of a batch -> measurements on parts of the device (``blueprint.like``) of the size that computes it."""
    sizes, tasks = rung_sizes(blueprint), len(blueprint.tasks)
    size_by_rows = {
        rows: rounds(busiest(rows, tasks), sizes)[0] if tasks else next(size for size in sizes if size >= rows)
        for rows in range(1, blueprint.max_batch + 1 if blueprint.like else 1)
    }
    return {rows: blueprint.like[size] for rows, size in size_by_rows.items() if size in blueprint.like}


def _sum_times(times: Sequence[Times]) -> Times:
    return tuple(map(sum, zip(*times, strict=True)))


class RoundValues(DeviceValues):
    """The tensors of a round between two segments; *counts*: input -> number of its rows that came from requests."""

    __slots__ = ("counts",)

    def __init__(self, rung: Rung, tensors: dict[str, Tensor], counts: Mapping[str, int]) -> None:
        super().__init__(rung, rung.rows, tensors)
        self.counts = counts

    def onward(self, tensors: dict[str, Tensor]) -> RoundValues:
        return RoundValues(self.rung, tensors, self.counts)


class StitchedDeviceModel(DeviceModel):
    """A stitched model on a device; the values of a batch between segments are a list of rounds."""

    @cached_property
    def _inputs_by_output(self) -> dict[str, str]:
        """Output -> an input of its task, which has as many rows."""
        tasks = self.blueprint.tasks
        return {output: next(iter(task.inputs.values())) for task in tasks for output in task.outputs.values()}

    @cached_property
    def _empty_outputs(self) -> dict[str, Array]:
        """All outputs, with no rows: the answer for tasks without rows in a batch."""
        tensors = self._rungs[0].tensors
        return {spec.name: _no_rows(tensors[spec.name].shape, spec.datatype) for spec in self.outputs}

    def restore(self) -> None:
        """Bring all memory back, and clear the inputs, because padding rows must hold valid numbers."""
        super().restore()
        for rung in self._rungs:
            rung.clear([spec.name for spec in self.inputs])

    def _advance(self, segment: int, parts: list[BatchPart], targets: Sequence[OutputTarget] = ()) -> StepOutput:
        """Start a segment on all rounds of the batch that *parts* make up, one after another; *targets* are ignored."""
        all_rounds = self._begin_rounds(parts) if segment == 0 else self._continue_rounds(segment, parts)
        if segment < len(self.segments) - 1:
            return StepOutput([self._compute_segment(segment, values).values for values in all_rounds], {})
        outputs: list[dict[str, Tensor]] = []
        for values in all_rounds:
            if outputs:  # the next round overwrites the outputs of this one
                outputs[-1] = {name: self._device.clone(tensor) for name, tensor in outputs[-1].items()}
            outputs.append(self._compute_segment(segment, values).answers)
        return StepOutput({}, self._join_answers(outputs))

    def _continue_rounds(self, segment: int, parts: list[BatchPart]) -> Iterator[DeviceValues]:
        """Yield the rounds of a batch that is under way, with the inputs of the segment in the memory of their rung."""
        (part,) = parts  # batches of stitched models are not joined at cuts
        return (self._gather(segment, [BatchPart(values)]) for values in part.values)

    def _begin_rounds(self, parts: list[BatchPart]) -> Iterator[RoundValues]:
        """Yield the rounds of a new batch; each is copied to the memory of its rung when it is reached."""
        arrays_by_input: dict[str, list[Any]] = {}
        for part in parts:
            for name, array in part.values.items():
                rows = array if part.rows is None else as_array(array)[list(part.rows)]
                arrays_by_input.setdefault(name, []).append(rows)
        tensors: dict[str, Tensor] = {}
        for group in _group_by_kind(arrays_by_input):
            concatenated = self._device.copy_in([array for arrays in group.values() for array in arrays])
            tensors |= _split_rows(concatenated, group)
        first_row, most_rows = 0, max([tensor.shape[0] for tensor in tensors.values()], default=0)
        for size in rounds(most_rows, [rung.rows for rung in self._rungs]):
            remaining = {name: tensor for name, tensor in tensors.items() if tensor.shape[0] > first_row}
            round_inputs = {name: tensor[first_row : first_row + size] for name, tensor in remaining.items()}
            yield self._enter_round(size, round_inputs)
            first_row += size

    def _enter_round(self, size: int, tensors: Mapping[str, Tensor]) -> RoundValues:
        """A round of *size* rows with *tensors* as its first rows; the other rows of the memory stay as they are."""
        rung = self._rung(size)
        assert rung is not None
        inputs = {spec.name: rung.tensors[spec.name] for spec in self.inputs}
        values = RoundValues(rung, inputs, {name: tensor.shape[0] for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            rung.copy_before_overwrite(name)
            self._device.copy(inputs[name][: tensor.shape[0]], tensor)
        return values

    def _answers(self, values: DeviceValues, outputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Views of the output rows that belong to requests, without the padding."""
        assert isinstance(values, RoundValues)
        counts = {name: values.counts.get(source, 0) for name, source in self._inputs_by_output.items()}
        return {name: outputs[name][:count] for name, count in counts.items() if count}

    def _join_answers(self, round_outputs: Sequence[Mapping[str, Tensor]]) -> dict[str, Array]:
        """Join the outputs of all rounds and copy them to the host."""
        rows = {
            spec.name: [outputs[spec.name] for outputs in round_outputs if spec.name in outputs]
            for spec in self.outputs
        }
        answers = dict(self._empty_outputs)
        for group in _group_by_kind(rows):
            first, *others = [piece for pieces in group.values() for piece in pieces]
            if others:
                first = self._device.concatenate_rows([(piece, None, piece.shape[0]) for piece in (first, *others)])
            answers |= _split_rows(self._device.copy_out(first), group)
        return answers


def _group_by_kind(tensors_by_name: Mapping[str, Sequence[Any]]) -> list[dict[str, Sequence[Any]]]:
    """Group tensors that can be concatenated: of the same type, and shape except for rows; empty ones are left out."""
    by_kind: dict[Any, dict[str, Sequence[Any]]] = {}
    for name, tensors in tensors_by_name.items():
        if any(tensor.shape[0] for tensor in tensors):
            by_kind.setdefault((tuple(tensors[0].shape[1:]), tensors[0].dtype), {})[name] = tensors
    return list(by_kind.values())


def _split_rows(concatenated: Any, tensors: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Split a concatenation of tensors into one tensor per name; *tensors*: the pieces of each name, in order."""
    separated, first = {}, 0
    for name, pieces in tensors.items():
        rows = sum(piece.shape[0] for piece in pieces)
        separated[name] = concatenated[first : first + rows]
        first += rows
    return separated


def _no_rows(shape: Sequence[int], datatype: str) -> Array:
    return np.empty((0, *shape[1:]), DATATYPES[datatype])

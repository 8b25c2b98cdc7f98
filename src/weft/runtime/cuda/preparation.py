"""Preparation of a model of any kind for a device: its largest batch, its cuts, and its measured times.

A ``Divisible`` is such a model: an ONNX file (``onnx_files``) or a program of torch (``torch_files``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from weft.base.errors import ModelError
from weft.devices.shares import GpuLikeness
from weft.runtime import cutting
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda import node_costs
from weft.runtime.cuda.device import Device, lacks_memory
from weft.runtime.cuda.likeness import measure_likeness
from weft.runtime.cuda.model import DeviceModel, ladder
from weft.runtime.cuda.pieces import OpenPieces, random_batch, unseen
from weft.runtime.cuda.precision import FP32, difference, remark
from weft.runtime.cuda.rounds import busiest, round_times, rung_sizes
from weft.runtime.cuda.rung import Rung
from weft.runtime.exits import ExitSpec
from weft.runtime.facets import ModelResidency
from weft.runtime.onnxruntime_cpu.allowance import Allowance
from weft.runtime.onnxruntime_cpu.model import Blueprint
from weft.runtime.onnxruntime_cpu.model_timing import LEAST_GAIN, close_enough
from weft.runtime.onnxruntime_cpu.sessions import first_line
from weft.runtime.rows import Verdict
from weft.runtime.samples import sample
from weft.runtime.tensors import Array

WRONG = 0.05
"""Difference of float32 results from the CPU's, relative to the largest output, above which they count as wrong."""
LARGEST_UNASKED = 32
"""The largest batch that is tried if the options name none; larger batches gain little and take memory."""


class Unfit(Exception):
    """A model cannot run on a device; the text says why."""


class Divisible(Protocol):
    """A model that was read for a device: a sequence of nodes that can be cut between them."""

    @property
    def half(self) -> bool:
        """Whether the model computes with floats of 16 bits."""
        ...

    def guessed_s(self) -> list[float]:
        """Rough times of the nodes in seconds; only the proportions matter."""
        ...

    def crossing(self) -> list[int | None]:
        """For each cut, the two ends included, the bytes that cross it; None where no cut is possible."""
        ...

    def whole_because(self) -> str | None:
        """The reason why the model cannot be cut anywhere, as the predicate of a sentence; None if it can."""
        ...

    def in_pieces(self, blueprint: Blueprint, cuts: Sequence[int]) -> Blueprint:
        """*blueprint* with the segments between these cuts; none: the model is one segment."""
        ...

    def opened(self, blueprint: Blueprint) -> OpenPieces:
        """The segments of a blueprint, ready to run."""
        ...


@dataclass(slots=True)
class ModelPreparation:
    """Prepares one model for a device: finds its largest batch and its cuts, captures it and measures it."""

    device: Device
    model: Divisible
    options: LoadOptions
    allowance: Allowance
    exits: tuple[str, ...] = ()
    forced: Sequence[int] = ()  # cuts that are made in any case: at its exits
    remarks: list[str] = field(default_factory=list)
    within: Mapping[str, float] = field(default_factory=lambda: {FP32: WRONG})
    """Precision -> the largest difference of right results from the CPU's; a precision without one has no limit."""

    def built(self, blueprint: Blueprint, verdict: Verdict, wanted: dict[str, Array], free_before: int) -> DeviceModel:
        """The model as it will be served: batched, cut, measured and compared with the CPU.

        verdict: whether its rows are independent. wanted: its outputs on the CPU in float32. free_before: free bytes of
        the device's memory before the model was opened. ``Unfit`` if the device cannot run it.
        """
        whole, sizes = self._find_largest_batch(blueprint, verdict)
        model = self._measure_model(self._choose_cuts(whole, sizes))
        self._check_answers(model, wanted)
        used = max(0, free_before - self.device.memory()[0])
        changes = {"memory_bytes": used, "remarks": (*self.remarks, *_uncaptured_remarks(model))}
        model.blueprint = model.blueprint.model_copy(update=changes)
        model.residency, model.remarks = ModelResidency(used), model.blueprint.remarks
        return model

    def round_s(self, blueprint: Blueprint) -> float:
        """Seconds of a round of a stitched model with one row of each task, in one piece."""
        whole = self.model.in_pieces(blueprint.model_copy(update={"batchable": True, "round_rows": 1}), ())
        return self.model.opened(whole).rung(1).timed(0)

    # The largest batch

    def _find_largest_batch(self, blueprint: Blueprint, verdict: Verdict) -> tuple[Blueprint, dict[int, float]]:
        """Find the largest batch with the model in one piece; returns the blueprint, and seconds by batch size."""
        requested, tasks = self.options.max_batch, len(blueprint.tasks)  # tasks: 0 unless the model is stitched
        if verdict.mixing is not None:
            if tasks:
                raise Unfit(f"its models cannot be run together: {verdict.mixing}")
            if requested is not None and requested > 1:
                raise ModelError(f"max_batch is {requested}, but the model cannot be batched: {verdict.mixing}")
            if requested is None:
                self.remarks.append(f"not batched: {verdict.mixing}")
        batched = verdict.mixing is None
        most = (requested or max(tasks, LARGEST_UNASKED)) if batched else 1
        # A round has the same number of rows of every task, so it must hold the rows of the busiest task.
        largest = busiest(most, tasks) if tasks else most
        changes: dict[str, Any] = {"batchable": batched, "round_rows": largest if tasks else 0}
        blueprint = self.model.in_pieces(blueprint.model_copy(update=changes), ())
        sizes, reason = self._try_batches(blueprint, ladder(largest), while_it_pays=requested is None or tasks > 0)
        if tasks:
            changes = {"max_batch": requested or min(most, tasks * max(sizes)), "round_rows": max(sizes)}
        elif requested is not None and max(sizes) < requested and batched:
            raise ModelError(f"max_batch is {requested}, but the model cannot be batched to that size: {reason}")
        else:
            changes = {"max_batch": max(sizes)}
        if reason is not None:
            what = "rounds of each model's rows" if tasks else "batched"
            self.remarks.append(f"{what} up to {max(sizes)}: {reason}")
        changes["any_shapes"] = batched and not verdict.by_size
        return blueprint.model_copy(update=changes), sizes

    def _try_batches(
        self, blueprint: Blueprint, tried: Sequence[int], *, while_it_pays: bool
    ) -> tuple[dict[int, float], str | None]:
        """Time a model in one piece at the batch sizes *tried*, in order, until a size fails or does not pay off.

        while_it_pays: stop at a size that gains too little. Returns seconds by batch size, and why larger sizes were
        left out (None: none was).
        """
        pieces = self.model.opened(blueprint)
        sizes: dict[int, float] = {}
        rows_alone: list[dict[str, Array]] = []
        for rows in tried:
            self.allowance.check()
            rung = pieces.rung(rows)
            if (reason := self._compare_rows(blueprint, rung, rows_alone)) is not None:
                return sizes, reason
            took_s = rung.timed(0)
            if while_it_pays and sizes and took_s / rows > (1 - LEAST_GAIN) * sizes[max(sizes)] / max(sizes):
                return sizes, f"batch {rows} gains less than {LEAST_GAIN:.0%}"
            sizes[rows] = took_s
        return sizes, None

    def _compare_rows(self, blueprint: Blueprint, rung: Rung, alone: list[dict[str, Array]]) -> str | None:
        """How the rows of a batch differ from the same samples alone; None if they do not.

        rung: the batch size. alone: the outputs of the two samples of which ``random_batch`` consists; empty at the
        first call, at batch 1, which fills it.
        """
        if not blueprint.batchable:
            return None
        if not alone:
            for seed in (0, 1):
                feed = sample(blueprint.inputs, blueprint.warm_shapes or {}, seed, blueprint.values)
                alone.append(self._run_whole(blueprint, rung, feed))
            return None
        outputs = self._run_whole(blueprint, rung, random_batch(blueprint, rung.rows))
        for name, got in outputs.items():
            # What was computed with 16 bits is compared with their tolerance.
            kind = np.float16 if self.model.half and got.dtype.kind == "f" else got.dtype
            expected = np.concatenate([alone[row % 2][name] for row in range(rung.rows)])
            if not close_enough(expected.astype(kind), got.astype(kind)):
                return f"output {name!r} of batch {rung.rows} is not that of its samples"
        return None

    def _run_whole(self, blueprint: Blueprint, rung: Rung, feed: dict[str, Array]) -> dict[str, Array]:
        """Run a model in one piece (segment 0) on *feed*; returns its outputs on the host."""
        device = self.device
        for name, array in feed.items():
            device.copy(rung.tensors[name], device.copy_in([array]))
        rung.run(0)
        outputs = {spec.name: device.copy_out(rung.tensors[spec.name]) for spec in blueprint.outputs}
        device.finish()
        return outputs

    # Cuts

    def _choose_cuts(self, whole: Blueprint, sizes: dict[int, float]) -> Blueprint:
        """Cut the model if it is worth cutting: by estimates, then again by the measured times of these segments.

        sizes: seconds of the whole model by batch size.
        """
        grain_s, max_pieces, crossing = self.options.grain_s, self.options.max_pieces, self.model.crossing()
        if any(crossing[cut] is None for cut in self.forced):
            raise Unfit("a tensor that crosses an exit is none of floating-point numbers")
        length_s = _length_s(whole, sizes[1], sizes[max(sizes)])
        if not (self.forced or cutting.worth_cutting(length_s, grain_s)):
            return whole
        if (reason := self.model.whole_because()) is not None:
            self.remarks += [f"stays whole: it {reason}"] if whole.tasks else []
            return whole
        guesses_s = node_costs.scaled(self.model.guessed_s(), (), [length_s])  # no cuts: they add up to the whole
        cuts = cutting.choose_cuts(guesses_s, crossing, grain_s, max_pieces, self.forced)
        if whole.tasks and not cuts:
            self.remarks.append("stays whole: something else than floating-point numbers crosses every cut")
        blueprint = self.model.in_pieces(whole, cuts)
        lengths_s = self._segment_lengths_s(blueprint)
        if cuts and max(lengths_s) > grain_s:
            rescaled = node_costs.scaled(guesses_s, cuts, lengths_s)
            cuts = cutting.choose_cuts(rescaled, crossing, grain_s, max_pieces, self.forced)
            blueprint = self.model.in_pieces(whole, cuts)
        return self._add_exits(blueprint, cuts) if self.exits else blueprint

    def _segment_lengths_s(self, blueprint: Blueprint) -> list[float]:
        """Measure the length of each segment that is compared with the grain, in seconds."""
        pieces, largest = self.model.opened(blueprint), rung_sizes(blueprint)[-1]
        rungs = {rows: pieces.rung(rows) for rows in {1, largest}}
        indices = range(len(blueprint.segments))
        return [_length_s(blueprint, rungs[1].timed(index), rungs[largest].timed(index)) for index in indices]

    def _add_exits(self, blueprint: Blueprint, cuts: Sequence[int]) -> Blueprint:
        """The blueprint with its exits: one at each forced cut, and the last at the model's end, its only output.

        cuts: all cuts, in order, so that the index of a cut is that of the segment which ends there.
        """
        exit_segments = [*(cuts.index(cut) for cut in self.forced), len(cuts)]
        exits = [ExitSpec(output=name, segment=end) for name, end in zip(self.exits, exit_segments, strict=True)]
        outputs = tuple(spec for spec in blueprint.outputs if spec.name == self.exits[-1])
        changes = {"outputs": outputs, "exits": tuple(exits), "confidence": self.options.confidence}
        return blueprint.model_copy(update=changes)

    # Measured times

    def _measure_model(self, blueprint: Blueprint) -> DeviceModel:
        """The model as it will be served, with measured times of every batch size."""
        pieces, sizes, tasks = self.model.opened(blueprint), rung_sizes(blueprint), len(blueprint.tasks)
        rungs = [pieces.rung(rows) for rows in sizes]
        likeness = self._likeness(rungs, pieces.weights.bytes)
        self.remarks += pieces.gate(rungs)
        segment_times = {rung.rows: rung.segment_times() for rung in rungs}
        if tasks:  # not mergeable, as tensors at its cuts have rows of several tasks; only captured shapes are run
            times_s = round_times(segment_times, blueprint.max_batch, tasks)
            return pieces.model(rungs, times_s=times_s, like=likeness, mergeable=False)
        # A batch takes as long as the next larger captured size.
        times_s = {
            rows: segment_times[next(size for size in sizes if size >= rows)] for rows in range(1, sizes[-1] + 1)
        }
        several = len(blueprint.segments) > 1
        mergeable = blueprint.batchable and several and all(rung.same_rows() for rung in rungs)
        if self.exits and not mergeable:
            raise Unfit("what crosses its exits is not one row per sample")
        for segment in pieces.segments.values():
            segment.open()  # now, because the files will be moved into the cache
        return pieces.model(rungs, times_s=times_s, like=likeness, mergeable=mergeable)

    def _likeness(self, rungs: Sequence[Rung], weight_bytes: int) -> dict[int, GpuLikeness]:
        """Measure each batch size on parts of the device, if the options ask for that; *weight_bytes*: of the model."""
        if not self.options.shares:
            return {}
        return measure_likeness(self.device, rungs, weight_bytes, self.allowance, self.remarks)

    def _check_answers(self, model: DeviceModel, wanted: dict[str, Array]) -> None:
        """Add a remark on how far results differ from *wanted*, those of the CPU; ``Unfit`` if they are wrong."""
        try:
            outputs = model.run(unseen(model.blueprint))
        except Exception as error:  # sessions raise several unrelated kinds
            if lacks_memory(error):
                raise
            raise Unfit(f"it fails on other inputs than the first: {first_line(error)}") from error
        expected = {name: wanted[name] for name in outputs}
        deviation = difference(expected, outputs)
        float_deviation = difference({name: expected[name] for name in _float_outputs(expected)}, outputs)
        if float_deviation > self.within.get(self.options.precision, np.inf):
            raise Unfit(f"its answers differ on the device: by up to {float_deviation:.1e} of the largest output")
        if (sentence := remark(self.options.precision, deviation)) is not None:
            self.remarks.append(sentence)


def _float_outputs(outputs: dict[str, Array]) -> list[str]:
    """Names of the outputs with floating-point numbers; whole numbers, as of an ArgMax, may differ by ties."""
    return [name for name, array in outputs.items() if array.dtype.kind == "f"]


def _uncaptured_remarks(model: DeviceModel) -> list[str]:
    """A remark about segments that run without a graph, if there are any."""
    uncaptured = model.uncaptured()
    if not uncaptured:
        return []
    why = next(iter(uncaptured.values()))
    return [f"{len(uncaptured)} of its {len(model.segments)} segments cannot be captured and run by calls: {why}"]


def _length_s(blueprint: Blueprint, least_s: float, most_s: float) -> float:
    """The length of a segment, in seconds, that is compared with the grain.

    *least_s*, *most_s*: measured at the smallest and the largest batch size. The smallest round of a stitched model has
    a row of each task, so its time is divided by their number.
    """
    return cutting.device_length_s(least_s / max(1, len(blueprint.tasks)), most_s)

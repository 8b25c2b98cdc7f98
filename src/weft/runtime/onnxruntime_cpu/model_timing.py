"""Measuring a prepared model, and whether it can and should be batched.

A model can be batched if the first dimension of all its inputs and outputs is free, a run of several samples returns
the rows that each sample returns alone, and the rows are independent (``weft.runtime.rows``). It should be batched as
long as the time per sample, with joining the samples, falls. Samples of other shapes than the measured ones are batched
if rows are independent for other shapes, too. Batches can be shrunk and joined between segments if the same holds for
all tensors that cross the cuts. The samples of a stitched model alternate between its tasks, so that a measured batch
is as mixed as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from weft.base.errors import ModelError
from weft.base.shapes import Shapes
from weft.runtime.exits import Counted
from weft.runtime.onnxruntime_cpu.model import CpuModel
from weft.runtime.onnxruntime_cpu.sessions import first_line
from weft.runtime.rows import Verdict
from weft.runtime.samples import sample
from weft.runtime.tensors import Array, TensorSpec
from weft.runtime.timing import Clock

Feed = dict[str, Array]  # input -> its values

SIZES = (2, 4, 8)
"""Batch sizes to try if none is requested."""
_MOST_PROVED = 16
"""Largest batch size up to which independence is proved for every size, if computed indices decide where rows go."""
CLOCK_STEP_S = 1e-6
"""Assumed length of a run that the clock measured as 0 s, to avoid a division by zero."""
LEAST_GAIN = 0.05
"""The part of the time per sample that a size must save over the one before: less is within noise."""
_FEWEST, _ENOUGH, _MOST = 3, 5, 25
"""Rounds of a measurement: of long runs, of ordinary runs, and of very short runs."""
_BUDGET_S, _LONG_S, _ALL_S = 0.5, 0.5, 9.0
"""Seconds: for the rounds of short runs; of a round that counts as long; after which no larger batch is tried."""
_TOLERANCES = {np.dtype(np.float16): 2e-2, np.dtype(np.float32): 1e-3, np.dtype(np.float64): 1e-8}
"""Allowed error of a batched result, relative to the output's largest magnitude; other types must be equal."""


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Measured times of a model, and how far it is batched: the result of ``measure``."""

    times_s: dict[int, tuple[float, ...]]  # rows of a batch -> seconds of each segment
    batchable: bool = False
    max_batch: int = 1
    remarks: tuple[str, ...] = ()
    any_shapes: bool = False
    """Whether samples of other shapes than the measured shapes may be batched, too."""


class Crossing(NamedTuple):
    """Whether batches can be shrunk and joined at the cuts of a model: the result of ``crossing``."""

    reason: str | None  # why they cannot; None if they can
    rowless: dict[str, Counted | None]
    """Tensor that crosses a cut without a row per sample -> how it changes with the batch size; None: not at all."""


class _Signature(Protocol):
    """The inputs and outputs of a model."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...


class _Measurement:
    """The measurement of one model, with all results so far."""

    def __init__(self, model: CpuModel, shapes: Shapes, clock_s: Clock) -> None:
        """shapes: of its inputs at batch 1. clock_s: the clock of all measured times."""
        self.model, self.clock_s, self.began_s = model, clock_s, perf_counter()
        self.samples = _samples(model, shapes)
        self._task_count = len(model.blueprint.tasks) or 1
        self.mixes = {1: [[sample] for sample in self.samples[: self._task_count]]}
        """Batch size -> the batches that are timed, each a list of samples; in a stitched model, of different tasks."""
        self.timings: dict[int, list[tuple[float, ...]]] = {}
        """Batch size -> seconds of each segment, for each round."""
        self._alone: list[dict[str, Array]] = []  # the outputs of each sample alone; empty until they are needed
        self._verdicts: dict[int, str | None] = {}  # batch size -> result of ``row_mismatch``

    def make_batches(self, sizes: Iterable[int], shapes: Shapes | None = None) -> list[Feed]:
        """Batches of these *sizes* per task of the model, of samples with *shapes* or the measured shapes."""
        samples = self.samples if shapes is None else _samples(self.model, shapes)
        counts = [size * self._task_count for size in sizes]
        return [self.model.gather([samples[index % len(samples)] for index in range(count)]) for count in counts]

    def repeat(self, *sizes: int) -> None:
        """Time batches of these sizes in turns, and add the times to ``timings``; batches of one size are averaged."""
        began_s, rounds = perf_counter(), 0
        while rounds < _total_rounds(rounds, perf_counter() - began_s):
            for size in sizes:
                times_s = [_time_segments(self.model, samples, self.clock_s) for samples in self.mixes[size]]
                self.timings.setdefault(size, []).append(tuple(map(fmean, zip(*times_s, strict=True))))
            rounds += 1

    def fastest_s(self, size: int) -> float:
        """Seconds of the fastest run of the whole model at this batch size."""
        return min(map(sum, self.timings[size]))

    def medians_s(self) -> dict[int, tuple[float, ...]]:
        """Batch size -> median seconds of each segment."""
        return {size: tuple(map(median, zip(*runs, strict=True))) for size, runs in sorted(self.timings.items())}

    def too_long(self, size: int) -> bool:
        """Whether trying *size* would exceed the time of the measurement."""
        # In runs of half the size: 2 to compare rows, and 1 + 2 for both sizes in each of the fewest rounds.
        guess_s = self.fastest_s(size // 2) * (2 + 3 * _FEWEST)
        return perf_counter() - self.began_s + guess_s > _ALL_S

    def row_mismatch(self, size: int) -> str | None:
        """How the rows of batches of *size* differ from samples run alone, or None; the runs also warm up that size."""
        if size not in self._verdicts:
            try:
                self._verdicts[size] = self._compare_batch(size)
            except Exception as error:  # ONNX Runtime raises several unrelated kinds
                self._verdicts[size] = f"batch {size} fails: {first_line(error)}"
        return self._verdicts[size]

    def _compare_batch(self, size: int) -> str | None:
        """Choose the batches of *size* that are timed, and compare each with its samples run alone."""
        self._alone = self._alone or [self._run_alone(index) for index in range(len(self.samples))]
        self.mixes[size] = []
        for first in range(0, self._task_count, size):  # as many batches as have samples of all tasks
            indices = [(first + index) % len(self.samples) for index in range(size)]
            mix = [self.samples[index] for index in indices]
            self.mixes[size].append(mix)
            outputs = self.model.run(self.model.gather(mix))
            reason = self._mismatch(outputs, [self._alone[index] for index in indices])
            if reason is not None:
                return reason
        return None

    def _run_alone(self, index: int) -> dict[str, Array]:
        """The outputs of sample number *index* alone; of a stitched model, those of the sample's task."""
        outputs = self.model.run(self.model.gather([self.samples[index]]))
        tasks = self.model.blueprint.tasks
        return {name: outputs[name] for name in tasks[index % len(tasks)].outputs.values()} if tasks else outputs

    def _mismatch(self, outputs: dict[str, Array], alone: list[dict[str, Array]]) -> str | None:
        """How the outputs of a batch differ from those of its samples alone (*alone*, in order), or None."""
        for name, got in outputs.items():
            rows = [answers[name] for answers in alone if name in answers]
            if any(row.shape[:1] != (1,) for row in rows):
                return f"output {name!r} has {rows[0].shape[0]} rows for one sample"
            if rows and not close_enough(np.concatenate(rows), got):
                return f"output {name!r} of batch {len(alone)} is not that of its samples"
        return None


Judge = Callable[[Sequence[Feed]], Verdict]
"""Decides whether rows are independent, given batches of several sizes."""


def measure(
    model: CpuModel,
    shapes: Shapes,
    max_batch: int | None,
    clock_s: Clock,
    judge: Judge = lambda feeds: Verdict(None),
) -> BatchTimes:
    """Time *model* on samples of *shapes*, and choose the largest batch size, or check *max_batch* if it is given.

    *judge* decides whether rows are independent. ``ModelError`` if *max_batch* was given and is not possible.
    """
    bench = _Measurement(model, shapes, clock_s)
    # The cheapest checks come first.
    reason = unbatchable(model, shapes) or bench.row_mismatch(2)
    if reason is None and max_batch != 1:
        reason = judge(bench.make_batches([2])).mixing
    if reason is not None:
        return _times_unbatched(bench, max_batch, reason)
    times = _choose_largest_batch(bench) if max_batch is None else _time_up_to(bench, max_batch)
    return times if times.max_batch == 1 else _prove_independence(bench, times, shapes, max_batch, judge)


def _times_unbatched(bench: _Measurement, max_batch: int | None, reason: str) -> BatchTimes:
    """The times of a model that cannot be batched; ``ModelError`` if batches were requested."""
    if bench.model.blueprint.tasks:
        raise ModelError(f"is stitched, but its models cannot be run together: {reason}")
    if max_batch is not None and max_batch > 1:
        raise ModelError(f"max_batch is {max_batch}, but the model cannot be batched: {reason}")
    bench.repeat(1)
    times_s = {1: bench.medians_s()[1]}
    return BatchTimes(times_s, remarks=() if max_batch == 1 else (f"not batched: {reason}",))


def _prove_independence(
    bench: _Measurement, times: BatchTimes, shapes: Shapes, max_batch: int | None, judge: Judge
) -> BatchTimes:
    """Return *times* if rows are independent in batches of 2, 3 and the largest size, else times of single samples.

    2 and 3 have no common factor: a graph that mixes rows may look right where one size divides the other. If computed
    indices decide where rows go, it is proved for all sizes up to ``_MOST_PROVED``.
    """
    reason, by_size = judge(bench.make_batches(sorted({2, 3, times.max_batch})))
    if reason is None and by_size:
        reason = judge(bench.make_batches(range(2, min(times.max_batch, _MOST_PROVED) + 1))).mixing
    if reason is not None:
        return _times_unbatched(bench, max_batch, reason)
    return replace(times, any_shapes=not by_size or _holds_for_other_shapes(bench, shapes, judge))


def _holds_for_other_shapes(bench: _Measurement, shapes: Shapes, judge: Judge) -> bool:
    """Whether rows are also independent if all free dimensions but the rows are larger by one, as ``judge`` finds.

    Sizes that differ by one have no common factor, so that a graph that mixes rows cannot look right in both.
    """
    declared_shapes = {spec.name: spec.shape for spec in bench.model.inputs}
    larger = {  # + True is + 1
        name: (shape[0], *(size + (declared_shapes[name][axis] == -1) for axis, size in enumerate(shape[1:], 1)))
        for name, shape in shapes.items()
    }
    return larger == dict(shapes) or judge(bench.make_batches((2, 3), larger)).mixing is None


def _choose_largest_batch(bench: _Measurement) -> BatchTimes:
    """Double the batch size as long as the time per sample falls by ``LEAST_GAIN``; the last such size is the best."""
    best, remark = 1, None  # remark: why larger batches are not used
    for size in _sizes_to_try(len(bench.model.blueprint.tasks)):
        if size > 2 and bench.too_long(size):
            remark = f"batches of {size} were not tried: one takes too long"
        elif (reason := bench.row_mismatch(size)) is not None:
            remark = f"batched up to {best}: {reason}"
        elif (gain := _time_saved(bench, best, size)) < LEAST_GAIN:
            start = "not batched" if best == 1 else f"batched up to {best}"
            remark = f"{start}: batch {size} gains {max(gain, 0.0):.0%}"
        if remark is not None:
            break
        best = size
    times_s = {size: times for size, times in bench.medians_s().items() if size <= best}
    return BatchTimes(times_s, batchable=True, max_batch=best, remarks=(remark,) if remark else ())


def _sizes_to_try(tasks: int) -> list[int]:
    """Batch sizes to try: for a stitched model, at least up to its number of tasks."""
    sizes = list(SIZES)
    while sizes[-1] < tasks:
        sizes.append(2 * sizes[-1])
    return sizes


def _samples(model: CpuModel, shapes: Shapes) -> list[dict[str, Array]]:
    """Two samples; for a stitched model two of each task, in turn, each with the inputs of its task only."""
    samples = [sample(model.inputs, shapes, seed, model.blueprint.values) for seed in (0, 1)]
    if not model.blueprint.tasks:
        return samples
    return [{name: feed[name] for name in task.inputs.values()} for feed in samples for task in model.blueprint.tasks]


def _time_saved(bench: _Measurement, smaller: int, size: int) -> float:
    """Time both batch sizes; return the part of the time per sample that *size* saves over *smaller*.

    The fastest runs are compared, which noise changes least.
    """
    bench.repeat(smaller, size)
    smaller_s = max(bench.fastest_s(smaller), CLOCK_STEP_S) / smaller  # for one sample
    return 1 - bench.fastest_s(size) / size / smaller_s


def _time_up_to(bench: _Measurement, max_batch: int) -> BatchTimes:
    """Time the powers of two up to *max_batch*, and that itself; ``ModelError`` if the model cannot be batched so."""
    sizes = [size for power in range(1, 30) if (size := 2**power) < max_batch]
    sizes += [max_batch] if max_batch > 1 else []
    for size in sizes:
        if (reason := bench.row_mismatch(size)) is not None:
            raise ModelError(f"max_batch is {max_batch}, but the model cannot be batched to that size: {reason}")
    bench.repeat(1, *sizes)
    return BatchTimes(bench.medians_s(), batchable=True, max_batch=max_batch)


def crossing(model: CpuModel, shapes: Shapes) -> Crossing:
    """Whether batches can be shrunk and joined at the cuts of a model.

    They cannot if the declared shapes exclude batches, or if a run fails. Runs three samples alone, two together and
    three together, and compares all live tensors after each segment.
    """
    reason = unbatchable(model, shapes)
    if reason is not None:
        return Crossing(reason, {})
    alone = [sample(model.inputs, shapes, seed, model.blueprint.values) for seed in range(3)]
    runs: list[dict[str, Any]] = [*alone, _concatenate(alone[:2]), _concatenate(alone)]
    rowless: dict[str, Counted | None] = {}
    try:
        for index in range(len(model.segments)):
            runs = [model.run_segment(index, values) for values in runs]
            for name in runs[0]:
                tensors = [values[name] for values in runs]  # as ``_has_rows`` takes them
                if not _has_rows(tensors):
                    rowless[name] = _find_count_rule(name, tensors)
    except ModelError as error:
        return Crossing(str(error), {})
    except Exception as error:  # ONNX Runtime raises several unrelated kinds
        return Crossing(f"several samples together fail: {first_line(error)}", {})
    return Crossing(None, rowless)


def _concatenate(samples: list[dict[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([feed[name] for feed in samples]) for name in samples[0]}


def _has_rows(runs: list[Array]) -> bool:
    """Whether a tensor has a row per sample, equal to that of the sample alone.

    *runs*: its values for each of three samples alone, for the first two together, and for all three together.
    """
    *alone, two, three = runs
    if any(value.shape[:1] != (1,) for value in alone):
        return False
    return close_enough(np.concatenate(alone[:2]), two) and close_enough(np.concatenate(alone), three)


def _find_count_rule(name: str, runs: list[Array]) -> Counted | None:
    """How a tensor without rows depends on the number of samples; None if it is always the same.

    *runs*: as for ``_has_rows``. ``ModelError`` if its numbers do not grow linearly.
    """
    *alone, two, three = runs
    single: Any = alone[0]
    if all(np.array_equal(single, value) for value in runs):
        return None
    step: Any = two - single if single.dtype.kind == "i" and single.shape == two.shape == three.shape else None
    if (
        step is None
        or any(not np.array_equal(single, value) for value in alone)
        or not np.array_equal(two + step, three)
    ):
        raise ModelError(f"{name!r}, which crosses a cut, is not one row per sample")
    first, growth = (tuple(int(number) for number in np.ravel(values)) for values in (single, step))
    return Counted(dtype=str(single.dtype), shape=single.shape, first=first, step=growth)


def unbatchable(model: _Signature, shapes: Shapes) -> str | None:
    """Why the declared shapes of inputs and outputs, or the measured *shapes*, exclude batches; None if they do not."""
    for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
        for spec in tensors:
            if not spec.shape or spec.shape[0] != -1:
                return f"{kind} {spec.name!r} has no free first dimension"
    for name, shape in shapes.items():
        if shape[0] != 1:
            return f"input {name!r} is measured at {shape}; give it a shape that begins with 1"
    return None


def _total_rounds(rounds: int, spent_s: float) -> int:
    """The total number of rounds of a measurement whose first *rounds* rounds took *spent_s*."""
    if rounds == 0 or spent_s / rounds > _LONG_S:
        return _FEWEST
    return _MOST if spent_s < _BUDGET_S else _ENOUGH


def close_enough(wanted: Array, got: Array) -> bool:
    """Whether the output *got* of a batch equals the output *wanted*, within the tolerance of its type."""
    if wanted.shape != got.shape:
        return False
    tolerance = _TOLERANCES.get(wanted.dtype)
    if tolerance is None:
        return np.array_equal(wanted, got)
    magnitudes: Any = np.abs(wanted[np.isfinite(wanted)]) if wanted.size else np.zeros(1)
    scale = float(magnitudes.max()) if magnitudes.size else 0.0
    return bool(np.allclose(got, wanted, rtol=tolerance, atol=tolerance * scale, equal_nan=True))


def _time_segments(model: CpuModel, samples: list[Feed], clock_s: Clock) -> tuple[float, ...]:
    """Seconds of each segment of a batch; joining its samples counts for the first segment."""
    times_s, began_s = [], clock_s()
    values: dict[str, Any] = model.gather(samples)
    for index in range(len(model.segments)):
        values = model.run_segment(index, values)
        ended_s = clock_s()
        times_s.append(ended_s - began_s)
        began_s = ended_s
    return tuple(times_s)

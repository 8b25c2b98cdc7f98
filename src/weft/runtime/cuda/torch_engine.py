"""The compiled engine of a model on a device: it runs the model if its answers are right and ONNX Runtime is slower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import NamedTuple

from weft.base.errors import ModelError
from weft.devices.shares import GpuLikeness
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda import reference_answers
from weft.runtime.cuda.device import Device
from weft.runtime.cuda.likeness import measure_likeness
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.packages import find
from weft.runtime.cuda.pieces import OpenPieces
from weft.runtime.cuda.precision import BF16, FP16, FP32, difference
from weft.runtime.cuda.rounds import rung_sizes
from weft.runtime.cuda.torch_files import torch_device_name
from weft.runtime.cuda.torch_modules import conversion
from weft.runtime.cuda.torch_packages import open_packages
from weft.runtime.engines import COMPILED, ONNXRUNTIME
from weft.runtime.onnxruntime_cpu.allowance import Allowance
from weft.runtime.onnxruntime_cpu.model import Blueprint, SegmentSpec
from weft.runtime.tensors import Array

WITHIN = {FP32: 1e-3, FP16: 1e-2, BF16: 5e-2}
"""Largest difference of compiled results from float32 on the CPU, relative to the largest output."""


def compiled_model(device: Device, path: Path, options: LoadOptions, blueprint: Blueprint) -> DeviceModel:
    """The compiled model, from the packages that the options name; *blueprint*: as measured before.

    Raises ``ModelError`` if the packages cannot be used, give wrong answers or, unless the options demand the compiled
    engine, are slower.
    """
    folder = Path(options.packages or "")
    manifest, free_bytes = find(folder), device.memory()[0]
    if manifest is None:
        raise ModelError("its packages cannot be read")
    sizes = [rows for rows in rung_sizes(blueprint) if rows in manifest.packages]
    if sizes[-1:] != [blueprint.max_batch]:
        raise ModelError(f"batches of {blueprint.max_batch} rows were not compiled in time")
    converted = conversion(path, options.precision, torch_device_name(device))
    segments = open_packages(device, folder, manifest, converted)
    specs = tuple(segment.spec for segment in segments)
    exits = tuple(exit_.model_copy(update={"segment": _index_of(exit_.output, specs)}) for exit_ in blueprint.exits)
    cut_blueprint = blueprint.model_copy(update={"segments": specs, "exits": exits})
    pieces = OpenPieces(device, cut_blueprint, dict(zip(specs, segments, strict=True)), segments[0].weights)
    # The largest first, so that the graphs of smaller ones use its scratch memory instead of adding to it.
    rungs = [pieces.rung(rows) for rows in reversed(sizes)][::-1]
    mergeable = blueprint.batchable and len(specs) > 1 and all(rung.same_rows() for rung in rungs)
    if exits and not mergeable:
        raise ModelError("compiled, what crosses its exits is not one row per sample")
    remarks: list[str] = []
    like: dict[int, GpuLikeness] = {}
    if options.shares:
        with Allowance(options.learn_s) as allowance:
            like = measure_likeness(device, rungs, pieces.weights.bytes, allowance, remarks)
    remarks += pieces.gate(rungs)
    times_s = {rung.rows: rung.segment_times() for rung in rungs}
    # A batch takes as long as the next larger size that was compiled.
    by_rows_s = {rows: next(times_s[size] for size in sizes if size >= rows) for rows in range(1, sizes[-1] + 1)}
    used_bytes = max(0, free_bytes - device.memory()[0])
    changes = {"times_s": by_rows_s, "like": like, "mergeable": mergeable, "memory_bytes": used_bytes}
    model = pieces.model(rungs, **changes)
    answers = reference_answers.read(folder)
    deviation = max(_deviation(expected, model.run(inputs)) for inputs, expected in answers)
    if deviation > WITHIN[options.precision]:
        model.close()
        raise ModelError(f"compiled, it differs from float32 by {deviation:.1e} of the largest output")
    comparison = EngineComparison.of(blueprint, {rows: sum(seconds) for rows, seconds in times_s.items()})
    if comparison.speedup <= 1 and options.engine != COMPILED:
        model.close()
        raise SlowerCompiled(comparison)
    model.timing = replace(model.timing, engine="compiled", engines_s=comparison.engines_s)
    pieces_text = "one piece" if len(specs) == 1 else f"{len(specs)} pieces"
    remark = f"compiled, in {pieces_text}: {comparison}; differs from float32 by {deviation:.1e}"
    model.remarks = (*blueprint.remarks, *remarks, remark)
    return model


def _index_of(output: str, segments: Sequence[SegmentSpec]) -> int:
    """The index of the segment that returns *output*."""
    return next(index for index, segment in enumerate(segments) if output in segment.outputs)


def _deviation(expected: Mapping[str, Array], answers: Mapping[str, Array]) -> float:
    """How far *answers*, at the end and at exits, are from those of the file, which may have more outputs."""
    return difference({name: expected[name] for name in answers}, answers)


class EngineComparison(NamedTuple):
    """Times of a model as it ran before and compiled: rows of a batch -> seconds."""

    before: str
    """The engine that ran it before, as in ``SegmentTiming.engine``."""
    before_s: Mapping[int, float]
    compiled_s: Mapping[int, float]

    @classmethod
    def of(cls, blueprint: Blueprint, compiled_s: Mapping[int, float]) -> EngineComparison:
        """The comparison with the times in the blueprint of the model as it ran before."""
        before = "torch" if any(spec.nodes for spec in blueprint.segments) else ONNXRUNTIME
        return cls(before, {rows: sum(blueprint.times_s[rows]) for rows in compiled_s}, compiled_s)

    @property
    def engines_s(self) -> dict[str, Mapping[int, float]]:
        return {self.before: self.before_s, COMPILED: self.compiled_s}

    @property
    def speedup(self) -> float:
        """How many times faster the compiled model is (geometric mean)."""
        ratios = [self.before_s[rows] / max(1e-9, took_s) for rows, took_s in self.compiled_s.items()]
        return exp(sum(map(log, ratios)) / len(ratios))

    def __str__(self) -> str:
        """Both times of the smallest and the largest batch."""
        other = "torch step by step" if self.before == "torch" else "ONNX Runtime"
        return "; ".join(
            f"{self.compiled_s[rows] * 1e3:.3g} ms for {rows} rows, {self.before_s[rows] * 1e3:.3g} in {other}"
            for rows in dict.fromkeys((min(self.compiled_s), max(self.compiled_s)))
        )


class SlowerCompiled(ModelError):
    """The compiled model is slower than it was before."""

    def __init__(self, comparison: EngineComparison) -> None:
        super().__init__(f"compiled, it is slower: {comparison}")
        self.comparison = comparison

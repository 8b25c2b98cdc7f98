"""The compiled engine of a model on a device: it runs the model if its answers are right and ONNX Runtime is slower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path

from weft.base.errors import ModelError
from weft.models.onnx_graph import load
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda.device import Device
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.packages import Manifest, find
from weft.runtime.cuda.pieces import OpenPieces, random_batch, unseen
from weft.runtime.cuda.precision import BF16, FP16, FP32, difference
from weft.runtime.cuda.rounds import rung_sizes
from weft.runtime.cuda.torch_onnx import OnnxModule, folded
from weft.runtime.cuda.torch_packages import PackagedSegment
from weft.runtime.cuda.torch_types import PRECISIONS
from weft.runtime.engines import COMPILED
from weft.runtime.onnxruntime_cpu.model import Blueprint
from weft.runtime.onnxruntime_cpu.sessions import open_model
from weft.runtime.tensors import Array

WITHIN = {FP32: 1e-3, FP16: 1e-2, BF16: 5e-2}
"""Largest difference of compiled results from float32 on the CPU, relative to the largest output."""


def compiled_model(device: Device, path: Path, options: LoadOptions, blueprint: Blueprint) -> DeviceModel:
    """The compiled model, from the packages that the options name; *blueprint*: as measured with ONNX Runtime.

    Raises ``ModelError`` if the packages cannot be used, give wrong answers or, unless the options demand the compiled
    engine, are slower.
    """
    folder = Path(options.packages or "")
    manifest, free_bytes = find(folder), device.memory()[0]
    if manifest is None:
        raise ModelError("its packages cannot be read")
    sizes = [rows for rows in rung_sizes(blueprint) if rows in manifest.constants]
    if sizes[-1:] != [blueprint.max_batch]:
        raise ModelError(f"batches of {blueprint.max_batch} rows were not compiled in time")
    segment = _segment(device, path, options, blueprint, folder, manifest)
    whole = blueprint.model_copy(update={"segments": (segment.spec,), "mergeable": False})
    pieces = OpenPieces(device, whole, {segment.spec: segment}, segment.weights)
    rungs = [pieces.rung(rows) for rows in sizes]
    times_s = {rung.rows: rung.timed(0) for rung in rungs}
    # A batch takes as long as the next larger size that was compiled.
    by_rows_s = {rows: (next(times_s[size] for size in sizes if size >= rows),) for rows in range(1, sizes[-1] + 1)}
    used_bytes = max(0, free_bytes - device.memory()[0])
    model = pieces.model(rungs, times_s=by_rows_s, memory_bytes=used_bytes)
    deviation = _deviation(model, path, options, sizes)
    if deviation > WITHIN[options.precision]:
        model.close()
        raise ModelError(f"compiled, it differs from float32 by {deviation:.1e} of the largest output")
    speedup, comparison = _speedup(blueprint, times_s)
    if speedup <= 1 and options.engine != COMPILED:
        model.close()
        raise ModelError(f"compiled, it is slower: {comparison}")
    model.timing = replace(model.timing, engine="compiled")
    remark = f"compiled, in one piece: {comparison}; differs from float32 by {deviation:.1e}"
    model.remarks = (*blueprint.remarks, remark)
    return model


def _segment(
    device: Device, path: Path, options: LoadOptions, blueprint: Blueprint, folder: Path, manifest: Manifest
) -> PackagedSegment:
    """The model as one segment, with the packages of all compiled batch sizes; *folder*, *manifest*: where they are."""
    dtype = PRECISIONS[options.precision]

    def converted(shapes: Mapping[str, Sequence[int]]) -> OnnxModule:
        """The torch module for inputs of other shapes than the compiled ones."""
        model = folded(load(path, weights=True), shapes)
        return OnnxModule(model, dtype, channels_last=dtype is not None)

    segment, shapes = PackagedSegment(device, folder, manifest, converted), blueprint.warm_shapes or {}
    for rows in manifest.constants:
        batched = blueprint.batchable
        segment.add(rows, {name: (rows, *shape[1:]) if batched else shape for name, shape in shapes.items()})
    return segment


def _deviation(model: DeviceModel, path: Path, options: LoadOptions, sizes: Sequence[int]) -> float:
    """The largest difference of answers from float32 on the CPU, for one row and for the largest batch."""
    session = open_model(path, max(4, options.threads))
    names = [spec.name for spec in model.outputs]

    def deviation_of(feed: dict[str, Array]) -> float:
        outputs = model.run(feed)
        return difference(dict(zip(names, session.run(names, feed), strict=True)), outputs)

    # ``sizes[1:][-1:]``: the largest size, and nothing if 1 is the only one.
    feeds = [unseen(model.blueprint), *(random_batch(model.blueprint, rows) for rows in sizes[1:][-1:])]
    return max(map(deviation_of, feeds))


def _speedup(blueprint: Blueprint, times_s: Mapping[int, float]) -> tuple[float, str]:
    """How many times faster the compiled model is than ONNX Runtime (geometric mean), and both times in words.

    times_s: rows of a batch -> seconds of the compiled model.
    """
    ort_s = {rows: sum(blueprint.times_s[rows]) for rows in times_s}
    ratios = [ort_s[rows] / max(1e-9, took_s) for rows, took_s in times_s.items()]
    extremes = dict.fromkeys((min(times_s), max(times_s)))
    comparisons = [f"{times_s[n] * 1e3:.3g} ms for {n} rows, {ort_s[n] * 1e3:.3g} in ONNX Runtime" for n in extremes]
    return exp(sum(map(log, ratios)) / len(ratios)), "; ".join(comparisons)

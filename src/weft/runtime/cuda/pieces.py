"""The segments of a model, opened on a device, and the model made of them at its batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

from weft.runtime.cuda.device import Device
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.rounds import StitchedDeviceModel, rung_sizes, segments_at
from weft.runtime.cuda.rung import Rung
from weft.runtime.cuda.segments import DeviceWeights, SegmentSession, open_segments
from weft.runtime.onnxruntime_cpu.model import Blueprint, SegmentSpec
from weft.runtime.onnxruntime_cpu.samples import sample
from weft.runtime.tensors import Array

NHWC = "com.ms.internal.nhwc"
"""The domain of operators over tensors whose channels lie last."""


class OpenPieces(NamedTuple):
    """The segments of a model on a device."""

    device: Device
    blueprint: Blueprint
    sessions: dict[SegmentSpec, SegmentSession]
    weights: DeviceWeights

    def rung(self, rows: int) -> Rung:
        """The model at a batch size, captured."""
        found, batched = self.blueprint, self.blueprint.batchable and not self.blueprint.tasks
        segments = [self.sessions[each] for each in segments_at(found, rows)]
        return Rung(self.device, rows, segments, batch_of(found, rows), batched=batched)

    def model(self, rungs: Sequence[Rung], **changes: Any) -> DeviceModel:
        """The model as it is served, with changes to its blueprint."""
        kind = StitchedDeviceModel if self.blueprint.tasks else DeviceModel
        sessions = [self.sessions[each] for each in self.blueprint.segments]
        return kind(self.device, self.blueprint.model_copy(update=changes), sessions, self.weights, rungs)


def open_pieces(device: Device, folder: Path, blueprint: Blueprint) -> OpenPieces:
    """Sessions for all batch sizes of a model whose files lie in *folder*; each opens when it is needed."""
    specs = list(dict.fromkeys(each for rows in rung_sizes(blueprint) for each in segments_at(blueprint, rows)))
    last = _channels_last(folder, blueprint.segments)
    sessions, weights = open_segments(device, folder, specs, channels_last=last)
    return OpenPieces(device, blueprint, dict(zip(specs, sessions, strict=True)), weights)


def _channels_last(folder: Path, segments: Sequence[SegmentSpec]) -> bool:
    files = [onnx.load(str(folder / each.file), load_external_data=False) for each in segments if each.file]
    return any(node.domain == NHWC for each in files for node in each.graph.node)


def batch_of(blueprint: Blueprint, rows: int) -> dict[str, Array]:
    """Made-up inputs of so many rows, of a stitched model for each task: two samples in turn."""
    shapes = blueprint.warm_shapes or {}
    drawn = [sample(blueprint.inputs, shapes, seed, blueprint.values) for seed in (0, 1)]
    if rows == 1:
        return drawn[0]
    return {name: np.concatenate([drawn[row % 2][name] for row in range(rows)]) for name in drawn[0]}

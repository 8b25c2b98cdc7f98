"""The segments (pieces) of a model, opened on a device, and the model that consists of them at its batch sizes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weft.runtime.cuda.device import NO_STOPS, Device
from weft.runtime.cuda.likeness import captured_on_parts
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.rounds import StitchedDeviceModel, rung_sizes, segments_at
from weft.runtime.cuda.rung import Rung
from weft.runtime.cuda.segments import DeviceSegment, DeviceWeights
from weft.runtime.onnxruntime_cpu.model import Blueprint, SegmentSpec
from weft.runtime.onnxruntime_cpu.sessions import first_line
from weft.runtime.samples import sample
from weft.runtime.tensors import Array

log = logging.getLogger("weft.device")


class OpenPieces(NamedTuple):
    """The segments of a model on a device, for any kind of file."""

    device: Device
    blueprint: Blueprint
    segments: Mapping[SegmentSpec, DeviceSegment]
    """The segments of all batch sizes, which differ in a stitched model (``segments_at``)."""
    weights: DeviceWeights

    def rung(self, rows: int) -> Rung:
        """Capture the model for batches of *rows* rows; of a stitched model, *rows* rows of each task."""
        blueprint, batched = self.blueprint, self.blueprint.batchable and not self.blueprint.tasks
        segments = [self.segments[spec] for spec in segments_at(blueprint, rows)]
        return Rung(self.device, rows, segments, random_batch(blueprint, rows), batched=batched)

    def model(self, rungs: Sequence[Rung], **changes: Any) -> DeviceModel:
        """The model as it is served, with *changes* to fields of its blueprint."""
        model_class = StitchedDeviceModel if self.blueprint.tasks else DeviceModel
        segments = [self.segments[spec] for spec in self.blueprint.segments]
        return model_class(self.device, self.blueprint.model_copy(update=changes), segments, self.weights, rungs)

    def gate(self, rungs: Sequence[Rung]) -> list[str]:
        """Give all rungs gates, if the model and the device allow that; if one fails, none has gates.

        Returns a remark if the device is the reason why there are none.
        """
        if self.blueprint.tasks or len(self.blueprint.segments) == 1 or any(rung.uncaptured for rung in rungs):
            return []
        if not (why := self.device.ungated):
            try:
                for rung in rungs:
                    rung.add_gates()
                return []
            except Exception as error:  # drivers raise kinds of their own; without gates the host starts every segment
                why = first_line(error)
                for rung in rungs:
                    rung.remove_gates()
        return [] if why == NO_STOPS else [f"the host starts every segment, as there are no gates: {why}"]

    def assembled(self, free_before: int) -> DeviceModel:
        """Capture a prepared model at every batch size; *free_before*: free device memory before opening, in bytes."""
        rungs = [self.rung(rows) for rows in rung_sizes(self.blueprint)]
        for rung in rungs:
            if rung.rows in self.blueprint.like and (why := captured_on_parts(self.device, rung)):
                log.warning("batches of %d rows run on no part of their device: %s", rung.rows, why)
        for remark in self.gate(rungs):
            log.warning("%s", remark)
        self.device.finish()
        used_bytes = max(self.weights.bytes, free_before - self.device.memory()[0])
        return self.model(rungs, memory_bytes=used_bytes)


_UNSEEN = 2
"""Seed of inputs that are not used for warm-up or capture."""


def unseen(blueprint: Blueprint) -> dict[str, Array]:
    """Inputs for comparing answers, other than in the capture: a faulty graph may repeat the answers it captured."""
    return sample(blueprint.inputs, blueprint.warm_shapes or {}, _UNSEEN, blueprint.values)


def random_batch(blueprint: Blueprint, rows: int) -> dict[str, Array]:
    """Random inputs of *rows* rows, two random samples in turn; for a stitched model, *rows* rows for each task."""
    shapes = blueprint.warm_shapes or {}
    samples = [sample(blueprint.inputs, shapes, seed, blueprint.values) for seed in (0, 1)]
    if rows == 1:
        return samples[0]
    return {name: np.concatenate([samples[row % 2][name] for row in range(rows)]) for name in samples[0]}

"""Measurements of a model on parts of its device, taken when it is loaded, as far as time and memory allow.

The result for a batch size is a ``GpuLikeness``: the model's speed on each part relative to the whole device, the time
of its kernels and its share of the memory's bandwidth. From these the scheduler predicts how it runs beside others. The
most common batch sizes come first: a single request, and full batches. Sizes that are left out count as on the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.devices.shares import GpuLikeness
from weft.runtime.cuda.device import Device
from weft.runtime.cuda.rung import Rung
from weft.runtime.onnxruntime_cpu.allowance import Allowance
from weft.runtime.onnxruntime_cpu.sessions import first_line

MEMORY_PART = 0.25
"""Share of the free memory that one model may take for captures on parts of the device; the rest is for others."""
LEAST_SPEED, MOST_SPEED = 0.01, 4.0
"""Plausible speeds on a part relative to the whole device; a measurement outside is clipped, it was disturbed."""


def captured_on_parts(device: Device, rung: Rung) -> str:
    """Capture a batch size on every part of the device; returns why that failed, or an empty text."""
    try:
        rung.add_parts([device.model_view(part) for part in range(1, len(device.cuts.parts) + 1)])
    except Exception as error:  # sessions, torch and drivers raise kinds of their own; the captures are optional
        return first_line(error)
    return ""


def measure_on_parts(device: Device, rung: Rung, weight_bytes: int, bandwidth: float) -> GpuLikeness:
    """Measure a captured batch size on all parts: its speed relative to the whole device, and its time per kernel.

    *bandwidth*: of the device's memory, in bytes per second. The share of it that the model uses is estimated from
    *weight_bytes* and the bytes that cross its cuts.
    """
    segments = range(rung.segments)
    whole_s = max(1e-9, sum(rung.timed(segment) for segment in segments))
    speeds = {device.cuts.sms: 1.0}
    for part, sms in zip(rung.parts, device.cuts.parts, strict=False):
        part_s = max(1e-9, sum(rung.timed(segment, part) for segment in segments))
        speeds[sms] = min(MOST_SPEED, max(LEAST_SPEED, whole_s / part_s))
    moved_bytes = weight_bytes + 2 * rung.memory.byte_size  # what crosses cuts is written and read
    kernel_us = max(0.1, whole_s * 1e6 / rung.kernels)
    return GpuLikeness(speeds=speeds, kernel_us=min(1e6, kernel_us), memory=min(1.0, moved_bytes / whole_s / bandwidth))


class PartsBudget:
    """The time and the device memory that captures on parts may take for one model."""

    def __init__(self, device: Device, allowance: Allowance) -> None:
        self._device, self._allowance, self._free_bytes = device, allowance, device.memory()[0]

    def spent(self) -> str:
        """Which budget is spent, in words; empty while some of both is left."""
        if self._allowance.is_half_used():
            return "half of learn_s is used"
        taken_bytes = self._free_bytes - self._device.memory()[0]
        return "a quarter of the free memory is taken" if taken_bytes > MEMORY_PART * self._free_bytes else ""


def measure_likeness(
    device: Device, rungs: Sequence[Rung], weight_bytes: int, allowance: Allowance, remarks: list[str]
) -> dict[int, GpuLikeness]:
    """Rows of a batch size -> its measurements; sizes beyond the budget are left out, with the reason in *remarks*.

    rungs: the captured batch sizes, ascending. weight_bytes: of the model. allowance: its time limit.
    """
    if device.uncut:
        remarks.append(f"shares the device on plain streams: {device.uncut}")
    likenesses: dict[int, GpuLikeness] = {}
    budget = PartsBudget(device, allowance)
    try:
        bandwidth = device.bandwidth()
    except Exception as error:  # there may be too little memory for a copy
        remarks.append(f"on no part of the device: {first_line(error)}")
        return likenesses
    for rung in _common_sizes_first(rungs):
        why = budget.spent() or captured_on_parts(device, rung)
        if why:
            remarks.append(f"on parts of the device at {len(likenesses)} of {len(rungs)} batch sizes: {why}")
            break
        likenesses[rung.rows] = measure_on_parts(device, rung, weight_bytes, bandwidth)
    return likenesses


def _common_sizes_first(rungs: Sequence[Rung]) -> Iterator[Rung]:
    """Yield the smallest batch size first, then from the largest down."""
    yield rungs[0]
    yield from reversed(rungs[1:])

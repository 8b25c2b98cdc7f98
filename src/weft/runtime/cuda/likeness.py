"""What a model is like on parts of its device: captured and timed there when it is loaded, as far as that may go.

The batch sizes that are served most come first: a request alone, and full batches. Whatever is left out runs as on the
whole device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.devices.shares import GpuLikeness
from weft.runtime.cuda.device import Device
from weft.runtime.cuda.rung import Rung
from weft.runtime.onnxruntime_cpu.allowance import Allowance
from weft.runtime.onnxruntime_cpu.sessions import first_line

MEMORY_PART = 0.25
"""So much of the memory that is free may go into what is captured on parts of the device for one model."""
LEAST_SPEED, MOST_SPEED = 0.01, 4.0
"""Speeds on a part that are believed."""


def captured_on_parts(device: Device, rung: Rung) -> str:
    """Have a batch size captured on every part of the device; why it is not, where that cannot be had."""
    try:
        rung.add_parts([device.own(part) for part in range(1, len(device.cuts.parts) + 1)])
    except Exception as error:  # sessions, torch and drivers raise kinds of their own; it runs without, too
        return first_line(error)
    return ""


def like_on(device: Device, rung: Rung, weight_bytes: int, bandwidth: float) -> GpuLikeness:
    """What a batch size is like that was captured; the memory's part is what weights and cuts alone move."""
    segments = range(rung.segments)
    whole_s = max(1e-9, sum(rung.timed(at) for at in segments))
    speeds = {device.cuts.sms: 1.0}
    for part, sms in zip(rung.parts, device.cuts.parts, strict=False):
        part_s = max(1e-9, sum(rung.timed(at, part) for at in segments))
        speeds[sms] = min(MOST_SPEED, max(LEAST_SPEED, whole_s / part_s))
    moved = weight_bytes + 2 * rung.memory.byte_size
    kernel_us = max(0.1, whole_s * 1e6 / rung.kernels)
    return GpuLikeness(speeds=speeds, kernel_us=min(1e6, kernel_us), memory=min(1.0, moved / whole_s / bandwidth))


class PartsBudget:
    """The time and the memory that parts of the device may take of a model."""

    def __init__(self, device: Device, allowance: Allowance) -> None:
        self._device, self._allowance, self._free = device, allowance, device.memory()[0]

    def spent(self) -> str:
        """What there is no more of; empty while there is some."""
        if self._allowance.half_gone():
            return "half of learn_s is gone"
        taken = self._free - self._device.memory()[0]
        return "a quarter of the free memory is taken" if taken > MEMORY_PART * self._free else ""


def measured_likeness(
    device: Device, rungs: Sequence[Rung], weight_bytes: int, allowance: Allowance, remarks: list[str]
) -> dict[int, GpuLikeness]:
    """Rows of a batch size -> what it is like; those that the budget leaves out are not there. *remarks*: why."""
    if device.uncut:
        remarks.append(f"shares the device on plain streams: {device.uncut}")
    found: dict[int, GpuLikeness] = {}
    budget = PartsBudget(device, allowance)
    try:
        bandwidth = device.bandwidth()
    except Exception as error:  # there may be too little memory for a copy
        remarks.append(f"on no part of the device: {first_line(error)}")
        return found
    for rung in _by_use(rungs):
        why = budget.spent() or captured_on_parts(device, rung)
        if why:
            remarks.append(f"on parts of the device at {len(found)} of {len(rungs)} batch sizes: {why}")
            break
        found[rung.rows] = like_on(device, rung, weight_bytes, bandwidth)
    return found


def _by_use(rungs: Sequence[Rung]) -> Iterator[Rung]:
    """The smallest and the largest first."""
    yield rungs[0]
    yield from reversed(rungs[1:])

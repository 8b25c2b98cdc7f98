"""A model at one batch size: memory for all that crosses its cuts, and every segment captured on it.

Where lanes are parts of the device, segments are captured once more for each, over the same memory and weights. A lane
that has no such runs has those of the whole device.

Batches of a few rows less are computed on it as well, with rows that nobody asks for. The memory is the rung's own, so
a second batch of the size overwrites what the first one left there; ``secure`` copies away what is still needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from math import prod

from weft.models.element_types import numpy_dtype
from weft.runtime.cuda.device import Device, Tensor, places
from weft.runtime.cuda.segments import DeviceSegment, Runnable
from weft.runtime.onnxruntime_cpu.sessions import first_line
from weft.runtime.tensors import Array

WHOLE = 0
"""The whole device, among its parts."""


class DeviceValues:
    """What a batch holds between two segments: tensors by name, some in the memory of a rung, some in its own."""

    __slots__ = ("__weakref__", "rows", "rung", "tensors")

    def __init__(self, rung: Rung, rows: int, tensors: dict[str, Tensor]) -> None:
        self.rung, self.rows, self.tensors = rung, rows, tensors

    def onward(self, tensors: dict[str, Tensor]) -> DeviceValues:
        """What the same batch holds after another segment."""
        return DeviceValues(self.rung, self.rows, tensors)


class Rung:
    """One batch size of a model on a device."""

    def __init__(
        self, device: Device, rows: int, segments: Sequence[DeviceSegment], feed: Mapping[str, Array], *, batched: bool
    ) -> None:
        """feed: made-up inputs of so many rows, to see the shapes and to warm it up."""
        self.rows, self.batched, self._device = rows, batched, device
        self.uncaptured: dict[int, str] = {}
        """Segments that could not be captured, and why."""
        self.types: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}
        self._owners: dict[str, weakref.ref[DeviceValues]] = {}
        self._bound: list[Runnable] = []
        """Sessions and their bindings, which are needed as long as what was captured of them."""
        self._segments = segments
        own = [each.again(device) for each in segments]
        self._lay_out(own, feed)
        self._runs = {WHOLE: [self._captured(at, each) for at, each in enumerate(own)]}
        """Part -> how each segment is run there."""

    def _lay_out(self, segments: Sequence[DeviceSegment], feed: Mapping[str, Array]) -> None:
        """Run once to see what there is, and have memory for it."""
        device, found = self._device, segments[0].loose(feed)
        seen = segments[0].seen(found, list(feed))

        def run() -> None:
            for each in segments:
                found.update(each.run_loose(found))
                seen.update(each.seen(found, each.spec.outputs))

        device.plainly(run)
        device.finish()
        offsets, size = places([prod(shape) * numpy_dtype(kind).itemsize for shape, kind in seen.values()])
        self.memory = device.movable(size, kept=False)
        for (name, (shape, kind)), at in zip(seen.items(), offsets, strict=True):
            self.types[name], self.tensors[name] = kind, self.memory.tensor(at, shape, kind)
        for name, array in feed.items():
            device.copy(self.tensors[name], device.copy_in([array]))
        device.finish()

    def _captured(self, at: int, segment: DeviceSegment) -> Callable[[], None]:
        try:
            return self._replayed(segment, self._device)
        except Exception as error:  # what cannot be captured can be run
            self.uncaptured[at] = first_line(error)
            plain = segment.bound(self.tensors, self.types)
            return lambda: self._device.plainly(plain.run)

    def _replayed(self, segment: DeviceSegment, device: Device) -> Callable[[], None]:
        """What replays a segment."""
        bound = segment.bound(self.tensors, self.types)
        if segment.copies:
            bound = segment.fixed(self.tensors, self.types).bound(self.tensors, self.types)
        replay = device.capture(bound.run)
        self._bound.append(bound)
        return replay

    def add_parts(self, parts: Sequence[Device]) -> None:
        """Have runs for the parts of the device, each of which stays on its own; or for none, where that fails.

        This is all that knows how such runs are made.
        """
        whole, found, before = self._runs[WHOLE], {}, len(self._bound)
        try:
            for part, device in enumerate(parts, 1):
                found[part] = [
                    whole[at] if at in self.uncaptured else self._replayed(each.again(device), device)
                    for at, each in enumerate(self._segments)
                ]
        except BaseException:
            del self._bound[before:]  # sessions take memory
            raise
        self._runs |= found

    @property
    def segments(self) -> int:
        """How many it has."""
        return len(self._segments)

    @property
    def parts(self) -> list[int]:
        """The parts that it has runs for, the whole not counted."""
        return [part for part in self._runs if part != WHOLE]

    @property
    def kernels(self) -> int:
        """How many kernels all segments have."""
        return sum(map(self._device.kernels, self._runs[WHOLE]))

    def run(self, segment: int) -> None:
        """Start a segment on what lies in the memory."""
        self._runs.get(self._device.part, self._runs[WHOLE])[segment]()

    def timed(self, segment: int, part: int = 0) -> float:
        """Seconds of a segment, on the whole device or on a part that it has runs for."""
        with self._device.on(self._device.cuts.lane_of(part)) if part else nullcontext():
            return self._device.timed(self._runs[part][segment])

    def rows_of(self, tensor: Tensor, rows: int) -> Tensor:
        """The first rows of a tensor, if it has rows."""
        return tensor[:rows] if self.batched else tensor

    def secure(self, name: str, consumed: Collection[DeviceValues] = ()) -> None:
        """A tensor is about to be written to: whoever still needs what is there gets it in memory of their own.

        consumed: values that the step takes, which nobody needs after it.
        """
        owner = self._owners.pop(name, None)
        values = owner() if owner else None
        if values is not None and values not in consumed and values.tensors.get(name) is self.tensors[name]:
            values.tensors[name] = self._device.clone(self.tensors[name])

    def own(self, name: str, values: DeviceValues) -> None:
        """What lies there belongs to these values from now on."""
        self._owners[name] = weakref.ref(values)

    def clear(self, names: Collection[str]) -> None:
        """Fill tensors with zeros, in the order of computing."""
        for name in names:
            self.tensors[name][...] = 0

    def same_rows(self) -> bool:
        """Whether every tensor has as many rows as the batch."""
        return all(tuple(each.shape)[:1] == (self.rows,) for each in self.tensors.values())

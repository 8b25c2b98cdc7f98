"""A model at one batch size: memory for all that crosses its cuts, and every segment captured on it.

Batches of a few rows less are computed on it as well, with rows that nobody asks for. The memory is the rung's own, so
a second batch of the size overwrites what the first one left there; ``secure`` copies away what is still needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod

from weft.runtime.cuda.device import Device, Tensor, numpy_type, places
from weft.runtime.cuda.segments import DeviceSegment, Runnable
from weft.runtime.onnxruntime_cpu.sessions import first_line
from weft.runtime.tensors import Array


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
        own = [each.again() for each in segments]
        self._lay_out(own, feed)
        self._runs = [self._captured(at, each) for at, each in enumerate(own)]

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
        offsets, size = places([prod(shape) * numpy_type(kind).itemsize for shape, kind in seen.values()])
        self.memory = device.movable(size, kept=False)
        for (name, (shape, kind)), at in zip(seen.items(), offsets, strict=True):
            self.types[name], self.tensors[name] = kind, self.memory.tensor(at, shape, kind)
        for name, array in feed.items():
            device.copy(self.tensors[name], device.copy_in([array]))
        device.finish()

    def _captured(self, at: int, segment: DeviceSegment) -> Callable[[], None]:
        bound = segment.bound(self.tensors, self.types)
        try:
            if segment.copies:
                bound = segment.fixed(self.tensors, self.types).bound(self.tensors, self.types)
            return self._kept(bound, self._device.capture(bound.run))
        except Exception as error:  # what cannot be captured can be run
            self.uncaptured[at] = first_line(error)
            plain = segment.bound(self.tensors, self.types)
            return lambda: self._device.plainly(plain.run)

    def _kept(self, bound: Runnable, replay: Callable[[], None]) -> Callable[[], None]:
        """Keep a session and its binding as long as what was captured of them."""
        self._bound.append(bound)
        return replay

    def run(self, segment: int) -> None:
        """Start a segment on what lies in the memory."""
        self._runs[segment]()

    def timed(self, segment: int) -> float:
        """Seconds of a segment."""
        return self._device.timed(self._runs[segment])

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

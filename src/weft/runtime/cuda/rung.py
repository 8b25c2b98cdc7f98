"""A model at one batch size: memory for everything that crosses its cuts, and every segment captured on it.

A model has a ladder of batch sizes, its *rungs*. Where lanes run on parts of the device, segments are captured once
more for each part, over the same memory and weights. A lane without such captures uses those of the whole device.

A rung also computes smaller batches, with padding rows. A rung has one memory, so a second batch overwrites the values
of the first; ``copy_before_overwrite`` copies those that are still needed.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from statistics import median
from time import perf_counter
from typing import Any

from weft.devices.host import Gates
from weft.models.element_types import numpy_dtype
from weft.runtime.cuda.device import Device, Tensor, aligned_offsets
from weft.runtime.cuda.gates import NEVER_STOPPED, NO_GENERATION, REFUSED, Computed, GateMemory, SegmentSpan
from weft.runtime.cuda.segments import DeviceSegment, Runnable
from weft.runtime.onnxruntime_cpu.sessions import first_line
from weft.runtime.tensors import Array

WHOLE = 0
"""Number of the whole device among its parts."""


class DeviceValues:
    """Values of a batch between two segments: tensors by name, some of which are in the memory of a rung."""

    __slots__ = ("__weakref__", "rows", "rung", "tensors")

    def __init__(self, rung: Rung, rows: int, tensors: dict[str, Tensor]) -> None:
        """rows: of the batch, without the rung's padding rows."""
        self.rung, self.rows, self.tensors = rung, rows, tensors

    def onward(self, tensors: dict[str, Tensor]) -> DeviceValues:
        """The values of the same batch after another segment: *tensors*."""
        return DeviceValues(self.rung, self.rows, tensors)


class GatedLaunch:
    """Several segments of a batch that were launched at once."""

    def __init__(
        self,
        segments: int,
        taken: Sequence[DeviceValues],
        values_after: Callable[[int], DeviceValues],
        ended: Computed,
    ) -> None:
        """taken: the values that it began with, unless they are inputs.

        values_after: returns the values of the batch, in the memory of the rung, after a number of its segments.
        """
        self.segments, self.taken, self.values_after, self.ended = segments, taken, values_after, ended
        self.computed: int | None = None
        """How many segments were computed; None until the end is noted (``Rung.note_end``)."""
        self.left: DeviceValues | None = None
        """The values of the batch if a gate ended the launch behind a segment."""


class Rung:
    """One batch size of a model on a device: memory for its values, and its segments as captured graphs."""

    def __init__(
        self, device: Device, rows: int, segments: Sequence[DeviceSegment], feed: Mapping[str, Array], *, batched: bool
    ) -> None:
        """Allocate memory and capture all segments for *rows* rows.

        feed: random inputs of *rows* rows, to learn shapes and warm up. batched: tensors have a row per sample; False:
        the model takes one sample at a time, or has rows of several tasks.
        """
        self.rows, self.batched, self._device = rows, batched, device
        self.uncaptured: dict[int, str] = {}
        """Index of a segment that could not be captured -> why."""
        self.types: dict[str, int] = {}  # tensor -> ONNX element type
        self.tensors: dict[str, Tensor] = {}
        self._owners: dict[str, weakref.ref[DeviceValues]] = {}
        """Tensor -> the values of the batch that its content belongs to; weak, as values are freed with their batch."""
        self._bound: list[Runnable] = []  # sessions and their bindings, kept because captured graphs use their memory
        self._segments = segments
        # Sessions of its own: a session that meets other shapes would invalidate its captures.
        instances = [segment.new_instance(device) for segment in segments]
        self._allocate(instances, feed)
        self._runs = {WHOLE: [self._capture_or_run(index, segment) for index, segment in enumerate(instances)]}
        """Part -> for each segment, the function that runs it on that part."""
        self._part_devices = {WHOLE: device}
        self._gate_memory: GateMemory | None = None
        self._gated: dict[int, Any] = {}
        """Part -> the graph of all segments with gates; empty if the rung has no gates."""
        self.lock = threading.Lock()
        """Held while a launch with gates is made, and while its end is noted: both change whose values the memory
        holds, and a launch must have copied away exactly what the launches of its generation leave."""
        self._generation = 0  # launches that gates have ended, as far as is known
        self._under_way: deque[GatedLaunch] = deque()
        """Launches whose ends were not noted, in the order of the device."""

    def _allocate(self, segments: Sequence[DeviceSegment], feed: Mapping[str, Array]) -> None:
        """Run once to learn the shapes, and allocate memory for them."""
        device, values = self._device, segments[0].from_arrays(feed)
        layouts = segments[0].layouts(values, list(feed))  # tensor -> its shape and ONNX element type

        def run() -> None:
            for segment in segments:
                values.update(segment.run_uncaptured(values))
                layouts.update(segment.layouts(values, segment.spec.outputs))

        device.run_uncaptured(run)
        device.finish()
        offsets, size = aligned_offsets([prod(shape) * numpy_dtype(kind).itemsize for shape, kind in layouts.values()])
        self.memory = device.movable(size, kept=False)
        for (name, (shape, kind)), offset in zip(layouts.items(), offsets, strict=True):
            self.types[name], self.tensors[name] = kind, self.memory.tensor(offset, shape, kind)
        for name, array in feed.items():
            device.copy(self.tensors[name], device.copy_in([array]))
        device.finish()

    def _capture_or_run(self, index: int, segment: DeviceSegment) -> Callable[[], None]:
        """The function that runs segment number *index*: by a captured graph, or if it cannot be captured without."""
        try:
            return self._capture(segment, self._device)
        except Exception as error:  # a segment that cannot be captured is run without a graph
            self.uncaptured[index] = first_line(error)
            bound = segment.bind(self.tensors, self.types)
            return lambda: self._device.run_uncaptured(bound.run)

    def _capture(self, segment: DeviceSegment, device: Device) -> Callable[[], None]:
        """Capture a segment; returns the function that replays it."""
        bound = segment.bind(self.tensors, self.types)
        if segment.copies:  # a replay would copy from memory of the host that is gone
            bound = segment.specialised(self.tensors, self.types).bind(self.tensors, self.types)
        replay = device.capture(bound.run)
        self._bound.append(bound)
        return replay

    def add_parts(self, parts: Sequence[Device]) -> None:
        """Capture all segments on each part of the device; if one capture fails, keep none of them."""
        whole, part_runs, bound_before = self._runs[WHOLE], {}, len(self._bound)
        try:
            for part, device in enumerate(parts, 1):
                part_runs[part] = [  # what could not be captured on the whole device is not tried on parts
                    whole[index] if index in self.uncaptured else self._capture(segment.new_instance(device), device)
                    for index, segment in enumerate(self._segments)
                ]
        except BaseException:
            del self._bound[bound_before:]  # the new sessions, which take memory
            raise
        self._runs |= part_runs
        self._part_devices |= dict(enumerate(parts, 1))

    # Gates

    @property
    def gated(self) -> bool:
        """Whether several segments can be launched at once, with gates between them."""
        return bool(self._gated)

    def add_gates(self) -> None:
        """Join the captured segments of every part to one graph with gates; raises if that is impossible."""
        memory = self._device.gate_memory(len(self.tensors))
        graphs = {part: self._part_devices[part].gated(memory, runs) for part, runs in self._runs.items()}
        self._gate_memory, self._gated = memory, graphs

    def remove_gates(self) -> None:
        """Free the graphs with gates."""
        self._gate_memory, self._gated = None, {}

    def launch(
        self,
        span: tuple[int, int],
        slot: int,
        values: DeviceValues,
        taken: Sequence[DeviceValues],
        values_after: Callable[[int], DeviceValues],
    ) -> GatedLaunch:
        """Launch segments of a batch on the part of the calling thread's lane; *lock* is held.

        span: index of the first segment, and of the one behind the last. slot: of the stop table. values: those of the
        batch; what is elsewhere than in the rung's memory is copied there before the first segment, if that is
        computed. taken, values_after: as for ``GatedLaunch``.
        """
        assert self._gate_memory is not None
        first, end = span
        sources = {name: tensor for name, tensor in values.tensors.items() if tensor is not self.tensors[name]}
        computed_names = [name for segment in self._segments[first:end] for name in segment.spec.outputs]
        for name in (*sources, *computed_names):
            self.copy_before_overwrite(name, taken)
        rows = values.rows
        copies = [(self.rows_of(self.tensors[name], rows), self.rows_of(sources[name], rows)) for name in sources]
        graph = self._gated.get(self._device.part, self._gated[WHOLE])
        ended = self._gate_memory.launch(graph, SegmentSpan(first, end, slot, self._generation), copies)
        launch = GatedLaunch(end - first, taken, values_after, ended)
        self._under_way.append(launch)
        return launch

    def note_end(self, launch: GatedLaunch) -> int:
        """Note that a launch has ended, and so those before it; returns how many segments it computed.

        *lock* is held.
        """
        while launch.computed is None:
            self._note_first_end()
        return launch.computed

    def note_ends(self) -> None:
        """Note that all launches have ended."""
        with self.lock:
            while self._under_way:
                self._note_first_end()

    def _note_first_end(self) -> None:
        """Note the end of the oldest launch; if a gate ended it, those behind it are refused."""
        launch = self._under_way.popleft()
        count = launch.ended()
        launch.computed = 0 if count == REFUSED else count
        if count in (REFUSED, launch.segments):
            return
        self._generation += 1
        if count:
            launch.left = launch.values_after(count)
            self.own(launch.left)
        # Nothing is or will be overwritten by launches that compute nothing: what they began with stays where it was.
        for idle in self._under_way if count else (launch, *self._under_way):
            for values in idle.taken:
                self.own(values)

    def segment_times(self) -> tuple[float, ...]:
        """Seconds of each segment on the whole device, without gates."""
        return tuple(self.timed(segment) for segment in range(self.segments))

    def gate_costs(self) -> Gates:
        """What the gates cost on the whole device; no step of the model may be running.

        A launch that ends early takes as long besides its segments as one that computes nothing.
        """
        assert self._gate_memory is not None
        memory, graph, launch_s = self._gate_memory, self._gated[WHOLE], list[float]()
        nothing, ends = SegmentSpan(0, self.segments, NEVER_STOPPED, NO_GENERATION), list[Computed]()

        def launch_nothing() -> None:
            began_s = perf_counter()
            ends.append(memory.launch(graph, nothing, ()))
            launch_s.append(perf_counter() - began_s)

        leave_s = self._device.timed(launch_nothing)
        for ended in ends:
            ended()
        plain_s = self._device.timed(self._run_all)
        gate_s = max(0.0, self._timed_gated() - plain_s) / self.segments
        gate_us, leave_us, launch_us = [round(seconds * 1e6, 2) for seconds in (gate_s, leave_s, median(launch_s))]
        return Gates(gate_us=gate_us, leave_us=leave_us, launch_us=launch_us)

    def _run_all(self) -> None:
        """Start all segments, one after another."""
        for segment in range(self.segments):
            self.run(segment)

    def _timed_gated(self) -> float:
        """Seconds of all segments in one launch, on the whole device."""

        def run() -> None:
            with self.lock:
                values = DeviceValues(self, self.rows, {})
                self.launch((0, self.segments), NEVER_STOPPED, values, (), lambda _: values)

        duration_s = self._device.timed(run)
        self.note_ends()
        return duration_s

    @property
    def segments(self) -> int:
        """Number of segments."""
        return len(self._segments)

    @property
    def parts(self) -> list[int]:
        """Numbers of the parts that have captures, without the whole device."""
        return [part for part in self._runs if part != WHOLE]

    @property
    def kernels(self) -> int:
        """Number of kernels in all captured segments together."""
        return sum(map(self._device.kernels, self._runs[WHOLE]))

    def run(self, segment: int) -> None:
        """Start a segment on the values in the rung's memory, on the part of the calling thread's lane."""
        self._runs.get(self._device.part, self._runs[WHOLE])[segment]()

    def timed(self, segment: int, part: int = 0) -> float:
        """Seconds of a segment, on the whole device (0) or on a part that has captures."""
        with self._device.lane_context(self._device.cuts.lane_of(part)) if part else nullcontext():
            return self._device.timed(self._runs[part][segment])

    def rows_of(self, tensor: Tensor, rows: int) -> Tensor:
        """The first *rows* rows of a tensor; all of it if its first axis is not the samples."""
        return tensor[:rows] if self.batched else tensor

    def copy_before_overwrite(self, name: str, consumed: Collection[DeviceValues] = ()) -> None:
        """Copy the tensor *name* for the batch whose values it holds, if any: the caller overwrites it now.

        consumed: batches that do not need it any more, as the step that overwrites it takes their values.
        """
        owner = self._owners.pop(name, None)
        values = owner() if owner else None
        if values is not None and values not in consumed and values.tensors.get(name) is self.tensors[name]:
            values.tensors[name] = self._device.clone(self.tensors[name])

    def set_owner(self, name: str, values: DeviceValues) -> None:
        """Record that the content of the tensor *name* now belongs to *values*."""
        self._owners[name] = weakref.ref(values)

    def own(self, values: DeviceValues) -> None:
        """Record for all of a batch's tensors in the rung's memory that their content belongs to it."""
        for name, tensor in values.tensors.items() if values.rung is self else ():
            if tensor is self.tensors[name]:
                self.set_owner(name, values)

    def clear(self, names: Collection[str]) -> None:
        """Fill the tensors of these names with zeros, in the order of the lane's work."""
        for name in names:
            self.tensors[name][...] = 0

    def same_rows(self) -> bool:
        """Whether every tensor has as many rows as the batch."""
        return all(tuple(tensor.shape)[:1] == (self.rows,) for tensor in self.tensors.values())

"""Tensors of requests that lie in regions: read before a request is computed, written before it is answered.

Small tensors are copied on the event loop. Many bytes, and many strings, are copied in a thread pool, so that other
requests do not wait for them. Bytes that are read count as held, as if they had arrived with the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from weft.base.errors import BadRequest, TooLarge
from weft.http.limits import UNCOUNTED_BYTES, ByteBudget
from weft.runtime.client_memory import LENT_FROM_BYTES, LentPart, LentTensor
from weft.runtime.tensors import Array
from weft.serving.regions import Region, RegionPart
from weft.serving.wire import (
    Fitted,
    InferRequest,
    InferResponse,
    ModelSpec,
    SharedTensors,
    bytes_elements,
    check_size,
    from_binary,
    output_array,
    to_binary,
)

HERE_BYTES = 1 << 20
"""Bytes of a request that are copied on the event loop at most, which takes less than half a millisecond."""
STRING_BYTES_HERE, STRINGS_HERE = 64 * 1024, 4096
"""Bytes of strings, and number of strings, that are converted on the event loop: each string is an object."""
THREADS = 2
"""Threads of each pool: copying is limited by memory bandwidth, and more would compete with the lanes for cores."""

Find = Callable[[str], Region]
"""Returns a region by its name."""
Result = TypeVar("Result")


class _InputPlace(NamedTuple):
    """Where in a region an input lies, and its checked description."""

    region: Region
    part: RegionPart
    fitted: Fitted


class _OutputPlace(NamedTuple):
    """Where in a region an output is to be written."""

    region: Region
    part: RegionPart


class _OutputWrite(NamedTuple):
    """An output that is written to a region."""

    name: str
    region: Region
    part: RegionPart
    """Where the bytes are written, and their exact number."""


class RegionTensors:
    """Copies tensors between requests and regions, here or in threads."""

    def __init__(self, budget: ByteBudget, most_bytes: int) -> None:
        """budget: counts the bytes that are held. most_bytes: limit on the inputs in regions of one request."""
        self.budget, self.most_bytes = budget, most_bytes
        self._threads: ThreadPoolExecutor | None = None
        self._device_threads: ThreadPoolExecutor | None = None

    def run_in_thread(self, work: Callable[[], Result]) -> Awaitable[Result]:
        """Run a copy in the thread pool."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="regions")
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def run_in_device_thread(self, work: Callable[[], Result]) -> Awaitable[Result]:
        """Run a copy that waits for a device, in a thread pool of its own, so that it does not delay other copies."""
        if self._device_threads is None:
            self._device_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="regions of a device")
        return asyncio.get_running_loop().run_in_executor(self._device_threads, work)

    def close(self) -> None:
        """Start no more copies; running ones are not waited for."""
        for pool in (self._threads, self._device_threads):
            if pool:
                pool.shutdown(wait=False, cancel_futures=True)


class RequestRegions:
    """The regions of one request, held until its end: unregistering one meanwhile affects later requests only."""

    def __init__(self, copier: RegionTensors, tensors: SharedTensors, find: Find) -> None:
        """find: returns a region by name. RequestError if a region does not exist or is too small for its tensor."""
        self._copier = copier
        self._inputs = {
            name: _InputPlace(_region_of(find, part, "input", name), part, fitted)
            for name, (part, fitted) in tensors.inputs.items()
        }
        self._outputs = {
            name: _OutputPlace(_region_of(find, part, "output", name), part) for name, part in tensors.outputs.items()
        }
        self._lent: list[_InputPlace] = []
        """The inputs that the model reads from their regions, and again if the request is retried."""
        self._held_bytes = 0

    def read_inputs(self, request: InferRequest, *, borrows: bool) -> InferRequest | Awaitable[InferRequest]:
        """Read the inputs in regions into the request, here or in a thread, and return the request.

        borrows: whether the model can read long inputs directly from the region, without a copy. TooLarge or Overloaded
        beyond the limits on bytes.
        """
        inputs, self._inputs = self._inputs, {}
        self._check_size_limit(sum([place.part.byte_size for place in inputs.values()]))
        if borrows:
            for name in [name for name, place in inputs.items() if _is_lendable(place)]:
                self._lent.append(inputs[name])
                request.inputs[name] = _lend(inputs.pop(name))
        self._hold(sum([place.part.byte_size for place in inputs.values()]))
        request.shared = None

        def read() -> InferRequest:
            request.inputs |= {name: _read(place) for name, place in inputs.items()}
            return request

        return read() if _are_small_inputs(inputs.values()) else self._copier.run_in_thread(read)

    def lend_outputs(self, model: ModelSpec) -> dict[str, LentPart]:
        """Return the parts of regions into which a device can write the outputs: those of all outputs, or none."""
        outputs, specs = self._outputs, model.outputs_by_name
        if not all(_is_writable(place, specs[name].datatype) for name, place in outputs.items()):
            return {}
        if _overlap([_OutputWrite(name, *place) for name, place in outputs.items()]):
            return {}  # they may fit all the same, which is known when they are computed
        if any([_is_written(place, outputs.values()) for place in self._lent]):
            return {}  # a retry would read what the first try has written
        return {
            name: LentPart(place.region, place.part.offset, place.part.byte_size) for name, place in outputs.items()
        }

    def write_outputs(
        self, response: InferResponse, *, written: bool = False
    ) -> InferResponse | Awaitable[InferResponse]:
        """Write outputs into the requested regions, here or in a thread; return the response with their places.

        written: whether a device has written them already.
        """
        outputs = self._outputs
        if not outputs:
            return response
        specs = response.model.outputs_by_name
        arrays = {name: output_array(response.outputs, specs[name]) for name in outputs}
        if written:
            response.shared = _check_written(outputs, arrays)
            return response

        def write() -> InferResponse:
            response.shared = _write_outputs(outputs, arrays)
            return response

        if any([place.region.on_device for place in outputs.values()]):
            return self._copier.run_in_device_thread(write)
        return write() if _are_small_outputs(arrays) else self._copier.run_in_thread(write)

    def end(self) -> None:
        """Release the regions and the held bytes, after the answer or when the client has disconnected."""
        self._inputs, self._outputs = {}, {}
        held_bytes, self._held_bytes = self._held_bytes, 0
        self._copier.budget.release(held_bytes)

    def _check_size_limit(self, count: int) -> None:
        """Raise TooLarge if *count*, the bytes of all inputs in regions, exceeds the limit."""
        if count > self._copier.most_bytes:
            limit = self._copier.most_bytes
            raise TooLarge(f"{count} bytes of inputs in regions exceed the limit of {limit} bytes for a request")

    def _hold(self, count: int) -> None:
        """Reserve *count* bytes, which are about to be read, in the byte budget until the end of the request."""
        if count > UNCOUNTED_BYTES:
            self._copier.budget.take(count)
            self._held_bytes = count


def _region_of(find: Find, part: RegionPart, kind: str, name: str) -> Region:
    """Find the region of a tensor; BadRequest if it is too small for it."""
    region = find(part.region)
    if part.end > region.byte_size:
        raise BadRequest(
            f"{kind} {name!r} would end at byte {part.end} of region {part.region!r}, which has {region.byte_size} "
            "bytes; lower its shared_memory_offset or shared_memory_byte_size, or register a larger region"
        )
    return region


def _are_small_inputs(inputs: Iterable[_InputPlace]) -> bool:
    """Tell whether inputs are small enough to be read on the event loop."""
    string_bytes = other_bytes = 0
    for place in inputs:
        _, dtype, _, _ = place.fitted
        if dtype.kind == "O":
            string_bytes += place.part.byte_size
        else:
            other_bytes += place.part.byte_size
    return string_bytes <= STRING_BYTES_HERE and other_bytes <= HERE_BYTES


def _is_lendable(place: _InputPlace) -> bool:
    """Tell whether a device may read an input directly from its region.

    Strings must be decoded and BOOLs checked on the host; short inputs in the host's memory are copied.
    """
    _, dtype, _, _ = place.fitted
    return dtype.kind not in "Ob" and (place.region.on_device or place.part.byte_size >= LENT_FROM_BYTES)


def _is_writable(place: _OutputPlace, datatype: str) -> bool:
    """Tell whether a device may write an output directly into its region; strings must be encoded on the host."""
    return datatype != "BYTES" and (place.region.on_device or place.part.byte_size >= LENT_FROM_BYTES)


def _lend(place: _InputPlace) -> LentTensor:
    """Return an input as a reference to its region, which a device reads; nothing is copied here."""
    _, dtype, shape, _ = place.fitted
    check_size(place.part.byte_size, place.fitted)
    return LentTensor(place.region, place.part.offset, shape, dtype)


def _read(place: _InputPlace) -> Array:
    """Read an input from its region with a single copy: the tensor is a view of the buffer."""
    buffer = np.empty(place.part.byte_size, np.uint8).data
    place.region.read_into(buffer, place.part.offset)
    return from_binary(buffer, place.fitted)


def _are_small_outputs(arrays: Mapping[str, Array]) -> bool:
    """Tell whether outputs are small enough to be written on the event loop."""
    texts = [array for array in arrays.values() if array.dtype.kind in "OUS"]
    if texts:
        if sum(array.size for array in texts) > STRINGS_HERE:
            return False
        if sum(len(item) for array in texts for item in bytes_elements(array)) > STRING_BYTES_HERE:
            return False
    return sum([array.nbytes for array in arrays.values()]) <= HERE_BYTES


def _payload(array: Array) -> memoryview:
    """Return a tensor's bytes in binary form, without a copy if it is contiguous and holds no strings."""
    if array.dtype.kind in "OUS":
        return memoryview(to_binary(array))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write_outputs(outputs: Mapping[str, _OutputPlace], arrays: Mapping[str, Array]) -> dict[str, RegionPart]:
    """Write outputs into their regions; if one does not fit, none is written."""
    payloads = {name: _payload(arrays[name]) for name in outputs}
    writes = [_plan_write(name, *place, len(payloads[name])) for name, place in outputs.items()]
    _refuse_overlaps(writes)
    for output in writes:
        output.region.write_from(payloads[output.name], output.part.offset)
    return {output.name: output.part for output in writes}


def _check_written(outputs: Mapping[str, _OutputPlace], arrays: Mapping[str, Array]) -> dict[str, RegionPart]:
    """Return where a device has written outputs; BadRequest if the client has cut off that memory meanwhile."""
    writes = [_plan_write(name, *place, arrays[name].nbytes) for name, place in outputs.items()]
    for output in writes:
        output.region.check_end(output.part.end)
    return {output.name: output.part for output in writes}


def _plan_write(name: str, region: Region, part: RegionPart, byte_size: int) -> _OutputWrite:
    """Pair an output of *byte_size* bytes with its part of a region; BadRequest if the part is too small."""
    if byte_size > part.byte_size:
        raise BadRequest(
            f"output {name!r} has {byte_size} bytes, and shared_memory_byte_size leaves {part.byte_size} for it in "
            f"region {part.region!r}; give it as many as it has"
        )
    return _OutputWrite(name, region, part._replace(byte_size=byte_size))


def _is_written(read: _InputPlace, outputs: Iterable[_OutputPlace]) -> bool:
    """Tell whether an input shares bytes with an output, as far as one region shows it."""
    return any(
        [
            place.region is read.region and place.part.offset < read.part.end and read.part.offset < place.part.end
            for place in outputs
        ]
    )


def _overlap(writes: list[_OutputWrite]) -> tuple[_OutputWrite, _OutputWrite] | None:
    """Return two outputs that overlap in a region, if there are any."""
    ordered = sorted(writes, key=lambda output: (output.part.region, output.part.offset))
    for first, second in pairwise(ordered):
        if first.region is second.region and first.part.end > second.part.offset:
            return first, second
    return None


def _refuse_overlaps(writes: list[_OutputWrite]) -> None:
    """Raise BadRequest if two outputs would overlap in a region."""
    if pair := _overlap(writes):
        first, second = pair
        raise BadRequest(
            f"output {first.name!r} ends at byte {first.part.end} of region {first.part.region!r}, beyond byte "
            f"{second.part.offset}, where output {second.name!r} begins; set its shared_memory_offset apart"
        )

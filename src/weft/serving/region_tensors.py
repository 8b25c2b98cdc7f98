"""Tensors of requests that lie in regions: read before a request is computed, written before it is answered.

A few are copied on the event loop, once each. Many bytes, and many strings, are copied in threads beside it, as nobody
else shall wait for them. What is read counts towards what the server holds, as if it had come with the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from weft.base.errors import BadRequest, TooLarge
from weft.http.limits import UNCOUNTED_BYTES, ByteBudget
from weft.runtime.client_memory import LentTensor
from weft.runtime.tensors import Array
from weft.serving.regions import Region, RegionPart
from weft.serving.wire import (
    Fitted,
    InferRequest,
    InferResponse,
    SharedTensors,
    check_size,
    from_binary,
    produced,
    strings,
    to_binary,
)

HERE_BYTES = 1 << 20
"""Up to so many bytes of a request are copied on the event loop, which takes less than half a millisecond."""
STRING_BYTES_HERE, STRINGS_HERE = 64 * 1024, 4096
"""Up to so much of strings, and up to so many of them: each is an object of its own."""
THREADS = 2
LENT_FROM_BYTES = 128 * 1024
"""Shorter inputs may be copied by the driver on a core, which would meet a region that was cut off."""

Find = Callable[[str], Region]
Result = TypeVar("Result")


class _InputPlace(NamedTuple):
    region: Region
    part: RegionPart
    fitted: Fitted


class _OutputPlace(NamedTuple):
    region: Region
    part: RegionPart


class _Outgoing(NamedTuple):
    """An output's bytes on their way."""

    name: str
    region: Region
    part: RegionPart
    """Where they go, and no more than there is."""
    data: memoryview


class RegionTensors:
    """Copies tensors between requests and regions, here or in threads."""

    def __init__(self, budget: ByteBudget, most_bytes: int) -> None:
        """most_bytes: what one request may have read."""
        self.budget, self.most_bytes = budget, most_bytes
        self._threads: ThreadPoolExecutor | None = None
        self._device_threads: ThreadPoolExecutor | None = None

    def of(self, tensors: SharedTensors, find: Find) -> RequestRegions:
        """The regions that a request uses; RequestError if it cannot use them so."""
        return RequestRegions(self, tensors, find)

    def beside(self, work: Callable[[], Result]) -> Awaitable[Result]:
        """Have something done in a thread."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="regions")
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def through_device(self, work: Callable[[], Result]) -> Awaitable[Result]:
        """Have something done in a thread that waits for a device, behind nobody who does not."""
        if self._device_threads is None:
            self._device_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="regions of a device")
        return asyncio.get_running_loop().run_in_executor(self._device_threads, work)

    def close(self) -> None:
        """Begin no more; what is being copied is not waited for."""
        for each in (self._threads, self._device_threads):
            if each:
                each.shutdown(wait=False, cancel_futures=True)


class RequestRegions:
    """The regions of one request, held until it is over: who unregisters one meanwhile takes it from later requests."""

    def __init__(self, copier: RegionTensors, tensors: SharedTensors, find: Find) -> None:
        self._copier = copier
        self._inputs = {
            name: _InputPlace(_found(find, part, "input", name), part, fitted)
            for name, (part, fitted) in tensors.inputs.items()
        }
        self._outputs = {
            name: _OutputPlace(_found(find, part, "output", name), part) for name, part in tensors.outputs.items()
        }
        self._held_bytes = 0

    def filled(self, request: InferRequest, *, borrows: bool) -> InferRequest | Awaitable[InferRequest]:
        """The request with the inputs that lie in regions.

        borrows: its model takes long ones from where they lie.
        """
        inputs, self._inputs = self._inputs, {}
        self._check(sum(each.part.byte_size for each in inputs.values()))
        if borrows:
            lent = {name: each for name, each in inputs.items() if _is_lent(each)}
            request.inputs |= {name: _lent(each) for name, each in lent.items()}
            inputs = {name: each for name, each in inputs.items() if name not in lent}
        self._hold(sum(each.part.byte_size for each in inputs.values()))
        request.shared = None

        def read() -> InferRequest:
            request.inputs |= {name: _read(each) for name, each in inputs.items()}
            return request

        return read() if _few(inputs.values()) else self._copier.beside(read)

    def delivered(self, response: InferResponse) -> InferResponse | Awaitable[InferResponse]:
        """The answer, once those outputs are in their regions that shall be there."""
        outputs = self._outputs
        if not outputs:
            return response
        specs = {spec.name: spec for spec in response.model.outputs}
        arrays = {name: produced(response.outputs, specs[name]) for name in outputs}

        def write() -> InferResponse:
            return replace(response, shared=_written(outputs, arrays))

        if any(each.region.on_device for each in outputs.values()):
            return self._copier.through_device(write)
        return write() if _short(arrays) else self._copier.beside(write)

    def end(self) -> None:
        """The request is over, or nobody waits for it."""
        self._inputs, self._outputs = {}, {}
        held, self._held_bytes = self._held_bytes, 0
        self._copier.budget.give(held)

    def _check(self, count: int) -> None:
        if count > self._copier.most_bytes:
            limit = self._copier.most_bytes
            raise TooLarge(f"{count} bytes of inputs in regions exceed the limit of {limit} bytes for a request")

    def _hold(self, count: int) -> None:
        """Count what is about to be read, until the request is over."""
        if count > UNCOUNTED_BYTES:
            self._copier.budget.take(count)
            self._held_bytes = count


def _found(find: Find, part: RegionPart, kind: str, name: str) -> Region:
    """The region that a tensor lies in, which must be large enough."""
    region = find(part.region)
    if part.end > region.byte_size:
        raise BadRequest(
            f"{kind} {name!r} would end at byte {part.end} of region {part.region!r}, which has {region.byte_size} "
            "bytes; lower its shared_memory_offset or shared_memory_byte_size, or register a larger region"
        )
    return region


def _few(inputs: Iterable[_InputPlace]) -> bool:
    """Whether inputs are read so fast that nobody minds."""
    sizes = {True: 0, False: 0}
    for each in inputs:
        sizes[each.fitted[1].kind == "O"] += each.part.byte_size
    return sizes[True] <= STRING_BYTES_HERE and sizes[False] <= HERE_BYTES


def _is_lent(place: _InputPlace) -> bool:
    """Whether a device takes an input from where it lies; short ones are as fast to read, and BOOLs are looked at."""
    kind = place.fitted[1].kind
    return kind not in "Ob" and (place.region.on_device or place.part.byte_size >= LENT_FROM_BYTES)


def _lent(place: _InputPlace) -> LentTensor:
    _, dtype, shape, _ = place.fitted
    check_size(place.part.byte_size, place.fitted)
    return LentTensor(place.region, place.part.offset, shape, dtype)


def _read(place: _InputPlace) -> Array:
    """One copy: the tensor is a view of what was read."""
    buffer = np.empty(place.part.byte_size, np.uint8).data
    place.region.read_into(buffer, place.part.offset)
    return from_binary(buffer, place.fitted)


def _short(arrays: Mapping[str, Array]) -> bool:
    """Whether outputs are written so fast that nobody minds."""
    texts = [array for array in arrays.values() if array.dtype.kind in "OUS"]
    if sum(array.size for array in texts) > STRINGS_HERE:
        return False
    if sum(len(item) for array in texts for item in strings(array)) > STRING_BYTES_HERE:
        return False
    return sum(array.nbytes for array in arrays.values()) <= HERE_BYTES


def _payload(array: Array) -> memoryview:
    """A tensor's bytes, without a copy where they lie in their order."""
    if array.dtype.kind in "OUS":
        return memoryview(to_binary(array))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _written(outputs: Mapping[str, _OutputPlace], arrays: Mapping[str, Array]) -> dict[str, RegionPart]:
    """Put outputs where they shall be; if one has no room there, none is written."""
    writing = [_outgoing(name, *place, _payload(arrays[name])) for name, place in outputs.items()]
    _check_apart(writing)
    for each in writing:
        each.region.write_from(each.data, each.part.offset)
    return {each.name: each.part for each in writing}


def _outgoing(name: str, region: Region, part: RegionPart, data: memoryview) -> _Outgoing:
    if len(data) > part.byte_size:
        raise BadRequest(
            f"output {name!r} has {len(data)} bytes, and shared_memory_byte_size leaves {part.byte_size} for it in "
            f"region {part.region!r}; give it as many as it has"
        )
    return _Outgoing(name, region, part._replace(byte_size=len(data)), data)


def _check_apart(writing: list[_Outgoing]) -> None:
    """Refuse outputs that would lie over each other."""
    ordered = sorted(writing, key=lambda each: (each.part.region, each.part.offset))
    for first, second in pairwise(ordered):
        if first.region is second.region and first.part.end > second.part.offset:
            raise BadRequest(
                f"output {first.name!r} ends at byte {first.part.end} of region {first.part.region!r}, beyond byte "
                f"{second.part.offset}, where output {second.name!r} begins; set its shared_memory_offset apart"
            )

"""Shared memory of CUDA: memory of a GPU that a client has, and whose handle it registers under a name.

The server itself never sees that memory. The worker that has the GPU opens the handle when a request first needs it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Mapping

from weft.base.errors import BadRequest, Forbidden, RequestError
from weft.runtime.lent import HANDLE_BYTES, Lender, LendingTerms
from weft.serving.regions import OFF, REGION_NUMBERS, Regions, whole

Write = Callable[[Lender, int, memoryview], None]
"""Puts bytes at an offset of a region, and returns when they are there."""


class CudaRegion:
    """Memory of a GPU that a client shares."""

    on_device = True
    file: int | None = None

    def __init__(self, name: str, handle: bytes, device: int, byte_size: int, write: Write) -> None:
        self.name, self.device, self.byte_size, self._write = name, device, byte_size, write
        self.terms = LendingTerms(next(REGION_NUMBERS), "cuda", 0, byte_size, handle.hex(), device)

    @property
    def place(self) -> str:
        return f"device {self.device}"

    def told(self) -> dict[str, str | int]:
        return {"name": self.name, "device_id": self.device, "byte_size": self.byte_size}

    def read_into(self, buffer: memoryview, offset: int) -> None:
        raise BadRequest(
            f"region {self.name!r} lies on a GPU, where only tensors of numbers are read, and only for models that run "
            "there; use system shared memory, or send the tensor itself"
        )

    def write_from(self, data: memoryview, offset: int) -> None:
        self._write(self, offset, data)


class CudaMemory(Regions[CudaRegion]):
    """The regions of CUDA's shared memory that clients have registered."""

    def __init__(
        self, devices: Collection[int], write: Write, *, enabled: bool, most_regions: int, most_bytes: int
    ) -> None:
        """devices: the GPUs that models run on; none: on processors."""
        super().__init__(_why_not(devices, enabled), most_regions, most_bytes)
        self._devices, self._write = sorted(devices), write

    def opened(self, name: str, about: Mapping[str, object], byte_size: int) -> CudaRegion:
        device = whole(about.get("device_id", 0), f"region {name!r}: device_id")
        if device not in self._devices:
            here = ", ".join(map(str, self._devices))
            raise BadRequest(f"region {name!r} lies on GPU {device}, and models run on GPU {here}")
        return CudaRegion(name, _handle(name, about.get("raw_handle")), device, byte_size, self._write)


def _handle(name: str, given: object) -> bytes:
    """The handle: bytes over gRPC, Base64 in an object over HTTP."""
    if isinstance(given, Mapping):
        given = given.get("b64")
    try:
        found = base64.b64decode(given, validate=True) if isinstance(given, str) else given
    except (binascii.Error, ValueError):
        found = None
    if not isinstance(found, bytes) or len(found) != HANDLE_BYTES:
        raise BadRequest(
            f"region {name!r}: raw_handle must be a handle of CUDA, {HANDLE_BYTES} bytes, over HTTP as "
            '{"b64": "..."} in Base64'
        )
    return found


def _why_not(devices: Collection[int], enabled: bool) -> RequestError | None:
    if not devices:
        return BadRequest(
            "CUDA shared memory is not supported, models run on processors here; register system shared memory"
        )
    return None if enabled else Forbidden(OFF)

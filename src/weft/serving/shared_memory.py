"""Shared memory that clients register under names and use for tensors: the system's (POSIX), and CUDA's.

The system's shared memory is never mapped: access to mapped memory that the client has truncated, or for which the
system has no space, kills the process by SIGBUS, while ``preadv`` and ``pwrite`` on a descriptor return an error or a
short count. Objects are opened with the server's rights. Therefore names outside the system's folder are refused, links
are not followed, semaphores are refused, and a server that other machines can reach offers none of this by default.

For CUDA's shared memory, memory of a GPU that a client has allocated, the handle is registered. The server itself never
accesses that memory: the worker of the GPU opens the handle when a request first needs it.
"""

from __future__ import annotations

import base64
import binascii
import errno
import os
import stat
import sys
from collections.abc import Callable, Collection, Mapping

from weft.base.errors import BadRequest, Forbidden, Overloaded, RequestError
from weft.runtime.client_memory import HANDLE_BYTES, Lender, LendingTerms, read_fully
from weft.serving.regions import OFF, REGION_NUMBERS, Regions, checked_integer

FOLDER = "/dev/shm"
"""The folder of the system's shared memory objects."""
LONGEST_KEY_BYTES = 255
"""NAME_MAX of Linux: no object has a longer name."""
Write = Callable[[Lender, int, memoryview], None]
"""Writes bytes at an offset of a region; blocks until they are written."""


class SystemRegion:
    """A region in the system's shared memory: a part of an object that the client has created."""

    def __init__(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """key: the name of the object. RequestError if there is no such object, or it is too short."""
        self.name, self.key, self.offset, self.byte_size = name, key, offset, byte_size
        self._descriptor = _Descriptor(_open_checked(name, key, offset + byte_size))
        self.terms = LendingTerms(next(REGION_NUMBERS), "file", offset, byte_size)

    on_device = False

    @property
    def file(self) -> int:
        return self._descriptor.number

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill *buffer* from byte *offset* of the region on; BadRequest if the client has truncated the object."""
        start = self.offset + offset
        try:
            complete = read_fully(self._descriptor.number, buffer, start)
        except OSError as error:
            raise BadRequest(f"region {self.name!r} cannot be read: {error.strerror}") from error
        if not complete:
            raise BadRequest(self._truncated_message(start + len(buffer)))

    def write_from(self, data: memoryview, offset: int) -> None:
        """Write *data* at byte *offset* of the region; BadRequest if the client has truncated the object."""
        written, start = 0, self.offset + offset
        self.check_end(offset + len(data))  # writing would make it grow
        while written < len(data):
            try:
                written += os.pwrite(self._descriptor.number, data[written:], start + written)
            except OSError as error:
                raise BadRequest(f"region {self.name!r} cannot be written: {error.strerror}") from error

    def check_end(self, end: int) -> None:
        """Raise BadRequest if the client has truncated the object before byte *end* of the region."""
        if os.fstat(self._descriptor.number).st_size < self.offset + end:
            raise BadRequest(self._truncated_message(self.offset + end))

    @property
    def place(self) -> str:
        return repr(self.key)

    def status(self) -> dict[str, str | int]:
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}

    def _truncated_message(self, end: int) -> str:
        """Return the message for an object that was truncated after it was registered; *end*: the bytes it needs."""
        size = os.fstat(self._descriptor.number).st_size
        return (
            f"region {self.name!r}: {self.key!r:.80} was cut to {size} bytes since it was registered, and {end} are "
            "needed; make it larger again, or register another"
        )


class _Descriptor:
    """A file descriptor that is closed with the last reference: a copy on another thread may outlive the region."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class SystemMemory(Regions[SystemRegion]):
    """The regions of the system's shared memory that clients have registered."""

    def __init__(self, *, enabled: bool, most_regions: int, most_bytes: int) -> None:
        """enabled: whether clients may register regions. most_regions, most_bytes: what each owner may register."""
        super().__init__(_refusal(enabled), most_regions, most_bytes)

    def open_region(self, name: str, parameters: Mapping[str, object], byte_size: int) -> SystemRegion:
        """Open a part of a shared memory object, given by ``key`` and ``offset``; RequestError if that fails."""
        key = parameters.get("key")
        offset = checked_integer(parameters.get("offset", 0), f"region {name!r}: offset")
        if not isinstance(key, str):
            raise BadRequest(f"region {name!r}: key must be the name of a shared memory object, not {key!r:.64}")
        return SystemRegion(name, key, offset, byte_size)


def _refusal(enabled: bool) -> RequestError | None:
    """Return the error with which shared memory is refused; None if it is offered."""
    if sys.platform != "linux":
        return Forbidden("shared memory is not supported on this system, only on Linux; send the tensors themselves")
    if not enabled:
        return Forbidden(OFF)
    return None


def _open_checked(name: str, key: str, end: int) -> int:
    """Open the object *key* for the region *name*, and check that it has at least *end* bytes; return a descriptor."""
    number = _open_object(name, key)
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise BadRequest(f"region {name!r}: {key!r:.80} is no shared memory object")
        if status.st_size < end:
            raise BadRequest(
                f"region {name!r} would end at byte {end} of {key!r:.80}, which has {status.st_size} bytes; "
                "register less of it, or make it larger"
            )
    except BaseException:
        os.close(number)
        raise
    return number


def _open_object(name: str, key: str) -> int:
    """Open the object *key*, without following links; RequestError if that is not possible."""
    file = _object_name(name, key)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # opening a pipe does not block
    try:
        folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return os.open(file, flags, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise Overloaded(f"region {name!r} cannot be opened: too many files are open", reason="memory") from error
        raise BadRequest(f"region {name!r}: {key!r:.80} cannot be opened: {_why_unopened(error)}") from error


def _why_unopened(error: OSError) -> str:
    """Return the reason why an object cannot be opened, for the client."""
    match error.errno:
        case errno.ENOENT:
            return "there is no such object; create it first, on the server's machine and in its container"
        case errno.EACCES | errno.EPERM:
            return "the server's user may not read and write it"
        case errno.ELOOP:
            return "it is a link"
    return error.strerror or str(error)


def _object_name(name: str, key: str) -> bytes:
    """Return the file name of an object; as for ``shm_open``, the leading slash is optional."""
    file = key.removeprefix("/").encode("utf-8", "surrogatepass")
    if file in (b"", b".", b"..") or b"/" in file or b"\0" in file or len(file) > LONGEST_KEY_BYTES:
        raise BadRequest(
            f"region {name!r}: key {key!r:.80} names no shared memory object; it is a slash and up to "
            f"{LONGEST_KEY_BYTES} bytes without another one, as '/camera'"
        )
    if file.startswith(b"sem."):
        raise BadRequest(f"region {name!r}: key {key!r:.80} is a semaphore's; choose another name for the object")
    return file


class CudaRegion:
    """A region in memory of a GPU that a client has allocated and shares."""

    on_device = True
    file: int | None = None

    def __init__(self, name: str, handle: bytes, device: int, byte_size: int, write: Write) -> None:
        self.name, self.device, self.byte_size, self._write = name, device, byte_size, write
        self.terms = LendingTerms(next(REGION_NUMBERS), "cuda", 0, byte_size, handle.hex(), device)

    @property
    def place(self) -> str:
        return f"device {self.device}"

    def status(self) -> dict[str, str | int]:
        return {"name": self.name, "device_id": self.device, "byte_size": self.byte_size}

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Refuse: the server cannot read the memory of a GPU; only models on the GPU can."""
        raise BadRequest(
            f"region {self.name!r} lies on a GPU, where only tensors of numbers are read, and only for models that run "
            "there; use system shared memory, or send the tensor itself"
        )

    def write_from(self, data: memoryview, offset: int) -> None:
        self._write(self, offset, data)

    def check_end(self, end: int) -> None:
        """Do nothing: memory of a GPU cannot be truncated."""


class CudaMemory(Regions[CudaRegion]):
    """The regions of CUDA's shared memory that clients have registered."""

    def __init__(
        self, devices: Collection[int], write: Write, *, enabled: bool, most_regions: int, most_bytes: int
    ) -> None:
        """devices: the GPUs that models run on, empty if models run on processors. write: see ``Write``.

        enabled, most_regions, most_bytes: as for ``SystemMemory``.
        """
        super().__init__(_cuda_refusal(devices, enabled), most_regions, most_bytes)
        self._devices, self._write = sorted(devices), write

    def open_region(self, name: str, parameters: Mapping[str, object], byte_size: int) -> CudaRegion:
        """Create a region of GPU memory from ``device_id`` and ``raw_handle``; BadRequest for a GPU without models."""
        device = checked_integer(parameters.get("device_id", 0), f"region {name!r}: device_id", unit="")
        if device not in self._devices:
            devices = ", ".join(map(str, self._devices))
            raise BadRequest(f"region {name!r} lies on GPU {device}, and models run on GPU {devices}")
        return CudaRegion(name, _decode_handle(name, parameters.get("raw_handle")), device, byte_size, self._write)


def _decode_handle(name: str, raw_handle: object) -> bytes:
    """Decode a CUDA handle: bytes over gRPC, Base64 in an object over HTTP."""
    if isinstance(raw_handle, Mapping):
        raw_handle = raw_handle.get("b64")
    try:
        handle = base64.b64decode(raw_handle, validate=True) if isinstance(raw_handle, str) else raw_handle
    except (binascii.Error, ValueError):
        handle = None
    if not isinstance(handle, bytes) or len(handle) != HANDLE_BYTES:
        raise BadRequest(
            f"region {name!r}: raw_handle must be a handle of CUDA, {HANDLE_BYTES} bytes, over HTTP as "
            '{"b64": "..."} in Base64'
        )
    return handle


def _cuda_refusal(devices: Collection[int], enabled: bool) -> RequestError | None:
    """Return the error with which CUDA's shared memory is refused; None if it is offered."""
    if not devices:
        return BadRequest(
            "CUDA shared memory is not supported, models run on processors here; register system shared memory"
        )
    return None if enabled else Forbidden(OFF)

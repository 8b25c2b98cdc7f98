"""Shared memory regions of clients: their protocol, their registry, and the part of a region that holds a tensor.

A tensor in a region is not sent: its request names the region, and its bytes are copied from there, or to there.
``shared_memory`` implements regions in the system's shared memory and in the memory of a GPU.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from weft.base.errors import AlreadyRegistered, BadRequest, NotFound, RequestError, TooLarge
from weft.runtime.client_memory import LendingTerms

REGION, OFFSET, BYTE_SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
PARAMETERS = frozenset({REGION, OFFSET, BYTE_SIZE})
"""Parameters of a tensor in a region."""

REGION_NUMBERS = itertools.count(1)
"""Numbers by which workers of devices identify regions."""

OFF = "shared memory is off on this server; start it with shared_memory = true, or send the tensors themselves"
LONGEST_NAME_CHARS = 256
"""Limit on a region's name, which is kept and repeated in messages."""
MOST_BYTES = 2**62
"""Limit on offsets and sizes, so that their sum fits a 64-bit integer."""


class Region(Protocol):
    """Memory that a client has registered under a name.

    The client may truncate or remove it at any time. Reading and writing then raise a RequestError instead of copying a
    part; neither may end the process.
    """

    @property
    def name(self) -> str: ...

    @property
    def byte_size(self) -> int: ...

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill *buffer* with the bytes from *offset* on."""

    def write_from(self, data: memoryview, offset: int) -> None:
        """Write *data* at *offset*."""

    def check_end(self, end: int) -> None:
        """Check, after a device wrote up to byte *end* of the region, that the client still has that memory."""

    @property
    def terms(self) -> LendingTerms:
        """How a device can access the memory."""

    @property
    def file(self) -> int | None:
        """The file descriptor; None for other memory."""

    @property
    def on_device(self) -> bool:
        """Whether it is memory of a device, which the server cannot access itself: writing goes through a worker."""

    @property
    def place(self) -> str:
        """The location, for messages."""

    def status(self) -> dict[str, str | int]:
        """Return the region's entry in the answer to a status call."""


class Owner(Protocol):
    """The owner of regions: the user of an API key."""

    @property
    def removed(self) -> bool:
        """Whether the key was removed."""


class RegionTable(Protocol):
    """The regions of one kind; each is visible only to the *owner* that registered it."""

    def status(self, owner: Owner, name: str = "") -> list[dict[str, str | int]]:
        """Return the status of a region, or of all if *name* is empty; NotFound if there is none of that name."""

    def register(self, owner: Owner, name: str, parameters: Mapping[str, object]) -> None:
        """Register memory under a name; *parameters*: those of the client's request."""

    def unregister(self, owner: Owner, name: str = "") -> None:
        """Unregister a region, or all if *name* is empty; a missing region is no error."""


R = TypeVar("R", bound=Region)


class Regions(ABC, Generic[R]):
    """The regions of one kind that clients have registered, each with its owner."""

    def __init__(self, refusal: RequestError | None, most_regions: int, most_bytes: int) -> None:
        """refusal: why nothing can be registered, None if regions can. most_regions, most_bytes: limits per owner."""
        self._refusal, self._most_regions, self._most_bytes = refusal, most_regions, most_bytes
        self._regions: dict[Owner, dict[str, R]] = {}  # owner -> name -> region

    @abstractmethod
    def open_region(self, name: str, parameters: Mapping[str, object], byte_size: int) -> R:
        """Open a region with the *parameters* of the client's request; RequestError if that is not possible."""

    @property
    def offered(self) -> bool:
        """Whether regions of this kind can be registered."""
        return self._refusal is None

    def status(self, owner: Owner, name: str = "") -> list[dict[str, str | int]]:
        """Return the status of a region of the owner, or of all its regions; NotFound if there is none of that name."""
        owned = self._regions.get(owner, {})
        if not name:
            return [region.status() for region in owned.values()]
        if name not in owned:
            raise NotFound(_unknown(name))
        return [owned[name].status()]

    def register(self, owner: Owner, name: str, parameters: Mapping[str, object]) -> None:
        """Open a region with the *parameters* of the client's request and register it; RequestError if refused."""
        self._check_offered()
        self._forget_removed()
        if not name or len(name) > LONGEST_NAME_CHARS:
            raise BadRequest(f"the name of a region has 1 to {LONGEST_NAME_CHARS} characters, not {len(name)}")
        owned = self._regions.get(owner, {})
        if name in owned:
            raise AlreadyRegistered(f"region {name!r} is registered already, for {owned[name].place}; unregister it")
        byte_size = checked_integer(parameters.get("byte_size"), f"region {name!r}: byte_size", least=1)
        self._check_room(name, owned, byte_size)
        self._regions[owner] = {**owned, name: self.open_region(name, parameters, byte_size)}

    def unregister(self, owner: Owner, name: str = "") -> None:
        """Unregister a region of the owner, or all of them if *name* is empty."""
        owned = self._regions.pop(owner, {})
        if name and owned.keys() - {name}:
            self._regions[owner] = {other: region for other, region in owned.items() if other != name}

    def has(self, owner: Owner, name: str) -> bool:
        """Tell whether the owner has a region of that name."""
        return name in self._regions.get(owner, {})

    def find(self, owner: Owner, name: str) -> Region:
        """Return a region of the owner; NotFound if the owner has no region of that name."""
        self._check_offered()
        region = self._regions.get(owner, {}).get(name)
        if region is None:
            raise NotFound(_unknown(name))
        return region

    def close(self) -> None:
        """Unregister all regions."""
        self._regions.clear()

    def _check_offered(self) -> None:
        """Raise a new copy of the refusal, if there is one: each raised exception needs its own traceback."""
        if self._refusal is not None:
            raise type(self._refusal)(str(self._refusal))

    def _check_room(self, name: str, owned: Mapping[str, R], byte_size: int) -> None:
        """Raise TooLarge if a new region exceeds the limits; *owned*: the regions that its owner has."""
        if len(owned) >= self._most_regions:
            raise TooLarge(
                f"region {name!r} is one too many: {len(owned)} are registered, which is the limit "
                "(max_shared_memory_regions); unregister one"
            )
        held_bytes = sum(region.byte_size for region in owned.values())
        if held_bytes + byte_size > self._most_bytes:
            raise TooLarge(
                f"region {name!r} of {byte_size} bytes is too large: {held_bytes} of {self._most_bytes} are registered "
                "(max_shared_memory_bytes); unregister one"
            )

    def _forget_removed(self) -> None:
        """Release the regions of keys that were removed."""
        self._regions = {owner: owned for owner, owned in self._regions.items() if not owner.removed}


def _unknown(name: str) -> str:
    """Return the message for a region that is not registered."""
    return f"no region {name!r:.80} of shared memory is registered; register it first"


class RegionPart(NamedTuple):
    """Where in a region a tensor lies."""

    region: str
    offset: int
    byte_size: int

    @property
    def end(self) -> int:
        return self.offset + self.byte_size

    def parameters(self) -> dict[str, str | int]:
        """Return the parameters of an output that was written here."""
        offset = {OFFSET: self.offset} if self.offset else {}
        return {REGION: self.region, **offset, BYTE_SIZE: self.byte_size}


def part_of(parameters: Mapping[str, object], kind: str, name: object) -> RegionPart | None:
    """Return the part of a region that holds a tensor; None if the tensor is sent with the request.

    parameters: of the tensor. kind, name: input or output, and its name, for messages. BadRequest if incomplete.
    """
    if PARAMETERS.isdisjoint(parameters):
        return None
    tensor = f"{kind} {name!r:.64}"
    region = parameters.get(REGION)
    if region is None:
        parameter = next(key for key in (OFFSET, BYTE_SIZE) if key in parameters)
        raise BadRequest(f"{tensor} has {parameter} without {REGION}; name the region, or leave it out")
    if not isinstance(region, str) or not region:
        raise BadRequest(f"{tensor}: {REGION} must be the name of a region, not {region!r:.64}")
    if BYTE_SIZE not in parameters:
        raise BadRequest(f"{tensor} lies in region {region!r:.64}, but {BYTE_SIZE} is missing; say its bytes")
    if parameters.get("classification"):
        raise BadRequest(f"{tensor}: classes do not go into a region; ask for the tensor there, or for its classes")
    offset = checked_integer(parameters.get(OFFSET, 0), f"{tensor}: {OFFSET}")
    byte_size = checked_integer(parameters[BYTE_SIZE], f"{tensor}: {BYTE_SIZE}")
    return RegionPart(region, offset, byte_size)


def region_parts(tensors: Iterable[tuple[str, Mapping[str, object]]], kind: str) -> dict[str, RegionPart]:
    """Return the part of a region for each tensor that is in one, by the tensor's name.

    tensors: names with parameters; if a name is repeated, the first one counts. kind: input or output.
    """
    parts: dict[str, RegionPart | None] = {}
    for name, parameters in tensors:
        if name not in parts:
            parts[name] = part_of(parameters, kind, name)
    return {name: part for name, part in parts.items() if part is not None}


def checked_integer(value: object, what: str, least: int = 0, unit: str = " of bytes") -> int:
    """Return *value* if it is an integer from *least*; *what* and *unit* are for the message of the BadRequest."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < MOST_BYTES:
        raise BadRequest(f"{what} must be a whole number{unit} from {least}, not {value!r:.64}")
    return value

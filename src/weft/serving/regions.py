"""Memory that a client shares with the server: what a region must do, and which part of one a tensor lies in.

A tensor in a region does not travel: its request names the region, and the bytes are copied from there, or to there.
``shared_memory`` has the regions that the system keeps; memory of an accelerator would be another kind of ``Region``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from weft.errors import BadRequest

REGION, OFFSET, BYTE_SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
PARAMETERS = frozenset({REGION, OFFSET, BYTE_SIZE})
"""What a tensor says that lies in a region."""

MOST_BYTES = 2**62
"""No offset and no size reaches this."""


class Region(Protocol):
    """Memory that a client has registered under a name.

    Its client may cut it short or take it away at any time. Both methods copy every byte or raise a RequestError then;
    neither may end the process.
    """

    @property
    def name(self) -> str: ...

    @property
    def byte_size(self) -> int: ...

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill *buffer* with what lies at *offset*."""

    def write_from(self, data: memoryview, offset: int) -> None:
        """Put *data* at *offset*."""


class Owner(Protocol):
    """Whoever registers regions: the user of a key."""

    @property
    def removed(self) -> bool:
        """The key counts no more."""


class RegionTable(Protocol):
    """The regions of one kind; each belongs to the *owner* that registered it, and nobody else knows of it."""

    def status(self, owner: Owner, name: str = "") -> list[dict[str, str | int]]:
        """What is known of a region, or of all if *name* is empty; NotFound if there is none of that name."""

    def register(self, owner: Owner, name: str, about: Mapping[str, object]) -> None:
        """Make memory known under a name; *about* is what the client says of it."""

    def unregister(self, owner: Owner, name: str = "") -> None:
        """Let go of a region, or of all if *name* is empty; that there is none is no error."""


class RegionPart(NamedTuple):
    """Where in a region a tensor lies."""

    region: str
    offset: int
    byte_size: int

    @property
    def end(self) -> int:
        return self.offset + self.byte_size

    def parameters(self) -> dict[str, str | int]:
        """What an answer says of a tensor that lies there."""
        offset = {OFFSET: self.offset} if self.offset else {}
        return {REGION: self.region, **offset, BYTE_SIZE: self.byte_size}


def part_of(parameters: Mapping[str, object], kind: str, name: object) -> RegionPart | None:
    """Where the parameters of an input or output say that it lies; None if it travels with its request."""
    if PARAMETERS.isdisjoint(parameters):
        return None
    tensor = f"{kind} {name!r:.64}"
    region = parameters.get(REGION)
    if region is None:
        given = next(key for key in (OFFSET, BYTE_SIZE) if key in parameters)
        raise BadRequest(f"{tensor} has {given} without {REGION}; name the region, or leave it out")
    if not isinstance(region, str) or not region:
        raise BadRequest(f"{tensor}: {REGION} must be the name of a region, not {region!r:.64}")
    if BYTE_SIZE not in parameters:
        raise BadRequest(f"{tensor} lies in region {region!r:.64}, but {BYTE_SIZE} is missing; say its bytes")
    if parameters.get("classification"):
        raise BadRequest(f"{tensor}: classes do not go into a region; ask for the tensor there, or for its classes")
    offset, byte_size = parameters.get(OFFSET, 0), parameters[BYTE_SIZE]
    return RegionPart(region, whole(offset, f"{tensor}: {OFFSET}"), whole(byte_size, f"{tensor}: {BYTE_SIZE}"))


def places(tensors: Iterable[tuple[str, Mapping[str, object]]], kind: str) -> dict[str, RegionPart]:
    """Where those inputs or outputs lie that lie in regions; of one that is named again the first time counts."""
    found: dict[str, RegionPart | None] = {}
    for name, parameters in tensors:
        if name not in found:
            found[name] = part_of(parameters, kind, name)
    return {name: part for name, part in found.items() if part is not None}


def whole(value: object, what: str, least: int = 0) -> int:
    """A number of bytes, as a client says it."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < MOST_BYTES:
        raise BadRequest(f"{what} must be a whole number of bytes from {least}, not {value!r:.64}")
    return value

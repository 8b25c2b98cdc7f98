"""Memory that a client shares with the server: what a region must do, and which part of one a tensor lies in.

A tensor in a region does not travel: its request names the region, and the bytes are copied from there, or to there.
``shared_memory`` has the regions that the system keeps, and those in the memory of a GPU.
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
"""What a tensor says that lies in a region."""

REGION_NUMBERS = itertools.count(1)
"""By which devices know regions."""

OFF = "shared memory is off on this server; start it with shared_memory = true, or send the tensors themselves"
LONGEST_NAME_CHARS = 256
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

    @property
    def terms(self) -> LendingTerms:
        """How a device gets at it."""

    @property
    def file(self) -> int | None:
        """The descriptor, where it is a file."""

    @property
    def on_device(self) -> bool:
        """Whether it is memory of a device, which the server does not see: to write to it takes a while."""

    @property
    def place(self) -> str:
        """Where it is, in words."""

    def told(self) -> dict[str, str | int]:
        """What a status says of it."""


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


R = TypeVar("R", bound=Region)


class Regions(ABC, Generic[R]):
    """The regions of one kind that clients have registered, each with its owner."""

    def __init__(self, refusal: RequestError | None, most_regions: int, most_bytes: int) -> None:
        """refusal: why nothing can be registered; most_regions, most_bytes: what each owner may register."""
        self._refusal, self._most_regions, self._most_bytes = refusal, most_regions, most_bytes
        self._regions: dict[Owner, dict[str, R]] = {}

    @abstractmethod
    def opened(self, name: str, about: Mapping[str, object], byte_size: int) -> R:
        """A region, as its client describes it; RequestError if there is none such."""

    @property
    def offered(self) -> bool:
        """Whether anything can be registered."""
        return self._refusal is None

    def status(self, owner: Owner, name: str = "") -> list[dict[str, str | int]]:
        own = self._regions.get(owner, {})
        if not name:
            return [region.told() for region in own.values()]
        if name not in own:
            raise NotFound(_unknown(name))
        return [own[name].told()]

    def register(self, owner: Owner, name: str, about: Mapping[str, object]) -> None:
        self._check_offered()
        self._forget_removed()
        if not name or len(name) > LONGEST_NAME_CHARS:
            raise BadRequest(f"the name of a region has 1 to {LONGEST_NAME_CHARS} characters, not {len(name)}")
        own = self._regions.get(owner, {})
        if name in own:
            raise AlreadyRegistered(f"region {name!r} is registered already, for {own[name].place}; unregister it")
        byte_size = whole(about.get("byte_size"), f"region {name!r}: byte_size", least=1)
        self._check_room(name, own, byte_size)
        self._regions[owner] = {**own, name: self.opened(name, about, byte_size)}

    def unregister(self, owner: Owner, name: str = "") -> None:
        own = self._regions.pop(owner, {})
        if name and own.keys() - {name}:
            self._regions[owner] = {each: region for each, region in own.items() if each != name}

    def has(self, owner: Owner, name: str) -> bool:
        """Whether the owner has a region of that name."""
        return name in self._regions.get(owner, {})

    def find(self, owner: Owner, name: str) -> Region:
        """A region of the owner's; NotFound if it has none of that name."""
        self._check_offered()
        region = self._regions.get(owner, {}).get(name)
        if region is None:
            raise NotFound(_unknown(name))
        return region

    def close(self) -> None:
        """Let go of all regions."""
        self._regions.clear()

    def _check_offered(self) -> None:
        if self._refusal is not None:
            raise type(self._refusal)(str(self._refusal))

    def _check_room(self, name: str, own: Mapping[str, R], byte_size: int) -> None:
        if len(own) >= self._most_regions:
            raise TooLarge(
                f"region {name!r} is one too many: {len(own)} are registered, which is the limit "
                "(max_shared_memory_regions); unregister one"
            )
        held = sum(region.byte_size for region in own.values())
        if held + byte_size > self._most_bytes:
            raise TooLarge(
                f"region {name!r} of {byte_size} bytes is too large: {held} of {self._most_bytes} are registered "
                "(max_shared_memory_bytes); unregister one"
            )

    def _forget_removed(self) -> None:
        """Let go of what belongs to keys that count no more."""
        self._regions = {owner: own for owner, own in self._regions.items() if not owner.removed}


def _unknown(name: str) -> str:
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

"""Where the tokens of requests for several models lie in one matrix: ``pack``, and ``RowTables`` on a device.

``RowNumbers`` has all that is read of a batch in one array, so that it goes to a device at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft_stitch.net import Array
from weft_stitch.running.operators import Tensor, torch

FINEST = 16
"""The least rows that a product can have of one model: the height of the smallest product in hardware."""


class TokenRequest(NamedTuple):
    """Tokens for one of the models."""

    model: int
    length: int


class RowTables(NamedTuple):
    """What kernels read to find their way, on a device."""

    whose: Tensor
    """The model of each granule of rows."""
    first: Tensor
    """Each request's first row."""
    lengths: Tensor
    models: Tensor
    """Each request's model."""
    positions: Tensor
    """Of each row within its request."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Requests in a matrix of so many rows, those of one model one after another from a multiple of *granule* on."""

    granule: int
    rows: int
    requests: tuple[TokenRequest, ...]
    first: tuple[int, ...]
    """Each request's first row, in the order in which they were given."""

    @property
    def longest(self) -> int:
        return max(each.length for each in self.requests)

    def tables(self, device: Any, room: int | None = None) -> RowTables:
        """Tables for *room* requests; those that there are not have no tokens."""
        whose = np.zeros(self.rows // self.granule, np.int32)
        positions = np.zeros(self.rows, np.int64)
        each = np.zeros((3, room or len(self.requests)), np.int32)
        for number, ((model, length), first) in enumerate(zip(self.requests, self.first, strict=True)):
            whose[first // self.granule : -(-(first + length) // self.granule)] = model
            positions[first : first + length] = np.arange(length)
            each[:, number] = first, length, model
        return RowTables(*(torch.from_numpy(table).to(device) for table in (whose, *each, positions)))

    def laid(self, tokens: Sequence[Array]) -> Array:
        """The tokens of all requests, each at its rows."""
        found = np.zeros(self.rows, np.int64)
        for first, mine in zip(self.first, tokens, strict=True):
            found[first : first + len(mine)] = mine
        return found


class TokenRow(NamedTuple):
    """A request: the tokens that a model sees, where they stand, and of which kind they are."""

    model: int
    tokens: Array
    positions: Array
    kinds: Array


class BatchNumbers(NamedTuple):
    """Parts of one array; of numpy or of torch."""

    tokens: Any
    kinds: Any
    tables: RowTables


class RowNumbers(NamedTuple):
    """How an array for so many rows and requests is laid out."""

    rows: int
    room: int

    @property
    def size(self) -> int:
        return 3 * self.rows + self.rows // FINEST + 3 * self.room

    def parts(self, numbers: Any) -> BatchNumbers:
        rows, room, found, at = self.rows, self.room, [], 0
        for size in (rows, rows, rows // FINEST, room, room, room, rows):
            found.append(numbers[at : at + size])
            at += size
        return BatchNumbers(found[0], found[1], RowTables(*found[2:]))

    def laid(self, asked: Sequence[TokenRow]) -> Array:
        """All that is read of a batch; requests that there are not have no tokens."""
        packed = pack([TokenRequest(each.model, len(each.tokens)) for each in asked], rows=self.rows)
        numbers = np.zeros(self.size, np.int32)
        tokens, kinds, tables = self.parts(numbers)
        for number, (each, first) in enumerate(zip(asked, packed.first, strict=True)):
            end = first + len(each.tokens)
            tokens[first:end], kinds[first:end], tables.positions[first:end] = each.tokens, each.kinds, each.positions
            tables.whose[first // FINEST : -(-end // FINEST)] = each.model
            tables.first[number], tables.lengths[number], tables.models[number] = first, end - first, each.model
        return numbers


def lots(asked: Sequence[TokenRow], rows: int, room: int) -> list[Sequence[TokenRow]]:
    """Requests, those of a model one after another, as batches of at most so many rows and requests."""
    found, begin, end, last = [], 0, 0, None
    for number, each in enumerate(asked):
        start = end if each.model == last else _up(end, FINEST)
        end, last = start + len(each.tokens), each.model
        if end > rows or number - begin >= room:
            found.append(asked[begin:number])
            begin, end = number, len(each.tokens)
    return [*found, asked[begin:]]


def pack(requests: Sequence[TokenRequest], granule: int = FINEST, rows: int | None = None) -> PackedRows:
    """Lay requests of any order, models and lengths; *rows* is what they shall take, with nothing at the end."""
    first, end, last = [0] * len(requests), 0, None
    for number in sorted(range(len(requests)), key=lambda each: requests[each].model):
        model, length = requests[number]
        if length < 1:
            raise StitchError(f"a request of {length} tokens: give 1 or more")
        if model != last:
            end = _up(end, granule)
        first[number], end, last = end, end + length, model
    taken = _up(end, granule)
    if rows is not None and (rows < taken or rows % granule):
        raise StitchError(f"{rows} rows do not hold the requests, which take {taken} in steps of {granule}")
    return PackedRows(granule, rows or taken, tuple(requests), tuple(first))


def room_for(count: int) -> int:
    """The power of two that holds so many."""
    return 1 << (count - 1).bit_length()


def _up(number: int, granule: int) -> int:
    return -(-number // granule) * granule

"""The layout of requests for several models in one matrix, a row per token: ``pack``, with ``RowTables`` for kernels.

The rows of a model begin at a multiple of a *granule*, a fixed number of rows, so that each granule is of one model.
``RowNumbers`` puts all inputs of a batch into one array, so that one copy brings them to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft_stitch.net import Array
from weft_stitch.packing import align_up
from weft_stitch.running.operators import Tensor, torch

FINEST = 16
"""Least number of rows that a product computes for one model: the height of the smallest product in hardware."""


class TokenRequest(NamedTuple):
    """A request for one model: the number of its tokens."""

    model: int
    """Index of the model, or of its slot on the device."""
    length: int


class RowTables(NamedTuple):
    """Index tables for the kernels, on a device."""

    granule_models: Tensor
    """The model of each granule of rows."""
    first: Tensor
    """The first row of each request."""
    lengths: Tensor
    """The number of tokens of each request."""
    models: Tensor
    """The model of each request."""
    positions: Tensor
    """The position of each row within its request."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Requests in a matrix of *rows* rows; those of one model are consecutive and begin at a multiple of *granule*."""

    granule: int
    rows: int
    requests: tuple[TokenRequest, ...]
    first: tuple[int, ...]
    """The first row of each request, in the order of *requests*."""

    @property
    def longest(self) -> int:
        return max(request.length for request in self.requests)

    def tables(self, device: Any, room: int | None = None) -> RowTables:
        """The tables for the kernels on *device*, with *room* requests (by default as many as there are).

        Missing requests have length 0.
        """
        granule_models = np.zeros(self.rows // self.granule, np.int32)
        positions = np.zeros(self.rows, np.int64)
        by_request = np.zeros((3, room or len(self.requests)), np.int32)  # first rows, lengths and models
        for index, ((model, length), first) in enumerate(zip(self.requests, self.first, strict=True)):
            granule_models[first // self.granule : -(-(first + length) // self.granule)] = model
            positions[first : first + length] = np.arange(length)
            by_request[:, index] = first, length, model
        return RowTables(*(torch.from_numpy(table).to(device) for table in (granule_models, *by_request, positions)))

    def lay_out(self, tokens: Sequence[Array]) -> Array:
        """The token ids of all requests (*tokens*: those of each) in one array of *rows* numbers; unused rows are 0."""
        ids_by_row = np.zeros(self.rows, np.int64)
        for first, ids in zip(self.first, tokens, strict=True):
            ids_by_row[first : first + len(ids)] = ids
        return ids_by_row


class TokenRow(NamedTuple):
    """A request with its unmasked tokens, their positions and token types: [tokens] each."""

    model: int
    """Index of the model, or of its slot on the device."""
    tokens: Array
    positions: Array
    token_types: Array


class BatchNumbers(NamedTuple):
    """Views of the parts of one array (of numpy or of torch) with all inputs of a batch."""

    tokens: Any
    token_types: Any
    tables: RowTables


class RowNumbers(NamedTuple):
    """The layout of one array with all inputs of a batch of *rows* token rows and *room* requests."""

    rows: int
    room: int

    @property
    def size(self) -> int:
        """Count of the numbers in the array: the sum of the sizes in ``views``."""
        return 3 * self.rows + self.rows // FINEST + 3 * self.room

    def views(self, numbers: Any) -> BatchNumbers:
        """The parts of the array *numbers*, as views."""
        rows, room, views, start = self.rows, self.room, [], 0
        # tokens, token types, and the fields of RowTables, in their order
        for size in (rows, rows, rows // FINEST, room, room, room, rows):
            views.append(numbers[start : start + size])
            start += size
        tokens, token_types, *tables = views
        return BatchNumbers(tokens, token_types, RowTables(*tables))

    def lay_out(self, requested: Sequence[TokenRow]) -> Array:
        """Fill the array for a batch: *requested*, which are sorted by model; missing requests have length 0."""
        packed = pack([TokenRequest(row.model, len(row.tokens)) for row in requested], rows=self.rows)
        numbers = np.zeros(self.size, np.int32)
        tokens, token_types, tables = self.views(numbers)
        for index, (row, first) in enumerate(zip(requested, packed.first, strict=True)):
            end = first + len(row.tokens)
            tokens[first:end], token_types[first:end] = row.tokens, row.token_types
            tables.positions[first:end] = row.positions
            tables.granule_models[first // FINEST : -(-end // FINEST)] = row.model
            tables.first[index], tables.lengths[index], tables.models[index] = first, end - first, row.model
        return numbers


def split_requests(requested: Sequence[TokenRow], rows: int, room: int) -> list[Sequence[TokenRow]]:
    """Split requests, which are sorted by model, into batches of at most *rows* token rows and *room* requests."""
    # *begin*: first request of the current batch; *end*: its token rows so far
    batches, begin, end, last_model = [], 0, 0, None
    for index, row in enumerate(requested):
        first_row = end if row.model == last_model else align_up(end, FINEST)
        end, last_model = first_row + len(row.tokens), row.model
        if end > rows or index - begin >= room:
            batches.append(requested[begin:index])
            begin, end = index, len(row.tokens)
    return [*batches, requested[begin:]]


def pack(requests: Sequence[TokenRequest], granule: int = FINEST, rows: int | None = None) -> PackedRows:
    """Place requests of any order, models and lengths in a matrix; ``StitchError`` if they do not fit.

    *granule*: the rows of a model begin at a multiple of it. *rows*: the size of the matrix, by default what is needed.
    """
    first, end, last_model = [0] * len(requests), 0, None  # *end*: rows used so far
    for index in sorted(range(len(requests)), key=lambda position: requests[position].model):
        model, length = requests[index]
        if length < 1:
            raise StitchError(f"a request of {length} tokens: give 1 or more")
        if model != last_model:
            end = align_up(end, granule)
        first[index], end, last_model = end, end + length, model
    rows_needed = align_up(end, granule)
    if rows is not None and (rows < rows_needed or rows % granule):
        raise StitchError(f"{rows} rows do not hold the requests, which take {rows_needed} in steps of {granule}")
    return PackedRows(granule, rows or rows_needed, tuple(requests), tuple(first))


def room_for(count: int) -> int:
    """The smallest power of two that is at least *count*."""
    return 1 << (count - 1).bit_length()

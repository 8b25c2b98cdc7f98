"""Outputs of a batch that the device copies straight into clients' regions, each request's rows into its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.runtime.backend import OutputTarget
from weft.runtime.cuda.device import BorrowedPart, Device, Tensor


class RegionWrites(NamedTuple):
    """What is written of a batch."""

    requests: tuple[int, ...]
    """Indices of the targets that get all their outputs."""
    complete: frozenset[str]
    """Outputs whose rows are all written, so that the host needs none of them."""
    pieces: list[tuple[BorrowedPart, Tensor]]
    """Parts of regions, and copies of the rows that they get: the next batch may overwrite the outputs."""


def plan_writes(
    device: Device, targets: Sequence[OutputTarget], outputs: Mapping[str, Tensor], rows: int
) -> RegionWrites:
    """Choose the requests whose outputs fit into their parts, all or none of a request, and copy their rows.

    outputs: of the *rows* rows of a batch, without padding. The server reports what does not fit to the client.
    """
    requests, accepted = [], list[tuple[BorrowedPart, str, tuple[int, int] | None]]()
    missing = dict.fromkeys(outputs, rows)  # rows of each output that are not written
    for index, target in enumerate(targets):
        parts: Mapping[str, BorrowedPart] = target.parts
        if parts and all(part.accepts(_rows_of(outputs[name], target.rows).nbytes) for name, part in parts.items()):
            requests.append(index)
            accepted += [(part, name, target.rows) for name, part in parts.items()]
            for name in parts:
                missing[name] -= rows if target.rows is None else target.rows[1] - target.rows[0]
    copies = {name: device.clone(outputs[name]) for name in dict.fromkeys(name for _, name, _ in accepted)}
    pieces = [(part, _rows_of(copies[name], taken)) for part, name, taken in accepted]
    return RegionWrites(tuple(requests), frozenset(name for name, count in missing.items() if not count), pieces)


def _rows_of(tensor: Tensor, rows: tuple[int, int] | None) -> Tensor:
    """The rows from the first to before the last of *rows*; None: the tensor, which may have no axis of rows."""
    return tensor if rows is None else tensor[rows[0] : rows[1]]

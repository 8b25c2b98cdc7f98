"""Fill a given set of machines evenly: largest models first, each where it adds least, whole if that can be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from weft.placing.filling import Filling
from weft.placing.problem import ROUNDING, Bools, Floats, PlacingProblem

STEEPNESS = 8.0
"""How much more it counts to fill a machine that is full already."""
LARGEST_PIECE = 0.5
"""How much of a machine a piece of a model takes that needs several: the rest is for what uses the other resource."""


class Piece(NamedTuple):
    """A part of a model that goes to one machine if it can."""

    model: int
    share: float


def pieces(problem: PlacingProblem) -> list[Piece]:
    """All models, those with few places to go first, then large ones; several pieces of what needs several machines."""
    sizes = np.maximum(problem.rows.max(axis=1) / problem.cap[:, None], problem.bytes / problem.room_bytes[:, None])
    runs = np.stack([problem.allowed[problem.kind_of == kind].any(axis=0) for kind in range(len(problem.kinds))])
    size = np.where(runs, sizes, np.inf).min(axis=0)
    halves = np.where(size > 1, np.ceil(size / LARGEST_PIECE), 1)
    counts = np.maximum(halves, [demand.replicas for demand in problem.demands]).astype(np.int64)
    choices = problem.allowed.sum(axis=0)
    order = np.lexsort((-size / counts, choices >= choices.max(initial=0)))
    return [Piece(int(m), 1.0 / counts[m]) for m in order for _ in range(counts[m])]


def balance(filling: Filling, todo: Iterable[Piece]) -> list[Piece]:
    """Put pieces on the open machines, whole where that can be; what found no place."""
    left = []
    for piece in todo:
        rooms = _rooms(filling, piece.model)
        fits = rooms >= piece.share - ROUNDING
        if fits.any():
            filling.add(_best(filling, piece, fits), piece.model, piece.share)
        else:
            left.append(piece)
    return left


def divide(filling: Filling, todo: Iterable[Piece]) -> list[Piece]:
    """Put pieces on several machines each, the roomiest first; what found no place."""
    left = []
    for piece in todo:
        rest = piece.share
        while rest > ROUNDING:
            rooms = _rooms(filling, piece.model)
            machine = int(np.argmax(rooms))
            if rooms[machine] <= 1e-3 * rest:
                break
            part = min(rest, float(rooms[machine]))
            filling.add(machine, piece.model, part)
            rest -= part
        if rest > ROUNDING:
            left.append(Piece(piece.model, rest))
    return left


def _rooms(filling: Filling, model: int) -> Floats:
    """(machine): what it could take of the model; replicas keep apart until there are enough of them."""
    rooms, demand = filling.room(model), filling.problem.demands[model]
    if demand.replicas > 1 and (there := filling.where(model)):
        zones = filling.problem.zone_of
        taken = np.isin(zones, zones[there]) if demand.apart == "zone" else np.zeros(len(zones), np.bool_)
        taken[there] = True
        count = len(set(zones[there].tolist())) if demand.apart == "zone" else len(there)
        if count < demand.replicas:
            rooms[taken] = 0.0
    return rooms


def _best(filling: Filling, piece: Piece, fits: Bools) -> int:
    """The machine whose loads grow least, counted steeply: what fills one resource goes where the other is full."""
    problem = filling.problem
    where = np.flatnonzero(fits)
    kinds = problem.kind_of[where]
    caps = problem.cap[kinds][:, None]
    before = filling.loads[where] / caps
    after = before + piece.share * problem.rows[kinds, :, piece.model] / caps
    grown = (np.exp(STEEPNESS * after) - np.exp(STEEPNESS * before)).sum(axis=1)
    return int(where[np.argmin(grown)])

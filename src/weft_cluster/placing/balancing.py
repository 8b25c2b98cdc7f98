"""Fill a given set of machines evenly: largest models first, each where it adds least, whole if that can be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from weft_cluster.placing.bound import PlacingBound
from weft_cluster.placing.filling import Filling
from weft_cluster.placing.problem import ROUNDING, Bools, Floats, PlacingProblem

STEEPNESS = 8.0
"""How much more it counts to fill a machine that is full already."""
LEAST_PART = 0.02
"""The least share of a model that a bound's division is followed in."""
LARGEST_PIECE = 0.5
"""How much of a machine a piece of a model takes that needs several: the rest is for what uses the other resource."""


class Piece(NamedTuple):
    """A part of a model that goes to one machine if it can."""

    model: int
    share: float
    among: tuple[int, ...] = ()
    """The machines that it may go to; empty: any."""


def pieces(problem: PlacingProblem, wanted: PlacingBound | None = None) -> list[Piece]:
    """Order all models: those with few possible machines first, then large ones; divide what needs several machines.

    wanted: among which machines they are best divided.
    """
    sizes = np.maximum(problem.rows.max(axis=1) / problem.cap[:, None], problem.bytes / problem.room_bytes[:, None])
    runs = np.stack([problem.allowed[problem.kind_of == kind].any(axis=0) for kind in range(len(problem.kinds))])
    smallest = np.where(runs, sizes, np.inf).min(axis=0)
    choices = problem.allowed.sum(axis=0)
    free = choices >= choices.max(initial=0)
    sized = []
    for piece, kind in _parts(problem, wanted):
        model, share, among = piece
        size = share * (smallest[model] if kind is None else sizes[kind, model])
        count = max(math.ceil(size / LARGEST_PIECE) if size > 1 else 1, 1 if among else problem.demands[model].replicas)
        sized += [(bool(free[model]), -size / count, Piece(model, share / count, among))] * count
    return [piece for _, _, piece in sorted(sized, key=lambda entry: entry[:2])]


def _parts(problem: PlacingProblem, wanted: PlacingBound | None) -> Iterator[tuple[Piece, int | None]]:
    """Every model whole, or as the bound divides it among machines that are alike, with the number of their kind."""
    for model, demand in enumerate(problem.demands):
        if wanted is None or len(wanted.groups) == 1 or demand.replicas > 1:
            yield Piece(model, 1.0), None
            continue
        shares = {place: its[model] for place, its in enumerate(wanted.shares) if its.get(model, 0.0) > LEAST_PART}
        whole = sum(shares.values())
        for place, share in shares.items():
            group = wanted.groups[place]
            yield Piece(model, share / whole, group.members), group.kind


def balance(filling: Filling, todo: Iterable[Piece]) -> list[Piece]:
    """Put pieces on the open machines that they are meant for, each on one; what found no place, for any machine."""
    left = []
    for piece in todo:
        fits = rooms_apart(filling, piece.model) >= piece.share - ROUNDING
        if piece.among:
            meant = np.zeros(len(fits), np.bool_)
            meant[list(piece.among)] = True
            fits &= meant
        if fits.any():
            filling.add(_best(filling, piece, fits), piece.model, piece.share)
        else:
            left.append(Piece(piece.model, piece.share))
    return left


def divide(filling: Filling, todo: Iterable[Piece]) -> list[Piece]:
    """Put pieces on several machines each, the roomiest first; what found no place."""
    left = []
    for piece in todo:
        rest = piece.share
        while rest > ROUNDING:
            rooms = rooms_apart(filling, piece.model)
            machine = int(np.argmax(rooms))
            if rooms[machine] <= 1e-3 * rest:
                break
            part = min(rest, float(rooms[machine]))
            filling.add(machine, piece.model, part)
            rest -= part
        if rest > ROUNDING:
            left.append(Piece(piece.model, rest))
    return left


def rooms_apart(filling: Filling, model: int) -> Floats:
    """(machine): the share of the model that it could take; replicas keep apart until there are enough of them."""
    rooms, demand = filling.room(model), filling.problem.demands[model]
    if 0 < filling.replicas(model) < demand.replicas:
        there, zones = filling.where(model), filling.problem.zone_of
        rooms[np.isin(zones, zones[there]) if demand.apart == "zone" else there] = 0.0
    return rooms


def _best(filling: Filling, piece: Piece, fits: Bools) -> int:
    """Return the machine where the sum of steep powers of the loads grows least.

    So models of one resource join those of the other.
    """
    problem = filling.problem
    where = np.flatnonzero(fits)
    kinds = problem.kind_of[where]
    caps = problem.cap[kinds][:, None]
    before = filling.loads[where] / caps
    after = before + piece.share * problem.rows[kinds, :, piece.model] / caps
    grown = (np.exp(STEEPNESS * after) - np.exp(STEEPNESS * before)).sum(axis=1)
    return int(where[np.argmin(grown)])

"""Place all demands on a given set of machines, as far as they fit; and find the most load that machines carry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft_cluster.placing.balancing import Piece, balance, divide, pieces
from weft_cluster.placing.bound import PlacingBound
from weft_cluster.placing.exact import is_small, pack_exactly
from weft_cluster.placing.filling import Filling
from weft_cluster.placing.problem import Bools, PlacingProblem
from weft_cluster.placing.resharing import reshare, reshare_for_load

LITTLE = 0.1
"""The share of a load that may be left for dividing anew to be worth a try."""
SCALES = (1.0, 0.97, 0.93, 0.85, 0.7)
"""Shares of the bound that are packed for, to be divided anew: the one leaves no room, the other no balance."""


def pack(problem: PlacingProblem, opened: Bools, wanted: PlacingBound | None = None) -> tuple[Filling, list[Piece]]:
    """Place all models on the opened machines, divided if they do not fit whole; return the rest, too.

    wanted: among which machines models are best divided.
    """
    filling, left = pack_evenly(problem, opened, wanted)
    sizes = problem.rows.max(axis=(0, 1))
    missing = sum(piece.share * sizes[piece.model] for piece in left)
    if left and missing <= LITTLE * np.sum(sizes):
        filling, left = reshare(filling)
    if left and is_small(problem, opened) and (exact := pack_exactly(problem, opened)):
        return exact, []
    return filling, left


def pack_evenly(
    problem: PlacingProblem, opened: Bools, wanted: PlacingBound | None = None
) -> tuple[Filling, list[Piece]]:
    """The same, one model after another, each where it adds least."""
    filling = Filling(problem)
    filling.open[:] = opened
    left = balance(filling, pieces(problem, wanted))
    return filling, divide(filling, balance(filling, left) if wanted else left)


def most_load(problem: PlacingProblem, bound: PlacingBound) -> tuple[float, Filling]:
    """The largest multiple of the rates that was found to fit, and its filling; 0 where not all models fit."""
    best, largest = 0.0, Filling(problem)
    opened = np.ones(len(problem.machines), np.bool_)
    for scale in SCALES:
        packed, left = pack_evenly(replace(problem, cap=problem.cap / (scale * bound.value)), opened, bound)
        times, filling = reshare_for_load(Filling(problem, packed.shares))
        if not left:
            times = max(times, scale * bound.value)
        if times > best or not largest.used.any():
            best, largest = times, filling
    return best, largest

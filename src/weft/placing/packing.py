"""Put all demands on a given set of machines, or say what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weft.placing.balancing import Piece, balance, divide, pieces
from weft.placing.bound import PlacingBound
from weft.placing.filling import Filling
from weft.placing.problem import Bools, PlacingProblem
from weft.placing.resharing import reshare

MUCH = 0.1
"""The share of all models that is too much to be placed by dividing them anew."""


def pack(problem: PlacingProblem, opened: Bools, wanted: PlacingBound | None = None) -> tuple[Filling, list[Piece]]:
    """Models spread evenly over the opened machines, divided only where they do not fit whole; and what is left.

    wanted: among which machines models are best divided.
    """
    filling = Filling(problem)
    filling.open[:] = opened
    left = balance(filling, pieces(problem, wanted))
    left = divide(filling, balance(filling, left) if wanted else left)
    return reshare(filling, left) if left and _little(filling, left) else (filling, left)


def _little(filling: Filling, left: Sequence[Piece]) -> bool:
    """Whether so little is left that dividing anew might find room for it."""
    served = filling.served()
    return float(len(served) - served.sum()) <= MUCH * len(served) or len(left) <= 2


def pack_scaled(
    problem: PlacingProblem, scale: float, wanted: PlacingBound | None = None
) -> tuple[Filling, list[Piece]]:
    """All machines with *scale* times the asked rates; the filling tells of the rates as they were asked."""
    scaled = replace(problem, cap=problem.cap / scale)
    filling, left = pack(scaled, np.ones(len(problem.machines), np.bool_), wanted)
    return Filling(problem, filling.shares), left

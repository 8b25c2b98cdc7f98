"""Put all demands on a given set of machines, or say what is left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.placing.balancing import Piece, balance, divide, pieces
from weft.placing.filling import Filling
from weft.placing.problem import Bools, PlacingProblem


def pack(problem: PlacingProblem, opened: Bools) -> tuple[Filling, list[Piece]]:
    """Models spread evenly over the opened machines, divided only where they do not fit whole; and what is left."""
    filling = Filling(problem)
    filling.open[:] = opened
    return filling, divide(filling, balance(filling, pieces(problem)))


def pack_scaled(problem: PlacingProblem, scale: float) -> tuple[Filling, list[Piece]]:
    """All machines with *scale* times the asked rates; the filling tells of the rates as they were asked."""
    scaled = replace(problem, cap=problem.cap / scale)
    filling, left = pack(scaled, np.ones(len(problem.machines), np.bool_))
    return Filling(problem, filling.shares), left

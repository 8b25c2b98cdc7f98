"""Weights that differ from another model's in few places, or by a scale: ``replaced``, ``scaled`` and ``own_lines``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft_stitch.bodies.low_rank import WORTH, LowRank
from weft_stitch.net import Array


@dataclass(frozen=True, eq=False, slots=True)
class OwnLines:
    """A table as another one with other lines, and more or fewer of them."""

    count: int
    at: Array
    """The numbers of its own lines."""
    lines: Array

    def whole(self, table: Array) -> Array:
        """*table* with all of it."""
        made = np.empty((self.count, table.shape[1]), table.dtype)
        made[: len(table)] = table[: self.count]
        made[self.at] = self.lines
        return made

    def index(self, first: int) -> Array:
        """Where each of its lines is, if its own begin at *first* and all others are where they were."""
        found = np.arange(self.count, dtype=np.int32)
        found[self.at] = np.arange(first, first + len(self.at))
        return found


def own_lines(near: Array, mine: Array) -> OwnLines | None:
    """The table *mine* by its difference to *near*; None where too little is the same."""
    if near.shape[1] != mine.shape[1]:
        return None
    common = min(len(near), len(mine))
    at = np.concatenate([_differing(near[:common].T, mine[:common].T), np.arange(common, len(mine))])
    found = OwnLines(len(mine), at, mine[at])
    return found if WORTH * (found.lines.nbytes + 4 * found.count) <= mine.nbytes else None


def replaced(near: Array, mine: Array) -> LowRank | None:
    """*mine* as *near* with other columns, or other rows, bit by bit; None where those are many."""
    taken, made = mine.shape
    most = (mine.size // WORTH - taken - made) // (taken + made)
    columns = _differing(near, mine)
    if len(columns) <= most:
        return LowRank(mine[:, columns], _ones(made, columns), after=_without(made, columns), kind="columns")
    rows = _differing(near.T, mine.T)
    if len(rows) <= most:
        return LowRank(_ones(taken, rows).T.copy(), mine[rows], before=_without(taken, rows), kind="rows")
    return None


def scaled(near: Array, mine: Array, allowed: float) -> LowRank | None:
    """*mine* as *near* with scaled columns, or rows, but for a rest of at most *allowed* (Frobenius)."""
    taken, made = mine.shape
    nothing = LowRank(np.zeros((taken, 0), np.float32), np.zeros((0, made), np.float32), kind="scale")
    after = _scales(near, mine)
    if np.linalg.norm(mine - near * after) <= allowed:
        return nothing._replace(after=after)
    before = _scales(near.T, mine.T)
    return nothing._replace(before=before) if np.linalg.norm(mine - before[:, None] * near) <= allowed else None


def _scales(near: Array, mine: Array) -> Array:
    """By what the columns of *near* are nearest to those of *mine*."""
    squares = np.einsum("ij,ij->j", near, near)
    found: Array = np.einsum("ij,ij->j", near, mine) / np.where(squares > 0, squares, 1)
    return found.astype(np.float32)


def _differing(one: Array, other: Array) -> Array:
    """The columns that are not the same to the last bit."""
    return np.flatnonzero((one.view(np.int32) != other.view(np.int32)).any(axis=0))


def _ones(size: int, at: Array) -> Array:
    """A line for each of *at*, with a one there."""
    found = np.zeros((len(at), size), np.float32)
    found[np.arange(len(at)), at] = 1
    return found


def _without(size: int, at: Array) -> Array:
    found = np.ones(size, np.float32)
    found[at] = 0
    return found

"""Weights that differ by a low-rank part, as an adapter leaves them: ``low_rank`` finds it by a sketch.

A difference of rank r is known from what it makes of a few more than r random vectors (Halko, Martinsson and Tropp,
2011). More vectors are taken until nothing is left that matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft_stitch.net import Array

WORTH = 4
"""Both factors together hold at most this part of what they stand for: one of so many."""
_SKETCHES, _MORE = (8, 32), 8
"""Ranks that are looked for first, and how many vectors more a sketch takes."""
_HOPELESS = 0.95
"""A sketch that leaves this part is of something that has no low rank."""


class LowRank(NamedTuple):
    """What is added to a weight, as a product of two narrow matrices; the weight itself may be scaled before."""

    down: Array
    """[in, rank]."""
    up: Array
    """[rank, out]."""
    before: Array | None = None
    """[in]: by what the rows of the weight are multiplied."""
    after: Array | None = None
    """[out]: by what its columns are."""
    kind: str = "low rank"

    @property
    def rank(self) -> int:
        return len(self.up)

    def whole(self, weight: Array) -> Array:
        """*weight* with all of it."""
        scaled = weight if self.before is None else self.before[:, None] * weight
        found: Array = (scaled if self.after is None else scaled * self.after) + self.down @ self.up
        return found


def low_rank(difference: Array, allowed: float) -> LowRank | None:
    """*difference* but for a rest of at most *allowed* (Frobenius); None where that takes too high a rank."""
    taken, made = difference.shape
    most = taken * made // (WORTH * (taken + made))
    rng = np.random.default_rng(0)
    for count in sorted({min(each, most) for each in (*_SKETCHES, most)}):
        seen = difference @ rng.standard_normal((made, min(count + _MORE, made)), np.float32)
        basis, _ = np.linalg.qr(difference @ (difference.T @ seen))  # once more, so that small ones count for less
        found = _cut(basis, basis.T @ difference, difference, allowed)
        rest = float(np.linalg.norm(difference - found.down @ found.up))
        if found.rank <= count and rest <= allowed:
            return found
        if rest > _HOPELESS * float(np.linalg.norm(difference)):
            return None
    return None


def _cut(basis: Array, inner: Array, difference: Array, allowed: float) -> LowRank:
    """The part of *difference* within *basis*, without directions that together with the rest do not matter."""
    squares, left = np.linalg.eigh(inner.astype(np.float64) @ inner.T.astype(np.float64))
    rest = max(0.0, float(np.linalg.norm(difference)) ** 2 - float(squares.sum()))
    tails = np.cumsum(np.maximum(squares, 0)) + min(rest, 0.5 * allowed**2)
    kept = left[:, tails > allowed**2].astype(np.float32)
    return LowRank(basis @ kept, kept.T @ inner)


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

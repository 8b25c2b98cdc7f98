"""Differences of fine-tuned weights to shared ones: low rank, own lines, replaced columns or rows, scales.

``low_rank`` finds a part of rank r by multiplying slightly more than r random vectors (a randomised range finder;
Halko, Martinsson and Tropp, 2011), and takes more vectors until the rest is negligible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft_stitch.net import Array

WORTH = 4
"""Both factors together hold at most a quarter of the weight's numbers; above that, sharing saves too little."""
_SKETCHES, _MORE = (8, 32), 8
"""Ranks to try first, and the additional random vectors of a sketch (more: fewer misses, more time)."""
_HOPELESS = 0.95
"""A sketch that leaves more than this part of the norm ends the search: the difference has no low rank."""


class LowRank(NamedTuple):
    """A difference to a weight: a product of two narrow matrices to add, and factors on its rows or columns."""

    down: Array
    """[in, rank]."""
    up: Array
    """[rank, out]."""
    before: Array | None = None
    """[in]: factors on the rows of the weight."""
    after: Array | None = None
    """[out]: factors on its columns."""
    kind: str = "low rank"

    @property
    def rank(self) -> int:
        return len(self.up)

    def whole(self, weight: Array) -> Array:
        """Apply the difference to *weight*."""
        scaled = weight if self.before is None else self.before[:, None] * weight
        result: Array = (scaled if self.after is None else scaled * self.after) + self.down @ self.up
        return result


def low_rank(difference: Array, allowed: float) -> LowRank | None:
    """Factorise *difference* up to a rest of at most *allowed* (Frobenius); None where the rank would be too high."""
    depth, width = difference.shape
    most = depth * width // (WORTH * (depth + width))
    rng = np.random.default_rng(0)
    for count in sorted({min(rank, most) for rank in (*_SKETCHES, most)}):
        seen = difference @ rng.standard_normal((width, min(count + _MORE, width)), np.float32)
        basis, _ = np.linalg.qr(difference @ (difference.T @ seen))  # once more, so that small ones count for less
        part = _cut(basis, basis.T @ difference, difference, allowed)
        rest = float(np.linalg.norm(difference - part.down @ part.up))
        if part.rank <= count and rest <= allowed:
            return part
        if rest > _HOPELESS * float(np.linalg.norm(difference)):
            return None
    return None


def _cut(basis: Array, inner: Array, difference: Array, allowed: float) -> LowRank:
    """Project *difference* onto *basis*, and drop directions that together with the rest stay below *allowed*."""
    squares, left = np.linalg.eigh(inner.astype(np.float64) @ inner.T.astype(np.float64))
    rest = max(0.0, float(np.linalg.norm(difference)) ** 2 - float(squares.sum()))
    tails = np.cumsum(np.maximum(squares, 0)) + min(rest, 0.5 * allowed**2)
    kept = left[:, tails > allowed**2].astype(np.float32)
    return LowRank(basis @ kept, kept.T @ inner)


@dataclass(frozen=True, eq=False, slots=True)
class OwnLines:
    """A table that differs from a shared one in some lines, or in their number (an extended vocabulary)."""

    count: int
    at: Array
    """The numbers of its own lines."""
    lines: Array

    def whole(self, table: Array) -> Array:
        """Apply the difference to *table*."""
        result = np.empty((self.count, table.shape[1]), table.dtype)
        result[: len(table)] = table[: self.count]
        result[self.at] = self.lines
        return result

    def index(self, first: int) -> Array:
        """The index of each line in a table where its own lines begin at *first* and the shared ones stay in place."""
        places = np.arange(self.count, dtype=np.int32)
        places[self.at] = np.arange(first, first + len(self.at))
        return places


def own_lines(near: Array, mine: Array) -> OwnLines | None:
    """Express the table *mine* by its own lines and *near*; None where too few lines are equal."""
    if near.shape[1] != mine.shape[1]:
        return None
    common = min(len(near), len(mine))
    at = np.concatenate([_differing(near[:common].T, mine[:common].T), np.arange(common, len(mine))])
    own = OwnLines(len(mine), at, mine[at])
    return own if WORTH * (own.lines.nbytes + 4 * own.count) <= mine.nbytes else None


def replaced(near: Array, mine: Array) -> LowRank | None:
    """Express *mine* as *near* with some replaced columns or rows, bit by bit; None where those are many."""
    depth, width = mine.shape
    most = (mine.size // WORTH - depth - width) // (depth + width)
    columns = _differing(near, mine)
    if len(columns) <= most:
        return LowRank(mine[:, columns], _ones(width, columns), after=_without(width, columns), kind="columns")
    rows = _differing(near.T, mine.T)
    if len(rows) <= most:
        return LowRank(_ones(depth, rows).T.copy(), mine[rows], before=_without(depth, rows), kind="rows")
    return None


def scaled(near: Array, mine: Array, allowed: float) -> LowRank | None:
    """Express *mine* as *near* with scaled columns or rows, up to a rest of at most *allowed* (Frobenius)."""
    depth, width = mine.shape
    nothing = LowRank(np.zeros((depth, 0), np.float32), np.zeros((0, width), np.float32), kind="scale")
    after = _scales(near, mine)
    if np.linalg.norm(mine - near * after) <= allowed:
        return nothing._replace(after=after)
    before = _scales(near.T, mine.T)
    return nothing._replace(before=before) if np.linalg.norm(mine - before[:, None] * near) <= allowed else None


def _scales(near: Array, mine: Array) -> Array:
    """Least-squares factors from the columns of *near* to those of *mine*."""
    squares = np.einsum("ij,ij->j", near, near)
    factors: Array = np.einsum("ij,ij->j", near, mine) / np.where(squares > 0, squares, 1)
    return factors.astype(np.float32)


def _differing(one: Array, other: Array) -> Array:
    """Numbers of the columns that differ in any bit."""
    return np.flatnonzero((one.view(np.int32) != other.view(np.int32)).any(axis=0))


def _ones(size: int, at: Array) -> Array:
    """Rows of the identity matrix: one for each of *at*."""
    lines = np.zeros((len(at), size), np.float32)
    lines[np.arange(len(at)), at] = 1
    return lines


def _without(size: int, at: Array) -> Array:
    mask = np.ones(size, np.float32)
    mask[at] = 0
    return mask

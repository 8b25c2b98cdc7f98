"""Weights that differ by a low-rank part, as an adapter leaves them: ``low_rank`` finds it by a sketch.

A difference of rank r is known from what it makes of a few more than r random vectors (Halko, Martinsson and Tropp,
2011). More vectors are taken until nothing is left that matters.
"""

from __future__ import annotations

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

"""Which of the two neighbours a value goes to when a format does not hold it.

Values are seen as magnitudes: a lower neighbour with code ``lower``, the next one with code ``lower + 1``, and the
``share`` of the way from one to the other. Saturation comes first, so there always is a next one.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from weft.base.errors import NumberError, unknown_name

Bools = npt.NDArray[np.bool_]
Doubles = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]

Rounding = Literal["nearest-even", "nearest-away", "toward-zero", "up", "down", "stochastic", "log-nearest"]
"""nearest-even: the nearer one; half way, the one whose code is even. (Not the one whose significand is: without
fraction bits, as in EXP, all significands are odd.) nearest-away: half way, the one further from zero. toward-zero, up,
down: never away from zero, never down, never up. stochastic: the upper one as often as the value is near to it.
log-nearest: the nearer one on a logarithmic scale, for EXP only; below the smallest power 2^e, zero up to
2^(e - 1/2)."""

ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)


def check_rounding(rounding: str, rng: np.random.Generator | None) -> None:
    """Refuse a name that means nothing, and chance without a generator."""
    if rounding not in ROUNDINGS:
        raise NumberError(unknown_name("rounding", rounding, ROUNDINGS))
    if rounding == "stochastic" and rng is None:
        raise NumberError("stochastic rounding draws numbers; give rng=numpy.random.default_rng(seed)")


def goes_up(
    rounding: Rounding, lower: Longs, share: Doubles, negative: Bools, rng: np.random.Generator | None
) -> Bools:
    """Whether each value goes to the upper neighbour; away from zero, that is."""
    match rounding:
        case "nearest-even":
            return np.asarray((share > 0.5) | ((share == 0.5) & (lower & 1 == 1)))
        case "nearest-away":
            return share >= 0.5
        case "toward-zero":
            return np.zeros(share.shape, np.bool_)
        case "up":
            return (share > 0) & ~negative
        case "down":
            return (share > 0) & negative
        case "log-nearest":
            return np.asarray(share > np.where(lower == 0, np.sqrt(0.5), np.sqrt(2.0) - 1.0))
        case "stochastic":
            assert rng is not None
            return rng.random(share.shape) < share

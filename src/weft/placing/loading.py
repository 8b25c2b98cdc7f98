"""The most load: the largest multiple of all rates that the machines carry."""

from __future__ import annotations

from weft.placing.filling import Filling
from weft.placing.packing import pack_scaled
from weft.placing.problem import PlacingProblem

PRECISION = 0.005
"""How near the multiple is found, as a share of it."""
LEAST = 2.0**-20


def most_load(problem: PlacingProblem, most: float) -> tuple[float, Filling]:
    """The largest multiple up to *most* that fits, and its filling; 0 where nothing helps, with what fits then."""
    low, high, best = 0.0, most, None
    scale = most
    while high - low > PRECISION * high:
        filling, left = pack_scaled(problem, scale)
        if left:
            high = scale
        else:
            low, best = scale, filling
            if scale == most:
                break
        if high < LEAST:
            return 0.0, filling
        scale = (low + high) / 2 if best is not None else scale * 0.97 if scale > most / 2 else scale / 2
    assert best is not None
    return low, best

"""What was measured of a model at some batch sizes, at any size."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def times_at(times_s: Mapping[int, tuple[float, ...]], segments: int, batch: int) -> tuple[float, ...]:
    """Seconds of each of so many segments, straight between the measured sizes; zeros where nothing was measured."""
    if not times_s:
        return (0.0,) * segments
    sizes = sorted(times_s)
    if batch > sizes[-1]:
        return tuple(time_s * batch / sizes[-1] for time_s in times_s[sizes[-1]])
    columns = zip(*(times_s[size] for size in sizes), strict=True)
    return tuple(float(np.interp(batch, sizes, column)) for column in columns)

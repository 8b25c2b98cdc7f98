"""How much units slow each other down at their memory, compiled; the plain twin is ``weft.devices.soc``."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt


@numba.njit(cache=True, error_model="numpy")
def slow_down(row: npt.NDArray[np.float64], own: float, others: float) -> float:
    """How many times longer work of demand *own* takes beside *others*; *row* is one of ``Soc.contention_table``."""
    if own <= 0.0 or others <= 0.0:
        return 1.0
    peak: float = row[1]
    if row[0] == 0.0:
        return max(1.0, (own + others) / peak)
    mrmc_pct, pbw, tbwdc, cbp, rate_n = row[4], row[5], row[6], row[7], row[8]
    floor_pct: float = row[9]
    minor = mrmc_pct * min(others, pbw) / pbw
    plateau = max(0.0, own + cbp - tbwdc) * rate_n
    if own <= row[2]:
        lost = minor
    elif own <= row[3]:
        lost = max(minor, min(plateau, (own + others - tbwdc) * rate_n))
    elif cbp > 0.0:
        lost = plateau * (min(others, cbp) / cbp)
    else:
        lost = plateau
    kept: float = min(100.0, max(floor_pct, 100.0 - lost))
    return 100.0 / kept

"""Delays of steps on a SoC, compiled: tried a little longer and a little shorter, one after the other."""

from __future__ import annotations

from weft.kernels.compiling import untyped_loop
from weft_map.kernels.soc import follow
from weft_map.kernels.soc_bound import value_of


@untyped_loop
def shift(tables, rules, units, order, delays, starts, ended, best, stride):
    """Try every delay a stride longer and shorter, and keep what helps; returns the value then."""
    for n in range(len(tables.steps)):
        for i in range(tables.steps[n]):
            for sign in (1.0, -1.0):
                kept = delays[n, i]
                delays[n, i] = max(0.0, kept + sign * stride)
                if delays[n, i] == kept:
                    continue
                follow(tables, units, order, delays, starts, ended)
                value = value_of(rules, ended)
                if value < best - 1e-9 * abs(best):
                    best = value
                else:
                    delays[n, i] = kept
    return best

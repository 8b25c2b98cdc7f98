"""Other people's mappings, to be judged in the same simulator and to start our own search from.

Each baseline returns candidates: mappings without planned starts, where a step begins as soon as its data is there
and its unit free (``gpu-only`` and shared ``per-unit`` add planned starts for throughput). Whoever asks runs all
of them in the simulator and keeps the best of each. None of these methods knows contention.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.mapping.baselines.blind import contention_blind
from weft.mapping.baselines.h2h import h2h
from weft.mapping.baselines.heft import heft
from weft.mapping.baselines.herald import herald
from weft.mapping.baselines.mensa import mensa
from weft.mapping.baselines.naive import one_unit, per_unit
from weft.mapping.problem import Objective, Problem
from weft.mapping.schedule import Schedule

Baseline = Callable[[Problem, Objective], tuple[Schedule, ...]]

BASELINES: dict[str, Baseline] = {
    "gpu-only": one_unit,
    "per-unit": per_unit,
    "mensa": mensa,
    "herald": herald,
    "h2h": h2h,
    "heft": heft,
    "contention-blind": contention_blind,
}
"""The names a user may write. All but the last take a few milliseconds together; the last is a search of its own."""

__all__ = ["BASELINES", "Baseline"]

"""The most requests on time, on all machines: where all cannot be, some machines are kept below what makes all late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from weft.placing.bound import PlacingBound
from weft.placing.filling import Filling
from weft.placing.judging import OnTimeJudge
from weft.placing.loading import most_load
from weft.placing.packing import pack_evenly
from weft.placing.problem import PlacingProblem

CAPS = (0.95, 0.85, 0.75)
"""How busy machines may be in fillings that leave out what is more."""


def most_on_time(problem: PlacingProblem, bound: PlacingBound, judge: OnTimeJudge) -> Filling:
    """The filling with most requests on time, of those that serve all and those that leave some out."""
    return max(_starts(problem, bound), key=lambda filling: share_on_time(filling, judge))


def share_on_time(filling: Filling, judge: OnTimeJudge) -> float:
    """Share of all requests that are on time; those that go nowhere are not."""
    rates = np.array([demand.rate for demand in filling.problem.demands])
    served = min(1.0, float(filling.served() @ rates / rates.sum()))
    return served * judge.attainment(filling, np.flatnonzero(filling.used).tolist())


def _starts(problem: PlacingProblem, bound: PlacingBound) -> Iterator[Filling]:
    scale, even = most_load(problem, bound)
    yield even
    if scale >= 1:
        return
    opened = np.ones(len(problem.machines), np.bool_)
    for cap in CAPS:
        filling, _ = pack_evenly(replace(problem, cap=np.full(len(problem.cap), cap)), opened, bound)
        yield Filling(problem, filling.shares)

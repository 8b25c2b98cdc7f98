"""A measured host, drawn from: every segment takes what it took in one of the runs that were measured.

The runs of a stream follow each other as they were measured, from a place that the seed chooses, so that slow spells of
the machine stay together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import numpy as np

from weft.devices import Host
from weft.engine.policies import Setting
from weft.engine.policies.base import Candidate
from weft.engine.simulated_host import Crowd, DrawnWork, SimulatedHost
from weft.simulation.requests.case import Case

DRAWS = 3
"""Which of a seed's independent sequences draws the places in the measurements."""


def executor(case: Case, setting: Setting, seed: int | None) -> SimulatedHost:
    """The lanes of a case's host."""
    host = _host(case)
    ticks = case.clock.ticks
    return SimulatedHost(
        setting,
        frozenset(range(len(setting.programs))),
        ticks(host.abort_s),
        abort_from=ticks(host.abort_from_s),
        step_ticks=ticks(host.step_s),
        crowd=_Draws(case, _rng(case, seed)).crowd(setting),
    )


def overheads(case: Case, seed: int | None) -> list[Iterator[int]]:
    """For each stream, endless ticks that its requests take besides their segments."""
    host, rng = _host(case), _rng(case, seed)
    rng.integers(1 << 30, size=len(case.terms) + 1)  # those of the segments
    return [
        _from_anywhere([case.clock.ticks(time_s) for time_s in host.model(stream.served_name).overhead_s], rng)
        for stream in case.workload.stream
    ]


class _Draws:
    """What segments really take."""

    def __init__(self, case: Case, rng: np.random.Generator) -> None:
        host, names = _host(case), [stream.served_name for stream in case.workload.stream]
        self._host, self._models = host, [host.model(name) for name in names]
        self._work: list[tuple[float, ...]] = []
        self._kinds: list[int] = []
        for name, model, terms in zip(names, self._models, case.terms, strict=True):
            for batch in range(1, terms.max_batch + 1):
                self._work.append(tuple(time_s / case.clock.tick_s for time_s in model.times_at(batch)))
                self._kinds.append(list(host.models).index(name))
        self._hand_overs = _from_anywhere([case.clock.ticks(time_s) for time_s in host.hand_over_s], rng)
        self._places = [int(place) for place in rng.integers(1 << 30, size=len(names))]

    def crowd(self, setting: Setting) -> Crowd:
        if setting.shares:
            return Crowd(setting.shares, range(len(self._work)), self._work_of)
        return Crowd(self._host.together(), self._kinds, self._work_of)

    def _work_of(self, candidate: Candidate) -> DrawnWork:
        spread = self._models[candidate.stream].spread
        ticks = self._work[candidate.program][candidate.layer]
        if spread:
            run = (self._places[candidate.stream] + candidate.query) % len(spread)
            ticks *= spread[run][candidate.layer]
        return DrawnWork(next(self._hand_overs), max(1.0, ticks))


def _from_anywhere(values: Sequence[int], rng: np.random.Generator) -> Iterator[int]:
    """The values in order and over again, from a place that is drawn."""
    place = int(rng.integers(1 << 30))
    return islice(cycle(values or (0,)), place % max(1, len(values)), None)


def _rng(case: Case, seed: int | None) -> np.random.Generator:
    return np.random.default_rng([case.workload.seed if seed is None else seed, len(case.terms), DRAWS])


def _host(case: Case) -> Host:
    assert isinstance(case.device, Host)
    return case.device

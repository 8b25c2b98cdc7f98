"""A measured host, drawn from: every segment takes what it took in one of the runs that were measured.

The runs of a stream follow each other as they were measured, from a place that the seed chooses, so that slow spells of
the machine stay together.
"""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

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
    host, drawn, ticks = _host(case), draws(case, seed), case.clock.ticks
    models = [host.model(stream.served_name) for stream in case.workload.stream]
    hand_overs = cycle(drawn.hand_overs or (0,))

    def work_of(candidate: Candidate) -> DrawnWork:
        taken = drawn.work[candidate.program][candidate.layer]
        if spread := models[candidate.stream].spread:
            run = (drawn.runs[candidate.stream] + candidate.query) % len(spread)
            taken *= spread[run][candidate.layer]
        return DrawnWork(next(hand_overs), max(1.0, taken))

    if setting.shares:
        crowd = Crowd(setting.shares, range(len(drawn.work)), work_of)
    else:
        crowd = Crowd(host.together(), drawn.kinds, work_of)
    return SimulatedHost(
        setting,
        frozenset(range(len(setting.programs))),
        ticks(host.abort_s),
        abort_from=ticks(host.abort_from_s),
        step_ticks=ticks(host.step_s),
        crowd=crowd,
    )


class Draws(NamedTuple):
    """What segments and requests really take; lists that are gone through over and again."""

    work: list[tuple[float, ...]]
    """Mean ticks of each segment of each program."""
    kinds: list[int]
    """The model of each program, by its number on the host."""
    runs: list[int]
    """The first measured run of each stream."""
    hand_overs: list[int]
    overheads: list[list[int]]
    """Ticks that the requests of each stream take besides their segments."""


def draws(case: Case, seed: int | None) -> Draws:
    """Choose where in the measurements a run begins."""
    host, names = _host(case), [stream.served_name for stream in case.workload.stream]
    rng = np.random.default_rng([case.workload.seed if seed is None else seed, len(case.terms), DRAWS])
    ticks, tick_s, models = case.clock.ticks, case.clock.tick_s, [host.model(name) for name in names]
    places = [int(place) for place in rng.integers(1 << 30, size=1 + 2 * len(names))]
    work, kinds = [], []
    for name, model, terms in zip(names, models, case.terms, strict=True):
        for batch in range(1, terms.max_batch + 1):
            work.append(tuple(time_s / tick_s for time_s in model.times_at(batch)))
            kinds.append(list(host.models).index(name))
    return Draws(
        work,
        kinds,
        places[1 : 1 + len(names)],
        _from(places[0], [ticks(time_s) for time_s in host.hand_over_s]),
        [
            _from(place, [ticks(time_s) for time_s in model.overhead_s])
            for place, model in zip(places[1 + len(names) :], models, strict=True)
        ],
    )


def _from(place: int, values: list[int]) -> list[int]:
    """The values in order, from one of them on."""
    first = place % max(1, len(values))
    return values[first:] + values[:first]


def _host(case: Case) -> Host:
    assert isinstance(case.device, Host)
    return case.device

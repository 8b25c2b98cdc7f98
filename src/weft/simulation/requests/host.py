"""A simulated host with durations from measurements: every segment takes as long as in one of the measured runs.

The runs of a stream follow each other as they were measured, from a place that the seed chooses, so that slow spells of
the machine stay together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np

from weft.devices import Host
from weft.devices.costs.program import Clock
from weft.engine.policies import Setting
from weft.engine.policies.base import Candidate
from weft.engine.simulated_host import Crowd, DrawnWork, SimulatedHost
from weft.engine.tickets import Terms
from weft.simulation.requests.case import Case, Device

DRAWS = 3
"""Number of the random sequence, among those of a seed, that draws the places in the measurements."""


def executor(case: Case, setting: Setting, seed: int | None) -> SimulatedHost:
    """Return the lanes of a case's host, with measured durations and contention."""
    host, measured, ticks = host_of(case), measured_work(case.device, case.terms, names_of(case)), case.clock.ticks
    hand_over_place, *run_places = draw_places(case, seed)
    spreads = [host.model(name).spread for name in names_of(case)]
    hand_overs = _cycle_from(hand_over_place, measured.hand_overs)

    def work_of(candidate: Candidate) -> DrawnWork:
        ticks_alone = measured.work[candidate.program][candidate.layer]
        if spread := spreads[candidate.stream]:
            run = (run_places[candidate.stream] + candidate.query) % len(spread)
            ticks_alone *= spread[run][candidate.layer]
        return DrawnWork(next(hand_overs), max(1.0, ticks_alone))

    if setting.shares:
        crowd = Crowd(setting.shares, range(len(measured.work)), work_of)
    else:
        crowd = Crowd(host.together(), measured.kinds, work_of)
    return SimulatedHost(
        setting,
        frozenset(range(len(setting.programs))),
        ticks(host.abort_s),
        abort_from=ticks(host.abort_from_s),
        step_ticks=ticks(host.step_s),
        crowd=crowd,
    )


def overheads(case: Case, seed: int | None) -> list[Iterator[int]]:
    """Return, for each stream, an endless iterator over the ticks that requests take besides their segments."""
    places = draw_places(case, seed)[1 + len(case.terms) :]  # those in the overheads come last
    measured = measured_work(case.device, case.terms, names_of(case))
    return [_cycle_from(place, ticks) for place, ticks in zip(places, measured.overheads, strict=True)]


class MeasuredWork(NamedTuple):
    """Measured durations of a host's models, in ticks."""

    work: tuple[tuple[float, ...], ...]
    """For each program, the mean duration of each segment."""
    kinds: tuple[int, ...]
    """For each program, the number of its model on the host: the kind of work for contention."""
    hand_overs: tuple[int, ...]
    """Times from the engine to the start of a segment on a lane."""
    overheads: tuple[tuple[int, ...], ...]
    """For each stream, the times that requests take besides their segments."""


@lru_cache(maxsize=256)
def measured_work(host: Device, terms: tuple[Terms, ...], names: tuple[str, ...]) -> MeasuredWork:
    """Return the measurements of the streams' models; cached, since many runs of a plan share them."""
    assert isinstance(host, Host)
    clock, gate_s = Clock.nanoseconds(), host.gates.gate_us / 1e6 if host.gates else 0.0
    programs = [
        (name, batch) for name, term in zip(names, terms, strict=True) for batch in range(1, term.max_batch + 1)
    ]
    numbers = {name: number for number, name in enumerate(host.models)}
    return MeasuredWork(
        tuple(
            tuple((time_s + gate_s) / clock.tick_s for time_s in host.model(name).times_at(batch))
            for name, batch in programs
        ),
        tuple(numbers[name] for name, _ in programs),
        tuple(clock.ticks(time_s) for time_s in host.hand_over_s),
        tuple(tuple(clock.ticks(time_s) for time_s in host.model(name).overhead_s) for name in names),
    )


def names_of(case: Case) -> tuple[str, ...]:
    """Return the name of each stream's model, as it is served."""
    return tuple(stream.served_name for stream in case.workload.stream)


def draw_places(case: Case, seed: int | None) -> list[int]:
    """Draw the places in the measurements at which a run begins.

    First the place in the hand-overs, then in each stream's runs, then in each stream's overheads; all unbounded, to be
    taken modulo the number of measurements.
    """
    rng = np.random.default_rng([case.workload.seed if seed is None else seed, len(case.terms), DRAWS])
    return [int(place) for place in rng.integers(1 << 30, size=1 + 2 * len(case.terms))]


def _cycle_from(place: int, values: Sequence[int]) -> Iterator[int]:
    """Iterate endlessly over the values in order, from index *place* (modulo their number) on; zeros without values."""
    return islice(cycle(values or (0,)), place % max(1, len(values)), None)


def host_of(case: Case) -> Host:
    assert isinstance(case.device, Host)
    return case.device

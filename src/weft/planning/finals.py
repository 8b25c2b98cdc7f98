"""The options that came nearest, simulated for longer and with other requests than those that chose them.

A choice among many by short runs favours whoever was lucky in them. So the last few are compared again, all with the
same fresh requests, and these are the numbers that a plan tells. Policies that come to the same, request by request, at
the asked load and at the largest one, are told once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import floor, inf, log

from weft.planning.asked import Asked
from weft.planning.bounds import SLACK
from weft.planning.candidates import Arrangement
from weft.planning.foreseen import stream_predictions
from weft.planning.helpers import Helpers, Promise
from weft.planning.plan import Prediction
from weft.planning.trials import (
    LOWEST,
    USUAL,
    OptionTrial,
    RunLength,
    keeps,
    kept_at,
    largest_step,
    missed_in,
    simulated,
)
from weft.reports.requests import RequestReport
from weft.simulation.requests import Case, RequestRun

FINALISTS, ENTRANTS = 5, 8
"""How many are told, and how many are looked at to find as many that differ."""
FRESH_SEED = 1000
"""Added to the workload's seed."""
FINE, WIDEST = 1.03, 100
"""How far apart the loads are that are tried, and how many of them up and down; nearer ones count as equal."""


@dataclass(frozen=True, slots=True, eq=False)
class Finalist:
    """An option with the numbers that are told of it."""

    trial: OptionTrial
    report: RequestReport
    """At the asked load."""
    factor: float | None
    """The largest multiple of the asked load that keeps the deadlines; None where there is no rate to turn up."""
    at_best: tuple[bool, float] | None = None
    """Whether it keeps the deadlines at the largest load of the best short run, and what it misses there."""
    twins: tuple[OptionTrial, ...] = ()
    """Options that do the same."""

    @property
    def prediction(self) -> Prediction:
        """The numbers as a plan has them."""
        return prediction(self.trial.asked, self.report, self.trial.memory_bytes, self.factor)


def finals(
    asked: Asked,
    trials: Sequence[OptionTrial],
    progress: Callable[[str, int, int], None] | None = None,
    helpers: Helpers | None = None,
) -> list[Finalist]:
    """The first few of these that differ, the best by what is asked for first."""
    helpers = helpers or Helpers()
    told = progress or (lambda label, done, of: None)
    found: list[Finalist] = []
    loads: list[Promise[float | None]] = []
    for seen in _seen(asked, trials[:ENTRANTS], helpers, told):
        twin = next((number for number, each in enumerate(found) if _alike(each, seen)), None)
        if twin is not None:
            found[twin] = replace(found[twin], twins=(*found[twin].twins, seen.trial))
            continue
        found.append(seen)
        if asked.has_rates:
            near = loads[0].result() if loads else None
            loads.append(helpers.begin(_largest_load, seen.trial, seen.at_best, trials[0].factor, near, USUAL))
        if len(found) == FINALISTS:
            break
    return sorted(_loaded(found, loads, told), key=lambda each: _rank(asked, each))


def _seen(
    asked: Asked, entrants: Sequence[OptionTrial], helpers: Helpers, told: Callable[[str, int, int], None]
) -> Iterator[Finalist]:
    """What options do at the asked load, and at the largest one of the best, before their own are looked for.

    As many as will be told are begun at once; the others only if they are asked for.
    """
    largest = entrants[0].factor if asked.has_rates else 0.0
    begun = [helpers.begin(_look, asked, trial.arrangement, largest, USUAL) for trial in entrants[:FINALISTS]]
    for place, trial in enumerate(entrants):
        told(trial.arrangement.label, min(place, FINALISTS - 1), 2 * FINALISTS)
        look = begun[place] if place < len(begun) else helpers.begin(_look, asked, trial.arrangement, largest, USUAL)
        report, at_best = look.result()
        yield Finalist(trial, report, None, at_best)


def _loaded(
    found: list[Finalist], loads: list[Promise[float | None]], told: Callable[[str, int, int], None]
) -> Iterator[Finalist]:
    """Finalists with their largest loads, where these were looked for."""
    for place, (each, load) in enumerate(zip_longest(found, loads)):
        told(each.trial.arrangement.label, FINALISTS + place, 2 * FINALISTS)
        factor = load.result() if load else None
        yield replace(each, factor=each.trial.factor if load and factor is None else factor)


def _look(
    asked: Asked, arrangement: Arrangement, largest: float, length: RunLength
) -> tuple[RequestReport, tuple[bool, float] | None]:
    """What an option does at the asked load, and at another one where that is not 0."""
    seed = asked.workload.seed + FRESH_SEED
    report = simulated(asked, arrangement, 1.0, length, seed=seed)[1].report
    return report, kept_at(asked, arrangement, largest, length, seed=seed) if largest else None


def long_run(asked: Asked, arrangement: Arrangement, length: RunLength) -> tuple[Case, RequestRun]:
    """What is told of an option that has won: a run at the asked load, longer than those that chose it."""
    return simulated(asked, arrangement, 1.0, length, seed=asked.workload.seed + FRESH_SEED)


def _alike(one: Finalist, other: Finalist) -> bool:
    """Whether two policies on the same lanes, with the same batches, have done the same."""
    return (one.at_best, one.report.streams, _besides_policy(one)) == (
        other.at_best,
        other.report.streams,
        _besides_policy(other),
    )


def _besides_policy(each: Finalist) -> tuple[int, int, int, dict[str, int]]:
    settings = each.trial.arrangement.settings
    return settings.lanes, settings.threads, each.trial.memory_bytes, dict(each.trial.arrangement.batches)


def _rank(asked: Asked, each: Finalist) -> tuple[float, ...]:
    """What decides among finalists; smaller is better, and where all is alike the order in which they came."""
    missed = 0.0 if keeps(each.report, asked.limit) else missed_in(each.report)
    load = -(each.factor or 0.0)
    memory, wait = float(each.trial.memory_bytes), _wait(each.report)
    orders = {
        "deadlines": (missed, load, memory),
        "load": (load, memory),
        "memory": (missed, memory, load),
        "latency": (missed, wait, memory),
    }
    return orders[asked.objective] if asked.has_rates or asked.objective == "memory" else (missed, wait, memory)


def _wait(report: RequestReport) -> float:
    """The p99 of the stream that has the largest for its deadline, to two digits of that."""
    return max(1e9 if each.p99_s is None else round(each.p99_s / each.deadline_s, 2) for each in report.streams)


def _largest_load(
    trial: OptionTrial, at_middle: tuple[bool, float] | None, middle: float, near: float | None, length: RunLength
) -> float | None:
    """The largest multiple of the asked load that an option sustains, looked for from that of the best on; None: none.

    middle, at_middle: the load of the best, and what is known of this option there. near: what the first finalist
    carries, which is most often about as much.
    """
    asked, arrangement = trial.asked, trial.arrangement
    if trial.highest < LOWEST or at_middle is None:
        return None
    kept_there, seed = at_middle[0], asked.workload.seed + FRESH_SEED

    def sustained(step: int) -> bool:
        return kept_there if step == 0 else kept_at(asked, arrangement, middle * FINE**step, length, seed=seed)[0]

    most = floor(log(trial.bound.factor * SLACK / middle) / log(FINE)) if trial.bound.factor < inf else WIDEST
    least = -WIDEST
    start = round(log(near / middle) / log(FINE)) if near else 0
    step = largest_step(sustained, least, max(least, min(WIDEST, most)) + 1, start, 1 if near else 2)
    return float(middle * FINE**step) if step > least else None


def prediction(asked: Asked, report: RequestReport, memory_bytes: int, factor: float | None) -> Prediction:
    """A run at the asked load, and the largest load, as a plan tells them."""
    return Prediction(
        streams=stream_predictions(asked.workload, report),
        load=round(report.load or 0.0, 4),
        sustainable_factor=None if factor is None else round(factor, 4),
        sustainable_per_s=None if factor is None else round(factor * asked.per_s, 3),
        memory_bytes=memory_bytes,
    )

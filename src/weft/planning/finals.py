"""The options that came nearest, simulated for longer and with other requests than those that chose them.

A choice among many by short runs favours whoever was lucky in them. So the last few are compared again, all with the
same fresh requests, and these are the numbers that a plan tells. Policies that come to the same, request by request, at
the asked load and at the largest one, are told once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import floor, inf, log

from weft.planning.asked import Asked
from weft.planning.bounds import SLACK
from weft.planning.foreseen import stream_predictions
from weft.planning.plan import Prediction
from weft.planning.trials import LOWEST, USUAL, OptionTrial, keeps, kept_at, largest_step, missed_in, simulated
from weft.reports.requests import RequestReport

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
    asked: Asked, trials: Sequence[OptionTrial], progress: Callable[[str, int, int], None] | None = None
) -> list[Finalist]:
    """The first few of these that differ, the best by what is asked for first."""
    found: list[Finalist] = []
    for place, trial in enumerate(trials[:ENTRANTS]):
        if len(found) == FINALISTS:
            break
        if progress:
            progress(trial.arrangement.label, place, min(ENTRANTS, len(trials)))
        seen = _seen(asked, trial, trials[0])
        twin = next((number for number, each in enumerate(found) if _alike(each, seen)), None)
        if twin is None:
            near = found[-1].factor if found else None
            found.append(replace(seen, factor=_largest_load(seen, trials[0], near) if asked.has_rates else None))
        else:
            found[twin] = replace(found[twin], twins=(*found[twin].twins, trial))
    return sorted(found, key=lambda each: _rank(asked, each))


def _seen(asked: Asked, trial: OptionTrial, best: OptionTrial) -> Finalist:
    """What an option does at the asked load, and at the largest one of the best, before its own is looked for."""
    seed = asked.workload.seed + FRESH_SEED
    report = simulated(asked, trial.arrangement, 1.0, USUAL, seed=seed)[1].report
    if not asked.has_rates or best.factor == 0.0:
        return Finalist(trial, report, None)
    return Finalist(trial, report, None, kept_at(asked, trial.arrangement, best.factor, USUAL, seed=seed))


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


def _largest_load(seen: Finalist, best: OptionTrial, near: float | None) -> float:
    """The largest multiple of the asked load that an option sustains, looked for from that of the best on.

    near: what another finalist carries, which is most often about as much.
    """
    trial = seen.trial
    asked, arrangement = trial.asked, trial.arrangement
    if trial.highest < LOWEST or seen.at_best is None:
        return trial.factor
    middle, seed = best.factor, asked.workload.seed + FRESH_SEED
    kept_there, _ = seen.at_best

    def sustained(step: int) -> bool:
        return kept_there if step == 0 else kept_at(asked, arrangement, middle * FINE**step, USUAL, seed=seed)[0]

    most = floor(log(trial.bound.factor * SLACK / middle) / log(FINE)) if trial.bound.factor < inf else WIDEST
    least = -WIDEST
    start = round(log(near / middle) / log(FINE)) if near else 0
    step = largest_step(sustained, least, max(least, min(WIDEST, most)) + 1, start, 1 if near else 2)
    return float(middle * FINE**step) if step > least else trial.factor


def prediction(asked: Asked, report: RequestReport, memory_bytes: int, factor: float | None) -> Prediction:
    """A run at the asked load, and the largest load, as a plan tells them."""
    return Prediction(
        streams=stream_predictions(asked.workload, report),
        load=round(report.load or 0.0, 4),
        sustainable_factor=None if factor is None else round(factor, 4),
        sustainable_per_s=None if factor is None else round(factor * asked.per_s, 3),
        memory_bytes=memory_bytes,
    )

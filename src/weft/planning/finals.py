"""The final comparison: the best candidates of the search, simulated for longer and with fresh requests.

A choice among many candidates by short runs favours those that were lucky in them. So the best few are compared again,
all with the same fresh sets of requests (``deciding``). A plan reports the results of the first set for every finalist.
Policies that answer every request alike, at the asked load and at the largest one, are reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import floor, inf, log

from weft.planning.bounds import SLACK
from weft.planning.candidates import Arrangement
from weft.planning.deciding import Decision, Loss, Scores, criteria, decide
from weft.planning.plan import Prediction
from weft.planning.plan_request import PlanRequest
from weft.planning.prediction import stream_predictions
from weft.planning.process_pool import Helpers, PendingResult
from weft.planning.trials import (
    LOWEST,
    OptionTrial,
    keeps,
    kept_at,
    largest_step,
    simulated,
)
from weft.simulation.request_report import RequestReport
from weft.simulation.requests import Case, RequestRun
from weft.simulation.run_length import FRESH_SEED, LONG, USUAL, RunLength

FINALISTS, ENTRANTS = 5, 8
"""How many are told, and how many are looked at to find as many that differ."""
SETS = 3
"""How many sets of requests options are compared with."""
NEAR = 0.9
"""Whose largest load is below this part of the best one's, with the first set, is looked for with no other set: the
loads of one option differ by less from set to set."""
FINE, WIDEST = 1.03, 100
"""How far apart the loads are that are tried, and how many of them up and down; nearer ones count as equal."""


@dataclass(frozen=True, slots=True, eq=False)
class Finalist:
    """An option with the results that the plan reports."""

    trial: OptionTrial
    reports: tuple[RequestReport, ...]
    """At the asked load, with each set of requests; the first is the longest, and is told."""
    factors: tuple[float, ...] = ()
    """The largest multiple of the asked load that keeps the deadlines, with each set of requests, or the first alone;
    none where there is no rate to turn up."""
    at_best: tuple[bool, float] | None = None
    """Whether it keeps the deadlines at the largest load of the best short run, and what it misses there."""
    twins: tuple[OptionTrial, ...] = ()
    """Options that do the same."""

    @property
    def report(self) -> RequestReport:
        """The simulation of the first set of requests at the asked load."""
        return self.reports[0]

    @property
    def factor(self) -> float | None:
        """The largest multiple of the asked load with the first set of requests."""
        return self.factors[0] if self.factors else None

    @property
    def keeps_deadlines(self) -> bool:
        """Whether it keeps the deadlines at the asked load, with the first set of requests."""
        return keeps(self.report, self.trial.asked.limit)

    @property
    def prediction(self) -> Prediction:
        """The results in the form that a plan stores."""
        return prediction(self.trial.asked, self.report, self.trial.memory_bytes, self.factor)

    @property
    def scores(self) -> Scores:
        """The values that are compared between finalists."""
        limit = self.trial.asked.limit
        return Scores(
            missed=tuple(0.0 if keeps(report, limit) else report.worst_missed for report in self.reports),
            load=tuple(1 / factor if factor else inf for factor in self.factors),
            memory=(float(self.trial.memory_bytes),),
            wait=tuple(longest_wait(report) for report in self.reports),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Finalists, the winner first, and the criteria that decided between them."""

    finalists: tuple[Finalist, ...]
    equal: int = 0
    """How many after the first no criterion tells from it; it is the simplest of them."""
    losses: tuple[Loss, ...] = ()
    """Why each of the others was not taken; places are those in ``finalists``."""

    @property
    def winner(self) -> Finalist:
        return self.finalists[0]


def rank(asked: PlanRequest, finalists: Sequence[Finalist]) -> Ranking:
    """Order finalists by the criteria of the request."""
    decision = decide(
        criteria(asked.objective, asked.has_rates),
        [finalist.scores for finalist in finalists],
        lambda place: finalists[place].trial.arrangement.simplicity,
    )
    return _ranking(finalists, decision)


def _ranking(finalists: Sequence[Finalist], decision: Decision) -> Ranking:
    places = {old: new for new, old in enumerate(decision.order)}
    losses = tuple(Loss(loss.by, places[loss.to]) for loss in decision.losses.values())
    return Ranking(tuple(finalists[place] for place in decision.order), len(decision.equal), losses)


def finals(
    asked: PlanRequest,
    trials: Sequence[OptionTrial],
    progress: Callable[[str, int, int], None] | None = None,
    helpers: Helpers | None = None,
) -> Ranking:
    """Compare the first few trials that differ."""
    helpers = helpers or Helpers()
    tell = progress or (lambda label, done, of: None)
    finalists: list[Finalist] = []
    loads: list[PendingResult[float | None]] = []
    for seen in _predict_finalists(asked, trials[:ENTRANTS], helpers, tell):
        twin = next((number for number, finalist in enumerate(finalists) if _alike(finalist, seen)), None)
        if twin is not None:
            finalists[twin] = replace(finalists[twin], twins=(*finalists[twin].twins, seen.trial))
            continue
        finalists.append(seen)
        if asked.has_rates:
            near = loads[0].result() if loads else None
            loads.append(helpers.begin(_largest_load, seen.trial, seen.at_best, trials[0].factor, near, USUAL))
        if len(finalists) == FINALISTS:
            break
    loaded = [_by_its_simplest(finalist) for finalist in _add_largest_loads(finalists, loads, tell)]
    return rank(asked, _with_more_sets(loaded, helpers) if asked.has_rates else loaded)


def _predict_finalists(
    asked: PlanRequest, entrants: Sequence[OptionTrial], helpers: Helpers, tell: Callable[[str, int, int], None]
) -> Iterator[Finalist]:
    """Yield each entrant, simulated at the asked load and at the largest load of the best entrant.

    The first ``FINALISTS`` runs are begun at once, in parallel; further ones only when the caller asks for them.
    """
    largest = entrants[0].factor if asked.has_rates else 0.0
    lengths = (LONG, *[USUAL] * (SETS - 1))
    begun = [helpers.begin(_look, asked, trial.arrangement, largest, lengths) for trial in entrants[:FINALISTS]]
    for place, trial in enumerate(entrants):
        tell(trial.arrangement.label, min(place, FINALISTS - 1), 2 * FINALISTS)
        look = begun[place] if place < len(begun) else helpers.begin(_look, asked, trial.arrangement, largest, lengths)
        reports, at_best = look.result()
        yield Finalist(trial, reports, at_best=at_best)


def _add_largest_loads(
    finalists: list[Finalist], loads: list[PendingResult[float | None]], tell: Callable[[str, int, int], None]
) -> Iterator[Finalist]:
    """Yield the finalists with their largest loads, where these were searched for."""
    for place, (finalist, load) in enumerate(zip_longest(finalists, loads)):
        tell(finalist.trial.arrangement.label, FINALISTS + place, 2 * FINALISTS)
        factor = load.result() if load else None
        yield replace(finalist, factors=(finalist.trial.factor if factor is None else factor,) if load else ())


def _with_more_sets(finalists: Sequence[Finalist], helpers: Helpers) -> list[Finalist]:
    """Return the finalists; those near the best get their largest loads with the other sets of requests, too."""
    best = max(finalist.factor or 0.0 for finalist in finalists)
    begun = {
        place: [helpers.begin(_load_near, finalist.trial, finalist.factor, number, USUAL) for number in range(1, SETS)]
        for place, finalist in enumerate(finalists)
        if finalist.factor and finalist.factor >= NEAR * best
    }
    return [
        replace(finalist, factors=(*finalist.factors, *(load.result() for load in begun.get(place, ()))))
        for place, finalist in enumerate(finalists)
    ]


def _look(
    asked: PlanRequest, arrangement: Arrangement, largest: float, lengths: Sequence[RunLength]
) -> tuple[tuple[RequestReport, ...], tuple[bool, float] | None]:
    """Simulate an option at the asked load with each set of requests.

    largest: another load to simulate, as a multiple of the asked one; 0: none. The second result says whether deadlines
    are kept at that load, and is None without one.
    """
    reports = tuple(
        simulated(asked, arrangement, 1.0, length, seed=_seed(asked, number))[1].report
        for number, length in enumerate(lengths)
    )
    return reports, kept_at(asked, arrangement, largest, lengths[-1], seed=_seed(asked)) if largest else None


def _seed(asked: PlanRequest, number: int = 0) -> int:
    """Return the seed of a set of requests."""
    return asked.workload.seed + FRESH_SEED + number


def long_run(asked: PlanRequest, arrangement: Arrangement, length: RunLength) -> tuple[Case, RequestRun]:
    """Simulate the run that a plan reports: the first set of requests at the asked load."""
    return simulated(asked, arrangement, 1.0, length, seed=_seed(asked), record=True)


def _alike(one: Finalist, other: Finalist) -> bool:
    """Return whether two policies with the same lanes and batches gave the same results."""
    return (one.at_best, one.report.streams, _besides_policy(one)) == (
        other.at_best,
        other.report.streams,
        _besides_policy(other),
    )


def _by_its_simplest(finalist: Finalist) -> Finalist:
    """Return the finalist with the simplest of its equal candidates in front."""
    first, *twins = sorted((finalist.trial, *finalist.twins), key=lambda trial: trial.arrangement.simplicity)
    return replace(finalist, trial=first, twins=tuple(twins))


def _besides_policy(finalist: Finalist) -> tuple[int, int, int, dict[str, int]]:
    arrangement = finalist.trial.arrangement
    settings = arrangement.settings
    return settings.lanes, settings.threads, finalist.trial.memory_bytes, dict(arrangement.batches)


def longest_wait(report: RequestReport) -> float:
    """Return the largest ratio, over the streams, of p99 to deadline; infinite if a stream has no answers."""
    return max(inf if stream.p99_s is None else stream.p99_s / stream.deadline_s for stream in report.streams)


def _largest_load(
    trial: OptionTrial, at_middle: tuple[bool, float] | None, middle: float, near: float | None, length: RunLength
) -> float | None:
    """Search the largest multiple of the asked load that an option sustains; None if it sustains none.

    middle, at_middle: the largest load of the best option, and what this option did there: the search begins there.
    near: the largest load of the first finalist, a good guess; None if unknown.
    """
    asked, arrangement = trial.asked, trial.arrangement
    if trial.highest < LOWEST or at_middle is None:
        return None
    kept_there, seed = at_middle[0], _seed(asked)

    def sustained(step: int) -> bool:
        return kept_there if step == 0 else kept_at(asked, arrangement, middle * FINE**step, length, seed=seed)[0]

    most = floor(log(trial.bound.factor * SLACK / middle) / log(FINE)) if trial.bound.factor < inf else WIDEST
    least = -WIDEST
    start = round(log(near / middle) / log(FINE)) if near else 0
    step = largest_step(sustained, least, max(least, min(WIDEST, most)) + 1, start, 1 if near else 2)
    return float(middle * FINE**step) if step > least else None


def _load_near(trial: OptionTrial, near: float, number: int, length: RunLength) -> float:
    """Search the largest multiple of the asked load that an option sustains with another set of requests.

    near: its largest load with the first set, where the search begins. 0: it sustains none.
    """
    seed = _seed(trial.asked, number)

    def sustained(step: int) -> bool:
        return kept_at(trial.asked, trial.arrangement, near * FINE**step, length, seed=seed)[0]

    step = largest_step(sustained, -WIDEST, WIDEST, 0, 1)
    return near * FINE**step if step > -WIDEST else 0.0


def prediction(asked: PlanRequest, report: RequestReport, memory_bytes: int, factor: float | None) -> Prediction:
    """Return a run at the asked load and the largest load in the form that a plan stores."""
    return Prediction(
        streams=stream_predictions(asked.workload, report),
        load=round(report.load or 0.0, 4),
        sustainable_factor=None if factor is None else round(factor, 4),
        sustainable_per_s=None if factor is None else round(factor * asked.per_s, 3),
        memory_bytes=memory_bytes,
    )

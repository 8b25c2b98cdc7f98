"""The final comparison: the best candidates of the search, simulated for longer and with fresh requests.

A choice among many candidates by short runs favours candidates with lucky runs. So the best few are compared again, all
with the same fresh sets of requests (``deciding``). A plan reports the results of the first set for every finalist.
Policies with equal results, at the asked load and at the largest load, are reported as one finalist. *helpers*: the
processes that simulate in parallel with this one.
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
"""Number of finalists that a plan reports; number of candidates that are simulated to find different finalists."""
SETS = 3
"""Number of sets of requests with which finalists are compared."""
NEAR = 0.9
"""Share of the best finalist's largest load with the first set. Finalists below it are not simulated with other sets,
since the largest load of an option differs by less between sets."""
FINE, WIDEST = 1.03, 100
"""Factor between neighbouring loads of the search for the largest load, and the most steps up or down from its start.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Finalist:
    """An option with the results that the plan reports."""

    trial: OptionTrial
    reports: tuple[RequestReport, ...]
    """Simulations at the asked load, one per set of requests; the first is the longest, and the plan reports it."""
    factors: tuple[float, ...] = ()
    """The largest multiples of the asked load that keep the deadlines, one per set of requests or only for the first;
    empty if no stream has a rate."""
    at_best: tuple[bool, float] | None = None
    """At the largest load of the best candidate: whether the deadlines are kept, and the share that is missed."""
    twins: tuple[OptionTrial, ...] = ()
    """Options with the same results."""

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
        """Whether the option keeps the deadlines at the asked load, with the first set of requests."""
        return keeps(self.report, self.trial.request.limit)

    @property
    def prediction(self) -> Prediction:
        """The results in the form that a plan stores."""
        return prediction(self.trial.request, self.report, self.trial.memory_bytes, self.factor)

    @property
    def scores(self) -> Scores:
        """The values that are compared between finalists."""
        limit = self.trial.request.limit
        return Scores(
            missed=tuple(0.0 if keeps(report, limit) else report.worst_missed for report in self.reports),
            load=tuple(1 / factor if factor else inf for factor in self.factors),
            memory=(float(self.trial.memory_bytes),),
            wait=tuple(longest_wait(report) for report in self.reports),
            division=self.trial.arrangement.division,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Finalists, the winner first, and the criteria that decided between them."""

    finalists: tuple[Finalist, ...]
    equal: int = 0
    """Number of finalists after the winner that are equal to it by all criteria; the winner is the simplest."""
    losses: tuple[Loss, ...] = ()
    """Why each of the other finalists was not taken; ``Loss.to`` is an index into ``finalists``."""

    @property
    def winner(self) -> Finalist:
        return self.finalists[0]


def rank(request: PlanRequest, finalists: Sequence[Finalist]) -> Ranking:
    """Order finalists by the criteria of the request."""
    decision = decide(
        criteria(request.objective, request.has_rates),
        [finalist.scores for finalist in finalists],
        lambda index: finalists[index].trial.arrangement.simplicity,
    )
    return _ranking(finalists, decision)


def _ranking(finalists: Sequence[Finalist], decision: Decision) -> Ranking:
    """Return the finalists in the order of a decision, with its indices converted to this order."""
    new_index = {old: new for new, old in enumerate(decision.order)}
    losses = tuple(Loss(loss.by, new_index[loss.to]) for loss in decision.losses.values())
    return Ranking(tuple(finalists[index] for index in decision.order), len(decision.equal), losses)


def finals(
    request: PlanRequest,
    trials: Sequence[OptionTrial],
    progress: Callable[[str, int, int], None] | None = None,
    helpers: Helpers | None = None,
) -> Ranking:
    """Simulate and rank the first ``FINALISTS`` trials with different results; *trials*: the best first.

    progress: called with a label, the runs done and their number.
    """
    helpers = helpers or Helpers()
    on_progress = progress or (lambda label, done, of: None)
    finalists: list[Finalist] = []
    loads: list[PendingResult[float | None]] = []
    for entrant in _predict_finalists(request, trials[:ENTRANTS], helpers, on_progress):
        twin = next((number for number, finalist in enumerate(finalists) if _same_results(finalist, entrant)), None)
        if twin is not None:
            finalists[twin] = replace(finalists[twin], twins=(*finalists[twin].twins, entrant.trial))
            continue
        finalists.append(entrant)
        if request.has_rates:
            start = loads[0].result() if loads else None  # the first result is where the other searches begin
            loads.append(helpers.begin(_largest_load, entrant.trial, entrant.at_best, trials[0].factor, start, USUAL))
        if len(finalists) == FINALISTS:
            break
    finalists = [_with_simplest_first(finalist) for finalist in _add_largest_loads(finalists, loads, on_progress)]
    return rank(request, _with_more_sets(finalists, helpers) if request.has_rates else finalists)


def _predict_finalists(
    request: PlanRequest,
    entrants: Sequence[OptionTrial],
    helpers: Helpers,
    on_progress: Callable[[str, int, int], None],
) -> Iterator[Finalist]:
    """Yield each entrant, simulated at the asked load and at the largest load of the best entrant.

    The first ``FINALISTS`` runs begin at once, in parallel; further runs only when the caller asks for their results.
    """
    best_load = entrants[0].factor if request.has_rates else 0.0
    lengths = (LONG, *[USUAL] * (SETS - 1))

    def begin(trial: OptionTrial) -> PendingResult[tuple[tuple[RequestReport, ...], tuple[bool, float] | None]]:
        return helpers.begin(_simulate_finalist, request, trial.arrangement, best_load, lengths)

    begun = [begin(trial) for trial in entrants[:FINALISTS]]
    for number, trial in enumerate(entrants):
        # the first half of the progress; the searches of the largest loads are the second
        on_progress(trial.arrangement.label, min(number, FINALISTS - 1), 2 * FINALISTS)
        reports, at_best = (begun[number] if number < len(begun) else begin(trial)).result()
        yield Finalist(trial, reports, at_best=at_best)


def _add_largest_loads(
    finalists: list[Finalist], loads: list[PendingResult[float | None]], on_progress: Callable[[str, int, int], None]
) -> Iterator[Finalist]:
    """Yield the finalists with their largest loads; *loads* is empty if no stream has a rate."""
    for number, (finalist, load) in enumerate(zip_longest(finalists, loads)):
        on_progress(finalist.trial.arrangement.label, FINALISTS + number, 2 * FINALISTS)
        factor = load.result() if load else None  # None: no load found; that of the short runs stays
        yield replace(finalist, factors=(finalist.trial.factor if factor is None else factor,) if load else ())


def _with_more_sets(finalists: Sequence[Finalist], helpers: Helpers) -> list[Finalist]:
    """Return the finalists, those within ``NEAR`` of the best also with their largest loads for the other sets."""
    best = max(finalist.factor or 0.0 for finalist in finalists)
    begun = {
        index: [helpers.begin(_load_near, finalist.trial, finalist.factor, number, USUAL) for number in range(1, SETS)]
        for index, finalist in enumerate(finalists)
        if finalist.factor and finalist.factor >= NEAR * best
    }
    return [
        replace(finalist, factors=(*finalist.factors, *(load.result() for load in begun.get(index, ()))))
        for index, finalist in enumerate(finalists)
    ]


def _simulate_finalist(
    request: PlanRequest, arrangement: Arrangement, best_load: float, lengths: Sequence[RunLength]
) -> tuple[tuple[RequestReport, ...], tuple[bool, float] | None]:
    """Simulate an option at the asked load with each set of requests.

    lengths: the length of the run with each set. best_load: another load to simulate, as a multiple of the asked load;
    0: none. Return the reports, and for *best_load* whether deadlines are kept and the missed share (None without).
    """
    reports = tuple(
        simulated(request, arrangement, 1.0, length, seed=_seed(request, number))[1].report
        for number, length in enumerate(lengths)
    )
    return reports, kept_at(request, arrangement, best_load, lengths[-1], seed=_seed(request)) if best_load else None


def _seed(request: PlanRequest, number: int = 0) -> int:
    """Return the seed of set *number* of the requests."""
    return request.workload.seed + FRESH_SEED + number


def long_run(request: PlanRequest, arrangement: Arrangement, length: RunLength) -> tuple[Case, RequestRun]:
    """Simulate the run that a plan reports: the first set of requests at the asked load."""
    return simulated(request, arrangement, 1.0, length, seed=_seed(request), record=True)


def _same_results(first: Finalist, other: Finalist) -> bool:
    """Return whether two policies with the same lanes and batches gave the same results."""
    return (first.at_best, first.report.streams, _besides_policy(first)) == (
        other.at_best,
        other.report.streams,
        _besides_policy(other),
    )


def _with_simplest_first(finalist: Finalist) -> Finalist:
    """Return the finalist with the simplest of its options with equal results as its trial."""
    first, *twins = sorted((finalist.trial, *finalist.twins), key=lambda trial: trial.arrangement.simplicity)
    return replace(finalist, trial=first, twins=tuple(twins))


def _besides_policy(finalist: Finalist) -> tuple[int, int, int, dict[str, int]]:
    """Return the properties of an option other than its policy: lanes, threads, memory and batch limits."""
    arrangement = finalist.trial.arrangement
    settings = arrangement.settings
    return settings.lanes, settings.threads, finalist.trial.memory_bytes, dict(arrangement.batches)


def longest_wait(report: RequestReport) -> float:
    """Return the largest ratio, over the streams, of p99 to deadline; infinite if a stream has no answers."""
    return max(inf if stream.p99_s is None else stream.p99_s / stream.deadline_s for stream in report.streams)


def _largest_load(
    trial: OptionTrial, at_best: tuple[bool, float] | None, best_load: float, start: float | None, length: RunLength
) -> float | None:
    """Search the largest multiple of the asked load that an option sustains; None if it sustains none.

    best_load: the largest load of the best candidate. at_best: ``Finalist.at_best`` of this option, so that this load
    need not be simulated again. start: the largest load of the first finalist, where the search begins; None: unknown.
    """
    request, arrangement = trial.request, trial.arrangement
    if trial.highest < LOWEST or at_best is None:
        return None
    (kept_at_best, _), seed = at_best, _seed(request)

    def sustained(step: int) -> bool:
        if step == 0:
            return kept_at_best
        return kept_at(request, arrangement, best_load * FINE**step, length, seed=seed)[0]

    # Loads are steps of FINE from *best_load*; the bound rules out steps above *most*.
    most = floor(log(trial.bound.factor * SLACK / best_load) / log(FINE)) if trial.bound.factor < inf else WIDEST
    least = -WIDEST
    first_step = round(log(start / best_load) / log(FINE)) if start else 0
    step = largest_step(sustained, least, max(least, min(WIDEST, most)) + 1, first_step, stride=1 if start else 2)
    return float(best_load * FINE**step) if step > least else None


def _load_near(trial: OptionTrial, start: float, number: int, length: RunLength) -> float:
    """Search the largest multiple of the asked load that an option sustains with set *number* of the requests.

    start: its largest load with the first set, where the search begins. Return 0 if the option sustains no load.
    """
    seed = _seed(trial.request, number)

    def sustained(step: int) -> bool:
        return kept_at(trial.request, trial.arrangement, start * FINE**step, length, seed=seed)[0]

    step = largest_step(sustained, -WIDEST, WIDEST, start=0, stride=1)
    return start * FINE**step if step > -WIDEST else 0.0


def prediction(request: PlanRequest, report: RequestReport, memory_bytes: int, factor: float | None) -> Prediction:
    """Return a run at the asked load and the largest load in the form that a plan stores."""
    return Prediction(
        streams=stream_predictions(request.workload, report),
        load=round(report.load or 0.0, 4),
        sustainable_factor=None if factor is None else round(factor, 4),
        sustainable_per_s=None if factor is None else round(factor * request.per_s, 3),
        memory_bytes=memory_bytes,
    )

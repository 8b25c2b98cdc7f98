"""Selection of the best candidate. Candidates that cannot win by their bounds are skipped, the others simulated.

An objective is a list of criteria, the most important first. A challenger is compared with the best so far, criterion
by criterion. To compare loads, one simulation suffices: whether the challenger sustains one step more than the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Literal, Protocol

from weft.base.errors import InputError
from weft.planning.bounds import CHANCE
from weft.planning.candidates import Arrangement
from weft.planning.deciding import ERROR, criteria
from weft.planning.deciding import Criterion as CriterionName
from weft.planning.plan_request import PlanRequest
from weft.planning.trials import OptionTrial, trial_of

SIMPLE = 3
"""Limit of simpler candidates, little below the best, in the final comparison, as each costs a run there."""

Verdict = Literal[-1, 0, 1]
"""Result of comparing a challenger with the best so far: -1 better, 0 equal, 1 worse."""

Progress = Callable[[int, int], None]
"""Called with the number of options done and the number of all options."""


class Criterion(Protocol):
    """A quantity by which candidates are compared."""

    def why_worse(self, trial: OptionTrial, best: OptionTrial) -> str:
        """Return why the bounds of a challenger prove it worse; empty if it may be better or equal."""
        ...

    def compare(self, trial: OptionTrial, best: OptionTrial) -> Verdict:
        """Compare a challenger with the best, simulating it if necessary."""
        ...


@dataclass(frozen=True, slots=True)
class DeadlinesKept:
    """Prefer the option that keeps the deadlines at the asked load; if neither does, the option that misses fewer."""

    implied: bool = False
    """Whether the next criterion is the load. It then includes this one once the best option keeps its deadlines:
    carrying that option's load means keeping the deadlines."""

    def why_worse(self, trial: OptionTrial, best: OptionTrial) -> str:
        least = trial.bound.missed * CHANCE
        allowed = trial.request.limit if best.holds else best.missed * (1 + ERROR["missed"])
        return f"misses at least {least:.0%} of a stream's deadlines" if least > allowed else ""

    def compare(self, trial: OptionTrial, best: OptionTrial) -> Verdict:
        if self.implied and best.holds:
            return 0
        if best.holds or trial.holds:
            return _verdict(float(not trial.holds), float(not best.holds))
        return _verdict(trial.missed, best.missed)


class LoadCarried:
    """Prefer the option that keeps the deadlines at a larger multiple of the asked load."""

    def why_worse(self, trial: OptionTrial, best: OptionTrial) -> str:
        # An option little below the best counts as equal: the final comparison takes the simpler of the two.
        if trial.highest >= best.level() - _equal_steps(trial, best):
            return ""
        return f"cannot carry more than {trial.bound.factor:.2f} times the load"

    def compare(self, trial: OptionTrial, best: OptionTrial) -> Verdict:
        if trial.sustained(best.level() + 1):
            trial.level(start=best.level() + 1)  # from this load on: the search stores the level
            return -1
        # the same load is worth a simulation only if the challenger may then win by less memory
        return 0 if trial.memory_bytes < best.memory_bytes and trial.sustained(best.level()) else 1


class MemoryHeld:
    """Prefer the option that needs less memory."""

    def why_worse(self, trial: OptionTrial, best: OptionTrial) -> str:
        return "needs more memory" if self.compare(trial, best) > 0 else ""

    def compare(self, trial: OptionTrial, best: OptionTrial) -> Verdict:
        return _verdict(trial.memory_bytes, best.memory_bytes, ERROR["memory"])


class ShortestWait:
    """Prefer the option with the smaller ratio of p99 to deadline, in the stream in which this ratio is largest."""

    def why_worse(self, trial: OptionTrial, best: OptionTrial) -> str:
        if trial.bound.latency <= best.latency * (1 + ERROR["wait"]):
            return ""
        return f"takes {trial.bound.latency:.0%} of a deadline with nothing else running"

    def compare(self, trial: OptionTrial, best: OptionTrial) -> Verdict:
        return _verdict(trial.latency, best.latency, ERROR["wait"])


def _criteria(request: PlanRequest) -> list[Criterion]:
    """Return the criteria of the request's objective, in the order of ``deciding.ORDERS``."""
    names = criteria(request.objective, request.has_rates)
    by_name: Mapping[CriterionName, Criterion] = {
        "missed": DeadlinesKept(implied=names[:2] == ("missed", "load")),
        "load": LoadCarried(),
        "memory": MemoryHeld(),
        "wait": ShortestWait(),
    }
    return [by_name[name] for name in names]


@dataclass(frozen=True, slots=True, eq=False)
class LeftOut:
    """A candidate that was not simulated, and the reason."""

    arrangement: Arrangement
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """The result of the search."""

    best: OptionTrial
    others: tuple[OptionTrial, ...]
    """Simulated options that did not win: simpler options that carry little less, then the others by rank."""
    left_out: tuple[LeftOut, ...]


def choose(
    request: PlanRequest,
    options: Sequence[Arrangement],
    memory_of: Callable[[Arrangement], int],
    progress: Progress | None = None,
) -> Chosen:
    """Return the best option by the objective (of equal options the first); raises InputError if none fits memory.

    memory_of: returns the bytes that an option needs.
    """
    order = _criteria(request)
    best: OptionTrial | None = None
    beaten: list[OptionTrial] = []
    left_out: list[LeftOut] = []
    for done, arrangement in enumerate(options):
        if progress:
            progress(done, len(options))
        trial = trial_of(request, arrangement, memory_of(arrangement))
        if why := _too_large(request, trial) or (_rejection_text(order, trial, best) if best else ""):
            left_out.append(LeftOut(arrangement, why))
        elif best is None or _beats(order, trial, best):
            beaten += [best] if best else []
            best = trial
        else:
            beaten.append(trial)
    if best is None:
        least_bytes = min(map(memory_of, options), default=0)
        raise InputError(
            f"memory_bytes = {request.memory_bytes} is too little: the smallest option needs {least_bytes} bytes; "
            f"allow {ceil(least_bytes / 2**20)}m or more"
        )
    simpler = list(islice(_simpler(request, best, beaten), SIMPLE))
    nearest = sorted((trial for trial in beaten if trial not in simpler), key=lambda trial: _distance(request, trial))
    return Chosen(best, (*simpler, *nearest), tuple(left_out))


def _simpler(request: PlanRequest, best: OptionTrial, beaten: Sequence[OptionTrial]) -> Iterator[OptionTrial]:
    """Yield the options of *beaten* that are simpler than the best and carry little less, the simplest first.

    Finding each may take a simulation, so the caller should take no more than it needs.
    """
    if request.objective == "latency" or not request.has_rates:
        return  # loads are not compared
    for trial in sorted(beaten, key=lambda trial: trial.arrangement.simplicity):
        if trial.arrangement.simplicity > best.arrangement.simplicity:
            return
        fits = request.objective != "memory" or MemoryHeld().compare(trial, best) <= 0
        if fits and trial.sustained(best.level() - _equal_steps(trial, best)):
            yield trial


def _equal_steps(trial: OptionTrial, best: OptionTrial) -> int:
    """Return by how many load steps two options may differ and count as equal: two are ``DIVISION_ERROR``."""
    return 1 if trial.arrangement.division == best.arrangement.division else 2


def _rejection_text(order: Sequence[Criterion], trial: OptionTrial, best: OptionTrial) -> str:
    """Return why the bounds prove that the challenger *trial* cannot win; empty if they do not prove it.

    The first criterion may decide; a later criterion only if no option can beat the best by any earlier criterion.
    """
    for criterion in order:
        if why := criterion.why_worse(trial, best):
            return why
        # by this criterion, no option is better than a best option that keeps its deadlines, only equal
        if not (isinstance(criterion, DeadlinesKept) and best.holds):
            return ""
    return ""


def _beats(order: Sequence[Criterion], trial: OptionTrial, best: OptionTrial) -> bool:
    """Return whether the challenger *trial* is better by the first criterion that tells it from the best."""
    for criterion in order:
        verdict = criterion.compare(trial, best)
        if verdict:
            return verdict < 0
    return False


def _too_large(request: PlanRequest, trial: OptionTrial) -> str:
    """Return why an option does not fit the memory limit; empty if it fits."""
    if request.memory_bytes is None or trial.memory_bytes <= request.memory_bytes:
        return ""
    return f"needs {trial.memory_bytes / 2**20:.0f} MiB of memory"


def _distance(request: PlanRequest, trial: OptionTrial) -> tuple[float, ...]:
    """Sort key of options that lost, the best first, by results that need no further simulation."""
    if request.objective == "latency" or not request.has_rates:
        return (trial.seen_latency,)
    return (float(trial.memory_bytes), *trial.nearness) if request.objective == "memory" else trial.nearness


def _verdict(challenger: float, best: float, tolerance: float = 0.0) -> Verdict:
    """Compare two values, the smaller the better; differences up to the relative *tolerance* are equal."""
    if abs(challenger - best) <= tolerance * max(abs(challenger), abs(best)):
        return 0
    return -1 if challenger < best else 1

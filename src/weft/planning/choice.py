"""The best of all ways to serve: those that cannot win are left out, the others are simulated and ranked.

An objective is a list of criteria, the most important first. A challenger is compared with the best so far criterion by
criterion; what its bounds rule out is not simulated at all, and of its load only that is looked for which decides:
whether it carries one step more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Literal, Protocol

from weft.base.errors import InputError
from weft.planning.bounds import CHANCE
from weft.planning.candidates import Arrangement
from weft.planning.deciding import ERROR
from weft.planning.plan_request import PlanRequest
from weft.planning.trials import OptionTrial, trial_of

SIMPLE = 3
"""How many simpler options than the best are looked for among those that come within a step of it."""

Verdict = Literal[-1, 0, 1]
"""A challenger compared with the best so far: better, alike or worse."""

Progress = Callable[[int, int], None]


class Criterion(Protocol):
    """One thing that options are compared by."""

    def hopeless(self, trial: OptionTrial, best: OptionTrial) -> str:
        """Why a challenger is worse, as its bounds prove; empty where it may be better or alike."""
        ...

    def compare(self, trial: OptionTrial, best: OptionTrial) -> Verdict:
        """How a challenger compares, simulated if need be."""
        ...


@dataclass(frozen=True, slots=True)
class DeadlinesKept:
    """Who keeps the deadlines at the asked load is better; of those who do not, who misses fewer."""

    implied: bool = False
    """Whether the criterion after it asks for more: who carries as much as the best keeps the deadlines as well."""

    def hopeless(self, trial: OptionTrial, best: OptionTrial) -> str:
        least = trial.bound.missed * CHANCE
        allowed = trial.asked.limit if best.holds else best.missed * (1 + ERROR["missed"])
        return f"misses at least {least:.0%} of a stream's deadlines" if least > allowed else ""

    def compare(self, trial: OptionTrial, best: OptionTrial) -> Verdict:
        if self.implied and best.holds:
            return 0
        if best.holds or trial.holds:
            return _verdict(float(not trial.holds), float(not best.holds))
        return _verdict(trial.missed, best.missed)


class LoadCarried:
    """Who keeps the deadlines at a larger multiple of the asked load is better."""

    def hopeless(self, trial: OptionTrial, best: OptionTrial) -> str:
        # A step below the best is equal to it: the simpler of the two is taken in the end.
        if trial.highest >= best.level() - 1:
            return ""
        return f"cannot carry more than {trial.bound.factor:.2f} times the load"

    def compare(self, trial: OptionTrial, best: OptionTrial) -> Verdict:
        if trial.sustained(best.level() + 1):
            trial.level(start=best.level() + 1)
            return -1
        return 0 if trial.memory_bytes < best.memory_bytes and trial.sustained(best.level()) else 1


class MemoryHeld:
    """Who needs less memory is better."""

    def hopeless(self, trial: OptionTrial, best: OptionTrial) -> str:
        return "needs more memory" if self.compare(trial, best) > 0 else ""

    def compare(self, trial: OptionTrial, best: OptionTrial) -> Verdict:
        return _verdict(trial.memory_bytes, best.memory_bytes, ERROR["memory"])


class ShortestWait:
    """Whose p99 is smaller for its deadline, in the stream where it is largest, is better."""

    def hopeless(self, trial: OptionTrial, best: OptionTrial) -> str:
        if trial.bound.latency <= best.latency * (1 + ERROR["wait"]):
            return ""
        return f"takes {trial.bound.latency:.0%} of a deadline with nothing else running"

    def compare(self, trial: OptionTrial, best: OptionTrial) -> Verdict:
        return _verdict(trial.latency, best.latency, ERROR["wait"])


ORDERS: dict[str, tuple[Criterion, ...]] = {
    "deadlines": (DeadlinesKept(implied=True), LoadCarried(), MemoryHeld()),
    "load": (LoadCarried(), MemoryHeld()),
    "memory": (DeadlinesKept(), MemoryHeld(), LoadCarried()),
    "latency": (DeadlinesKept(), ShortestWait(), MemoryHeld()),
}
"""Objective -> criteria, the most important first."""


@dataclass(frozen=True, slots=True, eq=False)
class LeftOut:
    """A way to serve that was not simulated, and why it need not be."""

    arrangement: Arrangement
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """What came out of the search."""

    best: OptionTrial
    others: tuple[OptionTrial, ...]
    """Those that were simulated and did not win: simpler ones that come within a step, then the nearest first."""
    left_out: tuple[LeftOut, ...]


def choose(
    asked: PlanRequest,
    options: Sequence[Arrangement],
    memory_of: Callable[[Arrangement], int],
    progress: Progress | None = None,
) -> Chosen:
    """The best option by what is asked for; ties go to the one that comes first."""
    order = ORDERS[asked.objective] if asked.has_rates else _without_load(asked.objective)
    best: OptionTrial | None = None
    beaten: list[OptionTrial] = []
    left_out: list[LeftOut] = []
    for done, arrangement in enumerate(options):
        if progress:
            progress(done, len(options))
        trial = trial_of(asked, arrangement, memory_of(arrangement))
        if why := _too_large(asked, trial) or (_ruled_out(order, trial, best) if best else ""):
            left_out.append(LeftOut(arrangement, why))
        elif best is None or _beats(order, trial, best):
            beaten += [best] if best else []
            best = trial
        else:
            beaten.append(trial)
    if best is None:
        raise InputError(_no_room(asked, min(map(memory_of, options), default=0)))
    simpler = list(islice(_simpler(asked, best, beaten), SIMPLE))
    nearest = sorted((trial for trial in beaten if trial not in simpler), key=lambda trial: _distance(asked, trial))
    return Chosen(best, (*simpler, *nearest), tuple(left_out))


def _simpler(asked: PlanRequest, best: OptionTrial, beaten: Sequence[OptionTrial]) -> Iterator[OptionTrial]:
    """Options that are simpler than the best and come within a step of it, the simplest first; each takes a run."""
    if asked.objective == "latency" or not asked.has_rates:
        return
    for trial in sorted(beaten, key=lambda trial: trial.arrangement.simplicity):
        if trial.arrangement.simplicity > best.arrangement.simplicity:
            return
        fits = asked.objective != "memory" or MemoryHeld().compare(trial, best) <= 0
        if fits and trial.sustained(best.level() - 1):
            yield trial


def _without_load(objective: str) -> Sequence[Criterion]:
    """The criteria where no stream has a rate that could be turned up: how long requests wait decides instead."""
    wanted = ORDERS["latency" if objective in ("deadlines", "load") else objective]
    return [each for each in wanted if not isinstance(each, LoadCarried)]


def _ruled_out(order: Sequence[Criterion], trial: OptionTrial, best: OptionTrial) -> str:
    """Why bounds say that a challenger cannot win; empty where they do not.

    Only the first criterion decides by bounds alone; a later one does where the best cannot be beaten in those before.
    """
    for criterion in order:
        if why := criterion.hopeless(trial, best):
            return why
        if not _unbeatable(criterion, best):
            return ""
    return ""


def _unbeatable(criterion: Criterion, best: OptionTrial) -> bool:
    """Whether nobody can be better than the best in this, only alike."""
    return isinstance(criterion, DeadlinesKept) and best.holds


def _beats(order: Sequence[Criterion], trial: OptionTrial, best: OptionTrial) -> bool:
    for criterion in order:
        verdict = criterion.compare(trial, best)
        if verdict:
            return verdict < 0
    return False


def _too_large(asked: PlanRequest, trial: OptionTrial) -> str:
    if asked.memory_bytes is None or trial.memory_bytes <= asked.memory_bytes:
        return ""
    return f"needs {trial.memory_bytes / 2**20:.0f} MiB of memory"


def _no_room(asked: PlanRequest, least_bytes: int) -> str:
    return (
        f"memory_bytes = {asked.memory_bytes} is too little: the smallest option needs {least_bytes} bytes; "
        f"allow {ceil(least_bytes / 2**20)}m or more"
    )


def _distance(asked: PlanRequest, trial: OptionTrial) -> tuple[float, ...]:
    """Orders those who lost by how near they came to winning, by what is known without another run."""
    if asked.objective == "latency" or not asked.has_rates:
        return (trial.seen_latency,)
    return (float(trial.memory_bytes), *trial.nearness) if asked.objective == "memory" else trial.nearness


def _verdict(mine: float, other: float, alike: float = 0.0) -> Verdict:
    if abs(mine - other) <= alike * max(abs(mine), abs(other)):
        return 0
    return -1 if mine < other else 1

"""Checks the reasons that a plan states: each sentence against the numbers in ``plan.json``."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import mean
from typing import NamedTuple

from weft.devices import Host
from weft.planning.deciding import ERROR
from weft.planning.plan import Plan, PlanOption, Prediction
from weft.planning.reasons import AMPLE, TIGHT
from weft.planning.segment_length import NO_BETTER

SIMULATED = ("does the same as ", "came after the finalists", "missed ", NO_BETTER)
"""How the reasons begin for which options are not told that were simulated; the others were left out by bounds."""
MEASURED_IN_PART = "; not measured further"
"""How the reason ends for which a division of the cores is left out before options are made of it."""
ONE_MISS = 1 / 300
"""One late request of the rarest stream in the run that is told says nothing (``planning.trials.keeps``)."""


NEAR_SHARE = 0.02
"""How far the share of a model may be from that of mean times: the planner takes the usual time of a run instead."""


class ReasonsChecked(NamedTuple):
    """What became of the sentences of a plan."""

    true: int
    false: list[str]
    unknown: list[str]
    """Sentences that state nothing which the plan has a number for."""


class _Case(NamedTuple):
    plan: Plan
    host: Host
    limit: float

    def option(self, label: str) -> PlanOption | None:
        return next((option for option in self.plan.options if option.label == label), None)

    def predicted(self, label: str) -> Prediction | None:
        """Of an option; *label* is "it" for the one that won."""
        option = self.plan.options[0] if label == "it" else self.option(label)
        return option.predicted if option else None


def check_reasons(plan: Plan, host: Host, limit: float = 0.01) -> ReasonsChecked:
    """Check all sentences; *limit*: the share of deadlines that any stream might miss."""
    case, true, false, unknown = _Case(plan, host, limit), 0, list[str](), list[str]()
    for sentence in (*plan.reasons.won, *plan.reasons.limits, *plan.reasons.next):
        verdict = _verdict(case, sentence)
        if verdict is None:
            unknown.append(sentence)
        elif verdict:
            true += 1
        else:
            false.append(sentence)
    return ReasonsChecked(true, false, unknown)


def _verdict(case: _Case, sentence: str) -> bool | None:
    for pattern, check in CHECKS:
        if match := re.fullmatch(pattern, sentence):
            return check(case, *match.groups())
    return None


def _keeps(case: _Case, predicted: Prediction) -> bool:
    return predicted.worst_missed <= max(case.limit, ONE_MISS)


def _missed(predicted: Prediction) -> str:
    worst = max(predicted.streams, key=lambda stream: stream.missed)
    return f"{worst.missed:.1%} of {worst.model}'s"


def _won(case: _Case, label: str, kept: str, carries: str | None, factor: str | None, per_s: str | None) -> bool:
    plan, predicted = case.plan, case.plan.predicted
    if label != plan.options[0].label or plan.options[0].predicted != predicted:
        return False
    others = [option.predicted for option in plan.options[1:] if option.predicted]
    if kept.startswith("keeps"):
        said = _keeps(case, predicted)
    else:
        fewest = "no option that was compared fewer" not in kept or all(
            predicted.worst_missed <= other.worst_missed for other in others
        )
        said = not _keeps(case, predicted) and _missed(predicted) in kept and fewest
    if carries is None:
        return said and not predicted.sustainable_factor
    return said and (factor, per_s) == (f"{predicted.sustainable_factor:.2f}", f"{predicted.sustainable_per_s:.0f}")


def _carries_less(case: _Case, label: str, than: str, factor: str) -> bool:
    loser, better = case.predicted(label), case.predicted(than)
    if not loser or not better:
        return False
    less = (loser.sustainable_factor or 0.0) * (1 + ERROR["load"]) < (better.sustainable_factor or 0.0)
    return less and factor == f"{loser.sustainable_factor or 0.0:.2f}"


def _misses(case: _Case, label: str, than: str) -> bool:
    loser, better = case.predicted(label), case.predicted(than)
    return bool(loser and better and not _keeps(case, loser) and _keeps(case, better))


def _misses_more(case: _Case, label: str, than: str, missed: str) -> bool:
    loser, better = case.predicted(label), case.predicted(than)
    return bool(loser and better and loser.worst_missed > better.worst_missed and missed == _missed(loser))


def _holds_more(case: _Case, label: str, mib: str, than: str) -> bool:
    loser, better = case.predicted(label), case.predicted(than)
    return bool(loser and better and mib == f"{(loser.memory_bytes - better.memory_bytes) / 2**20:.0f}")


def _waits(case: _Case, label: str, than: str, times: str) -> bool:
    loser, better = case.predicted(label), case.predicted(than)
    if not loser or not better:
        return False
    said = " / ".join("-" if stream.p99_ms is None else f"{stream.p99_ms:.1f}" for stream in loser.streams)
    return said == times and _longest(loser) > _longest(better)


def _longest(predicted: Prediction) -> float:
    return max((stream.p99_ms or float("inf")) / (stream.deadline_ms or 1.0) for stream in predicted.streams)


def _equal(case: _Case, labels: str, count: str) -> bool:
    """All are there, as many as said, and none has fewer lanes than the winner."""
    options = [case.option(label) for label in labels.split("; ")]
    lanes = case.plan.options[0].settings.lanes
    return len(options) + 1 == int(count) and all(option and option.settings.lanes >= lanes for option in options)


def _same(case: _Case, label: str, twins: str) -> bool:
    """Every option that is said to do the same as another is left out for that, and no other is."""
    why = f"does the same as {label}"
    return twins == ", ".join(option.label for option in case.plan.options if option.left_out == why)


def _counted(case: _Case, options: str, simulated: str, unsimulated: str) -> bool:
    judged = [option for option in case.plan.options if not option.left_out.endswith(MEASURED_IN_PART)]
    bounded = [option for option in judged if option.left_out and not option.left_out.startswith(SIMULATED)]
    whole = len(judged)
    return (int(options), int(simulated), int(unsimulated)) == (whole, whole - len(bounded), len(bounded))


def _in_part(case: _Case, label: str, why: str) -> bool:
    option = case.option(label)
    return bool(option and option.left_out == why and why.endswith(MEASURED_IN_PART))


def _all_simulated(case: _Case, options: str) -> bool:
    return _counted(case, options, options, "0")


def _lane_time(case: _Case, lanes: str, busy: str, rest: str) -> bool:
    """The load, and the dearest model where nothing is computed together, which the measured times tell alone."""
    predicted, settings = case.plan.predicted, case.plan.settings
    said = {"one lane computes": 1}.get(lanes) or int(re.sub(r"\D", "", lanes) or 0)
    load = min(1.0, predicted.load * (predicted.sustainable_factor or 1.0))
    right = said == settings.lanes and busy == f"{load:.0%}"
    together = any(choice.max_batch > 1 for choice in case.plan.options[0].models.values())
    leaves = any(stream.exit_rates for stream in predicted.streams)
    if together or leaves:
        return right
    needs: dict[str, float] = {}
    hand_over_s = mean(case.host.hand_over_s or (0.0,))
    for stream in predicted.streams:
        model = case.host.model(stream.model)
        took_s = model.total_s(1) + len(model.segments) * hand_over_s
        needs[stream.model] = needs.get(stream.model, 0.0) + (stream.rate or 0.0) * took_s
    name = max(needs, key=lambda model: needs[model])
    if len(needs) == 1:
        return right and rest == f"all of it for {name}"
    share = re.fullmatch(r"(\d+)% of it for (.+)", rest)
    near = share is not None and abs(int(share[1]) / 100 - needs[name] / sum(needs.values())) <= NEAR_SHARE
    return right and near and share is not None and share[2] == name


def _slow_spells(case: _Case, name: str, tail: str, busy: str) -> bool:
    predicted = case.plan.predicted
    load = min(1.0, predicted.load * (predicted.sustainable_factor or 1.0))
    return tail == f"{case.host.model(name).tail:.1f}" and busy == f"{load:.0%}"


def _close(case: _Case, model: str, alone_ms: str, deadline_ms: str) -> bool:
    deadlines = [f"{stream.deadline_ms:g}" for stream in case.plan.predicted.streams if stream.model == model]
    return deadline_ms in deadlines and float(alone_ms) >= TIGHT * float(deadline_ms) - 0.05


def _all_cores(case: _Case, cores: str) -> bool:
    plan = case.plan
    used = plan.settings.lanes * plan.settings.threads
    return used == int(cores) == plan.budget.cores and (plan.predicted.sustainable_factor or 0.0) < AMPLE


def _more_cores(case: _Case, there: str, allowed: str) -> bool:
    plan = case.plan
    return (int(there), int(allowed)) == (plan.machine.cores, plan.budget.cores) and int(allowed) < int(there)


NEXT = "The next best, (.+), "
CHECKS: tuple[tuple[str, Callable[..., bool]], ...] = (
    (r"(.+?): ((?:keeps|misses) .*?)(, and carries up to ([\d.]+) times that, (\d+) requests/s)?\.", _won),
    (NEXT + r"carries less than (.+): ([\d.]+) times the load\.", _carries_less),
    (NEXT + r"does not keep the deadlines at the asked load, as (.+) does\.", _misses),
    (NEXT + r"misses more deadlines at the asked load than (.+): (.+)\.", _misses_more),
    (NEXT + r"needs (\d+) MiB more memory than (.+)\.", _holds_more),
    (NEXT + r"takes longer for its deadlines than (.+): a p99 of (.+) ms\.", _waits),
    (
        r"(.+): equal to it within the error of the (?:simulated runs|measurements)\. "
        r"It is the simplest of these (\d+) .*",
        _equal,
    ),
    (r"The same as (.+?): (.+)\.", _same),
    (r"Of (\d+) options (\d+) were simulated; (\d+) were not, as bounds show that they cannot win\.", _counted),
    (r"All (\d+) options were simulated\.", _all_simulated),
    (r"(.+?) was left out: (.+)\.", _in_part),
    (r"Lane time: at the largest load (.+? computes?) (\d+%) of the time, (.+); the rest .*", _lane_time),
    (r"Slow spells: one run in a hundred of (.+) takes ([\d.]+) times .* only (\d+%) of the time; .*", _slow_spells),
    (r"A deadline close to the time alone: (.+) takes ([\d.]+) ms of its ([\d.]+) ms .*", _close),
    (r"A machine with more cores: all (\d+) of this one are in use\.", _all_cores),
    (r"More cores: this machine has (\d+), and (\d+) may be used .*", _more_cores),
)
"""What sentences look like, and what must be so where they stand."""

"""The search for the smallest formats that keep a network accurate: two passes of two phases each (Algorithm 1).

The first pass uses few samples: one format for all (phase 1, ``coarse``), then object by object (phase 2, ``fine``).
The second uses all samples: a setting that is no longer accurate enough is repaired (phase 3, ``recover``), then tuned
again (phase 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from weft.base.errors import TuneError, unknown_name
from weft_tune.evaluation import Database, Evaluator, Subset, open_database
from weft_tune.judge import HighestScore, Judge, MostGainPerLoss, OnFailure, Point
from weft_tune.network import Network
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import Kind
from weft_tune.objective import DEFAULT, Extras, Measure, objective_from
from weft_tune.platform import Platform, Unbiased, as_wide, load_platform
from weft_tune.result import OnSearchProgress, Step, Tuning
from weft_tune.search_space import (
    Layerwise,
    Move,
    TuningSetting,
    bias_moves,
    narrowing_moves,
    shift_biases,
    space_of,
    type_moves,
    widest,
    width_moves,
)

ROUNDING = 1e-12
"""Tolerance of the threshold, relative: a score that equals it but for the last digits passes."""
MOST_STEPS = 64
"""Limit of the steps of a recovery. After that the uniform settings of phase 1 are tried, the narrowest first."""

LADDER: tuple[Unbiased, ...] = (
    Unbiased("FLOAT", 32),
    Unbiased("FLOAT", 16),
    Unbiased("FIXED", 16),
    Unbiased("FIXED", 8),
    Unbiased("FIXED", 4),
    Unbiased("FIXED", 2),
)
"""Uniform settings of phase 1, in the order in which they are tried."""

BiasRule = Literal["chapter", "keep", "repair"]
"""How step (a) raises biases, which makes ranges smaller. The chapter raises them until none can be raised, and so
spends on ranges what widths could use. ``keep`` takes no step that lowers the score. ``repair`` does the same and adds
steps that the chapter does not have: a width that fails is tried with other biases, and bits move between groups."""
BIAS_RULES: tuple[BiasRule, ...] = get_args(BiasRule)
MOST_EXCHANGES = 100
"""Limit of the exchanges tried in one round; the largest gains come first."""

Search = Callable[[Judge, Point | None, BiasRule], Point | None]


def find_formats(
    network: Network,
    evaluator: Evaluator,
    *,
    platform: Platform | str = "fpga",
    margin: float = 0.01,
    objective: str | Measure = DEFAULT,
    extras: Extras | None = None,
    layerwise: Layerwise = "WGT-ONLY",
    bias: BiasRule = "repair",
    faithful: bool = False,
    two_passes: bool = True,
    base: Configuration | None = None,
    database: Path | Database | None = None,
    on_failure: OnFailure = "stop",
    progress: OnSearchProgress | None = None,
) -> Tuning:
    """Search for the smallest objective whose score on all samples is within the margin.

    *margin* is relative to the score of *base*, FLOAT 32 everywhere if not given. *two_passes=False* uses all samples
    from the start. With a *database* an interrupted search goes on where it was, when called again.
    """
    _check(margin, bias, on_failure)
    machine = load_platform(platform) if isinstance(platform, str) else platform
    space = space_of(network, machine, layerwise)
    measure = partial(objective_from(objective, extras), network)
    start = Configuration({}) if base is None else base
    passes: dict[Subset, Search] = {"small": _first_pass, "full": _second_pass} if two_passes else {"full": _first_pass}
    with open_database(database) as scores:
        judge = Judge(space, evaluator, measure, scores, faithful=faithful, on_failure=on_failure, on_progress=progress)
        bases: dict[Subset, float] = {}
        thresholds: dict[Subset, float] = {}
        best: Point | None = None
        for subset, search in passes.items():
            bases[subset] = judge.base(subset, start)
            thresholds[subset] = judge.threshold = threshold_of(bases[subset], margin)
            best = search(judge, best, bias)
            if best is None:
                raise TuneError(
                    f"no formats of platform {machine.name!r} were found that keep a score of {judge.threshold:.6g} "
                    f"(the base has {bases[subset]:.6g}, the margin is {margin:g}); raise the margin or allow wider "
                    "formats"
                )
    assert best is not None
    return Tuning(
        network, machine.name, margin, layerwise, best.configuration, best.score, best.objective, start,
        measure(start), bases, thresholds, tuple(judge.trials), tuple(judge.path), dict(judge.samples), judge.reused,
    )  # fmt: skip


def threshold_of(base: float, margin: float) -> float:
    """The least score allowed: *margin* of the base below it."""
    if not math.isfinite(base):
        raise TuneError(f"the base scores {base}; a search needs a finite score to compare with")
    return base - (margin + ROUNDING) * abs(base)


def _first_pass(judge: Judge, best: Point | None, bias: BiasRule) -> Point | None:
    judge.phase = 1
    point = coarse(judge) or _climb_from_widest(judge)
    judge.phase = 2
    return point and fine(judge, point, bias)


def _second_pass(judge: Judge, best: Point | None, bias: BiasRule) -> Point | None:
    assert best is not None
    judge.phase = 3
    point = recover(judge, best.setting)
    judge.phase = 4
    return point and fine(judge, point, bias)


def _check(margin: float, bias: BiasRule, on_failure: OnFailure) -> None:
    if not (math.isfinite(margin) and 0 <= margin < 1):
        raise TuneError(f"margin = {margin} must be a share of the score, from 0 to below 1; 0.01 is one per cent")
    if bias not in BIAS_RULES:
        raise TuneError(unknown_name("bias rule", bias, BIAS_RULES))
    if on_failure not in ("stop", "skip"):
        raise TuneError(f"on_failure = {on_failure!r} must be stop or skip")


# Phase 1


def coarse(judge: Judge) -> Point | None:
    """Find the narrowest uniform setting that passes; None if the widest does not.

    One type and width for all, halved while the score holds, then a bisection, then powers of two.
    """
    best: Point | None = None
    passed = LADDER[0]
    for rung in LADDER:
        point = judge.feasible(_uniform(judge, rung.kind, rung.bits), "coarse")
        if point is None:
            best = best and _bisect(judge, best, passed.bits, rung)
            break
        best, passed = point, rung
        judge.keep(point, "coarse")
    return best and _narrow_powers(judge, best)


def uniform_settings(judge: Judge) -> list[TuningSetting]:
    """The settings of the ladder, the narrowest first."""
    return list(dict.fromkeys(_uniform(judge, rung.kind, rung.bits) for rung in reversed(LADDER)))


def _uniform(judge: Judge, kind: Kind, bits: int) -> TuningSetting:
    return judge.space.uniform(lambda group: as_wide(group.choices, kind, bits))


def _bisect(judge: Judge, best: Point, passes: int, failed: Unbiased) -> Point:
    fails = failed.bits
    while passes - fails > 1:
        middle = (passes + fails) // 2
        point = judge.feasible(_uniform(judge, failed.kind, middle), "coarse")
        if point is None:
            fails = middle
            continue
        passes = middle
        if point.setting != best.setting:  # a platform with few widths gives one setting for several
            best = point
            judge.keep(point, "coarse")
    return best


def _narrow_powers(judge: Judge, best: Point) -> Point:
    """Try EXP, narrower by a bit than the format that passed, as long as that passes too."""
    while True:
        types = tuple(
            widest(group.choices, "EXP", now.bits - 1) or now
            for group, now in zip(judge.space.groups, best.setting.types, strict=True)
        )
        if types == best.setting.types:
            return best
        point = judge.feasible(best.setting._replace(types=types), "coarse")
        if point is None:
            return best
        best = point
        judge.keep(point, "coarse")


# Phase 3


def recover(judge: Judge, setting: TuningSetting) -> Point | None:
    """The setting if it passes, else the first that does on the way up; None if nothing does."""
    passing = judge.feasible(setting, "recovery")
    for _ in range(MOST_STEPS):
        if passing:
            break
        moves = width_moves(judge.space, setting, narrower=False) + bias_moves(judge.space, setting, -1)
        best = judge.pick(moves, HighestScore(-math.inf), "recovery")
        if best is None:
            break
        setting = best.setting
        passing = best if best.score >= judge.threshold else None
    fallbacks = (judge.feasible(uniform, "recovery") for uniform in uniform_settings(judge))
    passing = passing or next(filter(None, fallbacks), None)
    if passing:
        judge.keep(passing, "recovery")
    return passing


def _climb_from_widest(judge: Judge) -> Point | None:
    """The widest uniform setting, its biases moved until it passes; None if that is not enough."""
    best = climb(judge, uniform_settings(judge)[-1], steps=("recovery", "recovery"))
    if best:
        judge.keep(best, "recovery")
    return best


# Phases 2 and 4


def fine(judge: Judge, point: Point, bias: BiasRule) -> Point:
    """Biases up, widths down, then another type, until no single step improves a feasible point (Algorithm 2).

    As printed, a change of type that is feasible but gains nothing is accepted, so that I2 and E2 can follow each other
    for ever. Here a change counts only if the objective is smaller once bias and width have been tuned again.
    """
    point = _narrow(judge, raise_biases(judge, point, bias))
    while better := _improve(judge, point, bias):
        point = better
    return point


def raise_biases(judge: Judge, point: Point, rule: BiasRule) -> Point:
    """Step (a): the most accurate raise, again and again, above the threshold, or with no loss of score at all."""
    while True:
        floor = judge.threshold if rule == "chapter" else max(judge.threshold, point.score)
        best = judge.pick(bias_moves(judge.space, point.setting, 1), HighestScore(floor), "bias", point.score)
        if best is None:
            return point
        point = best
        judge.keep(point, "bias")


def _improve(judge: Judge, point: Point, bias: BiasRule) -> Point | None:
    """A point with a smaller objective, tuned again; None where no step leads to one."""
    if bias != "repair":
        return _change_types(judge, point, bias)
    better = repair(judge, point) or _change_types(judge, point, bias) or exchange(judge, point)
    return better and _narrow(judge, raise_biases(judge, better, bias))


def _narrow(judge: Judge, point: Point) -> Point:
    """Take one bit away where it gains most for what it costs, as long as any such step passes."""
    while True:
        moves = [
            move
            for move in width_moves(judge.space, point.setting, narrower=True)
            if judge.point(move.setting).objective <= point.objective
        ]
        rule = MostGainPerLoss(judge.threshold, point.objective, point.score)
        best = judge.pick(moves, rule, "width", point.score)
        if best is None:
            return point
        point = best
        judge.keep(point, "width")


def _change_types(judge: Judge, point: Point, bias: BiasRule) -> Point | None:
    """Take the first change of type, in the order of their ratios, that makes the objective smaller in the end."""
    moves = type_moves(judge.space, point.setting)
    rule = MostGainPerLoss(judge.threshold, point.objective, point.score)
    for changed in judge.accepted(moves, rule, "type"):
        mark = len(judge.path)
        judge.keep(changed, "type")
        tuned = _narrow(judge, raise_biases(judge, changed, bias))
        if tuned.objective < point.objective:
            return tuned
        del judge.path[mark:]  # the way did not lead to a gain
    return None


def exchange(judge: Judge, point: Point) -> Point | None:
    """Move bits between groups: the exchange that gains most among those that pass."""
    gains = [
        (point.objective - judge.point(setting).objective, setting) for setting in _exchanges(judge, point.setting)
    ]
    gaining = [(gain, setting) for gain, setting in gains if gain > 0]
    for _, setting in sorted(gaining, key=lambda pair: -pair[0])[:MOST_EXCHANGES]:
        if passing := judge.feasible(setting, "width"):
            judge.keep(passing, "width")
            return passing
    return None


def _exchanges(judge: Judge, setting: TuningSetting) -> Iterator[TuningSetting]:
    """One or two bits more in a group, fewer in another one, there with the same bias or one more."""
    space = judge.space
    for once in width_moves(space, setting, narrower=False):
        twice = (move for move in width_moves(space, once.setting, narrower=False) if move.name == once.name)
        for wider in (once, *twice):
            for group, move in narrowing_moves(space, wider.setting):
                if setting.types[group] == wider.setting.types[group]:
                    yield move.setting
                    yield shift_biases(space, move.setting, group, 1)


def repair(judge: Judge, point: Point) -> Point | None:
    """Take the narrower format that gains most among those that pass after their own biases have been moved."""
    moves = narrowing_moves(judge.space, point.setting)
    gains = [(point.objective - judge.point(move.setting).objective, group, move) for group, move in moves]
    # phase 4 scores all samples: there only direct neighbours are tried
    passing = _try_neighbours if judge.phase == 4 else climb
    for gain, group, move in sorted(gains, key=lambda entry: -entry[0]):
        if gain <= 0:
            break
        if passed := passing(judge, move.setting, group):
            judge.keep(passed, "width")
            return passed
    return None


def climb(
    judge: Judge, setting: TuningSetting, group: int | None = None, steps: tuple[Step, Step] = ("width", "bias")
) -> Point | None:
    """Move biases, of a group or all, as long as the score rises, until it passes; None if that is not enough.

    steps: the names under which the setting itself and its neighbours are scored.
    """
    best = judge.scored(setting, steps[0])
    while best and best.score < judge.threshold:
        rule = HighestScore(math.nextafter(best.score, math.inf))
        best = judge.pick(_neighbours(judge, best.setting, group), rule, steps[1], best.score)
    return best


def _try_neighbours(judge: Judge, setting: TuningSetting, group: int) -> Point | None:
    """The setting, or the first one with another bias in the group, that passes."""
    settings = (setting, *(move.setting for move in _neighbours(judge, setting, group)))
    return next((passed for option in settings if (passed := judge.feasible(option, "width"))), None)


def _neighbours(judge: Judge, setting: TuningSetting, group: int | None) -> list[Move]:
    return bias_moves(judge.space, setting, 1, group) + bias_moves(judge.space, setting, -1, group)

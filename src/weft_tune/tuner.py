"""The search for the smallest formats that keep a network accurate: two passes of two phases each (Algorithm 1).

The first pass uses few samples: one format for all (phase 1, ``coarse``), then object by object (phase 2, ``fine``).
The second uses all samples: a setting that is no longer accurate enough is repaired (phase 3, ``recover``), then tuned
again (phase 4). "The chapter" is the text that describes the method; "as printed" refers to its algorithms.

An *object* is the weights or the inputs of a layer; a *setting* has a type and width for each group of objects and a
bias for each object; a *point* is a setting with its objective and score, *feasible* if the score reaches the
threshold. The ``Judge`` scores settings, and keeps the points from which the search continues.
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
"""Relative tolerance of the threshold: a score that misses it by a rounding error passes."""
MOST_STEPS = 64
"""Cap on the steps of a recovery; after that the uniform settings of phase 1 are tried, the narrowest first."""

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
"""Rule for raising biases in step (a), which makes ranges of formats smaller. ``chapter`` raises them while the score
reaches the threshold, and so gives up accuracy that narrower widths could use. ``keep`` takes no step that lowers the
score. ``repair`` does the same and adds steps that the chapter does not have: a width that fails is tried with other
biases, and bits move between groups."""
BIAS_RULES: tuple[BiasRule, ...] = get_args(BiasRule)
MOST_EXCHANGES = 100
"""Cap on the exchanges (bits moved from one group to another) tried in one round; the largest gains come first."""

Search = Callable[[Judge, Point | None, BiasRule], Point | None]
"""One pass: from the best point of the pass before, if any, to a feasible point, or None."""


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
    """Search for the formats with the smallest objective whose score on all samples is within the margin.

    margin: relative loss of score allowed, against *base*, by default FLOAT 32 everywhere. extras: names that the
    objective may use. layerwise: see ``Layerwise``; bias: see ``BiasRule``. faithful: score every candidate in full.
    two_passes: False uses all samples from the start. database: keeps scores, so that an interrupted search continues
    when it is called again. Raises TuneError if no formats reach the threshold.
    """
    _check_options(margin, bias, on_failure)
    hardware = load_platform(platform) if isinstance(platform, str) else platform
    space = space_of(network, hardware, layerwise)
    measure = partial(objective_from(objective, extras), network)
    start = Configuration({}) if base is None else base
    passes: dict[Subset, Search] = {"small": _first_pass, "full": _second_pass} if two_passes else {"full": _first_pass}
    with open_database(database) as scores:
        judge = Judge(space, evaluator, measure, scores, faithful=faithful, on_failure=on_failure, on_progress=progress)
        bases: dict[Subset, float] = {}
        thresholds: dict[Subset, float] = {}
        best: Point | None = None
        for subset, search in passes.items():
            bases[subset] = judge.measure_base(subset, start)
            thresholds[subset] = judge.threshold = threshold_of(bases[subset], margin)
            best = search(judge, best, bias)
            if best is None:
                raise TuneError(
                    f"no formats of platform {hardware.name!r} were found that keep a score of {judge.threshold:.6g} "
                    f"(the base has {bases[subset]:.6g}, the margin is {margin:g}); raise the margin or allow wider "
                    "formats"
                )
    assert best is not None
    return Tuning(
        network=network, platform=hardware.name, margin=margin, layerwise=layerwise, configuration=best.configuration,
        score=best.score, objective=best.objective, base_configuration=start, base_objective=measure(start), base=bases,
        thresholds=thresholds, trials=tuple(judge.trials), path=tuple(judge.path), samples=dict(judge.samples),
        reused=judge.reused,
    )  # fmt: skip


def threshold_of(base: float, margin: float) -> float:
    """The least score allowed: the score *base* less the share *margin* of it; raises TuneError if it is not finite."""
    if not math.isfinite(base):
        raise TuneError(f"the base scores {base}; a search needs a finite score to compare with")
    return base - (margin + ROUNDING) * abs(base)


def _first_pass(judge: Judge, best: Point | None, bias_rule: BiasRule) -> Point | None:
    """Phases 1 and 2, from nothing: *best* is not used."""
    judge.phase = 1
    point = coarse(judge) or _climb_from_widest(judge)
    judge.phase = 2
    return point and fine(judge, point, bias_rule)


def _second_pass(judge: Judge, best: Point | None, bias_rule: BiasRule) -> Point | None:
    """Phases 3 and 4, from the setting of *best*."""
    assert best is not None
    judge.phase = 3
    point = recover(judge, best.setting)
    judge.phase = 4
    return point and fine(judge, point, bias_rule)


def _check_options(margin: float, bias_rule: BiasRule, on_failure: OnFailure) -> None:
    if not (math.isfinite(margin) and 0 <= margin < 1):
        raise TuneError(f"margin = {margin} must be a share of the score, from 0 to below 1; 0.01 is one per cent")
    if bias_rule not in BIAS_RULES:
        raise TuneError(unknown_name("bias rule", bias_rule, BIAS_RULES))
    if on_failure not in ("stop", "skip"):
        raise TuneError(f"on_failure = {on_failure!r} must be stop or skip")


# Phase 1


def coarse(judge: Judge) -> Point | None:
    """Find the narrowest feasible uniform setting (one type and width for all groups); None if the widest fails.

    Go down ``LADDER`` to the first failure, bisect between the last two widths, then try powers of two (EXP).
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
    """The setting with this type and width in every group, or the nearest that the platform has there."""
    return judge.space.uniform(lambda group: as_wide(group.choices, kind, bits))


def _bisect(judge: Judge, best: Point, passing_bits: int, failed: Unbiased) -> Point:
    """The narrowest feasible uniform setting between *passing_bits* bits, which *best* has, and the *failed* format."""
    failing_bits = failed.bits
    while passing_bits - failing_bits > 1:
        middle = (passing_bits + failing_bits) // 2
        point = judge.feasible(_uniform(judge, failed.kind, middle), "coarse")
        if point is None:
            failing_bits = middle
            continue
        passing_bits = middle
        if point.setting != best.setting:  # a platform with few widths gives one setting for several
            best = point
            judge.keep(point, "coarse")
    return best


def _narrow_powers(judge: Judge, best: Point) -> Point:
    """Change all groups to EXP, one bit narrower each time, as long as the setting stays feasible."""
    while True:
        types = tuple(
            widest(group.choices, "EXP", current.bits - 1) or current
            for group, current in zip(judge.space.groups, best.setting.types, strict=True)
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
    """Make *setting* feasible: widen or lower biases step by step, each time with the highest score.

    If that does not reach the threshold, take the narrowest feasible uniform setting; None if there is none.
    """
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
    """The widest uniform setting with its biases moved until it is feasible; None if that is not enough."""
    best = climb(judge, uniform_settings(judge)[-1], steps=("recovery", "recovery"))
    if best:
        judge.keep(best, "recovery")
    return best


# Phases 2 and 4


def fine(judge: Judge, point: Point, bias_rule: BiasRule) -> Point:
    """Raise biases, narrow widths, then change a type, until no step improves the feasible *point* (Algorithm 2).

    As printed, a change of type that is feasible but gains nothing is accepted, so that FIXED 2 and EXP 2 can follow
    each other for ever. Here a change counts only if the objective is smaller after biases and widths were tuned again.
    """
    point = _narrow(judge, raise_biases(judge, point, bias_rule))
    while better := _improve(judge, point, bias_rule):
        point = better
    return point


def raise_biases(judge: Judge, point: Point, rule: BiasRule) -> Point:
    """Step (a): raise one bias after another, each time the one with the highest score.

    The score must stay above the threshold; unless *rule* is ``chapter``, it must also not drop.
    """
    while True:
        floor = judge.threshold if rule == "chapter" else max(judge.threshold, point.score)
        best = judge.pick(bias_moves(judge.space, point.setting, 1), HighestScore(floor), "bias", point.score)
        if best is None:
            return point
        point = best
        judge.keep(point, "bias")


def _improve(judge: Judge, point: Point, bias_rule: BiasRule) -> Point | None:
    """Find a point with a smaller objective than *point*, with biases and widths tuned again; None if there is none."""
    if bias_rule != "repair":
        return _change_types(judge, point, bias_rule)
    better = repair(judge, point) or _change_types(judge, point, bias_rule) or exchange(judge, point)
    return better and _narrow(judge, raise_biases(judge, better, bias_rule))


def _narrow(judge: Judge, point: Point) -> Point:
    """Narrow one group after another, each time the one with most gain per lost score, as long as one is feasible."""
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


def _change_types(judge: Judge, point: Point, bias_rule: BiasRule) -> Point | None:
    """Change the type of one group, with biases and widths tuned again; None if no change lowers the objective.

    Changes are tried by gain per lost score, the best first.
    """
    moves = type_moves(judge.space, point.setting)
    rule = MostGainPerLoss(judge.threshold, point.objective, point.score)
    for changed in judge.accepted(moves, rule, "type"):
        path_length = len(judge.path)
        judge.keep(changed, "type")
        tuned = _narrow(judge, raise_biases(judge, changed, bias_rule))
        if tuned.objective < point.objective:
            return tuned
        del judge.path[path_length:]  # forget the kept points since then: they led to no gain
    return None


def exchange(judge: Judge, point: Point) -> Point | None:
    """Move bits from one group to another: the feasible exchange with the largest gain; None if there is none."""
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
    """Settings with one group one or two widths wider, and another narrower with the same bias or one more."""
    space = judge.space
    for first in width_moves(space, setting, narrower=False):
        second = (move for move in width_moves(space, first.setting, narrower=False) if move.name == first.name)
        for wider in (first, *second):
            for group, move in narrowing_moves(space, wider.setting):
                if setting.types[group] == wider.setting.types[group]:
                    yield move.setting
                    yield shift_biases(space, move.setting, group, 1)


def repair(judge: Judge, point: Point) -> Point | None:
    """Narrow one group and move its biases so that it is feasible: the change of largest gain; None if none works."""
    moves = narrowing_moves(judge.space, point.setting)
    gains = [(point.objective - judge.point(move.setting).objective, group, move) for group, move in moves]
    # Phase 4 scores all samples, which is slow, so there only direct neighbours are tried.
    make_feasible = _try_neighbours if judge.phase == 4 else climb
    for gain, group, move in sorted(gains, key=lambda entry: -entry[0]):
        if gain <= 0:
            break
        if passed := make_feasible(judge, move.setting, group):
            judge.keep(passed, "width")
            return passed
    return None


def climb(
    judge: Judge, setting: TuningSetting, group: int | None = None, steps: tuple[Step, Step] = ("width", "bias")
) -> Point | None:
    """Move biases one by one, as long as the score rises, until it is feasible; None if that is not enough.

    group: index of the only group whose biases move; None: all groups. steps: names of the trials, for *setting* itself
    and for its neighbours.
    """
    best = judge.scored(setting, steps[0])
    while best and best.score < judge.threshold:
        rule = HighestScore(math.nextafter(best.score, math.inf))
        best = judge.pick(_neighbours(judge, best.setting, group), rule, steps[1], best.score)
    return best


def _try_neighbours(judge: Judge, setting: TuningSetting, group: int) -> Point | None:
    """The first feasible point of *setting* and its neighbours with another bias in *group*; None if there is none."""
    settings = (setting, *(move.setting for move in _neighbours(judge, setting, group)))
    return next((point for candidate in settings if (point := judge.feasible(candidate, "width"))), None)


def _neighbours(judge: Judge, setting: TuningSetting, group: int | None) -> list[Move]:
    """Moves of one bias by one, up or down, in *group* or in all groups."""
    return bias_moves(judge.space, setting, 1, group) + bias_moves(judge.space, setting, -1, group)

"""The search for the smallest formats that keep a network accurate: two passes of two phases each (Algorithm 1).

The first pass uses few samples: one format for all (phase 1, ``coarse``), then object by object (phase 2, ``fine``).
The second uses all samples: a setting that is no longer accurate enough is repaired (phase 3, ``recover``), then tuned
again (phase 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from weft.base.errors import TuneError, unknown_name
from weft_tune.database import Database, open_database
from weft_tune.evaluation import Evaluator, Subset
from weft_tune.fine import BIAS_RULES, BiasRule, climb, fine
from weft_tune.judge import HighestScore, Judge, OnFailure, Point
from weft_tune.network import Network
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import Kind
from weft_tune.objective import DEFAULT, Extras, Measure, objective_from
from weft_tune.platform import Platform, Unbiased, as_wide, load_platform
from weft_tune.result import OnSearchProgress, Tuning
from weft_tune.search_space import Layerwise, TuningSetting, bias_moves, space_of, widest, width_moves

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

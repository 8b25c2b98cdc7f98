"""The search for the smallest formats that keep a network accurate: two passes of two phases each (Algorithm 1).

The first pass uses few samples: one format for all (phase 1), then object by object (phase 2). The second uses all
samples: what is no longer accurate enough is repaired (phase 3), then tuned again (phase 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from weft.base.errors import TuneError, unknown_name
from weft_tune.database import Database, opened
from weft_tune.evaluation import Evaluator, Subset
from weft_tune.judge import Judge, OnFailure, Point
from weft_tune.network import Network
from weft_tune.numbers.configuration import Configuration
from weft_tune.objective import DEFAULT, Extras, Measure, objective_from
from weft_tune.platform import Platform, load_platform
from weft_tune.search.bias import BIAS_RULES, BiasRule
from weft_tune.search.coarse import coarse, rungs
from weft_tune.search.fine import fine
from weft_tune.search.recovery import climbed, recovered
from weft_tune.search_space import Layerwise, space_of
from weft_tune.trials import Told, Tuning

ROUNDING = 1e-12
"""Relative; a score that equals the threshold but for the last digit passes."""


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
    progress: Told | None = None,
) -> Tuning:
    """The configuration with the smallest objective found whose score on all samples is within the margin.

    *margin* is relative to the score of *base*, FLOAT 32 everywhere if not given. *two_passes=False* uses all samples
    from the start. With a *database* an interrupted search goes on where it was, when called again.
    """
    _check(margin, bias, on_failure)
    machine = load_platform(platform) if isinstance(platform, str) else platform
    space = space_of(network, machine, layerwise)
    measure = partial(objective_from(objective, extras), network)
    start = Configuration({}) if base is None else base
    with opened(database) as scores:
        judge = Judge(space, evaluator, measure, scores, faithful=faithful, on_failure=on_failure, told=progress)
        bases: dict[Subset, float] = {}
        thresholds: dict[Subset, float] = {}
        found: Point | None = None
        for subset, search in _passes(two_passes):
            bases[subset] = judge.base(subset, start)
            thresholds[subset] = judge.threshold = threshold_of(bases[subset], margin)
            found = search(judge, found, bias)
            if found is None:
                raise TuneError(_hopeless(machine, bases[subset], judge.threshold, margin))
    assert found is not None
    return Tuning(
        network, machine.name, margin, layerwise, found.configuration, found.score, found.objective, start,
        measure(start), bases, thresholds, tuple(judge.trials), tuple(judge.path), dict(judge.samples), judge.reused,
    )  # fmt: skip


def threshold_of(base: float, margin: float) -> float:
    """The least score allowed: *margin* of the base below it."""
    if not math.isfinite(base):
        raise TuneError(f"the base scores {base}; a search needs a finite score to compare with")
    return base - (margin + ROUNDING) * abs(base)


Search = Callable[[Judge, Point | None, BiasRule], Point | None]


def _passes(both: bool) -> list[tuple[Subset, Search]]:
    return [("small", _first), ("full", _second)] if both else [("full", _first)]


def _first(judge: Judge, found: Point | None, bias: BiasRule) -> Point | None:
    judge.phase = 1
    point = coarse(judge) or climbed(judge, rungs(judge)[-1])
    judge.phase = 2
    return point and fine(judge, point, bias)


def _second(judge: Judge, found: Point | None, bias: BiasRule) -> Point | None:
    assert found is not None
    judge.phase = 3
    point = recovered(judge, found.setting)
    judge.phase = 4
    return point and fine(judge, point, bias)


def _check(margin: float, bias: BiasRule, on_failure: OnFailure) -> None:
    if not (math.isfinite(margin) and 0 <= margin < 1):
        raise TuneError(f"margin = {margin} must be a share of the score, from 0 to below 1; 0.01 is one per cent")
    if bias not in BIAS_RULES:
        raise TuneError(unknown_name("bias rule", bias, BIAS_RULES))
    if on_failure not in ("stop", "skip"):
        raise TuneError(f"on_failure = {on_failure!r} must be stop or skip")


def _hopeless(platform: Platform, base: float, threshold: float, margin: float) -> str:
    return (
        f"no formats of platform {platform.name!r} were found that keep a score of {threshold:.6g} (the base has "
        f"{base:.6g}, the margin is {margin:g}); raise the margin or allow wider formats"
    )

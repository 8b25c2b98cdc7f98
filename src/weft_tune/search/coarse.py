"""Phase 1: one type and width for all, halved while the score holds, then a bisection, then powers of two."""

from __future__ import annotations

from weft_tune.judge import Judge, Point
from weft_tune.moves import widest
from weft_tune.numbers.format import Kind
from weft_tune.platform import Unbiased, as_wide
from weft_tune.search_space import TuningSetting

LADDER: tuple[Unbiased, ...] = (
    Unbiased("FLOAT", 32),
    Unbiased("FLOAT", 16),
    Unbiased("FIXED", 16),
    Unbiased("FIXED", 8),
    Unbiased("FIXED", 4),
    Unbiased("FIXED", 2),
)


def coarse(judge: Judge) -> Point | None:
    """The narrowest uniform setting that passes; None if the widest does not."""
    best: Point | None = None
    held = LADDER[0]
    for rung in LADDER:
        found = judge.feasible(_uniform(judge, rung.kind, rung.bits), "coarse")
        if found is None:
            best = best and _bisected(judge, best, held.bits, rung)
            break
        best, held = found, rung
        judge.keep(found, "coarse")
    return best and _powers(judge, best)


def rungs(judge: Judge) -> list[TuningSetting]:
    """The uniform settings, the narrowest first."""
    return list(dict.fromkeys(_uniform(judge, rung.kind, rung.bits) for rung in reversed(LADDER)))


def _uniform(judge: Judge, kind: Kind, bits: int) -> TuningSetting:
    return judge.space.uniform(lambda group: as_wide(group.choices, kind, bits))


def _bisected(judge: Judge, best: Point, passes: int, failed: Unbiased) -> Point:
    fails = failed.bits
    while passes - fails > 1:
        middle = (passes + fails) // 2
        found = judge.feasible(_uniform(judge, failed.kind, middle), "coarse")
        if found is None:
            fails = middle
            continue
        passes = middle
        if found.setting != best.setting:
            best = found
            judge.keep(found, "coarse")
    return best


def _powers(judge: Judge, best: Point) -> Point:
    """EXP, narrower by a bit than what passed, as long as that passes too."""
    while True:
        types = tuple(
            widest(group.choices, "EXP", now.bits - 1) or now
            for group, now in zip(judge.space.groups, best.setting.types, strict=True)
        )
        if types == best.setting.types:
            return best
        found = judge.feasible(best.setting._replace(types=types), "coarse")
        if found is None:
            return best
        best = found
        judge.keep(found, "coarse")

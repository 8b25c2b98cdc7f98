"""Fig. V.7: sustainable throughput as the deadlines of the vision or the language stream are varied.

The paper does not say which baseline its curves are normalised to; ours are over the baseline at the
default deadlines, so that what a longer deadline gives the baseline itself can be seen. The table has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft.reports.exhibits import Axis, Curve, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table, Tick
from weft_papers.layerweaver.lab import geomean
from weft_papers.layerweaver_plus.lab import (
    BASELINE,
    OURS,
    PLUS,
    TOLERANCE,
    WOVEN,
    Answers,
    Ratio,
    StreamPair,
    ask,
)

FIGURE = "Fig. V.7"
SHOWN = (BASELINE, WOVEN, PLUS, OURS)
MARKS = dict(zip(SHOWN, "^soD", strict=True))
VISION_MS = (5.0, 10.0, 15.0, 20.0, 30.0, 50.0)
LANGUAGE_MS = (50.0, 90.0, 130.0, 170.0, 250.0)
COMBINATIONS: tuple[tuple[tuple[str, str], Ratio], ...] = (
    (("RN", "BB"), (1.0, 1.0)),
    (("RN", "BB"), (4.0, 1.0)),
    (("MN", "BL"), (1.0, 1.0)),
    (("MN", "BL"), (1.0, 4.0)),
)


@dataclass(frozen=True)
class DeadlineStudy:
    """Both deadlines varied, each with the other at its default."""

    bases: tuple[StreamPair, ...]
    vision_ms: Sequence[float]
    language_ms: Sequence[float]
    answers: Answers

    def varied(self, base: StreamPair, which: int) -> list[StreamPair]:
        if which == 0:
            return [replace(base, vision_ms=value) for value in self.vision_ms]
        return [replace(base, language_ms=value) for value in self.language_ms]


def study(
    base: StreamPair,
    tick: Tick | None = None,
    combinations: Sequence[tuple[tuple[str, str], Ratio]] = COMBINATIONS,
    vision_ms: Sequence[float] = VISION_MS,
    language_ms: Sequence[float] = LANGUAGE_MS,
) -> DeadlineStudy:
    bases = tuple(StreamPair(pair, ratio, base.seq_len, base.duration_s) for pair, ratio in combinations)
    plan = DeadlineStudy(bases, vision_ms, language_ms, {})
    scenes = [scene for one in bases for scene in (one, *plan.varied(one, 0), *plan.varied(one, 1))]
    return replace(plan, answers=ask(scenes, SHOWN, tick))


def figure_7(out: Path, sweep: DeadlineStudy) -> Exhibit:
    rows = tuple(row for base in sweep.bases for which in (0, 1) for row in _rows(sweep, base, which))
    return Exhibit(rows, (_table(sweep),), (_picture(out, sweep),))


def _ticks(sweep: DeadlineStudy, which: int) -> Sequence[float]:
    return (sweep.vision_ms, sweep.language_ms)[which]


def _default(base: StreamPair, which: int) -> float:
    return (base.vision_ms, base.language_ms)[which]


def _picture(out: Path, sweep: DeadlineStudy) -> Figure:
    panels = []
    for which, letter in enumerate("ab"):
        for base in sweep.bases:
            yardstick, ticks, marks = sweep.answers[base, BASELINE].stp, _ticks(sweep, which), []
            for scheduler in SHOWN:
                values = [sweep.answers[scene, scheduler].stp / yardstick for scene in sweep.varied(base, which)]
                default = sweep.answers[base, scheduler].stp / yardstick
                colour = pictures.POLICIES[scheduler.name]
                marks += [
                    Curve(ticks, values, scheduler.name, colour, MARKS[scheduler]),
                    Curve([_default(base, which)], [default], None, colour, "*", "", size=13, order=4),
                ]
            x = Axis(label=f"deadline of {base.pair[which]} (ms)", ticks=ticks)
            y = Axis(label="STP over the baseline at 15 and 130 ms", low=0)
            panels.append(Panel(marks, f"({letter}) {base.name}", x, y))
    title = f"{FIGURE}: sustainable throughput over the deadlines (stars: the defaults, 15 and 130 ms)"
    columns = len(sweep.bases)
    layout = {"size": (3.3 * columns + 0.4, 7.0), "columns": columns, "share_y": "col"}
    return pictures.picture(out, "figV7-deadlines", title, panels, **layout)


def _rows(sweep: DeadlineStudy, base: StreamPair, which: int) -> list[Row]:
    """What the longest deadline gives over the default, and how far layerweaver+ leads on the way."""
    longest = sweep.varied(base, which)[-1]
    gains = {s: sweep.answers[longest, s].stp / sweep.answers[base, s].stp for s in SHOWN}
    lead = [sweep.answers[s, PLUS].stp / sweep.answers[s, WOVEN].stp for s in sweep.varied(base, which)]
    what = f"{base.name}, {base.pair[which]} {_ticks(sweep, which)[-1]:g} ms instead of {_default(base, which):g} ms"
    return [
        Row(
            f"{FIGURE}{'ab'[which]}", f"layerweaver+ with {what}", None, gains[PLUS], "x",
            f"drawn, not printed; {_improves(gains[PLUS])}; baseline {gains[BASELINE]:.3f}, layerweaver "
            f"{gains[WOVEN]:.3f}, weft+ {gains[OURS]:.3f}; layerweaver+ over layerweaver along the sweep "
            f"{min(lead):.3f} to {max(lead):.3f}, geomean {geomean(lead):.3f}",
        )
    ]  # fmt: skip


def _improves(gain: float) -> str:
    if gain > 1 + TOLERANCE:
        return "more time lets it sustain more"
    return "more time does not let it sustain more, as the text reports of some cases"


def _table(sweep: DeadlineStudy) -> Table:
    body = []
    for base in sweep.bases:
        for which in (0, 1):
            for value, scene in zip(_ticks(sweep, which), sweep.varied(base, which), strict=True):
                floor = sweep.answers[scene, BASELINE].stp
                over = (f"{sweep.answers[scene, s].stp / floor:.3f}" for s in SHOWN[1:])
                rates = (f"{sweep.answers[scene, s].rate:.0f}" for s in SHOWN)
                body.append((base.name, f"{base.pair[which]} {value:g}", *rates, *over, "not printed"))
    header = (
        "streams", "deadline ms", *(f"{s.name} requests/s" for s in SHOWN),
        *(f"{s.name} over baseline" for s in SHOWN[1:]), "paper",
    )  # fmt: skip
    return Table(
        f"{FIGURE}: sustainable load; the last columns over the baseline at the same deadlines", header, tuple(body)
    )

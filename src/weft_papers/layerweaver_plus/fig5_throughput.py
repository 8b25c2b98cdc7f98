"""Fig. V.5 and V.7: the largest sustainable throughput of nine pairs at thirteen ratios, and over deadlines.

Both are normalised to the baseline. For Fig. V.7 the paper does not say which deadlines that baseline has. Our figure
uses the default ones, so that it also shows the baseline's own gain from longer deadlines. The table has both.

All scenes have the sequence length and duration of *base*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from weft.reports.exhibits import Axis, Curve, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table, Tick
from weft_papers.layerweaver.lab import geomean
from weft_papers.layerweaver_plus.lab import (
    BASELINE,
    OURS,
    PAIRS,
    PLUS,
    PRECISE,
    RATIOS,
    SCHEDULERS,
    TOLERANCE,
    WOVEN,
    Ratio,
    Scheduler,
    StreamPair,
    SustainedLoads,
    search_loads,
)

FIGURE = "Fig. V.5"
STYLES = {BASELINE: "-", WOVEN: "-", PLUS: "-", PRECISE: ":", OURS: "-"}
MARKS = {BASELINE: "", WOVEN: "s", PLUS: "o", PRECISE: "", OURS: "D"}


@dataclass(frozen=True)
class RatioSweep:
    """The largest sustainable loads of every pair at every ratio under every scheduler."""

    pairs: Sequence[tuple[str, str]]
    ratios: Sequence[Ratio]
    base: StreamPair
    """The settings that all scenes share."""
    answers: SustainedLoads
    """The largest sustainable load of every scene under every scheduler."""

    @cached_property
    def scenes(self) -> list[StreamPair]:
        return [scene for pair in self.pairs for scene in scenes_of(self.base, pair, self.ratios)]

    def over(self, one: Scheduler, other: Scheduler, scenes: Sequence[StreamPair] | None = None) -> list[float]:
        """Sustainable throughput of scheduler *one* divided by that of *other*, scene by scene."""
        return [
            self.answers[scene, one].stp / self.answers[scene, other].stp
            for scene in (self.scenes if scenes is None else scenes)
        ]


def scenes_of(base: StreamPair, pair: tuple[str, str], ratios: Sequence[Ratio]) -> list[StreamPair]:
    """The scenes of a pair, one for each ratio, with sequence length and duration of *base*."""
    return [StreamPair(pair, ratio, base.seq_len, base.duration_s) for ratio in ratios]


def sweep(
    base: StreamPair,
    pairs: Sequence[tuple[str, str]] = PAIRS,
    ratios: Sequence[Ratio] = RATIOS,
    tick: Tick | None = None,
) -> RatioSweep:
    """Search the loads of all pairs at all ratios under all schedulers."""
    scenes = [scene for pair in pairs for scene in scenes_of(base, pair, ratios)]
    return RatioSweep(pairs, ratios, base, search_loads(scenes, SCHEDULERS, tick))


def figure_5(out: Path, ratios: RatioSweep) -> Exhibit:
    """Draw Fig. V.5 from a sweep that was run, with rows and tables."""
    return Exhibit(_rows(ratios), (_summary(ratios), _points(ratios)), (_picture(out, ratios),))


def _picture(out: Path, sweep: RatioSweep) -> Figure:
    """Draw throughput over the baseline's by ratio, a panel per pair and a curve per scheduler."""
    columns = min(3, len(sweep.pairs))
    x = Axis(label="arrivals, memory- to compute-intensive", names=[f"{a:g}:{b:g}" for a, b in sweep.ratios], slant=60)
    panels = []
    for pair in sweep.pairs:
        scenes = scenes_of(sweep.base, pair, sweep.ratios)
        curves = [
            Curve(
                range(len(scenes)), sweep.over(scheduler, BASELINE, scenes), scheduler.name,
                pictures.POLICIES[scheduler.name], MARKS[scheduler], STYLES[scheduler],
                order=4 if scheduler is PRECISE else 3,
            )
            for scheduler in SCHEDULERS
        ]  # fmt: skip
        panels.append(Panel(curves, f"{pair[0]} + {pair[1]}", x, Axis(label="STP over baseline", low=0.9)))
    title = f"{FIGURE}: sustainable throughput with at most 1 % violations, over the baseline's"
    layout = {"size": (12.5, 2.9 * -(-len(panels) // columns) + 1.1), "columns": columns, "share_x": True}
    return pictures.picture(out, "figV5-sustainable", title, panels, **layout)


def _rows(sweep: RatioSweep) -> tuple[Row, ...]:
    """Rows of Fig. V.5: throughput over the baseline's, and the text's claims counted over all points."""
    points, seconds = len(sweep.scenes), sweep.base.duration_s
    woven, plus = sweep.over(WOVEN, BASELINE), sweep.over(PLUS, WOVEN)
    largest = max((abs(ratio - 1) for ratio in sweep.over(PLUS, PRECISE)), default=0.0)
    noisy = [sweep.answers[scene, scheduler].noise_limited for scene in sweep.scenes for scheduler in SCHEDULERS]
    geomeans = tuple(
        Row(
            FIGURE, f"STP of {scheduler.name} over baseline, geomean", None,
            geomean(sweep.over(scheduler, BASELINE)), "x",
            f"drawn, not printed; least {min(sweep.over(scheduler, BASELINE)):.3f}, most "
            f"{max(sweep.over(scheduler, BASELINE)):.3f} over {points} points",
        )
        for scheduler in SCHEDULERS[1:]
    )  # fmt: skip
    return (
        *geomeans,
        Row(
            FIGURE, f"points of {points} where layerweaver sustains what the baseline does", points,
            _count_reached(woven), "points",
            'the text says "notably better throughput than the baseline"; counted within the 1 % of the search'
            + _below_text(sweep, WOVEN, BASELINE),
        ),
        Row(
            FIGURE, f"points of {points} where layerweaver+ sustains what layerweaver does", points,
            _count_reached(plus), "points",
            'the text says it "further improves the throughput"; counted within the 1 % of the search'
            + _below_text(sweep, PLUS, WOVEN),
        ),
        Row(
            FIGURE, f"points of {points} where layerweaver+ sustains over 10 % more than layerweaver", None,
            sum(ratio > 1.1 for ratio in plus), "points",
            'the caption says it can "significantly outperform Layerweaver [1] for some cases"; largest '
            + _largest_text(sweep, PLUS, WOVEN),
        ),
        Row(
            FIGURE, "approximate and precise remaining time, largest difference", None, 100 * largest, "%",
            'the text says "comparable throughput" with "negligible performance degradation"; searches end within '
            f"1 %, geomean of approximate over precise {geomean(sweep.over(PLUS, PRECISE)):.4f}",
        ),
        Row(
            FIGURE, "weft+ over layerweaver+, geomean", None, geomean(sweep.over(OURS, PLUS)), "x",
            f"not in the paper: our policy; least {min(sweep.over(OURS, PLUS)):.3f}" + _below_text(sweep, OURS, PLUS),
        ),
        Row(
            FIGURE, "weft+ over baseline, worst point", None, min(sweep.over(OURS, BASELINE)), "x",
            f"not in the paper: our policy{_below_text(sweep, OURS, BASELINE)}",
        ),
        Row(
            FIGURE, "searches limited by noise", None, 100 * sum(noisy) / len(noisy), "%",
            f"single seeds of {seconds:g} s disagree with the answer by more than the search's 1 %: near the "
            "capacity violations rise from none to many within the random difference of two runs' arrivals",
        ),
        Row(
            FIGURE, "largest load sustained, over the capacity of the two resources", None,
            100 * max(answer.factor for answer in sweep.answers.values()), "%",
            "searches start from the load at which full batches keep the busier resource busy; a backlog violates "
            f"nothing until it is a deadline long, so runs of {seconds:g} s pass a little beyond it",
        ),
    )  # fmt: skip


def _count_reached(ratios: Sequence[float]) -> int:
    """The number of ratios that are at least 1, within the tolerance of the search."""
    return sum(ratio >= 1 - TOLERANCE for ratio in ratios)


def _below_text(sweep: RatioSweep, one: Scheduler, other: Scheduler) -> str:
    """Text that lists the scenes where scheduler *one* falls behind *other* by more than the search's tolerance."""
    behind = sorted(
        (ratio, scene.name)
        for scene, ratio in zip(sweep.scenes, sweep.over(one, other), strict=True)
        if ratio < 1 - TOLERANCE
    )
    if not behind:
        return f"; {one.name} is nowhere below {other.name}"
    shown = ", ".join(f"{name} {ratio:.3f}" for ratio, name in behind[:4])
    return f"; below {other.name} at {len(behind)} points, least {shown}"


def _largest_text(sweep: RatioSweep, one: Scheduler, other: Scheduler) -> str:
    """Text with the largest ratio of throughputs of scheduler *one* over *other*, and its scene."""
    ratio, name = max((ratio, scene.name) for scene, ratio in zip(sweep.scenes, sweep.over(one, other), strict=True))
    return f"{ratio:.2f} at {name}"


def _summary(sweep_ratios: RatioSweep) -> Table:
    """Table of each scheduler's throughput over the baseline's: geometric mean, least, most."""
    body = []
    for scheduler in SCHEDULERS:
        ratios = sweep_ratios.over(scheduler, BASELINE)
        noisy = sum(sweep_ratios.answers[scene, scheduler].noise_limited for scene in sweep_ratios.scenes)
        cells = (f"{geomean(ratios):.4f}", f"{min(ratios):.4f}", f"{max(ratios):.4f}", f"{noisy} of {len(ratios)}")
        body.append((scheduler.name, *cells, "not printed"))
    header = ("scheduler", "geomean", "least", "most", "limited by noise", "paper")
    return Table(f"{FIGURE}: sustainable STP over the baseline's, all points", header, tuple(body))


def _points(sweep: RatioSweep) -> Table:
    """Table of all scenes: the baseline's load, and the other schedulers over it."""
    body = []
    for scene in sweep.scenes:
        base = sweep.answers[scene, BASELINE]
        over = (f"{sweep.answers[scene, scheduler].stp / base.stp:.3f}" for scheduler in SCHEDULERS[1:])
        body.append((scene.name, f"{base.rate:.0f}", f"{base.stp:.2f}", *over, "not printed"))
    names = (scheduler.name for scheduler in SCHEDULERS[1:])
    header = ("streams", "baseline requests/s", "baseline STP", *names, "paper")
    return Table(f"{FIGURE}: the baseline, and the others over it, point by point", header, tuple(body))


FIGURE_7 = "Fig. V.7"
SHOWN = (BASELINE, WOVEN, PLUS, OURS)
MARKS_7 = dict(zip(SHOWN, "^soD", strict=True))
# deadlines on the axes of the figure; 15 and 130 ms are those of MLPerf
VISION_MS = (5.0, 10.0, 15.0, 20.0, 30.0, 50.0)
LANGUAGE_MS = (50.0, 90.0, 130.0, 170.0, 250.0)
# The pairs and ratios of Fig. V.7.
COMBINATIONS: tuple[tuple[tuple[str, str], Ratio], ...] = (
    (("RN", "BB"), (1.0, 1.0)),
    (("RN", "BB"), (4.0, 1.0)),
    (("MN", "BL"), (1.0, 1.0)),
    (("MN", "BL"), (1.0, 4.0)),
)


@dataclass(frozen=True)
class DeadlineStudy:
    """The sustainable loads when one of the two deadlines varies and the other keeps its default."""

    bases: tuple[StreamPair, ...]
    """The scenes with both default deadlines."""
    vision_ms: Sequence[float]
    language_ms: Sequence[float]
    answers: SustainedLoads

    def varied(self, base: StreamPair, which: int) -> list[StreamPair]:
        """The scene once for each tried deadline of the vision stream (*which* 0) or of the language stream (1)."""
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
    """Search the loads of all combinations over both deadlines."""
    bases = tuple(StreamPair(pair, ratio, base.seq_len, base.duration_s) for pair, ratio in combinations)
    plan = DeadlineStudy(bases, vision_ms, language_ms, {})
    scenes = [scene for default in bases for scene in (default, *plan.varied(default, 0), *plan.varied(default, 1))]
    return replace(plan, answers=search_loads(scenes, SHOWN, tick))


def figure_7(out: Path, sweep: DeadlineStudy) -> Exhibit:
    """Draw Fig. V.7 from a study that was run, with rows and a table."""
    rows = tuple(row for base in sweep.bases for which in (0, 1) for row in _rows_7(sweep, base, which))
    return Exhibit(rows, (_table(sweep),), (_picture_7(out, sweep),))


def _ticks(sweep: DeadlineStudy, which: int) -> Sequence[float]:
    """The deadlines tried for the vision stream (*which* 0) or the language stream (1), in ms."""
    return (sweep.vision_ms, sweep.language_ms)[which]


def _default(base: StreamPair, which: int) -> float:
    """The default deadline of the vision stream (*which* 0) or the language stream (1), in ms."""
    return (base.vision_ms, base.language_ms)[which]


def _picture_7(out: Path, sweep: DeadlineStudy) -> Figure:
    """Draw sustainable throughput over each deadline, relative to the baseline at the default deadlines."""
    panels = []
    for which, letter in enumerate("ab"):
        for base in sweep.bases:
            baseline_stp, deadlines_ms, curves = sweep.answers[base, BASELINE].stp, _ticks(sweep, which), []
            for scheduler in SHOWN:
                values = [sweep.answers[scene, scheduler].stp / baseline_stp for scene in sweep.varied(base, which)]
                default = sweep.answers[base, scheduler].stp / baseline_stp
                colour = pictures.POLICIES[scheduler.name]
                curves += [
                    Curve(deadlines_ms, values, scheduler.name, colour, MARKS_7[scheduler]),
                    Curve([_default(base, which)], [default], None, colour, "*", "", size=13, order=4),
                ]
            x = Axis(label=f"deadline of {base.pair[which]} (ms)", ticks=deadlines_ms)
            y = Axis(label="STP over the baseline at 15 and 130 ms", low=0)
            panels.append(Panel(curves, f"({letter}) {base.name}", x, y))
    title = f"{FIGURE_7}: sustainable throughput over the deadlines (stars: the defaults, 15 and 130 ms)"
    columns = len(sweep.bases)
    layout = {"size": (3.3 * columns + 0.4, 7.0), "columns": columns, "share_y": "col"}
    return pictures.picture(out, "figV7-deadlines", title, panels, **layout)


def _rows_7(sweep: DeadlineStudy, base: StreamPair, which: int) -> list[Row]:
    """Row with the gain of the longest deadline over the default, and layerweaver+'s lead over layerweaver."""
    longest = sweep.varied(base, which)[-1]
    gains = {key: sweep.answers[longest, key].stp / sweep.answers[base, key].stp for key in SHOWN}
    leads = [sweep.answers[scene, PLUS].stp / sweep.answers[scene, WOVEN].stp for scene in sweep.varied(base, which)]
    change = f"{base.name}, {base.pair[which]} {_ticks(sweep, which)[-1]:g} ms instead of {_default(base, which):g} ms"
    return [
        Row(
            f"{FIGURE_7}{'ab'[which]}", f"layerweaver+ with {change}", None, gains[PLUS], "x",
            f"drawn, not printed; {_improves(gains[PLUS])}; baseline {gains[BASELINE]:.3f}, layerweaver "
            f"{gains[WOVEN]:.3f}, weft+ {gains[OURS]:.3f}; layerweaver+ over layerweaver along the sweep "
            f"{min(leads):.3f} to {max(leads):.3f}, geomean {geomean(leads):.3f}",
        )
    ]  # fmt: skip


def _improves(gain: float) -> str:
    """Text on whether a longer deadline raised the sustainable load."""
    if gain > 1 + TOLERANCE:
        return "more time lets it sustain more"
    return "more time does not let it sustain more, as the text reports of some cases"


def _table(sweep: DeadlineStudy) -> Table:
    """Table of all deadlines tried: sustainable loads, and throughput over the baseline at the same deadlines."""
    body = []
    for base in sweep.bases:
        for which in (0, 1):
            for value, scene in zip(_ticks(sweep, which), sweep.varied(base, which), strict=True):
                baseline_stp = sweep.answers[scene, BASELINE].stp
                over = (f"{sweep.answers[scene, scheduler].stp / baseline_stp:.3f}" for scheduler in SHOWN[1:])
                rates = (f"{sweep.answers[scene, scheduler].rate:.0f}" for scheduler in SHOWN)
                body.append((base.name, f"{base.pair[which]} {value:g}", *rates, *over, "not printed"))
    header = (
        "streams", "deadline ms", *(f"{scheduler.name} requests/s" for scheduler in SHOWN),
        *(f"{scheduler.name} over baseline" for scheduler in SHOWN[1:]), "paper",
    )  # fmt: skip
    return Table(
        f"{FIGURE_7}: sustainable load; the last columns over the baseline at the same deadlines", header, tuple(body)
    )

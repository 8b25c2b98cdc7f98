"""Fig. V.6: tail latency at loads that the baseline cannot sustain.

The paper's rates load our device differently from the paper's. So each pair runs, at the paper's ratio, at two other
loads: where the baseline's worst stream misses half of its deadlines, and the largest at which layerweaver+ keeps its
1 %. The table also has the results at the printed rates. All have the sequence length and duration of *base*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.reports.exhibits import Axis, Curve, Dash, Drawable, Panel, ReferenceLine
from weft.simulation.request_report import Floats, cdf
from weft.simulation.requests import RequestRun
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, Tick
from weft_papers.layerweaver_plus.lab import (
    BASELINE,
    LIMIT,
    OURS,
    PLUS,
    TOLERANCE,
    WOVEN,
    Scheduler,
    StreamPair,
    SustainedLoads,
    capacity,
    search_loads,
    simulate_seeds,
)

FIGURE = "Fig. V.6"
SHOWN = (BASELINE, WOVEN, PLUS, OURS)
HALF = 0.5  # share of missed deadlines at which the baseline counts as broken; the paper names no number
PANELS = (("a", ("RN", "BB"), ("rate_rn", "rate_bb")), ("b", ("MN", "BL"), ("rate_mn", "rate_bl")))
"""Letter, pair, and keys of the printed rates (vision, language) of each panel."""

LINES: dict[Scheduler, tuple[Dash, float]] = {
    BASELINE: ("-", 1.8),
    WOVEN: ("-", 3.2),
    PLUS: ("-", 1.8),
    OURS: ((0, (2, 2)), 1.8),
}
"""Line styles that differ even where curves coincide."""


@dataclass(frozen=True)
class SchedulerRuns:
    """The runs of one scheduler at one load, one for each seed."""

    runs: tuple[RequestRun, ...]

    @property
    def worst(self) -> float:
        """Share of violations of the stream with the most, as mean of the seeds, as in searches for sustained loads."""
        return float(np.mean([run.report.worst_violation_rate for run in self.runs]))

    def late(self, stream: int) -> float:
        """Share of a stream's requests that missed their deadline."""
        reports = [run.report.streams[stream] for run in self.runs]
        return sum(report.violated for report in reports) / max(1, sum(report.arrived for report in reports))

    def curve(self, stream: int) -> tuple[Floats, Floats]:
        """Latencies in milliseconds, and for each the percentage of a stream's requests that do not exceed it."""
        histogram = np.sum([run.tally.histogram[stream] for run in self.runs], axis=0)
        seconds, shares = cdf(histogram, self.runs[0].tick_s)
        return 1e3 * seconds, 100 * shares

    def mean(self, stream: int, field: str) -> float:
        """Mean over the seeds of a field of a stream's report, without None; NaN if all are None."""
        values = [getattr(run.report.streams[stream], field) for run in self.runs]
        return float(np.mean([value for value in values if value is not None] or [np.nan]))


@dataclass(frozen=True)
class Load:
    """A scene at one load, run under every scheduler."""

    what: str
    """The load in words."""
    scene: StreamPair
    rate: float
    """Requests per second of both streams."""
    runs_of: dict[Scheduler, SchedulerRuns]

    @property
    def share(self) -> float:
        """The load as a share of ``capacity``."""
        return self.rate / capacity(self.scene)

    def misses(self, scheduler: Scheduler) -> str:
        """Text with the percentage of late requests of both streams."""
        return " and ".join(
            f"{100 * self.runs_of[scheduler].late(stream):.3g} % of {model}"
            for stream, model in enumerate(self.scene.pair)
        )


@dataclass(frozen=True)
class TailPanel:
    """A pair at three loads: as printed, where the baseline misses half, and the largest that layerweaver+ sustains."""

    letter: str
    scene: StreamPair
    printed: Load
    baseline_breaks: Load
    """The load at which the baseline's worst stream misses half of its deadlines."""
    plus_sustains: Load
    """The largest load that layerweaver+ sustains."""


def panels(
    paper: Paper,
    base: StreamPair,
    tick: Tick | None = None,
    wanted: Sequence[tuple[str, tuple[str, str], tuple[str, str]]] = PANELS,
) -> tuple[TailPanel, ...]:
    """Run the pairs of Fig. V.6 at their three loads.

    wanted: panels in the form of PANELS.
    """
    rates = {letter: [paper[key].value for key in keys] for letter, _, keys in wanted}
    # A ratio is that of the language to the vision model, the printed rates are in the other order.
    scenes = {
        letter: StreamPair(pair, (rates[letter][1], rates[letter][0]), base.seq_len, base.duration_s)
        for letter, pair, _ in wanted
    }
    answers: SustainedLoads = search_loads(list(scenes.values()), (PLUS,), tick)
    return tuple(
        TailPanel(
            letter,
            scene,
            _load("the printed rates", scene, sum(rates[letter])),
            _load("the baseline misses half", scene, find_breaking_load(scene)),
            _load("layerweaver+ sustains no more", scene, answers[scene, PLUS].rate),
        )
        for letter, scene in scenes.items()
    )


def _load(what: str, scene: StreamPair, rate: float) -> Load:
    """Run a scene at *rate* requests per second under every scheduler; *what* names the load in texts."""
    runs_of = {scheduler: SchedulerRuns(simulate_seeds(scene, rate, scheduler)) for scheduler in SHOWN}
    return Load(what, scene, rate, runs_of)


def find_breaking_load(scene: StreamPair) -> float:
    """The smallest load, to 1 %, at which the baseline's worst stream misses half of its deadlines."""
    return _threshold(lambda rate: SchedulerRuns(simulate_seeds(scene, rate, BASELINE)).worst >= HALF, capacity(scene))


def _threshold(broken: Callable[[float], bool], start: float) -> float:
    """The smallest rate for which *broken* holds, within TOLERANCE, by bisection from *start*.

    *broken* must hold for all larger rates, too.
    """
    low, high = start / 2, start
    while broken(low):
        low, high = low / 2, low
    while not broken(high):
        low, high = high, high * 2
    while high > low * (1 + TOLERANCE):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if broken(middle) else (middle, high)
    return high


def figure_6(paper: Paper, out: Path, result: Sequence[TailPanel]) -> Exhibit:
    """Draw Fig. V.6 at the loads that break the baseline, and again at the largest that layerweaver+ sustains."""
    rows = tuple(row for panel in result for row in _rows(paper, panel))
    drawn = (
        _picture(out, [panel.baseline_breaks for panel in result], "figV6-tails"),
        _picture(out, [panel.plus_sustains for panel in result], "figV6-tails-borne"),
    )
    return Exhibit(rows, tuple(_table(panel) for panel in result), drawn)


def _picture(out: Path, loads: Sequence[Load], name: str) -> Figure:
    """Draw the latency distributions of both streams of each load, a curve per scheduler."""
    panels = [
        Panel(
            _marks(load, stream), f"({letter}) {load.scene.pair[stream]}, {_offered_rate(load, stream):.0f} requests/s",
            Axis(label="latency (ms)", scale="log", low=1), Axis(label="requests answered within (%)", low=0, high=102),
        )
        for letter, load in zip("ab", loads, strict=False)
        for stream in range(2)
    ]  # fmt: skip
    title, size = f"{FIGURE}: tail latency at the load where {loads[0].what}", (12, 3.4 * len(loads) + 0.9)
    return pictures.picture(out, name, title, panels, size=size, columns=2, share_y=True, share_x="col")


def _offered_rate(load: Load, stream: int) -> float:
    """Requests per second that arrived for a stream."""
    return load.runs_of[BASELINE].mean(stream, "offered_per_s")


def _marks(load: Load, stream: int) -> list[Drawable]:
    """Latency curves of all schedulers for a stream, and a line at its deadline."""
    deadline_ms = (load.scene.vision_ms, load.scene.language_ms)[stream]
    curves = [
        Curve(
            *load.runs_of[scheduler].curve(stream), scheduler.name, pictures.POLICIES[scheduler.name], dash=dash,
            width=width, steps=True,
        )
        for scheduler, (dash, width) in LINES.items()
    ]  # fmt: skip
    return [*curves, ReferenceLine(deadline_ms, f"{deadline_ms:g} ms", upright=True)]


def _rows(paper: Paper, panel: TailPanel) -> list[Row]:
    """Rows of a pair: late requests of each model under each scheduler, at two loads."""
    printed = {
        (BASELINE, 0): paper["baseline_misses_rn"].value,
        (BASELINE, 1): paper["baseline_misses_bb"].value,
        (WOVEN, 0): paper["layerweaver_misses_rn"].value,
    }
    allowed = 100 - paper["plus_meets"].value
    rows = []
    for load, load_text in (
        (panel.baseline_breaks, "baseline at half"),
        (panel.plus_sustains, "layerweaver+ at its most"),
    ):
        for scheduler in SHOWN:
            for stream, model in enumerate(panel.scene.pair):
                printed_late = printed.get((scheduler, stream)) if panel.letter == "a" else None
                ours = 100 * load.runs_of[scheduler].late(stream)
                quantity = f"{model} late under {scheduler.name}, {load_text}"
                why = _why(panel, load, scheduler, printed_late is not None)
                paper_late = allowed if scheduler is PLUS else printed_late
                rows.append(Row(f"{FIGURE}{panel.letter}", quantity, paper_late, ours, "%", why))
    return [*rows, *_load_rows(panel)]


def _why(panel: TailPanel, load: Load, scheduler: Scheduler, printed: bool) -> str:
    """Explain a percentage of late requests: the load, and what the paper says; *printed*: the paper has a number."""
    load_text = f"at {load.rate:.0f} requests/s, {100 * load.share:.0f} % of what the two resources sustain"
    if scheduler is PLUS:
        verdict = "and so it is" if load.runs_of[PLUS].worst <= LIMIT else "but this load is more than it sustains"
        return f'the text says "99%+ requests within the specified deadlines", at most 1 % late, {verdict} {load_text}'
    if scheduler is OURS:
        return f"not in the paper: our policy, {load_text}"
    if not printed:
        return f"drawn, not printed; {load_text}"
    other = panel.plus_sustains if load is panel.baseline_breaks else panel.baseline_breaks
    return (
        f"{load_text}; the paper's rates are another share of what its device sustains: "
        f"at {other.rate:.0f} requests/s ours misses {other.misses(scheduler)}"
    )


def _load_rows(panel: TailPanel) -> list[Row]:
    """The load that breaks the baseline and the largest that layerweaver+ sustains, each beside the printed load."""
    figure, (vision, language) = f"{FIGURE}{panel.letter}", panel.scene.pair
    language_rate, vision_rate = panel.scene.ratio
    ratio, printed = f"{vision}:{language} = {vision_rate:g}:{language_rate:g}", panel.printed
    return [
        Row(
            figure, f"load at which the baseline misses half, {ratio}", printed.rate, panel.baseline_breaks.rate,
            "requests/s",
            f"the printed rates are {100 * printed.share:.0f} % of what our device's two resources sustain with full "
            f"batches; at them the baseline misses {printed.misses(BASELINE)}, layerweaver+ {printed.misses(PLUS)}",
        ),
        Row(
            figure, f"most that layerweaver+ sustains, {ratio}", printed.rate, panel.plus_sustains.rate, "requests/s",
            f"{panel.plus_sustains.rate / panel.baseline_breaks.rate:.2f} of the load at which the baseline misses "
            f"half; there the baseline misses {panel.plus_sustains.misses(BASELINE)}, layerweaver "
            f"{panel.plus_sustains.misses(WOVEN)}, weft+ {panel.plus_sustains.misses(OURS)}",
        ),
    ]  # fmt: skip


def _table(panel: TailPanel) -> Table:
    """Table of a pair: every load under every scheduler, model by model."""
    body = []
    for load in (panel.printed, panel.baseline_breaks, panel.plus_sustains):
        for scheduler in SHOWN:
            for stream, model in enumerate(panel.scene.pair):
                runs = load.runs_of[scheduler]
                tail_ms = (f"{1e3 * runs.mean(stream, field):.2f}" for field in ("p50_s", "p99_s"))
                body.append(
                    (
                        load.what, f"{runs.mean(stream, 'offered_per_s'):.0f}", scheduler.name, model,
                        f"{100 * runs.late(stream):.2f}", *tail_ms, f"{runs.mean(stream, 'mean_batch'):.1f}",
                    )
                )  # fmt: skip
    return Table(
        f"{FIGURE}{panel.letter}: {panel.scene.pair[0]} and {panel.scene.pair[1]}, each load under each scheduler",
        ("load", "requests/s", "scheduler", "model", "late %", "p50 ms", "p99 ms", "mean batch"),
        tuple(body),
    )

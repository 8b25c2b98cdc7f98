"""Checks of the simulated GPU: the error of its contention model, and the time of a scheduler decision.

The error is that of the predicted speeds of pairs of models on an H200, each left out of the fit. The time is the
processor time of a decision of ``abreast`` on this machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from weft.devices.gpu_pairs import GpuPairs, PairError, left_out, read_pairs
from weft.engine.policies import Start, View
from weft.engine.policies.abreast import Abreast
from weft.reports.exhibits import DASHED, Axis, Curve, Panel
from weft.simulation.requests.plain import serve
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table
from weft_papers.gpu.lab import COLOURS, FIVE, at_random, case_of, endless

FIGURE = "model of pairs"
WITHIN = 10.0  # goal for the mean error of the model, in %
SHOWN = 20  # number of pairs in the table


def predicted(out: Path) -> Exhibit:
    """Compare the contention model with measured pairs of models, each predicted by a fit that left it out."""
    measured = read_pairs()
    errors = left_out(measured)
    return Exhibit((_row(measured, errors),), (_table(errors),), (_picture(out, errors),))


def _row(measured: GpuPairs, errors: list[PairError]) -> Row:
    """Row with the mean relative error of the predicted speeds, beside the goal."""
    worst = max(errors, key=lambda pair: pair.error)
    why = (
        f"mean of {len(errors)} pairs and ways to share, each left out of the fit with its two models; worst "
        f"{' + '.join(worst.pair.models)} on {worst.pair.how}, {100 * worst.error:.0f} %. {measured.name}: SMs, memory "
        "and kernels' lengths are modelled, power and caches are not"
    )
    return Row(
        FIGURE, "speeds of pairs it was not fitted to, off by", WITHIN, 100 * mean(e.error for e in errors), "%", why
    )


def _table(errors: list[PairError]) -> Table:
    """Table of the SHOWN pairs with the largest errors, worst first."""

    def join(speeds: tuple[float, ...]) -> str:
        return ", ".join(f"{speed:.2f}" for speed in speeds)

    worst = sorted(errors, key=lambda pair: -pair.error)[:SHOWN]
    body = [
        (" + ".join(e.pair.models), e.pair.how, join(e.pair.speeds), join(e.speeds), f"{100 * e.error:.0f} %")
        for e in worst
    ]
    header = ("models", "how", "measured", "predicted", "off by")
    return Table(f"{FIGURE}: the {len(body)} it is farthest from, of {len(errors)}", header, tuple(body))


def _picture(out: Path, errors: list[PairError]) -> Figure:
    """Draw predicted over measured speeds, in one colour for free streams and one for cuts of the GPU."""
    dots = []
    for name, colour, on_streams in (("streams", COLOURS["streams"], True), ("cuts", COLOURS["abreast"], False)):
        # A cut names its two shares, as in "84+48"; free streams have no "+".
        pairs = [error for error in errors if ("+" not in error.pair.how) is on_streams]
        measured = [speed for error in pairs for speed in error.pair.speeds]
        dots.append(Curve(measured, [speed for error in pairs for speed in error.speeds], name, colour, "o", ""))
    x, y = (Axis(label=text, low=0, high=1.1) for text in ("measured on an H200", "predicted, not fitted to it"))
    panel = Panel(
        [*dots, Curve([0, 1.1], [0, 1.1], dash=DASHED, width=1)], "speed of each of a pair over that alone", x, y
    )
    title = "What two models do to each other: measured and predicted"
    return pictures.picture(out, "model-of-pairs", title, [panel], size=(6.2, 5.4))


DECISIONS = "decisions"
WANTED_US = 30.0  # goal for one decision: about an eighth of a segment of 0.25 ms, so that decisions hide behind it
SECONDS = 0.1  # simulated time: thousands of decisions, enough for a median


@dataclass(frozen=True)
class _Timed(Abreast):
    """``abreast`` that records the processor time of every decision."""

    took_ns: list[int] = field(default_factory=list)

    def decide(self, view: View) -> Start | None:
        began = time.thread_time_ns()
        start = super().decide(view)
        self.took_ns.append(time.thread_time_ns() - began)
        return start


def decisions() -> Exhibit:
    """Measure the processor time of a decision of ``abreast`` under two loads."""
    loads = {
        "four models without end": [endless(model) for model in list(FIVE)[:4]],
        "five models at a load of .8": [at_random(model, 0.8 / len(FIVE), times) for model, times in FIVE.items()],
    }
    return Exhibit(tuple([_decision_row(name, streams) for name, streams in loads.items()]))


def _decision_row(name: str, streams: list[dict[str, object]]) -> Row:
    """Row with the median processor time of a decision while *streams* are simulated, beside the goal."""
    case = case_of(streams, SECONDS)
    timed_policy = _Timed(case.setting_of(Abreast))
    serve(case, timed_policy, "weave", 1)
    took_us = sorted(took_ns / 1e3 for took_ns in timed_policy.took_ns)
    why = f"median of {len(took_us)}, on this machine, in Python; mean {mean(took_us):.0f}, one in 100 takes more than "
    return Row(DECISIONS, name, WANTED_US, median(took_us), " us", f"{why}{took_us[len(took_us) * 99 // 100]:.0f}")

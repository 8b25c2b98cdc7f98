"""Measured now: the accuracy of the recorded configurations on the held-out images that ship with weft.

These are some of the validation images, so a score must agree with the recorded one within the sampling error of so few
images. It would not if a configuration were recorded wrongly, or if a kernel rounded differently.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.models.classifiers import model_path, validation
from weft.reports.exhibits import RULE, Axis, Curve, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table, Tick
from weft_papers.libnumber.lab import (
    COLOURS,
    LABELS,
    MARGINS,
    OURS,
    REPAIRED,
    RISTRETTO,
    STRIPES,
    TITLES,
    by_title,
    percent,
)
from weft_papers.libnumber.recorded import NetRecord, ScoredRun, SearchRecord
from weft_tune.numbers.configuration import Configuration
from weft_tune.quantised.evaluator import OnnxEvaluator

FIGURE = "checked now"
METHODS = (OURS, RISTRETTO, STRIPES)
DEVIATIONS = 4.0
"""The number of standard deviations by which a score on fewer images may differ from the recorded one."""


@dataclass(frozen=True, slots=True)
class Check:
    """One recorded configuration and its score on this machine."""

    net: NetRecord
    run: ScoredRun | None
    """The recorded run; None for float32."""
    score: float
    images: int

    @property
    def recorded(self) -> float:
        """The recorded accuracy on all validation images."""
        return self.run.validation if self.run else self.net.validation

    @property
    def name(self) -> str:
        if self.run is None:
            return "float32"
        return f"{LABELS[self.run.method.removesuffix(REPAIRED)]}, {percent(self.run.margin)}"

    @property
    def tolerance(self) -> float:
        """The largest difference from the recorded accuracy that counts as agreement, by the binomial distribution."""
        # The floor, a variance of 1e-4, keeps a recorded accuracy of 100 % from having no tolerance at all.
        deviation = math.sqrt(max(1e-4, self.recorded * (1 - self.recorded)) / self.images)
        return DEVIATIONS * deviation

    @property
    def agrees(self) -> bool:
        return abs(self.score - self.recorded) <= self.tolerance


def same_model(net: NetRecord) -> bool:
    """Whether the project's model is still the one that was tuned."""
    return hashlib.sha256(model_path(net.name).read_bytes()).hexdigest() == net.sha256


def score_again(record: SearchRecord, images: int | None = None, tick: Tick | None = None) -> list[Check]:
    """Score every network in float32 and under the configurations of METHODS, on its first *images* images (None: all).

    Networks whose model file is not the one that was tuned are left out.
    """
    checked: list[Check] = []
    nets = [record.nets[name] for name in by_title(record.nets) if same_model(record.nets[name])]
    for number, net in enumerate(nets, 1):
        checked += _check_net(net, images)
        if tick:
            tick(number, len(nets))
    return checked


def _check_net(net: NetRecord, images: int | None) -> list[Check]:
    """Score one network in float32 and under its recorded configurations."""
    held_out = validation(net.name)
    inputs, labels = held_out.inputs()[:images], held_out.label[:images]
    runs = [run for margin in MARGINS for method in METHODS if (run := net.passing(method, margin))]
    with OnnxEvaluator(model_path(net.name), {"image": inputs}, labels, net.network) as evaluator:
        scores = [
            evaluator.evaluate(run.configuration if run else Configuration({}), "full").value for run in (None, *runs)
        ]
    return [Check(net, run, score, len(labels)) for run, score in zip((None, *runs), scores, strict=True)]


def checks(out: Path, checked: Sequence[Check]) -> Exhibit:
    """Report the checks: the share that agrees with the record, a table and a picture; empty without checks."""
    if not checked:
        return Exhibit()
    agreeing = sum(check.agrees for check in checked)
    furthest = max(checked, key=lambda check: abs(check.score - check.recorded) / check.tolerance)
    row = Row(
        FIGURE, "recorded configurations whose score is met on the shipped images", None, 100 * agreeing / len(checked),
        "%",
        f"scored now, {agreeing} of {len(checked)} within {DEVIATIONS:g} standard deviations; furthest: "
        f"{TITLES[furthest.net.name]}, {furthest.name}: {100 * furthest.score:.2f} % on {furthest.images} images, "
        f"{100 * furthest.recorded:.2f} % on all",
    )  # fmt: skip
    return Exhibit((row,), (_table(checked),), (_picture(out, checked),))


def _table(checked: Sequence[Check]) -> Table:
    """Table of all checks: scores of now beside the recorded ones."""
    body = tuple(
        (
            TITLES[check.net.name], check.name, f"{100 * check.score:.2f}", str(check.images),
            f"{100 * check.recorded:.2f}",
            f"{100 * (check.run.test if check.run else check.net.test):.2f}", "yes" if check.agrees else "no",
        )
        for check in checked
    )  # fmt: skip
    header = ("network", "formats", "now %", "images", "recorded validation %", "recorded test %", "agrees")
    return Table(f"{FIGURE}: recorded configurations on the images that ship with weft", header, body)


def _picture(out: Path, checked: Sequence[Check]) -> Figure:
    """Draw the scores of now over the recorded ones, with the tolerance as error bars."""
    low = min(min(check.score, check.recorded) for check in checked)
    marks = [Curve([100 * low, 100], [100 * low, 100], None, RULE, width=1)]
    for kind in dict.fromkeys(_kind(check) for check in checked):
        kind_checks = [check for check in checked if _kind(check) == kind]
        marks.append(
            Curve(
                [100 * check.recorded for check in kind_checks], [100 * check.score for check in kind_checks],
                LABELS.get(kind, "float32"), COLOURS.get(kind, COLOURS["FLOAT 32"]), "o", "", size=4,
                errors=[100 * check.tolerance for check in kind_checks],
            )
        )  # fmt: skip
    x, y = Axis(label="recorded, all validation images (%)"), Axis(label="now, shipped images (%)")
    title = "Recorded configurations, scored again"
    return pictures.picture(out, "checked", title, [Panel(marks, x=x, y=y)], size=(6.2, 4.6), legend_columns=4)


def _kind(check: Check) -> str:
    """The method of a check, or "FLOAT 32"."""
    return check.run.method.removesuffix(REPAIRED) if check.run else "FLOAT 32"

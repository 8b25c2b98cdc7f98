"""What ``weft tune`` shows: where the search is, then formats by layer, other methods, and in words."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from weft.cli.common import add_row, console, number, plain_table

if TYPE_CHECKING:
    from weft.numbers.configuration import Configuration
    from weft.reports.tuning_result import TuningResult
    from weft.tuning.network import Network, Role, Target
    from weft.tuning.trials import Progress

PHASES = {1: "coarse search", 2: "fine-tuning", 3: "recovery", 4: "fine-tuning"}
LAYERS = ("layer", "weights", "format", "kB before", "kB", "inputs", "format", "kB before", "kB")
DOUBTFUL_BITS = 4
"""Where all objects are this narrow, some score should have changed on the way."""
METHODS = ("method", "weights kB", "times smaller", "activations kB", "all kB", "times smaller", "score", "evaluated")


class ProgressLine:
    """One line on the terminal that says how far a search is; silent elsewhere."""

    def __init__(self, what: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._what, self._task = what, self._bar.add_task(what, total=None)
        self._first: float | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, progress: Progress) -> None:
        """The phase, how many configurations were tried, and the best so far as a part of the first."""
        if self._first is None and progress.objective < float("inf"):
            self._first = progress.objective
        share = f"{progress.objective / self._first:.1%} of the start, " if self._first else ""
        self._tell(
            f"phase {progress.phase}, {PHASES[progress.phase]}, {progress.iteration}: {share}"
            f"score {progress.score:.4f}, needs {progress.threshold:.4f}"
        )

    def count(self, done: int, score: float) -> None:
        """For methods without phases."""
        self._tell(f"configuration {done}, score {score:.4f}")

    def _tell(self, text: str) -> None:
        self._bar.update(self._task, description=f"{self._what}: {text}")


def print_result(result: TuningResult, written: Mapping[str, Path]) -> None:
    """Tables, then sentences, then files."""
    _print_layers(result)
    if result.others:
        console.print()
        _print_methods(result)
    console.print()
    for sentence in sentences(result):
        _line(sentence)
    console.print()
    width = max(map(len, written), default=0)
    for what, path in written.items():
        _line(f"{what:{width}}  {path}  ({path.stat().st_size / 1e3:,.1f} kB)")


def _print_layers(result: TuningResult) -> None:
    tuning = result.tuning
    title = f"{tuning.network.name}: formats that keep {1 - tuning.margin:.4g} of the score, on {tuning.platform}"
    table = plain_table(title, LAYERS)
    for target in tuning.network.targets:
        cells = [_object(target, role, tuning.configuration) for role in ("weight", "input")]
        add_row(table, target.name, *cells[0], *cells[1])
    whole = [_total(tuning.network.weights, tuning.weight_bits), _total(tuning.network.inputs, tuning.activation_bits)]
    add_row(table, "all", *whole[0], *whole[1], style="bold")
    console.print(table)


def _object(target: Target, role: Role, configuration: Configuration) -> tuple[str, ...]:
    from weft.numbers.spelling import spell

    forms = list(dict.fromkeys(spell(configuration[name]) for name in target.objects(role)))
    bits = max(configuration[name].bits for name in target.objects(role))
    return (f"{target.size(role):,}", ", ".join(forms), _kb(target.size(role) * 32), _kb(target.size(role) * bits))


def _total(values: int, bits: int) -> tuple[str, ...]:
    return f"{values:,}", "", _kb(values * 32), _kb(bits)


def _print_methods(result: TuningResult) -> None:
    tuning = result.tuning
    plain = 32 * tuning.network.weights, 32 * tuning.network.inputs
    table = plain_table("other methods, on the same samples", METHODS)
    rows: Sequence[tuple[str, int, int, float, bool, int]] = [
        ("FLOAT 32", *plain, tuning.base["full"], True, 1),
        ("weft", tuning.weight_bits, tuning.activation_bits, tuning.score, True, tuning.iterations),
        *((o.method, o.weight_bits, o.activation_bits, o.score, o.feasible, o.evaluations) for o in result.others),
    ]
    for method, weights, activations, score, feasible, evaluated in rows:
        add_row(
            table,
            method,
            _kb(weights),
            number(plain[0] / weights if weights else None, 2),
            _kb(activations),
            _kb(weights + activations),
            number(sum(plain) / (weights + activations), 2),
            f"{score:.4f}" + ("" if feasible else " too low"),
            str(evaluated),
            style="bold" if method == "weft" else "",
        )
    console.print(table)


def sentences(result: TuningResult) -> list[str]:
    """What came out, in words."""
    tuning, asked = result.tuning, result.tuning.thresholds["full"]
    lines = [
        f"score: {tuning.score:.4f} after {tuning.base['full']:.4f} before, at least {asked:.4f} asked{_test(result)}",
        f"size: weights {_kb(32 * tuning.network.weights)} kB -> {_kb(tuning.weight_bits)} kB, "
        f"{tuning.weight_reduction:.1f} times smaller; with one sample's activations {tuning.reduction:.1f} times",
        *_priced(result),
        f"search: {tuning.iterations} configurations, {_samples(result)}{result.seconds:.1f} s"
        + (f"; {tuning.reused} scores were known from before" if tuning.reused else ""),
        *_doubts(result),
    ]
    if result.exported_score is not None:
        short = "" if result.exported_score >= asked else ": less than asked; try --export simulated"
        lines.append(f"the written model scores {result.exported_score:.4f} in ONNX Runtime{short}")
    if failures := result.failures:
        lines.append(f"failed: {len(failures)} configurations, left out; the first: {failures[0].failure}")
    return lines


def _samples(result: TuningResult) -> str:
    """Nothing where nobody counted them."""
    count = sum(result.tuning.samples.values())
    return f"{count:,} samples, " if count else ""


def _doubts(result: TuningResult) -> list[str]:
    """What looks like a mistake in what was measured."""
    tuning = result.tuning
    scores = {trial.score for trial in tuning.trials if trial.subset == "full" and not trial.failure}
    if tuning.base["full"] == 0:
        return ["doubtful: the network scored 0 before anything was rounded; check the samples and what scores them"]
    narrow = all(tuning.configuration[name].bits <= DOUBTFUL_BITS for name in _objects(tuning.network))
    if scores == {tuning.base["full"]} and narrow:
        return ["doubtful: no format changed the score; check that what scores the network uses the formats"]
    return []


def _objects(network: Network) -> list[str]:
    from weft.tuning.network import ROLES

    return [name for target in network.targets for role in ROLES for name in target.objects(role)]


def _test(result: TuningResult) -> str:
    if result.test_score is None or result.test_base is None:
        return ""
    kept = result.test_score / result.test_base if result.test_base else 0.0
    return f"; on the test set {result.test_score:.4f} after {result.test_base:.4f} ({kept:.2%} of it)"


def _priced(result: TuningResult) -> list[str]:
    from weft.tuning.objective import DEFAULT

    tuning, lines = result.tuning, []
    if result.objective != DEFAULT:
        lines.append(f"objective: {tuning.objective:.6g} after {tuning.base_objective:.6g} before ({result.objective})")
    if result.latency_s is not None:
        before_s, after_s = result.latency_s
        lines.append(f"latency: {1e3 * after_s:.4g} ms after {1e3 * before_s:.4g} ms before, alone on {result.device}")
    if result.speedups:
        told = ", ".join(f"{name} {value:.2f}" for name, value in result.speedups.items())
        lines.append(f"speed-up of these layers, estimated: {told}")
    return lines


def _kb(bits: float) -> str:
    return f"{bits / 8e3:,.2f}"


def _line(text: str) -> None:
    console.print(text, highlight=False, markup=False)

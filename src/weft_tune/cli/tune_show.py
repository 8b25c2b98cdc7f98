"""What ``weft tune`` shows: formats by layer, other methods, what came out in words, and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.cli.printing import console, print_table, say, told

if TYPE_CHECKING:
    from weft_tune.network import Network
    from weft_tune.result import TuningResult

DOUBTFUL_BITS = 4
"""Where all objects are this narrow, some score should have changed on the way."""


def print_result(result: TuningResult) -> None:
    """Print what came out: tables, then sentences, then the files."""
    from weft_tune.pages.tables import tables

    for table in tables(result):
        print_table(table)
        console.print()
    for sentence in sentences(result):
        say(sentence)
    console.print()
    width = max(map(len, result.files), default=0)
    for what, path in result.files.items():
        say(f"{what:{width}}  {path}  ({path.stat().st_size / 1e3:,.1f} kB)")


def write_pictures(result: TuningResult, figure: str | None, html: str | None) -> None:
    """Draw the search and write the page, where they were asked for."""
    if figure is not None:
        from weft_tune.pages.picture import draw_search

        draw_search(result.tuning, figure)
        told("figure", figure)
    if html is not None:
        from weft_tune.pages.page import write_tuning_page

        write_tuning_page(html, result, sentences(result))
        told("page", html)


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
    lines += _run_times(result)
    if failures := result.failures:
        lines.append(f"failed: {len(failures)} configurations, left out; the first: {failures[0].failure}")
    return lines


def _run_times(result: TuningResult) -> list[str]:
    """How fast the written model is in ONNX Runtime, and that small is not fast."""
    if result.run_s is None:
        return []
    before_s, after_s = result.run_s
    took = f"in ONNX Runtime here: {1e3 * after_s:.3g} ms a sample after {1e3 * before_s:.3g} ms before"
    if after_s > before_s:
        return [f"{took}, {after_s / before_s:.1f} times slower; the smallest file is not the fastest"]
    return [f"{took}, {before_s / after_s:.1f} times faster"]


def _samples(result: TuningResult) -> str:
    """How many samples were scored, in words; nothing where nobody counted them."""
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
    from weft_tune.network import ROLES

    return [name for target in network.targets for role in ROLES for name in target.objects(role)]


def _test(result: TuningResult) -> str:
    if result.test_score is None or result.test_base is None:
        return ""
    kept = result.test_score / result.test_base if result.test_base else 0.0
    return f"; on the test set {result.test_score:.4f} after {result.test_base:.4f} ({kept:.2%} of it)"


def _priced(result: TuningResult) -> list[str]:
    from weft_tune.objective import DEFAULT

    tuning, lines = result.tuning, []
    if result.objective != DEFAULT:
        lines.append(f"objective: {tuning.objective:.6g} after {tuning.base_objective:.6g} before ({result.objective})")
    if result.latency_s is not None:
        before_s, after_s = result.latency_s
        lines.append(f"latency: {1e3 * after_s:.4g} ms after {1e3 * before_s:.4g} ms before, alone on {result.device}")
    if result.speedups:
        listed = ", ".join(f"{name} {value:.2f}" for name, value in result.speedups.items())
        lines.append(f"speed-up of these layers, estimated: {listed}")
    return lines


def _kb(bits: float) -> str:
    return f"{bits / 8e3:,.2f}"

"""The output of ``weft tune``, with and without a target: tables, sentences, files and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.printing import add_row, console, counted, number, plain_table, print_table, say, say_written

if TYPE_CHECKING:
    from weft_tune.result import TuningResult
    from weft_tune.runtime_target.fastest import RuntimeTuning

DOUBTFUL_BITS = 4
"""Where all objects are this narrow, some score should have changed on the way."""
LAYERS = ("layer", "format", "why not int8", "ms before", "ms, all int8", "ms after")
"""Columns of the table of a target's layers."""


def print_result(result: TuningResult) -> None:
    """Print a search for the smallest formats: tables, then sentences, then the files."""
    from weft_tune.pages.page import tables

    for table in tables(result):
        print_table(table)
        console.print()
    _print_rest(sentences(result), result.files)


def print_fastest(result: RuntimeTuning) -> None:
    """Print a search for the fastest formats: a table, then sentences, then the files."""
    _print_layers(result)
    console.print()
    _print_rest(fastest_sentences(result), result.files)


def _print_rest(lines: Sequence[str], files: Mapping[str, Path]) -> None:
    for line in lines:
        say(line)
    console.print()
    width = max(map(len, files), default=0)
    for kind, path in files.items():
        say(f"{kind:{width}}  {path}  ({path.stat().st_size / 1e3:,.1f} kB)")


def write_pictures(result: TuningResult, figure: str | None, html: str | None) -> None:
    """Draw the search and write the page, where the options name a file for them."""
    if figure is not None:
        from weft_tune.pages.picture import draw_search

        draw_search(result.tuning, figure)
        say_written("figure", figure)
    if html is not None:
        from weft_tune.pages.page import write_tuning_page

        write_tuning_page(html, result, sentences(result))
        say_written("page", html)


def sentences(result: TuningResult) -> list[str]:
    """The result of a search for the smallest formats, in sentences."""
    from weft_tune.pages.page import kilobytes

    tuning, threshold = result.tuning, result.tuning.thresholds["full"]
    lines = [
        f"score: {tuning.score:.4f} after {tuning.base['full']:.4f} before, at least {threshold:.4f} asked"
        f"{_test(result)}{_kept_share(result)}",
        f"size: weights {kilobytes(32 * tuning.network.weights)} kB -> {kilobytes(tuning.weight_bits)} kB, "
        f"{tuning.weight_reduction:.1f} times smaller; with one sample's activations {tuning.reduction:.1f} times",
        *_priced(result),
        f"search: {tuning.iterations} configurations, {_samples(result)}{result.seconds:.1f} s"
        + (f"; {tuning.reused} scores were known from before" if tuning.reused else ""),
        *_doubts(result),
    ]
    if result.exported_score is not None:
        short = "" if result.exported_score >= threshold else ": less than asked; try --export simulated"
        lines.append(f"the written model scores {result.exported_score:.4f} in ONNX Runtime{short}")
    lines += _run_times(result)
    if failures := result.failures:
        lines.append(f"failed: {len(failures)} configurations, left out; the first: {failures[0].failure}")
    return lines


def _run_times(result: TuningResult) -> list[str]:
    """The speed of the written model in ONNX Runtime; the smallest file is often slower."""
    if result.run_s is None:
        return []
    before_s, after_s = result.run_s
    took = f"in ONNX Runtime here: {1e3 * after_s:.3g} ms a sample after {1e3 * before_s:.3g} ms before"
    if after_s > before_s:
        return [f"{took}, {after_s / before_s:.1f} times slower; the smallest file is not the fastest"]
    return [f"{took}, {before_s / after_s:.1f} times faster"]


def _samples(result: TuningResult) -> str:
    """The number of samples that were scored, in words; nothing where the evaluator does not count them."""
    count = sum(result.tuning.samples.values())
    return f"{count:,} samples, " if count else ""


def _doubts(result: TuningResult) -> list[str]:
    """Results that look like a mistake in the measurement."""
    tuning = result.tuning
    scores = {trial.score for trial in tuning.trials if trial.subset == "full" and not trial.failure}
    if tuning.base["full"] == 0:
        return ["doubtful: the network scored 0 before anything was rounded; check the samples and what scores them"]
    narrow = all(tuning.configuration[name].bits <= DOUBTFUL_BITS for name in tuning.network.objects)
    if scores == {tuning.base["full"]} and narrow:
        return ["doubtful: no format changed the score; check that what scores the network uses the formats"]
    return []


def _test(result: TuningResult | RuntimeTuning) -> str:
    if result.test_score is None or result.test_base is None:
        return ""
    return f"; on the test set {result.test_score:.4f} after {result.test_base:.4f}"


def _kept_share(result: TuningResult) -> str:
    """The part of the score on the test set that is left."""
    if result.test_score is None or result.test_base is None:
        return ""
    return f" ({result.test_score / result.test_base if result.test_base else 0.0:.2%} of it)"


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


def _print_layers(result: RuntimeTuning) -> None:
    title = f"{result.network}: fastest in {result.target}, keeping {1 - result.margin:.4g} of the score"
    table = plain_table(title, LAYERS, left=3)
    for layer in result.layers:
        times = (number(time, scale=1e3) for time in (layer.before_s, layer.int8_s, layer.after_s))
        add_row(table, layer.name, layer.format, layer.why, *times)
    whole = (number(result.before.median_s, scale=1e3), "", number(result.after.median_s, scale=1e3))
    add_row(table, "the whole model", result.kind, "", *whole, style="bold")
    console.print(table)


def fastest_sentences(result: RuntimeTuning) -> list[str]:
    """The result of a search for the fastest formats, in sentences."""
    before_ms, after_ms = 1e3 * result.before.median_s, 1e3 * result.after.median_s
    return [
        _verdict(result, before_ms, after_ms),
        f"score: {result.score:.4f} after {result.base:.4f} before, at least {result.threshold:.4f} asked "
        f"({result.metric}{_test(result)})",
        f"size: {result.bytes_after / 1e3:,.1f} kB after {result.bytes_before / 1e3:,.1f} kB before; the smallest file "
        "is not the fastest: weft tune without --target makes smaller ones, for room and not for speed",
        f"measured: {counted(result.rows, 'sample')} a run, one thread, medians of {len(result.before.seconds)} turns "
        f"that the models took one after another, on {result.processor}",
        f"search: {len(result.tried)} variants, {result.seconds:.1f} s",
    ]


def _verdict(result: RuntimeTuning, before_ms: float, after_ms: float) -> str:
    if not result.changed:
        return f"speed: nothing was faster than the model as it is ({before_ms:.3f} ms), so that is the result"
    inside = sum(layer.format == result.kind for layer in result.layers)
    return (
        f"speed: {after_ms:.3f} ms after {before_ms:.3f} ms before, {result.speedup:.2f} times as fast, with {inside} "
        f"of {counted(len(result.layers), 'layer')} in {result.kind}"
    )

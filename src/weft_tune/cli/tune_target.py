"""What ``weft tune --target`` shows: times by layer, before and after, and what came out in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.cli.printing import add_row, console, counted, number, plain_table, say

if TYPE_CHECKING:
    from weft_tune.runtime_target.result import RuntimeTuning

LAYERS = ("layer", "format", "why not int8", "ms before", "ms, all int8", "ms after")


def print_fastest(result: RuntimeTuning) -> None:
    """Print what came out: a table, then sentences, then the files."""
    _print_layers(result)
    console.print()
    for sentence in fastest_sentences(result):
        say(sentence)
    console.print()
    width = max(map(len, result.files), default=0)
    for what, path in result.files.items():
        say(f"{what:{width}}  {path}  ({path.stat().st_size / 1e3:,.1f} kB)")


def _print_layers(result: RuntimeTuning) -> None:
    title = f"{result.network}: fastest in {result.target}, keeping {1 - result.margin:.4g} of the score"
    table = plain_table(title, LAYERS, left=3)
    for each in result.layers:
        times = (number(time, scale=1e3) for time in (each.before_s, each.int8_s, each.after_s))
        add_row(table, each.name, each.format, each.why, *times)
    whole = (number(result.before.median_s, scale=1e3), "", number(result.after.median_s, scale=1e3))
    add_row(table, "the whole model", result.kind, "", *whole, style="bold")
    console.print(table)


def fastest_sentences(result: RuntimeTuning) -> list[str]:
    """What came out, in words."""
    before_ms, after_ms = 1e3 * result.before.median_s, 1e3 * result.after.median_s
    lines = [_verdict(result, before_ms, after_ms)]
    lines += [
        f"score: {result.score:.4f} after {result.base:.4f} before, at least {result.threshold:.4f} asked "
        f"({result.metric}{_test(result)})",
        _size(result),
        f"measured: {counted(result.rows, 'sample')} a run, one thread, medians of {len(result.before.seconds)} turns "
        f"that the models took one after another, on {result.processor}",
        f"search: {len(result.tried)} variants, {result.seconds:.1f} s",
    ]
    return lines


def _verdict(result: RuntimeTuning, before_ms: float, after_ms: float) -> str:
    if not result.changed:
        return f"speed: nothing was faster than the model as it is ({before_ms:.3f} ms), so that is the result"
    inside = sum(each.format == result.kind for each in result.layers)
    return (
        f"speed: {after_ms:.3f} ms after {before_ms:.3f} ms before, {result.speedup:.2f} times as fast, with {inside} "
        f"of {counted(len(result.layers), 'layer')} in {result.kind}"
    )


def _size(result: RuntimeTuning) -> str:
    """How large the file is, and that this was not the aim."""
    return (
        f"size: {result.bytes_after / 1e3:,.1f} kB after {result.bytes_before / 1e3:,.1f} kB before; the smallest file "
        "is not the fastest: weft tune without --target makes smaller ones, for room and not for speed"
    )


def _test(result: RuntimeTuning) -> str:
    if result.test_score is None or result.test_base is None:
        return ""
    return f"; on the test set {result.test_score:.4f} after {result.test_base:.4f}"

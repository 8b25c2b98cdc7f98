"""What ``weft stitch`` shows: ways to run the models side by side, layers, what is shared, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.cli.printing import add_row, console, number, plain_table, say

if TYPE_CHECKING:
    from weft_stitch.bodies.whole_run import BodyStitching
    from weft_stitch.summary import LayerRow, Summary
    from weft_stitch.whole_run import Stitching

LAYERS = ("layer", "form", "shared in", "shared out", "MMACs", "weights kB", "of separate", "launches", "predicted ms")

SPARE = ("tables MB", "launches", "shared in", "predicted ms", "activations MB", "MMACs", "shared out", "of separate")
"""Columns that are left out where there is no room for them, the first first."""
LONG_NAME = 40
"""First cells longer than this are broken into lines."""
GAP = 2


def print_stitching(made: Stitching, *, layers: bool) -> None:
    """Print what came out: tables, then sentences."""
    from weft_stitch.pages.report import sentences
    from weft_stitch.pages.tables import ways_table

    ways = ways_table(made)
    styles = ["bold" if row.best else "" for row in ways.rows]
    _print_table(ways.title, ways.columns, [row.cells for row in ways.rows], styles)
    for each in made.summaries:
        for form, why in each.impossible.items():
            say(f"no {form}: {why}")
    if layers:
        for place, each in enumerate(made.summaries):
            _print_layers(each, f"group {place}, " if len(made.groups) > 1 else "")
            _print_spaces(each)
    console.print()
    for sentence in sentences(made):
        say(sentence)
    for net in made.family.nets:
        if net.stored != "float32":
            say(f"{net.name} is {net.stored}: it is read, computed and written in float32")
    if made.difference is not None:
        told = f"largest difference to the models: {made.difference.relative:.1e} of an output's largest number"
        if made.difference.coarse:
            told += f", {made.difference.coarse:.1e} to files in half precision or tuned ones as they run by themselves"
        say(told)


def print_body(made: BodyStitching, *, layers: bool) -> None:
    """Print what came out of models that share whole weights."""
    from weft_stitch.pages.body import STEPS, WAYS, body_sentences, step_rows, way_rows

    _print_table(f"{len(made.names)} models as one body", WAYS, way_rows(made), ["", "bold"])
    if layers:
        console.print()
        _print_table("steps with weights", STEPS, step_rows(made), left=2)
    console.print()
    for sentence in body_sentences(made):
        say(sentence)


def _print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    styles: Sequence[str] = (),
    *,
    left: int = 1,
) -> None:
    """Print a table with as many of its columns as there is room for."""
    shown = list(range(len(columns)))
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    widths[0] = min(widths[0], LONG_NAME)
    for spare in SPARE:
        if sum(widths[place] + GAP for place in shown) - GAP <= console.width:
            break
        shown = [place for place in shown if columns[place] != spare or _only_time(columns, shown, place)]
    table = plain_table(title, [columns[place] for place in shown], left=left)
    table.columns[0].min_width = widths[0]
    for cells, style in zip(rows, styles or [""] * len(rows), strict=True):
        add_row(table, *(cells[place] for place in shown), style=style)
    console.print(table)


def _only_time(columns: Sequence[str], shown: Sequence[int], place: int) -> bool:
    times = [each for each in shown if columns[each].endswith(" ms")]
    return times == [place]


def _print_layers(summary: Summary, where: str) -> None:
    console.print()
    _print_table(f"{where}layers, each with what follows it", LAYERS, [_layer(row) for row in summary.layers], left=2)
    tried = list(dict.fromkeys(form for row in summary.layers for form in row.seconds))
    if tried:
        console.print()
        rows = [(row.name, *(number(row.seconds.get(form), 1, scale=1e6) for form in tried)) for row in summary.layers]
        _print_table("layers alone, in us", ("layer", *tried), rows)


def _layer(row: LayerRow) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.form} in slabs" if row.slabs else row.form,
        "{} of {}".format(*row.shared_inputs),
        "{} of {}".format(*row.shared_outputs),
        number(row.macs, 2, scale=1e-6),
        number(row.weight_bytes, 1, scale=1e-3),
        number(row.weight_bytes / row.separate_weight_bytes, 3),
        str(row.launches),
        number(row.predicted_s, scale=1e3),
    )


def _print_spaces(summary: Summary) -> None:
    from weft_stitch.pages.report import percents

    console.print()
    columns = ("space", "channels of the models", "shared by all", "by some", "own")
    rows = []
    for row in summary.spaces:
        widths = str(row.widths[0]) if len(set(row.widths)) == 1 else ", ".join(map(str, row.widths))
        rows.append((row.name, widths, *(f"{each}%" for each in percents((row.by_all, row.by_some, row.own)))))
    _print_table("channels, by the value that carries them first", columns, rows, left=2)

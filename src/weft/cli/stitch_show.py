"""What ``weft stitch`` shows: ways to run the models side by side, layers, what is shared, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.cli.printing import add_row, console, counted, number, plain_table, say

if TYPE_CHECKING:
    from weft.stitching.summary import LayerRow, Summary, Way
    from weft.stitching.whole_run import Stitching

WAYS = (
    "", "MMACs", "weights MB", "of separate", "tables MB", "activations MB", "total MB", "launches", "predicted ms",
    "measured ms", "speed-up",
)  # fmt: skip
LAYERS = ("layer", "form", "shared in", "shared out", "MMACs", "weights kB", "of separate", "launches", "predicted ms")

SPARE = ("tables MB", "launches", "shared in", "predicted ms", "activations MB", "MMACs", "shared out", "of separate")
"""Columns that are left out where there is no room for them, the first first."""
LONG_NAME = 40
"""First cells longer than this are broken into lines."""
GAP = 2


def print_stitching(made: Stitching, *, layers: bool) -> None:
    """Print what came out: tables, then sentences."""
    from weft.reports.stitching import sentences

    _print_ways(made)
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


def _title(made: Stitching) -> str:
    family, options = made.family, made.options
    count = f"{family.tasks} models" if family.tasks > 1 else "1 model, which shares with none"
    same = len(set(family.batches)) == 1
    each = " each" * (family.tasks > 1)
    rows = f"{family.batches[0]}{each}" if same else ", ".join(map(str, family.batches))
    threads = counted(options.used_threads, "thread")
    by = f"ONNX Runtime, {threads}" if options.measures else f"{options.machine} as described"
    return f"{count}; rows: {rows}{', or any' * options.dynamic}; {by}"


def _print_ways(made: Stitching) -> None:
    groups, before = made.summaries, made.before
    timed = before.measured_s is not None
    rows = [(before, "one after another" if made.family.tasks > 1 else "as it is", "")]
    if len(groups) == 1:
        rows.append((groups[0].stitched, _label(groups[0]), "bold"))
        rows += [(way, _other(way, rows[0][1]), "") for way in groups[0].ways[2:]]
    else:
        rows += [(each.stitched, f"group {n}: {', '.join(each.models)}", "") for n, each in enumerate(groups)]
        rows.append((made.after, "all groups", "bold"))
    cells = [(label, *_numbers(way, before, timed, label.startswith("group "))) for way, label, _ in rows]
    _print_table(_title(made), WAYS, cells, [style for *_, style in rows], without=() if timed else ("measured ms",))


def _print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    styles: Sequence[str] = (),
    *,
    left: int = 1,
    without: Sequence[str] = (),
) -> None:
    """Print a table with as many of its columns as there is room for."""
    shown = [place for place, column in enumerate(columns) if column not in without]
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


def _label(summary: Summary) -> str:
    return f"stitched: {summary.form}{' in slabs' * summary.stitched.slabs}"


def _other(way: Way, alone: str) -> str:
    return way.name.replace("sequential", alone) + " in slabs" * way.slabs


def _numbers(way: Way, separate: Way, timed: bool, part: bool) -> tuple[str, ...]:
    """*part*: a way to run some of the models only, which is not compared with all of them."""
    ratio = "" if part else number(way.weight_bytes / separate.weight_bytes if separate.weight_bytes else None, 3)
    mine, theirs = (way.measured_s, separate.measured_s) if timed else (way.predicted_s, separate.predicted_s)
    gain = "" if part else number(theirs / mine if mine and theirs else None, 2)
    return (
        number(way.macs, 1, scale=1e-6),
        number(way.weight_bytes, scale=1e-6),
        ratio,
        number(way.table_bytes, scale=1e-6),
        number(way.activation_bytes, scale=1e-6),
        number(way.total_bytes, scale=1e-6),
        str(way.launches),
        number(way.predicted_s, 2, scale=1e3),
        number(way.measured_s, 2, scale=1e3),
        gain,
    )


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
    from weft.reports.stitching import percents

    console.print()
    columns = ("space", "channels of the models", "shared by all", "by some", "own")
    rows = []
    for row in summary.spaces:
        widths = str(row.widths[0]) if len(set(row.widths)) == 1 else ", ".join(map(str, row.widths))
        rows.append((row.name, widths, *(f"{each}%" for each in percents((row.by_all, row.by_some, row.own)))))
    _print_table("channels, by the value that carries them first", columns, rows, left=2)

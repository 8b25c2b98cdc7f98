"""What ``weft stitch`` shows: ways to run the models side by side, layers, what is shared, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.cli.common import add_row, console, number, plain_table

if TYPE_CHECKING:
    from weft.stitching.summary import LayerRow, Summary, Way

WAYS = ("", "MMACs", "weights MB", "of separate", "tables MB", "activations MB", "launches", "predicted ms")
LAYERS = ("layer", "form", "shared in", "shared out", "MMACs", "weights kB", "of separate", "launches", "predicted ms")


def print_summaries(groups: Sequence[Summary], title: str, *, layers: bool) -> None:
    """Tables, then sentences."""
    from weft.reports.stitching import sentences

    _print_ways(groups, title)
    for each in groups:
        for form, why in each.impossible.items():
            _line(f"no {form}: {why}")
    if layers:
        for place, each in enumerate(groups):
            _print_layers(each, f"group {place}, " if len(groups) > 1 else "")
            _print_spaces(each)
    console.print()
    for sentence in sentences(groups):
        _line(sentence)


def _print_ways(groups: Sequence[Summary], title: str) -> None:
    from weft.reports.stitching import totals

    whole = totals(groups)
    timed = whole["sequential"].measured_s is not None
    table = plain_table(title, (*WAYS, "measured ms", "speed-up") if timed else (*WAYS, "speed-up"))
    rows = [(whole["sequential"], "one after another", "")]
    if len(groups) == 1:
        rows.append((groups[0].stitched, _label(groups[0]), "bold"))
        rows += [(way, _other(way), "") for way in groups[0].ways[2:]]
    else:
        rows += [(each.stitched, f"group {n}: {', '.join(each.models)}", "") for n, each in enumerate(groups)]
        rows.append((whole["stitched"], "all groups", "bold"))
    for way, label, style in rows:
        add_row(table, label, *_numbers(way, whole["sequential"], timed, label.startswith("group ")), style=style)
    console.print(table)


def _label(summary: Summary) -> str:
    return f"stitched: {summary.form}{' in slabs' * summary.stitched.slabs}"


def _other(way: Way) -> str:
    return way.name.replace("sequential", "one after another") + " in slabs" * way.slabs


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
        str(way.launches),
        number(way.predicted_s, 2, scale=1e3),
        *((number(way.measured_s, 2, scale=1e3),) if timed else ()),
        gain,
    )


def _print_layers(summary: Summary, where: str) -> None:
    console.print()
    table = plain_table(f"{where}layers, each with what follows it", LAYERS, left=2)
    for row in summary.layers:
        add_row(table, *_layer(row))
    console.print(table)
    tried = list(dict.fromkeys(form for row in summary.layers for form in row.seconds))
    if tried:
        console.print()
        table = plain_table("layers alone, in us", ("layer", *tried))
        for row in summary.layers:
            add_row(table, row.name, *(number(row.seconds.get(form), 1, scale=1e6) for form in tried))
        console.print(table)


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
    console.print()
    columns = ("space", "channels of the models", "shared by all", "by some", "own")
    table = plain_table("channels, by the value that carries them first", columns, left=2)
    for row in summary.spaces:
        widths = str(row.widths[0]) if len(set(row.widths)) == 1 else ", ".join(map(str, row.widths))
        whole = sum(row.widths)
        add_row(table, row.name, widths, *(f"{each / whole:.0%}" for each in (row.by_all, row.by_some, row.own)))
    console.print(table)


def _line(text: str) -> None:
    console.print(text, highlight=False, markup=False)

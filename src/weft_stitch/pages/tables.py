"""Stitched models as tables: the ways to run them side by side, and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.reports.tables import ResultTable, TableRow, number
from weft_stitch.pages.report import sentences
from weft_stitch.summary import Summary, Way
from weft_stitch.whole_run import Stitching

if TYPE_CHECKING:
    from weft.reports.pictures import Figure

WAYS = (
    "", "MMACs", "weights MB", "of separate", "tables MB", "activations MB", "total MB", "launches", "predicted ms",
    "measured ms", "speed-up",
)  # fmt: skip


def tables(made: Stitching) -> tuple[ResultTable, ...]:
    """The ways to run the models, and where time and memory went."""
    return (ways_table(made)._replace(notes=tuple(sentences(made))),)


def figure(made: Stitching) -> Figure:
    """Time and weights of the ways to run the models."""
    from weft_stitch.pages.picture import ways_figure

    return ways_figure(title(made), [(label, way) for way, label, _ in labelled_ways(made)])


def title(made: Stitching) -> str:
    """What was stitched, for how many rows, and by what it was planned."""
    family, options = made.family, made.options
    count = f"{family.tasks} models" if family.tasks > 1 else "1 model, which shares with none"
    same = len(set(family.batches)) == 1
    each = " each" * (family.tasks > 1)
    rows = f"{family.batches[0]}{each}" if same else ", ".join(map(str, family.batches))
    threads = f"{options.used_threads} thread{'s' * (options.used_threads != 1)}"
    by = f"ONNX Runtime, {threads}" if options.measures else f"{options.machine} as described"
    return f"{count}; rows: {rows}{', or any' * options.dynamic}; {by}"


def ways_table(made: Stitching) -> ResultTable:
    """The ways to run the models side by side."""
    timed = made.before.measured_s is not None
    rows = [
        TableRow((label, *_numbers(way, made.before, timed, label.startswith("group "))), best)
        for way, label, best in labelled_ways(made)
    ]
    if timed:
        return ResultTable(title(made), WAYS, tuple(rows))
    left_out = WAYS.index("measured ms")
    kept = [place for place in range(len(WAYS)) if place != left_out]
    shown = tuple(row._replace(cells=tuple(row.cells[place] for place in kept)) for row in rows)
    return ResultTable(title(made), tuple(WAYS[place] for place in kept), shown)


def labelled_ways(made: Stitching) -> list[tuple[Way, str, bool]]:
    """Every way to run the models, what to call it, and whether it is what was made."""
    groups = made.summaries
    rows = [(made.before, "one after another" if made.family.tasks > 1 else "as it is", False)]
    if len(groups) == 1:
        rows.append((groups[0].stitched, _label(groups[0]), True))
        rows += [(way, _other(way, rows[0][1]), False) for way in groups[0].ways[2:]]
    else:
        rows += [(each.stitched, f"group {n}: {', '.join(each.models)}", False) for n, each in enumerate(groups)]
        rows.append((made.after, "all groups", True))
    return rows


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

"""A change of a placement as a table and in words."""

from __future__ import annotations

from weft.reports.tables import ResultTable, TableRow
from weft_cluster.placing.change import PlacementChange, WeightLoad


def loads_table(change: PlacementChange, most: int | None = None) -> ResultTable:
    """What is loaded where, in the order of being ready, up to *most* rows."""
    shown = change.loads[:most]
    left = len(change.loads) - len(shown)
    return ResultTable(
        "to load",
        ("model", "machine", "GB", "takes s", "ready s", "requests/s"),
        tuple(map(_row, shown)),
        left=2,
        notes=(f"and {left} more loads",) if left else (),
    )


def _row(load: WeightLoad) -> TableRow:
    times = (f"{load.seconds:.3g}", f"{load.ready_s:.3g}", f"{load.rate:.4g}")
    return TableRow((load.model, load.machine, f"{load.bytes / 1e9:.3g}", *times))


def change_in_words(change: PlacementChange) -> str:
    """What a change comes to."""
    if not change.loads:
        return f"nothing to load: {change.kept} models stay where they are, {len(change.drops)} may be dropped"
    return (
        f"{len(change.loads)} loads of {change.bytes / 1e9:.4g} GB are done after {change.seconds:.3g} s, before which "
        f"{change.waiting:.4g} requests arrive for them; {change.kept} models stay where they are, {len(change.drops)} "
        "may be dropped"
    )

"""Common to Fig. 6, 7 and 9: our exact form against its rivals, and the table of recorded rows."""

from __future__ import annotations

from collections.abc import Sequence

from weft_papers.base import Row, Table
from weft_papers.mts.lab import LABELS, RIVALS, TITLES
from weft_papers.mts.recorded import IN_GROUPS, CountSweep

OURS = "fused"


def title(sweep: CountSweep) -> str:
    return f"{TITLES.get(sweep.net, sweep.net)}, {sweep.dtype}"


def shape(groups: Sequence[Sequence[int]]) -> str:
    """How large the groups are."""
    return " + ".join(str(len(group)) for group in groups)


def listed(values: Sequence[float], digits: int = 1) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)


def ours_rows(figure: str, sweep: CountSweep) -> list[Row]:
    """The exact one-kernel form against the best of its rivals, over all numbers of tasks."""
    tasks = sweep.where(OURS, "streams")
    if not tasks:
        return []
    best = {count: sweep.fastest(RIVALS, count) for count in tasks}
    gains = [sweep.over(best[count], OURS, count) for count in tasks]
    shares = [
        100 * sweep.cost(OURS, count).weight_bytes / sweep.cost(best[count], count).weight_bytes for count in tasks
    ]
    rivals = ", ".join(
        f"{LABELS[way]} at {_all([count for count in tasks if best[count] == way])}"
        for way in dict.fromkeys(best.values())
    )
    rows = [
        Row(
            figure, f"ours (fused) over the fastest rival, {title(sweep)}, least", None, min(gains), "x",
            f"recorded at {_all(tasks)} tasks: {listed(gains, 2)}; the fastest: {rivals}",
        ),
        Row(
            figure, f"weights of ours over that rival's, {title(sweep)}, most tasks", None, shares[-1], "%",
            f"recorded: {listed(shares)} %; every weight is stored once, no block of zeros",
        ),
    ]  # fmt: skip
    if all(sweep.has("batch", count) for count in tasks):
        over = [sweep.over(OURS, "batch", count) for count in tasks]
        rows.append(
            Row(figure, f"ours (fused) over a plain batch through one net, {title(sweep)}, most", None, max(over), "x",
                f"recorded: {listed(over, 2)}; the batch is the physical reference: it has one net's weights only")
        )  # fmt: skip
    return rows


def _all(tasks: Sequence[int]) -> str:
    return "/".join(map(str, tasks))


def table(figure: str, sweep: CountSweep, note: str = "") -> Table:
    """Every recorded row, and the paper's form in groups."""
    body = []
    for tasks in sweep.tasks:
        for way in sweep.ways():
            if sweep.has(way, tasks):
                body.append(_cells(sweep, way, tasks))
    header = ("tasks", "way", "ms", "over sequential", "weights MB", "peak MB", "launches", "error", "groups")
    return Table(f"{figure}: {title(sweep)}{note} (recorded)", header, tuple(body))


def _cells(sweep: CountSweep, way: str, tasks: int) -> tuple[str, ...]:
    cost = sweep.cost(way, tasks)
    base = "sequential" if sweep.has("sequential", tasks) else "eager"
    gain = f"{sweep.over(base, way, tasks):.2f}" if sweep.has(base, tasks) else ""
    row = sweep.rows.get((way, tasks))
    launches = "" if row is None or row.launches is None else str(row.launches)
    error = "" if row is None or row.error is None else f"{row.error:.1e}"
    groups = shape(sweep.grouping(tasks).groups) if way == IN_GROUPS else ""
    return (
        str(tasks), LABELS[way], f"{1e3 * cost.seconds:.3f}", gain, f"{cost.weight_bytes / 1e6:.1f}",
        f"{cost.bytes / 1e6:.1f}", launches, error, groups,
    )  # fmt: skip

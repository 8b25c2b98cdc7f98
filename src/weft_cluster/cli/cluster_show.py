"""How a cluster stands, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.cli.printing import number

if TYPE_CHECKING:
    from weft.reports.tables import ResultTable


def servers_table(title: str, told: dict[str, Any]) -> ResultTable:
    """The servers behind a gate, and those that were (``Gate.told``)."""
    from weft.reports.tables import ResultTable, TableRow
    from weft_cluster.gates.metrics import ENDS

    rows = tuple(
        TableRow(
            (
                each["machine"],
                each["url"],
                "yes" if each["up"] else "no",
                str(each["in_flight"]),
                *(number(each[key], 2) for key in ("ahead_ms", "way_ms", "mean_ms")),
                *(str(each["ended"].get(end, 0)) for end in ENDS),
            ),
            each["up"],
        )
        for each in (*told["servers"], *told["past"])
    )
    columns = ("machine", "server", "up", "in flight", "ahead ms", "way ms", "mean ms", *ENDS)
    return ResultTable(title, columns, rows, 2)

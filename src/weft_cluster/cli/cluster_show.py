"""The state of a real cluster: fetched from a gate, and as a table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from weft.base.errors import InputError
from weft.cli.printing import number

if TYPE_CHECKING:
    from weft.reports.tables import ResultTable


def servers_table(title: str, status: dict[str, Any]) -> ResultTable:
    """Return a table of the servers behind a gate, past ones included (``Gate.status``)."""
    from weft.reports.tables import ResultTable, TableRow
    from weft_cluster.gates.metrics import ENDS

    rows = tuple(
        TableRow(
            (
                server["machine"],
                server["url"],
                "yes" if server["up"] else "no",
                str(server["in_flight"]),
                *(number(server[key], 2) for key in ("ahead_ms", "way_ms", "mean_ms")),
                *(str(server["ended"].get(end, 0)) for end in ENDS),
            ),
            server["up"],
        )
        for server in (*status["servers"], *status["past"])
    )
    columns = ("machine", "server", "up", "in flight", "ahead ms", "way ms", "mean ms", *ENDS)
    return ResultTable(title, columns, rows, 2)


def cluster_status(url: str, key: str | None = None) -> dict[str, Any]:
    """Fetch a gate's state of the cluster (``Gate.status``). InputError if no gate answers at *url*."""
    import asyncio

    return asyncio.run(_ask_gate(url, key))


async def _ask_gate(url: str, key: str | None) -> dict[str, Any]:
    from weft.http.client import Pool, call, parse_url, request_bytes, unreachable

    pool = Pool(parse_url(url), 1)
    try:
        await pool.open(1)
        answer = await call(pool, request_bytes(pool.target, "GET", "weft/cluster", key=key))
    except OSError as error:
        raise InputError(unreachable(url, error, "weft ray up")) from error
    finally:
        await pool.close()
    if answer.status != 200:
        raise InputError(f"{url}: GET weft/cluster has status {answer.status}; is it a gate, and its key right?")
    status: dict[str, Any] = json.loads(answer.body)
    return status

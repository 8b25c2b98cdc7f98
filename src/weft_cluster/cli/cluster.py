"""``weft cluster``: simulate a placement behind one or several routers; and show the state of a real cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.base.errors import InputError
from weft.cli import common
from weft.cli.command import Command
from weft.cli.common import how, split_names, what, with_shapes
from weft.cli.printing import number, print_table, progress_bar, write_result

if TYPE_CHECKING:
    from weft.reports.tables import ResultTable
    from weft_cluster.routing.simulate import ClusterRun


app = typer.Typer(help="Several machines: simulate them, or show their state.", no_args_is_help=True)


@app.command("simulate", cls=Command)
def simulate(
    placement: Annotated[str, typer.Argument(help="The folder of a placement (weft place -o).")],
    workload: Annotated[str, typer.Argument(help="The workload that was placed (TOML).")],
    machines: Annotated[str, what("--machines", "-m", metavar="FILE", help="The machines it was placed on (TOML).")],
    traffic: Annotated[
        str | None,
        what(
            "--traffic",
            metavar="FILE",
            help="A file of weft traffic fit: its daily wave, surges and cv, not its rates.",
        ),
    ] = None,
    rate: Annotated[float, what("--rate", help="Multiply all rates of the workload.")] = 1.0,
    slow: Annotated[
        str | None, what("--slow", metavar="SHARE:SPEED", help="Machines that are slower, as 0.1:0.5.")
    ] = None,
    fail: Annotated[
        str | None, what("--fail", metavar="SHARE:SECONDS", help="Machines that go down once, and for how long.")
    ] = None,
    routers: Annotated[
        str, how("--routers", help="slack, two-choices, two-in-flight, two-aged, random, round-robin: a,b,c.")
    ] = "slack,two-choices,random",
    gates: Annotated[int, how("--gates", help="How many routers there are.")] = 1,
    hop_ms: Annotated[float, how("--hop-ms", help="Network delay from a router to a machine.")] = 0.5,
    report_ms: Annotated[
        float, how("--report-ms", help="How often machines report their queued work to routers.")
    ] = 20.0,
    age_ms: Annotated[float, how("--age-ms", help="Age of a report when it reaches a router.")] = 0.0,
    policy: Annotated[
        str | None,
        how("--policy", "-p", show_default="as weft place predicts", help="Scheduling policy of the machines."),
    ] = None,
    seconds: Annotated[float, how("--seconds", help="How long to simulate.")] = 60.0,
    seed: Annotated[int, how("--seed", min=0, help="Seed of all random draws.")] = 0,
    shape: common.Shapes = None,
    json_file: common.JsonFile = None,
) -> None:
    """Simulate the machines of a placement behind a router, and count requests on time."""
    from weft.workloads.requests import read_workload
    from weft_cluster.placing.demand import demands_of
    from weft_cluster.placing.judging import POLICY
    from weft_cluster.placing.machines import read_machines
    from weft_cluster.placing.placement import read_placement
    from weft_cluster.routing.cluster import ClusterSetting, failures, placed, slowed
    from weft_cluster.routing.simulate import simulate_cluster
    from weft_cluster.routing.traffic import read_traffic

    available, streams = read_machines(machines), with_shapes(read_workload(workload), shape)
    cluster = placed(read_placement(placement), available.kinds, demands_of(streams, available))
    day = None if traffic is None else read_traffic(traffic)
    cluster = cluster.scaled(rate, None if day is None else day.cv)
    if slow is not None:
        cluster = slowed(cluster, *_parse_pair("--slow", slow), seed)
    warmup_s = min(1.0, seconds / 10)
    outages = () if fail is None else failures(cluster, *_parse_pair("--fail", fail), seconds, seed, from_s=warmup_s)
    names = split_names(routers, "--routers")
    settings = [
        ClusterSetting(
            router=name, policy=policy or POLICY, gates=gates, hop_s=hop_ms / 1e3, report_s=report_ms / 1e3,
            age_s=age_ms / 1e3, failures=outages, warmup_s=warmup_s,
        )
        for name in names
    ]  # fmt: skip
    runs = []
    with progress_bar("simulating", len(names)) as advance:
        for setting in settings:
            runs.append(simulate_cluster(cluster, setting, duration_s=seconds, day=day, seed=seed))
            advance()
    print_table(_runs_table(repr(cluster).removeprefix("Cluster(").removesuffix(")"), runs))
    write_result(json_file, _as_dict(runs))


@app.command("status", cls=Command)
def status(
    url: Annotated[str, typer.Argument(help="The address of a gate.")] = "http://127.0.0.1:8100",
    api_key: Annotated[
        str | None, how("--api-key", envvar="WEFT_API_KEY", help="The key to send as a bearer token.")
    ] = None,
    json_file: common.JsonFile = None,
) -> None:
    """Show the servers behind a gate (router): which take requests, their queued work, and how requests ended."""
    gate_status = cluster_status(url, api_key)
    print_table(servers_table(f"{url}: {gate_status['gate']}", gate_status))
    write_result(json_file, {"format": 1, **gate_status})


def _parse_pair(option: str, text: str) -> tuple[float, float]:
    """Parse an option's value SHARE:NUMBER; InputError unless the share is within 0 and 1 and the number above 0."""
    share_text, _, value_text = text.partition(":")
    try:
        share, value = float(share_text), float(value_text)
    except ValueError:
        raise InputError(f"{option} {text!r} is not of the form 0.1:0.5") from None
    if not (0 <= share <= 1 and 0 < value < float("inf")):
        raise InputError(f"{option} {text}: a share lies between 0 and 1, and what follows is above 0")
    return share, value


def _runs_table(title: str, runs: list[ClusterRun]) -> ResultTable:
    """A table with a line per router; those with the most requests on time are marked."""
    from weft.reports.tables import ResultTable, TableRow

    best = max(run.attainment for run in runs)
    rows = tuple(
        TableRow(
            (
                run.setting.router,
                f"{run.attainment:.3%}",
                *(f"{int(count.sum())}" for count in (run.late, run.refused, run.lost)),
                number(run.mean_latency_s, 2, scale=1e3),
                f"{run.busy.mean():.1%}",
                f"{run.busy.max():.1%}",
            ),
            run.attainment == best,
        )
        for run in runs
    )
    columns = ("router", "on time", "late", "refused", "lost", "mean ms", "busy", "busiest")
    return ResultTable(title, columns, rows)


def _as_dict(runs: list[ClusterRun]) -> dict[str, Any]:
    return {"format": 1, "duration_s": runs[0].duration_s, "runs": [run.as_dict() for run in runs]}


def servers_table(title: str, status: dict[str, Any]) -> ResultTable:
    """Make a table of the servers behind a gate, past ones included; *status*: as ``Gate.status`` returns."""
    from weft.reports.tables import ResultTable, TableRow
    from weft_cluster.gates.gate import ENDS

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
    return ResultTable(title, columns, rows, left=2)


def cluster_status(url: str, key: str | None = None) -> dict[str, Any]:
    """Fetch a gate's state of the cluster (``Gate.status``). InputError if no gate answers at *url*."""
    import asyncio

    return asyncio.run(_fetch_status(url, key))


async def _fetch_status(url: str, key: str | None) -> dict[str, Any]:
    """GET a gate's state over HTTP; *key*: API key. InputError if no gate answers."""
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

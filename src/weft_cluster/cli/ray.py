"""``weft ray``: a placement as a cluster on this machine."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.base.errors import InputError, unknown_name
from weft.cli import common
from weft.cli.command import Command
from weft.cli.common import how, what
from weft.cli.printing import print_table, progress_bar, say, write_result
from weft_cluster.cli.cluster import servers_table

if TYPE_CHECKING:
    from weft_cluster.ray.local import LocalCluster

app = typer.Typer(help="Several machines, run by Ray.", no_args_is_help=True)

BACK_S = 60.0
"""Seconds after the run for which the command waits until a lost machine is served again."""
KILL_AT = 0.4
"""Time at which a node is killed, as a share of the run."""


@app.callback()
def _group() -> None:
    """Several machines, run by Ray."""


@app.command("up", cls=Command)
def up(
    placement: Annotated[str, typer.Argument(help="The folder of a placement (weft place -o, weft plan --machines).")],
    models: Annotated[str, what("--models", metavar="FOLDER", help="Folder with NAME.onnx of each model.")] = "",
    nodes: Annotated[int, what("--nodes", min=1, max=64, help="Number of Ray nodes on this machine.")] = 3,
    gates: Annotated[
        int, how("--gates", min=1, max=64, help="Number of gates (routers), each on a node of its own.")
    ] = 1,
    port: Annotated[
        int, how("--port", min=0, max=65535, help="HTTP port of the first gate; its gRPC port is 1000 higher.")
    ] = 8100,
    router: Annotated[str, how("--router", help="The router, as in weft cluster simulate --routers.")] = "slack",
    lanes: Annotated[
        int | None, how("--lanes", min=1, show_default="as planned, or 1", help="Lanes of each server.")
    ] = None,
    bench: Annotated[
        str | None, what("--bench", metavar="WORKLOAD", help="Send a workload through a gate, report, and exit.")
    ] = None,
    kill: Annotated[
        str | None, what("--kill", metavar="MACHINE", help="Kill the node of this machine during the run.")
    ] = None,
    json_file: common.JsonFile = None,
) -> None:
    """Start a cluster on this machine: nodes of Ray, a server for each machine of a placement, and gates."""
    from weft_cluster.ray.local import LocalCluster

    if (kill or json_file) and bench is None:
        raise InputError("--kill and --json are for a run; name its workload with --bench")
    ports = {"port": port, "grpc_port": 0 if port == 0 else port + 1000}
    settings = {"placement": placement, "models": models, "gates": gates, "router": router, **ports}
    cluster = LocalCluster(nodes, **settings, server={} if lanes is None else {"lanes": lanes})
    if kill is not None and kill not in cluster.machines:
        raise InputError(unknown_name("machine", kill, cluster.machines))
    with progress_bar("starting"):
        cluster.__enter__()  # not ``with``: the bar ends when the cluster has started
    try:
        if bench is None:
            _print_until_signal(cluster)
        else:
            write_result(json_file, _run_bench(cluster, bench, kill))
    finally:
        cluster.stop()


def _print_until_signal(cluster: LocalCluster) -> None:
    """Print the gates and servers, and wait for Ctrl-C or SIGTERM."""
    for url in cluster.urls:
        say(f"gate      {url}")
    print_table(servers_table(f"{len(cluster.machines)} machines", cluster.status()))
    say("weft bench WORKLOAD --url with a gate's address drives it; Ctrl-C ends it", style="dim")
    ended = threading.Event()
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()


def _run_bench(cluster: LocalCluster, workload: str, kill: str | None) -> dict[str, Any]:
    """Send a workload through the first gate; return the result, the gate's state and the lost machine.

    kill: a machine whose node is killed during the run; None: none is.
    """
    from weft.cli.bench import print_load
    from weft.load import run_load
    from weft.workloads.requests import read_workload

    load, url = read_workload(workload), cluster.urls[0]
    lost = None if kill is None else cluster.kill_node_later(kill, KILL_AT * load.duration_s)
    with progress_bar("sending", max(1, round(load.duration_s))) as advance:
        result = run_load(
            load, url, progress=lambda passed_s, answers, _: advance(f"{answers} answers; seconds", round(passed_s))
        )
    if lost is not None:
        with progress_bar("waiting for the machine that was lost"):
            lost.wait(BACK_S)
    print_load(result)
    status = cluster.status()
    print_table(servers_table(f"{url}: {_counts_text(status)}", status))
    if lost is not None:
        say(f"node      {lost.report()}")
    return {**result.as_dict(), "cluster": status, "lost": None if lost is None else lost.as_dict()}


def _counts_text(status: dict[str, Any]) -> str:
    """Text with the gate's own decisions, counted."""
    counts = status["counts"]
    named = {"tried_again": "tried again", "unmeetable": "refused", "lost": "lost", "nowhere": "found no server"}
    return ", ".join(f"{counts.get(key, 0)} {text}" for key, text in named.items())

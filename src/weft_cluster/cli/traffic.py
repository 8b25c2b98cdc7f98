"""``weft traffic``: synthetic traffic for many models, fitted to a recorded trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import common
from weft.cli.command import Command
from weft.cli.common import file_option, how
from weft.cli.printing import counted, print_table, progress_bar, say, say_written, write_result

if TYPE_CHECKING:
    from weft.reports.tables import ResultTable
    from weft_cluster.routing.traffic import TrafficFit

app = typer.Typer(help="Synthetic requests for many models, fitted to recorded traces.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Synthetic requests for many models, fitted to recorded traces."""


@app.command("fit", cls=Command)
def traffic_fit(
    trace: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="A CSV of Azure Functions 2019 (several days) or 2021, or of Azure LLM 2023."
        ),
    ],
    seed: Annotated[
        int, how("--seed", min=0, help="Seed of the generated traffic that is compared with the trace.")
    ] = 0,
    output: Annotated[
        str | None, file_option("--output", "-o", suffixes=(".toml",), help="The traffic to write (.toml).")
    ] = None,
    json_file: common.JsonFile = None,
) -> None:
    """Fit popularity, burstiness and daily wave to a recorded trace, and compare generated traffic with it."""
    from weft.base.files import write_text
    from weft_cluster.routing.traces import read_trace
    from weft_cluster.routing.traffic import as_toml, fit

    with progress_bar("reading"):
        recorded = read_trace(*trace)
    with progress_bar("fitting"):
        fitted = fit(recorded, seed)
    count, callers = int(recorded.requests().sum()), counted(len(recorded.callers), "caller")
    print_table(_table(f"{count} requests of {callers} in {recorded.span_s / 3600:.3g} h", fitted))
    for line in as_toml(fitted.traffic).splitlines():
        say(line)
    if output:
        write_text(output, as_toml(fitted.traffic))
        say_written("traffic", output)
    write_result(json_file, _as_dict(fitted))


def _table(title: str, fitted: TrafficFit) -> ResultTable:
    from weft.reports.tables import ResultTable, TableRow

    rows = tuple(TableRow((what, f"{trace:.3g}", f"{traffic:.3g}")) for what, trace, traffic in fitted.likeness)
    notes = tuple(f"not known: {parameter}" for parameter in fitted.unknown)
    return ResultTable(title, ("", "trace", "generated"), rows, left=1, notes=notes)


def _as_dict(fitted: TrafficFit) -> dict[str, Any]:
    """Return the fit as docs/formats.md describes it."""
    return {
        "format": 1,
        "traffic": fitted.traffic.model_dump(mode="json"),
        "likeness": [measure._asdict() for measure in fitted.likeness],
        "unknown": list(fitted.unknown),
    }

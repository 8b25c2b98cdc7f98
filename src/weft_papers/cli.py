"""``weft reproduce``: every table and figure of a paper, ours beside the published number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import common
from weft.cli.common import folder_option, how, out
from weft.cli.printing import add_row, console, plain_table, progress_bar, say_written, write_result
from weft.cli.saturated import Cost, SeqLen

if TYPE_CHECKING:
    from weft_papers.base import Reproduction


def command(
    paper: Annotated[
        str,
        typer.Argument(
            help="The paper: layerweaver, layerweaver-plus, fluid-batching, haxconn, mts, libnumber; or gpu."
        ),
    ],
    output: Annotated[str | None, folder_option("--output", "-o", help="A folder to draw the figures into.")] = None,
    seq_len: SeqLen = 16,
    queries: Annotated[int, how("--queries", "-n", help="Rounds of work per simulation.")] = 60,
    cost: Cost = "pipelined",
    tables: Annotated[bool, out("--tables", help="Print the detailed tables too.")] = False,
    json_file: common.JsonFile = None,
) -> None:
    """Run a paper's evaluation and print each published number next to ours."""
    from weft.base.errors import InputError, unknown_name
    from weft_papers import PAPERS

    if paper not in PAPERS:
        raise InputError(unknown_name("paper", paper, PAPERS))
    with TemporaryDirectory() as temporary, progress_bar(paper, 1) as advance:
        result = PAPERS[paper](
            Path(output or temporary) / paper,
            seq_len=seq_len,
            queries=queries,
            cost=cost,
            progress=lambda step, done, total: advance(step, done, total),
        )
    if output is None:
        result = replace(result, pictures=())
    _print(result, tables)
    write_result(json_file, result.as_dict())


def _print(result: Reproduction, tables: bool) -> None:
    """Print the rows (published beside ours) and the files drawn; with *tables*, the detailed tables first."""
    for title, header, rows in result.tables if tables else ():
        table = plain_table(title, header)
        for cells in rows:
            add_row(table, *map(str, cells))
        console.print(table, end="\n\n")
    table = plain_table(f"{result.paper}: published and ours", ("figure", "quantity", "paper", "ours", "why"), left=2)
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    for row in result.rows:
        paper = "not printed" if row.paper is None else f"{row.paper:g}{row.unit}"
        ours = round(row.ours, 3) + 0.0 if row.unit == "%" else row.ours  # a thousandth of a percent is rounding
        add_row(table, row.figure, row.quantity, paper, f"{ours:.4g}{row.unit}", row.why)
    console.print(table)
    if not tables:
        console.print(f"{len(result.tables)} detailed tables with --tables", style="dim")
    for path in result.figures:
        say_written("figure", path)

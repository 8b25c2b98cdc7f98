"""``weft timeline``: a trace file as a page, a picture or a Perfetto trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.common import console

if TYPE_CHECKING:
    from weft.reports.trace import Trace


def command(
    trace: Annotated[str, typer.Argument(help="A trace written by weft simulate --trace.")],
    html: Annotated[str | None, typer.Option("--html", help="Write an interactive timeline page.")] = None,
    perfetto: Annotated[str | None, typer.Option("--perfetto", help="Write a trace for ui.perfetto.dev.")] = None,
    figure: Annotated[str | None, typer.Option("--figure", help="Draw the timeline as .png or .svg.")] = None,
) -> None:
    """Draw a trace that was written before."""
    from weft.errors import InputError
    from weft.reports.trace import read_trace

    if not (html or perfetto or figure):
        raise InputError("nothing to write: give --html, --perfetto or --figure")
    write_exports(read_trace(trace), None, html=html, perfetto=perfetto, figure=figure)


def write_exports(
    trace: Trace,
    report: Mapping[str, Any] | None,
    *,
    trace_file: str | None = None,
    html: str | None = None,
    perfetto: str | None = None,
    figure: str | None = None,
) -> None:
    """Write the asked-for forms of a trace and say where they are."""
    if trace_file:
        from weft.reports.trace import write_trace

        write_trace(trace, trace_file)
        console.print(f"trace     {trace_file}", highlight=False)
    if html:
        from weft.reports.html import write_html

        write_html(trace, html, report=report)
        console.print(f"timeline  {html}", highlight=False)
    if perfetto:
        from weft.reports.perfetto import write_perfetto

        write_perfetto(trace, perfetto)
        console.print(f"perfetto  {perfetto}", highlight=False)
    if figure:
        from weft.reports.timeline import draw_timeline

        draw_timeline(trace, figure)
        console.print(f"figure    {figure}", highlight=False)

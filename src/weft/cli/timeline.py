"""``weft timeline``: a trace file as a page, a picture or a Perfetto trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.common import FigureFile, HtmlFile, PerfettoFile
from weft.cli.printing import progress_bar, say_written

if TYPE_CHECKING:
    from weft.reports.trace import Trace


def command(
    trace: Annotated[str, typer.Argument(help="A trace written by weft simulate --trace.")],
    html: HtmlFile = None,
    perfetto: PerfettoFile = None,
    figure: FigureFile = None,
) -> None:
    """Draw a stored trace."""
    from weft.base.errors import InputError
    from weft.reports.trace import read_trace

    if not (html or perfetto or figure):
        raise InputError("nothing to write: give --html, --perfetto or --figure")
    write_exports(read_trace(trace), report=None, html=html, perfetto=perfetto, figure=figure)


def write_exports(
    trace: Trace,
    report: Mapping[str, Any] | None,
    *,
    trace_file: str | None = None,
    html: str | None = None,
    perfetto: str | None = None,
    figure: str | None = None,
) -> None:
    """Write a trace to the files that are given, and print their paths."""
    with progress_bar("writing"):
        if trace_file:
            from weft.reports.trace import write_trace

            write_trace(trace, trace_file)
            say_written("trace", trace_file)
        if html:
            from weft.reports.trace_exports import write_html

            write_html(trace, html, report=report)
            say_written("timeline", html)
        if perfetto:
            from weft.reports.trace_exports import write_perfetto

            write_perfetto(trace, perfetto)
            say_written("perfetto", perfetto)
        if figure:
            from weft.reports.timeline import draw_timeline

            draw_timeline(trace, figure)
            say_written("figure", figure)

"""``weft``: the commands in their groups."""

from __future__ import annotations

import logging
from typing import Any

import typer
from typer.core import TyperGroup

from weft.cli import (
    bench,
    compare,
    devices,
    explore,
    fetch,
    generate,
    map,
    models,
    profile,
    reproduce,
    serve,
    simulate,
    stitch,
    sustain,
    timeline,
    tune,
)
from weft.cli.command import Command
from weft.cli.common import console
from weft.version import __version__

RUN, PLAN, STUDY = "Run", "Plan", "Study"
"""Groups of commands: on this machine; what is made of models before that; on devices that are simulated."""


class Interrupted(Exception):
    """Ctrl-C, where typer would end without a word."""


class _Root(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


app = typer.Typer(
    name="weft",
    cls=_Root,
    help="Run many neural networks on one accelerator, well.\n\n"
    "First type [bold]weft compare --models resnet50,bert-base[/bold]. To serve models on this machine, "
    "[bold]weft serve model.onnx[/bold]; to place them on the units of a SoC, "
    "[bold]weft map --soc xavier --models googlenet,resnet101[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    """Run many neural networks on one accelerator, well."""
    console.stderr = False
    told = logging.getLogger("weft.kernels")
    if not told.handlers:
        told.setLevel(logging.INFO)
        told.propagate = False
        told.addHandler(_ToStandardError())


class _ToStandardError(logging.Handler):
    """Says what the compiler does, which takes seconds, where progress is told."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(record.getMessage(), err=True)


app.command("serve", cls=Command, rich_help_panel=RUN)(serve.command)
app.command("bench", cls=Command, rich_help_panel=RUN)(bench.command)
app.command("profile", cls=Command, rich_help_panel=RUN)(profile.command)
app.add_typer(map.app, name="map", rich_help_panel=PLAN)
app.command("stitch", cls=Command, rich_help_panel=PLAN)(stitch.command)
app.command("tune", cls=Command, rich_help_panel=PLAN)(tune.command)
app.add_typer(explore.app, name="explore", rich_help_panel=PLAN)
app.command("compare", cls=Command, rich_help_panel=STUDY)(compare.command)
app.command("simulate", cls=Command, rich_help_panel=STUDY)(simulate.command)
app.command("sustain", cls=Command, rich_help_panel=STUDY)(sustain.command)
app.command("timeline", cls=Command, rich_help_panel=STUDY)(timeline.command)
app.command("reproduce", cls=Command, rich_help_panel=STUDY)(reproduce.command)
models.app.command("generate", cls=Command)(generate.command)
models.app.command("fetch", cls=Command)(fetch.command)
app.add_typer(models.app, name="models", rich_help_panel=STUDY)
app.add_typer(devices.app, name="devices", rich_help_panel=STUDY)

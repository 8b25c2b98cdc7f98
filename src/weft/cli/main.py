"""``weft``: the commands, and how an error becomes one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

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
from weft.errors import WeftError
from weft.version import __version__

app = typer.Typer(
    name="weft",
    help="Run many neural networks on one accelerator, well.\n\n"
    "Start with [bold]weft compare --device tpuv3-like --models resnet50,bert-base[/bold], or, for the units of a SoC, "
    "[bold]weft map --soc xavier --models googlenet,resnet101[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
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


models.app.command("generate")(generate.command)
models.app.command("fetch")(fetch.command)
app.add_typer(models.app, name="models")
app.add_typer(devices.app, name="devices")
app.add_typer(explore.app, name="explore")
app.command("profile")(profile.command)
app.command("simulate")(simulate.command)
app.command("compare")(compare.command)
app.add_typer(map.app, name="map")
app.command("stitch")(stitch.command)
app.command("tune")(tune.command)
app.command("sustain")(sustain.command)
app.command("timeline")(timeline.command)
app.command("reproduce")(reproduce.command)
app.command("serve")(serve.command)
app.command("bench")(bench.command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of ours are one line on standard error."""
    try:
        app(args=list(arguments) if arguments is not None else None)
    except WeftError as error:
        sys.stderr.write(f"weft: {error}\n")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; there is nobody to tell
        sys.exit(1)

"""``weft``: the commands in their groups."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from weft.cli.command import Command
from weft.cli.printing import console
from weft.version import __version__

GROUPS = {
    "Serve models on this machine": ("plan", "serve", "bench", "profile", "models"),
    "What another policy, load or device would do": (
        "compare",
        "simulate",
        "sustain",
        "timeline",
        "explore",
        "devices",
    ),
    "More models than one machine carries": ("place", "ray", "cluster", "traffic"),
    "Models on a SoC, with shared weights, with fewer bits": ("map", "stitch", "tune"),
    "Papers": ("reproduce",),
}
"""Commands, each a module of its name, by the problems that the table in the README has."""


class Interrupted(Exception):
    """Ctrl-C, where typer would end without a word."""


class _Commands(Mapping[str, Any]):
    """The commands by name, each imported when it is asked for: most runs need one of them."""

    def __iter__(self) -> Iterator[str]:
        return (name for names in GROUPS.values() for name in names)

    def __len__(self) -> int:
        return sum(map(len, GROUPS.values()))

    def __getitem__(self, name: str) -> Any:
        for group, names in GROUPS.items():
            if name in names:
                return _command(name, group)
        raise KeyError(name)


@cache
def _command(name: str, group: str) -> Any:
    module, parent = import_module(f"weft.cli.{name}"), typer.Typer(add_completion=False)
    parent.callback()(lambda: None)
    if hasattr(module, "app"):
        parent.add_typer(module.app, name=name, rich_help_panel=group)
    else:
        parent.command(name, cls=Command, rich_help_panel=group)(module.command)
    return typer.main.get_command(parent).commands[name]  # type: ignore[attr-defined]


class _Root(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]  # nothing is added to it

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        with _interrupted():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        with _interrupted():
            return super().invoke(ctx)


@contextmanager
def _interrupted() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted from None


app = typer.Typer(
    name="weft",
    cls=_Root,
    help="Run many neural networks on one machine, well: say how often each is asked and how soon it must answer.\n\n"
    "Begin with [bold]weft plan -o plan/ -s light-squeezenet:rate=5,deadline=500 "
    "-s light-shufflenet:rate=10,deadline=250[/bold], which measures them here and says what that will come to; then "
    "[bold]weft serve plan/[/bold], and [bold]weft bench plan/[/bold] in a second terminal. Yours are files: "
    "[bold]-s camera.onnx:rate=50,deadline=20[/bold].",
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
    """Run many neural networks on one machine, well."""
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

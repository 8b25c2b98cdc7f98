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
    "Run": ("plan", "serve", "bench", "profile"),
    "Plan": ("place", "map", "stitch", "tune", "explore"),
    "Study": ("compare", "simulate", "sustain", "timeline", "cluster", "traffic", "reproduce", "models", "devices"),
}
"""Commands, each a module of its name: on this machine, before that, and on devices that are simulated."""


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

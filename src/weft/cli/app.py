"""The command line ``weft``: registered commands in their groups, each imported when it is used."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from weft.base.errors import InputError
from weft.base.registry import Entry, registered
from weft.base.version import __version__
from weft.cli.command import Command
from weft.cli.printing import console

GROUPS = (
    "Serve models on this machine",
    "What another policy, load or device would do",
    "More models than one machine carries",
    "Models on a SoC, with shared weights, with fewer bits",
    "Papers",
)
"""Groups of commands in the order of the README; groups of third-party tools follow."""
OTHERS = "Tools"
"""The group of commands that register no group."""


class Interrupted(Exception):
    """Raised instead of KeyboardInterrupt, for which typer would exit without a message."""


class _Commands(Mapping[str, Any]):
    """The registered commands by name, each imported on first access, since most runs need a single command."""

    def __iter__(self) -> Iterator[str]:
        return iter(_by_group())

    def __len__(self) -> int:
        return len(_by_group())

    def __getitem__(self, name: str) -> Any:
        return _command(name)


def _by_group() -> dict[str, Entry]:
    """Return the commands in the order of their groups; a name with a space is a subcommand."""
    entries = {name: entry for name, entry in registered("commands").items() if " " not in name}
    order = {group: index for index, group in enumerate(GROUPS)}
    return dict(sorted(entries.items(), key=lambda item: order.get(group_of(item[1]), len(order))))


def group_of(entry: Entry) -> str:
    """Return the group of a command."""
    return str(entry.details.get("group", OTHERS))


@cache
def _command(name: str) -> Any:
    """Return a command, or a group with its subcommands, as a click command that can run."""
    entry, parent = _by_group()[name], typer.Typer(add_completion=False)
    parent.callback()(lambda: None)  # otherwise typer would make a single command the whole app
    module = _load_module(entry)
    if hasattr(module, "app"):
        add_subcommands(module.app, entry.name)
        parent.add_typer(module.app, name=entry.name, rich_help_panel=group_of(entry))
    else:
        _add_command(parent, entry.name, module, rich_help_panel=group_of(entry))
    return typer.main.get_command(parent).commands[entry.name]  # type: ignore[attr-defined]


def _load_module(entry: Entry) -> Any:
    """Return the module of a command; if it cannot be used, a command that prints the reason."""
    try:
        module = entry.load()
    except InputError as error:
        return _UnusableCommand(error)
    if entry.tool.own:
        return module
    try:  # a third-party command is first built in a separate app, so that an error affects only this command
        trial = typer.Typer(add_completion=False)
        trial.add_typer(module.app) if hasattr(module, "app") else trial.command()(module.command)
        typer.main.get_command(trial)
    except Exception as error:
        reason = f"tool {entry.tool.name!r}: its command {entry.name!r} cannot be used: {error}; update or remove it"
        return _UnusableCommand(InputError(reason))
    return module


def _add_command(app: typer.Typer, name: str, module: Any, **settings: Any) -> None:
    """Add the ``command`` of a module to an app."""
    # an unusable command accepts any options, so that its reason is printed instead of an error about an option
    any_options = {"ignore_unknown_options": True, "allow_extra_args": True}
    context = any_options if isinstance(module, _UnusableCommand) else None
    app.command(name, cls=Command, context_settings=context, **settings)(module.command)


class _UnusableCommand:
    """Replaces the module of a command that cannot be imported; the command raises the error, others work."""

    def __init__(self, error: InputError) -> None:
        def command(context: typer.Context) -> None:
            raise error

        command.__doc__ = f"Not usable: {escape(str(error))}."
        self.command = command


def _summary(entry: Entry) -> TyperCommand:
    """Return a command for the list of commands, without importing it."""
    text = entry.details.get("help", "")
    return TyperCommand(entry.name, help=text if entry.tool.own else escape(text), rich_help_panel=group_of(entry))


def add_subcommands(app: typer.Typer, name: str) -> None:
    """Add the subcommands that tools register, as ``models generate`` below ``models``."""
    for path, entry in registered("commands").items():
        parent, space, subcommand = path.partition(" ")
        if space and parent == name:
            _add_command(app, subcommand, _load_module(entry))


class _Root(TyperGroup):
    """The command group ``weft``, whose commands are imported on first use."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]  # read only, where typer declares a dict

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the registered summaries: importing every command takes seconds."""
        commands, self.commands = self.commands, {name: _summary(entry) for name, entry in _by_group().items()}
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = commands

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        with _raise_interrupted():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        with _raise_interrupted():
            return super().invoke(ctx)


@contextmanager
def _raise_interrupted() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted from None


app = typer.Typer(
    name="weft",
    cls=_Root,
    help="Serve many neural networks on one machine so that requests meet their deadlines.\n\n"
    "Begin with [bold]weft plan -o plan/ -s light-squeezenet:rate=5,deadline=500 "
    "-s light-shufflenet:rate=10,deadline=250[/bold], which measures both models here and predicts latency "
    "and missed deadlines for these rates and deadlines (ms); then "
    "[bold]weft serve plan/[/bold], and [bold]weft bench plan/[/bold] in a second terminal. Your own models are files: "
    "[bold]-s camera.onnx:rate=50,deadline=20[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    """Run many neural networks on one machine, well."""
    console.stderr = False  # an earlier command of this process may have had ``--json -``
    compiler_log = logging.getLogger("weft.kernels")
    if not compiler_log.handlers:
        compiler_log.setLevel(logging.INFO)
        compiler_log.propagate = False
        compiler_log.addHandler(_ToStandardError())


class _ToStandardError(logging.Handler):
    """Prints log messages to standard error: that kernels are compiled, which takes seconds."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(record.getMessage(), err=True)

"""How commands stand for the library: its arguments told as options, its stages shown as bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any, Protocol, TypeVar

import typer

from weft.base.errors import WeftError
from weft.cli.command import naming_options
from weft.cli.printing import Advance, progress_bar

Value = TypeVar("Value")


@contextmanager
def told_in_options(context: typer.Context) -> Iterator[None]:
    """Errors of the library name the options, those too that would be a way out."""
    try:
        yield
    except WeftError as error:
        error.args = (naming_options(str(error), context.command.params), *error.args[1:])
        raise


class Show(Protocol):
    """Shows a stage of some work, and how far it is."""

    def __call__(self, stage: str, detail: str = "", done: int = 0, of: int | None = None) -> None: ...


@contextmanager
def stage_bars() -> Iterator[Show]:
    """A bar for each stage of some work, one after another."""
    shown: dict[str, Advance] = {}
    with ExitStack() as bar:

        def show(stage: str, detail: str = "", done: int = 0, of: int | None = None) -> None:
            if stage not in shown:
                bar.close()
                shown.clear()
                shown[stage] = bar.enter_context(progress_bar(stage, of))
            shown[stage](f"{stage}: {detail}" if detail else stage, done, of)

        yield show


def options_of(kind: type[Value], context: typer.Context, **converted: Any) -> Value:
    """The options of a command as one value of *kind*; *converted* are those that are typed in another way."""
    return kind(**arguments_of(kind, context) | converted)


def arguments_of(kind: type[Any], context: typer.Context) -> dict[str, Any]:
    """Those options of a command that *kind* has a field for, as they were typed."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in context.params.items() if name in names}

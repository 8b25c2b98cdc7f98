"""Output of commands: tables, lines, progress, and results as JSON."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weft.reports.tables import ResultTable
from weft.reports.tables import number as number

if TYPE_CHECKING:
    from weft.models import Model

FILE_WIDTH = 140
"""Width of the output in characters if it is no terminal, so that the widest table fits."""
QUIET_S, EVERY_S = 2.0, 5.0
"""Without a terminal: seconds before the first line of progress (short tasks print none), and between two lines."""
STANDARD_OUTPUT = "-"


class Advance(Protocol):
    """Moves a progress bar by one step, or to *done* of *of* steps."""

    def __call__(self, description: str | None = None, done: int | None = None, of: int | None = None) -> None: ...


console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)


def write_result(path: str | None, value: Mapping[str, Any]) -> None:
    """Write *value* as JSON to the path of ``--json``, ``-`` for standard output; do nothing if it is None."""
    from weft.base.jsonfile import as_json, write_json

    if path == STANDARD_OUTPUT:
        sys.stdout.write(as_json(value))
    elif path:
        write_json(path, value)
        say_written("json", path)


def say(text: str, **settings: Any) -> None:
    """Print *text* without interpreting rich's markup, which names from files may contain."""
    console.print(text, highlight=False, markup=False, **settings)


def say_written(what: str, path: str | Path, more: str = "") -> None:
    """Print that a file was written, on a line without wrapping, since scripts read it."""
    say(f"{what:<9} {path}" + (f"  ({more})" if more else ""), soft_wrap=True)


told = say_written
"""The former name."""

_MOST_GUESSES = 3
"""Number of unknown shapes that are printed; further ones usually follow from the first, and are only counted."""


def warn_of_gaps(model: Model) -> None:
    """Warn of the parts of a model whose work is not known: operators without a cost rule, unknown shapes."""
    ops, further = ", ".join(model.unknown_ops), len(model.guesses) - _MOST_GUESSES
    lines = [f"no arithmetic known for {ops}; counted as activation traffic"] if ops else []
    lines += model.guesses[:_MOST_GUESSES]
    lines += [f"{further} more shapes are not known; weft models show --json lists them"] if further > 0 else []
    for line in lines:
        typer.echo(f"weft: {model.name}: {line}", err=True)


def plain_table(title: str, columns: Sequence[str], *, left: int = 1) -> Table:
    """Make a table whose first *left* columns are text; the other columns are numbers."""
    table = Table(
        title=escape(title), title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=index >= left)
    return table


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """Add a row of cells, without interpreting rich's markup, which names from files may contain."""
    table.add_row(*map(escape, cells), style=style)


def print_table(table: ResultTable) -> None:
    """Print a table and the notes below it."""
    rich_table = plain_table(table.title, table.columns, left=table.left)
    for row in table.rows:
        add_row(rich_table, *row.cells, style="bold" if row.best else "")
    console.print(rich_table)
    for note in table.notes:
        say(note, style="dim")


def counted(count: int, thing: str) -> str:
    """Return a number with its noun: ``1 lane``, ``2 lanes``."""
    return f"{count} {thing}{'s' * (count != 1)}"


@contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Advance]:
    """Show the progress of a task: a bar that disappears at the end; without a terminal, lines on standard error.

    what: its description. Yields a function that advances and renames the bar. Without a *total*, only the elapsed time
    is shown.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not sys.stderr.isatty():
        with _ProgressLines(what, total) as lines:
            yield lines.advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total or None)

        def advance(description: str | None = None, done: int | None = None, of: int | None = None) -> None:
            if done is None:
                progress.advance(task)
            progress.update(task, description=description or what, completed=done, total=of)

        yield advance


class Show(Protocol):
    """Shows a stage of a task, and its progress."""

    def __call__(self, stage: str, detail: str = "", done: int = 0, of: int | None = None) -> None: ...


@contextmanager
def stage_bars() -> Iterator[Show]:
    """Yield a function that shows the stages of a task as progress bars, one after another."""
    shown: dict[str, Advance] = {}
    with ExitStack() as bar:

        def show(stage: str, detail: str = "", done: int = 0, of: int | None = None) -> None:
            if stage not in shown:
                bar.close()
                shown.clear()
                shown[stage] = bar.enter_context(progress_bar(stage, of))
            shown[stage](f"{stage}: {detail}" if detail else stage, done, of)

        yield show


class _ProgressLines:
    """Prints progress as lines on standard error, from a thread, so that lines appear even if a task never advances."""

    def __init__(self, what: str, total: int | None) -> None:
        self._what, self._description = what, what
        self._done, self._total = 0, total or 0
        self._begun_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_lines, daemon=True)

    def __enter__(self) -> _ProgressLines:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def advance(self, description: str | None = None, done: int | None = None, of: int | None = None) -> None:
        """Advance the task, as ``Advance`` does."""
        self._description = description or self._what
        self._done = self._done + 1 if done is None else done
        self._total = of or self._total

    def _print_lines(self) -> None:
        wait_s = QUIET_S
        while not self._ended.wait(wait_s):
            wait_s = EVERY_S
            steps_text = f", {self._done} of {self._total}" if self._total > 1 else ""
            typer.echo(f"{self._description}{steps_text}, {time.monotonic() - self._begun_s:.0f} s", err=True)

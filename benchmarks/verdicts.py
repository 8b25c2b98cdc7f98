"""The promises of a benchmark: whether each was kept, and how that is shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Verdict:
    """A promise, whether it was kept, and the figures."""

    promise: str
    kept: bool
    figures: str


def show_verdicts(verdicts: Iterable[Verdict]) -> None:
    rows = [("yes" if verdict.kept else "NO", verdict.promise, verdict.figures) for verdict in verdicts]
    show_table("verdicts", ("", "promise", "figures"), rows, left=3)


def show_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, width: int = 150
) -> None:
    """A plain table, its first *left* columns flush left."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table, highlight=False)


def format_figure(value: float | None, form: str, unit: str = "") -> str:
    """A figure, or that there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:{form}}{unit}"


def finite(value: float | None) -> float | None:
    """*value* as a file may hold it: what has no end is no number."""
    return value if value is not None and math.isfinite(value) else None

"""Results as tables of text, for commands and notebooks alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

_CELL = "padding: 2px 10px; text-align: {side}; white-space: nowrap"
_NOTE = "opacity: .7; margin: 2px 0"


class TableRow(NamedTuple):
    """A row of a table."""

    cells: tuple[str, ...]
    best: bool = False
    """Whether it is printed in bold."""


class ResultTable(NamedTuple):
    """A table with notes below it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    left: int = 1
    """Number of first columns that are text, aligned left; the other columns are numbers."""
    notes: tuple[str, ...] = ()


def number(value: float | None, digits: int = 3, *, scale: float = 1, suffix: str = "") -> str:
    """Format a number with *digits* after the decimal point; a dash for None."""
    return "-" if value is None else f"{value * scale:.{digits}f}{suffix}"


FEWEST = 100
"""The least number of answers for a p99; with fewer answers, p99 is the slowest answer."""


def largest_of(answers: int) -> int | None:
    """Return *answers* if they are too few for a p99, which is then the largest latency; None if they are enough."""
    return answers if 0 < answers < FEWEST else None


def mark_largest(text: str, largest_of: int | None) -> str:
    """Add a star to a p99 that is only the largest of *largest_of* answers."""
    return f"{text}*" if largest_of else text


def largest_notes(streams: Iterable[tuple[str, int | None]]) -> tuple[str, ...]:
    """Return the note that explains the stars of a table; *streams*: names and results of ``largest_of``."""
    few = [f"{name} max of {count}" for name, count in streams if count]
    return (f"* fewer than {FEWEST} answers have no p99: {', '.join(few)}",) if few else ()


def as_html(*tables: ResultTable) -> str:
    """Return the tables as HTML for a notebook, in its fonts and colours."""
    return "".join(map(_html, tables))


def _html(table: ResultTable) -> str:
    """Return one table with its title and notes."""
    heads = _row(
        [f"<th style='{_style(table, index)}'>{escape(name)}</th>" for index, name in enumerate(table.columns)]
    )
    body = "".join(_row([_cell(table, row, index) for index in range(len(row.cells))]) for row in table.rows)
    notes = "".join(f"<p style='{_NOTE}'><small>{escape(note)}</small></p>" for note in table.notes)
    title = f"<p><strong>{escape(table.title)}</strong></p>" if table.title else ""
    return (
        f"<div style='overflow-x: auto'>{title}<table><thead>{heads}</thead><tbody>{body}</tbody></table>{notes}</div>"
    )


def _cell(table: ResultTable, row: TableRow, index: int) -> str:
    text = escape(row.cells[index])
    return f"<td style='{_style(table, index)}'>{f'<strong>{text}</strong>' if row.best else text}</td>"


def _style(table: ResultTable, index: int) -> str:
    return _CELL.format(side="left" if index < table.left else "right")


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"

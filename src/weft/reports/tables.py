"""Results as tables of text, made once: a command prints them, a notebook shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

_CELL = "padding: 2px 10px; text-align: {side}; white-space: nowrap"
_NOTE = "opacity: .7; margin: 2px 0"


class TableRow(NamedTuple):
    """One line of a table."""

    cells: tuple[str, ...]
    best: bool = False
    """Whether it stands out."""


class ResultTable(NamedTuple):
    """A table, and what is to be said under it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    left: int = 1
    """How many columns are text; the others are numbers."""
    notes: tuple[str, ...] = ()


def number(value: float | None, digits: int = 3, *, scale: float = 1, suffix: str = "") -> str:
    """A number with so many digits after its point; a dash where there is none."""
    return "-" if value is None else f"{value * scale:.{digits}f}{suffix}"


FEWEST = 100
"""Answers of which one is slower than p99; of fewer, p99 is the slowest."""


def largest_of(answers: int) -> int | None:
    """How many answers a p99 is no more than the largest of; None where there are enough for one."""
    return answers if 0 < answers < FEWEST else None


def mark_largest(text: str, largest_of: int | None) -> str:
    """A p99 in a table, with a star where it is only the largest of so many."""
    return f"{text}*" if largest_of else text


def largest_notes(streams: Iterable[tuple[str, int | None]]) -> tuple[str, ...]:
    """What the stars of a table mean; *streams*: name -> how many answers its p99 is the largest of."""
    few = [f"{name} max of {count}" for name, count in streams if count]
    return (f"* fewer than {FEWEST} answers have no p99: {', '.join(few)}",) if few else ()


def as_html(*tables: ResultTable) -> str:
    """The tables as markup for a notebook, in its own fonts and colours."""
    return "".join(map(_html, tables))


def _html(table: ResultTable) -> str:
    heads = _row([f"<th style='{_style(table, at)}'>{escape(each)}</th>" for at, each in enumerate(table.columns)])
    body = "".join(_row([_cell(table, row, at) for at in range(len(row.cells))]) for row in table.rows)
    notes = "".join(f"<p style='{_NOTE}'><small>{escape(note)}</small></p>" for note in table.notes)
    title = f"<p><strong>{escape(table.title)}</strong></p>" if table.title else ""
    return (
        f"<div style='overflow-x: auto'>{title}<table><thead>{heads}</thead><tbody>{body}</tbody></table>{notes}</div>"
    )


def _cell(table: ResultTable, row: TableRow, at: int) -> str:
    text = escape(row.cells[at])
    return f"<td style='{_style(table, at)}'>{f'<strong>{text}</strong>' if row.best else text}</td>"


def _style(table: ResultTable, at: int) -> str:
    return _CELL.format(side="left" if at < table.left else "right")


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"

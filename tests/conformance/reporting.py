"""What came of the table: counts for each of those who demand something, and every row that was answered otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.conformance.rows import ORIGINS, HttpRow, Row

SHOWN_CHARS = 160


@dataclass(frozen=True)
class Outcome:
    """A row that was sent, and in what its answer differs."""

    name: str
    by: str
    way: str
    """http or grpc."""
    differences: tuple[str, ...]

    @classmethod
    def of(cls, row: Row, differences: Iterable[str]) -> Outcome:
        return cls(row.name, row.by, "http" if isinstance(row, HttpRow) else "grpc", tuple(differences))


def as_json(outcomes: Sequence[Outcome], about: dict[str, Any]) -> dict[str, Any]:
    """All of it as one object: what was asked, the counts, and every row."""
    return {**about, "counts": counts(outcomes), "rows": [asdict(each) for each in outcomes]}


def differing(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The rows that were answered otherwise, and in what, in short."""
    return [
        {"name": each.name, "by": each.by, "differences": [said[:SHOWN_CHARS] for said in each.differences]}
        for each in outcomes
        if each.differences
    ]


def counts(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """How many rows were answered as they say, by who demands it and over what they went."""
    found = []
    for by in ORIGINS:
        for way in ("http", "grpc"):
            rows = [each for each in outcomes if (each.by, each.way) == (by, way)]
            if rows:
                same = sum(not each.differences for each in rows)
                found.append({"by": by, "way": way, "rows": len(rows), "as_demanded": same})
    return found


def show(outcomes: Sequence[Outcome], server: str = "") -> None:
    """Print what differs, row by row, and the counts; *server* is whom they are of."""
    different = [each for each in outcomes if each.differences]
    if different:
        rows = [(each.by, each.name, "\n".join(said[:SHOWN_CHARS] for said in each.differences)) for each in different]
        print_table("differences", ("by", "row", "differs"), rows)
    sums = [(row["by"], row["way"], str(row["rows"]), str(row["as_demanded"])) for row in counts(outcomes)]
    print_table(f"counts {server}", ("by", "over", "rows", "as demanded"), sums)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of texts, which hold no markup."""
    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console(width=200, markup=False, highlight=False).print(table)

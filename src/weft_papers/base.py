"""The result of a reproduced paper: rows that set our number beside the published one, tables and pictures.

The published numbers are in ``data/<paper>.json``, each with the sentence that states it. Numbers that a paper only
draws are not in that file; rows and tables call them "not printed".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

Progress = Callable[[str, int, int], None]
"""Callback with the name of a step that begins, the number of steps done, and of all steps."""


Tick = Callable[[int, int], None]
"""Callback with the number of runs of a step that are done, and of all its runs."""


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of a figure or table: the published number beside ours."""

    figure: str
    quantity: str
    paper: float | None
    """None where the paper does not print the number."""
    ours: float
    unit: str
    why: str
    """Why the two numbers differ, or that they agree."""


class Table(NamedTuple):
    """A detailed table behind some rows; all cells are text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture: a PNG, and an SVG of the same name beside it."""

    name: str
    path: Path

    @property
    def svg(self) -> Path:
        return self.path.with_suffix(".svg")


@dataclass(frozen=True, slots=True)
class Exhibit:
    """The results of one figure or table of a paper."""

    rows: tuple[Row, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True)
class Reproduction:
    """The results of all reproduced parts of a paper, and the settings of the runs."""

    paper: str
    rows: tuple[Row, ...]
    tables: tuple[Table, ...]
    pictures: tuple[Figure, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def figures(self) -> tuple[Path, ...]:
        """The PNG files of all pictures."""
        return tuple(picture.path for picture in self.pictures)

    def as_dict(self) -> dict[str, Any]:
        """Convert to the JSON document of ``weft reproduce --json``; pictures are given by file name."""
        return {
            "format": 1,
            "paper": self.paper,
            "settings": dict(self.settings),
            "rows": [asdict(row) for row in self.rows],
            "tables": [
                {"title": table.title, "header": list(table.header), "rows": [list(row) for row in table.rows]}
                for table in self.tables
            ],
            "figures": [{"name": picture.name, "file": picture.path.name} for picture in self.pictures],
        }


Step = tuple[str, Callable[[Tick], Exhibit]]
"""A part of a reproduction: its name, and the function that runs it and calls the tick after every run."""


def run_steps(
    paper: str,
    steps: Sequence[Step],
    settings: Callable[[], Mapping[str, Any]],
    progress: Progress | None,
    runs: str = "runs",
) -> Reproduction:
    """Run the parts of a paper in order and gather their results.

    settings: called after the last part, because some settings are results of the runs. runs: what the ticks of a part
    count, as a plural noun for the progress text.
    """
    parts = [step(_ticker(progress, name, done, len(steps), runs)) for done, (name, step) in enumerate(steps)]
    if progress:
        progress("done", len(steps), len(steps))
    return Reproduction(
        paper,
        tuple(row for part in parts for row in part.rows),
        tuple(table for part in parts for table in part.tables),
        tuple(picture for part in parts for picture in part.pictures),
        settings(),
    )


def _ticker(progress: Progress | None, name: str, done: int, steps: int, runs: str) -> Tick:
    """Report that step *name* begins, and return the callback that reports its runs.

    done, steps: number of finished steps, and of all steps; the progress bar moves only when a step ends.
    """

    def tick(finished: int, total: int) -> None:
        if progress:
            progress(f"{name}: {finished} of {total} {runs}", done, steps)

    if progress:
        progress(name, done, steps)
    return tick


class Published(NamedTuple):
    """A number as a paper prints it."""

    value: float
    unit: str
    printed: str
    """The number as written in the sentence."""
    section: str
    sentence: str


Paper = dict[str, Published]
"""Key -> number, for all numbers of a paper's text that ours are compared with."""


def published(paper: str) -> Paper:
    """Read the published numbers of a paper from ``data/<paper>.json``."""
    return {key: Published(**entry) for key, entry in printed_data(paper)["numbers"].items()}


def printed_data(paper: str) -> dict[str, Any]:
    """Read the whole file ``data/<paper>.json``: the published numbers and further printed data."""
    data: dict[str, Any] = json.loads((resources.files("weft_papers") / "data" / f"{paper}.json").read_text("utf-8"))
    return data


def beside(ours: float, paper: float, why: str) -> str:
    """Describe the relative difference of our number from the paper's, followed by the explanation *why*."""
    percent = 100 * (ours / paper - 1)
    verdict = "agrees within 1 %" if abs(percent) < 1 else f"{abs(percent):.1f} % {'above' if percent > 0 else 'below'}"
    return f"{verdict}: {why}"

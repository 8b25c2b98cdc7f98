"""Rows of one kind from all sources: simulated now, simulated for longer before, measured on a GPU.

What was kept has rows of the same names in two files: ``simulated.json`` is what ``benchmarks/gpu_weaving.py`` writes,
``measured.json`` what ``benchmarks/gpu_abreast.py`` does. The second exists only if a measurement was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from weft.base.errors import InputError
from weft.base.jsonfile import read_json
from weft_papers.base import Tick
from weft_papers.gpu.lab import RuleResults

Rows = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Row -> rule -> its results."""
KINDS = ("saturated/", "urgent/", "deadlines/", "orion/", "simulated ")
"""Prefixes of rows. The last: simulations of measured rows, with the models as measured there."""


class Records(NamedTuple):
    """All that is kept."""

    simulated: Rows
    measured: Rows


def read(measured: Path | None = None) -> Records:
    """Read the recorded results; *measured*: a file instead of the shipped one."""
    return Records(_rows("simulated.json"), _rows("measured.json", measured))


def _rows(name: str, path: Path | None = None) -> Rows:
    shipped = resources.files("weft_papers") / "data" / "gpu" / name
    if path is None and not shipped.is_file():
        return {}
    with resources.as_file(shipped) as own:
        rows = read_json(path or own, InputError)
    if not isinstance(rows, dict):
        raise InputError(f"{path or name}: not rows of a benchmark, which are by name")
    return {row: rules for row, rules in rows.items() if row.startswith(KINDS)}


NOW, RECORDED, MEASURED = "simulated", "simulated for longer", "measured"
TITLES = {
    NOW: "simulated H200, run now",
    RECORDED: "simulated H200, as recorded",
    MEASURED: "measured on an H200, as recorded",
}
COLOURS = {
    "streams": "#e69f00", "best rival": "#56b4e9", "abreast": "#009e73", "edf": "#0072b2", "punctual": "#cc79a7",
    "priority": "#8f8f8f", "orion": "#d55e00", "alone": "#b9c0c8", "fifo": "#1f2933", "slices": "#b8a400",
}  # fmt: skip
"""The colour of a rule, the same in every picture."""


class LoadResults(NamedTuple):
    """What the loads of a kind came to, by name."""

    name: str
    results: dict[str, RuleResults]

    @property
    def title(self) -> str:
        return TITLES[self.name]


def sources(
    kind: str, loads: Sequence[str], simulate: Callable[[str], RuleResults], records: Records, tick: Tick
) -> list[LoadResults]:
    """Simulate the loads, and look up recorded results of their kind."""
    now = {}
    for done, load in enumerate(loads):
        tick(done, len(loads))
        now[load] = simulate(load)
    recorded = [(RECORDED, _of(kind, records.simulated)), (MEASURED, _of(kind, records.measured))]
    return [LoadResults(NOW, now), *(LoadResults(name, results) for name, results in recorded if results)]


def drawn(every: list[LoadResults]) -> list[LoadResults]:
    """Return the sources that pictures show: recorded ones, or the present run if there are none."""
    return every[1:] or every


def _of(kind: str, rows: Rows) -> dict[str, RuleResults]:
    prefix = f"{kind}/"
    return {
        name.removeprefix(prefix): {rule: dict(numbers) for rule, numbers in row.items()}
        for name, row in rows.items()
        if name.startswith(prefix)
    }

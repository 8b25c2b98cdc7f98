"""What was simulated for longer or measured on a real GPU, and kept.

Both files have rows of the same names: ``simulated.json`` is what ``benchmarks/gpu_weaving.py`` writes,
``measured.json`` what ``benchmarks/gpu_abreast.py`` does. The second is there once somebody has measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from weft.base.errors import InputError
from weft.base.jsonfile import read_json

Rows = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Row -> rule -> what it came to."""
KINDS = ("saturated/", "urgent/", "deadlines/", "orion/", "simulated ")
"""The last: what the simulator says of measured rows, with the models as they were measured there."""


class Records(NamedTuple):
    """All that is kept."""

    simulated: Rows
    measured: Rows


def read(measured: Path | None = None) -> Records:
    """What is shipped; *measured*: a file instead of the shipped one."""
    return Records(_rows("simulated.json"), _rows("measured.json", measured))


def _rows(name: str, path: Path | None = None) -> Rows:
    shipped = resources.files("weft_papers") / "data" / "gpu" / name
    if path is None and not shipped.is_file():
        return {}
    with resources.as_file(shipped) as own:
        found = read_json(path or own, InputError)
    if not isinstance(found, dict):
        raise InputError(f"{path or name}: not rows of a benchmark, which are by name")
    return {row: rules for row, rules in found.items() if row.startswith(KINDS)}

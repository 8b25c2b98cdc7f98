"""The folder of a placement: ``placement.json``, and a page that shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.base.errors import PlacingError
from weft.base.files import replacing_folder
from weft.reports.page import page_text
from weft_cluster.placing.placement import PLACEMENT_FILE, PlacedMachine, Placement, write_placement
from weft_cluster.placing.placement_shown import UNITS, in_words

REPORT_FILE = "report.html"


def write_folder(placement: Placement, path: str | Path, more: Callable[[Path], None] = lambda folder: None) -> None:
    """Write the folder whole or not at all; only one that holds a placement is replaced.

    more: writes what else belongs into the folder.
    """
    check_place(path)
    with replacing_folder(path, PlacingError) as folder:
        write_placement(placement, folder / PLACEMENT_FILE)
        (folder / REPORT_FILE).write_text(placement_page(placement), encoding="utf-8")
        more(folder)


def check_place(path: str | Path) -> None:
    """Refuse a place that no placement can be written to."""
    there = Path(path)
    if not there.absolute().parent.is_dir():
        raise PlacingError(f"{path}: there is no folder {there.absolute().parent}")
    if there.is_file():
        raise PlacingError(f"{path}: is a file; name a folder")
    if there.is_dir() and any(there.iterdir()) and not (there / PLACEMENT_FILE).is_file():
        raise PlacingError(f"{path}: holds something that is no placement; name another folder, or empty it")


def placement_page(placement: Placement) -> str:
    """The page of a placement."""
    return page_text("placement.html", page_data(placement), "weft_cluster.placing")


def page_data(placement: Placement) -> dict[str, Any]:
    """All the page shows; machines name models by their number."""
    names = {name: number for number, name in enumerate(placement.models)}
    shown = placement.model_dump(mode="json", exclude={"format", "machines", "idle"})
    return {
        **shown,
        "gap": placement.gap,
        "unit": UNITS[placement.objective],
        "words": in_words(placement),
        "idle": len(placement.idle),
        "models": list(names),
        "machines": [_machine(machine, names) for machine in placement.machines],
    }


def _machine(machine: PlacedMachine, names: dict[str, int]) -> dict[str, Any]:
    shown = machine.model_dump(mode="json", exclude={"models"})
    return {
        **shown,
        "models": [
            [
                names[placed.model],
                placed.share,
                placed.rate,
                placed.compute,
                placed.bandwidth,
                placed.other,
                placed.memory_bytes,
                placed.attainment,
            ]
            for placed in machine.models
        ],
    }

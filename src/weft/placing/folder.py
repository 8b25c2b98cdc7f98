"""The folder of a placement: ``placement.json``, a page that shows it, and what led to it from another one."""

from __future__ import annotations

from pathlib import Path

from weft.errors import PlacingError
from weft.files import replacing_folder
from weft.jsonfile import write_json
from weft.placing.change import CHANGE_FILE, PlacementChange
from weft.placing.page import placement_page
from weft.placing.placement import PLACEMENT_FILE, Placement, write_placement

REPORT_FILE = "report.html"


def write_folder(placement: Placement, path: str | Path, change: PlacementChange | None = None) -> None:
    """Write the folder whole or not at all; only one that holds a placement is replaced."""
    check_place(path)
    with replacing_folder(path, PlacingError) as folder:
        write_placement(placement, folder / PLACEMENT_FILE)
        (folder / REPORT_FILE).write_text(placement_page(placement), encoding="utf-8")
        if change is not None:
            write_json(folder / CHANGE_FILE, change.model_dump(mode="json"))


def check_place(path: str | Path) -> None:
    """Refuse a place that no placement can be written to."""
    there = Path(path)
    if not there.absolute().parent.is_dir():
        raise PlacingError(f"{path}: there is no folder {there.absolute().parent}")
    if there.is_file():
        raise PlacingError(f"{path}: is a file; name a folder")
    if there.is_dir() and any(there.iterdir()) and not (there / PLACEMENT_FILE).is_file():
        raise PlacingError(f"{path}: holds something that is no placement; name another folder, or empty it")

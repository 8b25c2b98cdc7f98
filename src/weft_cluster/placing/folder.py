"""The folder of a placement: ``placement.json``, and a page that shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weft.base.errors import PlacingError
from weft.base.files import replacing_folder
from weft_cluster.placing.page import placement_page
from weft_cluster.placing.placement import PLACEMENT_FILE, Placement, write_placement

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

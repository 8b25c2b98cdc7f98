"""How a picture becomes a file: PNG or SVG by its suffix, the same bytes for the same picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure as Figure

from weft.base.errors import InputError
from weft.base.files import replacing

SUFFIXES = (".png", ".svg")


def picture_path(path: str | Path) -> Path:
    """*path*, if it ends as a picture does."""
    found = Path(path)
    if found.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path}: a figure ends in {' or '.join(SUFFIXES)}, not {found.suffix or 'a bare name'}")
    return found


def save(figure: Figure, path: str | Path, dpi: int = 150) -> None:
    """Write *figure*; an SVG holds no date."""
    target = picture_path(path)
    with replacing(target) as beside:
        figure.savefig(beside, dpi=dpi, metadata={"Date": None} if target.suffix.lower() == ".svg" else None)

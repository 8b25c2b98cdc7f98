"""How a picture becomes a file: PNG or SVG by its suffix, the same bytes for the same picture.

matplotlib is an extra. Modules that draw import it; what leads to them calls ``require_matplotlib`` first.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.errors import InputError
from weft.base.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure

SUFFIXES = (".png", ".svg")


def require_matplotlib() -> None:
    """Raise InputError where matplotlib is not installed; it is not imported."""
    if find_spec("matplotlib") is None:
        raise InputError("figures need matplotlib; pip install 'weft[figures]'")


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

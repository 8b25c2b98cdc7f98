"""Figures as files: PNG or SVG by the suffix, the same bytes for the same figure.

matplotlib is an extra. Modules that draw import it; their callers call ``require_matplotlib`` first.
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
INK, MUTED, RULE, GROUND, LIMIT = "#1f2933", "#66727f", "#d5dae0", "#f0f2f5", "#b42318"
"""Colours of text, of notes, of axes, of the background of lanes, and of limits."""


def require_matplotlib() -> None:
    """Raise InputError if matplotlib is not installed; it is not imported."""
    if find_spec("matplotlib") is None:
        raise InputError("figures need matplotlib; pip install 'weft[figures]'")


def picture_path(path: str | Path) -> Path:
    """Return *path*; InputError if its suffix is not in ``SUFFIXES``."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path}: a figure ends in {' or '.join(SUFFIXES)}, not {target.suffix or 'a bare name'}")
    return target


def save(figure: Figure, path: str | Path, dpi: int = 150) -> None:
    """Write a figure."""
    target = picture_path(path)
    with replacing(target) as draft:
        # without a date the same figure has the same bytes
        figure.savefig(draft, dpi=dpi, metadata={"Date": None} if target.suffix.lower() == ".svg" else None)

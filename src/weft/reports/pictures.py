"""Figures as files, and ``Shown``, the base of results with tables in a notebook and a picture by ``plot()``.

A file is PNG or SVG by its suffix, with the same bytes for the same figure. matplotlib is an extra. Modules that draw
import it; their callers call ``require_matplotlib`` first. The presentation of a result is registered (``pages`` in
``tool.toml``): the module with its ``tables`` and its ``figure`` is imported on first display.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.base.errors import InputError
from weft.base.files import replacing
from weft.base.registry import registered
from weft.reports.tables import as_html

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


class Shown:
    """Base class of results with a presentation, which is registered for the result's class or one of its bases."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return as_html(*_page_of(self).tables(self))

    def plot(self) -> Figure:
        """Draw the result; InputError if matplotlib is not installed."""
        require_matplotlib()
        figure: Figure = _page_of(self).figure(self)
        return figure


def _page_of(result: Shown) -> Any:
    """Return the registered module with ``tables`` and ``figure`` for a result."""
    pages = registered("pages")
    names = (f"{kind.__module__}:{kind.__qualname__}" for kind in type(result).__mro__)
    return next(pages[name] for name in names if name in pages).load()

"""Results that show themselves: as tables in a notebook, and as a picture by ``plot()``.

What a result looks like is decided in rooms that come after the one that makes it. So a result only names the module
that shows it, which is imported when somebody wants to see it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Shown:
    """A result that some module has ``tables`` and a ``figure`` of."""

    __slots__ = ()
    shown_by: ClassVar[str]

    def _repr_html_(self) -> str:
        tables = import_module(self.shown_by).tables(self)
        shown: str = import_module("weft.reports.tables").as_html(*tables)
        return shown

    def plot(self) -> Figure:
        """A picture of it."""
        drawn: Figure = import_module(self.shown_by).figure(self)
        return drawn

"""Results that show themselves: as tables in a notebook, and as a picture by ``plot()``.

The presentation of a result is registered (``pages`` in ``tool.toml``): the module with its ``tables`` and its
``figure`` is imported on first display.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.base.registry import registered
from weft.reports.pictures import require_matplotlib
from weft.reports.tables import as_html

if TYPE_CHECKING:
    from weft.reports.pictures import Figure


class Shown:
    """Base of results; a page must be registered for the type of the result or one of its bases."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return as_html(*_page_of(self).tables(self))

    def plot(self) -> Figure:
        """Draw the result; InputError where matplotlib is not installed."""
        require_matplotlib()
        figure: Figure = _page_of(self).figure(self)
        return figure


def _page_of(result: Shown) -> Any:
    pages = registered("pages")
    names = (f"{kind.__module__}:{kind.__qualname__}" for kind in type(result).__mro__)
    return next(pages[name] for name in names if name in pages).load()

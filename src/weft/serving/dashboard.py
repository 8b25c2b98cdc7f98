"""The page that the server shows to people: ``dashboard.html`` beside this module, which asks for all it shows.

``history.js`` draws its last ten minutes; style, colours, keys and tip are those of all pages (``reports.page``).
"""

from __future__ import annotations

from functools import cache

from weft.reports.page import whole_page


@cache
def page() -> bytes:
    """The page as UTF-8: markup, style and script in one file, the same for every server."""
    return whole_page("dashboard.html", "weft.serving").encode()

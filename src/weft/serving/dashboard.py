"""The page that the server shows to people: ``dashboard.html`` beside this module, which asks for all it shows."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def page() -> bytes:
    """The page as UTF-8: markup, style and script in one file, the same for every server."""
    return files("weft.serving").joinpath("dashboard.html").read_bytes()

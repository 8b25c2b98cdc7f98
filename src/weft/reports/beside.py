"""Pages that lie in one folder link to each other: a comparison to the timeline beside it, a plan to its map.

A page says of itself near its beginning which kind it is, and has its links there. Whoever writes a page puts links
into it and into the pages of other kinds beside it. What is not a page of ours, or cannot be read or written, is left
as it is.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from weft.base.errors import InputError
from weft.base.files import write_text

KINDS = {
    "plan": "Plan",
    "comparison": "Comparison",
    "timeline": "Timeline",
    "mapping": "Map",
    "tuning": "Formats",
    "placement": "Placement",
}
"""Which pages there are, and what a link to one begins with."""

MOST_FILES = 100
"""Files of a folder that are looked at."""

MOST_LINKS = 12

_HEAD_BYTES = 16384
"""A page says within so many bytes what it is."""

_MARK = re.compile(r'<meta name="weft-page" content="(\w+)" data-beside="([^"]*)">')


def link_pages(path: Path) -> None:
    """Let the page at *path* and those of other kinds in its folder link to each other."""
    pages = _pages(path.parent)
    kind = pages.get(path)
    if kind is None:
        return
    for page, its in pages.items():
        if page == path or its != kind:
            _set_links(page, {other: theirs for other, theirs in pages.items() if theirs != its})


def _pages(folder: Path) -> dict[Path, str]:
    """The pages of a folder and their kinds, those in front that people want first."""
    found: dict[Path, str] = {}
    with suppress(OSError):
        for path in islice(sorted(folder.glob("*.html")), MOST_FILES):
            mark = _MARK.search(_beginning(path))
            if mark and mark[1] in KINDS:
                found[path] = mark[1]
    order = list(KINDS)
    return dict(sorted(found.items(), key=lambda entry: order.index(entry[1])))


def _beginning(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        return file.read(_HEAD_BYTES).decode("utf-8", "replace")
    return ""


def _set_links(page: Path, others: Mapping[Path, str]) -> None:
    links = [[f"{KINDS[kind]}: {path.stem}", quote(path.name)] for path, kind in others.items()][:MOST_LINKS]
    told = html.escape(json.dumps(links, separators=(",", ":")))
    mark = _MARK.search(_beginning(page))
    if mark is None or mark[2] == told:
        return
    with suppress(OSError, UnicodeDecodeError, InputError):
        told = f'<meta name="weft-page" content="{mark[1]}" data-beside="{told}">'
        write_text(page, page.read_text("utf-8").replace(mark[0], told, 1))

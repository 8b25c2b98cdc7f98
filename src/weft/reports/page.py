"""Self-contained HTML pages: templates with one shared style, script and palette, all inline, without a network.

A page is a template and its data. To make one, write ``NAME.html`` like this into the package whose results it shows,
and call ``write_page(path, "NAME.html", data, __package__)`` there:

- ``<meta name="weft-page" content="NAME" data-beside="[]">`` near its beginning is the kind of page (one of ``KINDS``);
  ``data-beside`` holds links to pages of other kinds in the same folder, which ``linksBeside()`` shows;
- ``/*weft:page.css*/`` at the beginning of its style: colours for light and dark (``var(--ink)``, ``var(--accent)``,
  ``var(--model-0)`` ...) and the styles of ``.panel``, ``.cards``, ``.bar``, ``.tools``, ``.hint``, ``.settings``,
  tables;
- ``<script type="application/json" id="data">/*weft-data*/</script>``, the place of the data;
- ``<script>"use strict"; (() => { /*weft:page.js*/ ... })();</script>``: functions of every page:
  ``showSeconds``, ``showBytes`` and ``showShare`` for numbers, ``modelColour`` and ``swatch`` for models in the
  order of their first appearance, ``card``, ``table``, ``listPanel`` and ``named`` for the parts around pictures,
  ``showTip``, and ``timeAxis``, ``zoomButtons`` and ``helpLine`` for pictures over time: scroll zooms, drag pans, 0
  shows all;
- ``/*weft:trace.js*/`` and ``/*weft:timeline.js*/`` after that, and ``/*weft:timeline.css*/`` in its style, if the page
  shows traces: ``timeline(trace).panel`` is the picture of the data of ``reports.trace_exports.trace_data``.

``/*weft:FILE*/`` is replaced by that file of this folder. Names from models and files go through ``textContent`` only.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import Any
from urllib.parse import quote

from weft.base.errors import InputError
from weft.base.files import write_text

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8f8f8f", "#b8a400")
"""Okabe and Ito's colours, safe for colour-blind readers; black and yellow toned to suit any background.

``colours.css`` has the same colours, and others for a dark background.
"""

DATA_MARK = "/*weft-data*/"
"""The place of the data in a template."""

KINDS = {
    "plan": "Plan",
    "comparison": "Comparison",
    "timeline": "Timeline",
    "mapping": "Map",
    "tuning": "Formats",
    "placement": "Placement",
}
"""Kind of page -> the beginning of the text of links to such pages, in the order of the links."""

MOST_FILES = 100
"""Largest number of HTML files that are searched for pages, so that a folder with thousands costs no time."""

MOST_LINKS = 12  # links in the head of a page: about two lines of them

_HEAD_BYTES = 16384
"""Number of bytes at the beginning of a file that are searched for the kind of page."""

_MARK = re.compile(r'<meta name="weft-page" content="(\w+)" data-beside="([^"]*)">')
"""The tag with a page's kind and its links to other pages."""
_PART = re.compile(r"/\*weft:([\w.]+)\*/")


def write_page(path: Path | str, template: str, data: Mapping[str, Any], package: str = "weft.reports") -> None:
    """Write a page with its data, and link it with the pages of other kinds in its folder."""
    write_text(path, page_text(template, data, package))
    link_pages(Path(path))


def page_text(template: str, data: Mapping[str, Any], package: str = "weft.reports") -> str:
    """Return a page with its data; *package*: the package of the template."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # Inside a script element only "<" and "&" could end or confuse it; non-ASCII is already escaped.
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    head, tail = whole_page(template, package).split(DATA_MARK)
    return head + safe + tail


@cache
def whole_page(template: str, package: str = "weft.reports") -> str:
    """Return a template with its parts inserted; files that *package* does not have are taken from ``weft.reports``."""
    file = files(package).joinpath(template)
    text = (file if file.is_file() else files("weft.reports").joinpath(template)).read_text("utf-8")
    return _PART.sub(lambda part: whole_page(part[1], package).rstrip(), text)


def json_ready(value: Any) -> Any:
    """Return *value* with values that JSON cannot express (paths, NaN, infinities, sets) as text."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    return str(value)


# Links between the pages of a folder


def link_pages(path: Path) -> None:
    """Link the page at *path* with the pages of other kinds in its folder, in both directions.

    Files that are no pages of weft, or cannot be read or written, are left unchanged.
    """
    pages = _pages(path.parent)
    kind = pages.get(path)
    if kind is None:
        return
    for page, page_kind in pages.items():
        if page == path or page_kind != kind:
            _set_links(page, {other: other_kind for other, other_kind in pages.items() if other_kind != page_kind})


def _pages(folder: Path) -> dict[Path, str]:
    """Return page -> kind for the pages of weft in a folder, in the order of ``KINDS``."""
    pages: dict[Path, str] = {}
    with suppress(OSError):
        for path in islice(sorted(folder.glob("*.html")), MOST_FILES):
            mark = _MARK.search(_beginning(path))
            if mark and mark[1] in KINDS:
                pages[path] = mark[1]
    order = list(KINDS)
    return dict(sorted(pages.items(), key=lambda entry: order.index(entry[1])))


def _beginning(path: Path) -> str:
    """Return the first ``_HEAD_BYTES`` of a file as text; empty if it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(_HEAD_BYTES).decode("utf-8", "replace")
    return ""


def _set_links(page: Path, others: Mapping[Path, str]) -> None:
    """Write links to *others* (page -> kind) into a page; a page that cannot be read or written stays unchanged."""
    links = [[f"{KINDS[kind]}: {path.stem}", quote(path.name)] for path, kind in others.items()][:MOST_LINKS]
    attribute = html.escape(json.dumps(links, separators=(",", ":")))
    mark = _MARK.search(_beginning(page))
    if mark is None or mark[2] == attribute:
        return
    with suppress(OSError, UnicodeDecodeError, InputError):
        tag = f'<meta name="weft-page" content="{mark[1]}" data-beside="{attribute}">'
        write_text(page, page.read_text("utf-8").replace(mark[0], tag, 1))

"""What all pages for people share: one style, one script, one palette, put inline into pages that need no network.

A page is a template and data for it. To make one, write ``NAME.html`` like this into the package whose results it
shows, and call ``write_page(path, "NAME.html", data, __package__)`` there:

- ``<meta name="weft-page" content="NAME" data-beside="[]">`` near its beginning says what kind of page it is (one of
  ``KINDS`` of ``reports.beside``, which keeps links to the pages beside it up to date; ``linksBeside()`` shows them);
- ``/*weft:page.css*/`` at the beginning of its style: colours for light and dark (``var(--ink)``, ``var(--accent)``,
  ``var(--model-0)`` ...) and the looks of ``.panel``, ``.cards``, ``.bar``, ``.tools``, ``.hint``, ``.settings``,
  tables;
- ``<script type="application/json" id="data">/*weft-data*/</script>``, where the data goes;
- ``<script>"use strict"; (() => { /*weft:page.js*/ ... })();</script>``: functions that every page has:
  ``showSeconds``, ``showBytes`` and ``showShare`` for numbers, ``modelColour`` and ``swatch`` for models in the
  order of their first appearance, ``card``, ``table``, ``listPanel`` and ``named`` for what stands around pictures,
  ``showTip``, and ``timeAxis``, ``zoomButtons`` and ``helpLine`` for pictures over time: scroll zooms, drag pans, 0
  shows all;
- ``/*weft:trace.js*/`` and ``/*weft:timeline.js*/`` behind that, and ``/*weft:timeline.css*/`` in its style, where a
  page shows traces: ``timeline(trace).panel`` is the picture of what ``reports.html.trace_data`` made.

``/*weft:FILE*/`` is replaced by any file of this folder. Text from outside goes through ``textContent`` only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from weft.base.files import write_text
from weft.reports.beside import link_pages

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8f8f8f", "#b8a400")
"""Okabe and Ito's colours, safe for colour-blind readers; black and yellow toned to suit any ground. ``colours.css``
has them too, and those for a dark ground."""

DATA_MARK = "/*weft-data*/"
"""Stands in a template where the data goes."""

_PART = re.compile(r"/\*weft:([\w.]+)\*/")


def write_page(path: Path | str, template: str, data: Mapping[str, Any], package: str = "weft.reports") -> None:
    """Write a page with its data; it and the pages of other kinds in its folder then link to each other."""
    write_text(path, page_text(template, data, package))
    link_pages(Path(path))


def page_text(template: str, data: Mapping[str, Any], package: str = "weft.reports") -> str:
    """A page with its data in it; *package*: whose template it is."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # Inside a script element only "<" and "&" could end or confuse it; non-ASCII is already escaped.
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    head, tail = whole_page(template, package).split(DATA_MARK)
    return head + safe + tail


@cache
def whole_page(template: str, package: str = "weft.reports") -> str:
    """A template of *package* with the parts it names in it, its own or the shared ones, without its data."""
    own = files(package).joinpath(template)
    text = (own if own.is_file() else files("weft.reports").joinpath(template)).read_text("utf-8")
    return _PART.sub(lambda found: whole_page(found[1], package).rstrip(), text)


def json_ready(value: Any) -> Any:
    """*value* with what JSON cannot say (paths, NaN, infinities, sets of any kind) turned into text."""
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

"""The pages of the server: the dashboard at ``/``, and the OpenAPI document with forms at ``/docs``.

``dashboard.html`` and ``docs.html`` beside this module hold markup, style and script, and request their data from
the server; ``history.js`` draws the dashboard's last ten minutes. Style, colours and keys are those of all pages
(``reports.page``). No resources are loaded from other hosts.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache

from weft.http.messages import HttpResponse
from weft.reports.page import whole_page

_HTML = "text/html; charset=utf-8"
_ANY_INLINE = "style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_REST = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_ALL_PAGES = (("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-cache"))


@cache
def dashboard() -> HttpResponse:
    """The dashboard, the same for every server."""
    policy = ("Content-Security-Policy", f"default-src 'none'; {_ANY_INLINE}; {_REST}")
    return HttpResponse(200, whole_page("dashboard.html", "weft.serving").encode(), _HTML, (policy, *_ALL_PAGES))


@cache
def docs() -> HttpResponse:
    """The document for people. Its policy names script and style by their hashes, so browsers run no other ones."""
    text = whole_page("docs.html", "weft.serving")
    policy = (
        f"default-src 'none'; script-src {_hash('script', text)}; style-src {_hash('style', text)}; {_REST}; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    headers = (("Content-Security-Policy", policy), *_ALL_PAGES, ("Referrer-Policy", "same-origin"))
    return HttpResponse(200, text.encode(), _HTML, headers)


def _hash(tag: str, text: str) -> str:
    """The one element of this kind, as a policy names it."""
    (element,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.S)
    return f"'sha256-{base64.b64encode(hashlib.sha256(element.encode()).digest()).decode()}'"

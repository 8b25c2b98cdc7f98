"""The page at ``/docs``: what ``openapi`` describes, for people, with a form to try each path.

``docs.html`` beside this module holds markup, style and script, and asks the server for the description. Nothing comes
from elsewhere. The browser is told to run that script and no other: the policy names it and the style by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache

from weft.reports.page import whole_page

_PART = r"<{0}>(.*?)</{0}>"


@cache
def page() -> bytes:
    """The page as UTF-8, the same for every server."""
    return whole_page("docs.html", "weft.serving").encode()


@cache
def headers() -> tuple[tuple[str, str], ...]:
    """What is sent with it."""
    policy = (
        f"default-src 'none'; script-src {_hash('script')}; style-src {_hash('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return (
        ("Content-Security-Policy", policy),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "same-origin"),
        ("Cache-Control", "no-cache"),
    )


def _hash(tag: str) -> str:
    """The one element of this kind, as a policy names it."""
    (text,) = re.findall(_PART.format(tag), page().decode(), flags=re.S)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

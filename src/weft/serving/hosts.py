"""Checks of the headers ``Host`` and ``Origin``, against DNS rebinding and cross-site requests.

A foreign page in a browser on this machine can send requests to the server. It cannot choose the header ``Host``, which
has the name under which the browser found the server: a foreign name there was made to point to this machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weft.base.errors import BadRequest, Forbidden
from weft.serving.config import ServerConfig, is_loopback

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
ANY = "*"
MOST_SEEN = 256
"""Accepted values of ``Host`` that are cached (spellings, ports), so that they are parsed once; bounds the cache."""


class HostNames:
    """The host names of a server, on any port; all names are accepted if *names* is None or contains ``*``."""

    def __init__(self, names: Iterable[str] | None) -> None:
        listed = None if names is None else {name_in(name) for name in names}
        self._names = None if listed is None or ANY in listed else frozenset(listed)
        self._seen: set[str] = set()

    def check(self, headers: Mapping[str, str]) -> None:
        """Refuse a request with a foreign name in ``Host``; one without the header is not from a browser."""
        host = headers.get("host")
        if self._names is None or not host or host in self._seen:
            return
        if name_in(host) not in self._names:
            raise Forbidden(
                f"this server is not {host[:100]!r}; ask it under one of its names, or add that one to allowed_hosts"
            )
        if len(self._seen) < MOST_SEEN:
            self._seen.add(host)


def check_origin(method: str, headers: Mapping[str, str]) -> None:
    """Refuse POST requests from pages of another origin (cross-site requests)."""
    origin = headers.get("origin")
    if origin and method == "POST" and origin.partition("://")[2].lower() != headers.get("host", "").lower():
        raise BadRequest(f"requests from pages of {origin[:100]!r} are not taken")


def names_of(config: ServerConfig) -> tuple[str, ...] | None:
    """Return the names that are set, by default those of this machine if the server listens on loopback only."""
    if config.network.allowed_hosts is not None:
        return config.network.allowed_hosts
    return (*LOOPBACK_NAMES, config.network.host) if is_loopback(config.network.host) else None


def name_in(host: str) -> str:
    """Return the host name in a header ``Host`` or in a setting, without its port."""
    if host.startswith("["):
        return _bare(host.partition("]")[0])
    name, colon, port = host.rpartition(":")
    return _bare(name if colon and port.isdigit() and ":" not in name else host)


def _bare(name: str) -> str:
    return name.strip("[]").rstrip(".").lower()

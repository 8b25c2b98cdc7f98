"""Under which names the server may be asked, and from which pages.

A page of somebody else's, open in a browser on this machine, can send requests to it. It cannot choose the header
``Host``, which names the server as the browser found it: a name that is not the server's own was made to point here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weft.base.errors import BadRequest, Forbidden
from weft.serving.config import ServerConfig, is_loopback

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
ANY = "*"
MOST_SEEN = 256
"""Spellings of its names, with ports and in capitals, that are known again."""


class HostNames:
    """The names that a server goes by, on any port; none is refused where *names* is None or holds ``*``."""

    def __init__(self, names: Iterable[str] | None) -> None:
        listed = None if names is None else {name_in(each) for each in names}
        self._names = None if listed is None or ANY in listed else frozenset(listed)
        self._seen: set[str] = set()

    def check(self, headers: Mapping[str, str]) -> None:
        """Refuse a request that names another server; one that names none is of no browser."""
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
    """Refuse what a page from elsewhere would have loaded, unloaded or computed here."""
    origin = headers.get("origin")
    if origin and method == "POST" and origin.partition("://")[2].lower() != headers.get("host", "").lower():
        raise BadRequest(f"requests from pages of {origin[:100]!r} are not taken")


def names_of(config: ServerConfig) -> tuple[str, ...] | None:
    """The names that are set, or else those of this machine for a server that only it can reach."""
    if config.network.allowed_hosts is not None:
        return config.network.allowed_hosts
    return (*LOOPBACK_NAMES, config.network.host) if is_loopback(config.network.host) else None


def name_in(host: str) -> str:
    """The name in a header ``Host``, or in a setting, without its port."""
    if host.startswith("["):
        return _bare(host.partition("]")[0])
    name, colon, port = host.rpartition(":")
    return _bare(name if colon and port.isdigit() and ":" not in name else host)


def _bare(name: str) -> str:
    return name.strip("[]").rstrip(".").lower()

"""Access control: API keys with rate limits and quotas, and checks of the headers ``Host`` and ``Origin``.

Keys are the server's own and those of a file that is read again when it changes. Keys are not compared directly. Their
digests, keyed with a random secret of this process, are looked up in a table, so that the duration of a lookup reveals
nothing about the keys (no timing attack).

The header checks prevent DNS rebinding and cross-site requests. A foreign page in a browser on this machine can send
requests to the server. It cannot choose the header ``Host``, which has the name under which the browser found the
server: a foreign name there was made to point to this machine.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from weft.base.errors import BadRequest, Forbidden, InputError, OverQuota, Unauthorised
from weft.http.messages import ANYONE, ClientRank
from weft.serving.config import Count, Name, ServerConfig, is_loopback, one_line, read_toml, valid_key

log = logging.getLogger("weft.server")

LOOK_EVERY_S = 1.0
"""Interval between checks of the file for changes: a check costs a system call, and delays a revoked key's end."""

ANYBODY = "anybody"
"""The name under which requests are counted if no key is required."""
OWN = "api_key"
"""The name of the server's own key."""
REFUSALS = ("rate", "in_flight")


class KeyConfig(BaseModel):
    """A key with its name, priorities and limits, as in the keys file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    name: Name
    """Its name in metrics and logs."""
    key: Annotated[str, AfterValidator(valid_key)] = Field(repr=False)
    priority: Annotated[int, Field(ge=0, le=3)] = 0
    """Of its requests that state none, before that of their model; 1 is the highest."""
    top_priority: Annotated[int, Field(ge=1, le=3)] = 1
    """The highest that its requests get, whatever they and their models say."""
    requests_per_s: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    """Requests on average; as many as in one second may come at once."""
    in_flight: Count | None = None
    """Requests that are not answered."""


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    keys: list[KeyConfig] = []


@dataclass(slots=True)
class _Allowance:
    """Rate limit as a token bucket: ``per_s`` tokens per second, at most those of one second."""

    per_s: float
    left: float
    since_s: float

    def wait_s(self, now_s: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        burst = max(1.0, self.per_s)
        self.left = min(burst, self.left + (now_s - self.since_s) * self.per_s)
        self.since_s = now_s
        if self.left < 1.0:
            return (1.0 - self.left) / self.per_s
        self.left -= 1.0
        return 0.0


class Caller:
    """The user of one key, with counters that outlive a change of the keys file."""

    def __init__(self, name: str, now: Callable[[], float] = time.monotonic) -> None:
        self.name, self._now = name, now
        self.config: KeyConfig | None = None
        """None: no limits."""
        self.removed = False
        self.rank = ANYONE
        self.requests = self.in_flight = 0
        self.refused: Counter[str] = Counter()
        self._allowance: _Allowance | None = None

    def limit(self, config: KeyConfig) -> None:
        """Set the limits of the key from now on."""
        before, self.config, self.removed = self.config, config, False
        self.rank = ClientRank(config.priority, config.top_priority)
        rate = config.requests_per_s
        if rate is None:
            self._allowance = None
        elif before is None or before.requests_per_s != rate:
            self._allowance = _Allowance(rate, max(1.0, rate), self._now())

    def begin(self) -> None:
        """Admit a request and count it as in flight until ``end``; OverQuota beyond the limits of the key."""
        self.admit()
        self.in_flight += 1

    def admit(self) -> None:
        """Count a new request against the rate limit; OverQuota beyond the limits of the key."""
        if self.removed:
            raise Unauthorised("this server does not know the API key any more")
        self._check_in_flight()
        config = self.config
        if config is not None:
            wait_s = self._allowance.wait_s(self._now()) if self._allowance else 0.0
            if wait_s > 0:
                self._refuse("rate", f"asks for more than {config.requests_per_s:g} requests per second", wait_s)
        self.requests += 1

    def enter(self) -> None:
        """Count an admitted request as in flight until ``end``; OverQuota if others were faster."""
        self._check_in_flight()
        self.in_flight += 1

    def end(self) -> None:
        self.in_flight -= 1

    def _check_in_flight(self) -> None:
        limit = self.config.in_flight if self.config else None
        if limit is not None and self.in_flight >= limit:
            self._refuse("in_flight", f"has {self.in_flight} requests in flight, which is its limit", 1.0)

    def _refuse(self, reason: str, what: str, wait_s: float) -> None:
        self.refused[reason] += 1
        raise OverQuota(f"key {self.name!r} {what}; send it again later", wait_s)


class Keys:
    """The API keys of a server; without any, all requests are allowed."""

    def __init__(
        self, own: str | None = None, file: Path | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        """InputError if the file cannot be used."""
        self._file, self._now = file, now
        self._secret = hashlib.blake2b(key=secrets.token_bytes(32), digest_size=32)
        self.required = own is not None or file is not None
        self.callers: dict[str, Caller] = {}
        """Users of keys by name, including those whose key was removed."""
        self._anybody = None if self.required else self._caller(ANYBODY)
        self._own = {} if own is None else {self._digest(own): self._caller(OWN)}
        self._by_digest: dict[bytes, Caller] = dict(self._own)
        self._look_s = 0.0
        self._seen: tuple[int, ...] | None = None
        if file is not None:
            self._seen = _signature(file)
            self._know(read_keys(file))

    def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """Return the user of a request's key, None without a valid key; *headers* have lower-case names."""
        if self._anybody is not None:
            return self._anybody
        if self._file is not None and self._now() >= self._look_s:
            self.look()
        given = headers.get("x-api-key", "")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = token.strip()
        return self._by_digest.get(self._digest(given))

    def known(self, headers: Mapping[str, str]) -> Caller:
        """Return the user of a request's key; Unauthorised without a valid key."""
        caller = self.caller(headers)
        if caller is None:
            raise Unauthorised("this server wants an API key: Authorization: Bearer KEY")
        return caller

    def look(self, *, anyway: bool = False) -> None:
        """Read the keys file again if it has changed; errors are logged and leave the keys as they were."""
        if self._file is None:
            return
        self._look_s = self._now() + LOOK_EVERY_S
        seen = _signature(self._file)
        if seen == self._seen and not anyway:
            return
        self._seen = seen
        try:
            self._know(read_keys(self._file))
        except InputError as error:
            log.error("%s; the keys stay as they were", error)
        else:
            log.info("%s: %d keys", self._file, len(self._by_digest) - len(self._own))

    def _know(self, configs: list[KeyConfig]) -> None:
        """Replace the keys of the file; the server's own key stays."""
        digests = [self._digest(config.key) for config in configs]
        if self._own.keys() & set(digests):
            raise InputError(f"{self._file}: one of its keys is the server's own; use another")
        for caller in self.callers.values():
            caller.removed = caller.name != OWN
        self._by_digest = dict(self._own)
        for digest, config in zip(digests, configs, strict=True):
            self._by_digest[digest] = caller = self._caller(config.name)
            caller.limit(config)

    def _caller(self, name: str) -> Caller:
        return self.callers.setdefault(name, Caller(name, self._now))

    def _digest(self, key: str) -> bytes:
        digest = self._secret.copy()
        digest.update(key.encode("utf-8", "surrogatepass"))
        return digest.digest()


def read_keys(path: Path) -> list[KeyConfig]:
    """Read a keys file; InputError if it is invalid, with a message that never shows a key."""
    shown = one_line(str(path))
    raw = read_toml(path, shown)
    try:
        keys = _KeysFile.model_validate(raw).keys
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise InputError(one_line(f"{shown}: {where}: {problem['msg']}")) from None
    names = Counter(config.name for config in keys)
    names.update((OWN, ANYBODY))
    for name, count in names.items():
        if count > 1:
            raise InputError(f"{shown}: name {name!r} is given twice or taken; each key has a name of its own")
    if len({config.key for config in keys}) < len(keys):
        raise InputError(f"{shown}: two names have the same key; use one each")
    return keys


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


# Host names and origins

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

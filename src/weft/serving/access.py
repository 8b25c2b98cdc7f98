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
"""Interval between checks of the keys file: a check costs a system call; a revoked key works until the next one."""

ANYBODY = "anybody"
"""The name under which requests are counted if no key is required."""
OWN = "api_key"
"""The name of the server's own key."""
REFUSALS = ("rate", "in_flight")
"""Reasons for refusing a request with a valid key."""


class KeyConfig(BaseModel):
    """A key with its name, priorities and limits, as in the keys file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    name: Name
    """Its name in metrics and logs."""
    key: Annotated[str, AfterValidator(valid_key)] = Field(repr=False)
    priority: Annotated[int, Field(ge=0, le=3)] = 0
    """Of its requests that state none; overrides that of their model. 1 is the highest, 0: not set."""
    top_priority: Annotated[int, Field(ge=1, le=3)] = 1
    """The highest priority that its requests can have, even if they or their models set a higher one."""
    requests_per_s: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    """Rate limit; a burst may have the requests of one second."""
    in_flight: Count | None = None
    """Limit on requests that are not answered."""


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    keys: list[KeyConfig] = []


@dataclass(slots=True)
class _TokenBucket:
    """Rate limit as a token bucket: ``per_s`` tokens per second; it holds at most the tokens of one second."""

    per_s: float
    tokens: float
    filled_s: float
    """When tokens were last added."""

    def take(self, now_s: float) -> float:
        """Take a token and return 0.0; without a token, return the seconds until the next one."""
        burst = max(1.0, self.per_s)
        self.tokens = min(burst, self.tokens + (now_s - self.filled_s) * self.per_s)
        self.filled_s = now_s
        if self.tokens < 1.0:
            return (1.0 - self.tokens) / self.per_s
        self.tokens -= 1.0
        return 0.0


class Caller:
    """The user of one key, with counters that outlive a change of the keys file."""

    def __init__(self, name: str, now: Callable[[], float] = time.monotonic) -> None:
        """name: of the key, in metrics and logs. now: clock in seconds."""
        self.name, self._now = name, now
        self.config: KeyConfig | None = None
        """None: no limits."""
        self.removed = False
        self.rank = ANYONE
        self.requests = self.in_flight = 0
        self.refused: Counter[str] = Counter()  # by reason
        self._bucket: _TokenBucket | None = None
        """The rate limit; None: no limit."""

    def set_limits(self, config: KeyConfig) -> None:
        """Set the limits and priorities of the key; an unchanged rate limit keeps the tokens it has left."""
        previous, self.config, self.removed = self.config, config, False
        self.rank = ClientRank(config.priority, config.top_priority)
        rate = config.requests_per_s
        if rate is None:
            self._bucket = None
        elif previous is None or previous.requests_per_s != rate:
            self._bucket = _TokenBucket(rate, max(1.0, rate), self._now())

    def begin(self) -> None:
        """Admit a request and count it as in flight until ``end``; raises what ``admit`` raises."""
        self.admit()
        self.in_flight += 1

    def admit(self) -> None:
        """Count a new request against the rate limit; OverQuota beyond the key's limits, Unauthorised if removed."""
        if self.removed:
            raise Unauthorised("this server does not know the API key any more")
        self._check_in_flight()
        config = self.config
        if config is not None:
            wait_s = self._bucket.take(self._now()) if self._bucket else 0.0
            if wait_s > 0:
                self._refuse("rate", f"asks for more than {config.requests_per_s:g} requests per second", wait_s)
        self.requests += 1

    def enter(self) -> None:
        """Count an admitted request as in flight until ``end``.

        OverQuota if other requests have reached the limit since ``admit``.
        """
        self._check_in_flight()
        self.in_flight += 1

    def end(self) -> None:
        """Stop counting a request as in flight, after its answer."""
        self.in_flight -= 1

    def _check_in_flight(self) -> None:
        limit = self.config.in_flight if self.config else None
        if limit is not None and self.in_flight >= limit:
            self._refuse("in_flight", f"has {self.in_flight} requests in flight, which is its limit", 1.0)

    def _refuse(self, reason: str, what: str, wait_s: float) -> None:
        """Count a refusal and raise OverQuota.

        what: the message after the key's name. wait_s: when the client may try again.
        """
        self.refused[reason] += 1
        raise OverQuota(f"key {self.name!r} {what}; send it again later", wait_s)


class Keys:
    """The API keys of a server; without any, all requests are allowed."""

    def __init__(
        self, server_key: str | None = None, file: Path | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        """server_key: the server's own key. file: the keys file, InputError if it is invalid. now: clock in seconds."""
        self._file, self._now = file, now
        self._secret = hashlib.blake2b(key=secrets.token_bytes(32), digest_size=32)
        self.required = server_key is not None or file is not None
        self.callers: dict[str, Caller] = {}
        """Users of keys by name, including those whose key was removed."""
        self._without_key = None if self.required else self._caller_named(ANYBODY)
        own = {} if server_key is None else {self._digest(server_key): self._caller_named(OWN)}
        self._own_by_digest: dict[bytes, Caller] = own  # the user of the server's own key, if there is one
        self._by_digest = dict(own)
        self._next_check_s = 0.0
        self._file_signature: tuple[int, ...] | None = None
        if file is not None:
            self._file_signature = _signature(file)
            self._replace_file_keys(read_keys(file))

    def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """Return the user of a request's key, None without a valid key; *headers* have lower-case names.

        Checks the keys file for changes before, at most every LOOK_EVERY_S.
        """
        if self._without_key is not None:
            return self._without_key
        if self._file is not None and self._now() >= self._next_check_s:
            self.reload()
        key = headers.get("x-api-key", "")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            key = token.strip()
        return self._by_digest.get(self._digest(key))

    def require_caller(self, headers: Mapping[str, str]) -> Caller:
        """Return the user of a request's key; Unauthorised without a valid key."""
        caller = self.caller(headers)
        if caller is None:
            raise Unauthorised("this server wants an API key: Authorization: Bearer KEY")
        return caller

    def reload(self, *, force: bool = False) -> None:
        """Read the keys file again if it has changed, or if *force*; after an error, which is logged, the keys stay."""
        if self._file is None:
            return
        self._next_check_s = self._now() + LOOK_EVERY_S
        signature = _signature(self._file)
        if signature == self._file_signature and not force:
            return
        self._file_signature = signature
        try:
            self._replace_file_keys(read_keys(self._file))
        except InputError as error:
            log.error("%s; the keys stay as they were", error)
        else:
            log.info("%s: %d keys", self._file, len(self._by_digest) - len(self._own_by_digest))

    def _replace_file_keys(self, configs: list[KeyConfig]) -> None:
        """Replace the keys of the file by *configs*; the server's own key stays.

        Users whose keys were removed keep their counters, but their requests are refused.
        """
        digests = [self._digest(config.key) for config in configs]
        if self._own_by_digest.keys() & set(digests):
            raise InputError(f"{self._file}: one of its keys is the server's own; use another")
        for caller in self.callers.values():
            caller.removed = caller.name != OWN
        self._by_digest = dict(self._own_by_digest)
        for digest, config in zip(digests, configs, strict=True):
            self._by_digest[digest] = caller = self._caller_named(config.name)
            caller.set_limits(config)

    def _caller_named(self, name: str) -> Caller:
        """Return the user of this name, created at the first call."""
        return self.callers.setdefault(name, Caller(name, self._now))

    def _digest(self, key: str) -> bytes:
        """Return the digest of a key, keyed with the secret of this process."""
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
    """Return time, size and inode of a file, which differ after a change; None if it cannot be read."""
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
        normalised = None if names is None else {host_name(name) for name in names}
        self._names = None if normalised is None or ANY in normalised else frozenset(normalised)
        self._accepted: set[str] = set()

    def check(self, headers: Mapping[str, str]) -> None:
        """Refuse a request with a foreign name in ``Host``; one without the header is not from a browser."""
        host = headers.get("host")
        if self._names is None or not host or host in self._accepted:
            return
        if host_name(host) not in self._names:
            raise Forbidden(
                f"this server is not {host[:100]!r}; ask it under one of its names, or add that one to allowed_hosts"
            )
        if len(self._accepted) < MOST_SEEN:
            self._accepted.add(host)


def check_origin(method: str, headers: Mapping[str, str]) -> None:
    """Refuse POST requests from pages of another origin (cross-site requests)."""
    origin = headers.get("origin")
    if origin and method == "POST" and origin.partition("://")[2].lower() != headers.get("host", "").lower():
        raise BadRequest(f"requests from pages of {origin[:100]!r} are not taken")


def names_of(config: ServerConfig) -> tuple[str, ...] | None:
    """Return the host names that requests may have; None: any.

    By default those of this machine if the server listens on loopback only, else any.
    """
    if config.network.allowed_hosts is not None:
        return config.network.allowed_hosts
    return (*LOOPBACK_NAMES, config.network.host) if is_loopback(config.network.host) else None


def host_name(host: str) -> str:
    """Return the host name in *host*, a header ``Host`` or a setting, without the port."""
    if host.startswith("["):
        return _normalise_name(host.partition("]")[0])
    name, colon, port = host.rpartition(":")  # a colon in the name: an IPv6 address without brackets and port
    return _normalise_name(name if colon and port.isdigit() and ":" not in name else host)


def _normalise_name(name: str) -> str:
    """Return a host name in lower case, without brackets (IPv6) and without a dot at its end."""
    return name.strip("[]").rstrip(".").lower()

"""Retries of requests whose batch failed, and quarantine of inputs that kill workers.

The requests of a failed batch are retried one by one, because any of them may be the cause. A request whose worker died
is retried once, if its deadline allows that. If that worker dies, too, the request fails; if it was alone in its batch,
its inputs are quarantined: requests with the same inputs are refused for a while. A request that only met a worker that
is being started, and whose deadline is too soon to wait, gets an error that asks the client to send it again. Retries
are safe, because inference has no side effects.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from weft.base.errors import (
    BadRequest,
    Failed,
    Overloaded,
    RequestError,
    UnfitInputs,
    WorkerDied,
    WorkerStarting,
    first_line,
)
from weft.runtime.client_memory import Input, LentTensor
from weft.serving.tickets import ClientTicket

log = logging.getLogger("weft.engine")

MOST_DEATHS = 2
"""Worker deaths after which a request is not retried: one may be chance, two make the request suspicious."""
MOST_TRIES = 600
"""Limit on all retries of a request, also of innocent ones: half a minute of waiting for a worker that starts."""
QUARANTINE_S = 60.0
"""Duration of a quarantine. Shorter lets a client that repeats the request kill more workers; longer keeps out inputs
that failed by chance."""
MOST_QUARANTINED = 256
"""Digests in quarantine; beyond, the oldest is dropped. Bounds memory and the search for every request."""


class _Quarantine(NamedTuple):
    """When the quarantine of inputs ends, and their names, types and shapes, which are compared before digests."""

    until: int
    outline: tuple[object, ...]


class Retries:
    """Decides which requests are retried; *now* is the clock of the lanes."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self.quarantined: OrderedDict[bytes, _Quarantine] = OrderedDict()
        """Quarantined inputs by their digests, the oldest first."""
        self.quarantines = 0

    def admit(self, ticket: ClientTicket) -> None:
        """Refuse quarantined inputs. Digests are computed only for requests with the same names, types and shapes."""
        now = self._now()
        while self.quarantined and next(iter(self.quarantined.values())).until <= now:
            self.quarantined.popitem(last=False)
        outline = _outline(ticket)
        alike = any(entry.outline == outline for entry in self.quarantined.values())
        match = self.quarantined.get(_digest(ticket)) if alike else None
        if match is not None:
            rest_s = (match.until - now) / 1e9
            raise Overloaded(
                f"{ticket.model.name}: the same inputs killed their worker twice; refused for {rest_s:.0f} s more",
                reason="quarantined",
                retry_after_s=rest_s,
            )

    def verdict(self, ticket: ClientTicket, error: Exception, *, alone: bool, slack_ns: int) -> RequestError | float:
        """Return the error for a request, or the delay in seconds after which it is retried.

        alone: whether it was the only one in its batch. slack_ns: time to its strict deadline minus its expected
        computing time.
        """
        if not isinstance(error, WorkerDied):
            return client_error(ticket.model.name, error) if alone else 0.0
        ticket.tries += 1
        ticket.deaths += error.suspects > 0
        if ticket.deaths >= MOST_DEATHS:
            self._quarantine(ticket, error)
            return client_error(ticket.model.name, error)
        if ticket.tries < MOST_TRIES and slack_ns >= error.again_s * 1e9:
            return error.again_s
        return client_error(ticket.model.name, error)

    def _quarantine(self, ticket: ClientTicket, error: WorkerDied) -> None:
        """Quarantine inputs that were alone on a worker when it died for the second time."""
        log.warning("%s: a request was on %d workers when they died: %s", ticket.model.name, ticket.deaths, error)
        if error.suspects > 1 or ticket.gone:
            return
        self.quarantines += 1
        until = self._now() + round(QUARANTINE_S * 1e9)
        self.quarantined[_digest(ticket)] = _Quarantine(until, _outline(ticket))
        if len(self.quarantined) > MOST_QUARANTINED:
            self.quarantined.popitem(last=False)


def client_error(model: str, error: Exception) -> RequestError:
    """Convert an exception from a backend to the client's error; mostly a free dimension that the model cannot take."""
    if isinstance(error, WorkerDied):
        message = f"{model}: {error}"
        return WorkerDied(message, suspects=error.suspects) if error.suspects else WorkerStarting(message)
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UnfitInputs):
        return BadRequest(f"{model} cannot compute these inputs: {first_line(error)}")
    return Failed(f"{model}: {type(error).__name__}: {first_line(error)}")


def _outline(ticket: ClientTicket) -> tuple[object, ...]:
    """Return the model, and the names, types and shapes of inputs, which are cheap to compare."""
    tensors = sorted((name, str(value.dtype), value.shape) for name, value in ticket.inputs.items())
    return ticket.model.name, ticket.model.version, *tensors


def _digest(ticket: ClientTicket) -> bytes:
    digest = hashlib.blake2b(f"{ticket.model.name}\0{ticket.model.version}".encode(), digest_size=16)
    _add(digest, ticket.inputs)
    return digest.digest()


def _add(digest: hashlib.blake2b, inputs: Mapping[str, Input]) -> None:
    for name, value in sorted(inputs.items()):
        digest.update(f"\0{name}\0{value.dtype}\0{value.shape}\0".encode())
        digest.update(_content(value))


def _content(value: Input) -> bytes:
    """Return the bytes of an input, or its location if the server cannot read them."""
    if isinstance(value, LentTensor):
        try:
            return value.read().tobytes()
        except RequestError:
            return repr((value.lender.terms, value.offset)).encode()
    return repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()

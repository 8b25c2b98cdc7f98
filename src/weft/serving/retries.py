"""What becomes of a request whose batch could not be computed: it is told so, or tried once more.

A batch that fails is tried again member by member, for any of them may have been why. One whose worker died has another
try if there is time for it. If the worker dies again, the request is not tried any more; if it was alone there, it is
to blame, and others that bring the same inputs are refused for a while. Who only met a worker that was not there, and
cannot wait for the next, is told to come again.
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
"""A request that was on so many workers when they died is not tried again."""
MOST_TRIES = 600
"""However little a request has to do with it: half a minute of a worker that is being started."""
QUARANTINE_S = 60.0
MOST_QUARANTINED = 256


class _Quarantine(NamedTuple):
    """Until when inputs are refused, and what can be seen of them without reading them."""

    until: int
    outline: tuple[object, ...]


class SecondTries:
    """Decides who is tried again; *now* is the clock of the lanes."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self.quarantined: OrderedDict[bytes, _Quarantine] = OrderedDict()
        """Inputs that killed their workers, by their digests."""
        self.quarantines = 0

    def admit(self, ticket: ClientTicket) -> None:
        """Refuse inputs that killed their worker twice; only such as look like them are looked at in full."""
        now = self._now()
        while self.quarantined and next(iter(self.quarantined.values())).until <= now:
            self.quarantined.popitem(last=False)
        outline = _outline(ticket)
        alike = any(each.outline == outline for each in self.quarantined.values())
        found = self.quarantined.get(_digest(ticket)) if alike else None
        if found is not None:
            rest_s = (found.until - now) / 1e9
            raise Overloaded(
                f"{ticket.model.name}: the same inputs killed their worker twice; refused for {rest_s:.0f} s more",
                reason="quarantined",
                retry_after_s=rest_s,
            )

    def verdict(self, ticket: ClientTicket, error: Exception, *, alone: bool, slack_ns: int) -> RequestError | float:
        """What a request is told, or in how many seconds it is tried again.

        slack_ns: what is left until its strict deadline once it was computed.
        """
        if not isinstance(error, WorkerDied):
            return said(ticket.model.name, error) if alone else 0.0
        ticket.tries += 1
        ticket.deaths += error.suspects > 0
        if ticket.deaths >= MOST_DEATHS:
            self._quarantine(ticket, error)
            return said(ticket.model.name, error)
        if ticket.tries < MOST_TRIES and slack_ns >= error.again_s * 1e9:
            return error.again_s
        return said(ticket.model.name, error)

    def _quarantine(self, ticket: ClientTicket, error: WorkerDied) -> None:
        """Inputs that were alone with their worker when it died for the second time are to blame."""
        log.warning("%s: a request was on %d workers when they died: %s", ticket.model.name, ticket.deaths, error)
        if error.suspects > 1 or ticket.gone:
            return
        self.quarantines += 1
        until = self._now() + round(QUARANTINE_S * 1e9)
        self.quarantined[_digest(ticket)] = _Quarantine(until, _outline(ticket))
        if len(self.quarantined) > MOST_QUARANTINED:
            self.quarantined.popitem(last=False)


def said(model: str, error: Exception) -> RequestError:
    """What a client is told when its inputs could not be computed: mostly a free dimension the model cannot take."""
    if isinstance(error, WorkerDied):
        message = f"{model}: {error}"
        return WorkerDied(message, suspects=error.suspects) if error.suspects else WorkerStarting(message)
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UnfitInputs):
        return BadRequest(f"{model} cannot compute these inputs: {first_line(error)}")
    return Failed(f"{model}: {type(error).__name__}: {first_line(error)}")


def _outline(ticket: ClientTicket) -> tuple[object, ...]:
    """A model, and the names, types and shapes of inputs."""
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
    """The bytes of an input, or where they lie, if the server cannot see them."""
    if isinstance(value, LentTensor):
        try:
            return value.read().tobytes()
        except RequestError:
            return repr((value.lender.terms, value.offset)).encode()
    return repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()

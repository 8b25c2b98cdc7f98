"""The engine's feed of real clients: answers requests, retries those whose batch failed, quarantines deadly inputs.

All of it runs on the event loop's thread. Answers that become ready during a step of the engine are sent after the lane
has new work (``post``): encoding takes time in which the lane could compute.

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
from collections.abc import Callable
from typing import NamedTuple

from weft.base.errors import (
    BadRequest,
    Expired,
    Failed,
    Overloaded,
    RequestError,
    UnfitInputs,
    WorkerDied,
    WorkerStarting,
    first_line,
)
from weft.engine.engine import Completion
from weft.engine.policies.base import NO_DEADLINE
from weft.engine.tickets import Batch, Ticket
from weft.runtime.client_memory import Input, LentTensor
from weft.runtime.tensors import Array
from weft.serving.exit_rules import EXIT
from weft.serving.streams import ServedModel, ServedStreams
from weft.serving.tickets import BatchWork, ClientTicket, Reply

log = logging.getLogger("weft.engine")

Outcome = dict[str, Array] | RequestError

MOST_DEATHS = 2
"""Worker deaths after which a request is not retried: one may be chance, two make the request suspicious."""
MOST_TRIES = 600
"""Limit on all retries of a request, also of innocent ones: half a minute of waiting for a worker that starts."""
QUARANTINE_S = 60.0
"""Duration of a quarantine. Shorter lets a client that repeats the request kill more workers; longer keeps out inputs
that failed by chance."""
MOST_QUARANTINED = 256
"""Digests in quarantine; beyond, the oldest is dropped. Bounds memory and the search for every request."""


class ClientFeed:
    """Answers each admitted request exactly once; the engine calls its methods when batches and requests progress."""

    arrivals = None
    """The engine draws no arrivals: requests come by ``Dispatcher.submit``."""

    def __init__(self, now: Callable[[], int], retry: Callable[[ClientTicket, float], None]) -> None:
        """now: the clock of the lanes. retry: puts a request into the queues again after a delay in seconds."""
        self._now, self._retry = now, retry
        self.streams: ServedStreams
        """Set by the dispatcher: streams need the engine's queues, which are created after this feed."""
        self.retries = Retries(now)
        self.unanswered: set[ClientTicket] = set()
        self.outbox: list[tuple[ClientTicket, Reply, Outcome]] = []  # answers that ``post`` will send
        self.stepping = False
        """Whether the engine is in a step, so that answers go to the outbox."""
        self.emptied: Callable[[ServedModel], None] | None = None
        """Called when the last lease on a model's body is released."""

    def admitted(self, ticket: ClientTicket) -> None:
        """Take a lease on the request's model, which is not closed before the answer."""
        ticket.model.body.leases += 1
        self.unanswered.add(ticket)

    def served(self, batch: Batch, completion: Completion) -> None:
        """Answer the requests of a batch that was computed to its end."""
        work = batch.work
        assert isinstance(work, BatchWork)
        work.stream.measured = True
        if work.model.exit_rules:  # the end is the last exit, where all remaining requests leave
            self._answer_leaving(work)
        else:
            for ticket, outputs in _results(work):
                ticket.compute_ns += work.compute_ns
                if isinstance(outputs, dict) and ticket.model.exit_rules:  # stitched: exits are chosen at the end
                    ticket.model.statistics.exits.update(outputs[EXIT].tolist())
                self.settle(ticket, outputs)
        self._count_execution(work)
        self._release_batch(work)

    def leave(self, batch: Batch, completion: Completion) -> list[Ticket]:
        """Answer the requests that leave at the exit that a batch has reached; return those that continue."""
        work = batch.work
        assert isinstance(work, BatchWork)
        self._answer_leaving(work)
        if not work.tickets:
            self._count_execution(work)
        return list(work.tickets)

    def _answer_leaving(self, work: BatchWork) -> None:
        """Answer the requests that leave at the exit that a batch has reached."""
        exit_rules = work.model.exit_rules
        assert exit_rules is not None
        rates_changed = False
        for ticket, outputs in work.remove_leaving():
            ticket.compute_ns += work.compute_ns
            for number in outputs[EXIT].tolist():
                ticket.model.statistics.exits[number] += 1
                rates_changed |= exit_rules.shares.count_exit(number - 1)
            self.settle(ticket, outputs)
        if rates_changed:
            self.streams.update_exit_rates(work.model)

    def merged(self, batch: Batch, other: Batch) -> None:
        """Move the requests and tensors of *other*, which has caught up with *batch*, into *batch*."""
        target, joining = batch.work, other.work
        assert isinstance(target, BatchWork) and isinstance(joining, BatchWork)
        target.join(joining)
        for model in joining.rows_by_model():
            model.statistics.merges += 1
        self._count_execution(joining)

    def _count_execution(self, work: BatchWork) -> None:
        """Count a batch in the statistics of its models, with the rows it began with."""
        work.stream.computed_batches += 1
        for model, rows in work.rows_at_start.items():
            model.statistics.executed(rows, work.compute_ns)

    def dropped(self, ticket: Ticket, now: int) -> None:
        """Answer a request that the engine dropped because of its strict deadline."""
        assert isinstance(ticket, ClientTicket)
        if now >= ticket.due:
            self.settle(ticket, Expired(f"{ticket.model.name}: its deadline passed before it was done"))
            return
        if not ticket.began:  # dropped only because of its expected time, which may be too high
            self.streams.relax_estimates(self.streams[ticket.stream])
        self.settle(ticket, Expired(f"{ticket.model.name}: its deadline cannot be met any more"))

    def refused(self, ticket: Ticket, now: int) -> None:
        """Answer a request for which the queue had no room."""
        assert isinstance(ticket, ClientTicket)
        self.settle(ticket, Overloaded(f"{ticket.model.name}: its queue is full; send it again later"))

    def failed(self, batch: Batch, error: Exception) -> None:
        """Answer with the error, or retry each request in a batch of its own: any of them may have been the cause."""
        alone, now = len(batch.members) == 1, self._now()
        for ticket in batch.members:
            assert isinstance(ticket, ClientTicket)
            slack_ns = ticket.due - now - self.streams.expected_ns(ticket.stream) if ticket.strict else NO_DEADLINE
            verdict = self.retries.verdict(ticket, error, alone=alone, slack_ns=slack_ns)
            if isinstance(verdict, RequestError):
                self.settle(ticket, verdict)
            else:
                self._retry(ticket, verdict)

    def ended(self, batch: Batch) -> None:
        """Release a batch that ended without outputs."""
        if isinstance(batch.work, BatchWork):
            self._release_batch(batch.work)

    def _release_batch(self, work: BatchWork) -> None:
        """Release the tensors of a batch and its lease on the body."""
        work.drop()
        self.release(work.model)

    def release(self, body: ServedModel) -> None:
        """Release a lease of a request or a batch on a body."""
        body.leases -= 1
        if not body.leases and self.emptied:
            self.emptied(body)

    def settle(self, ticket: ClientTicket, outcome: Outcome) -> None:
        """Answer a request; no effect if it was answered before.

        The protocol that sends the answer counts it (``ClientTicket.settle``).
        """
        if ticket.reply is _ignore_outcome:
            return
        reply, ticket.reply = ticket.reply, _ignore_outcome
        ticket.gone = True
        self.unanswered.discard(ticket)
        if self.stepping:
            self.outbox.append((ticket, reply, outcome))
        else:
            self._answer(ticket, reply, outcome)

    def post(self) -> None:
        """Send the answers in the outbox."""
        waiting, self.outbox = self.outbox, []
        for ticket, reply, outcome in waiting:
            self._answer(ticket, reply, outcome)

    def _answer(self, ticket: ClientTicket, reply: Reply, outcome: Outcome) -> None:
        """Call the reply callback of a request, then release its inputs and its lease on the model."""
        try:
            reply(ticket, outcome)
        except Exception:  # the other requests of the batch still have to be answered
            log.exception("%s: an answer could not be given", ticket.model.name)
        # The heap of deadlines may keep the ticket for longer than its tensors and regions are needed.
        ticket.inputs, ticket.output_parts = {}, {}
        self.release(ticket.model.body)


def _results(work: BatchWork) -> list[tuple[ClientTicket, Outcome]]:
    """Pair every ticket with its outputs, or with an error if the outputs of the batch do not fit its requests."""
    try:
        return list(work.results())
    except Exception as error:
        log.exception("%s: the outputs of a batch do not fit its requests", work.model.name)
        return [(ticket, client_error(ticket.model.name, error)) for ticket in work.tickets]


def _ignore_outcome(ticket: ClientTicket, outcome: object) -> None:
    """Replace the reply callback of a request that has been answered."""


class _Quarantine(NamedTuple):
    """The quarantine of one request's inputs."""

    until: int
    """Its end, on the clock of the lanes."""
    outline: tuple[object, ...]
    """Names, types and shapes of the inputs, which are compared before digests."""


class Retries:
    """Decides whether a request of a failed batch is retried, and quarantines inputs that kill workers.

    The rules are in the module's docstring.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        """now: the clock of the lanes, in nanoseconds."""
        self._now = now
        self.quarantined: OrderedDict[bytes, _Quarantine] = OrderedDict()
        """Quarantined inputs by their digests, the oldest first."""
        self.quarantines = 0

    def check_quarantine(self, ticket: ClientTicket) -> None:
        """Raise Overloaded if the inputs of a request are quarantined; first remove quarantines that have ended.

        The digest is computed only if quarantined inputs have the same names, types and shapes: digests are slow.
        """
        now = self._now()
        while self.quarantined and next(iter(self.quarantined.values())).until <= now:
            self.quarantined.popitem(last=False)
        outline = _outline(ticket)
        may_match = any(entry.outline == outline for entry in self.quarantined.values())
        match = self.quarantined.get(_digest(ticket)) if may_match else None
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
        ticket.deaths += error.suspects > 0  # 0: this request is not the cause
        if ticket.deaths >= MOST_DEATHS:
            self._quarantine(ticket, error)
            return client_error(ticket.model.name, error)
        if ticket.tries < MOST_TRIES and slack_ns >= error.again_s * 1e9:
            return error.again_s
        return client_error(ticket.model.name, error)

    def _quarantine(self, ticket: ClientTicket, error: WorkerDied) -> None:
        """Quarantine inputs that were alone on a worker when it died for the second time."""
        log.warning("%s: a request was on %d workers when they died: %s", ticket.model.name, ticket.deaths, error)
        if error.suspects > 1 or ticket.gone:  # others were on the worker, too, or the inputs were released
            return
        self.quarantines += 1
        until = self._now() + round(QUARANTINE_S * 1e9)
        self.quarantined[_digest(ticket)] = _Quarantine(until, _outline(ticket))
        if len(self.quarantined) > MOST_QUARANTINED:
            self.quarantined.popitem(last=False)


def client_error(model: str, error: Exception) -> RequestError:
    """Convert an exception from a backend to the client's error.

    Most such exceptions are inputs with a free dimension of a size that the model cannot compute.
    """
    if isinstance(error, WorkerDied):
        message = f"{model}: {error}"
        # without suspects the request was never computed: its worker was being started
        return WorkerDied(message, suspects=error.suspects) if error.suspects else WorkerStarting(message)
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UnfitInputs):
        return BadRequest(f"{model} cannot compute these inputs: {first_line(error)}")
    return Failed(f"{model}: {type(error).__name__}: {first_line(error)}")


def _outline(ticket: ClientTicket) -> tuple[object, ...]:
    """Return the model of a request, and the names, types and shapes of its inputs, which are cheap to compare."""
    tensors = sorted((name, str(value.dtype), value.shape) for name, value in ticket.inputs.items())
    return ticket.model.name, ticket.model.version, *tensors


def _digest(ticket: ClientTicket) -> bytes:
    """Return a digest of the model and the inputs of a request, which identifies quarantined inputs."""
    digest = hashlib.blake2b(f"{ticket.model.name}\0{ticket.model.version}".encode(), digest_size=16)
    for name, value in sorted(ticket.inputs.items()):
        digest.update(f"\0{name}\0{value.dtype}\0{value.shape}\0".encode())
        digest.update(_content_bytes(value))
    return digest.digest()


def _content_bytes(value: Input) -> bytes:
    """Return the bytes of an input, or its location if the server cannot read them."""
    if isinstance(value, LentTensor):
        try:
            return value.read().tobytes()
        except RequestError:
            return repr((value.lender.terms, value.offset)).encode()
    return repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()

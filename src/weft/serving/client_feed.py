"""The engine's feed of real clients: answers requests, and retries those whose batch failed (``retries``).

All of it runs on the event loop's thread. Answers that become ready during a step of the engine are sent after the lane
has new work (``post``): encoding takes time in which the lane could compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from weft.base.errors import Expired, Overloaded, RequestError
from weft.engine.engine import Completion
from weft.engine.policies.base import NO_DEADLINE
from weft.engine.tickets import Batch, Ticket
from weft.runtime.tensors import Array
from weft.serving.exit_rules import EXIT
from weft.serving.retries import Retries, client_error
from weft.serving.streams import ServedModel, ServedStreams
from weft.serving.tickets import BatchWork, ClientTicket, Reply

log = logging.getLogger("weft.engine")

Outcome = dict[str, Array] | RequestError


class ClientFeed:
    """Answers each admitted request exactly once.

    now: the clock of the lanes. retry: puts a request into the queues again after a delay in seconds.
    """

    arrivals = None

    def __init__(self, now: Callable[[], int], retry: Callable[[ClientTicket, float], None]) -> None:
        self._now, self._retry = now, retry
        self.streams: ServedStreams
        """Set by the dispatcher, after the source whose queues these are."""
        self.retries = Retries(now)
        self.unanswered: set[ClientTicket] = set()
        self.outbox: list[tuple[ClientTicket, Reply, Outcome]] = []
        self.stepping = False
        """Whether the engine is in a step, so that answers go to the outbox."""
        self.emptied: Callable[[ServedModel], None] | None = None
        """Called when the last lease on a model's body is released."""

    def admitted(self, ticket: ClientTicket) -> None:
        """Take a lease on the request's model, which is not closed before the answer."""
        ticket.model.body.leases += 1
        self.unanswered.add(ticket)

    def served(self, batch: Batch, completion: Completion) -> None:
        work = batch.work
        assert isinstance(work, BatchWork)
        work.stream.measured = True
        if work.model.leaving:
            self._depart(work)
        else:
            for ticket, outputs in _results(work):
                ticket.compute_ns += work.compute_ns
                if isinstance(outputs, dict) and ticket.model.leaving:
                    ticket.model.statistics.exits.update(outputs[EXIT].tolist())
                self.settle(ticket, outputs)
        self._executed(work)
        self._drop(work)

    def leave(self, batch: Batch, completion: Completion) -> list[Ticket]:
        work = batch.work
        assert isinstance(work, BatchWork)
        self._depart(work)
        if not work.tickets:
            self._executed(work)
        return list(work.tickets)

    def _depart(self, work: BatchWork) -> None:
        """Answer the requests that leave at the exit that a batch has reached."""
        leaving = work.model.leaving
        assert leaving is not None
        moved = False
        for ticket, outputs in work.departing():
            ticket.compute_ns += work.compute_ns
            for number in outputs[EXIT].tolist():
                ticket.model.statistics.exits[number] += 1
                moved |= leaving.shares.left(number - 1)
            self.settle(ticket, outputs)
        if moved:
            self.streams.expect_leaving(work.model)

    def merged(self, batch: Batch, other: Batch) -> None:
        kept, joining = batch.work, other.work
        assert isinstance(kept, BatchWork) and isinstance(joining, BatchWork)
        kept.join(joining)
        for model in joining.shares():
            model.statistics.merges += 1
        self._executed(joining)

    def _executed(self, work: BatchWork) -> None:
        work.stream.seen += 1
        for model, rows in work.began.items():
            model.statistics.executed(rows, work.compute_ns)

    def dropped(self, ticket: Ticket, now: int) -> None:
        assert isinstance(ticket, ClientTicket)
        if now >= ticket.due:
            self.settle(ticket, Expired(f"{ticket.model.name}: its deadline passed before it was done"))
            return
        if not ticket.began:
            self.streams.doubt(self.streams[ticket.stream])
        self.settle(ticket, Expired(f"{ticket.model.name}: its deadline cannot be met any more"))

    def refused(self, ticket: Ticket, now: int) -> None:
        assert isinstance(ticket, ClientTicket)
        self.settle(ticket, Overloaded(f"{ticket.model.name}: its queue is full; send it again later"))

    def failed(self, batch: Batch, error: Exception) -> None:
        """Answer with the error, or retry each request in a batch of its own: any of them may have been the cause."""
        alone, now = len(batch.members) == 1, self._now()
        for ticket in batch.members:
            assert isinstance(ticket, ClientTicket)
            slack = ticket.due - now - self.streams.expected_ns(ticket.stream) if ticket.strict else NO_DEADLINE
            verdict = self.retries.verdict(ticket, error, alone=alone, slack_ns=slack)
            if isinstance(verdict, RequestError):
                self.settle(ticket, verdict)
            else:
                self._retry(ticket, verdict)

    def ended(self, batch: Batch) -> None:
        if isinstance(batch.work, BatchWork):
            self._drop(batch.work)

    def _drop(self, work: BatchWork) -> None:
        work.drop()
        self.release(work.model)

    def release(self, body: ServedModel) -> None:
        """Release a lease of a request or a batch on a body."""
        body.leases -= 1
        if not body.leases and self.emptied:
            self.emptied(body)

    def settle(self, ticket: ClientTicket, outcome: Outcome) -> None:
        """Answer a request once. The protocol that sends the answer counts it (``ClientTicket.settle``)."""
        if ticket.reply is _answered:
            return
        reply, ticket.reply = ticket.reply, _answered
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
        try:
            reply(ticket, outcome)
        except Exception:  # the other requests of the batch still have to be answered
            log.exception("%s: an answer could not be given", ticket.model.name)
        ticket.inputs = {}  # the heap of deadlines may keep the ticket for longer than its inputs are needed
        self.release(ticket.model.body)


def _results(work: BatchWork) -> list[tuple[ClientTicket, Outcome]]:
    """Pair every ticket with its outputs, or with an error if the outputs of the batch do not fit its requests."""
    try:
        return list(work.results())
    except Exception as error:
        log.exception("%s: the outputs of a batch do not fit its requests", work.model.name)
        return [(ticket, client_error(ticket.model.name, error)) for ticket in work.tickets]


def _answered(ticket: ClientTicket, outcome: object) -> None:
    """Replace the reply callback of a request that has been answered."""

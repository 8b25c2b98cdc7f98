"""Requests that arrive, wait, are batched and have deadlines, as a source of work.

Each stream has a queue (``queues``), in order of deadlines. Waiting requests become a batch (``batches``), whose layers
are offered one by one. At an exit some of its requests may leave; for a policy that refills, batches that have reached
the same layer are merged. ``lateness`` decides what happens to requests that can no longer be on time, ``admission``
which requests are accepted, and ``steering`` how confident an early answer must be. The feed brings requests and takes
answers: a simulated arrival process or real clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from weft.devices.decoupled import DeviceClocks
from weft.engine.admission import Admission, Refusal, Rests
from weft.engine.batches import Abortable, Batcher, Rooms, most_batches
from weft.engine.engine import Completion, Offer
from weft.engine.lane_queues import MOST_AHEAD
from weft.engine.lateness import late_work, weave_late_heads
from weft.engine.policies.base import NO_DEADLINE, Candidate, Event, EventKind, LateWork, Policy
from weft.engine.queues import Queues, StreamQueue, StrictDeadlines
from weft.engine.steering import Steered
from weft.engine.tickets import Batch, Feed, Terms, Ticket

QUEUE_PLACES = 1 << 16
"""Most requests in one queue. The limit bounds memory under sustained overload, where requests without strict deadlines
are never refused for lateness; it is far above any queue that is still served in time."""

Joined = Callable[[int, int, int], None]
"""Callback for merged batches: a stream, the query that goes on, and the query that becomes a part of it."""


class Requests:
    """Offers the next layer of every batch in flight, and the first layer of every batch that is ready.

    policy: decides how batches are formed and when a request counts as late.
    feed: the simulated or real clients.
    remaining: estimated ticks from each layer of each program to the end of that program.
    rests, abortable, rooms: methods of the executor: ``Executor.rests`` and ``abortable``, ``RequestExecutor.rooms``.
    joined: called when two batches are merged, for executors that keep a record of batches.
    late: the rule for requests that can no longer be on time and are not strict (``lateness``).
    places: how many requests may wait in all queues together.
    """

    def __init__(
        self,
        policy: Policy,
        feed: Feed,
        remaining: Sequence[Sequence[int]],
        rests: Rests,
        abortable: Abortable,
        rooms: Rooms = tuple,
        *,
        joined: Joined | None = None,
        late: str = "weave",
        places: int = NO_DEADLINE,
    ) -> None:
        self._feed, self._remaining, self._joined = feed, remaining, joined
        self._arrivals = feed.arrivals
        self.events: list[Event] = []
        self._rests, self._abortable, self._rooms = rests, abortable, rooms
        self.queues = Queues(remaining, places)
        self._requested_terms: dict[int, Terms] = {}
        """Stream -> the terms that it was opened with, before a policy without batches reduces them."""
        self.deadlines = StrictDeadlines()
        self._now = 0
        self._configure(policy, late)

    def _configure(self, policy: Policy, late: str) -> None:
        """Build all that depends on the policy and on the rule for late requests."""
        self._setting = policy.setting
        self._late_work = late_work(policy, late)
        self._demote = self._late_work is not LateWork.AMONG_OTHERS
        self._foresight, self._refills = policy.foresight, policy.traits.refills
        self._shares_batches = policy.traits.batches
        self._batcher = Batcher(policy, self.queues, self._remaining, self._abortable, self._rooms)
        self.admission = Admission(
            self.queues, self._batcher, policy, self._rests, self._abortable, late_gives_way=self._demote
        )

    def follow(self, policy: Policy, late: str) -> None:
        """Switch to another policy and rule for late requests; waiting and running requests are kept."""
        self._configure(policy, late)
        for stream, requested in self._requested_terms.items():
            terms = self._allowed_terms(requested)
            self.queues[stream].rearrange(terms, self._batch_places(terms))

    def open(self, terms: Terms, steered: Steered | None = None, *, stream: int | None = None) -> int:
        """Add a stream and return its number.

        steered: the exit threshold of its model; None without early exits.
        stream: the number of an idle stream to replace; None: a new number.
        """
        number = len(self.queues) if stream is None else stream
        self._requested_terms[number], terms = terms, self._allowed_terms(terms)
        self.queues.add(StreamQueue(number, terms, self._batch_places(terms), steered))
        return number

    def _allowed_terms(self, terms: Terms) -> Terms:
        return terms if self._shares_batches else terms._replace(max_batch=1)

    def _batch_places(self, terms: Terms) -> int:
        """Return how many batches of a stream may be in flight.

        A policy that refills batches may have one in flight for every request. Where lanes take layers ahead, a batch
        whose last layer is on a lane still holds a place while the next batch begins; so do batches that were revoked
        while they waited on a lane, until it reaches them.
        """
        lanes, ahead = self._setting.lanes, self._setting.ahead
        ending = (1 + ahead) * lanes if ahead else 0
        if self._setting.programs[terms.programs].gated:
            ending += MOST_AHEAD * lanes
        refilled = terms.max_batch * lanes + ending if self._refills else 0
        return max(most_batches(self._late_work), 2 * lanes + ending, refilled)

    def done(self) -> bool:
        return self._arrivals is not None and self._arrivals.exhausted() and not self.queues.busy()

    def next_event(self) -> int:
        """Return the tick of the next deadline, arrival or batch that becomes ready, whichever is first."""
        soonest = self.deadlines.next()
        if self._arrivals:
            soonest = min(soonest, self._arrivals.next_arrival())
        if self.queues.line.waiting:
            for queue in self.queues.waiting():
                wait = self._batcher.ready_at(queue)
                if self._now < wait < soonest:
                    soonest = wait
        return soonest if soonest > self._now else self._now

    def at(self, now: int) -> Iterator[tuple[int, int]]:
        """Drop overdue requests, then admit arrivals; yield the stream and query of running batches to stop.

        In this order, so that admission does not count the work of overdue requests.
        """
        self._now = now
        if self.deadlines.any_passed(now):
            yield from self._expire(now)
        for ticket in self._arrivals.take(now) if self._arrivals else ():
            if self.admit(ticket, now):
                ticket.gone = True
                self._feed.refused(ticket, now)

    def admit(self, ticket: Ticket, now: int) -> Refusal | None:
        """Put a request that arrived into its queue and return None, or return the reason why it is refused."""
        refusal = self.admission.refusal(ticket, now)
        if refusal is None and len(self.queues[ticket.stream].waiting) >= QUEUE_PLACES:
            refusal = Refusal("line_full")
        if refusal is None:
            self.put(ticket)
        return refusal

    def put(self, ticket: Ticket) -> None:
        """Put a request into its queue, and watch its deadline if that is strict."""
        self.events.append(self.queues.put(ticket).arrival_event)
        if ticket.strict:
            self.deadlines.watch(ticket)

    def _expire(self, now: int) -> Iterator[tuple[int, int]]:
        """Drop strict requests that are due; yield the stream and query of running batches without requests left."""
        for ticket in self.deadlines.passed(now):
            stream, batch = ticket.stream, self.queues.withdraw(ticket)
            self.events.append(Event(EventKind.DEADLINE, stream, batch.query if batch else -1))
            self._feed.dropped(ticket, ticket.due)  # may change ``ticket.stream``, so ``stream`` was read before
            if batch and batch.running and batch.all_gone:
                yield stream, batch.query

    def offer(self, device: DeviceClocks) -> Offer:
        """Sort out late requests, and return the next layers: all, and those that may be issued."""
        self._now = now = device.channel_free
        heads: list[Candidate] = []
        clock = max(device.array_free, now)
        busy = self.queues.busy()
        for queue in busy:
            if self._setting.shares:
                queue.update_share(now)
            if queue.waiting:
                queue.deepest = max(queue.deepest, len(queue.waiting))
                self._sort_out_waiting(queue, clock)
            if queue.by_query:
                self._sort_out_batches(queue, clock)
            heads += self._batcher.heads(queue, now)
        if self._refills:
            return Offer(all_heads := tuple(heads), all_heads)
        on_time = [head for head in heads if head.deadline < NO_DEADLINE]
        weaves = self._late_work is LateWork.WOVEN
        if weaves or not on_time:
            heads += [head for queue in busy if queue.late for head in self._batcher.late_heads(queue)]
        all_heads = tuple(heads)
        if not on_time or len(on_time) == len(heads):
            return Offer(all_heads, all_heads)
        return Offer(all_heads, tuple(weave_late_heads(heads, device, self._setting) if weaves else on_time))

    def lane_awaited(self) -> bool:
        return self.queues.lane_awaited

    def issued(self, candidate: Candidate, step: int) -> Batch:
        """Account for a candidate issued as number *step*, which begins its batch if that is new."""
        batch = self.queues.batch_of(candidate) or self._batcher.begin(candidate)
        batch.last_issued, batch.layer, batch.running = step, batch.layer + 1, True
        queue = self.queues[candidate.stream]
        queue.served += max(candidate.fetch, candidate.compute)
        if self._setting.shares:
            queue.update_share(self._now, candidate.compute)
        if queue.steered and candidate.layer == 0:
            self._steer(queue.steered, queue.terms, batch.members)
        return batch

    def place(self, stream: int, query: int, layer: int, *, running: bool, lane: int = -1) -> None:
        """Set up to which layer a batch counts as issued, unless it was given up.

        running: False: it is offered from that layer on, as if it had paused there, although its lane still computes.
        lane: the number of that lane, where batches stay on their lanes.
        """
        queue = self.queues[stream]
        batch = queue.by_query.get(query)
        if batch:
            batch.running = running
            self._move(queue, batch, layer)
            if layer and lane >= 0 and self._setting.apart:
                batch.home = lane

    def _move(self, queue: StreamQueue, batch: Batch, layer: int) -> None:
        """Set up to which layer a batch counts as issued, and correct the service of its stream by the difference."""
        if layer == batch.layer:
            return
        program = self._setting.programs[batch.program]
        start, end = sorted((batch.layer, layer))
        ticks = sum(program.work[start:end]) * (1 if layer > batch.layer else -1)
        batch.layer = layer
        queue.served += ticks
        if self._setting.shares:
            queue.update_share(self._now, ticks)

    def _steer(self, steered: Steered, terms: Terms, members: list[Ticket]) -> None:
        """Set the exit threshold of each member of a batch that begins: the request's own, or that of the present load.

        The load is the time that another request would wait now. The part of one request alone after its first layer
        is subtracted: a single running request is no load.
        """
        if steered.steering.floor is not None:
            rests = self._remaining[terms.programs]
            allowed = min(ticket.due - ticket.arrival for ticket in members)
            ahead = self.admission.free_in(self._now + allowed, self._now) - rests[1]
            steered.update(self._now, max(0, ahead), allowed - rests[0])
        for ticket in members:
            ticket.threshold = steered.threshold if ticket.wanted is None else ticket.wanted

    def completed(self, completion: Completion) -> None:
        """Account for a layer that was computed, was stopped, or failed."""
        batch = self.queues.batch_of(completion.candidate)
        if batch is None:  # it was given up while its lane computed up to the next gate
            assert completion.layers is not None, "without gates, a batch is given up when its layer has ended"
            return
        queue = self.queues[completion.candidate.stream]
        batch.running = False
        if completion.layers is not None:
            self._move(queue, batch, completion.candidate.layer + completion.layers)
        if completion.error is not None:
            self._end(queue, batch)
            self._feed.failed(batch, completion.error)
            self._feed.ended(batch)
        elif completion.aborted:
            if completion.layers is None:
                batch.layer -= 1
            elif not batch.layer:
                self._dissolve(queue, batch)
            elif self._setting.apart:
                batch.home = completion.lane
            self.events.append(Event(EventKind.REVOKED, queue.stream, batch.query))
        else:
            batch.home = completion.lane if self._setting.apart else None
            self._advance(queue, batch, completion)

    def _dissolve(self, queue: StreamQueue, batch: Batch) -> None:
        """End a batch that left before its first layer: its requests wait again, and may form a larger batch."""
        queue.end(batch)
        for ticket in batch.members:
            if not ticket.gone:
                self.queues.put(ticket)
        self._feed.ended(batch)

    def _advance(self, queue: StreamQueue, batch: Batch, completion: Completion) -> None:
        """Account for a computed layer: end the batch, answer requests that leave at an exit, or merge batches."""
        program = self._setting.programs[batch.program]
        if batch.layer == len(program.names):
            self._end(queue, batch)
            self._drop_overdue(batch, completion)
            self._feed.served(batch, completion)
            _mark_gone(batch.members)
            return
        if batch.layer in program.exits:
            self._drop_overdue(batch, completion)
            staying = self._feed.leave(batch, completion)
            _mark_gone([ticket for ticket in batch.members if ticket not in staying])
            if not staying:
                self._end(queue, batch)
                self._feed.ended(batch)
                return
            _regroup(queue, batch, staying)
        # after every layer of every batch: the tuple is built directly, in half the time
        self.events.append(tuple.__new__(Event, (EventKind.SEGMENT_END, queue.stream, batch.query)))
        if self._refills:
            self._merge(queue, batch)

    def _drop_overdue(self, batch: Batch, completion: Completion) -> None:
        """Drop the strict requests of a batch whose deadlines passed before its layer ended.

        ``_expire`` cannot do that alone: a simulated NPU reports the end of a layer ahead of time.
        """
        for ticket in batch.members:
            if ticket.strict and not ticket.gone and ticket.due < completion.times.compute_end:
                self._drop(ticket, ticket.due)

    def _drop(self, ticket: Ticket, now: int) -> None:
        if not ticket.gone:
            ticket.gone = True
            self._feed.dropped(ticket, now)

    def _merge(self, queue: StreamQueue, batch: Batch) -> None:
        """Merge a batch with batches that wait at the same layer, up to the largest batch; the oldest query stays."""
        for other in [waiting for waiting in queue.batches if waiting is not batch and not waiting.running]:
            together = len(batch.members) + len(other.members)
            if (other.layer, other.home) != (batch.layer, batch.home) or together > queue.terms.max_batch:
                continue
            target, joining = (batch, other) if batch.query < other.query else (other, batch)
            self._feed.merged(target, joining)
            if self._joined:
                self._joined(queue.stream, target.query, joining.query)
            self._end(queue, joining)
            target.late = target.late and joining.late
            target.deadline = min(target.deadline, joining.deadline)
            target.last_issued = max(target.last_issued, joining.last_issued)
            _regroup(queue, target, target.members + joining.members)
            self._feed.ended(joining)
            batch = target

    def _sort_out_waiting(self, queue: StreamQueue, clock: int) -> None:
        """Take requests that cannot be on time out of the queue: strict ones are dropped, others become late requests.

        clock: the earliest tick at which the device could compute for them.
        """
        waiting, place = queue.waiting, 0
        expected_end = clock + self._remaining[queue.terms.programs][0] * self._foresight // 100
        while place < len(waiting) and waiting[place].due < expected_end:
            ticket = waiting[place]
            if not (ticket.strict or self._demote):
                place += 1
                continue
            del waiting[place]
            self.events.append(Event(EventKind.DEADLINE, queue.stream))
            if not ticket.strict and len(queue.late) < QUEUE_PLACES:
                queue.late.append(ticket)
                continue
            self.queues.count(ticket, -1)
            if ticket.strict:
                self._drop(ticket, clock)
            else:
                ticket.gone = True
                self._feed.refused(ticket, clock)

    def _sort_out_batches(self, queue: StreamQueue, clock: int) -> None:
        """Mark batches that have become late, and end batches whose requests are all gone.

        clock: the earliest tick at which the device could compute for them.
        """
        for batch in queue.in_flight:
            if not batch or batch.running:
                continue
            if batch.all_gone:
                self._give_up(queue, batch, clock)
                continue
            if batch.late and not self._refills:
                continue
            expected_end = clock + self._remaining[batch.program][batch.layer] * self._foresight // 100
            if not self._refills:
                if expected_end <= batch.deadline and len(batch.members) == 1:
                    continue
                # A request that counted as late does not count as on time again.
                expected_end = max(expected_end, batch.deadline)
            if not (self._demote or any(ticket.strict or ticket.gone for ticket in batch.members)):
                continue
            reachable_dues = [ticket.due for ticket in batch.members if not ticket.gone and ticket.due >= expected_end]
            if reachable_dues:
                batch.late, batch.deadline = False, min(reachable_dues)
            elif all(ticket.strict or ticket.gone for ticket in batch.members):
                self._give_up(queue, batch, clock)
            elif self._demote:
                if not batch.late:
                    self.events.append(Event(EventKind.DEADLINE, queue.stream, batch.query))
                batch.late, batch.deadline = True, NO_DEADLINE
            else:
                batch.deadline = min(ticket.due for ticket in batch.members)

    def _give_up(self, queue: StreamQueue, batch: Batch, clock: int) -> None:
        """End a batch half-way, because every request of it is gone or is strict and too late."""
        self._end(queue, batch)
        for ticket in batch.members:
            self._drop(ticket, clock)
        self._feed.ended(batch)

    def _end(self, queue: StreamQueue, batch: Batch) -> None:
        queue.end(batch)
        self.events.append(Event(EventKind.BATCH_END, queue.stream, batch.query))


def _regroup(queue: StreamQueue, batch: Batch, members: list[Ticket]) -> None:
    """Replace the requests of a batch, and set its program and deadline from them.

    The deadline does not go back to an earlier one: a request that counted as late does not count as on time again.
    """
    batch.program = queue.terms.programs + len(members) - 1
    batch.members = members
    if not batch.late:
        batch.deadline = min([t.due for t in members if t.due >= batch.deadline], default=min(t.due for t in members))


def _mark_gone(tickets: Iterable[Ticket]) -> None:
    """Mark requests as answered."""
    for ticket in tickets:
        ticket.gone = True

"""Requests that arrive, wait, are batched and have deadlines, as a source of work.

Each stream has a queue, in order of deadlines. A batch is ready when it is full, its first request has waited long
enough, or it would otherwise be late; it then becomes a job, whose layers are offered one by one. At an exit some of a
job's requests may leave. A policy that refills is offered beginnings of every size at any time, and jobs that stand at
the same layer become one. What becomes of requests and jobs that can no longer be on time says ``lateness``, who is
taken at all ``admission``, and how sure an early answer must be ``steering``. Where requests come from and where
answers go is the feed's affair: a simulated arrival process or real clients.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple, Protocol

from weft.costs.program import Program
from weft.devices.decoupled import DeviceClocks
from weft.engine.admission import Admission, Refusal, Rests, WaitingLine
from weft.engine.engine import Completion, Offer
from weft.engine.lateness import late_work, woven
from weft.engine.steering import Steered
from weft.policies.base import NO_DEADLINE, Candidate, LateWork, Policy

JOBS = 4
"""Batches of one stream in flight at a time, at least; on an NPU one of them on time."""
LATE_JOBS = 64
"""The same where late ones wait until nothing on time does: they shall not take the places of those that can be."""
QUEUE_PLACES = 1 << 16
LEAST_SWEPT = 1024
"""Watched deadlines from which on those of answered requests are swept out."""


class Terms(NamedTuple):
    """What was agreed for one stream, in ticks."""

    programs: int
    """Index of its program at batch 1 in the setting; batch b is b - 1 further."""
    deadline: int
    max_batch: int
    timeout: int
    priority: int
    think: int = -1
    """Closed streams: ticks from an answer to the client's next request; -1 for open streams."""
    clients: int = 0


@dataclass(eq=False, slots=True)
class Ticket:
    """One request in the source's hands."""

    stream: int
    arrival: int
    due: int
    priority: int = 1
    strict: bool = False
    """Not taken when it cannot be on time, dropped when it can no longer be."""
    gone: bool = False
    """Nobody waits for it any more."""
    leaves: int = 0
    """After how many layers it is done, where that is known beforehand; 0: after all."""
    sure: Mapping[int, float] | None = None
    """How sure its answer is after so many layers, where that is known beforehand and decides when it leaves."""
    line: WaitingLine | None = None
    """Of its sender, where that has one."""
    guessed: bool = False
    """Nobody ever measured what it takes, so it is not refused for that."""
    wanted: float | None = None
    """How sure an early answer must be, where it says so."""
    threshold: float = 0.0
    """How sure it must be, once it has begun."""


@dataclass(eq=False)
class Batch:
    """A batch in flight."""

    program: int
    query: int
    members: list[Ticket]
    late: bool = False
    deadline: int = 0
    """When the first of its members that can still be on time is due; of any, where late ones are not told apart."""
    layer: int = 0
    last_issued: int = -1
    running: bool = False
    work: object = None
    """What an executor keeps for it."""

    @property
    def forsaken(self) -> bool:
        """Whether nobody waits for it any more."""
        return all(ticket.gone for ticket in self.members)


class Feed(Protocol):
    """Where requests come from and answers go."""

    def take(self, now: int) -> Iterable[Ticket]:
        """Requests that have arrived, in order of arrival within a stream."""
        ...

    def next_arrival(self) -> int:
        """When the next request comes, as far as that is known."""
        ...

    def exhausted(self) -> bool:
        """Whether no request will come any more."""
        ...

    def served(self, job: Batch, completion: Completion) -> None:
        """The last layer of a batch was computed."""
        ...

    def leave(self, job: Batch, completion: Completion) -> list[Ticket]:
        """A layer that ends at an exit was computed: answer the members who leave, and say who stays, in order."""
        ...

    def merged(self, job: Batch, other: Batch) -> None:
        """Another batch joins one at the same layer; its members follow the ones already there."""
        ...

    def dropped(self, ticket: Ticket, now: int) -> None:
        """It can no longer be on time, or it was due by now."""
        ...

    def refused(self, ticket: Ticket, now: int) -> None:
        """It is not taken."""
        ...

    def failed(self, job: Batch, error: Exception) -> None:
        """A layer of a batch could not be computed."""
        ...

    def ended(self, job: Batch) -> None:
        """Nothing of a batch runs any more; told last, whatever became of it, and of one that joined another, too."""
        ...


@dataclass(eq=False)
class _Desk:
    """One stream's requests."""

    places: int
    queue: deque[Ticket] = field(default_factory=deque)
    late: deque[Ticket] = field(default_factory=deque)
    jobs: list[Batch | None] = field(default_factory=list)
    under_way: dict[int, Batch] = field(default_factory=dict)
    """The same by their query."""
    queries: int = 0
    deepest: int = 0
    served: int = 0
    """Ticks of work issued; at least as many as whoever had least had when it last became busy."""
    steered: Steered | None = None
    """How sure early answers of its model must be, where it has any."""

    def __post_init__(self) -> None:
        self.jobs = [None] * self.places

    @property
    def idle(self) -> bool:
        return not (self.queue or self.late or self.under_way)

    def put(self, ticket: Ticket) -> None:
        if not self.queue or self.queue[-1].due <= ticket.due:
            self.queue.append(ticket)
        else:
            insort(self.queue, ticket, key=_due)


def most_jobs(late: LateWork) -> int:
    """Batches of a stream that may be in flight, at least."""
    return LATE_JOBS if late is LateWork.LAST else JOBS


def _due(ticket: Ticket) -> int:
    return ticket.due


def _depart(tickets: Iterable[Ticket]) -> None:
    """They have their answers."""
    for ticket in tickets:
        ticket.gone = True


class Requests:
    """Offers the next layer of every job in flight, and the first layer of every batch that is ready.

    policy: for whom; it says how batches are made and when a request counts as late.
    remaining: estimated ticks from each layer of each program to its end.
    rests: what runs on the device it is for.
    late: what becomes of requests that can no longer be on time and are not strict (``lateness``).
    places: how many requests may wait in all.
    """

    def __init__(
        self,
        policy: Policy,
        feed: Feed,
        remaining: Sequence[Sequence[int]],
        rests: Rests,
        *,
        late: str = "weave",
        places: int = NO_DEADLINE,
    ) -> None:
        self._setting, self._feed, self._remaining = policy.setting, feed, remaining
        self._late_work = late_work(policy, late)
        self._demote = self._late_work is not LateWork.AMONG_OTHERS
        self._foresight, self._refills, self._waits = policy.foresight, policy.traits.refills, policy.waits
        self._batches = policy.traits.batches
        self.line = WaitingLine(places)
        """All requests that no lane has begun."""
        self.admission = Admission(self, policy, rests)
        self._watched: list[tuple[int, int, Ticket]] = []
        """Strict requests as a heap, by their deadlines; some may have been answered already."""
        self._most_watched = LEAST_SWEPT
        self._taken = 0
        self._desks: list[_Desk] = []
        self._terms: list[Terms] = []
        self._busy: set[int] = set()
        """Streams that have something; those that have nothing any more are taken out when next looked at."""
        self._now = 0

    def open(self, terms: Terms, steered: Steered | None = None) -> int:
        """Another stream; returns its number. *steered*: how sure early answers of its model must be."""
        self._desks.append(_Desk(0))
        self._terms.append(terms)
        self.reopen(len(self._desks) - 1, terms, steered)
        return len(self._desks) - 1

    def reopen(self, stream: int, terms: Terms, steered: Steered | None = None) -> None:
        """Give the number of a stream that has nothing left to another one."""
        assert self._desks[stream].idle
        terms = terms if self._batches else terms._replace(max_batch=1)
        self._desks[stream], self._terms[stream] = _Desk(self._places(terms), steered=steered), terms

    def _places(self, terms: Terms) -> int:
        """Batches of a stream that may be in flight; where they are refilled, each may be of one request."""
        lanes = self._setting.lanes
        return max(most_jobs(self._late_work), 2 * lanes, terms.max_batch * lanes if self._refills else 0)

    def idle(self, stream: int) -> bool:
        """Whether nothing of the stream waits or runs."""
        return self._desks[stream].idle

    def waiting(self, stream: int) -> Sequence[Ticket]:
        """Requests in a stream's queue that can still be on time, in order of deadlines."""
        return self._desks[stream].queue

    def jobs(self, stream: int) -> list[Batch]:
        """Batches of a stream in flight."""
        return [job for job in self._desks[stream].jobs if job]

    def job_of(self, candidate: Candidate) -> Batch | None:
        """The batch in flight that a candidate belongs to."""
        return self._desks[candidate.stream].under_way.get(candidate.query)

    def whole(self, stream: int, requests: int = 1) -> int:
        """Ticks that so many requests of a stream are expected to take, in batches as large as they come."""
        term = self._terms[stream]
        if requests <= 1:
            return requests * self._remaining[term.programs][0]
        return requests * self._remaining[term.programs + term.max_batch - 1][0] // term.max_batch

    def rest(self, job: Batch) -> int:
        """Ticks that the layers of a batch are expected to take that were not issued."""
        rests = self._remaining[job.program]
        return rests[job.layer] if job.layer < len(rests) else 0

    @property
    def late_gives_way(self) -> bool:
        """Whether requests that can no longer be on time let the others go first."""
        return self._demote

    @property
    def deepest(self) -> list[int]:
        """Most requests that waited in each queue."""
        return [desk.deepest for desk in self._desks]

    def busy(self) -> list[int]:
        """Streams of which something waits or runs."""
        return [stream for stream in sorted(self._busy) if not self._desks[stream].idle]

    def done(self) -> bool:
        return self._feed.exhausted() and not self.busy()

    def next_event(self) -> int:
        waits = [self._ready_at(stream) for stream in self._busy if self._desks[stream].queue]
        due = self._watched[0][0] if self._watched else NO_DEADLINE
        return max(self._now, min([self._feed.next_arrival(), due, *(wait for wait in waits if wait > self._now)]))

    def at(self, now: int) -> Iterator[tuple[int, int]]:
        self._now = now
        yield from self._expire(now)
        for ticket in self._feed.take(now):
            if self.admit(ticket, now):
                ticket.gone = True
                self._feed.refused(ticket, now)

    def admit(self, ticket: Ticket, now: int) -> Refusal | None:
        """A request has come: take it, or say why not."""
        refusal = self.admission.refusal(ticket, now)
        if refusal is None and len(self._desks[ticket.stream].queue) >= QUEUE_PLACES:
            refusal = Refusal("line_full")
        if refusal is None:
            self.put(ticket)
        return refusal

    def put(self, ticket: Ticket) -> None:
        """Let a request wait for its turn."""
        desk = self._desks[ticket.stream]
        if desk.idle:
            desk.served = max(desk.served, min((self._desks[each].served for each in self.busy()), default=0))
        desk.put(ticket)
        self._busy.add(ticket.stream)
        self._count(ticket, 1)
        if ticket.strict:
            self._watch(ticket)

    def _watch(self, ticket: Ticket) -> None:
        """Remember when a request is due; what was answered is swept out now and then."""
        self._taken += 1
        heapq.heappush(self._watched, (ticket.due, self._taken, ticket))
        if len(self._watched) > self._most_watched:
            self._watched = [entry for entry in self._watched if not entry[2].gone]
            heapq.heapify(self._watched)
            self._most_watched = max(LEAST_SWEPT, 2 * len(self._watched))

    def _count(self, ticket: Ticket, more: int) -> None:
        """It waits, or waits no longer."""
        for line in (self.line, ticket.line):
            if line:
                line.waiting += more

    def _expire(self, now: int) -> Iterator[tuple[int, int]]:
        """Drop strict requests that are due, and say which running batches nobody waits for any more."""
        while self._watched and (self._watched[0][0] <= now or self._watched[0][2].gone):
            ticket = heapq.heappop(self._watched)[2]
            if not ticket.gone:
                stream, job = ticket.stream, self.withdraw(ticket)
                self._feed.dropped(ticket, ticket.due)  # who may know it by another stream
                if job and job.running and job.forsaken:
                    yield stream, job.query

    def withdraw(self, ticket: Ticket) -> Batch | None:
        """Nobody waits for it any more: it leaves the queue; if it is in a batch, that is returned and goes on for
        the others, if there are any."""
        ticket.gone = True
        desk = self._desks[ticket.stream]
        for waiting in (desk.queue, desk.late):
            if ticket in waiting:
                waiting.remove(ticket)
                self._count(ticket, -1)
                return None
        return next((job for job in desk.under_way.values() if ticket in job.members), None)

    def offer(self, device: DeviceClocks) -> Offer:
        self._now = device.channel_free
        heads: list[Candidate] = []
        clock = max(device.array_free, self._now)
        for stream in sorted(self._busy):
            desk = self._desks[stream]
            if desk.idle:
                self._busy.discard(stream)
                continue
            desk.deepest = max(desk.deepest, len(desk.queue))
            self._sort_out_queue(stream, clock)
            self._sort_out_jobs(stream, clock)
            heads += self._refilling_heads_of(stream) if self._refills else self._heads_of(stream)
        if self._refills:
            return Offer(tuple(heads), tuple(heads))
        on_time = [head for head in heads if head.deadline < NO_DEADLINE]
        weaves = self._late_work is LateWork.WOVEN
        if weaves or not on_time:
            heads += [head for stream in sorted(self._busy) for head in self._late_batch(stream)]
        if not on_time:
            return Offer(tuple(heads), tuple(heads))
        return Offer(tuple(heads), tuple(woven(heads, device, self._setting) if weaves else on_time))

    def issued(self, candidate: Candidate, step: int) -> None:
        job = self.job_of(candidate) or self._begin(candidate)
        job.last_issued, job.layer, job.running = step, job.layer + 1, True
        desk = self._desks[candidate.stream]
        desk.served += max(candidate.fetch, candidate.compute)
        if desk.steered and candidate.layer == 0:
            self._steer(candidate.stream, desk.steered, job.members)

    def _steer(self, stream: int, steered: Steered, members: list[Ticket]) -> None:
        """How sure early answers of a batch that begins must be: what a request says, or what the load allows.

        The load is what the next request would wait, beyond the rest of a single one: a model alone is calm.
        """
        if steered.steering.floor is not None:
            rests = self._remaining[self._terms[stream].programs]
            allowed = min(ticket.due - ticket.arrival for ticket in members)
            ahead = self.admission.free_in(self._now + allowed, self._now) - rests[1]
            steered.feel(self._now, max(0, ahead), allowed - rests[0])
        for ticket in members:
            ticket.threshold = steered.threshold if ticket.wanted is None else ticket.wanted

    def completed(self, completion: Completion) -> None:
        candidate = completion.candidate
        job = self.job_of(candidate)
        assert job is not None
        job.running = False
        if completion.error is not None:
            self._end(candidate.stream, job)
            self._feed.failed(job, completion.error)
            self._feed.ended(job)
        elif completion.aborted:
            job.layer -= 1
        else:
            self._advance(candidate.stream, job, completion)

    def _advance(self, stream: int, job: Batch, completion: Completion) -> None:
        """A layer of a batch was computed: all of its requests are done, or some leave, or it meets another batch."""
        program: Program = self._setting.programs[job.program]
        if job.layer == len(program):
            self._end(stream, job)
            self._drop_overdue(job, completion)
            self._feed.served(job, completion)
            _depart(job.members)
            self._feed.ended(job)
            return
        if job.layer in program.exits:
            self._drop_overdue(job, completion)
            staying = self._feed.leave(job, completion)
            _depart([ticket for ticket in job.members if ticket not in staying])
            if not staying:
                self._end(stream, job)
                self._feed.ended(job)
                return
            self._regroup(stream, job, staying)
        if self._refills:
            self._merge(stream, job)

    def _drop_overdue(self, job: Batch, completion: Completion) -> None:
        """Strict requests of a batch are not answered after their deadlines; an NPU tells of an end beforehand."""
        for ticket in job.members:
            if ticket.strict and not ticket.gone and ticket.due < completion.times.compute_end:
                self._drop(ticket, ticket.due)

    def _drop(self, ticket: Ticket, now: int) -> None:
        if not ticket.gone:
            ticket.gone = True
            self._feed.dropped(ticket, now)

    def _regroup(self, stream: int, job: Batch, members: list[Ticket]) -> None:
        """Give a batch other members."""
        job.program = self._terms[stream].programs + len(members) - 1
        job.members = members
        if not job.late:
            job.deadline = min([t.due for t in members if t.due >= job.deadline], default=min(t.due for t in members))

    def _merge(self, stream: int, job: Batch) -> None:
        """Let batches that stand where this one stands join it, as far as they fit; the one that began first stays."""
        for other in [each for each in self.jobs(stream) if each is not job and not each.running]:
            together = len(job.members) + len(other.members)
            if other.layer != job.layer or together > self._terms[stream].max_batch:
                continue
            kept, joining = (job, other) if job.query < other.query else (other, job)
            self._feed.merged(kept, joining)
            self._end(stream, joining)
            kept.late = kept.late and joining.late
            kept.deadline = min(kept.deadline, joining.deadline)
            kept.last_issued = max(kept.last_issued, joining.last_issued)
            self._regroup(stream, kept, kept.members + joining.members)
            self._feed.ended(joining)
            job = kept

    def _sort_out_queue(self, stream: int, clock: int) -> None:
        """Take requests that cannot be on time out of the queue."""
        desk, place = self._desks[stream], 0
        latest = clock + self._remaining[self._terms[stream].programs][0] * self._foresight // 100
        while place < len(desk.queue) and desk.queue[place].due < latest:
            ticket = desk.queue[place]
            if not (ticket.strict or self._demote):
                place += 1
                continue
            del desk.queue[place]
            if not ticket.strict and len(desk.late) < QUEUE_PLACES:
                desk.late.append(ticket)
                continue
            self._count(ticket, -1)
            if ticket.strict:
                self._drop(ticket, clock)
            else:
                ticket.gone = True
                self._feed.refused(ticket, clock)

    def _sort_out_jobs(self, stream: int, clock: int) -> None:
        """See which jobs have become late, and end those that nobody waits for."""
        for job in self._desks[stream].jobs:
            if not job or job.running:
                continue
            if job.forsaken:
                self._give_up(stream, job, clock)
                continue
            if job.late and not self._refills:
                continue
            if not (self._demote or any(ticket.strict or ticket.gone for ticket in job.members)):
                continue
            latest = clock + self._remaining[job.program][job.layer] * self._foresight // 100
            if not self._refills:
                latest = max(latest, job.deadline)  # who was lost stays lost
            saved = [ticket.due for ticket in job.members if not ticket.gone and ticket.due >= latest]
            if saved:
                job.late, job.deadline = False, min(saved)
            elif all(ticket.strict or ticket.gone for ticket in job.members):
                self._give_up(stream, job, clock)
            elif self._demote:
                job.late, job.deadline = True, NO_DEADLINE
            else:
                job.deadline = min(ticket.due for ticket in job.members)

    def _give_up(self, stream: int, job: Batch, clock: int) -> None:
        """End a batch half-way: nobody waits for it, or nobody in it can be on time."""
        self._end(stream, job)
        for ticket in job.members:
            self._drop(ticket, clock)
        self._feed.ended(job)

    def _heads_of(self, stream: int) -> list[Candidate]:
        desk, term = self._desks[stream], self._terms[stream]
        jobs = [job for job in desk.jobs if job]
        heads = [self._head(stream, job) for job in jobs if not job.running]
        waiting = len(desk.queue)
        ready = waiting > 0 and (waiting >= term.max_batch or self._now >= self._ready_at(stream))
        if ready and len(jobs) < desk.places and self._may_begin(desk, [job for job in jobs if not job.late]):
            members = [desk.queue[i] for i in range(min(waiting, term.max_batch))]
            heads.append(self._head(stream, self._new_job(stream, members)))
        return heads

    def _refilling_heads_of(self, stream: int) -> list[Candidate]:
        """All batches that stand still, and beginnings of every size with which these would fit into one batch.

        Those that can still be on time begin first, then late ones.
        """
        desk, term = self._desks[stream], self._terms[stream]
        jobs = [job for job in desk.jobs if job]
        begun = sum([len(job.members) for job in jobs])
        standing = sum([len(job.members) for job in jobs if not job.running])
        room = min(term.max_batch - standing, term.max_batch * self._setting.lanes - begun)
        first = list(islice(chain(desk.queue, desk.late), max(0, room)))
        waiting = len(desk.queue) + len(desk.late)
        heads = [
            self._head(stream, job)._replace(dues=tuple([each.due for each in job.members]), waiting=waiting)
            for job in jobs
            if not job.running
        ]
        return heads + self._beginnings(stream, first, waiting) if first else heads

    def _beginnings(self, stream: int, first: list[Ticket], waiting: int) -> list[Candidate]:
        """The first of these tickets, the first two, ... as batches that could begin; *waiting*: how many there are."""
        desk, term = self._desks[stream], self._terms[stream]
        dues = tuple([ticket.due for ticket in first])
        deadline = dues[0] if desk.queue else NO_DEADLINE
        arrival, priority, found = NO_DEADLINE, 0, []
        for size, ticket in enumerate(first, start=1):
            arrival, priority = min(arrival, ticket.arrival), max(priority, ticket.priority)
            number = term.programs + size - 1
            program, rest = self._setting.programs[number], self._remaining[number][0]
            found.append(
                Candidate(
                    stream, desk.queries, 0, program.fetch[0], program.compute[0], -1, number, arrival, deadline, rest,
                    rest, priority, size, dues[:size], waiting - size,
                )
            )  # fmt: skip
        return found

    def _new_job(self, stream: int, members: list[Ticket], late: bool = False) -> Batch:
        """A batch that could begin; requests that can be on time stand first in it."""
        program = self._terms[stream].programs + len(members) - 1
        return Batch(program, self._desks[stream].queries, members, late, NO_DEADLINE if late else members[0].due)

    def _ready_at(self, stream: int) -> int:
        """When what waits becomes a batch, full or not: its time is up, or it would be late."""
        queue, term = self._desks[stream].queue, self._terms[stream]
        if self._refills:
            return 0
        if self._waits is not None:
            return min(ticket.arrival + (ticket.due - ticket.arrival) * self._waits // 100 for ticket in queue)
        if not term.timeout:
            return 0
        rest = self._remaining[term.programs][0]
        return min(min(ticket.arrival for ticket in queue) + term.timeout, queue[0].due - rest)

    def _may_begin(self, desk: _Desk, on_time: list[Batch]) -> bool:
        """As many batches of a stream as there are lanes, and one that is due before all of those."""
        return len(on_time) < self._setting.lanes or desk.queue[0].due < min(
            min(t.due for t in job.members) for job in on_time
        )

    def _late_batch(self, stream: int) -> list[Candidate]:
        """A batch of late requests that could begin."""
        desk, term = self._desks[stream], self._terms[stream]
        if not desk.late or len(desk.under_way) == desk.places:
            return []
        members = [desk.late[i] for i in range(min(len(desk.late), term.max_batch))]
        return [self._head(stream, self._new_job(stream, members, late=True))]

    def _head(self, stream: int, job: Batch) -> Candidate:
        program: Program = self._setting.programs[job.program]
        return Candidate(
            stream=stream,
            query=job.query,
            layer=job.layer,
            fetch=program.fetch[job.layer],
            compute=program.compute[job.layer],
            last_issued=job.last_issued,
            program=job.program,
            arrival=min([ticket.arrival for ticket in job.members]),
            deadline=job.deadline,
            remaining=self._remaining[job.program][job.layer],
            whole=self._remaining[job.program][0],
            priority=max([ticket.priority for ticket in job.members]),
            size=len(job.members),
            served=self._desks[stream].served,
        )

    def _begin(self, candidate: Candidate) -> Batch:
        """Turn the waiting requests a candidate stands for into a job."""
        desk = self._desks[candidate.stream]
        late = candidate.deadline == NO_DEADLINE
        members = [(desk.late if late or not desk.queue else desk.queue).popleft() for _ in range(candidate.size)]
        for ticket in members:
            self._count(ticket, -1)
        job = self._new_job(candidate.stream, members, late)
        desk.jobs[desk.jobs.index(None)] = job
        desk.under_way[job.query] = job
        desk.queries += 1
        return job

    def _end(self, stream: int, job: Batch) -> None:
        desk = self._desks[stream]
        desk.jobs[desk.jobs.index(job)] = None
        del desk.under_way[job.query]

"""Requests that arrive, wait, are batched and have deadlines, as a source of work.

Each stream has a queue. A batch is ready when it is full or its first request has waited long enough;
it then becomes a job, whose layers are offered one by one. Of every stream at most one job is on
time; requests and jobs that can no longer be on time are kept, demoted (served when nothing on time
is waiting) or dropped, as the user chose. Queues are bounded; what does not fit is refused and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.devices.decoupled import Issue, NpuState
from weft.engine.engine import Offer
from weft.policies.base import NO_DEADLINE, Candidate, Setting
from weft.program import Program

JOBS = 4
"""Batches of one stream in flight at a time: one on time, the others late."""
QUEUE_PLACES = 1 << 16
LATE = ("keep", "demote", "drop")


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


class Answer(NamedTuple):
    """What became of one request."""

    stream: int
    arrival: int
    end: int
    """When its last layer was computed; -1 if it was dropped, -2 if the queue was full."""


@dataclass(eq=False)
class _Job:
    program: int
    query: int
    members: list[int]
    """Arrival times, in order."""
    late: bool
    layer: int = 0
    first_on_time: int = 0
    last_issued: int = -1


@dataclass(eq=False)
class _Desk:
    """One stream's requests."""

    arrivals: Iterator[int]
    next_arrival: int = NO_DEADLINE
    queue: deque[int] = field(default_factory=deque)
    late: deque[int] = field(default_factory=deque)
    returning: deque[int] = field(default_factory=deque)
    """Next arrivals of a closed stream."""
    jobs: list[_Job | None] = field(default_factory=lambda: [None] * JOBS)
    queries: int = 0

    def draw(self) -> None:
        self.next_arrival = next(self.arrivals, NO_DEADLINE)


class Requests:
    """Offers the next layer of every job in flight, and the first layer of every batch that is ready.

    arrivals: per open stream, ascending ticks. end: closed streams send nothing from then on.
    foresight: percent of its remaining time that counts when a request is judged late.
    """

    def __init__(
        self,
        setting: Setting,
        terms: Sequence[Terms],
        arrivals: Sequence[Iterator[int]],
        remaining: Sequence[Sequence[int]],
        *,
        late: str,
        foresight: int,
        end: int,
    ) -> None:
        self._setting, self._terms, self._remaining = setting, terms, remaining
        self._late, self._foresight, self._end = late, foresight, end
        self._desks = [_Desk(source) for source in arrivals]
        self._now = 0
        self.answers: list[Answer] = []
        """What became of each request, in order."""
        self.deepest = [0] * len(terms)
        """Most requests that waited in each queue."""
        self._completed: list[tuple[int, int]] = []  # stream, oldest arrival of each batch that was completed
        for desk, term in zip(self._desks, terms, strict=True):
            desk.returning.extend([0] * term.clients)
            desk.draw()

    def done(self) -> bool:
        return not any(
            desk.queue or desk.late or desk.returning or any(desk.jobs) or desk.next_arrival < NO_DEADLINE
            for desk in self._desks
        )

    def next_event(self) -> int:
        events = [min(desk.next_arrival, desk.returning[0] if desk.returning else NO_DEADLINE) for desk in self._desks]
        waits = [
            desk.queue[0] + term.timeout for desk, term in zip(self._desks, self._terms, strict=True) if desk.queue
        ]
        return max(self._now, min(events + waits))

    def offer(self, device: NpuState) -> Offer:
        self._now = device.channel_free
        heads: list[Candidate] = []
        for stream in range(len(self._desks)):
            self._admit(stream)
            self.deepest[stream] = max(self.deepest[stream], len(self._desks[stream].queue))
            if self._late != "keep":
                self._part_with_late(stream, max(device.array_free, self._now))
            heads += self._heads_of(stream)
        on_time = [head for head in heads if head.deadline < NO_DEADLINE]
        if not on_time:
            heads += [head for stream in range(len(self._desks)) for head in self._late_batch(stream)]
        return Offer(tuple(heads), tuple(on_time or heads))

    def issued(self, candidate: Candidate, times: Issue, step: int) -> None:
        desk = self._desks[candidate.stream]
        slot = next((i for i, job in enumerate(desk.jobs) if job and job.query == candidate.query), None)
        if slot is None:
            slot = self._begin(desk, candidate)
        job = desk.jobs[slot]
        assert job is not None
        job.last_issued, job.layer = step, job.layer + 1
        if job.layer == len(self._setting.programs[job.program]):
            desk.jobs[slot] = None
            self._completed.append((candidate.stream, job.members[0]))
            for arrival in job.members:
                self._answer(candidate.stream, arrival, times.compute_end, times.compute_end)

    def batches(self, warm: int) -> list[int]:
        """Completed batches of each stream whose first request arrived at *warm* or later."""
        return [
            sum(1 for owner, arrival in self._completed if owner == stream and arrival >= warm)
            for stream in range(len(self._desks))
        ]

    def _admit(self, stream: int) -> None:
        """Take in what has arrived: open arrivals first, then returning clients."""
        desk = self._desks[stream]
        while desk.next_arrival <= self._now:
            self._enqueue(stream, desk.next_arrival)
            desk.draw()
        while desk.returning and desk.returning[0] <= self._now:
            arrival = desk.returning.popleft()
            if arrival < self._end:
                self._enqueue(stream, arrival)

    def _enqueue(self, stream: int, arrival: int) -> None:
        if len(self._desks[stream].queue) < QUEUE_PLACES:
            self._desks[stream].queue.append(arrival)
        else:
            self._answer(stream, arrival, -2, self._now)

    def _part_with_late(self, stream: int, clock: int) -> None:
        """Take requests that cannot be on time out of the queue, and see which jobs have become late."""
        desk, term = self._desks[stream], self._terms[stream]
        rest = self._remaining[term.programs][0] * self._foresight // 100
        while desk.queue and desk.queue[0] + term.deadline < clock + rest:
            if self._late == "drop":
                self._answer(stream, desk.queue.popleft(), -1, clock)
            elif len(desk.late) < QUEUE_PLACES:
                desk.late.append(desk.queue.popleft())
            else:
                self._answer(stream, desk.queue.popleft(), -2, clock)
        for slot, job in enumerate(desk.jobs):
            if not job or job.late:
                continue
            rest = self._remaining[job.program][job.layer] * self._foresight // 100
            while job.first_on_time < len(job.members) and (
                job.members[job.first_on_time] + term.deadline < clock + rest
            ):
                job.first_on_time += 1
            if job.first_on_time == len(job.members):
                job.late = True
                if self._late == "drop":
                    desk.jobs[slot] = None
                    for arrival in job.members:
                        self._answer(stream, arrival, -1, clock)

    def _answer(self, stream: int, arrival: int, end: int, now: int) -> None:
        """Record what became of a request; the client of a closed stream will be back."""
        self.answers.append(Answer(stream, arrival, end))
        if self._terms[stream].think >= 0:
            self._desks[stream].returning.append(now + self._terms[stream].think)

    def _heads_of(self, stream: int) -> list[Candidate]:
        desk, term = self._desks[stream], self._terms[stream]
        jobs = [job for job in desk.jobs if job]
        heads = [self._head(stream, job) for job in jobs]
        waiting = len(desk.queue)
        ready = waiting >= term.max_batch or (waiting > 0 and self._now >= desk.queue[0] + term.timeout)
        if ready and len(jobs) < JOBS and all(job.late for job in jobs):
            members = [desk.queue[i] for i in range(min(waiting, term.max_batch))]
            heads.append(self._head(stream, _Job(term.programs + len(members) - 1, desk.queries, members, late=False)))
        return heads

    def _late_batch(self, stream: int) -> list[Candidate]:
        """A batch of late requests that could begin."""
        desk, term = self._desks[stream], self._terms[stream]
        if not desk.late or all(desk.jobs):
            return []
        members = [desk.late[i] for i in range(min(len(desk.late), term.max_batch))]
        return [self._head(stream, _Job(term.programs + len(members) - 1, desk.queries, members, late=True))]

    def _head(self, stream: int, job: _Job) -> Candidate:
        program: Program = self._setting.programs[job.program]
        term = self._terms[stream]
        due = NO_DEADLINE if job.late else job.members[job.first_on_time] + term.deadline
        return Candidate(
            stream=stream,
            query=job.query,
            layer=job.layer,
            fetch=program.fetch[job.layer],
            compute=program.compute[job.layer],
            last_issued=job.last_issued,
            program=job.program,
            arrival=job.members[0],
            deadline=due,
            remaining=self._remaining[job.program][job.layer],
            whole=self._remaining[job.program][0],
            priority=term.priority,
        )

    def _begin(self, desk: _Desk, candidate: Candidate) -> int:
        """Turn the waiting requests a candidate stands for into a job."""
        size = candidate.program - self._terms[candidate.stream].programs + 1
        late = candidate.deadline == NO_DEADLINE
        waiting = desk.late if late else desk.queue
        slot = desk.jobs.index(None)
        desk.jobs[slot] = _Job(candidate.program, desk.queries, [waiting.popleft() for _ in range(size)], late)
        desk.queries += 1
        return slot

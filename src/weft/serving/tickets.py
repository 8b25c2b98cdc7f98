"""A request among the scheduler's things: the ticket it waits with, and what lanes compute for the batch it runs in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from weft.base.errors import Expired, RequestError, UnfitInputs
from weft.engine.policies.base import NO_DEADLINE
from weft.engine.tickets import Batch, Ticket
from weft.runtime.backend import BatchPart, Step, StepOutput
from weft.runtime.client_memory import Input
from weft.runtime.exits import join
from weft.runtime.stitched import mixed
from weft.runtime.tensors import Array
from weft.serving.exit_rules import ExitRules, Reached, RequestRows
from weft.serving.streams import ServedModel, ServedStream


class ClientTicket(Ticket):
    """A request of a real client: what it asks for besides its result, and how far it is.

    due: on the clock of the lanes, in nanoseconds. strict: without a result after its deadline.
    best_effort: its deadline only orders it; nobody counts it.
    exit_threshold: how sure an early answer must be; as its model says where left out.
    """

    __slots__ = (
        "batch_size", "began", "best_effort", "compute_ns", "deaths", "inputs", "met", "model", "progress", "reply",
        "rows", "traced", "tries",
    )  # fmt: skip

    def __init__(
        self,
        model: ServedModel,
        inputs: dict[str, Input],
        reply: Reply,
        due: int,
        *,
        priority: int = 1,
        strict: bool = False,
        best_effort: bool = False,
        exit_threshold: float | None = None,
    ) -> None:
        super().__init__(-1, 0, due, priority, strict, line=model.line, wanted=exit_threshold)
        self.model, self.inputs, self.reply = model, model.inward(inputs), reply
        self.best_effort = best_effort
        self.rows = 0
        self.began = 0
        self.batch_size = 0
        self.compute_ns = 0
        self.traced = True
        self.met: bool | None = None
        """Whether it kept its deadline, once it is settled; None where nobody counts that."""
        self.deaths = self.tries = 0
        """Workers that died while they computed it, and how often it was tried again for such a reason."""
        self.progress: RequestRows | None = None
        """Where it has several rows, those that have left their exits behind."""

    def enter(self, stream: ServedStream, now: int) -> None:
        """It has come, and belongs to a stream."""
        self.stream, self.rows, self.guessed = stream.index, stream.rows, not stream.measured
        self.arrival = now

    def late(self, now: int) -> Expired | None:
        """The error for a result that would be sent now, after a strict deadline; None if it may be sent."""
        if not self.strict or now <= self.due:
            return None
        late_ms = (now - self.due) / 1e6
        return Expired(f"{self.model.name}: its result was ready {late_ms:.3f} ms after its deadline")

    def settle(self, now: int, error: RequestError | None = None) -> RequestError | None:
        """Decide how the request ends and count it; call this once, when its answer is handed over.

        error: why there is no result. Returns the error to send in place of the result, None to send the result.
        """
        if error is None and self.strict:
            error = self.late(now)
        statistics, latency = self.model.statistics, now - self.arrival
        if error:
            self.met = statistics.failed(now, latency, error.reason, not self.best_effort)
        else:
            self.met = None if self.best_effort else now <= self.due
            statistics.queue_ns += self.began - self.arrival
            statistics.infer_ns += self.compute_ns
            statistics.answered(now, latency, self.met)
        return error


Reply = Callable[[ClientTicket, "dict[str, Array] | RequestError"], None]


class BatchWork:
    """What is computed for one batch, on whatever lane; its rows are in the order of its tickets.

    Who leaves and who joins is only noted where that happens; the backend cuts tensors and puts them together.
    """

    __slots__ = (
        "_answers",
        "_parts",
        "_reached",
        "batch",
        "began",
        "compute_ns",
        "loaded",
        "model",
        "stream",
        "tickets",
        "timing",
    )

    def __init__(self, stream: ServedStream, batch: Batch, tickets: list[ClientTicket]) -> None:
        self.stream, self.batch, self.tickets = stream, batch, tickets
        self.model = stream.model
        """The body."""
        self.loaded, self.timing = stream.model.loaded, stream.model.timing
        self.began = self.shares()
        """The models and rows with which it began."""
        self._parts = [BatchPart(ticket.inputs) for ticket in tickets]
        self._answers: list[dict[str, Array]] = []
        """The outputs of each part, once they are computed."""
        self._reached: Reached | None = None
        self.compute_ns = 0

    @property
    def body(self) -> ServedModel:
        """Whose memory it is computed in."""
        return self.model

    def left_ns(self) -> int:
        """How long it may still be computed until the first of its requests was for too long; strict ones have none."""
        left_ns = NO_DEADLINE
        for ticket in self.tickets:
            if not (ticket.strict or ticket.gone):
                own_ns = self.model.max_compute_ns - self.compute_ns - ticket.compute_ns
                left_ns = own_ns if own_ns < left_ns else left_ns
        return left_ns

    def waiting(self) -> list[ClientTicket]:
        """Its requests that wait without a strict deadline."""
        return [ticket for ticket in self.tickets if not (ticket.strict or ticket.gone)]

    def step(self, segment: int) -> Step:
        """What a segment is computed from: the values of all who are left."""
        return Step(segment, tuple(self._parts), sum([ticket.rows for ticket in self.tickets]))

    def take(self, segment: int, made: Sequence[StepOutput]) -> None:
        """A segment was computed; one that was stopped changes nothing, so that others may still join it."""
        if len(self.tickets) > 1 and segment == len(self.loaded.segments) - 1:
            self._check_rows(made)
        self._parts = [BatchPart(each.values) for each in made]
        self._answers = [each.answers for each in made]
        leaving = self.model.leaving
        self._reached = leaving.reached(segment, made[0].answers) if leaving else None

    def _check_rows(self, made: Sequence[StepOutput]) -> None:
        """Refuse outputs that have not one row for each row of the requests: nobody could tell whose they are."""
        wanted = sum(ticket.rows for ticket in self.tickets)
        for name in made[0].answers:
            if (found := sum(len(each.answers[name]) for each in made)) != wanted:
                raise UnfitInputs(f"output {name!r} has {found} rows for {wanted}")

    def results(self) -> Iterator[tuple[ClientTicket, dict[str, Array]]]:
        """Every ticket with its rows of the outputs."""
        values = self._answers[0] if len(self._answers) == 1 else join(self._answers, {})
        if len(self.tickets) == 1:
            yield self.tickets[0], values
            return
        for ticket, start, end in self._places():
            yield ticket, {name: each[start:end] for name, each in values.items()}

    def shares(self) -> dict[ServedModel, int]:
        """The models it is computed for now, and their rows."""
        found: dict[ServedModel, int] = {}
        for ticket in self.tickets:
            found[ticket.model] = found.get(ticket.model, 0) + ticket.rows
        return found

    def departing(self) -> list[tuple[ClientTicket, dict[str, Array]]]:
        """Who leaves at an exit, with their answers; the batch goes on without them, and without who is gone."""
        leaving, reached = self.model.leaving, self._reached
        assert leaving is not None and reached is not None
        found, staying, rows = [], list[ClientTicket](), list[int]()
        for ticket, start, end in self._places():
            answer = None if ticket.gone else _answer(ticket, leaving, reached, start, end)
            if answer is not None:
                found.append((ticket, answer))
            elif not ticket.gone:
                staying.append(ticket)
                rows += range(start, end)
        if len(staying) < len(self.tickets):
            self.tickets, (part,) = staying, self._parts
            self._parts = [part._replace(rows=rows)]
        return found

    def join(self, other: BatchWork) -> None:
        """Another batch that stands at the same segment goes on with this one."""
        for ticket in other.tickets:
            ticket.compute_ns += other.compute_ns - self.compute_ns
        self.tickets += other.tickets
        self._parts += other._parts
        for ticket in self.tickets:
            ticket.batch_size = max(ticket.batch_size, len(self.tickets))

    def drop(self) -> None:
        """Nobody goes on; what is in the device's memory is free."""
        self._parts, self._answers = [], []

    def _places(self) -> Iterator[tuple[ClientTicket, int, int]]:
        """Every ticket with where its rows begin and end among those of its model."""
        at = dict.fromkeys([ticket.model for ticket in self.tickets], 0)
        for ticket in self.tickets:
            start = at[ticket.model]
            at[ticket.model] = start + ticket.rows
            yield ticket, start, start + ticket.rows


class MixedWork(BatchWork):
    """A batch of requests for models that have one body; the rows of each model are in the order of its tickets.

    The samples of several such batches cannot be joined half-way, where those of all models lie one after another.
    """

    __slots__ = ("_named",)

    def __init__(self, stream: ServedStream, batch: Batch, tickets: list[ClientTicket]) -> None:
        super().__init__(stream, batch, tickets)
        self._named: list[frozenset[str]] = []
        """For each part that was begun, the outputs of those models that it has samples of."""

    def _check_rows(self, made: Sequence[StepOutput]) -> None:
        """Each model has as many rows as requests, which was measured."""

    def take(self, segment: int, made: Sequence[StepOutput]) -> None:
        super().take(segment, made)
        if segment == 0:
            tasks = [model.task for model in self.shares() if model.task]
            self._named = [frozenset(name for task in tasks for name in task.outputs.values())]

    def join(self, other: BatchWork) -> None:
        super().join(other)
        assert isinstance(other, MixedWork)
        self._named += other._named

    def results(self) -> Iterator[tuple[ClientTicket, dict[str, Array]]]:
        parts = zip(self._answers, self._named, strict=True)
        values = mixed([{name: answers[name] for name in named} for answers, named in parts], {})
        for ticket, start, end in self._places():
            found, leaving = (
                ticket.model.outward(values, start, end, ticket.model.length(ticket.inputs)),
                ticket.model.leaving,
            )
            if leaving:
                ticket.threshold = leaving.threshold if ticket.wanted is None else ticket.wanted
                found = leaving.chosen(found, ticket.threshold)
            yield ticket, found


def _answer(
    ticket: ClientTicket, leaving: ExitRules, reached: Reached, start: int, end: int
) -> dict[str, Array] | None:
    """What a request whose rows begin and end there is told at an exit; None if it goes on."""
    last, threshold = reached.number == len(leaving.names), ticket.threshold
    if ticket.rows == 1 and not last and not reached.sure[start] >= threshold:  # so, because NaN is never sure
        return None
    mine = Reached(reached.number, reached.answers[start:end], reached.sure[start:end])
    if ticket.rows == 1:
        return leaving.answer(mine.answers, np.array([mine.number], np.int64), mine.sure)
    ticket.progress = ticket.progress or RequestRows(ticket.rows)
    return ticket.progress.answered(leaving) if ticket.progress.reach(mine, threshold, end=last) else None

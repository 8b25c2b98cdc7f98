"""Requests in the scheduler: the ticket of a request, and the work that lanes compute for its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from weft.base.errors import Expired, RequestError, UnfitInputs
from weft.engine.policies.base import NO_DEADLINE
from weft.engine.tickets import Batch, Ticket
from weft.runtime.backend import BatchPart, OutputTarget, Step, StepOutput
from weft.runtime.client_memory import Input, LentPart
from weft.runtime.exits import join
from weft.runtime.stitched import mixed
from weft.runtime.tensors import Array
from weft.serving.exit_rules import ExitOutputs, ExitRules, RequestRows
from weft.serving.streams import ServedModel, ServedStream


class ClientTicket(Ticket):
    """A request of a real client: its inputs, deadline and priority, and its progress."""

    __slots__ = (
        "batch_size", "began", "best_effort", "compute_ns", "deaths", "inputs", "met", "model", "output_parts",
        "progress", "reply", "rows", "traced", "tries", "written",
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
        """reply: called once with the outcome. due: the deadline, on the clock of the lanes, in nanoseconds.

        strict: no result is sent after the deadline. best_effort: the deadline only orders the request, and is not
        counted as met or missed. priority: its weight. exit_threshold: confidence at which rows leave early; by default
        that of its model.
        """
        # -1, 0: stream and arrival, which ``enter`` sets
        super().__init__(-1, 0, due, priority, strict, line=model.line, wanted=exit_threshold)
        self.model, self.inputs, self.reply = model, model.to_body_inputs(inputs), reply
        self.best_effort = best_effort
        self.output_parts: Mapping[str, LentPart] = {}
        """Output -> the part of a region into which a device may write it."""
        self.written = False
        """Whether the outputs with such parts were written there; their arrays in the outcome are stand-ins."""
        self.rows = 0
        """First dimension of its inputs."""
        self.began = 0
        """When its first segment began, on the clock of the lanes; 0: not yet."""
        self.batch_size = 0
        """Most requests that were in its batch."""
        self.compute_ns = 0
        self.traced = True  # whether its segments are in the trace that clients can download
        self.met: bool | None = None
        """Whether it met its deadline, once it is settled; None if that is not counted."""
        self.deaths = self.tries = 0
        """Workers that died while they computed it, and retries for such a reason."""
        self.progress: RequestRows | None = None
        """For a request with several rows: the rows that have left at an exit so far."""

    def enter(self, stream: ServedStream, now: int) -> None:
        """Assign the ticket to its stream at its arrival."""
        self.stream, self.rows, self.guessed = stream.index, stream.rows, not stream.measured
        self.arrival = now

    def late(self, now: int) -> Expired | None:
        """Return the error for a result after a strict deadline; None if the result may be sent now."""
        if not self.strict or now <= self.due:
            return None
        late_ms = (now - self.due) / 1e6
        return Expired(f"{self.model.name}: its result was ready {late_ms:.3f} ms after its deadline")

    def settle(self, now: int, error: RequestError | None = None) -> RequestError | None:
        """Decide the outcome of the request and count it; call this once, when its answer is sent.

        error: why there is no result. Returns the error to send in place of the result, None to send the result.
        """
        if error is None and self.strict:
            error = self.late(now)
        statistics, latency = self.model.statistics, now - self.arrival
        if error:
            self.met = statistics.failed(now, latency, error.reason, had_deadline=not self.best_effort)
        else:
            self.met = None if self.best_effort else now <= self.due
            statistics.queue_ns += self.began - self.arrival
            statistics.infer_ns += self.compute_ns
            statistics.answered(now, latency, self.met)
        return error


Reply = Callable[[ClientTicket, "dict[str, Array] | RequestError"], None]


class BatchWork:
    """The work of one batch on any lane; its rows are in the order of its tickets.

    Requests that leave or join are only recorded here; the backend splits and concatenates the tensors.
    """

    __slots__ = (
        "_answers",
        "_exit_outputs",
        "_parts",
        "_targeted",
        "batch",
        "compute_ns",
        "loaded",
        "model",
        "rows_at_start",
        "stream",
        "tickets",
        "timing",
    )

    def __init__(self, stream: ServedStream, batch: Batch, tickets: list[ClientTicket]) -> None:
        """Begin the work of a batch with the inputs of its tickets."""
        self.stream, self.batch, self.tickets = stream, batch, tickets
        self.model = stream.model
        """The body."""
        self.loaded, self.timing = stream.model.loaded, stream.model.timing
        self.rows_at_start = self.rows_by_model()
        """The models of the batch at its start, each with its number of rows."""
        self._parts = [BatchPart(ticket.inputs) for ticket in tickets]
        """The tensors for the next segment, in parts that the backend concatenates."""
        self._answers: list[dict[str, Array]] = []
        """The outputs of each part, once they are computed."""
        self._targeted: list[ClientTicket] = []
        """The requests of the ``targets`` of the last step, in their order."""
        self._exit_outputs: ExitOutputs | None = None
        """The outputs at the exit after the last computed segment; None if that segment does not end at an exit."""
        self.compute_ns = 0

    @property
    def body(self) -> ServedModel:
        """The body whose memory the batch uses."""
        return self.model

    def compute_left_ns(self) -> int:
        """Return how long the batch may compute before one of its requests has used up ``max_compute_s``.

        Time in earlier batches counts. Requests with strict deadlines are not limited by ``max_compute_s``: NO_DEADLINE
        if the batch has no others.
        """
        least_ns = NO_DEADLINE
        for ticket in self.tickets:
            if not (ticket.strict or ticket.gone):
                left_ns = self.model.max_compute_ns - self.compute_ns - ticket.compute_ns
                least_ns = left_ns if left_ns < least_ns else least_ns  # called often, and ``min`` takes longer
        return least_ns

    def soft_tickets(self) -> list[ClientTicket]:
        """Return the pending requests without a strict deadline."""
        return [ticket for ticket in self.tickets if not (ticket.strict or ticket.gone)]

    def step(self, segment: int) -> Step:
        """Return the input of a segment: the tensors of all requests that are still in the batch."""
        # A strict request may be answered while its batch is computed, and its client may then use its regions again.
        self._targeted = [t for t in self.tickets if t.output_parts and not t.gone and not t.strict]
        targets = self._targets() if self._targeted else ()
        return Step(segment, tuple(self._parts), sum([ticket.rows for ticket in self.tickets]), targets=targets)

    def _targets(self) -> Sequence[OutputTarget]:
        """Return where the outputs of requests are to be written, for those with regions that a device can write to."""
        if len(self.tickets) == 1:  # its outputs may have no axis of rows
            return (OutputTarget(self.tickets[0].output_parts),)
        rows = {ticket: (start, end) for ticket, start, end in self._row_ranges()}
        return [OutputTarget(ticket.output_parts, rows[ticket]) for ticket in self._targeted]

    def take(self, segment: int, outputs: Sequence[StepOutput]) -> None:
        """Store the outputs of a computed segment. A stopped one runs again, perhaps after another batch joined."""
        if len(self.tickets) > 1 and segment == len(self.loaded.segments) - 1:
            self._check_rows(outputs)
        self._parts = [BatchPart(output.values) for output in outputs]
        self._answers = [output.answers for output in outputs]
        written = [output.written for output in outputs]
        for index, ticket in enumerate(self._targeted):
            ticket.written = len(written) == 1 and written[0] is not None and index in written[0].requests
        exit_rules = self.model.exit_rules
        # [0]: at an exit the backend has joined all parts
        self._exit_outputs = exit_rules.outputs_at(segment, outputs[0].answers) if exit_rules else None

    def _check_rows(self, outputs: Sequence[StepOutput]) -> None:
        """Refuse outputs without exactly one row per row of the requests: they cannot be assigned to requests."""
        expected = sum(ticket.rows for ticket in self.tickets)
        for name in outputs[0].answers:
            if (rows := sum(len(output.answers[name]) for output in outputs)) != expected:
                raise UnfitInputs(f"output {name!r} has {rows} rows for {expected}")

    def results(self) -> Iterator[tuple[ClientTicket, dict[str, Array]]]:
        """Yield every ticket with its rows of the outputs."""
        values = self._answers[0] if len(self._answers) == 1 else join(self._answers, {})  # {}: every output has rows
        if len(self.tickets) == 1:
            yield self.tickets[0], values
            return
        for ticket, start, end in self._row_ranges():
            yield ticket, {name: array[start:end] for name, array in values.items()}

    def rows_by_model(self) -> dict[ServedModel, int]:
        """Return the models of the requests that are still in the batch, each with its number of rows."""
        rows: dict[ServedModel, int] = {}
        for ticket in self.tickets:
            rows[ticket.model] = rows.get(ticket.model, 0) + ticket.rows
        return rows

    def remove_leaving(self) -> list[tuple[ClientTicket, dict[str, Array]]]:
        """Remove the requests that leave at this exit and return them with their answers; drop cancelled requests."""
        exit_rules, exit_outputs = self.model.exit_rules, self._exit_outputs
        assert exit_rules is not None and exit_outputs is not None
        answered, staying, staying_rows = [], list[ClientTicket](), list[int]()
        for ticket, start, end in self._row_ranges():
            answer = None if ticket.gone else _exit_answer(ticket, exit_rules, exit_outputs, start, end)
            if answer is not None:
                answered.append((ticket, answer))
            elif not ticket.gone:
                staying.append(ticket)
                staying_rows += range(start, end)
        if len(staying) < len(self.tickets):
            self.tickets, (part,) = staying, self._parts  # one part: the backend has joined them at the exit
            self._parts = [part._replace(rows=staying_rows)]
        return answered

    def join(self, other: BatchWork) -> None:
        """Merge another batch, which is at the same segment, into this one."""
        for ticket in other.tickets:  # the computing time of this batch is added to all of its tickets at the end
            ticket.compute_ns += other.compute_ns - self.compute_ns
        self.tickets += other.tickets
        self._parts += other._parts
        for ticket in self.tickets:
            ticket.batch_size = max(ticket.batch_size, len(self.tickets))

    def drop(self) -> None:
        """Release the tensors, after the end of the batch."""
        self._parts, self._answers, self._targeted = [], [], []

    def _row_ranges(self) -> Iterator[tuple[ClientTicket, int, int]]:
        """Yield every ticket with the start and end of its rows among the rows of its model."""
        next_row = dict.fromkeys([ticket.model for ticket in self.tickets], 0)
        for ticket in self.tickets:
            start = next_row[ticket.model]
            end = next_row[ticket.model] = start + ticket.rows
            yield ticket, start, end


class MixedWork(BatchWork):
    """A batch of requests for several models that share a body; the rows of each model are in the order of its tickets.

    The tensors of two such batches cannot be concatenated half-way, because the rows of a batch are sorted by model.
    """

    __slots__ = ("_output_names",)

    def __init__(self, stream: ServedStream, batch: Batch, tickets: list[ClientTicket]) -> None:
        super().__init__(stream, batch, tickets)
        self._output_names: list[frozenset[str]] = []
        """For each part, the names of the outputs of the models whose rows it contains."""

    def _check_rows(self, outputs: Sequence[StepOutput]) -> None:
        """Check nothing: the number of rows of every model was checked when the body was measured."""

    def take(self, segment: int, outputs: Sequence[StepOutput]) -> None:
        """Store the outputs of a segment; after the first, note which models' outputs this batch must contain."""
        super().take(segment, outputs)
        if segment == 0:
            tasks = [model.task for model in self.rows_by_model() if model.task]
            self._output_names = [frozenset(name for task in tasks for name in task.outputs.values())]

    def join(self, other: BatchWork) -> None:
        super().join(other)
        assert isinstance(other, MixedWork)
        self._output_names += other._output_names

    def results(self) -> Iterator[tuple[ClientTicket, dict[str, Array]]]:
        """Yield every ticket with the outputs of its model, for its rows; each row's exit is chosen here."""
        parts = zip(self._answers, self._output_names, strict=True)
        # {}: the outputs of every model in the batch exist
        values = mixed([{name: answers[name] for name in names} for answers, names in parts], {})
        for ticket, start, end in self._row_ranges():
            model, exit_rules = ticket.model, ticket.model.exit_rules
            outputs = model.from_body_outputs(values, start, end, model.length(ticket.inputs))
            if exit_rules:
                ticket.threshold = exit_rules.threshold if ticket.wanted is None else ticket.wanted
                outputs = exit_rules.choose_exits(outputs, ticket.threshold)
            yield ticket, outputs


def _exit_answer(
    ticket: ClientTicket, exit_rules: ExitRules, exit_outputs: ExitOutputs, start: int, end: int
) -> dict[str, Array] | None:
    """Return the answer to a request at an exit, None if some of its rows continue.

    start, end: the rows of the request in *exit_outputs*, which are those of its batch.
    """
    number, answers, confidences = exit_outputs
    is_last, threshold = number == len(exit_rules.names), ticket.threshold
    if ticket.rows == 1 and not is_last and not confidences[start] >= threshold:  # written so that NaN never leaves
        return None
    outputs = ExitOutputs(number, answers[start:end], confidences[start:end])
    if ticket.rows == 1:  # most requests: ``RequestRows`` would only cost time
        return exit_rules.answer(outputs.answers, np.array([number], np.int64), outputs.confidences)
    ticket.progress = ticket.progress or RequestRows(ticket.rows)
    has_left = ticket.progress.record_exits(outputs, threshold, end=is_last)
    return ticket.progress.to_answer(exit_rules) if has_left else None

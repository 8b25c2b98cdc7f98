"""A request among the scheduler's things: what its client asked for, the ticket it waits with, the batch it runs in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.engine.requests import Ticket
from weft.errors import RequestError
from weft.runtime.tensors import Array
from weft.serving.streams import Served, Stream


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client wants besides its result."""

    due: int
    """On the monotonic clock, in nanoseconds."""
    priority: int = 1
    strict: bool = False
    """Without a result after its deadline."""
    best_effort: bool = False
    """Its deadline only orders it; nobody counts it."""


class LiveTicket(Ticket):
    """A request of a real client."""

    __slots__ = ("batch", "began", "best_effort", "compute_ns", "inputs", "model", "reply", "rows", "timer")

    def __init__(self, stream: Stream, inputs: dict[str, Array], now: int, ask: Ask, reply: Reply) -> None:
        super().__init__(stream.index, now, ask.due, ask.priority, ask.strict)
        self.model, self.rows = stream.model, stream.rows
        self.inputs, self.reply = inputs, reply
        self.best_effort = ask.best_effort
        self.began = 0
        self.batch = 0
        self.compute_ns = 0
        self.timer: asyncio.TimerHandle | None = None


Reply = Callable[[LiveTicket, "dict[str, Array] | RequestError"], None]


class Batch:
    """The work of one job, on whatever lane runs it."""

    __slots__ = ("compute_ns", "model", "tickets", "values")

    def __init__(self, model: Served, tickets: list[LiveTicket]) -> None:
        self.model, self.tickets = model, tickets
        self.values: dict[str, Any] | None = None
        self.compute_ns = 0

    def compute(self, segment: int, options: Any) -> None:
        """Run a segment on what the one before it left."""
        if self.values is None:
            self.values = self._gathered()
        self.values = self.model.prepared.run_segment(segment, self.values, options)

    def _gathered(self) -> dict[str, Any]:
        if len(self.tickets) == 1:
            return self.tickets[0].inputs
        names = self.tickets[0].inputs
        return {name: np.concatenate([ticket.inputs[name] for ticket in self.tickets]) for name in names}

    def results(self) -> Iterator[tuple[LiveTicket, dict[str, Array]]]:
        """Every ticket with its rows of the outputs."""
        assert self.values is not None
        if len(self.tickets) == 1:
            yield self.tickets[0], self.values
            return
        row = 0
        for ticket in self.tickets:
            yield ticket, {name: each[row : row + ticket.rows] for name, each in self.values.items()}
            row += ticket.rows

"""Saturated streams as a source of work: the next query of a stream always waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.devices.decoupled import DeviceClocks
from weft.engine.engine import Completion, Offer
from weft.engine.policies.base import Candidate, Event, Setting
from weft.engine.policies.fairness import Band, may_go

DONE = 1 << 62
"""Progress of a stream that has issued its whole quota: so far ahead that the band never lets it go."""


class SaturatedStreams:
    """Offers the next layer of every stream until *work* ticks of work (``Program.work``) are issued.

    band: the fairness rule; None: every stream may always go on. quota: with a band, the queries that each stream may
    issue in the whole run.
    """

    def __init__(self, setting: Setting, band: Band | None, work: int, quota: Sequence[int] | None = None) -> None:
        self._setting, self._band, self._quota = setting, band, quota
        self._gains = band.gains(setting.programs) if band else None
        self._work_left = work
        self._heads = [
            Candidate.of_stream(program, stream=stream, query=0, layer=0)
            for stream, program in enumerate(setting.programs)
        ]
        """The next layer of every stream."""
        self._progress = [0] * len(self._heads)
        self.events: list[Event] = []
        """Always empty: saturated streams have no arrivals and no deadlines."""

    def done(self) -> bool:
        return self._work_left <= 0

    def at(self, now: int) -> Iterable[tuple[int, int]]:
        """Return nothing to stop: saturated streams have no arrivals and no deadlines."""
        return ()

    def next_event(self) -> int:
        raise AssertionError("a saturated stream always has a layer to offer")

    def offer(self, device: DeviceClocks) -> Offer:
        """Return the next layer of every stream; with a band, only those may go that it does not hold back."""
        heads = tuple(self._heads)
        if not self._band or not self._gains:
            return Offer(heads, heads)
        gains = [self._gains[head.stream][head.layer] for head in heads]
        allowed = may_go(self._progress, gains, self._band.max_lag_units)
        return Offer(heads, tuple(head for head in heads if allowed[head.stream]), tuple(self._progress))

    def completed(self, completion: Completion) -> None:
        """Do nothing: on an NPU the next layer of a stream may be issued before this one has ended."""

    def place(self, stream: int, query: int, layer: int, *, running: bool, lane: int = -1) -> None:
        raise AssertionError("the devices of saturated streams have no gates")

    def lane_awaited(self) -> bool:
        raise AssertionError("the devices of saturated streams have no gates")

    def issued(self, candidate: Candidate, step: int) -> None:
        """Move the stream of a candidate, issued as number *step*, on to its next layer."""
        stream, program = candidate.stream, self._setting.programs[candidate.stream]
        self._work_left -= program.work[candidate.layer]
        if self._gains:
            self._progress[stream] += self._gains[stream][candidate.layer]
        head = self._heads[stream] = candidate.following(program, last_issued=step)
        if self._quota and head.query >= self._quota[stream]:
            self._progress[stream] = DONE

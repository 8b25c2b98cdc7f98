"""Baselines for ``abreast``: common and published ways to share a GPU, over the same lanes.

Free streams, streams with priority, a fixed cut, Orion's and REEF's rules for one urgent model beside others, and time
slices. (``fifo``, ``edf`` and ``punctual`` run one model at a time.) The urgent model is the one of the highest
priority, among equals the one with the shortest time from arrival to deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from weft.base.errors import InputError
from weft.devices.shares import Shares
from weft.engine.policies.base import Candidate, LaneState, LateWork, OptionRange, Policy, Start, Traits, View
from weft.kernels import rules

Rank = tuple[int, int, int]
"""Urgency of a request: priority, negative time from arrival to deadline, negative stream number. All requests of a
model have the same rank; the model with the highest rank is the urgent model."""


@dataclass(frozen=True)
class Streams(Policy):
    """Every model on a stream of its own; the hardware divides the GPU."""

    traits: ClassVar[Traits] = Traits(for_deadlines=True, late_work=LateWork.AMONG_OTHERS, shares=True)

    @property
    def shares(self) -> Shares:
        assert self.setting.shares
        return self.setting.shares

    def decide(self, view: View) -> Start | None:
        """Start the first candidate, by deadline, whose lane (``lane``) has room."""
        heads = sorted(view.candidates, key=lambda head: rules.edf_key(head.deadline, head.arrival))
        # Once per decision, not per head: there may be many late requests.
        urgent = max([_rank(request) for request in _all_requests(view)])
        for head in heads:
            lane = self.lane(head, view, urgent)
            if lane is not None and view.lanes[lane].room:
                return Start(head, lane=lane)
        return None

    def lane(self, head: Candidate, view: View, urgent: Rank) -> int | None:
        """Return the lane of a candidate, or None if it has to wait; *urgent*: the rank of the urgent model."""
        return _lane_of_stream(head, view.lanes, self.shares.whole)


@dataclass(frozen=True)
class PriorityStreams(Streams):
    """The urgent model on a stream of high priority."""

    def lane(self, head: Candidate, view: View, urgent: Rank) -> int | None:
        return self.shares.high if _rank(head) == urgent else super().lane(head, view, urgent)


@dataclass(frozen=True)
class FixedSplit(Streams):
    """Streams of even numbers on one side of a cut, the others on the other side."""

    cut: int = 0
    """Index into the device's cuts."""
    swap: bool = False
    """Whether even numbers get the second side."""

    def lane(self, head: Candidate, view: View, urgent: Rank) -> int | None:
        if not self.shares.cuts:  # a plan for a server cannot know the cuts of its device
            return super().lane(head, view, urgent)
        if not 0 <= self.cut < len(self.shares.cuts):
            raise InputError(f"cut = {self.cut} must be one of the {len(self.shares.cuts)} that the device has, from 0")
        return self.shares.cuts[self.cut][(head.stream + self.swap) % 2]


@dataclass(frozen=True)
class Orion(Streams):
    """Orion (Strati et al., EuroSys 2024): the urgent model runs at once.

    Another model runs beside it if the two are bound by different resources, if their multiprocessors fit, and if the
    started work of other models stays within a budget.
    """

    traits: ClassVar[Traits] = replace(Streams.traits, by_events=False)

    sms: int = 100
    """Percent of the multiprocessors that both models may fill together."""
    budget_us: int = 400
    """Work of other models that may be started beside the urgent model, in microseconds."""

    def lane(self, head: Candidate, view: View, urgent: Rank) -> int | None:
        if _rank(head) == urgent:
            return self.shares.high
        return super().lane(head, view, urgent) if self._fits(head, _first_urgent(view, urgent), view) else None

    def _fits(self, head: Candidate, urgent: Candidate, view: View) -> bool:
        """Return whether a candidate may run beside the urgent model, of which *urgent* is a request."""
        kinds, whole = self.shares.kinds, self.shares.sms
        kind, urgent_kind = kinds[head.program], kinds[urgent.program]
        segments = [segment for lane in view.lanes for segment in lane.holds]
        started_ticks = sum([segment.compute for segment in segments if _rank(segment) != _rank(urgent)])
        fills = kind.fill(whole) + urgent_kind.fill(whole)
        differs = kind.bound(whole) != urgent_kind.bound(whole)
        return differs and fills <= self.sms / 100 and started_ticks + head.compute <= self.budget_us * 1000


@dataclass(frozen=True)
class Reef(Streams):
    """REEF (Han et al., OSDI 2022) without its killing of kernels.

    Other models run beside the urgent one only on the multiprocessors that it leaves free, in segments that are no
    longer than its own.
    """

    traits: ClassVar[Traits] = replace(Streams.traits, by_events=False)

    def lane(self, head: Candidate, view: View, urgent: Rank) -> int | None:
        if _rank(head) == urgent:
            return self.shares.high
        urgent_request, kinds, whole = _first_urgent(view, urgent), self.shares.kinds, self.shares.sms
        free = 1 - kinds[urgent_request.program].fill(whole)
        if head.compute > urgent_request.compute or kinds[head.program].fill(whole) > free:
            return None
        return super().lane(head, view, urgent)


@dataclass(frozen=True)
class TimeSlices(Streams):
    """One model at a time, in turn for a slice of time each."""

    traits: ClassVar[Traits] = replace(Streams.traits, by_events=False)
    ranges: ClassVar = {"slice_us": OptionRange(1, 10**9)}

    slice_us: int = 2000
    """Length of a slice in microseconds."""

    def lane(self, head: Candidate, view: View, urgent: Rank) -> int | None:
        streams = sorted({request.stream for request in _all_requests(view)})
        current_stream = streams[view.device.channel_free // (self.slice_us * 1000) % len(streams)]
        return (
            self.shares.whole[0]
            if head.stream == current_stream or not view.lanes[self.shares.whole[0]].holds
            else None
        )


def _lane_of_stream(head: Candidate, lanes: Sequence[LaneState], allowed_lanes: Iterable[int]) -> int | None:
    """Return a lane for a candidate: one of *allowed_lanes* that holds a segment of the same stream, else an idle one.

    None if there is neither.
    """
    numbers = list(allowed_lanes)
    holding = [number for number in numbers if any(held.stream == head.stream for held in lanes[number].holds)]
    return next(iter(holding or [number for number in numbers if not lanes[number].holds]), None)


def _all_requests(view: View) -> list[Candidate]:
    """Return the waiting candidates and the segments on lanes."""
    return [*view.candidates, *[segment for lane in view.lanes for segment in lane.holds]]


def _first_urgent(view: View, urgent: Rank) -> Candidate:
    """Return the first of the urgent model's requests, waiting or running."""
    return next(request for request in _all_requests(view) if _rank(request) == urgent)


def _rank(head: Candidate) -> Rank:
    """Return the rank of a candidate's model."""
    return head.priority, head.arrival - head.deadline, -head.stream

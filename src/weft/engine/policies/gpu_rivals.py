"""How GPUs are commonly shared, and what others do: rules to be compared with, over the same lanes as ``abreast``.

Free streams and streams with priority, a fixed cut, Orion's and REEF's rules for one urgent model beside others, and
time slices. One at a time are ``fifo``, ``edf`` and ``punctual``. The urgent model is the one of the highest priority,
among equals the one whose requests are due soonest after they came.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from weft.base.errors import InputError
from weft.devices.shares import Shares
from weft.engine.policies.base import (
    Candidate,
    LaneState,
    LateWork,
    Policy,
    Start,
    Traits,
    View,
)
from weft.kernels import rules

Rank = tuple[int, int, int]
"""How urgent a request is, among those who have work: the highest belongs to the urgent model."""


@dataclass(frozen=True)
class Streams(Policy):
    """Every model on a stream of its own, and the GPU sorts it out."""

    traits: ClassVar[Traits] = Traits(for_deadlines=True, late_work=LateWork.AMONG_OTHERS, shares=True)

    @property
    def shares(self) -> Shares:
        assert self.setting.shares
        return self.setting.shares

    def decide(self, view: View) -> Start | None:
        heads = sorted(view.candidates, key=lambda each: rules.edf_key(each.deadline, each.arrival))
        urgent = max([_rank(each) for each in _all(view)])  # once: late requests may be many
        for head in heads:
            lane = self.lane(head, view, urgent)
            if lane is not None and view.lanes[lane].room:
                return Start(head, lane=lane)
        return None

    def lane(self, head: Candidate, view: View, urgent: Rank) -> int | None:
        """Where a candidate goes; None: it has to wait. *urgent*: the rank of the urgent model's requests."""
        return _own(head, view.lanes, self.shares.whole)


@dataclass(frozen=True)
class PriorityStreams(Streams):
    """The urgent model on a stream of high priority."""

    def lane(self, head: Candidate, view: View, urgent: Rank) -> int | None:
        return self.shares.high if _rank(head) == urgent else super().lane(head, view, urgent)


@dataclass(frozen=True)
class FixedSplit(Streams):
    """Streams of even numbers on one side of a cut, the others on the other side."""

    cut: int = 0
    """Which of the device's cuts."""
    swap: bool = False
    """Whether even numbers get the second side."""

    def lane(self, head: Candidate, view: View, urgent: Rank) -> int | None:
        if not self.shares.cuts:  # what a server's device is like is known only when it serves
            return super().lane(head, view, urgent)
        if not 0 <= self.cut < len(self.shares.cuts):
            raise InputError(f"cut = {self.cut} must be one of the {len(self.shares.cuts)} that the device has, from 0")
        return self.shares.cuts[self.cut][(head.stream + self.swap) % 2]


@dataclass(frozen=True)
class Orion(Streams):
    """Strati et al., EuroSys 2024: the urgent model at once; others beside it if they are bound by something else,
    their multiprocessors fit, and not too much of them was started."""

    sms: int = 100
    """Percent of the multiprocessors that both may fill together."""
    budget_us: int = 400
    """Work of others that may be under way beside the urgent model."""

    def lane(self, head: Candidate, view: View, urgent: Rank) -> int | None:
        if _rank(head) == urgent:
            return self.shares.high
        return super().lane(head, view, urgent) if self._fits(head, _first(view, urgent), view) else None

    def _fits(self, head: Candidate, urgent: Candidate, view: View) -> bool:
        kinds, whole = self.shares.kinds, self.shares.sms
        one, other = kinds[head.program], kinds[urgent.program]
        others = [each for lane in view.lanes for each in lane.holds if _rank(each) != _rank(urgent)]
        under_way = sum([each.compute for each in others])
        fills = one.fill(whole) + other.fill(whole)
        differs = one.bound(whole) != other.bound(whole)
        return differs and fills <= self.sms / 100 and under_way + head.compute <= self.budget_us * 1000


@dataclass(frozen=True)
class Reef(Streams):
    """Han et al., OSDI 2022, as it can be had without killing kernels: others run beside the urgent model only in what
    it leaves, in segments that are no longer than its own."""

    def lane(self, head: Candidate, view: View, urgent: Rank) -> int | None:
        if _rank(head) == urgent:
            return self.shares.high
        first, kinds, whole = _first(view, urgent), self.shares.kinds, self.shares.sms
        leaves = 1 - kinds[first.program].fill(whole)
        if head.compute > first.compute or kinds[head.program].fill(whole) > leaves:
            return None
        return super().lane(head, view, urgent)


@dataclass(frozen=True)
class TimeSlices(Streams):
    """One model at a time, each for a while in turn."""

    slice_us: int = 2000

    def __post_init__(self) -> None:
        if not 1 <= self.slice_us <= 10**9:
            raise InputError(f"slice_us = {self.slice_us} must be from 1 to 1000000000")

    def lane(self, head: Candidate, view: View, urgent: Rank) -> int | None:
        streams = sorted({each.stream for each in _all(view)})
        turn = streams[view.device.channel_free // (self.slice_us * 1000) % len(streams)]
        return self.shares.whole[0] if head.stream == turn or not view.lanes[self.shares.whole[0]].holds else None


def _own(head: Candidate, lanes: Sequence[LaneState], among: Iterable[int]) -> int | None:
    """Of some lanes the one that has something of a stream; else one with nothing to do, if there is one."""
    found = list(among)
    holding = [at for at in found if any(each.stream == head.stream for each in lanes[at].holds)]
    return next(iter(holding or [at for at in found if not lanes[at].holds]), None)


def _all(view: View) -> list[Candidate]:
    """What waits and what runs."""
    return [*view.candidates, *[each for lane in view.lanes for each in lane.holds]]


def _first(view: View, urgent: Rank) -> Candidate:
    """The first of the urgent model's requests that waits or runs."""
    return next(each for each in _all(view) if _rank(each) == urgent)


def _rank(head: Candidate) -> Rank:
    return head.priority, head.arrival - head.deadline, -head.stream

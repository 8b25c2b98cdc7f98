"""Queues of lanes that take segments ahead: the rules that simulated and real lanes share.

A lane computes its segments in order: the first runs, the others wait behind it. The next segment of a batch goes to
the lane that runs the last one, if that has room. On another lane it has to wait until the last one has ended. Where
lanes have memory of their own (``Setting.apart``), a batch cannot change lanes: it is not offered while its lane has no
room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from weft.engine.policies.base import Candidate

DEVICE_AHEAD = 1
"""Segments that a lane of a GPU takes besides the running one: enough to hide the launch of the next."""

MOST_AHEAD = 4
"""Most segments that wait on a lane: each one that waits delays the effect of the policy's next decision."""

SHORT_TICKS = 300_000
"""Another segment is taken while the waiting ones last less than 0.3 ms: reporting an end and sending the next takes
as long, and the lane would run dry."""

BatchKey = tuple[int, int]
"""A batch by its stream and its query."""


class Queued(Protocol):
    """A segment on a lane, running or waiting."""

    @property
    def batch(self) -> BatchKey:
        """The batch that goes on from it."""
        ...

    @property
    def stoppable(self) -> bool:
        """Whether it may be stopped half-way for urgent work."""
        ...

    @property
    def compute(self) -> int:
        """Its expected ticks."""
        ...

    @property
    def body(self) -> object:
        """The body (backbone) whose memory it is computed in, where lanes are shares of one device."""
        ...


Q = TypeVar("Q", bound=Queued, covariant=True)


class LaneQueue(Protocol[Q]):
    """A lane with its segments."""

    @property
    def tasks(self) -> Sequence[Q]: ...


L = TypeVar("L", bound=LaneQueue[Queued])


class Numbered(Protocol):
    """A lane with a number."""

    @property
    def index(self) -> int: ...


N = TypeVar("N", bound=Numbered)


def has_room(lane: LaneQueue[Queued], ahead: int) -> bool:
    """Return whether a lane takes one more segment: *ahead* besides the running one, a few more of short ones.

    Nothing waits behind a segment that may be stopped, so that the policy can still weigh urgent work against it.
    """
    tasks = lane.tasks
    if not tasks or not ahead or tasks[-1].stoppable:
        return not tasks
    short = len(tasks) <= MOST_AHEAD and sum([task.compute for task in tasks[1:]]) < SHORT_TICKS
    return len(tasks) <= ahead or short


def known(lane: LaneQueue[Q], ahead: int) -> Sequence[Q]:
    """Return the segments of a lane that are reported to the source before they end: the running one.

    While the lane has room, the waiting ones as well: their batches' next segments may be all there is to give it.
    """
    return lane.tasks if has_room(lane, ahead) else lane.tasks[:1]


def lane_for(batch: BatchKey, lanes: Sequence[L], rest: Callable[[L], int]) -> L:
    """Choose a lane, of those with room, for the next segment of a batch.

    The lane of its last segment; else an idle lane; else the one that is expected to be free first.
    """
    own = [lane for lane in lanes if any(task.batch == batch for task in lane.tasks)]
    return min(own or lanes, key=lambda lane: (bool(lane.tasks), rest(lane)))


def at_home(candidate: Candidate, lanes: Sequence[N]) -> Sequence[N]:
    """Return the lanes, of those with room, that a layer may go to: only its batch's home lane if it has one."""
    return lanes if candidate.home is None else [lane for lane in lanes if lane.index == candidate.home]


def awaited(task: Queued, lane: LaneQueue[Q], lanes: Iterable[LaneQueue[Q]], *, shares: bool = False) -> list[Q]:
    """Return the segments on other lanes that have to end before a segment begins on its lane.

    Those of its own batch. shares: also those of its body (backbone), which has one place in the lanes' common memory.
    """
    elsewhere = [other for other_lane in lanes if other_lane is not lane for other in other_lane.tasks]
    return [other for other in elsewhere if other.batch == task.batch or (shares and other.body == task.body)]

"""Queues of lanes that take segments ahead: the rules that simulated and real lanes share.

A lane computes its segments in order: the first runs, the others wait behind it. The next segment of a batch goes to
the lane of its previous segment, if that lane has room. On another lane it has to wait until the previous segment has
ended. Where lanes have memory of their own (``Setting.apart``), a batch cannot change lanes: it is not offered while
its lane has no room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from weft.engine.policies.base import Candidate

DEVICE_AHEAD = 1
"""Segments that a lane of a GPU takes besides the running one: enough to hide the launch of the next segment."""

MOST_AHEAD = 4
"""Most segments that wait on a lane: every waiting segment delays the effect of the policy's next decision."""

SHORT_TICKS = 300_000
"""A lane takes another segment while its waiting ones last less than 0.3 ms in all. Reporting the end of a segment and
sending the next takes as long, so the lane would otherwise run dry."""

BatchKey = tuple[int, int]
"""A batch by its stream and its query."""


class Queued(Protocol):
    """A segment on a lane, running or waiting."""

    @property
    def candidate(self) -> Candidate:
        """The segment; where it covers several layers, the first of them, with the ticks of all."""
        ...

    @property
    def batch(self) -> BatchKey:
        """The batch that the segment belongs to."""
        ...

    @property
    def layers(self) -> int | None:
        """The layers that it covers where the device has gates (``Start.layers``); None: one layer, without gates."""
        ...

    @property
    def began(self) -> int | None:
        """When its lane began to compute it; None while it waits."""
        ...

    @property
    def aborted(self) -> bool:
        """Whether it was asked to stop."""
        ...

    @property
    def stoppable(self) -> bool:
        """Whether the segment may be stopped half-way for urgent work."""
        ...

    @property
    def compute(self) -> int:
        """Expected ticks of the segment."""
        ...

    @property
    def body(self) -> object:
        """The body (backbone) in whose memory the segment is computed, where lanes are shares of one device."""
        ...


Q = TypeVar("Q", bound=Queued, covariant=True)


class LaneQueue(Protocol[Q]):
    """A lane with its number and its segments."""

    @property
    def index(self) -> int: ...

    @property
    def tasks(self) -> Sequence[Q]: ...

    @property
    def is_open(self) -> bool:
        """Whether the lane accepts segments."""
        ...


L = TypeVar("L", bound=LaneQueue[Queued])


def has_room(lane: LaneQueue[Queued], ahead: int) -> bool:
    """Return whether a lane takes one more segment.

    ahead: the segments that may wait behind the running one; 0: none. If the waiting segments are short, up to
    ``MOST_AHEAD`` may wait. Nothing waits behind a segment that may be stopped, so that the policy can still weigh
    urgent work against that segment. A batch that can leave at gates takes no room: ``LanePlan`` decides about it.
    """
    tasks = lane.tasks
    if not tasks or tasks[-1].layers is not None:
        return True
    if not ahead or tasks[-1].stoppable:
        return False
    waiting_is_short = len(tasks) <= MOST_AHEAD and sum([task.compute for task in tasks[1:]]) < SHORT_TICKS
    return len(tasks) <= ahead or waiting_is_short


def tasks_to_report(lane: LaneQueue[Q], ahead: int) -> Sequence[Q]:
    """Return the segments of a lane that are reported to the source before they end, so that their batches continue.

    That is the running segment. While the lane has room, the waiting segments are reported as well: the next segments
    of their batches may be the only work for the lane.
    """
    return lane.tasks if has_room(lane, ahead) else lane.tasks[:1]


def choose_lane(batch: BatchKey, lanes: Sequence[L], rest: Callable[[L], int]) -> L:
    """Choose a lane for the next segment of a batch.

    The lane of its previous segment; else an idle lane; else the lane that is expected to be free first.
    lanes: the lanes with room. rest: returns the expected ticks until a lane is idle.
    """
    lanes_of_batch = [lane for lane in lanes if any(task.batch == batch for task in lane.tasks)]
    return min(lanes_of_batch or lanes, key=lambda lane: (bool(lane.tasks), rest(lane)))


def allowed_lanes(candidate: Candidate, lanes: Sequence[L]) -> Sequence[L]:
    """Return those of *lanes* on which a layer may run: only the home lane of its batch, if the batch has one."""
    return lanes if candidate.home is None else [lane for lane in lanes if lane.index == candidate.home]


def preceding_tasks(
    task: Queued, lane: LaneQueue[Q], lanes: Iterable[LaneQueue[Q]], *, shares: bool = False
) -> list[Q]:
    """Return the segments on other lanes that have to end before *task* begins on *lane*: those of its own batch.

    shares: also the segments of its body (backbone), which has one place in the common memory of the lanes.
    """
    elsewhere = [other for other_lane in lanes if other_lane is not lane for other in other_lane.tasks]
    return [other for other in elsewhere if other.batch == task.batch or (shares and other.body == task.body)]

"""What a lane holds that takes segments ahead: the rules that simulated and real lanes share.

A lane computes what it was given in order, the first now and the others when their turn comes. A batch goes on where
its last segment runs, if there is room. Elsewhere its next one has to wait until what it goes on from has ended. Where
lanes have memory of their own (``Setting.apart``) there is no elsewhere: it is not offered while its lane has no room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from weft.engine.policies.base import Candidate

DEVICE_AHEAD = 1
"""How many segments the lane of a GPU takes besides the one that it computes."""

MOST_AHEAD = 4
"""So many segments wait at most on a lane that takes them ahead."""

SHORT_TICKS = 300_000
"""Another one is taken while what waits takes less than 0.3 ms, as hearing of an end and sending the next does."""

BatchKey = tuple[int, int]
"""A batch by its stream and its query."""


class Queued(Protocol):
    """A segment that a lane was given and that has not ended."""

    @property
    def batch(self) -> BatchKey:
        """The batch that goes on from it."""
        ...

    @property
    def stoppable(self) -> bool:
        """Whether it is long enough to be stopped for something urgent."""
        ...

    @property
    def compute(self) -> int:
        """How many ticks it is expected to take."""
        ...

    @property
    def body(self) -> object:
        """Whose memory it is computed in, where lanes are shares of one device."""
        ...


Q = TypeVar("Q", bound=Queued, covariant=True)


class LaneQueue(Protocol[Q]):
    """A lane and what it was given."""

    @property
    def tasks(self) -> Sequence[Q]: ...


L = TypeVar("L", bound=LaneQueue[Queued])


class Numbered(Protocol):
    """A lane by its number."""

    @property
    def index(self) -> int: ...


N = TypeVar("N", bound=Numbered)


def has_room(lane: LaneQueue[Queued], ahead: int) -> bool:
    """Whether a lane that takes so many segments ahead takes one more; of short ones it takes a few more than that.

    Nothing waits behind one that may be stopped: whoever is urgent is weighed against it first.
    """
    tasks = lane.tasks
    if not tasks or not ahead or tasks[-1].stoppable:
        return not tasks
    short = len(tasks) <= MOST_AHEAD and sum([task.compute for task in tasks[1:]]) < SHORT_TICKS
    return len(tasks) <= ahead or short


def known(lane: LaneQueue[Q], ahead: int) -> Sequence[Q]:
    """Those of a lane's segments from which batches may go on before they have ended: the one that it computes.

    Where it takes more, what waits behind it as well, or there would be nothing to give it.
    """
    return lane.tasks if has_room(lane, ahead) else lane.tasks[:1]


def lane_for(batch: BatchKey, lanes: Sequence[L], rest: Callable[[L], int]) -> L:
    """Which of the lanes with room takes the next segment of a batch.

    That which computes its last one; else one with nothing to do; else the one that is expected to end first.
    """
    own = [lane for lane in lanes if any(task.batch == batch for task in lane.tasks)]
    return min(own or lanes, key=lambda lane: (bool(lane.tasks), rest(lane)))


def at_home(candidate: Candidate, lanes: Sequence[N]) -> Sequence[N]:
    """Those of the lanes with room that a layer may go to: where its batch stays, if it has to."""
    return lanes if candidate.home is None else [lane for lane in lanes if lane.index == candidate.home]


def awaited(task: Queued, lane: LaneQueue[Q], lanes: Iterable[LaneQueue[Q]], *, shares: bool = False) -> list[Q]:
    """What a segment that is given to a lane goes on from, and runs on others.

    shares: lanes have one memory, in which a body has one place: its batches follow each other.
    """
    others = [each for other in lanes if other is not lane for each in other.tasks]
    return [each for each in others if each.batch == task.batch or (shares and each.body == task.body)]

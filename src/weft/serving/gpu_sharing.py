"""Shares of a GPU among the models of a server: which lanes there are, what every program is like, and what was seen.

Until the worker of the device has opened a model, nobody knows how it can be cut: models run on streams of the whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

from weft.base.errors import InputError
from weft.devices.host import GpuCuts
from weft.devices.shares import GpuLikeness
from weft.engine.policies import policy_called
from weft.runtime.device_kinds import device_kind

UNMEASURED = GpuLikeness(speeds={4096: 1.0}, kernel_us=10.0, memory=0.5)
"""What a model is taken to be like that was not measured on shares: it fills the GPU, and wants half of the memory."""
UNCUT = GpuCuts(sms=1)
"""A GPU of which nothing is known yet."""
ALONE, BESIDE = 0.05, 0.9
"""A segment ran alone if others ran for less than this part of its time, and beside another that ran for more."""
TOLD_TICKS = 10_000_000
"""Decisions hear of what was learned once in 10 ms for every pair of bodies: they have to work out all ways again."""
KEPT = 64
"""Segments that have ended and may have run beside one whose end is told now."""


class LaneRun(NamedTuple):
    """Work of a kind on a lane, and when it ran; times on the clock of the lanes."""

    lane: int
    kind: int
    start: int
    end: int


class SeenPair(NamedTuple):
    """What is made of a segment that ended."""

    alone: bool
    """Whether it had the whole GPU to itself."""
    speed: float
    """How fast it was to go beside those who ran for most of its time."""


def sharing_for(policy: str, device: str | None) -> GpuSharing | None:
    """What a policy needs that chooses shares of a device; None for others. InputError where the device has none."""
    if not policy_called(policy).traits.shares:
        return None
    if device is None:
        raise InputError(f"{policy} chooses shares of a GPU, and models run on processors here; serve with --device")
    if "," in device:
        raise InputError(f"{policy} chooses shares of one GPU, and {device} are several; name one of them")
    if not device_kind(device).shares:
        raise InputError(f"{policy} chooses shares of a device, and {device} has none; serve with punctual")
    return GpuSharing()


class GpuSharing:
    """What the policy of a server knows of its GPU's lanes; programs are kinds of work, by their numbers."""

    def __init__(self) -> None:
        self.cuts = UNCUT
        self._kinds: list[GpuLikeness] = []
        self._bodies: list[int] = []
        self._living: set[int] = set()
        """Bodies that are there."""
        self._tags: list[int] = []
        self._numbers = count()
        self.shares = self.cuts.shares(self._kinds, self._bodies, self._tags)
        self._ended: deque[LaneRun] = deque(maxlen=KEPT)
        self._changed: set[int] = set()
        """Bodies of which something was learned that decisions do not know."""
        self._next_told = 0
        self._foretold: dict[tuple[int, int, int, int], float] = {}
        """Speeds of pairs as they were predicted."""

    def number(self) -> int:
        """A number that nobody has, for another body."""
        return next(self._numbers)

    def put(self, first: int, likes: Sequence[GpuLikeness], body: int) -> None:
        """Programs from this number on are those of a body, and are like that."""
        self._living.add(body)
        self._foretold.clear()
        end = first + len(likes)
        self._kinds[first:end] = likes
        self._bodies[first:end] = [body] * len(likes)
        self._tags[first:end] = [0] * len(likes)
        self._tag(body)

    def _tag(self, body: int) -> None:
        """Give new tags to the programs of a body, since something of it has changed."""
        found: dict[GpuLikeness, int] = {}
        for at, own in enumerate(self._bodies):
            if own == body:
                like = self._kinds[at]
                if like not in found:
                    found[like] = next(self._numbers)
                self._tags[at] = found[like]

    def _tell(self, now: int) -> None:
        """Let decisions know what was learned, if that was not only just done."""
        if self._changed and now >= self._next_told:
            for body in self._changed:
                self._tag(body)
            self._changed.clear()
            self._next_told = now + TOLD_TICKS * len(self._living) ** 2

    def forget(self, body: int) -> None:
        """A body is gone."""
        self._living.discard(body)
        self.shares.seen.forget(body)

    def recut(self, cuts: GpuCuts) -> bool:
        """How the device can be cut is known; whether that is news."""
        if cuts == self.cuts:
            return False
        self.cuts, self.shares = cuts, cuts.shares(self._kinds, self._bodies, self._tags)
        self._ended.clear()
        self._foretold.clear()
        return True

    def name(self, lane: int) -> str:
        """A lane by its share."""
        lanes = self.shares.lanes
        return str(lanes[lane]) if lane < len(lanes) else str(self.shares.sms)

    def observe(self, ran: LaneRun, expected: int | None, running: Iterable[LaneRun]) -> SeenPair:
        """A segment ended that was expected to take so long alone on the whole GPU; None: nobody knows.

        running: what is still on other lanes. Of pairs only those segments tell that followed another at once: a lane
        with nothing to do begins later than it was told to.
        """
        took, beside, followed = max(1, ran.end - ran.start), dict[tuple[int, int], int](), False
        for other in running:
            _note(ran, other, beside)
        for other in reversed(self._ended):  # they are told of in order
            if other.end < ran.start:
                break
            followed = followed or other.lane == ran.lane
            _note(ran, other, beside)
        self._ended.append(ran)
        if ran.lane >= len(self.shares.lanes):  # the device was cut otherwise when it was started
            return SeenPair(False, 1.0)
        whole = self.shares.lanes[ran.lane].sms == self.shares.sms
        if sum(beside.values()) <= ALONE * took:
            return SeenPair(whole, self.shares.speeds([ran.kind], [ran.lane])[0])
        most = [each for each, both in beside.items() if both > took / 2]
        kinds, lanes = [ran.kind, *[kind for kind, _ in most]], [ran.lane, *[lane for _, lane in most]]
        if expected and followed and len(beside) == len(most) == 1 and beside[most[0]] >= BESIDE * took:
            pair = self.shares.pair(ran.kind, ran.lane, *most[0])
            if self.shares.seen.learn(pair, expected / took / self._predicted(ran, *most[0])):
                self._changed.add(pair.body)
        self._tell(ran.end)
        return SeenPair(False, self.shares.speeds(kinds, lanes)[0])

    def _predicted(self, ran: LaneRun, other: int, others_lane: int) -> float:
        """How fast a segment was taken to be beside one of another kind, before anything was seen."""
        key = ran.kind, ran.lane, other, others_lane
        if key not in self._foretold:
            self._foretold[key] = self.shares.predicted([ran.kind, other], [ran.lane, others_lane])[0]
        return self._foretold[key]


def _note(ran: LaneRun, other: LaneRun, beside: dict[tuple[int, int], int]) -> None:
    """Add how long another ran beside a segment, by its kind and lane."""
    both = min(ran.end, other.end) - max(ran.start, other.start)
    if both > 0 and other.lane != ran.lane:
        key = other.kind, other.lane
        beside[key] = beside.get(key, 0) + both

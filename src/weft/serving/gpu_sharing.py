"""Shares of a GPU among the models of a server: the lanes, the sensitivity of programs, and observed contention.

The sensitivity of a program is how much slower it is on smaller shares. A cut divides the GPU's multiprocessors between
two lanes; until the device's worker has opened a model, the possible cuts are unknown, and models run on streams of the
whole GPU.
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
"""Assumption for a model that was not measured on shares: it fills the GPU, and uses half of the memory bandwidth.

4096 multiprocessors: more than any GPU has, so no speed on a share is known."""
UNCUT = GpuCuts(sms=1)
"""Placeholder until the device's worker reports how the GPU can be divided."""
ALONE, BESIDE = 0.05, 0.9
"""Overlaps, as a part of a segment's time: below the first it ran alone, above the second beside another segment."""
UPDATE_TICKS = 10_000_000
"""Learned speeds reach the policy every 10 ms per pair of bodies: it must enumerate all assignments of models to lanes
again each time."""
KEPT = 64
"""Ended segments that are kept to compute overlaps with segments that end later."""


class LaneRun(NamedTuple):
    """A segment on a lane, ended or running. kind: number of its program. Times are on the clock of the lanes."""

    lane: int
    kind: int
    start: int
    end: int


class ObservedContention(NamedTuple):
    """How segments on other lanes slowed a segment down."""

    alone: bool
    """Whether it had the whole GPU to itself."""
    speed: float
    """Expected speed next to the segments that ran for most of its time; 1: alone on the whole GPU."""


def sharing_for(policy: str, device: str | None) -> GpuSharing | None:
    """Create the state for a policy that assigns shares; None for other policies. InputError if the device has none."""
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
    """The shares of a GPU as the policy sees them; a program's number is its *kind* of work."""

    def __init__(self) -> None:
        self.cuts = UNCUT
        # by number of the program: its sensitivity to shares, its body, and its tag (see ``_tag``)
        self._kinds: list[GpuLikeness] = []
        self._bodies: list[int] = []
        self._tags: list[int] = []
        self._living: set[int] = set()
        """Numbers of the loaded bodies: models, or groups of stitched models."""
        self._numbers = count()  # unused numbers, for bodies and for tags
        self.shares = self.cuts.shares(self._kinds, self._bodies, self._tags)
        self._ended: deque[LaneRun] = deque(maxlen=KEPT)
        """The last segments, in the order of their ends."""
        self._changed: set[int] = set()
        """Numbers of bodies with learned speeds that the policy does not use yet."""
        self._next_update = 0
        """The earliest time at which learned speeds are passed on to the policy again, in ticks."""
        self._predicted: dict[tuple[int, int, int, int], float] = {}
        """(kind, lane, neighbour's kind, neighbour's lane) -> predicted speed, before any observation."""

    def next_number(self) -> int:
        """Return an unused number for another body."""
        return next(self._numbers)

    def put(self, first: int, sensitivities: Sequence[GpuLikeness], body: int) -> None:
        """Register the programs of a body, numbered from *first*; *sensitivities*: of each, to shares."""
        self._living.add(body)
        self._predicted.clear()
        end = first + len(sensitivities)
        self._kinds[first:end] = sensitivities
        self._bodies[first:end] = [body] * len(sensitivities)
        self._tags[first:end] = [0] * len(sensitivities)
        self._tag(body)

    def _tag(self, body: int) -> None:
        """Give new tags to the programs of a body, because its speeds changed; programs that are alike get equal tags.

        The policy caches its assignments by tags, so a new tag makes it compute them again.
        """
        tags: dict[GpuLikeness, int] = {}
        for kind, owner in enumerate(self._bodies):
            if owner == body:
                sensitivity = self._kinds[kind]
                if sensitivity not in tags:
                    tags[sensitivity] = next(self._numbers)
                self._tags[kind] = tags[sensitivity]

    def _publish(self, now: int) -> None:
        """Make the policy use learned speeds, by new tags for their bodies, if the last update was long enough ago.

        Each makes the policy assign models to lanes anew, which takes longer with more pairs of loaded bodies.
        """
        if self._changed and now >= self._next_update:
            for body in self._changed:
                self._tag(body)
            self._changed.clear()
            self._next_update = now + UPDATE_TICKS * len(self._living) ** 2

    def forget(self, body: int) -> None:
        """Forget a body that was closed."""
        self._living.discard(body)
        self.shares.seen.forget(body)

    def recut(self, cuts: GpuCuts) -> bool:
        """Set how the device can be divided; return whether that changed anything."""
        if cuts == self.cuts:
            return False
        self.cuts, self.shares = cuts, cuts.shares(self._kinds, self._bodies, self._tags)
        self._ended.clear()
        self._predicted.clear()
        return True

    def name(self, lane: int) -> str:
        """Return the name of a lane: its number of multiprocessors, with "high" if it has high priority."""
        lanes = self.shares.lanes
        return str(lanes[lane]) if lane < len(lanes) else str(self.shares.sms)

    def observe(self, run: LaneRun, expected: int | None, running: Iterable[LaneRun]) -> ObservedContention:
        """Learn from a segment that ended; return the contention that it met.

        expected: its expected ticks alone on the whole GPU, None if unknown. running: segments still on other lanes.
        """
        ticks = max(1, run.end - run.start)
        overlaps, lane_was_busy = self._overlaps(run, running)
        self._ended.append(run)
        if run.lane >= len(self.shares.lanes):  # started before the last recut: its lane no longer exists
            return ObservedContention(alone=False, speed=1.0)
        if sum(overlaps.values()) <= ALONE * ticks:
            has_whole_gpu = self.shares.lanes[run.lane].sms == self.shares.sms
            return ObservedContention(alone=has_whole_gpu, speed=self.shares.speeds([run.kind], [run.lane])[0])
        main_neighbours = [neighbour for neighbour, overlap in overlaps.items() if overlap > ticks / 2]
        # Learn only from a clean observation: exactly one neighbour, during nearly all of the segment's time; and the
        # lane must have been busy before, because an idle lane starts with a delay.
        if expected and lane_was_busy and len(overlaps) == len(main_neighbours) == 1:
            (neighbour,) = main_neighbours
            if overlaps[neighbour] >= BESIDE * ticks:
                self._learn(run, neighbour, expected / ticks)
        self._publish(run.end)
        kinds = [run.kind, *[kind for kind, _ in main_neighbours]]
        lanes = [run.lane, *[lane for _, lane in main_neighbours]]
        speed, *_ = self.shares.speeds(kinds, lanes)  # of this segment, then of its neighbours
        return ObservedContention(alone=False, speed=speed)

    def _overlaps(self, run: LaneRun, running: Iterable[LaneRun]) -> tuple[dict[tuple[int, int], int], bool]:
        """Return for how many ticks a segment ran at the same time as others, by their kind and lane.

        running: segments still on other lanes. Also return whether its lane was busy right before it.
        """
        overlaps, lane_was_busy = dict[tuple[int, int], int](), False
        for other in running:
            _add_overlap(run, other, overlaps)
        for other in reversed(self._ended):
            if other.end < run.start:
                break
            lane_was_busy = lane_was_busy or other.lane == run.lane
            _add_overlap(run, other, overlaps)
        return overlaps, lane_was_busy

    def _learn(self, run: LaneRun, neighbour: tuple[int, int], speed: float) -> None:
        """Learn the observed speed of a segment next to one neighbour, given by its kind and lane."""
        pair = self.shares.pair(run.kind, run.lane, *neighbour)
        if self.shares.seen.learn(pair, speed / self._predict_speed(run, *neighbour)):
            self._changed.add(pair.body)

    def _predict_speed(self, run: LaneRun, other_kind: int, other_lane: int) -> float:
        """Return the speed of a segment next to one of *other_kind* on *other_lane*, predicted without observations."""
        key = run.kind, run.lane, other_kind, other_lane
        if key not in self._predicted:
            self._predicted[key] = self.shares.predicted([run.kind, other_kind], [run.lane, other_lane])[0]
        return self._predicted[key]


def _add_overlap(run: LaneRun, other: LaneRun, overlaps: dict[tuple[int, int], int]) -> None:
    """Add the ticks during which *other*, a segment on another lane, ran at the same time as *run* to *overlaps*."""
    overlap = min(run.end, other.end) - max(run.start, other.start)
    if overlap > 0 and other.lane != run.lane:
        key = other.kind, other.lane
        overlaps[key] = overlaps.get(key, 0) + overlap

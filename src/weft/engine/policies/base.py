"""What a policy may know and what it may say.

A policy is one decision: given a view, which stream's next layer to issue. It never sees the engine,
and what it may know grows by fields of ``View``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from weft.devices.costs.program import Program
from weft.devices.decoupled import DeviceClocks
from weft.devices.shares import Shares
from weft.engine.policies.fairness import Band
from weft.workloads import DEFAULT_MAX_LAG

NO_DEADLINE = 1 << 62
NO_BUFFER = 1 << 52
"""Buffer of a device that has none to fill, as a host: more than anything takes."""
UNBOUNDED_ROUNDS = 1 << 40
"""Rounds of a run that ends when its requests do."""


class LateWork(Enum):
    """Where requests that can no longer be on time go."""

    AMONG_OTHERS = "among the others"
    LAST = "after all that can be on time"
    WOVEN = "where they make none of those late"


class Work(NamedTuple):
    """How much work a query is, and how much its stream was given."""

    whole: int = 0
    """Estimated ticks of the whole query, had it the device to itself."""
    served: int = 0
    """Ticks of work that its stream was given; one that had nothing to do is not owed for that time."""


class Refill(NamedTuple):
    """What policies that refill batches know of a candidate (``Traits.refills``)."""

    dues: tuple[int, ...]
    """When each request of the batch is due."""
    waiting: int
    """Requests of its stream that have not begun, its own not counted."""


class ShareUse(NamedTuple):
    """What is known of a candidate's stream where lanes are shares of one device (``Setting.shares``)."""

    lately: float
    """The part of the device's time that its stream was given lately."""
    behind: int
    """When it must be done so that those who wait behind it in its stream can be on time."""


NO_WORK = Work()


class Candidate(NamedTuple):
    """The next unissued layer of one query: of a stream, or of a batch of requests.

    What stands after ``size`` are facets: ``home``, ``refill`` and ``share`` are None where a feature is off.
    ``of_stream`` and ``of_batch`` are called for all there is at every step, and build it by position: keywords would
    take twice as long. ``of_batch`` makes the tuple itself, which takes another third off.
    """

    stream: int
    query: int
    layer: int
    """0 where the query has not begun."""
    fetch: int
    compute: int
    last_issued: int
    """Step at which this stream, or this batch, was last chosen; -1 for never."""
    program: int
    """Which of the setting's programs it runs."""
    arrival: int = 0
    """When its oldest request arrived; 0 in saturated streams."""
    deadline: int = NO_DEADLINE
    """When the first of its requests that can still be on time is due; none for late ones."""
    remaining: int = 0
    """Estimated ticks to the end of the query, had it the device to itself."""
    priority: int = 1
    size: int = 1
    """Requests in the batch."""
    work: Work = NO_WORK
    home: int | None = None
    """The lane that its batch stays on (``Setting.apart``); None where it may go to any."""
    refill: Refill | None = None
    share: ShareUse | None = None

    @classmethod
    def of_stream(cls, program: Program, *, stream: int, query: int, layer: int, last_issued: int = -1) -> Candidate:
        """The next layer of a stream that never runs dry; such a stream has one program."""
        return cls(
            stream, query, layer, program.fetch[layer], program.compute[layer], last_issued, stream, 0, NO_DEADLINE,
            program.remaining[layer], 1, 1, Work(program.total_work),
        )  # fmt: skip

    @classmethod
    def of_batch(
        cls,
        program: Program,
        rests: Sequence[int],
        number: int,
        stream: int,
        query: int,
        arrival: int,
        deadline: int,
        priority: int,
        size: int,
        layer: int = 0,
        last_issued: int = -1,
        served: int = 0,
        home: int | None = None,
        refill: Refill | None = None,
        share: ShareUse | None = None,
    ) -> Candidate:
        """The next layer of a batch of requests, in flight or one that could begin.

        rests: estimated ticks from each layer of its program to the end. number: of its program in the setting.
        """
        return tuple.__new__(cls, (
            stream, query, layer, program.fetch[layer], program.compute[layer], last_issued, number, arrival, deadline,
            rests[layer], priority, size, tuple.__new__(Work, (rests[0], served)), home, refill, share,
        ))  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        """Members that were moved to facets in 0.3 and that policies of 0.2 read; until 0.4."""
        facet, missing = _MOVED.get(name, ("", None))
        if not facet:
            raise AttributeError(f"a candidate has no {name!r}", name=name, obj=self)
        warnings.warn(f"candidate.{name} is candidate.{facet}.{name} now", DeprecationWarning, stacklevel=2)
        return getattr(getattr(self, facet), name, missing)


_MOVED: Mapping[str, tuple[str, Any]] = {
    "whole": ("work", 0),
    "served": ("work", 0),
    "dues": ("refill", ()),
    "waiting": ("refill", 0),
    "lately": ("share", 0.0),
    "behind": ("share", NO_DEADLINE),
}
"""Name of a member -> its facet, and what it is where that facet is off."""


class Running(NamedTuple):
    """A layer that is being computed."""

    candidate: Candidate
    rest: int
    """Estimated ticks to its end."""
    stoppable: bool = True
    """Whether it could be stopped, all its progress lost; else its batch was started to its end (``Start.to_end``)."""


class LaneState(NamedTuple):
    """What a lane was given and has not ended, in order, where a policy chooses lanes."""

    holds: tuple[Candidate, ...]
    rest: int
    """Estimated ticks until all of it has ended, had each the device to itself."""
    room: bool
    """Whether it takes one more."""


IDLE_LANE = LaneState((), 0, True)
"""A lane with nothing to do."""


class EventKind(Enum):
    """What makes the engine ask a policy."""

    ARRIVAL = "a request came"
    SEGMENT_END = "a segment of a batch ended"
    BATCH_END = "a batch ended, was given up, or became part of another"
    DEADLINE = "a request will miss its deadline, or has missed it"
    REVOKED = "work that had been started was taken back"


class Event(NamedTuple):
    """Something that happened since a policy was last asked."""

    kind: EventKind
    stream: int
    query: int = -1
    """The batch; -1 for a request that waits."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What stays the same during a run."""

    programs: Sequence[Program]
    """A server appends to it as models are loaded."""
    buffer: int
    """Weight buffer in ticks."""
    rounds: int = 1
    """How many rounds of work the run will issue."""
    mix: tuple[float, ...] | None = None
    """Queries per round the user asked for; None leaves it to the policy."""
    max_lag: float = DEFAULT_MAX_LAG
    """Rounds a stream may fall behind, where there is a mix to fall behind of."""
    lanes: int = 1
    """How many layers of different queries a host computes at a time."""
    pieces: int | None = None
    """No layer takes more than this part of the buffer, an eighth for 8; None leaves cutting to the policy."""
    piece_cost: int = 0
    """Ticks of computing that every piece but the first adds to its layer."""
    whole: Sequence[Program] | None = None
    """The programs before layers were cut."""
    ahead: int = 0
    """How many more layers each lane of a host takes, which are computed when their turn comes."""
    apart: bool = False
    """Whether lanes that take layers ahead have memory of their own: a batch stays on the lane that it began on."""
    shares: Shares | None = None
    """Lanes that are shares of one device, which the policy chooses from; a stream has one batch on time in flight."""
    kept_mix: tuple[float, ...] | None = None
    """Queries per round that a trial found to pay, where the user asked for none; the streams need not end together."""

    @property
    def uncut(self) -> Sequence[Program]:
        """The models as they are: standalone times and the bound are theirs, whatever is cut."""
        return self.programs if self.whole is None else self.whole

    @property
    def quota(self) -> list[int] | None:
        """Queries of each stream where the mix is given: every one of them runs to its end."""
        return None if self.mix is None else [max(1, round(part * self.rounds)) for part in self.mix]

    @property
    def work(self) -> int:
        """Ticks of work the run will issue."""
        counts = self.quota or [self.rounds] * len(self.programs)
        return sum(count * program.total_work for count, program in zip(counts, self.programs, strict=True))

    def cut(self, pieces: int) -> Setting:
        """This setting with layers cut into pieces of at most this part of the buffer; 1 leaves them whole."""
        most = max(1, self.buffer // pieces)
        programs = tuple(program.cut(most, self.piece_cost) for program in self.uncut)
        return replace(self, programs=programs, pieces=pieces, whole=self.uncut)


@dataclass(frozen=True, slots=True)
class View:
    """All a policy may know at one instant: the channel is free, here is what could go next."""

    device: DeviceClocks
    heads: tuple[Candidate, ...]
    """The next layer of every stream, or of every batch in flight or ready."""
    candidates: tuple[Candidate, ...]
    """The heads that may go; at least one. The fairness rule holds streams back, lateness requests."""
    progress: tuple[int, ...] = ()
    """How far each stream is, in units of ``fairness.ROUND``; empty where there is no band."""
    lanes: tuple[LaneState, ...] = ()
    """What the lanes hold, where they are shares of a device (``Setting.shares``)."""
    events: tuple[Event, ...] = ()
    """What happened since the policy was last asked."""


class Start(NamedTuple):
    """Issue this candidate next, its fetch beginning no earlier than *not_before*."""

    candidate: Candidate
    not_before: int = 0
    lane: int = -1
    """On which lane, where the policy chooses (``Setting.shares``)."""
    more: bool = True
    """Whether to ask again at once; else when something has ended or a request has come."""
    to_end: bool = False
    """Whether the whole batch is started: it goes on to its end without a question, unless it is revoked."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a policy is made for and what it wants from the engine; the same in every run and with all options."""

    serves_requests: bool = True
    """Whether it can serve requests that come and go, or only streams that never run dry."""
    for_deadlines: bool = False
    """Whether it is made for requests with deadlines; in saturated streams, which have none, it has little to go by."""
    defers_late: bool = False
    """Whether a request that missed its deadline gives way to those that can still be on time."""
    late_work: LateWork = LateWork.LAST
    """Where requests that cannot be on time any more go, unless a rule for them is given."""
    foresight: int = 0
    """What ``Policy.foresight`` says, where that is no option."""
    batches: bool = True
    """Whether requests may share a batch."""
    refills: bool = False
    """Whether it fills batches up while they run: it is offered beginnings of every size, and batches of a stream
    that stand at the same layer become one."""
    by_layer: bool = True
    """Whether it is asked at every layer, or, on a device that computes one layer at a time, only at exits."""
    cuts: tuple[int, ...] = (1,)
    """Into how many pieces to the buffer it may have layers cut, fewest first, where that is left to it."""
    shares: bool = False
    """Whether it chooses lanes, and is for devices whose lanes are shares (``Setting.shares``)."""
    pointless_saturated: str = ""
    """What it comes to in saturated streams, where a comparison has nothing to learn from it; empty where it has."""


class LoopOptions(NamedTuple):
    """What compiled loops read of a policy's options; the defaults are for policies that have no such option."""

    stretch: int = 100
    """Percent of its time alone that the rest of a request lasts beside others."""
    failsafe: bool = True
    """Whether requests run by arrival where there is nothing to weave."""
    precise: bool = False
    """Whether the time that a request still needs is measured on an empty device, not added up from its layers."""
    miss: int = 0
    """Percent of the time of a request alone that a missed deadline costs."""
    backlog: int = 0
    """Requests yet to come that wait until all who are here are done."""


@dataclass(frozen=True)
class Policy:
    """Chooses the next layer. Further fields of a policy are the options a user may set.

    What it is made for stands in its ``traits``; what depends on the run and on its options, in its methods.
    """

    setting: Setting

    traits: ClassVar[Traits] = Traits()

    @property
    def foresight(self) -> int:
        """Percent of a request's remaining time that counts when it is judged late; 0: the deadline alone decides."""
        return self.traits.foresight

    @property
    def waits(self) -> int | None:
        """Percent of the time a request is allowed that its batch waits to be filled; None: as its stream says."""
        return None

    @property
    def loop_options(self) -> LoopOptions:
        """Its options as the compiled loops know them, which have its decisions beside ``decide``."""
        return LoopOptions()

    def contenders(self) -> Iterator[Policy]:
        """Who may decide in its place, where a trial before the run shows them to be better; itself first."""
        yield self

    def decide(self, view: View) -> Start | None:
        """Pick one of ``view.candidates``; None: nothing more until another event.

        Asked whenever something can be started. One that chooses lanes gives each only what it has room for.
        """
        raise TypeError(f"{type(self).__name__} does not say how to decide")

    def aborts(self, view: View, running: tuple[Running, ...]) -> Candidate | None:
        """Which of what runs to take back for what waits, if any; asked when nothing can be started.

        A layer that is ``stoppable`` is stopped and has to be done again. A batch that was started to its end is
        revoked: what it computes now ends, and then ``decide`` says how it goes on.
        """
        return None

    def burden(self, candidate: Candidate, now: int) -> float | None:
        """What a request takes for what it is worth, where that decides who gives way when not all can be on time:
        whoever takes the most. None where it does not."""
        return None

    @property
    def band(self) -> Band | None:
        """The mix the engine shall keep the streams at."""
        mix = self.setting.mix or self.setting.kept_mix
        return Band(mix, self.setting.max_lag) if mix else None

    @property
    def remark(self) -> str:
        """What a user should know about this run, such as a failsafe that took over."""
        return ""

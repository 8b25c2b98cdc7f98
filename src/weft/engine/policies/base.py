"""The interface of policies: the engine passes a ``View``, and the policy returns a ``Start``.

A policy is one decision: given a view, which candidate to issue next. It never sees the engine; a policy that needs to
know more gets another field of ``View``. To write one, derive from ``Policy`` and implement ``decide``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from weft.base.errors import InputError
from weft.devices.costs.program import Program
from weft.devices.decoupled import DeviceClocks
from weft.devices.shares import Shares
from weft.engine.policies.fairness import Band
from weft.workloads import DEFAULT_MAX_LAG

NO_DEADLINE = 1 << 62
"""The tick of a deadline that never comes; half of the largest int64, so kernels can still add to it."""
NO_BUFFER = 1 << 52
"""Weight buffer, in ticks, of a device without one, such as a host: so large that it never fills."""
UNBOUNDED_ROUNDS = 1 << 40
"""Rounds of a run that ends with its requests; far more than any run has."""


class LateWork(Enum):
    """The place of requests that can no longer be on time in the order of work."""

    AMONG_OTHERS = "among the others"
    LAST = "after all that can be on time"
    WOVEN = "where they make none of those late"


class Work(NamedTuple):
    """The work of a query, and the work that its stream has been given."""

    whole: int = 0
    """Estimated ticks of the whole query, alone on the device."""
    served: int = 0
    """Ticks of work issued for its stream; raised to the least of the others when an idle stream becomes busy."""


class Refill(NamedTuple):
    """Facet of a candidate for policies that refill batches (``Traits.refills``)."""

    dues: tuple[int, ...]
    """The deadline of each request of the batch."""
    waiting: int
    """Number of requests of the stream that no batch has taken, without those of this candidate."""


class ShareUse(NamedTuple):
    """Facet of a candidate where lanes are shares of one device (``Setting.shares``)."""

    lately: float
    """The share of the device's time that its stream was given recently."""
    behind: int
    """Latest finish time that still lets the requests behind it in its stream meet their deadlines."""


NO_WORK = Work()
"""The work of a candidate built without a ``Work``, as tests do."""


class Candidate(NamedTuple):
    """The next layer to issue of one query: of a saturated stream, or of a batch of requests. Times are in ticks.

    The members after ``size`` are facets: ``home``, ``refill`` and ``share`` are None where their feature is off.
    ``of_stream`` and ``of_batch`` run for every stream and batch at every step, so they pass members by position
    (keywords take twice as long), and ``of_batch`` builds the tuple directly, which saves another third.
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
    """Index of its program in ``Setting.programs``."""
    arrival: int = 0
    """Arrival of its oldest request; 0 in saturated streams."""
    deadline: int = NO_DEADLINE
    """The earliest deadline of its requests that can still be on time; NO_DEADLINE for a late batch."""
    remaining: int = 0
    """Estimated ticks to the end of the query, alone on the device."""
    priority: int = 1
    size: int = 1
    """Requests in the batch."""
    work: Work = NO_WORK
    home: int | None = None
    """The lane that its batch stays on (``Setting.apart``); None: any lane."""
    refill: Refill | None = None
    share: ShareUse | None = None

    @classmethod
    def of_stream(cls, program: Program, *, stream: int, query: int, layer: int, last_issued: int = -1) -> Candidate:
        """Build the candidate of a saturated stream, which has one program."""
        return cls(
            stream, query, layer, program.fetch[layer], program.compute[layer], last_issued, stream, 0, NO_DEADLINE,
            program.remaining[layer], 1, 1, Work(program.total_work),
        )  # fmt: skip

    def following(self, program: Program, last_issued: int = -1) -> Candidate:
        """Return the candidate of the same saturated stream after this one was issued, as number *last_issued*."""
        layer = (self.layer + 1) % len(program)
        query = self.query + (layer == 0)
        return self.of_stream(program, stream=self.stream, query=query, layer=layer, last_issued=last_issued)

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
        """Build the candidate of a batch of requests that is in flight or could begin.

        rests: estimated ticks from each layer of *program* to its end. number: index of *program* in the setting.
        """
        return tuple.__new__(cls, (
            stream, query, layer, program.fetch[layer], program.compute[layer], last_issued, number, arrival, deadline,
            rests[layer], priority, size, tuple.__new__(Work, (rests[0], served)), home, refill, share,
        ))  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        """Forward members that moved to facets in 0.3, for policies written for 0.2; to be removed in 0.4."""
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
"""Name of a member of 0.2 -> the facet that holds it now, and its value if that facet is off."""


class Running(NamedTuple):
    """A layer that is being computed."""

    candidate: Candidate
    rest: int
    """Estimated ticks to its end."""
    stoppable: bool = True
    """Whether the layer can be stopped, losing its progress. If not, it runs beside a layer that can be stopped."""


class LaneState(NamedTuple):
    """The segments on a lane, where a policy chooses lanes."""

    holds: tuple[Candidate, ...]
    """The running segment and the segments that wait behind it, in order."""
    rest: int
    """Estimated ticks until all segments have ended, if each had its speed alone on the device."""
    room: bool
    """Whether the lane takes one more segment."""


IDLE_LANE = LaneState(holds=(), rest=0, room=True)
"""The state of every idle lane; one object, since most lanes are idle at most decisions."""


class EventKind(Enum):
    """Kinds of events after which the engine asks the policy again."""

    ARRIVAL = "a request came"
    SEGMENT_END = "a segment of a batch ended"
    BATCH_END = "a batch ended, was given up, or became part of another"
    DEADLINE = "a request will miss its deadline, or has missed it"
    REVOKED = "work that had been started was taken back"


class Event(NamedTuple):
    """An event since the policy was last asked."""

    kind: EventKind
    stream: int
    query: int = -1
    """The query number of the batch; -1 for a waiting request."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The models and the device of a run, and the user's settings; constant during the run."""

    programs: Sequence[Program]
    """One program for each saturated stream, or one for each batch size of each model. A server appends programs as
    models are loaded."""
    buffer: int
    """Weight buffer in ticks."""
    rounds: int = 1
    """Rounds of work that the run issues."""
    mix: tuple[float, ...] | None = None
    """Queries of each stream per round, as the user asked; None leaves the mix to the policy."""
    max_lag: float = DEFAULT_MAX_LAG
    """Rounds that a stream may fall behind the mix, if there is one."""
    lanes: int = 1
    """Layers of different queries that a host computes at a time."""
    pieces: int | None = None
    """Layers are cut so that none takes more than 1 / pieces of the buffer; None leaves cutting to the policy."""
    piece_cost: int = 0
    """Ticks of compute that every piece but the first adds to its layer."""
    whole: Sequence[Program] | None = None
    """The programs before layers were cut."""
    ahead: int = 0
    """Layers that each lane of a host takes besides the running one."""
    apart: bool = False
    """Whether lanes that take layers ahead have memory of their own: a batch stays on the lane that it began on."""
    shares: Shares | None = None
    """Lanes that are shares of one device, from which the policy chooses; None on all other devices. A stream then has
    at most one batch on time in flight."""
    kept_mix: tuple[float, ...] | None = None
    """Queries of each stream per round as a trial selected them, where the user asked for no mix."""

    @property
    def uncut(self) -> Sequence[Program]:
        """The programs with whole layers; standalone times and the bound refer to these."""
        return self.programs if self.whole is None else self.whole

    @property
    def quota(self) -> list[int] | None:
        """Queries of each stream in the run, if the user gave a mix; each of them runs to its end."""
        return None if self.mix is None else [max(1, round(part * self.rounds)) for part in self.mix]

    @property
    def work(self) -> int:
        """Ticks of work that the run issues."""
        counts = self.quota or [self.rounds] * len(self.programs)
        return sum(count * program.total_work for count, program in zip(counts, self.programs, strict=True))

    def cut(self, pieces: int) -> Setting:
        """Return this setting with layers cut into pieces of at most 1 / *pieces* of the buffer."""
        most = max(1, self.buffer // pieces)
        programs = tuple(program.cut(most, self.piece_cost) for program in self.uncut)
        return replace(self, programs=programs, pieces=pieces, whole=self.uncut)


@dataclass(slots=True)
class View:
    """All that a policy knows at an instant at which a layer can be issued.

    Policies must not change it; it is not frozen because it is built at every step, and that would take twice as long.
    """

    device: DeviceClocks
    heads: tuple[Candidate, ...]
    """The next layer of every stream, or of every batch in flight or ready."""
    candidates: tuple[Candidate, ...]
    """The heads that may be issued, at least one: streams too far ahead in the band are left out, and so are late
    requests where they have to wait."""
    progress: tuple[int, ...] = ()
    """Progress of each stream, in units of ``fairness.ROUND``; empty without a band."""
    lanes: tuple[LaneState, ...] = ()
    """The state of every lane, where lanes are shares of a device (``Setting.shares``)."""
    events: tuple[Event, ...] = ()
    """Events since the policy was last asked."""


class Start(NamedTuple):
    """A policy's answer: issue this candidate next, its fetch beginning no earlier than *not_before*."""

    candidate: Candidate
    not_before: int = 0
    lane: int = -1
    """The lane, where the policy chooses lanes (``Setting.shares``); -1 elsewhere."""
    more: bool = True
    """Whether to ask the policy again at once; if not, it is asked after the next event."""
    layers: int | None = None
    """Layers that the start covers, set by the engine where the device has gates (``Program.gated``); the candidate's
    ``compute`` is their sum then. None: one layer."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The constant properties of a policy: its purpose, and its requirements on the engine."""

    serves_requests: bool = True
    """Whether it can serve requests; if not, only saturated streams."""
    for_deadlines: bool = False
    """Whether it orders work by deadlines; saturated streams have none."""
    defers_late: bool = False
    """Whether a request that missed its deadline gives way to those that can still be on time."""
    late_work: LateWork = LateWork.LAST
    """The place of requests that can no longer be on time, unless the user gives a rule for them."""
    foresight: int = 0
    """The value of ``Policy.foresight``, if that is no option of the policy."""
    batches: bool = True
    """Whether requests may share a batch."""
    refills: bool = False
    """Whether it refills batches while they run: it is offered beginnings of every size, and batches of a stream at the
    same layer are merged."""
    by_layer: bool = True
    """Whether it is asked at every layer; if not, a device that computes one layer at a time asks only at exits."""
    by_events: bool = True
    """Whether it is asked on events only where the device has gates: a start then covers a batch up to its next exit,
    until it is revoked. If not, every start is one layer there as well."""
    cuts: tuple[int, ...] = (1,)
    """The values of ``Setting.pieces`` that it tries where the user gives none, fewest pieces first."""
    shares: bool = False
    """Whether it chooses lanes; it then needs a device whose lanes are shares (``Setting.shares``)."""
    pointless_saturated: str = ""
    """Why a comparison with saturated streams leaves the policy out; empty if it takes part."""


class LoopOptions(NamedTuple):
    """The options of a policy that the compiled loops read; the defaults are for policies without such an option."""

    stretch: int = 100
    """Expected remaining time of a request beside others, in percent of its remaining time alone."""
    failsafe: bool = True
    """Whether requests run by arrival while all models are compute-bound, or all memory-bound."""
    precise: bool = False
    """Whether the remaining time of a request is replayed on an empty device, not summed from its layers."""
    miss: int = 0
    """Cost of a missed deadline, in percent of the time of a request alone."""
    margin: int = 0
    """Percent added to estimated remaining times."""
    backlog: int = 0
    """Future requests that are assumed to wait until all present ones have ended."""


class OptionRange(NamedTuple):
    """The values that an option may have, both ends included."""

    low: int
    high: int
    unit: str = ""
    """What the values count, for the message about a value outside."""


@dataclass(frozen=True)
class Policy:
    """Base class of policies. ``decide`` chooses the next layer; further fields are the options that a user may set.

    ``traits`` are the same in every run; properties that depend on the run or on options are methods.
    """

    setting: Setting

    traits: ClassVar[Traits] = Traits()
    ranges: ClassVar[Mapping[str, OptionRange]] = {}
    """Option -> the values that it may have."""

    def __post_init__(self) -> None:
        for name, (low, high, unit) in self.ranges.items():
            if not low <= getattr(self, name) <= high:
                raise InputError(f"{name} = {getattr(self, name)} must be from {low} to {high} {unit}".rstrip())

    @property
    def foresight(self) -> int:
        """When a request counts as late: if less than this percentage of its remaining time is left to its deadline.

        0: only after the deadline.
        """
        return self.traits.foresight

    @property
    def waits(self) -> int | None:
        """How long a batch waits to be filled, in percent of the time from arrival to deadline.

        None: the timeout of the stream.
        """
        return None

    @property
    def loop_options(self) -> LoopOptions:
        """The options that the compiled twin of ``decide`` reads."""
        names = {option.name for option in fields(self)} & {*LoopOptions._fields}
        return LoopOptions(**{name: getattr(self, name) for name in names})

    def contenders(self) -> Iterator[Policy]:
        """Yield the policies that a trial before the run compares, this policy first; the best one runs."""
        yield self

    def decide(self, view: View) -> Start | None:
        """Choose one of ``view.candidates``; None: start nothing until the next event.

        Called whenever a layer can be started. A policy that chooses lanes only chooses lanes with room.
        """
        raise TypeError(f"{type(self).__name__} does not say how to decide")

    def aborts(self, view: View, running: tuple[Running, ...]) -> Candidate | None:
        """Choose a running layer to stop for waiting work, or None; called when no layer can be started.

        The layer has to run again. Batches that can leave at gates are not among *running*: ``decide`` revokes them.
        """
        return None

    def burden(self, candidate: Candidate, now: int) -> float | None:
        """Return the cost of a request over its worth; if not all can be on time, the request with the highest yields.

        None if the policy has no such order.
        """
        return None

    @property
    def band(self) -> Band | None:
        """The fairness rule: the mix at which the engine keeps the streams; None: no fairness rule."""
        mix = self.setting.mix or self.setting.kept_mix
        return Band(mix, self.setting.max_lag) if mix else None

    @property
    def remark(self) -> str:
        """A sentence for the user about this run, such as that a failsafe took over; empty if there is none."""
        return ""

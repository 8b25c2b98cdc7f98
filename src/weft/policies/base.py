"""What a policy may know and what it may say.

A policy is one decision: given a view, which stream's next layer to issue. It never sees the engine,
and what it may know grows by fields of ``View``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weft.devices.decoupled import NpuState
from weft.policies.fairness import Band
from weft.program import Program
from weft.workloads.saturated import DEFAULT_MAX_LAG


class Candidate(NamedTuple):
    """The next unissued layer of one stream."""

    stream: int
    query: int
    layer: int
    """0 where the stream stands between two queries."""
    fetch: int
    compute: int
    last_issued: int
    """Step at which this stream was last chosen; -1 for never."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What stays the same during a run."""

    programs: tuple[Program, ...]
    buffer: int
    """Weight buffer in ticks."""
    rounds: int = 1
    """How many rounds of work the run will issue."""
    mix: tuple[float, ...] | None = None
    """Queries per round the user asked for; None leaves it to the policy."""
    max_lag: float = DEFAULT_MAX_LAG
    """Rounds a stream may fall behind, where there is a mix to fall behind of."""


@dataclass(frozen=True, slots=True)
class View:
    """All a policy may know at one instant: the channel is free, here is what could go next."""

    device: NpuState
    heads: tuple[Candidate, ...]
    """The next layer of every stream."""
    candidates: tuple[Candidate, ...]
    """Those of the heads that may go; at least one. The fairness rule holds the others back."""
    progress: tuple[int, ...] = ()
    """How far each stream is, in units of ``fairness.ROUND``; empty where there is no band."""


class Start(NamedTuple):
    """Issue this candidate next, its fetch beginning no earlier than *not_before*."""

    candidate: Candidate
    not_before: int = 0


@dataclass(frozen=True)
class Policy:
    """Chooses the next layer. Further fields of a policy are the options a user may set."""

    setting: Setting

    def decide(self, view: View) -> Start:
        """Pick one of ``view.candidates``."""
        raise TypeError(f"{type(self).__name__} does not say how to decide")

    @property
    def band(self) -> Band | None:
        """The mix the engine shall keep the streams at."""
        return Band(self.setting.mix, self.setting.max_lag) if self.setting.mix else None

    @property
    def remark(self) -> str:
        """What a user should know about this run, such as a failsafe that took over."""
        return ""

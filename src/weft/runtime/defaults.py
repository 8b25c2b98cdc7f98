"""What most backends answer: base classes with the members that a simple one has no use for.

A backend need not inherit from them, but does well to: what the protocol (``weft.runtime.backend``) gains later gets
its default here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

from weft.base.errors import BadRequest
from weft.devices.host import GpuCuts
from weft.devices.measured import times_at
from weft.devices.shares import GpuLikeness
from weft.runtime.backend import StepOutput
from weft.runtime.breaker import Breaker
from weft.runtime.exits import ExitSpec, Kind
from weft.runtime.isolated.limits import WorkerCounts
from weft.runtime.lent import Lender
from weft.runtime.stitched import TaskSpec

_NONE: Mapping[str, int] = MappingProxyType({})


class BackendDefaults:
    """A backend whose lanes are threads of this process, on the cores."""

    inline = False
    memory_bytes: int | None = None
    device: str | None = None
    labels: tuple[str, ...] = ()
    isolates = False
    grain_s: float | None = None
    region_devices: frozenset[int] = frozenset()

    @property
    def scratch_bytes(self) -> int:
        return 0

    @property
    def used_bytes(self) -> Mapping[str, int]:
        return _NONE

    @property
    def returns(self) -> Mapping[str, int]:
        return _NONE

    def counts(self) -> WorkerCounts:
        return WorkerCounts(0, 0)

    def write_region(self, lender: Lender, offset: int, data: memoryview) -> None:
        raise BadRequest("models run on processors here, which have no memory of their own")


class LaneDefaults:
    """A lane that takes nothing ahead and leaves what it computes where all lanes have it."""

    ahead, apart, able = 0, False, True

    def give_way(self) -> None:
        """It is as urgent as any other."""


class StepDefaults:
    """A step that was started, and from which nothing can go on before it has ended."""

    onward: Sequence[StepOutput] | None = None
    error: Exception | None = None

    def stop(self) -> None:
        """It runs to its end."""


class ModelDefaults:
    """A model without exits or tasks, which stays where it was loaded and is computed as it is asked for."""

    segments: tuple[str, ...]
    steady: tuple[bool, ...]
    times_s: Mapping[int, tuple[float, ...]]

    warm_shapes: Mapping[str, tuple[int, ...]] | None = None
    like: Mapping[int, GpuLikeness] = MappingProxyType({})
    batchable = False
    max_batch = 1
    any_shapes = False
    any_lengths = False
    exits: tuple[ExitSpec, ...] = ()
    confidence: Kind = "logits"
    mergeable = False
    tasks: tuple[TaskSpec, ...] = ()
    memory_bytes = 0
    moving_bytes = 0
    remarks: tuple[str, ...] = ()
    borrows = False
    learned = True
    cuts: GpuCuts | None = None
    breaker: Breaker | None = None
    away_s: float = 0.0
    return_s: float = 0.0

    @cached_property  # it is read for every segment that runs
    def foreseen(self) -> Sequence[bool]:
        return self.steady

    def times_at(self, batch: int) -> tuple[float, ...]:
        """Seconds of each segment at a batch size, straight between the measured ones."""
        return times_at(self.times_s, len(self.segments), batch)

    def prepare(self, rows: int) -> None:
        """Nothing has to be there before the first batch of a size."""

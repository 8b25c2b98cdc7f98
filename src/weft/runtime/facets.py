"""Parts of a loaded model: its measured times, how it is batched, and facets for features that few models have.

``SegmentTiming`` and ``Batching`` belong to every model. A facet is None where its feature is off, so that only code of
that feature reads it: ``ModelExits`` (early exits), ``ModelShares`` (parts of a GPU), ``ModelTasks`` (stitched models)
and ``ModelResidency`` (memory of a device). All are frozen values; what changes while a model is served is a property
that a subclass overrides (``ModelResidency.away_s``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from weft.devices.host import Gates, GpuCuts, times_at
from weft.devices.shares import GpuLikeness
from weft.runtime.exits import ExitSpec, Kind
from weft.runtime.stitched import TaskSpec

SegmentTimes = tuple[float, ...]
"""Seconds of each segment."""


@dataclass(frozen=True)
class SegmentTiming:
    """Times of a model's segments, measured when it was loaded."""

    steady: tuple[bool, ...]
    """Whether each segment takes the same time for all values of its inputs: it may run on the event loop."""
    times_s: Mapping[int, SegmentTimes] = field(default_factory=dict)
    """Rows of a batch -> seconds of each segment, as measured."""
    warm_shapes: Mapping[str, tuple[int, ...]] | None = None
    """The shapes of the inputs, at batch 1, that it was measured with; None if it was not measured."""
    learned: bool = True
    """Whether it was cut, measured and warmed up as far as possible; False: it is served whole, as it was opened."""
    engine: Literal["onnxruntime", "torch", "compiled"] = "onnxruntime"
    """What ran when the times were measured: "torch" for files that torch runs step by step."""
    engines_s: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Engine -> rows of a batch -> seconds of the whole model, if several engines were timed."""
    gated: bool = False
    """Whether a step may cover several segments: between them are gates, at which the device ends the step when it is
    stopped. Without gates the host starts every segment."""
    gates: Gates | None = None
    """What its gates cost; ``times_s`` contain it. None: it was not measured."""
    foreseen: tuple[bool, ...] = ()
    """Whether the expected time of each segment can be relied on; ``steady`` by default. They differ where segments run
    in a worker process: none may run on the event loop, yet their times are known."""

    def __post_init__(self) -> None:
        if not self.foreseen:
            object.__setattr__(self, "foreseen", self.steady)

    @cached_property
    def _interpolation_cache(self) -> dict[int, SegmentTimes]:
        return dict(self.times_s)

    def times_at(self, batch: int) -> SegmentTimes:
        """Seconds of each segment, interpolated between the measured batch sizes; zeros if nothing was measured."""
        times_s = self._interpolation_cache.get(batch)
        if times_s is None:
            times_s = times_at(self.times_s, len(self.steady), batch)
            # Clients may send batches of any size: only a bounded number of them is cached.
            if batch <= max(self.times_s, default=0):
                self._interpolation_cache[batch] = times_s
        return times_s


@dataclass(frozen=True, slots=True)
class Batching:
    """Whether samples of a model are computed together, and up to which batch size."""

    batchable: bool = False
    max_batch: int = 1
    """Most rows of a batch."""
    any_shapes: bool = False
    """Whether samples of other shapes than the measured shapes may be batched, too."""
    mergeable: bool = False
    """Whether rows can leave a batch, and batches be joined, at every cut."""


@dataclass(frozen=True, slots=True)
class ModelExits:
    """Early exits of a model."""

    specs: tuple[ExitSpec, ...]
    """The exits from shallow to deep, the end last; at least two."""
    confidence: Kind = "logits"
    """What the exits return."""


@dataclass(frozen=True, slots=True)
class ModelShares:
    """A model on parts of a GPU, where the options asked for ``shares``."""

    like: Mapping[int, GpuLikeness]
    """Rows of a batch -> how it runs on shares of the device and beside others, for the measured batch sizes."""
    cuts: GpuCuts
    """How the device can be cut."""


@dataclass(frozen=True, slots=True)
class ModelTasks:
    """The models that were stitched into one."""

    specs: tuple[TaskSpec, ...]
    any_lengths: bool = False
    """Whether rows of different lengths are computed together without padding."""


@dataclass(frozen=True)
class ModelResidency:
    """Memory of its device that a model holds, and whether it may be evicted from it."""

    memory_bytes: int = 0
    """Memory that it always holds."""
    moving_bytes: int = 0
    """Additional memory while it is computed; other models may use it otherwise."""
    return_s: float = 0.0
    """Seconds to bring the model back after an eviction; 0: it is never evicted."""

    @property
    def away_s(self) -> float:
        """Seconds to bring the model back if it is evicted now; 0: it is in memory."""
        return 0.0

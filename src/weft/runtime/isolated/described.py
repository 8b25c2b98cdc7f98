"""What a worker tells of a model it has opened, and of what went wrong: checked, for a model may lie."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from weft.base.errors import BadRequest, ModelError, NotLearned, UnfitInputs
from weft.devices.host import GpuCuts
from weft.devices.shares import GpuLikeness
from weft.runtime.backend import LoadedModel
from weft.runtime.exits import ExitSpec, Kind
from weft.runtime.stitched import TaskSpec
from weft.runtime.tensors import DATATYPES, TensorSpec

LARGEST_BATCH = 1 << 16
LONGEST_TEXT = 2000
KINDS = {kind.__name__: kind for kind in (BadRequest, ModelError, NotLearned, UnfitInputs, MemoryError, ValueError)}
"""Errors that are the same on both sides; all others are a RuntimeError here."""

Problem = tuple[str, str]


class ModelDescription(BaseModel):
    """A model in a worker, as the server knows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    segments: Annotated[tuple[str, ...], Field(min_length=1)]
    steady: tuple[bool, ...]
    warm_shapes: dict[str, tuple[int, ...]] | None
    times_s: dict[int, tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...]]
    batchable: bool
    any_shapes: bool
    max_batch: Annotated[int, Field(ge=1, le=LARGEST_BATCH)]
    exits: tuple[ExitSpec, ...]
    confidence: Kind
    mergeable: bool
    tasks: tuple[TaskSpec, ...]
    memory_bytes: Annotated[int, Field(ge=0, lt=2**60)]
    remarks: tuple[str, ...]
    borrows: bool
    learned: bool
    moving_bytes: Annotated[int, Field(ge=0, lt=2**60)] = 0
    """What leaves the device with it, beside what it holds."""
    like: Annotated[dict[int, GpuLikeness], Field(max_length=LARGEST_BATCH)] = {}
    cuts: GpuCuts | None = None
    """How its device can be shared, where that was asked for."""
    any_lengths: bool = False
    return_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if {spec.datatype for spec in (*self.inputs, *self.outputs)} - DATATYPES.keys():
            raise ValueError("a tensor of no known type")
        if any(len(times) != len(self.segments) for times in self.times_s.values()) or min(self.times_s, default=1) < 1:
            raise ValueError("times of other segments")
        if len(self.steady) != len(self.segments):
            raise ValueError("other segments are steady than there are")
        if any(not 0 <= each.segment < len(self.segments) for each in self.exits):
            raise ValueError("an exit behind its segments")
        if self.warm_shapes is not None and self.warm_shapes.keys() != {spec.name for spec in self.inputs}:
            raise ValueError("shapes of other inputs")
        return self


def description(model: LoadedModel) -> ModelDescription:
    """What is to be told of a model."""
    return ModelDescription.model_validate({name: getattr(model, name) for name in ModelDescription.model_fields})


def told(error: BaseException) -> Problem:
    """An error as it travels."""
    return type(error).__name__, str(error)[:LONGEST_TEXT]


def heard(problem: Any) -> Exception:
    """What a problem is here."""
    kind, text = problem
    said = "".join(each if each.isprintable() else " " for each in str(text)[:LONGEST_TEXT])
    known = KINDS.get(kind)
    return known(said) if known else RuntimeError(f"{kind}: {said}")

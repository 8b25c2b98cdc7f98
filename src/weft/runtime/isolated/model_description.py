"""The description of a model that a worker sends to the server, and errors. Checked: a hostile model may forge it."""

from __future__ import annotations

from itertools import chain
from math import inf
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from weft.base.errors import BadRequest, ModelError, NotLearned, UnfitInputs
from weft.runtime.backend import LoadedModel
from weft.runtime.facets import Batching, ModelExits, ModelResidency, ModelShares, ModelTasks, SegmentTiming
from weft.runtime.tensors import DATATYPES, TensorSpec

LARGEST_BATCH, LARGEST_BYTES = 1 << 16, 1 << 60
"""Larger numbers are refused: no real model has them, and computing with them would overflow."""
LONGEST_TEXT = 2000
"""Characters of an error's text that are sent and logged; a worker must not fill the server's memory or logs."""
KINDS = {kind.__name__: kind for kind in (BadRequest, ModelError, NotLearned, UnfitInputs, MemoryError, ValueError)}
"""Names of the exceptions that the server raises as the worker did; all others become a RuntimeError."""

Problem = tuple[str, str]
"""An error as it is sent: the name of its class and its text."""


class ModelDescription(BaseModel):
    """A model in a worker, as the server knows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    segments: Annotated[tuple[str, ...], Field(min_length=1)]
    timing: SegmentTiming
    batching: Batching
    remarks: tuple[str, ...]
    borrows: bool
    exits: ModelExits | None = None
    shares: ModelShares | None = None
    tasks: ModelTasks | None = None
    residency: ModelResidency = ModelResidency()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Refuse a description whose parts do not fit together."""
        timing, exits = self.timing, self.exits.specs if self.exits else ()
        if {spec.datatype for spec in (*self.inputs, *self.outputs)} - DATATYPES.keys():
            raise ValueError("a tensor of no known type")
        if any(len(times) != len(self.segments) for times in timing.times_s.values()):
            raise ValueError("times that are not one for each segment")
        if any(len(flags) != len(self.segments) for flags in (timing.steady, timing.foreseen)):
            raise ValueError("flags that are not one for each segment")
        if self.exits and not exits:
            raise ValueError("exits of which there is none")
        if any(not 0 <= spec.segment < len(self.segments) for spec in exits):
            raise ValueError("an exit after the last segment")
        if timing.warm_shapes is not None and timing.warm_shapes.keys() != {spec.name for spec in self.inputs}:
            raise ValueError("shapes that are not one for each input")
        return self

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        """Refuse numbers that no model can have."""
        like, residency = self.shares.like if self.shares else {}, self.residency
        sizes = (self.batching.max_batch, *self.timing.times_s, *like)
        engine_times = [times_s.values() for times_s in self.timing.engines_s.values()]
        seconds = (residency.return_s, *chain.from_iterable((*self.timing.times_s.values(), *engine_times)))
        if not all(1 <= size <= LARGEST_BATCH for size in sizes):
            raise ValueError(f"batch sizes must be 1 to {LARGEST_BATCH}")
        if not all(0 <= duration_s < inf for duration_s in seconds):
            raise ValueError("durations must be 0 s or more, and finite")
        if not all(0 <= size < LARGEST_BYTES for size in (residency.memory_bytes, residency.moving_bytes)):
            raise ValueError(f"memory sizes must be 0 bytes or more, and less than {LARGEST_BYTES}")
        return self


def description(model: LoadedModel) -> ModelDescription:
    """The description of a model that a worker reports to its server."""
    members = {name: getattr(model, name) for name in ModelDescription.model_fields}
    return ModelDescription.model_validate({name: member for name, member in members.items() if member is not None})


def encode_error(error: BaseException) -> Problem:
    """Encode an error to send it to the server."""
    return type(error).__name__, str(error)[:LONGEST_TEXT]


def decode_error(problem: Any) -> Exception:
    """The exception of an encoded error; RuntimeError for classes that are not in ``KINDS``."""
    kind, text = problem
    message = "".join(character if character.isprintable() else " " for character in str(text)[:LONGEST_TEXT])
    error_class = KINDS.get(kind)
    return error_class(message) if error_class else RuntimeError(f"{kind}: {message}")

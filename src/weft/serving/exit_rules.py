"""Requests that leave a model at its exits: how sure an answer must be, and what becomes of each row.

A request leaves when all its rows are sure, or at the end; each row's answer is that of the first exit at which it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import ModelError, WorkloadError
from weft.base.files import refuse_special_file
from weft.engine.steering import ExitShares, Steered, Steering
from weft.runtime.exits import ExitSpec, confidence
from weft.runtime.facets import ModelExits
from weft.runtime.stitched import TaskSpec
from weft.runtime.tensors import Array, TensorSpec
from weft.serving.config import ModelConfig
from weft.workloads.exits import ExitRecord, miscounted, read_record

EXIT, CONFIDENCE, THRESHOLD = "weft_exit", "weft_confidence", "weft_exit_threshold"
"""Two outputs, the number of the exit each row took and how sure it was there, and a parameter."""

Floats = npt.NDArray[np.float32]


class Reached(NamedTuple):
    """What a batch came to at an exit."""

    number: int
    """Which exit it is, from 1; the last is the end."""
    answers: Array
    sure: Floats


class ExitRules:
    """The exits of one loaded model, or of one of the models of a body."""

    def __init__(
        self, exits: ModelExits, steering: Steering, record: ExitRecord | None = None, *, at_end: bool = False
    ) -> None:
        """at_end: all requests go to the end, and their answers are chosen there, as those of a body's models are."""
        self.names = tuple(spec.output for spec in exits.specs)
        self.steered, self.record = Steered(steering), record
        count = len(self.names)
        self.shares = ExitShares(record.rates(steering.top) if record else [1 / count] * count)
        self._kind = exits.confidence
        self._by_segment = {spec.segment: number for number, spec in enumerate(exits.specs, start=1)}
        self.layers = () if at_end else tuple(spec.segment + 1 for spec in exits.specs[:-1])
        """After how many segments requests may leave, the end not among them."""

    def reached(self, segment: int, told: Mapping[str, Array]) -> Reached | None:
        """What the segment's exit says, if it ends with one."""
        number = self._by_segment.get(segment)
        if number is None:
            return None
        answers = told[self.names[number - 1]]
        return Reached(number, answers, confidence(answers, self._kind))

    def chosen(self, told: Mapping[str, Array], threshold: float) -> dict[str, Array]:
        """The outputs of a request that went to the end, from what all exits gave."""
        rows = RequestRows(len(told[self.names[-1]]))
        for number, name in enumerate(self.names, start=1):
            at = Reached(number, told[name], confidence(told[name], self._kind))
            rows.reach(at, threshold, end=number == len(self.names))
        return rows.answered(self)

    def answer(self, answers: Array, exits: Array, sure: Floats) -> dict[str, Array]:
        """The outputs of a request."""
        return {self.names[-1]: answers, EXIT: exits, CONFIDENCE: sure}

    @property
    def threshold(self) -> float:
        """How sure answers to requests that state no threshold must be now."""
        return self.steered.threshold

    @property
    def accuracy(self) -> float | None:
        """Share of right answers at that threshold, where a record tells."""
        return self.record.accuracy(self.threshold) if self.record else None


class RequestRows:
    """The rows of one request, some of which may have their answer while others go on."""

    __slots__ = ("_answers", "_exits", "_sure")

    def __init__(self, rows: int) -> None:
        self._exits = np.zeros(rows, np.int64)
        self._sure = np.zeros(rows, np.float32)
        self._answers: Array | None = None

    def reach(self, at: Reached, threshold: float, *, end: bool) -> bool:
        """See which rows have their answer here; whether all have one now."""
        new = (self._exits == 0) & ((at.sure >= threshold) | end)
        if self._answers is None:
            self._answers = at.answers.copy()
        self._answers[new], self._sure[new], self._exits[new] = at.answers[new], at.sure[new], at.number
        return bool(self._exits.all())

    def answered(self, leaving: ExitRules) -> dict[str, Array]:
        assert self._answers is not None
        return leaving.answer(self._answers, self._exits, self._sure)


def leaving_at(task: TaskSpec, config: ModelConfig) -> ExitRules | None:
    """The exits of one of the models of a body, as its settings say; None where it has none."""
    if not task.exits:
        return None
    exits = tuple(ExitSpec(output=name, segment=0) for name in task.exits)
    return ExitRules(ModelExits(exits, config.exit_confidence), Steering(config.exit_threshold), at_end=True)


def outputs_of(outputs: tuple[TensorSpec, ...], end: str | None) -> tuple[TensorSpec, ...]:
    """What clients of a model may ask for; *end* is the last of its exits."""
    if end is None:
        return outputs
    found = tuple(spec for spec in outputs if spec.name == end)
    return (*found, TensorSpec(EXIT, "INT64", (-1,)), TensorSpec(CONFIDENCE, "FP32", (-1,)))


def record_beside(model: Path, name: str, exits: int) -> ExitRecord:
    """The record of a model's exits, which lies beside it."""
    path = model.parent / name
    try:
        refuse_special_file(path, WorkloadError)
        record = read_record(path)
    except WorkloadError as error:
        raise ModelError(str(error).replace(str(path), name)) from error
    if record.exits != exits:
        raise ModelError(miscounted(f"exit_record = {name!r}", record.exits, exits - 1))
    return record

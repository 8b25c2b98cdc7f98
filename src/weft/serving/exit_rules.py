"""Early exits of requests: the confidence they need, and the answer of each row.

A request leaves when the confidence of all its rows reaches the threshold, or at the end. The answer of a row is that
of the first exit at which its confidence did.
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
"""Two outputs, the number of the exit that each row took and its confidence there, and a request parameter."""

Floats = npt.NDArray[np.float32]


class Reached(NamedTuple):
    """The outputs of a batch at an exit."""

    number: int
    """Which exit it is, from 1; the last is the end."""
    answers: Array
    sure: Floats


class ExitRules:
    """The exits of one loaded model, or of one of the models of a body."""

    def __init__(
        self, exits: ModelExits, steering: Steering, record: ExitRecord | None = None, *, at_end: bool = False
    ) -> None:
        """at_end: all requests run to the end, and each row's exit is chosen there, as for the models of a body."""
        self.names = tuple(spec.output for spec in exits.specs)
        self.steered, self.record = Steered(steering), record
        count = len(self.names)
        self.shares = ExitShares(record.rates(steering.top) if record else [1 / count] * count)
        self._kind = exits.confidence
        self._by_segment = {spec.segment: number for number, spec in enumerate(exits.specs, start=1)}
        self.layers = () if at_end else tuple(spec.segment + 1 for spec in exits.specs[:-1])
        """Numbers of segments after which requests may leave, without the end."""

    def reached(self, segment: int, outputs: Mapping[str, Array]) -> Reached | None:
        """Return the outputs at the exit that a segment ends with, None if it ends with none."""
        number = self._by_segment.get(segment)
        if number is None:
            return None
        answers = outputs[self.names[number - 1]]
        return Reached(number, answers, confidence(answers, self._kind))

    def chosen(self, outputs: Mapping[str, Array], threshold: float) -> dict[str, Array]:
        """Choose each row's exit for a request that ran to the end, from the outputs of all exits."""
        rows = RequestRows(len(outputs[self.names[-1]]))
        for number, name in enumerate(self.names, start=1):
            at = Reached(number, outputs[name], confidence(outputs[name], self._kind))
            rows.reach(at, threshold, end=number == len(self.names))
        return rows.answered(self)

    def answer(self, answers: Array, exits: Array, sure: Floats) -> dict[str, Array]:
        """Build the outputs of a request: answers, exit numbers and confidences."""
        return {self.names[-1]: answers, EXIT: exits, CONFIDENCE: sure}

    @property
    def threshold(self) -> float:
        """The current threshold for requests that state none."""
        return self.steered.threshold

    @property
    def accuracy(self) -> float | None:
        """Share of right answers at that threshold according to the exit record; None without a record."""
        return self.record.accuracy(self.threshold) if self.record else None


class RequestRows:
    """The rows of one request: some may have left at an exit while others continue."""

    __slots__ = ("_answers", "_exits", "_sure")

    def __init__(self, rows: int) -> None:
        self._exits = np.zeros(rows, np.int64)
        self._sure = np.zeros(rows, np.float32)
        self._answers: Array | None = None

    def reach(self, at: Reached, threshold: float, *, end: bool) -> bool:
        """Record the rows that leave here; return whether all rows have left."""
        new = (self._exits == 0) & ((at.sure >= threshold) | end)
        if self._answers is None:
            self._answers = at.answers.copy()
        self._answers[new], self._sure[new], self._exits[new] = at.answers[new], at.sure[new], at.number
        return bool(self._exits.all())

    def answered(self, leaving: ExitRules) -> dict[str, Array]:
        assert self._answers is not None
        return leaving.answer(self._answers, self._exits, self._sure)


def leaving_at(task: TaskSpec, config: ModelConfig) -> ExitRules | None:
    """Return the exit rules of one of the models of a body; None if it has no exits."""
    if not task.exits:
        return None
    exits = tuple(ExitSpec(output=name, segment=0) for name in task.exits)
    return ExitRules(ModelExits(exits, config.exit_confidence), Steering(config.exit_threshold), at_end=True)


def outputs_of(outputs: tuple[TensorSpec, ...], end: str | None) -> tuple[TensorSpec, ...]:
    """Return the outputs that clients may request; *end* is the last of the model's exits, None without exits."""
    if end is None:
        return outputs
    answers = tuple(spec for spec in outputs if spec.name == end)
    return (*answers, TensorSpec(EXIT, "INT64", (-1,)), TensorSpec(CONFIDENCE, "FP32", (-1,)))


def record_beside(model: Path, name: str, exits: int) -> ExitRecord:
    """Read the exit record, a file in the model's folder; ModelError if it does not fit the model."""
    path = model.parent / name
    try:
        refuse_special_file(path, WorkloadError)
        record = read_record(path)
    except WorkloadError as error:
        raise ModelError(str(error).replace(str(path), name)) from error
    if record.exits != exits:
        raise ModelError(miscounted(f"exit_record = {name!r}", record.exits, exits - 1))
    return record

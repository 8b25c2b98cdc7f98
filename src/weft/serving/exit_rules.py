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
"""Two outputs, (rows,): the number of the exit that each row took, and its confidence there; a request parameter."""

Floats = npt.NDArray[np.float32]


class ExitOutputs(NamedTuple):
    """The outputs of a batch at one exit."""

    number: int
    """Number of the exit, from 1; the last exit is the end of the model."""
    answers: Array
    """(rows, ...)"""
    confidences: Floats
    """(rows,)"""


class ExitRules:
    """The exits of one loaded model, or of one of the models of a body."""

    def __init__(
        self, exits: ModelExits, steering: Steering, record: ExitRecord | None = None, *, at_end: bool = False
    ) -> None:
        """steering: how load changes the threshold.

        record: measured exit rates and accuracies by threshold; without it the exits count as equally frequent.

        at_end: all requests run to the end, and each row's exit is chosen there, as for the models of a body.
        """
        self.names = tuple(spec.output for spec in exits.specs)
        self.steered, self.record = Steered(steering), record  # steered: lowers the threshold under load
        count = len(self.names)
        # the share of rows that leaves at each exit: first those of the record, then learned
        self.shares = ExitShares(record.rates(steering.top) if record else [1 / count] * count)
        self._confidence_kind = exits.confidence
        self._by_segment = {spec.segment: number for number, spec in enumerate(exits.specs, start=1)}
        self.layers = () if at_end else tuple(spec.segment + 1 for spec in exits.specs[:-1])
        """Numbers of segments after which requests may leave, without the end."""

    def outputs_at(self, segment: int, outputs: Mapping[str, Array]) -> ExitOutputs | None:
        """Return the outputs at the exit at the end of a segment; None if there is no exit."""
        number = self._by_segment.get(segment)
        if number is None:
            return None
        answers = outputs[self.names[number - 1]]
        return ExitOutputs(number, answers, confidence(answers, self._confidence_kind))

    def choose_exits(self, outputs: Mapping[str, Array], threshold: float) -> dict[str, Array]:
        """Choose each row's exit for a request that ran to the end, from the outputs of all exits."""
        rows = RequestRows(len(outputs[self.names[-1]]))
        for number, name in enumerate(self.names, start=1):
            exit_outputs = ExitOutputs(number, outputs[name], confidence(outputs[name], self._confidence_kind))
            rows.record_exits(exit_outputs, threshold, end=number == len(self.names))
        return rows.to_answer(self)

    def answer(self, answers: Array, exits: Array, confidences: Floats) -> dict[str, Array]:
        """Build the outputs of a request: answers, exit numbers and confidences."""
        return {self.names[-1]: answers, EXIT: exits, CONFIDENCE: confidences}

    @property
    def threshold(self) -> float:
        """The current threshold for requests that state none."""
        return self.steered.threshold

    @property
    def accuracy(self) -> float | None:
        """Share of right answers at the current threshold according to the exit record; None without a record."""
        return self.record.accuracy(self.threshold) if self.record else None


class RequestRows:
    """The rows of one request: some may have left at an exit while others continue."""

    __slots__ = ("_answers", "_confidences", "_exits")

    def __init__(self, rows: int) -> None:
        self._exits = np.zeros(rows, np.int64)  # 0: has not left
        self._confidences = np.zeros(rows, np.float32)
        self._answers: Array | None = None

    def record_exits(self, exit_outputs: ExitOutputs, threshold: float, *, end: bool) -> bool:
        """Record the rows that leave at an exit; return whether all rows of the request have left.

        end: whether it is the last exit, where all rows leave.
        """
        number, answers, confidences = exit_outputs
        leaving = (self._exits == 0) & ((confidences >= threshold) | end)
        if self._answers is None:
            self._answers = answers.copy()
        self._answers[leaving], self._confidences[leaving] = answers[leaving], confidences[leaving]
        self._exits[leaving] = number
        return bool(self._exits.all())

    def to_answer(self, exit_rules: ExitRules) -> dict[str, Array]:
        """Build the outputs of the request, after ``record_exits`` returned True."""
        assert self._answers is not None
        return exit_rules.answer(self._answers, self._exits, self._confidences)


def make_task_exits(task: TaskSpec, config: ModelConfig) -> ExitRules | None:
    """Return the exit rules of a task, which is one of the models of a body; None if it has no exits."""
    if not task.exits:
        return None
    # the segment has no meaning: exits are chosen at the end
    exits = tuple(ExitSpec(output=name, segment=0) for name in task.exits)
    return ExitRules(ModelExits(exits, config.exit_confidence), Steering(config.exit_threshold), at_end=True)


def requestable_outputs(outputs: tuple[TensorSpec, ...], end: str | None) -> tuple[TensorSpec, ...]:
    """Return the outputs that clients may request; *end* is the last of the model's exits, None without exits.

    With exits: the last one, which holds the answer of each row, and the exit and the confidence of each row.
    """
    if end is None:
        return outputs
    last = tuple(spec for spec in outputs if spec.name == end)
    return (*last, TensorSpec(EXIT, "INT64", (-1,)), TensorSpec(CONFIDENCE, "FP32", (-1,)))


def read_exit_record(model: Path, name: str, exits: int) -> ExitRecord:
    """Read the exit record, a file in the model's folder; ModelError if it does not fit the model."""
    path = model.parent / name
    try:
        refuse_special_file(path, WorkloadError)
        record = read_record(path)
    except WorkloadError as error:
        raise ModelError(str(error).replace(str(path), name)) from error
    if record.exits != exits:
        raise ModelError(miscounted(f"exit_record = {name!r}", record.exits, early_exits=exits - 1))
    return record

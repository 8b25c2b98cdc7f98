"""What is read of good answers: which class they give, and at which exit of the model the request left.

Answers are read as they come, and only these numbers are kept.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from weft.base.shapes import written
from weft.http.answers import Answer
from weft.load.samples import Ints
from weft.runtime.tensors import DATATYPES, Array
from weft.workloads.exits import MOST_EXITS

EXIT = "weft_exit"
"""The output that tells the exit of each row, from 1 on."""
OURS = "weft_"
"""So begin the names of outputs that are not the model's."""

SHOWN_CHARACTERS = 200
MAX_ANSWER_BYTES = 1 << 24
"""How much of an answer is read; one that is longer cannot be."""
NO_CLASS, NO_EXIT = -1, 0


class Unreadable(ValueError):
    """An answer does not say what it should."""


class _Output(NamedTuple):
    """One tensor of an answer, not yet looked at."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any
    """A list, or bytes."""

    def values(self) -> Array:
        kind = DATATYPES.get(self.datatype)
        if kind is None or kind == np.object_:
            raise Unreadable(f"its output {self.name!r} is of the type {self.datatype!r}, which holds no numbers")
        try:
            return self._flat(kind).reshape(self.shape)
        except (ValueError, TypeError, OverflowError):
            raise Unreadable(f"its output {self.name!r} does not hold {written(self.shape)} {self.datatype}") from None

    def _flat(self, kind: np.dtype[Any]) -> Array:
        if isinstance(self.data, bytes):
            return np.frombuffer(self.data, kind.newbyteorder("<"))
        with np.errstate(over="ignore"):
            return np.asarray(self.data, kind).ravel()


def announces_exits(metadata: Any) -> bool:
    """Whether a model's answers tell the exit, as its metadata lists its outputs."""
    outputs = metadata.get("outputs") if isinstance(metadata, dict) else None
    return isinstance(outputs, list) and any(isinstance(each, dict) and each.get("name") == EXIT for each in outputs)


def class_of(answer: Mapping[str, _Output]) -> int:
    """The place of the largest score in the first output that is an answer."""
    output = next((each for name, each in answer.items() if not name.startswith(OURS)), None)
    if output is None:
        raise Unreadable("it has no outputs")
    if not output.shape or output.shape[-1] < 2 or math.prod(output.shape[:-1]) != 1:
        raise Unreadable(
            f"its output {output.name!r} has the shape {written(output.shape)}, which is no score for each class"
        )
    return int(output.values().argmax())


def exit_of(answer: Mapping[str, _Output]) -> int:
    """The exit at which the last row of the request left."""
    if EXIT not in answer:
        raise Unreadable(f"it has no output {EXIT!r}")
    rows: list[Any] = answer[EXIT].values().ravel().tolist()
    if not rows or not all(isinstance(each, int) and 1 <= each <= MOST_EXITS for each in rows):
        raise Unreadable(f"its output {EXIT!r} holds no exits, which are whole numbers from 1 to {MOST_EXITS}")
    return int(max(rows))


def outputs_of(answer: Answer) -> dict[str, _Output]:
    """The outputs of an answer by name, in order."""
    if len(answer.body) >= MAX_ANSWER_BYTES:
        raise Unreadable(f"it has {MAX_ANSWER_BYTES} bytes or more")
    length = len(answer.body) if answer.json_bytes is None else answer.json_bytes
    if not 0 <= length <= len(answer.body):
        raise Unreadable("it does not say where its tensors begin")
    try:
        told = json.loads(answer.body[:length])["outputs"]
        return {each.name: each for each in _outputs(told, answer.body, length)}
    except Unreadable:
        raise
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Unreadable(f"it is no answer of the protocol ({type(error).__name__}: {error})") from None


def _outputs(told: Any, body: bytes, begin: int) -> Iterator[_Output]:
    for each in told:
        name, shape = str(each["name"]), tuple(int(size) for size in each["shape"])
        if min(shape, default=0) < 0:
            raise Unreadable(f"its output {name!r} has the shape {list(shape)}")
        if "data" in each:
            data = each["data"]
        else:
            size = int(each["parameters"]["binary_data_size"])
            if not 0 <= size <= len(body) - begin:
                raise Unreadable(f"its output {name!r} of {size} bytes is not in it")
            data, begin = body[begin : begin + size], begin + size
        yield _Output(name, str(each["datatype"]), shape, data)


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """What the answers of a stream said, request by request; None where nothing of the kind was asked."""

    sample: Ints | None = None
    """The sample that was sent."""
    exit: Ints | None = None
    """The exit at which it left, from 1 on; NO_EXIT where there was no answer."""
    prediction: Ints | None = None
    """The class; NO_CLASS where there was no answer."""
    labels: Ints | None = None
    """The right class of what was sent."""
    exit_count: int = 0
    """How many the model has, as far as that is known."""
    unreadable: int = 0
    """Good answers that did not say it."""
    problem: str = ""
    """The first of them."""

    def at(self, places: Any) -> Said:
        """What the requests at *places* said, in that order."""
        lists = {"sample": self.sample, "exit": self.exit, "prediction": self.prediction, "labels": self.labels}
        chosen: Any = {key: each if each is None else each[places] for key, each in lists.items()}
        return replace(self, **chosen)


class Readings:
    """Collects what the answers of one stream say.

    labels: the right class of each sample, if classes are to be read; exits: whether exits are.
    """

    def __init__(self, labels: Ints | None, *, exits: bool) -> None:
        self._labels, self._exits = labels, exits
        self.wanted = labels is not None or exits
        self._exit, self._class = array("h"), array("q")
        self._unreadable = 0
        self._problem = ""

    def expect(self, count: int) -> None:
        """Make room for the answers to *count* more requests."""
        if self._exits:
            self._exit.extend([NO_EXIT] * count)
        if self._labels is not None:
            self._class.extend([NO_CLASS] * count)

    def read(self, number: int, answer: Answer) -> None:
        """A good answer came."""
        try:
            outputs = outputs_of(answer)
            if self._labels is not None:
                self._class[number] = class_of(outputs)
            if self._exits:
                self._exit[number] = exit_of(outputs)
        except Unreadable as problem:
            self._unreadable += 1
            self._problem = self._problem or str(problem)[:SHOWN_CHARACTERS]

    def said(self, rows: Ints | None, exit_count: int) -> Said:
        """What all requests were told; *rows*: the sample of each; *exit_count*: how many exits the model has."""
        return Said(
            rows,
            np.array(self._exit, np.int64) if self._exits else None,
            None if self._labels is None else np.array(self._class, np.int64),
            None if self._labels is None or rows is None else self._labels[rows],
            exit_count,
            self._unreadable,
            self._problem,
        )

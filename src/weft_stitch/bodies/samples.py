"""Made-up inputs for the models of a body, and numbers that make them longer without changing an answer.

Tokens are drawn from the tables that they are looked up in. What is looked up nowhere is a mask, of ones with zeros
behind, or the other way round: which of the two is found by running the first model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from weft.runtime.tensors import Array
from weft_stitch.bodies.body import Body, BodyValue
from weft_stitch.bodies.joining import Fill
from weft_stitch.graph import DYNAMIC

ROWS, SHORT, LONG = 2, 5, 7
"""Of the runs that look for a fill."""
_WAYS = ((1, 0), (0, 1), (0, 0), (1, 1))
"""What a mask holds where there is something, and where there is nothing."""
_FEW = 3
"""Masks of which every one may be of another way."""

Feed = dict[str, Array]
Answers = Callable[[int, Feed], Mapping[str, Array]]
"""A model and its inputs -> its outputs."""


@dataclass(frozen=True, eq=False)
class BodySamples:
    """How to draw inputs."""

    body: Body
    usual: Mapping[str, float]
    """Mask -> what it holds where there is something."""
    fill: Fill | None
    """Input -> the number that makes it longer; None where answers depend on what stands behind."""

    def draw(self, rng: np.random.Generator, task: int, rows: int, length: int) -> Feed:
        """Inputs of one model; where masks can hide something, each row has an end of its own."""
        ends = rng.integers(1, length + 1, rows) if self.fill else np.full(rows, length)
        ends[:1] = length
        return {name: self._drawn(rng, task, name, ends, length) for name in self.body.ports[task]}

    def lengthened(self, task: int, feed: Feed, length: int) -> Feed:
        """*feed* with all open sizes made *length*."""
        found = {}
        for name, port in self.body.ports[task].items():
            room = [(0, length - size if axis in port.long else 0) for axis, size in enumerate(feed[name].shape)]
            found[name] = np.pad(feed[name], room, constant_values=(self.fill or {}).get(name, 0))
        return found

    def _drawn(self, rng: np.random.Generator, task: int, name: str, ends: Array, length: int) -> Array:
        port = self.body.ports[task][name]
        shape = [len(ends), *(length if size == DYNAMIC else size for size in port.shape[1:])]
        if port.dtype.startswith("float"):
            return np.asarray(rng.standard_normal(shape), port.dtype)
        if name not in self.usual:
            return np.asarray(rng.integers(0, tables(self.body, task).get(name, 2), shape), port.dtype)
        hidden: Array = np.arange(shape[-1]) >= np.reshape(ends, (-1, *[1] * (len(shape) - 1))).astype(int)
        held = np.where(np.broadcast_to(hidden, shape), (self.fill or self.usual)[name], self.usual[name])
        return np.asarray(held, port.dtype)


def tables(body: Body, task: int) -> dict[str, int]:
    """The inputs that are looked up in a table, and how many lines it has."""
    found: dict[str, int] = {}
    same = {BodyValue(-1, place): name for place, name in enumerate(body.inputs)}
    for number, step in enumerate(body.steps):
        if task not in step.contents:
            continue
        if step.node.op in ("Cast", "Identity") and step.inputs[0] in same:
            same[BodyValue(number, 0)] = same[step.inputs[0]]
        if step.node.op == "Gather" and step.inputs[1] in same and step.contents[task][0] in body.constants.arrays:
            own = step.lines.get(task)
            lines = own.count if own else len(body.constants.arrays[step.contents[task][0]])
            name = same[step.inputs[1]]
            found[name] = min(lines, found.get(name, lines))
    return found


def find(body: Body, answers: Answers, close: Callable[[Array, Array], bool]) -> BodySamples:
    """How to draw, with the first fill that changes no answer of the first model."""
    known = tables(body, 0)
    whole = [name for name, port in body.ports[0].items() if not port.dtype.startswith("float")]
    masks = [name for name in {**dict.fromkeys(whole), **_elsewhere(body)} if name not in known]
    for ways in _ways(len(masks)):
        usual = {name: float(way[0]) for name, way in zip(masks, ways, strict=True)}
        fill = dict.fromkeys(body.inputs, 0.0) | {name: float(way[1]) for name, way in zip(masks, ways, strict=True)}
        drawn = BodySamples(body, usual, fill)
        if all(_unmoved(drawn, answers, close)):
            return drawn
    return BodySamples(body, dict.fromkeys(masks, 1.0), None)


def _ways(masks: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Ways for each of so many masks; where they are many, all alike."""
    return product(_WAYS, repeat=masks) if masks <= _FEW else ((way,) * masks for way in _WAYS)


def _elsewhere(body: Body) -> dict[str, None]:
    """Whole numbers that only other models than the first take."""
    ports = [port for mine in body.ports[1:] for port in mine.values() if not port.dtype.startswith("float")]
    return {port.name: None for port in ports if port.name not in body.ports[0]}


def _unmoved(drawn: BodySamples, answers: Answers, close: Callable[[Array, Array], bool]) -> Iterator[bool]:
    """Whether each answer is what it was, once its inputs are longer."""
    rng = np.random.default_rng(0)
    plain = BodySamples(drawn.body, drawn.usual, None)
    short = plain.draw(rng, 0, ROWS, SHORT)
    before, after = answers(0, short), answers(0, drawn.lengthened(0, short, LONG))
    for name, wanted in before.items():
        found = after[name]
        cut = tuple(slice(0, size) for size in wanted.shape)
        yield bool(np.isfinite(wanted).all()) and found.ndim == wanted.ndim and close(found[cut], wanted)

"""Which nodes of several programs are the same step, and for which of the models it can run once: ``Aligner``.

Nodes of equal operator, attributes and inputs are the same step; where a model has several such nodes, its first is
aligned with the first of another model, and so on. Constants may differ. A step's *crews* are groups of models whose
constants in it are equal, down to the last bit. Other weights may be equal except for a small difference (``LowRank``,
``OwnLines``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft_stitch.graph import GraphTensor
from weft_stitch.net import Array
from weft_stitch.reading.onnx_program import Constants, ModelProgram, ProgramNode

WORTH = 4
"""A difference must take at most 1/4 of the weight's numbers; above that, sharing saves too little."""
_FIRST_RANKS, _OVERSAMPLING = (8, 32), 8
"""Ranks to try first, and the number of additional random vectors per sketch (more: fewer misses, more time)."""
_HOPELESS = 0.95
"""If the residual is more than this fraction of the norm, the search ends: the difference is not of low rank."""


class LowRank(NamedTuple):
    """A difference to a weight: a product of two narrow matrices to add, and factors on its rows or columns."""

    down: Array
    """[in, rank]."""
    up: Array
    """[rank, out]."""
    before: Array | None = None
    """[in]: factors on the rows of the weight."""
    after: Array | None = None
    """[out]: factors on the columns of the weight."""
    kind: str = "low rank"
    """What the difference is, for messages: low rank, columns, rows or scale."""

    @property
    def rank(self) -> int:
        return len(self.up)

    def apply(self, weight: Array) -> Array:
        """Apply the difference to *weight*."""
        scaled = weight if self.before is None else self.before[:, None] * weight
        result: Array = (scaled if self.after is None else scaled * self.after) + self.down @ self.up
        return result


def low_rank(difference: Array, allowed: float) -> LowRank | None:
    """Factorise *difference* up to a residual of Frobenius norm *allowed*; None if its rank would be too high.

    A randomised range finder (Halko, Martinsson and Tropp, 2011): multiplies by slightly more random vectors than the
    rank to try, and tries higher ranks until the residual is small enough.
    """
    depth, width = difference.shape
    most_rank = depth * width // (WORTH * (depth + width))  # the rank at which both factors take 1/WORTH of the weight
    rng = np.random.default_rng(0)
    for count in sorted({min(rank, most_rank) for rank in (*_FIRST_RANKS, most_rank)}):
        sketch = difference @ rng.standard_normal((width, min(count + _OVERSAMPLING, width)), np.float32)
        basis, _ = np.linalg.qr(difference @ (difference.T @ sketch))  # a power iteration damps small singular values
        part = _project(basis, basis.T @ difference, difference, allowed)
        residual = float(np.linalg.norm(difference - part.down @ part.up))
        if part.rank <= count and residual <= allowed:
            return part
        if residual > _HOPELESS * float(np.linalg.norm(difference)):
            return None
    return None


def _project(basis: Array, coefficients: Array, difference: Array, allowed: float) -> LowRank:
    """Project *difference* [in, out] onto *basis* [in, vectors], without its weakest directions.

    *coefficients*: ``basis.T @ difference``. The residual's norm is at most *allowed* if the squared norm
    outside the basis is at most half of the square of *allowed*.
    """
    squares, vectors = np.linalg.eigh(coefficients.astype(np.float64) @ coefficients.T.astype(np.float64))
    outside = max(0.0, float(np.linalg.norm(difference)) ** 2 - float(squares.sum()))  # squared norm outside the basis
    # squared residual if all directions up to this one are dropped; eigh sorts them in ascending order
    residuals = np.cumsum(np.maximum(squares, 0)) + min(outside, 0.5 * allowed**2)
    strong = vectors[:, residuals > allowed**2].astype(np.float32)
    return LowRank(basis @ strong, strong.T @ coefficients)


@dataclass(frozen=True, eq=False, slots=True)
class OwnLines:
    """A table that differs from a shared one in some lines, or in their number (an extended vocabulary)."""

    count: int
    """Number of lines of the whole table."""
    indices: Array
    """Indices of its own lines in it."""
    lines: Array
    """Its own lines, [own lines, columns]."""

    def apply(self, table: Array) -> Array:
        """Apply the difference to *table*."""
        result = np.empty((self.count, table.shape[1]), table.dtype)
        result[: len(table)] = table[: self.count]
        result[self.indices] = self.lines
        return result

    def index(self, first: int) -> Array:
        """For each line of this table, its index in a joint table: the shared table, and own lines from *first* on."""
        joint_indices = np.arange(self.count, dtype=np.int32)
        joint_indices[self.indices] = np.arange(first, first + len(self.indices))
        return joint_indices


def own_lines(shared: Array, table: Array) -> OwnLines | None:
    """Express *table* by the *shared* table and own lines; None if too few lines are equal."""
    if shared.shape[1] != table.shape[1]:
        return None
    common = min(len(shared), len(table))
    indices = np.concatenate([_differing_columns(shared[:common].T, table[:common].T), np.arange(common, len(table))])
    difference = OwnLines(len(table), indices, table[indices])
    # besides the lines, each line of the table has an index of 4 bytes
    return difference if WORTH * (difference.lines.nbytes + 4 * difference.count) <= table.nbytes else None


def replace_columns(shared: Array, weight: Array) -> LowRank | None:
    """Express *weight* [in, out] as the *shared* weight with some columns, or else rows, replaced.

    None if too many of them differ in any bit.
    """
    depth, width = weight.shape
    # as many as take 1/WORTH of the weight, with their numbers in both factors and a mask
    most_replaced = (weight.size // WORTH - depth - width) // (depth + width)
    columns = _differing_columns(shared, weight)
    if len(columns) <= most_replaced:
        return LowRank(weight[:, columns], _unit_rows(width, columns), after=_zeros_at(width, columns), kind="columns")
    rows = _differing_columns(shared.T, weight.T)
    if len(rows) <= most_replaced:
        return LowRank(_unit_rows(depth, rows).T.copy(), weight[rows], before=_zeros_at(depth, rows), kind="rows")
    return None


def scale_columns(shared: Array, weight: Array, allowed: float) -> LowRank | None:
    """Express *weight* as *shared* with scaled columns, or else rows; None if the residual is above *allowed*."""
    depth, width = weight.shape
    unscaled = LowRank(np.zeros((depth, 0), np.float32), np.zeros((0, width), np.float32), kind="scale")
    after = _column_factors(shared, weight)
    if np.linalg.norm(weight - shared * after) <= allowed:
        return unscaled._replace(after=after)
    before = _column_factors(shared.T, weight.T)
    return unscaled._replace(before=before) if np.linalg.norm(weight - before[:, None] * shared) <= allowed else None


def _column_factors(shared: Array, weight: Array) -> Array:
    """For each column, the least-squares factor by which *shared* becomes *weight*."""
    squares = np.einsum("ij,ij->j", shared, shared)
    factors: Array = np.einsum("ij,ij->j", shared, weight) / np.where(squares > 0, squares, 1)
    return factors.astype(np.float32)


def _differing_columns(first: Array, second: Array) -> Array:
    """Indices of the columns that differ in any bit."""
    return np.flatnonzero((first.view(np.int32) != second.view(np.int32)).any(axis=0))


def _unit_rows(size: int, indices: Array) -> Array:
    """The rows *indices* of the identity matrix of this *size*."""
    rows = np.zeros((len(indices), size), np.float32)
    rows[np.arange(len(indices)), indices] = 1
    return rows


def _zeros_at(size: int, indices: Array) -> Array:
    """A vector of ones, with zeros at *indices*."""
    mask = np.ones(size, np.float32)
    mask[indices] = 0
    return mask


Crew = tuple[int, ...]
"""Models for which a step runs once, by their numbers, in ascending order."""


INPUT_STEP = -1
"""In place of a step's index in a value: the value is an input of the models."""


class BodyValue(NamedTuple):
    """A tensor between steps: an output of one of them, or an input of the models."""

    step: int
    """The index of the step that writes it, or ``INPUT_STEP``."""
    output: int
    """The index among the step's outputs, or among the inputs."""

    @property
    def is_input(self) -> bool:
        return self.step == INPUT_STEP


@dataclass(frozen=True, eq=False)
class BodyStep:
    """One operator, in all models that have it, with each model's constants."""

    node: ProgramNode
    """The node in the first of these models."""
    inputs: tuple[BodyValue | None, ...]
    """The values that it reads; None for a constant or an omitted input."""
    contents: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Model -> for each input, the key of the constant; empty if the input is a value or omitted."""
    names: dict[int, str] = field(default_factory=dict)
    """Model -> the node's name in that model, for messages."""
    parts: dict[int, LowRank] = field(default_factory=dict)
    """Model -> its difference to the shared weight, if it has one."""
    lines: dict[int, OwnLines] = field(default_factory=dict)
    """Model -> its own lines of the shared table, if it has any."""


@dataclass(frozen=True, eq=False)
class Body:
    """Several models as one list of steps, in an order in which they can run."""

    names: tuple[str, ...]
    opset: int
    steps: tuple[BodyStep, ...]
    inputs: tuple[str, ...]
    """The names of all models' inputs, without duplicates."""
    ports: tuple[Mapping[str, GraphTensor], ...]
    """Each model's inputs, by name."""
    outputs: tuple[Mapping[str, BodyValue], ...]
    """Each model's outputs, by name."""
    constants: Constants
    exits: tuple[tuple[str, ...], ...]
    """For each model, the names of the outputs that are early exits."""

    @property
    def tasks(self) -> int:
        return len(self.names)

    def values(self, task: int) -> list[BodyValue]:
        """All values that a model computes, in order."""
        return [
            BodyValue(number, output)
            for number, step in enumerate(self.steps)
            if task in step.contents
            for output in range(len(step.node.outputs))
            if step.node.outputs[output]
        ]


class Aligner:
    """Merges programs into one list of steps, one program after another.

    A node becomes a model's entry in the step of equal signature and inputs, or a new step.
    """

    def __init__(self, constants: Constants) -> None:
        self.steps: list[BodyStep] = []
        self._constants = constants
        self._programs: list[ModelProgram] = []
        self._inputs: list[str] = []
        self._outputs: list[dict[str, BodyValue]] = []
        self._numbers: dict[object, int] = {}
        """Signature and inputs of a node, and how many such nodes precede it -> the index of its step."""
        self.steps_of_nodes: dict[int, tuple[int, ...]] = {}
        """Model -> the index of the step of each of its nodes."""

    def add(self, program: ModelProgram) -> int:
        """Add a model and return its number; ``StitchError`` if its operator set differs."""
        first = self._programs[0] if self._programs else program
        if program.opset != first.opset:
            opsets = f"{first.name} {first.opset}, {program.name} {program.opset}"
            raise StitchError(f"the models are of different operator sets: {opsets}; export them alike")
        self._outputs.append(self.assign(len(self._programs), program))
        self._programs.append(program)
        return len(self._programs) - 1

    def body(self) -> Body:
        """Return the body of all added models."""
        return Body(
            names=tuple(program.name for program in self._programs),
            opset=self._programs[0].opset,
            steps=tuple(self.steps),
            inputs=tuple(self._inputs),
            ports=tuple({port.name: port for port in program.inputs} for program in self._programs),
            outputs=tuple(self._outputs),
            constants=self._constants,
            exits=tuple(program.exits for program in self._programs),
        )

    def assign(self, task: int, program: ModelProgram) -> dict[str, BodyValue]:
        """Assign the nodes of *program* to steps, as the model of number *task*; return the values of its outputs."""
        self._inputs += [port.name for port in program.inputs if port.name not in self._inputs]
        values = {port.name: BodyValue(INPUT_STEP, self._inputs.index(port.name)) for port in program.inputs}
        occurrences: Counter[object] = Counter()  # the n-th node of a kind is the same step as another model's n-th
        step_numbers = []
        for node in program.nodes:
            read = tuple(values.get(name) for name in node.inputs)  # None for constants
            # also whether each input and output is there or omitted
            kind = (node.signature, read, *(tuple(map(bool, names)) for names in (node.inputs, node.outputs)))
            number = self._step(node, read, (kind, occurrences[kind]))
            occurrences[kind] += 1
            step_numbers.append(number)
            step = self.steps[number]
            step.contents[task] = tuple(program.constants.get(name, "") for name in node.inputs)
            step.names[task] = node.label
            values |= {name: BodyValue(number, output_index) for output_index, name in enumerate(node.outputs) if name}
        self.steps_of_nodes[task] = tuple(step_numbers)
        for name in program.outputs:
            if name not in values:
                raise StitchError(f"{program.name}: its output {name} does not depend on its inputs")
        return {name: values[name] for name in program.outputs}

    def _step(self, node: ProgramNode, read: tuple[BodyValue | None, ...], key: object) -> int:
        """The index of the step for *key*; *node* becomes a new step if there is none."""
        if key not in self._numbers:
            self._numbers[key] = len(self.steps)
            self.steps.append(BodyStep(node, read))
        return self._numbers[key]


def crews(keys: Mapping[int, object]) -> tuple[Crew, ...]:
    """Group models by equal keys, in the order of the first model of each group."""
    groups: dict[object, list[int]] = {}
    for task, key in sorted(keys.items()):
        groups.setdefault(key, []).append(task)
    return tuple(tuple(group) for group in groups.values())

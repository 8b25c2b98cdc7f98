"""Which nodes of several programs are the same step, and for which of the models it can run once: ``Aligner``.

A step is an operator with its attributes and what it reads: nodes that agree in this are the same step, the first of
them in one model that of the first in another, and so on. Constants may differ. A step's *crews* are the models whose
constants there are equal, down to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.base.errors import StitchError
from weft_stitch.bodies.differences import LowRank, OwnLines
from weft_stitch.graph import GraphTensor
from weft_stitch.reading.onnx_program import Constants, ModelProgram, ProgramNode

Crew = tuple[int, ...]
"""Numbers of models, in order."""


class BodyValue(NamedTuple):
    """A tensor between steps."""

    step: int
    """The number of the step that writes it; -1 for an input of the models."""
    output: int


@dataclass(frozen=True, eq=False)
class BodyStep:
    """One operator, in all models that have it."""

    node: ProgramNode
    """The node in the first of these models."""
    inputs: tuple[BodyValue | None, ...]
    """The tensors it reads; None is a constant, or an input that is left out."""
    contents: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Model -> the keys of the constants that it reads here, empty where it reads a value."""
    names: dict[int, str] = field(default_factory=dict)
    """Model -> the name of its node, for messages."""
    parts: dict[int, LowRank] = field(default_factory=dict)
    """Model -> its difference to the shared weights, for the models that have one."""
    lines: dict[int, OwnLines] = field(default_factory=dict)
    """Model -> its own lines of the shared table, for the models that have some."""


@dataclass(frozen=True, eq=False)
class Body:
    """Several models as one list of steps, in an order in which they can run."""

    names: tuple[str, ...]
    opset: int
    steps: tuple[BodyStep, ...]
    inputs: tuple[str, ...]
    """Names of the inputs of all models, each once."""
    ports: tuple[Mapping[str, GraphTensor], ...]
    """Each model's inputs, by name."""
    outputs: tuple[Mapping[str, BodyValue], ...]
    """Each model's outputs, by name."""
    constants: Constants
    exits: tuple[tuple[str, ...], ...]
    """Each model's outputs that are early exits."""

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
    """Collects the steps of programs, one program after another; a node without a matching step becomes a new one."""

    def __init__(self, constants: Constants) -> None:
        self.steps: list[BodyStep] = []
        self._constants = constants
        self._programs: list[ModelProgram] = []
        self._inputs: list[str] = []
        self._outputs: list[dict[str, BodyValue]] = []
        self._numbers: dict[object, int] = {}
        self.walked: dict[int, tuple[int, ...]] = {}
        """Model -> the step of each of its nodes."""

    def add(self, program: ModelProgram) -> int:
        """Add a model and return its number."""
        first = self._programs[0] if self._programs else program
        if program.opset != first.opset:
            said = f"{first.name} {first.opset}, {program.name} {program.opset}"
            raise StitchError(f"the models are of different operator sets: {said}; export them alike")
        self._outputs.append(self.over(len(self._programs), program))
        self._programs.append(program)
        return len(self._programs) - 1

    def body(self) -> Body:
        """Return the body of all added models."""
        return Body(
            tuple(program.name for program in self._programs),
            self._programs[0].opset,
            tuple(self.steps),
            tuple(self._inputs),
            tuple({port.name: port for port in program.inputs} for program in self._programs),
            tuple(self._outputs),
            self._constants,
            tuple(program.exits for program in self._programs),
        )

    def over(self, task: int, program: ModelProgram) -> dict[str, BodyValue]:
        """Assign the nodes of *program* to steps; return the values of its outputs."""
        self._inputs += [port.name for port in program.inputs if port.name not in self._inputs]
        values = {port.name: BodyValue(-1, self._inputs.index(port.name)) for port in program.inputs}
        seen: Counter[object] = Counter()
        walked = []
        for node in program.nodes:
            read = tuple(values.get(name) for name in node.inputs)
            kind = (node.signature, read, *(tuple(map(bool, names)) for names in (node.inputs, node.outputs)))
            number = self._step(node, read, (kind, seen[kind]))
            seen[kind] += 1
            walked.append(number)
            step = self.steps[number]
            step.contents[task] = tuple(program.constants.get(name, "") for name in node.inputs)
            step.names[task] = node.where
            values |= {name: BodyValue(number, place) for place, name in enumerate(node.outputs) if name}
        self.walked[task] = tuple(walked)
        for name in program.outputs:
            if name not in values:
                raise StitchError(f"{program.name}: its output {name} does not depend on its inputs")
        return {name: values[name] for name in program.outputs}

    def _step(self, node: ProgramNode, read: tuple[BodyValue | None, ...], key: object) -> int:
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

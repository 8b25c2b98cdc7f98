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
    """What flows between steps."""

    step: int
    """Its number; -1 for an input of the models."""
    output: int


@dataclass(frozen=True, eq=False)
class BodyStep:
    """One operator, in all models that have it."""

    node: ProgramNode
    """That of the first of them."""
    inputs: tuple[BodyValue | None, ...]
    """None: a constant, or left out."""
    contents: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Model -> the keys of the constants that it reads there, empty where it reads a value."""
    names: dict[int, str] = field(default_factory=dict)
    """Model -> what its node is called to people."""
    parts: dict[int, LowRank] = field(default_factory=dict)
    """Model -> what is added to the weights that it reads there, of those that are near them only."""
    lines: dict[int, OwnLines] = field(default_factory=dict)
    """Model -> its own lines of the table that it reads there, of those that have most of it only."""


@dataclass(frozen=True, eq=False)
class Body:
    """Several models as steps; each step reads what steps before it wrote."""

    names: tuple[str, ...]
    opset: int
    steps: tuple[BodyStep, ...]
    inputs: tuple[str, ...]
    """Names of inputs, of all models."""
    ports: tuple[Mapping[str, GraphTensor], ...]
    """Each model's inputs by their names."""
    outputs: tuple[Mapping[str, BodyValue], ...]
    """Each model's outputs."""
    constants: Constants
    exits: tuple[tuple[str, ...], ...]
    """Those of them that are exits, of each model."""

    @property
    def tasks(self) -> int:
        return len(self.names)

    def values(self, task: int) -> list[BodyValue]:
        """All that a model computes, in order."""
        return [
            BodyValue(number, output)
            for number, step in enumerate(self.steps)
            if task in step.contents
            for output in range(len(step.node.outputs))
            if step.node.outputs[output]
        ]


class Aligner:
    """Programs are walked one after another; what was not there before is a new step."""

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
        """One more model; its number."""
        first = self._programs[0] if self._programs else program
        if program.opset != first.opset:
            said = f"{first.name} {first.opset}, {program.name} {program.opset}"
            raise StitchError(f"the models are of different operator sets: {said}; export them alike")
        self._outputs.append(self.over(len(self._programs), program))
        self._programs.append(program)
        return len(self._programs) - 1

    def body(self) -> Body:
        """All that were added."""
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
        """The outputs of *program*, whose nodes become steps."""
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
    """The models that have the same key, those of the first first."""
    found: dict[object, list[int]] = {}
    for task, key in sorted(keys.items()):
        found.setdefault(key, []).append(task)
    return tuple(tuple(each) for each in found.values())

"""A body -> one graph that equals its models: ``join``.

Every step runs once for each of its crews, on the rows of the crew's models one after another. Where a step is for
another crew than what it reads, rows are split and put together along the axis that ``row_axes`` finds. Values without
rows (shapes, positions) are computed for whichever crew asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft_stitch.bodies.body import Body, BodyStep, BodyValue, Crew, crews
from weft_stitch.bodies.differences import LowRank, OwnLines
from weft_stitch.bodies.narrowing import narrowed
from weft_stitch.bodies.probing import BodyPlace, Fill
from weft_stitch.graph import DYNAMIC, Graph, GraphStep, GraphTensor
from weft_stitch.net import Array

ConnectionSlots = Mapping[BodyValue, BodyPlace]


def port_name(body: Body, task: int, port: str) -> str:
    """What the graph calls an input or output of one of its models."""
    return f"{body.names[task]}.{port}"


class StackedPart(NamedTuple):
    """Where a graph has a low-rank part: which of the matrices in two of its constants."""

    down: str
    up: str
    at: int


class JoinedBody(NamedTuple):
    """A graph, and where it has what the models hold."""

    graph: Graph
    held: Mapping[tuple[int, int], tuple[str, ...]]
    """Step and model -> the graph's names of the constants that are read there, empty where it has none."""
    parts: Mapping[tuple[int, int], StackedPart]


def join(body: Body, places: ConnectionSlots, fill: Fill | None, outputs: Mapping[str, BodyPlace]) -> JoinedBody:
    """All models of *body* as one graph; without a *fill* they must be given inputs of one length.

    outputs: the places of the models' own outputs, by the graph's names.
    """
    joiner = _Joiner(body, tuple(range(body.tasks)), places, outputs)
    graph = narrowed(joiner.graph("+".join(body.names), joiner.write(fill)))
    return JoinedBody(graph, joiner.held(graph.constants), joiner.stacked)


def alone(body: Body, task: int, values: Iterable[BodyValue] = ()) -> Graph:
    """One of the models, which also gives out *values*, under names that ``exposed`` has."""
    joiner = _Joiner(body, (task,), {}, {})
    outputs = joiner.write(None)
    outputs += [joiner.output(joiner.tensor(value, (task,)), exposed(value), ()) for value in values]
    return joiner.graph(body.names[task], outputs)


def exposed(value: BodyValue) -> str:
    return f"value {value.step} {value.output}"


class _Sized(NamedTuple):
    """How large the inputs of a model are, as tensors of one number."""

    rows: str
    length: str


class _Joiner:
    """Writes a graph for some models of a body."""

    def __init__(self, body: Body, tasks: Crew, places: ConnectionSlots, outputs: Mapping[str, BodyPlace]) -> None:
        self.body, self.tasks, self.places, self._outputs = body, tasks, places, outputs
        self._steps: list[GraphStep] = []
        self._constants: dict[str, Array] = {}
        self._stored: dict[str, str] = {}
        self._held: dict[BodyValue, dict[Crew, str]] = {}
        self._inputs: list[GraphTensor] = []
        self._sizes: dict[int, _Sized] = {}
        self._longest = ""
        self._owners: dict[tuple[Crew, tuple[int, ...]], str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._added: dict[str, Array] = {}
        self.stacked: dict[tuple[int, int], StackedPart] = {}
        self._layer = ""
        self._keys: dict[tuple[int, int], int] = {}
        self._outlines: dict[tuple[int, int], int] = {}
        self._numbers: dict[object, int] = {}
        self._count = 0

    def write(self, fill: Fill | None) -> list[GraphTensor]:
        """All steps; the outputs of the models."""
        self._read_inputs(fill)
        for number in range(len(self.body.steps)):
            together = self.crews(number)  # of every step in turn, as each asks for those before it
            for crew in together if self._has_rows(number) else ():
                self._run(number, crew)
        self._layer = ""
        return [self._write_output(task, port, fill) for task in self.tasks for port in self.body.outputs[task]]

    def graph(self, name: str, outputs: Sequence[GraphTensor]) -> Graph:
        constants = {name: array for name, array in self._constants.items()}
        weights = frozenset(name for name, array in constants.items() if array.ndim > 1 and array.dtype.kind == "f")
        steps, opset = tuple(self._steps), self.body.opset
        return Graph(name, tuple(self._inputs), tuple(outputs), steps, constants, weights, self._shapes, opset=opset)

    def held(self, constants: Mapping[str, Array]) -> dict[tuple[int, int], tuple[str, ...]]:
        """What the graph calls the constants that models read in steps, of those that it has."""
        names = {key: name for key, name in self._stored.items() if name in constants}
        return {
            (number, task): tuple(names.get(key, "") for key in self._contents(number, task))
            for number, step in enumerate(self.body.steps)
            for task in step.contents
        }

    def crews(self, number: int) -> tuple[Crew, ...]:
        """The models for which a step runs once."""
        having = [task for task in self.tasks if task in self.body.steps[number].contents]
        found = crews({task: self._key(number, task) for task in having})
        for task in having:
            self._outline(number, task)
        return found

    def _key(self, number: int, task: int) -> int:
        """The same for models of one crew: they hold the same there, and what they read is of the same sizes.

        What has no rows must hold the same as well, as it is computed once for all of them.
        """
        if (number, task) not in self._keys:
            step = self.body.steps[number]
            read = [each for each in step.inputs if each is not None and each.step >= 0]
            below = [
                self._outline(each.step, task) if self._carries(each) else self._key(each.step, task) for each in read
            ]
            self._keys[number, task] = self._numbered("key", number, self._contents(number, task), *below)
        return self._keys[number, task]

    def _outline(self, number: int, task: int) -> int:
        """The same for models in which a step makes values of the same sizes."""
        if (number, task) not in self._outlines:
            step = self.body.steps[number]
            below = [self._outline(each.step, task) for each in step.inputs if each is not None and each.step >= 0]
            held = [self.body.constants.outline(key) for key in step.contents[task] if key]
            self._outlines[number, task] = self._numbered("outline", number, *held, *below)
        return self._outlines[number, task]

    def _numbered(self, *key: object) -> int:
        """A number that stands for *key*."""
        return self._numbers.setdefault(key, len(self._numbers))

    def _carries(self, value: BodyValue) -> bool:
        """Whether a value has rows; where places are not known there is one model, and it makes no difference."""
        return value.step < 0 or not self.places or self.places[value].rows is not None

    def _has_rows(self, number: int) -> bool:
        made = self.body.steps[number].node.outputs
        return any(self._carries(BodyValue(number, place)) for place, name in enumerate(made) if name)

    def tensor(self, value: BodyValue, crew: Crew) -> str:
        """The value for the models of a crew, one after another."""
        held = self._held.setdefault(value, {})
        if crew not in held:
            if self._carries(value):
                held[crew] = self._gathered(value, crew)
            else:
                self._run(value.step, crew)
        return held[crew]

    def _run(self, number: int, crew: Crew) -> None:
        step = self.body.steps[number]
        contents = self._contents(number, crew[0])
        read = [
            self._stored_as(key) if value is None else self.tensor(value, crew)
            for value, key in zip(step.inputs, contents, strict=True)
        ]
        self._layer = step.names[crew[0]]
        if self._stacks(step) and any(task in step.lines for task in crew):
            read = self._looked_up(number, crew)
        near = self._stacks(step) and any(task in step.parts for task in crew)
        whole = self._scaled(step, read[0], "before", crew) if near else read[0]
        made = [self._fresh(step.node.op) if name else "" for name in step.node.outputs]
        taken = (whole, *read[1:])
        self._steps.append(GraphStep(step.node.op, taken, tuple(made), step.node.attributes, self._layer))
        if near:
            self._see(BodyValue(number, 0), made[0])
            made = [self._scaled(step, made[0], "after", crew)]
            if any(step.parts[task].rank for task in crew if task in step.parts):
                added = self._parts(number, read[0], crew)
                self._see(BodyValue(number, 0), made[0], added)
                made = [self.add("Add", made[0], added)]
        for place, name in enumerate(made):
            self._held.setdefault(BodyValue(number, place), {})[crew] = name
            self._see(BodyValue(number, place), name)

    def _see(self, value: BodyValue, *tensors: str) -> None:
        """Note the sizes of what holds a value, as they were seen."""
        if value in self.places:
            self._shapes |= dict.fromkeys(tensors, self.places[value].sizes)

    def _contents(self, number: int, task: int) -> tuple[str, ...]:
        """What a model reads in a step that is constant; its own is put into it where rows cannot pick theirs."""
        step = self.body.steps[number]
        contents, own = step.contents[task], step.parts.get(task) or step.lines.get(task)
        if own is None or self._stacks(step):
            return contents
        key = f"added {number} {task}"
        if key not in self._added:
            self._added[key] = own.whole(self.body.constants.arrays["".join(contents)])
        return tuple(each and key for each in contents)

    def _stacks(self, step: BodyStep) -> bool:
        """Whether each row that a step reads can be multiplied by weights of its own, or looked up in its own lines."""
        if step.lines:
            at = step.inputs[1]
            return at is not None and bool(self.places) and self._carries(at) and not self._inner(at)
        read = step.inputs[0]
        place = self.places.get(read) if read else None
        return place is not None and place[2:5] == (0, 1, False) and len(place.sizes) in (2, 3)

    def _parts(self, number: int, read: str, crew: Crew) -> str:
        """What low-rank parts make of *read*: each row is multiplied by those of its model."""
        step = self.body.steps[number]
        parts, whose = self._different(step.parts, crew)
        rank = max(part.rank for part in parts if part)
        weight = self.body.constants.arrays[step.contents[crew[0]][1]]
        down = np.zeros((len(parts), weight.shape[0], rank), np.float32)
        up = np.zeros((len(parts), rank, weight.shape[1]), np.float32)
        for place, part in enumerate(parts):
            if part:
                down[place, :, : part.rank], up[place, : part.rank] = part.down, part.up
        names = self.constant(down), self.constant(up)
        places = {id(part): at for at, part in enumerate(parts)}
        self.stacked |= {(number, task): StackedPart(*names, places[id(step.parts.get(task))]) for task in crew}
        middle, flat = self.numbers([1]), self._is_flat(step)
        wide = self.add("Unsqueeze", read, middle) if flat else read
        narrow = self.add("MatMul", wide, self.add("Gather", names[0], whose))
        if step.inputs[0] is not None and not flat:
            self._shapes[narrow] = (*self.places[step.inputs[0]].sizes[:-1], rank)
        found = self.add("MatMul", narrow, self.add("Gather", names[1], whose))
        return self.add("Squeeze", found, middle) if flat else found

    def _scaled(self, step: BodyStep, tensor: str, side: str, crew: Crew) -> str:
        """A tensor with each row scaled as the model's weights are, before or after the product."""
        parts, whose = self._different(step.parts, crew)
        scales = [getattr(part, side, None) for part in parts]
        wide = next((len(each) for each in scales if each is not None), 0)
        if not wide:
            return tensor
        stack = np.stack([np.ones(wide, np.float32) if each is None else each for each in scales])
        held = self.constant(stack if self._is_flat(step) else stack[:, None])
        picked = self.add("Gather", held, whose)
        self._shapes[picked] = (DYNAMIC, wide) if self._is_flat(step) else (DYNAMIC, 1, wide)
        made = self.add("Mul", tensor, picked)
        if tensor in self._shapes:
            self._shapes[made] = self._shapes[tensor]
        return made

    def _is_flat(self, step: BodyStep) -> bool:
        """Whether what a product reads has no length."""
        return step.inputs[0] is not None and len(self.places[step.inputs[0]].sizes) == 2

    def _looked_up(self, number: int, crew: Crew) -> list[str]:
        """A table with the own lines of all models behind it, and where each row finds its model's there."""
        step = self.body.steps[number]
        contents, at = step.contents[crew[0]], step.inputs[1]
        assert at is not None
        table = self.body.constants.arrays[contents[0]]
        own, firsts, lines = OwnLines(len(table), np.arange(0), table[:0]), {}, [table]
        parts = {task: step.lines.get(task, own) for task in crew}
        for part in parts.values():
            if id(part) not in firsts:
                firsts[id(part)] = sum(map(len, lines))
                lines.append(part.lines)
        found = [
            self.add("Gather", self.constant(part.index(firsts[id(part)])), self.tensor(at, (task,)))
            for task, part in parts.items()
        ]
        key = f"lines {number} {crew}"
        self._added[key] = np.concatenate(lines)
        joined = self.add("Concat", *found, axis=self._axis(at)) if len(found) > 1 else found[0]
        return [self._stored_as(key), joined]

    def _different(self, held: Mapping[int, LowRank], crew: Crew) -> tuple[list[LowRank | None], str]:
        """What models of a crew hold, the same once, and which of it is that of each row's model."""
        parts = {id(held.get(task)): held.get(task) for task in crew}
        return list(parts.values()), self._whose(crew, tuple(list(parts).index(id(held.get(task))) for task in crew))

    def _whose(self, crew: Crew, numbers: tuple[int, ...]) -> str:
        """The number of each row's model."""
        if (crew, numbers) not in self._owners:
            sizes = [self._sizes[task].rows for task in crew]
            each = [self.add("Expand", self.numbers([n]), size) for n, size in zip(numbers, sizes, strict=True)]
            self._owners[crew, numbers] = self.add("Concat", *each, axis=0)
        return self._owners[crew, numbers]

    # Rows from crew to crew

    def _gathered(self, value: BodyValue, crew: Crew) -> str:
        """Put together from what there is: whole tensors of crews that follow each other, else single models."""
        parts: list[str] = []
        left = list(crew)
        while left:
            whole = [each for each in self._held[value] if len(each) > 1 and tuple(left[: len(each)]) == each]
            mine = max(whole, key=len, default=(left[0],))
            parts.append(self._held[value][mine] if whole else self._single(value, left[0]))
            del left[: len(mine)]
        if len(parts) == 1:
            return parts[0]
        if not self._inner(value):
            joined = self.add("Concat", *parts, axis=self._axis(value))
            self._see(value, joined)
            return joined
        joined = self.add("Concat", *(self._rows_apart(value, each) for each in parts), axis=self._axis(value) + 1)
        return self._rows_beside(value, joined)

    def _single(self, value: BodyValue, task: int) -> str:
        held = self._held[value]
        if (task,) not in held:
            crew = next(each for each in held if task in each)
            sizes = self.add("Concat", *(self._sizes[each].rows for each in crew), axis=0)
            inner, place = self._inner(value), self.places[value] if value.step >= 0 else None
            if place and place.each != 1 and not inner:
                sizes = self.add("Mul", sizes, self.numbers([place.each]))
            if place and place.by_length and not inner:
                sizes = self.add("Mul", sizes, self._longest)
            names = [self._fresh("Rows") for _ in crew]
            read = (self._rows_apart(value, held[crew]) if inner else held[crew], sizes)
            axis = self._axis(value) + inner
            self._steps.append(GraphStep("Split", read, tuple(names), {"axis": axis}, self._layer))
            made = [self._rows_beside(value, each) for each in names] if inner else names
            self._see(value, *made)
            held |= {(each,): name for each, name in zip(crew, made, strict=True) if (each,) not in held}
        return held[task,]

    def _inner(self, value: BodyValue) -> bool:
        """Whether the rows of a value lie side by side."""
        return value.step >= 0 and self.places[value].inner

    def _rows_apart(self, value: BodyValue, tensor: str) -> str:
        """A value whose rows lie side by side with an axis of their own, behind the one that they lay along."""
        place = self.places[value]
        each = self.numbers([place.each])
        if place.by_length:
            each = self.add("Mul", each, self._longest)
        return self._reshaped(place, tensor, each, self.numbers([-1]))

    def _rows_beside(self, value: BodyValue, tensor: str) -> str:
        """The same back."""
        return self._reshaped(self.places[value], tensor, self.numbers([-1]))

    def _reshaped(self, place: BodyPlace, tensor: str, *sizes: str) -> str:
        axis = place.rows or 0
        if any(long > axis for long in place.long):
            raise StitchError(f"{self._layer} has rows side by side in front of a length; it cannot be stitched")
        ends = self.numbers(place.sizes[axis + 1 :])
        shape = self.add("Concat", self.numbers([0] * axis), *sizes, ends, axis=0)
        return self.add("Reshape", tensor, shape)

    def _axis(self, value: BodyValue) -> int:
        return 0 if value.step < 0 else self.places[value].rows or 0

    # Inputs and outputs

    def _read_inputs(self, fill: Fill | None) -> None:
        for task in self.tasks:
            for name, port in self.body.ports[task].items():
                called = port_name(self.body, task, name)
                self._inputs.append(replace(port, name=called, length=self._length_name(task)))
                self._held.setdefault(BodyValue(-1, self.body.inputs.index(name)), {})[task,] = called
            self._sizes[task] = self._sized(task)
        lengths = [each.length for each in self._sizes.values() if each.length]
        if len(lengths) > 1:
            self._longest = self.add("Max", *lengths)
        if len(lengths) > 1 and fill is not None:
            for task in self.tasks:
                for name, port in self.body.ports[task].items():
                    if port.long:
                        held = self._held[BodyValue(-1, self.body.inputs.index(name))]
                        held[task,] = self._lengthened(held[task,], port, self._sizes[task].length, fill[name])

    def _sized(self, task: int) -> _Sized:
        rows = length = ""
        for name, port in self.body.ports[task].items():
            shape = self.add("Shape", port_name(self.body, task, name))
            rows = rows or self.add("Gather", shape, self.numbers([0]))
            if port.long and not length:
                length = self.add("Gather", shape, self.numbers(port.long[:1]))
            if length:
                break
        return _Sized(rows, length)

    def _lengthened(self, tensor: str, port: GraphTensor, length: str, fill: float) -> str:
        missing, none = self.add("Sub", self._longest, length), self.numbers([0])
        ends = [missing if axis in port.long else none for axis in range(len(port.shape))]
        pads = self.add("Concat", *[none] * len(port.shape), *ends, axis=0)
        return self.add("Pad", tensor, pads, self.constant(np.array(fill, port.dtype)))

    def _write_output(self, task: int, port: str, fill: Fill | None) -> GraphTensor:
        name = port_name(self.body, task, port)
        tensor, place = self.tensor(self.body.outputs[task][port], (task,)), self._outputs.get(name)
        if place is None:
            return self.output(tensor, name, ())
        sizes = tuple(DYNAMIC if axis in (0, *place.long) else size for axis, size in enumerate(place.sizes))
        if place.long and len(self.tasks) > 1 and fill is not None:
            if not place.as_long:
                raise StitchError(f"{name} is not as long as the inputs; it cannot be cut to the length of a row")
            for axis in place.long:
                tensor = self.add("Slice", tensor, self.numbers([0]), self._sizes[task].length, self.numbers([axis]))
        made = self.output(tensor, name, sizes, place.dtype)
        return replace(made, length=self._length_name(task))

    def _length_name(self, task: int) -> str:
        return f"{self.body.names[task]}.length"

    # Steps and constants

    def output(self, tensor: str, name: str, shape: tuple[int, ...], dtype: str = "") -> GraphTensor:
        self._steps.append(GraphStep("Identity", (tensor,), (name,)))
        return GraphTensor(name, shape, dtype)

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        made = self._fresh(op)
        self._steps.append(GraphStep(op, inputs, (made,), attributes, self._layer))
        return made

    def numbers(self, numbers: Sequence[int]) -> str:
        return self.constant(np.array(numbers, np.int64))

    def constant(self, array: Array) -> str:
        return self._stored_as(self.body.constants.keep(array))

    def _stored_as(self, key: str) -> str:
        """The tensor of a constant; one that is made of others is made where it is first read."""
        if key not in self._stored and key:
            found = self.body.constants.derived.get(key)
            if found is None:
                name = self._stored[key] = f"constant_{len(self._stored)}"
                self._constants[name] = self._added[key] if key in self._added else self.body.constants.arrays[key]
            else:
                read = tuple(self._stored_as(each) for each in found.inputs)
                made = tuple(self._fresh(found.node.op) for _ in found.node.outputs)
                self._steps.append(GraphStep(found.node.op, read, made, found.node.attributes))
                self._stored[key] = made[found.output]
        return self._stored.get(key, "")

    def _fresh(self, op: str) -> str:
        self._count += 1
        return f"{op.lower()}_{self._count}"

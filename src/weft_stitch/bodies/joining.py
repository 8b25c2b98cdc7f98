"""A body -> one graph that equals its models: ``join``.

Every step runs once for each of its crews, on the concatenated rows of the crew's models. Where a step's crew differs
from the crew of its input, rows are split and concatenated along the axis that ``probing`` has found. Values without
rows (shapes, positions) are computed for each crew that reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft_stitch.bodies.body import Body, BodyStep, BodyValue, Crew, LowRank, OwnLines, crews
from weft_stitch.bodies.narrowing import narrow_graph
from weft_stitch.bodies.probing import BodyPlace, Fill
from weft_stitch.graph import DYNAMIC, Graph, GraphStep, GraphTensor
from weft_stitch.net import Array

ConnectionSlots = Mapping[BodyValue, BodyPlace]


def port_name(body: Body, task: int, port: str) -> str:
    """The graph's name of an input or output of one of its models."""
    return f"{body.names[task]}.{port}"


class StackedPart(NamedTuple):
    """Where a graph holds a low-rank part: two stacked constants, and the index in them."""

    down: str
    up: str
    at: int


class JoinedBody(NamedTuple):
    """A graph, and the names of the models' constants in it."""

    graph: Graph
    held: Mapping[tuple[int, int], tuple[str, ...]]
    """Step and model -> the graph's names of the constants read there; empty where the graph has none."""
    parts: Mapping[tuple[int, int], StackedPart]


def join(body: Body, places: ConnectionSlots, fill: Fill | None, outputs: Mapping[str, BodyPlace]) -> JoinedBody:
    """Join all models of *body* to one graph; without a *fill*, all inputs must have one length.

    outputs: axes of rows and lengths of the models' own outputs, by the graph's names.
    """
    joiner = _Joiner(body, tuple(range(body.tasks)), places, outputs)
    graph = narrow_graph(joiner.graph("+".join(body.names), joiner.write(fill)))
    return JoinedBody(graph, joiner.held(graph.constants), joiner.stacked)


def model_graph(body: Body, task: int, values: Iterable[BodyValue] = ()) -> Graph:
    """The graph of one model, with *values* as additional outputs named by ``value_name``."""
    joiner = _Joiner(body, (task,), {}, {})
    outputs = joiner.write(None)
    outputs += [joiner.output(joiner.tensor(value, (task,)), value_name(value), ()) for value in values]
    return joiner.graph(body.names[task], outputs)


def value_name(value: BodyValue) -> str:
    return f"value {value.step} {value.output}"


class _Sized(NamedTuple):
    """Names of tensors with the number of rows and the length of a model's inputs."""

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
        """Write all steps; return the outputs of the models."""
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
        """The graph's names of the constants that models read, by step and model."""
        names = {key: name for key, name in self._stored.items() if name in constants}
        return {
            (number, task): tuple(names.get(key, "") for key in self._contents(number, task))
            for number, step in enumerate(self.body.steps)
            for task in step.contents
        }

    def crews(self, number: int) -> tuple[Crew, ...]:
        """The groups of models for which a step runs once."""
        having = [task for task in self.tasks if task in self.body.steps[number].contents]
        groups = crews({task: self._key(number, task) for task in having})
        for task in having:
            self._outline(number, task)
        return groups

    def _key(self, number: int, task: int) -> int:
        """A number that is equal for models of one crew: their constants are equal, and their inputs have equal sizes.

        Inputs without rows must have equal constants as well, because they are computed once for the crew.
        """
        if (number, task) not in self._keys:
            step = self.body.steps[number]
            read = [value for value in step.inputs if value is not None and value.step >= 0]
            below = [
                self._outline(value.step, task) if self._carries(value) else self._key(value.step, task)
                for value in read
            ]
            self._keys[number, task] = self._number_of("key", number, self._contents(number, task), *below)
        return self._keys[number, task]

    def _outline(self, number: int, task: int) -> int:
        """A number that is equal for models in which a step writes values of equal sizes."""
        if (number, task) not in self._outlines:
            step = self.body.steps[number]
            below = [self._outline(value.step, task) for value in step.inputs if value is not None and value.step >= 0]
            held = [self.body.constants.outline(key) for key in step.contents[task] if key]
            self._outlines[number, task] = self._number_of("outline", number, *held, *below)
        return self._outlines[number, task]

    def _number_of(self, *key: object) -> int:
        """The number of *key*, a new one at first use."""
        return self._numbers.setdefault(key, len(self._numbers))

    def _carries(self, value: BodyValue) -> bool:
        """Whether a value has rows; without known places there is only one model, and every value counts as having."""
        return value.step < 0 or not self.places or self.places[value].rows is not None

    def _has_rows(self, number: int) -> bool:
        outputs = self.body.steps[number].node.outputs
        return any(self._carries(BodyValue(number, place)) for place, name in enumerate(outputs) if name)

    def tensor(self, value: BodyValue, crew: Crew) -> str:
        """The tensor with a value's rows for the models of a crew, in order."""
        held = self._held.setdefault(value, {})
        if crew not in held:
            if self._carries(value):
                held[crew] = self._gather_rows(value, crew)
            else:
                self._run(value.step, crew)
        return held[crew]

    def _run(self, number: int, crew: Crew) -> None:
        step = self.body.steps[number]
        contents = self._contents(number, crew[0])
        read = [
            self._tensor_of(key) if value is None else self.tensor(value, crew)
            for value, key in zip(step.inputs, contents, strict=True)
        ]
        self._layer = step.names[crew[0]]
        if self._stacks(step) and any(task in step.lines for task in crew):
            read = self._look_up(number, crew)
        near = self._stacks(step) and any(task in step.parts for task in crew)
        whole = self._scale_rows(step, read[0], "before", crew) if near else read[0]
        outputs = [self._fresh(step.node.op) if name else "" for name in step.node.outputs]
        taken = (whole, *read[1:])
        self._steps.append(GraphStep(step.node.op, taken, tuple(outputs), step.node.attributes, self._layer))
        if near:
            self._see(BodyValue(number, 0), outputs[0])
            outputs = [self._scale_rows(step, outputs[0], "after", crew)]
            if any(step.parts[task].rank for task in crew if task in step.parts):
                added = self._parts(number, read[0], crew)
                self._see(BodyValue(number, 0), outputs[0], added)
                outputs = [self.add("Add", outputs[0], added)]
        for place, name in enumerate(outputs):
            self._held.setdefault(BodyValue(number, place), {})[crew] = name
            self._see(BodyValue(number, place), name)

    def _see(self, value: BodyValue, *tensors: str) -> None:
        """Record the observed sizes of tensors that hold a value."""
        if value in self.places:
            self._shapes |= dict.fromkeys(tensors, self.places[value].sizes)

    def _contents(self, number: int, task: int) -> tuple[str, ...]:
        """A model's constants in a step; its difference is merged into them where rows cannot select their own."""
        step = self.body.steps[number]
        contents, own = step.contents[task], step.parts.get(task) or step.lines.get(task)
        if own is None or self._stacks(step):
            return contents
        key = f"added {number} {task}"
        if key not in self._added:
            self._added[key] = own.whole(self.body.constants.arrays["".join(contents)])
        return tuple(content and key for content in contents)

    def _stacks(self, step: BodyStep) -> bool:
        """Whether each row can be multiplied by its model's own factors, or looked up in its model's own lines."""
        if step.lines:
            at = step.inputs[1]
            return at is not None and bool(self.places) and self._carries(at) and not self._inner(at)
        read = step.inputs[0]
        place = self.places.get(read) if read else None
        return place is not None and place[2:5] == (0, 1, False) and len(place.sizes) in (2, 3)

    def _parts(self, number: int, read: str, crew: Crew) -> str:
        """The low-rank contribution: each row of *read* times both factors of its model, as a grouped product."""
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
        added = self.add("MatMul", narrow, self.add("Gather", names[1], whose))
        return self.add("Squeeze", added, middle) if flat else added

    def _scale_rows(self, step: BodyStep, tensor: str, side: str, crew: Crew) -> str:
        """Scale each row by the factors of its model, before or after the product."""
        parts, whose = self._different(step.parts, crew)
        scales = [getattr(part, side, None) for part in parts]
        wide = next((len(scale) for scale in scales if scale is not None), 0)
        if not wide:
            return tensor
        stack = np.stack([np.ones(wide, np.float32) if scale is None else scale for scale in scales])
        held = self.constant(stack if self._is_flat(step) else stack[:, None])
        picked = self.add("Gather", held, whose)
        self._shapes[picked] = (DYNAMIC, wide) if self._is_flat(step) else (DYNAMIC, 1, wide)
        scaled = self.add("Mul", tensor, picked)
        if tensor in self._shapes:
            self._shapes[scaled] = self._shapes[tensor]
        return scaled

    def _is_flat(self, step: BodyStep) -> bool:
        """Whether the input of a product has no axis for the length."""
        return step.inputs[0] is not None and len(self.places[step.inputs[0]].sizes) == 2

    def _look_up(self, number: int, crew: Crew) -> list[str]:
        """The shared table with all models' own lines appended, and the indices of each row in it."""
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
        indices = [
            self.add("Gather", self.constant(part.index(firsts[id(part)])), self.tensor(at, (task,)))
            for task, part in parts.items()
        ]
        key = f"lines {number} {crew}"
        self._added[key] = np.concatenate(lines)
        joined = self.add("Concat", *indices, axis=self._axis(at)) if len(indices) > 1 else indices[0]
        return [self._tensor_of(key), joined]

    def _different(self, held: Mapping[int, LowRank], crew: Crew) -> tuple[list[LowRank | None], str]:
        """The different parts of a crew's models, and the tensor with the index of each row's part."""
        parts = {id(held.get(task)): held.get(task) for task in crew}
        return list(parts.values()), self._whose(crew, tuple(list(parts).index(id(held.get(task))) for task in crew))

    def _whose(self, crew: Crew, numbers: tuple[int, ...]) -> str:
        """The tensor with the number of each row's model."""
        if (crew, numbers) not in self._owners:
            sizes = [self._sizes[task].rows for task in crew]
            owners = [self.add("Expand", self.numbers([n]), size) for n, size in zip(numbers, sizes, strict=True)]
            self._owners[crew, numbers] = self.add("Concat", *owners, axis=0)
        return self._owners[crew, numbers]

    # Rows from crew to crew

    def _gather_rows(self, value: BodyValue, crew: Crew) -> str:
        """Concatenate a value's rows for a crew from existing tensors: of whole crews where they fit, else by model."""
        parts: list[str] = []
        left = list(crew)
        while left:
            whole = [group for group in self._held[value] if len(group) > 1 and tuple(left[: len(group)]) == group]
            mine = max(whole, key=len, default=(left[0],))
            parts.append(self._held[value][mine] if whole else self._single(value, left[0]))
            del left[: len(mine)]
        if len(parts) == 1:
            return parts[0]
        if not self._inner(value):
            joined = self.add("Concat", *parts, axis=self._axis(value))
            self._see(value, joined)
            return joined
        joined = self.add("Concat", *(self._rows_apart(value, part) for part in parts), axis=self._axis(value) + 1)
        return self._rows_beside(value, joined)

    def _single(self, value: BodyValue, task: int) -> str:
        held = self._held[value]
        if (task,) not in held:
            crew = next(group for group in held if task in group)
            sizes = self.add("Concat", *(self._sizes[member].rows for member in crew), axis=0)
            inner, place = self._inner(value), self.places[value] if value.step >= 0 else None
            if place and place.per_row != 1 and not inner:
                sizes = self.add("Mul", sizes, self.numbers([place.per_row]))
            if place and place.by_length and not inner:
                sizes = self.add("Mul", sizes, self._longest)
            names = [self._fresh("Rows") for _ in crew]
            read = (self._rows_apart(value, held[crew]) if inner else held[crew], sizes)
            axis = self._axis(value) + inner
            self._steps.append(GraphStep("Split", read, tuple(names), {"axis": axis}, self._layer))
            pieces = [self._rows_beside(value, name) for name in names] if inner else names
            self._see(value, *pieces)
            held |= {(member,): name for member, name in zip(crew, pieces, strict=True) if (member,) not in held}
        return held[task,]

    def _inner(self, value: BodyValue) -> bool:
        """Whether the rows of a value are interleaved along their axis (see ``BodyPlace.inner``)."""
        return value.step >= 0 and self.places[value].inner

    def _rows_apart(self, value: BodyValue, tensor: str) -> str:
        """Give interleaved rows an axis of their own, behind the axis that they shared."""
        place = self.places[value]
        size = self.numbers([place.per_row])
        if place.by_length:
            size = self.add("Mul", size, self._longest)
        return self._reshape(place, tensor, size, self.numbers([-1]))

    def _rows_beside(self, value: BodyValue, tensor: str) -> str:
        """Merge the axis of ``_rows_apart`` again."""
        return self._reshape(self.places[value], tensor, self.numbers([-1]))

    def _reshape(self, place: BodyPlace, tensor: str, *sizes: str) -> str:
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
            self._sizes[task] = self._size_of(task)
        lengths = [size.length for size in self._sizes.values() if size.length]
        if len(lengths) > 1:
            self._longest = self.add("Max", *lengths)
        if len(lengths) > 1 and fill is not None:
            for task in self.tasks:
                for name, port in self.body.ports[task].items():
                    if port.long:
                        held = self._held[BodyValue(-1, self.body.inputs.index(name))]
                        held[task,] = self._pad_length(held[task,], port, self._sizes[task].length, fill[name])

    def _size_of(self, task: int) -> _Sized:
        rows = length = ""
        for name, port in self.body.ports[task].items():
            shape = self.add("Shape", port_name(self.body, task, name))
            rows = rows or self.add("Gather", shape, self.numbers([0]))
            if port.long and not length:
                length = self.add("Gather", shape, self.numbers(port.long[:1]))
            if length:
                break
        return _Sized(rows, length)

    def _pad_length(self, tensor: str, port: GraphTensor, length: str, fill: float) -> str:
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
        output = self.output(tensor, name, sizes, place.dtype)
        return replace(output, length=self._length_name(task))

    def _length_name(self, task: int) -> str:
        return f"{self.body.names[task]}.length"

    # Steps and constants

    def output(self, tensor: str, name: str, shape: tuple[int, ...], dtype: str = "") -> GraphTensor:
        self._steps.append(GraphStep("Identity", (tensor,), (name,)))
        return GraphTensor(name, shape, dtype)

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = self._fresh(op)
        self._steps.append(GraphStep(op, inputs, (name,), attributes, self._layer))
        return name

    def numbers(self, numbers: Sequence[int]) -> str:
        return self.constant(np.array(numbers, np.int64))

    def constant(self, array: Array) -> str:
        return self._tensor_of(self.body.constants.keep(array))

    def _tensor_of(self, key: str) -> str:
        """The tensor of a constant; a derived one is computed where it is first read."""
        if key not in self._stored and key:
            derived = self.body.constants.derived.get(key)
            if derived is None:
                name = self._stored[key] = f"constant_{len(self._stored)}"
                self._constants[name] = self._added[key] if key in self._added else self.body.constants.arrays[key]
            else:
                read = tuple(self._tensor_of(source) for source in derived.inputs)
                outputs = tuple(self._fresh(derived.node.op) for _ in derived.node.outputs)
                self._steps.append(GraphStep(derived.node.op, read, outputs, derived.node.attributes))
                self._stored[key] = outputs[derived.output]
        return self._stored.get(key, "")

    def _fresh(self, op: str) -> str:
        self._count += 1
        return f"{op.lower()}_{self._count}"

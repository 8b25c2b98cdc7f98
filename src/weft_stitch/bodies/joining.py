"""A body -> one graph that equals its models: ``join``.

Every step runs once for each of its *crews*, models with equal constants in it, on their concatenated rows. A step's
*contents* are the keys of each model's constants, a *part* is a model's own difference to the shared weight. Where a
step's crew differs from the crew of its input, rows are split and concatenated along the axis that ``probing`` has
found. Values without rows (shapes, positions) are computed for each crew that reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft_stitch.bodies.body import INPUT_STEP, Body, BodyStep, BodyValue, Crew, LowRank, OwnLines, crews
from weft_stitch.bodies.narrowing import narrow_graph
from weft_stitch.bodies.probing import BodyPlace, Fill
from weft_stitch.graph import DYNAMIC, Graph, GraphStep, GraphTensor
from weft_stitch.net import Array

ValueLayouts = Mapping[BodyValue, BodyPlace]
"""Value between steps -> its observed layout; empty where the graph has a single model."""


def port_name(body: Body, task: int, port: str) -> str:
    """The graph's name of an input or output of model *task*."""
    return f"{body.names[task]}.{port}"


class StackedPart(NamedTuple):
    """Where a graph stores a low-rank part: constants with the factors of several models, and its number in both."""

    down: str
    """Name of the constant [parts, in, rank]."""
    up: str
    """Name of the constant [parts, rank, out]."""
    number: int


class JoinedBody(NamedTuple):
    """The graph of a body, and the graph's names of the models' constants."""

    graph: Graph
    constants: Mapping[tuple[int, int], tuple[str, ...]]
    """Step and model -> the graph's names of the constants that the model reads in that step; empty if not stored."""
    low_rank_parts: Mapping[tuple[int, int], StackedPart]
    """Step and model -> where the low-rank part of the model's weight is stored."""


def join(body: Body, places: ValueLayouts, fill: Fill | None, outputs: Mapping[str, BodyPlace]) -> JoinedBody:
    """Join all models of *body* to one graph.

    *places*: the layouts of the values. *fill*: the padding value of each input; without it, the rows of a batch must
    have one length. *outputs*: the layouts of the models' outputs, by the graph's names.
    """
    joiner = _Joiner(body, tuple(range(body.tasks)), places, outputs)
    graph = narrow_graph(joiner.graph("+".join(body.names), joiner.write(fill)))
    return JoinedBody(graph, joiner.constant_names(graph.constants), joiner.stacked)


def model_graph(body: Body, task: int, values: Iterable[BodyValue] = ()) -> Graph:
    """The graph of one model, with *values* as additional outputs that are named by ``value_name``."""
    joiner = _Joiner(body, (task,), places={}, outputs={})
    outputs = joiner.write(fill=None)
    outputs += [joiner.output(joiner.tensor(value, (task,)), value_name(value), ()) for value in values]
    return joiner.graph(body.names[task], outputs)


def value_name(value: BodyValue) -> str:
    """The name of the graph's output for an intermediate value."""
    return f"value {value.step} {value.output}"


class _InputSizes(NamedTuple):
    """Names of tensors [1] with the number of rows and the length of one model's inputs."""

    rows: str
    length: str
    """Empty if the inputs have fixed sizes."""


class _Joiner:
    """Writes a graph for the models *tasks* of a body. *places*, *outputs*: see ``join``."""

    def __init__(self, body: Body, tasks: Crew, places: ValueLayouts, outputs: Mapping[str, BodyPlace]) -> None:
        self.body, self.tasks, self.places, self._outputs = body, tasks, places, outputs
        self._steps: list[GraphStep] = []
        self._constants: dict[str, Array] = {}
        self._constant_names: dict[str, str] = {}
        """Key of a constant -> its name in the graph."""
        self._tensors: dict[BodyValue, dict[Crew, str]] = {}
        """Value -> crew -> the tensor with the rows of the crew's models."""
        self._inputs: list[GraphTensor] = []
        self._sizes: dict[int, _InputSizes] = {}
        """Model -> the tensors with the number of rows and the length of its inputs."""
        self._longest = ""
        """The tensor with the largest length of all models' inputs; empty for a single model."""
        self._owners: dict[tuple[Crew, tuple[int, ...]], str] = {}
        """Crew and an index for each of its models (e.g. which of the distinct parts it has) -> the tensor [rows] with
        the index of each row's model."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Tensor -> its observed shape, as far as known."""
        self._merged: dict[str, Array] = {}
        """Key -> a constant that is computed here, such as a weight with a model's difference merged into it."""
        self.stacked: dict[tuple[int, int], StackedPart] = {}
        """Step and model -> where its low-rank part is stored."""
        self._layer = ""
        """Name of the step that is being written, for messages and the graph's steps."""
        self._crew_keys: dict[tuple[int, int], int] = {}
        """Step and model -> what ``_crew_key`` returned: equal for models of one crew."""
        self._size_keys: dict[tuple[int, int], int] = {}
        """Step and model -> what ``_size_key`` returned: equal for values of equal sizes."""
        self._key_numbers: dict[object, int] = {}
        """Key (a tuple) -> the small number that stands for it, also inside other keys."""
        self._names_given = 0

    def write(self, fill: Fill | None) -> list[GraphTensor]:
        """Write all steps; return the outputs of all models. *fill*: see ``join``; None: inputs are not padded."""
        self._read_inputs(fill)
        for number in range(len(self.body.steps)):
            # called for every step in order, so that keys of earlier steps are cached and the recursion stays shallow
            step_crews = self.crews(number)
            for crew in step_crews if self._step_has_rows(number) else ():
                self._write_step(number, crew)
        self._layer = ""
        return [self._write_output(task, port, fill) for task in self.tasks for port in self.body.outputs[task]]

    def graph(self, name: str, outputs: Sequence[GraphTensor]) -> Graph:
        """The graph of all steps written so far."""
        constants = dict(self._constants)
        weights = frozenset(name for name, array in constants.items() if array.ndim > 1 and array.dtype.kind == "f")
        steps, opset = tuple(self._steps), self.body.opset
        return Graph(name, tuple(self._inputs), tuple(outputs), steps, constants, weights, self._shapes, opset=opset)

    def constant_names(self, constants: Mapping[str, Array]) -> dict[tuple[int, int], tuple[str, ...]]:
        """Step and model -> the graph's names of the constants that the model reads; empty if not in *constants*."""
        names = {key: name for key, name in self._constant_names.items() if name in constants}
        return {
            (number, task): tuple(names.get(key, "") for key in self._contents(number, task))
            for number, step in enumerate(self.body.steps)
            for task in step.contents
        }

    def crews(self, number: int) -> tuple[Crew, ...]:
        """The crews of a step: groups of models for which it runs once."""
        present = [task for task in self.tasks if task in self.body.steps[number].contents]
        groups = crews({task: self._crew_key(number, task) for task in present})
        for task in present:
            self._size_key(number, task)  # to cache it, see ``write``
        return groups

    def _crew_key(self, number: int, task: int) -> int:
        """A number that is equal for models of one crew: their constants are equal, and their inputs have equal sizes.

        Inputs without rows must be computed from equal constants as well, because they are computed once for the crew.
        """
        if (number, task) not in self._crew_keys:
            step = self.body.steps[number]
            read = [value for value in step.inputs if value is not None and not value.is_input]
            input_keys = [
                self._size_key(value.step, task) if self._value_has_rows(value) else self._crew_key(value.step, task)
                for value in read
            ]
            self._crew_keys[number, task] = self._number_for("key", number, self._contents(number, task), *input_keys)
        return self._crew_keys[number, task]

    def _size_key(self, number: int, task: int) -> int:
        """A number that is equal for models in which a step writes values of equal sizes."""
        if (number, task) not in self._size_keys:
            step = self.body.steps[number]
            read = [value for value in step.inputs if value is not None and not value.is_input]
            input_keys = [self._size_key(value.step, task) for value in read]
            # equal for constants of equal sizes
            outlines = [self.body.constants.size_key(key) for key in step.contents[task] if key]
            self._size_keys[number, task] = self._number_for("outline", number, *outlines, *input_keys)
        return self._size_keys[number, task]

    def _number_for(self, *key: object) -> int:
        """The number of *key*; a new number at its first use."""
        return self._key_numbers.setdefault(key, len(self._key_numbers))

    def _value_has_rows(self, value: BodyValue) -> bool:
        """Whether a value has rows.

        Without known layouts there is one model only, and every value counts as having rows.
        """
        return value.is_input or not self.places or self.places[value].row_axis is not None

    def _step_has_rows(self, number: int) -> bool:
        """Whether any output of step *number* has rows."""
        outputs = self.body.steps[number].node.outputs
        return any(self._value_has_rows(BodyValue(number, index)) for index, name in enumerate(outputs) if name)

    def tensor(self, value: BodyValue, crew: Crew) -> str:
        """The tensor with a value's rows for the models of *crew*, in order; made at first use.

        A value with rows is gathered from the crews for which ``write`` has written its step; a step whose values have
        none, such as sizes, is written here.
        """
        by_crew = self._tensors.setdefault(value, {})
        if crew not in by_crew:
            if self._value_has_rows(value):
                by_crew[crew] = self._gather_rows(value, crew)
            else:
                self._write_step(value.step, crew)  # enters its outputs into ``_tensors``, so into by_crew
        return by_crew[crew]

    def _write_step(self, number: int, crew: Crew) -> None:
        """Write step *number* for the models of *crew*, with their differences to the weight; fill ``_tensors``."""
        step = self.body.steps[number]
        contents = self._contents(number, crew[0])
        operands = [
            self._tensor_of(key) if value is None else self.tensor(value, crew)
            for value, key in zip(step.inputs, contents, strict=True)
        ]
        self._layer = step.names[crew[0]]
        if self._applies_by_row(step) and any(task in step.lines for task in crew):
            operands = self._extend_table(number, crew)
        has_differences = self._applies_by_row(step) and any(task in step.parts for task in crew)
        first_input = self._scale_rows(step, operands[0], "before", crew) if has_differences else operands[0]
        outputs = [self._fresh(step.node.op) if name else "" for name in step.node.outputs]
        inputs = (first_input, *operands[1:])
        self._steps.append(GraphStep(step.node.op, inputs, tuple(outputs), step.node.attributes, self._layer))
        if has_differences:
            self._record_sizes(BodyValue(number, 0), outputs[0])
            outputs = [self._scale_rows(step, outputs[0], "after", crew)]
            if any(step.parts[task].rank for task in crew if task in step.parts):
                low_rank = self._write_low_rank(number, operands[0], crew)
                self._record_sizes(BodyValue(number, 0), outputs[0], low_rank)
                outputs = [self.add("Add", outputs[0], low_rank)]
        for output_index, name in enumerate(outputs):
            self._tensors.setdefault(BodyValue(number, output_index), {})[crew] = name
            self._record_sizes(BodyValue(number, output_index), name)

    def _record_sizes(self, value: BodyValue, *tensors: str) -> None:
        """Record the observed sizes of *value* as the shape of *tensors*."""
        if value in self.places:
            self._shapes |= dict.fromkeys(tensors, self.places[value].sizes)

    def _contents(self, number: int, task: int) -> tuple[str, ...]:
        """The keys of a model's constants in a step, one per input; empty for inputs that are no constants.

        Its difference to the shared weight is merged into the weight if the step cannot apply it row by row
        (``_applies_by_row``).
        """
        step = self.body.steps[number]
        contents, difference = step.contents[task], step.parts.get(task) or step.lines.get(task)
        if difference is None or self._applies_by_row(step):
            return contents
        key = f"added {number} {task}"
        if key not in self._merged:
            weight_key = "".join(contents)  # the other inputs are no constants, so that their keys are empty
            self._merged[key] = difference.apply(self.body.constants.arrays[weight_key])
        return tuple(content and key for content in contents)

    def _applies_by_row(self, step: BodyStep) -> bool:
        """Whether a step can apply its model's own difference to each row: low-rank factors, or lines of a table."""
        if step.lines:
            index = step.inputs[1]
            if index is None or not self.places:
                return False
            return self._value_has_rows(index) and not self._is_interleaved(index)
        source = step.inputs[0]
        place = self.places.get(source) if source else None
        has_one_entry_per_row = place is not None and (place.row_axis, place.per_row, place.by_length) == (0, 1, False)
        if place is None or not has_one_entry_per_row:
            return False
        return len(place.sizes) in (2, 3)  # [rows, features] or [rows, length, features]

    def _write_low_rank(self, number: int, source: str, crew: Crew) -> str:
        """Multiply each row of *source* by both low-rank factors of its model: a batched product, one batch per row."""
        step = self.body.steps[number]
        parts, part_of_row = self._distinct_parts(step.parts, crew)
        rank = max(part.rank for part in parts if part)
        weight = self.body.constants.arrays[step.contents[crew[0]][1]]  # of a product, the second input
        down = np.zeros((len(parts), weight.shape[0], rank), np.float32)
        up = np.zeros((len(parts), rank, weight.shape[1]), np.float32)
        for index, part in enumerate(parts):
            if part:
                down[index, :, : part.rank], up[index, : part.rank] = part.down, part.up
        down_name, up_name = self.constant(down), self.constant(up)
        part_index = {id(part): index for index, part in enumerate(parts)}
        self.stacked |= {
            (number, task): StackedPart(down_name, up_name, part_index[id(step.parts.get(task))]) for task in crew
        }
        length_axis, flat = self.numbers([1]), self._is_flat(step)
        vectors = self.add("Unsqueeze", source, length_axis) if flat else source
        projected = self.add("MatMul", vectors, self.add("Gather", down_name, part_of_row))
        if step.inputs[0] is not None and not flat:
            self._shapes[projected] = (*self.places[step.inputs[0]].sizes[:-1], rank)
        product = self.add("MatMul", projected, self.add("Gather", up_name, part_of_row))
        return self.add("Squeeze", product, length_axis) if flat else product

    def _scale_rows(self, step: BodyStep, tensor: str, side: str, crew: Crew) -> str:
        """Multiply each row of *tensor* by its model's scales: ``LowRank.before`` or ``after``, as *side* says."""
        parts, part_of_row = self._distinct_parts(step.parts, crew)
        scales = [getattr(part, side, None) for part in parts]
        width = next((len(scale) for scale in scales if scale is not None), 0)
        if not width:
            return tensor
        by_part = np.stack([np.ones(width, np.float32) if scale is None else scale for scale in scales])
        table = self.constant(by_part if self._is_flat(step) else by_part[:, None])
        row_scales = self.add("Gather", table, part_of_row)
        self._shapes[row_scales] = (DYNAMIC, width) if self._is_flat(step) else (DYNAMIC, 1, width)
        scaled = self.add("Mul", tensor, row_scales)
        if tensor in self._shapes:
            self._shapes[scaled] = self._shapes[tensor]
        return scaled

    def _is_flat(self, step: BodyStep) -> bool:
        """Whether the input of a product has rows of vectors, without an axis for the length."""
        return step.inputs[0] is not None and len(self.places[step.inputs[0]].sizes) == 2

    def _extend_table(self, number: int, crew: Crew) -> list[str]:
        """The inputs of a lookup: the shared table with all models' own lines appended, and rows' indices in it."""
        step = self.body.steps[number]
        contents, index = step.contents[crew[0]], step.inputs[1]
        assert index is not None
        table = self.body.constants.arrays[contents[0]]
        no_lines = OwnLines(len(table), indices=np.arange(0), lines=table[:0])
        first_lines, lines = {}, [table]  # id of a part -> its first line in the table of all *lines*
        parts = {task: step.lines.get(task, no_lines) for task in crew}
        for part in parts.values():
            if id(part) not in first_lines:
                first_lines[id(part)] = sum(map(len, lines))
                lines.append(part.lines)
        indices = [
            self.add("Gather", self.constant(part.index(first_lines[id(part)])), self.tensor(index, (task,)))
            for task, part in parts.items()
        ]
        key = f"lines {number} {crew}"
        self._merged[key] = np.concatenate(lines)
        all_indices = self.add("Concat", *indices, axis=self._axis(index)) if len(indices) > 1 else indices[0]
        return [self._tensor_of(key), all_indices]

    def _distinct_parts(self, parts_of: Mapping[int, LowRank], crew: Crew) -> tuple[list[LowRank | None], str]:
        """The distinct parts of a crew's models (None: no part), and the tensor with the index of each row's part."""
        parts = {id(parts_of.get(task)): parts_of.get(task) for task in crew}
        indices = tuple(list(parts).index(id(parts_of.get(task))) for task in crew)
        return list(parts.values()), self._row_indices(crew, indices)

    def _row_indices(self, crew: Crew, indices: tuple[int, ...]) -> str:
        """The tensor [rows] with the index of each row's model. *indices*: one for each model of *crew*."""
        if (crew, indices) not in self._owners:
            sizes = [self._sizes[task].rows for task in crew]
            owners = [self.add("Expand", self.numbers([i]), size) for i, size in zip(indices, sizes, strict=True)]
            self._owners[crew, indices] = self.add("Concat", *owners, axis=0)
        return self._owners[crew, indices]

    # Rows from crew to crew

    def _gather_rows(self, value: BodyValue, crew: Crew) -> str:
        """Concatenate a value's rows for *crew* from existing tensors: of whole crews where they fit, else by model."""
        parts: list[str] = []
        models = list(crew)  # those whose rows are not in *parts* yet
        while models:
            fitting = [
                group for group in self._tensors[value] if len(group) > 1 and tuple(models[: len(group)]) == group
            ]
            group = max(fitting, key=len, default=(models[0],))
            parts.append(self._tensors[value][group] if fitting else self._single_model(value, models[0]))
            del models[: len(group)]
        if len(parts) == 1:
            return parts[0]
        if not self._is_interleaved(value):
            joined = self.add("Concat", *parts, axis=self._axis(value))
            self._record_sizes(value, joined)
            return joined
        joined = self.add(
            "Concat", *(self._split_interleaved(value, part) for part in parts), axis=self._axis(value) + 1
        )
        return self._merge_interleaved(value, joined)

    def _single_model(self, value: BodyValue, task: int) -> str:
        """The tensor with a value's rows for one model, cut out of a crew's tensor if need be."""
        by_crew = self._tensors[value]
        if (task,) not in by_crew:
            crew = next(group for group in by_crew if task in group)
            # the number of each model's entries along the axis: first its rows
            sizes = self.add("Concat", *(self._sizes[member].rows for member in crew), axis=0)
            interleaved, place = self._is_interleaved(value), None if value.is_input else self.places[value]
            if place and place.per_row != 1 and not interleaved:
                sizes = self.add("Mul", sizes, self.numbers([place.per_row]))
            if place and place.by_length and not interleaved:
                sizes = self.add("Mul", sizes, self._longest)
            names = [self._fresh("Rows") for _ in crew]
            inputs = (self._split_interleaved(value, by_crew[crew]) if interleaved else by_crew[crew], sizes)
            axis = self._axis(value) + interleaved
            self._steps.append(GraphStep("Split", inputs, tuple(names), {"axis": axis}, self._layer))
            pieces = [self._merge_interleaved(value, name) for name in names] if interleaved else names
            self._record_sizes(value, *pieces)
            by_crew |= {(member,): name for member, name in zip(crew, pieces, strict=True) if (member,) not in by_crew}
        return by_crew[task,]

    def _is_interleaved(self, value: BodyValue) -> bool:
        """Whether the rows of a value are interleaved along their axis (see ``BodyPlace.interleaved``)."""
        return not value.is_input and self.places[value].interleaved

    def _split_interleaved(self, value: BodyValue, tensor: str) -> str:
        """Give interleaved rows an axis of their own, right behind the axis that they shared with other numbers."""
        place = self.places[value]
        size = self.numbers([place.per_row])
        if place.by_length:
            size = self.add("Mul", size, self._longest)
        return self._reshape(place, tensor, size, self.numbers([-1]))

    def _merge_interleaved(self, value: BodyValue, tensor: str) -> str:
        """Undo ``_split_interleaved``."""
        return self._reshape(self.places[value], tensor, self.numbers([-1]))

    def _reshape(self, place: BodyPlace, tensor: str, *sizes: str) -> str:
        """Reshape *tensor*: its row axis is replaced by axes of *sizes*, tensors of shape [1]."""
        axis = place.row_axis or 0
        if any(long > axis for long in place.length_axes):
            raise StitchError(f"{self._layer} has rows side by side in front of a length; it cannot be stitched")
        later_sizes = self.numbers(place.sizes[axis + 1 :])
        shape = self.add("Concat", self.numbers([0] * axis), *sizes, later_sizes, axis=0)
        return self.add("Reshape", tensor, shape)

    def _axis(self, value: BodyValue) -> int:
        """The axis of the rows of a value."""
        return 0 if value.is_input else self.places[value].row_axis or 0

    # Inputs and outputs

    def _read_inputs(self, fill: Fill | None) -> None:
        """Add the inputs of all models, and pad them to the longest of the models with *fill*."""
        for task in self.tasks:
            for name, port in self.body.ports[task].items():
                input_name = port_name(self.body, task, name)
                self._inputs.append(replace(port, name=input_name, length=self._length_name(task)))
                self._tensors.setdefault(BodyValue(INPUT_STEP, self.body.inputs.index(name)), {})[task,] = input_name
            self._sizes[task] = self._input_sizes(task)
        lengths = [size.length for size in self._sizes.values() if size.length]
        if len(lengths) > 1:
            self._longest = self.add("Max", *lengths)
        if len(lengths) > 1 and fill is not None:
            for task in self.tasks:
                for name, port in self.body.ports[task].items():
                    if port.long:
                        by_crew = self._tensors[BodyValue(INPUT_STEP, self.body.inputs.index(name))]
                        by_crew[task,] = self._pad_length(by_crew[task,], port, self._sizes[task].length, fill[name])

    def _input_sizes(self, task: int) -> _InputSizes:
        """The number of rows and the length of a model's inputs, read at run time."""
        rows = length = ""
        for name, port in self.body.ports[task].items():
            shape = self.add("Shape", port_name(self.body, task, name))
            rows = rows or self.add("Gather", shape, self.numbers([0]))
            if port.long and not length:
                length = self.add("Gather", shape, self.numbers(port.long[:1]))
            if length:
                break
        return _InputSizes(rows, length)

    def _pad_length(self, tensor: str, port: GraphTensor, length: str, fill: float) -> str:
        """Pad *tensor* from *length* to the longest length of all models."""
        missing, zero = self.add("Sub", self._longest, length), self.numbers([0])
        ends = [missing if axis in port.long else zero for axis in range(len(port.shape))]
        pads = self.add("Concat", *[zero] * len(port.shape), *ends, axis=0)
        return self.add("Pad", tensor, pads, self.constant(np.array(fill, port.dtype)))

    def _write_output(self, task: int, port: str, fill: Fill | None) -> GraphTensor:
        """Add an output of a model, cut to the length of the model's inputs."""
        name = port_name(self.body, task, port)
        tensor, place = self.tensor(self.body.outputs[task][port], (task,)), self._outputs.get(name)
        if place is None:
            return self.output(tensor, name, ())
        sizes = tuple(DYNAMIC if axis in (0, *place.length_axes) else size for axis, size in enumerate(place.sizes))
        if place.length_axes and len(self.tasks) > 1 and fill is not None:
            if not place.as_long:
                raise StitchError(f"{name} is not as long as the inputs; it cannot be cut to the length of a row")
            for axis in place.length_axes:
                tensor = self.add("Slice", tensor, self.numbers([0]), self._sizes[task].length, self.numbers([axis]))
        output = self.output(tensor, name, sizes, place.dtype)
        return replace(output, length=self._length_name(task))

    def _length_name(self, task: int) -> str:
        """The symbolic name of the length of a model's inputs."""
        return f"{self.body.names[task]}.length"

    # Steps and constants

    def output(self, tensor: str, name: str, shape: tuple[int, ...], dtype: str = "") -> GraphTensor:
        """Write *tensor* as an output called *name*, and return its declaration."""
        self._steps.append(GraphStep("Identity", (tensor,), (name,)))
        return GraphTensor(name, shape, dtype)

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a step with one output, and return the output's name."""
        name = self._fresh(op)
        self._steps.append(GraphStep(op, inputs, (name,), attributes, self._layer))
        return name

    def numbers(self, numbers: Sequence[int]) -> str:
        """The tensor of an int64 constant."""
        return self.constant(np.array(numbers, np.int64))

    def constant(self, array: Array) -> str:
        """The tensor of a constant, which is stored once for equal arrays."""
        return self._tensor_of(self.body.constants.keep(array))

    def _tensor_of(self, key: str) -> str:
        """The tensor of the constant with *key*; a derived constant is computed at its first use.

        Empty for an empty key.
        """
        if key not in self._constant_names and key:
            derived = self.body.constants.derived.get(key)
            if derived is None:
                name = self._constant_names[key] = f"constant_{len(self._constant_names)}"
                self._constants[name] = self._merged[key] if key in self._merged else self.body.constants.arrays[key]
            else:
                read = tuple(self._tensor_of(source) for source in derived.inputs)
                outputs = tuple(self._fresh(derived.node.op) for _ in derived.node.outputs)
                self._steps.append(GraphStep(derived.node.op, read, outputs, derived.node.attributes))
                self._constant_names[key] = outputs[derived.output]
        return self._constant_names.get(key, "")

    def _fresh(self, op: str) -> str:
        self._names_given += 1
        return f"{op.lower()}_{self._names_given}"

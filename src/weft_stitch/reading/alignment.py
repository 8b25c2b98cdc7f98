"""Match the operations of several models: ``align``.

A *task* is one of the models, by its index. Values of the family have the names of task 0's values. Operations are
matched by what they read, from the inputs on, never by their place in the file. Where several
operations read the same value in the same way (the branches of a block), what follows them decides: the whole rest of
the model if it is equal, else as many steps ahead as possible; between equal branches the weights they have in common,
then the name, then the order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from weft.base.errors import StitchError
from weft_stitch.family import Family, FamilyLayer
from weft_stitch.net import Net, Op, Port, Value

COMMUTATIVE = ("add", "mul")
"""Kinds whose inputs may come in any order."""

_NOUNS = {
    "affine": "scale and shift per channel",
    "add": "addition",
    "mul": "multiplication",
    "concat": "concatenation",
    "max_pool": "max pool",
    "avg_pool": "average pool",
    "global_pool": "global average pool",
}
"""Kind of operation -> what messages call it."""


def layer_key(net: Net, op: Op) -> Hashable:
    """A key that is equal for operations that can be one layer; widths, weights and names do not count."""
    return tuple(_properties(net, op))


def difference(net: Net, op: Op, other_net: Net, other: Op) -> tuple[str, str]:
    """The text of both operations, with the first property in which they differ."""
    text, other_text = describe_kind(op), describe_kind(other)
    if text != other_text:
        return text, other_text
    pairs = zip(_properties(net, op), _properties(other_net, other), strict=False)
    for (label, value), (_, other_value) in pairs:
        if value != other_value:
            return f"{text} with {label} {_text(value)}", f"one with {label} {_text(other_value)}"
    return text, other_text


def describe_kind(op: Op) -> str:
    """The kind of *op* in words, with its article."""
    words = _NOUNS.get(op.kind) or op.function or op.kind
    if op.kind == "conv":
        words = "convolution"
        if op.depthwise:
            words = "depthwise convolution"
        elif op.groups > 1:
            words = f"convolution in {op.groups} groups"
    if op.kind == "island":
        words = f"foreign operator ({op.payload.signature})"
    if op.kind in ("conv", "max_pool", "avg_pool"):
        words = f"{op.window.kernel[0]}x{op.window.kernel[1]} {words}"
    return f"{'an' if words[0] in 'aeiouAEIOU8' else 'a'} {words}"  # an 8x8 convolution


def _properties(net: Net, op: Op) -> Iterator[tuple[str, Hashable]]:
    """The properties, by name, in which operations of one layer agree; a message names the first that differs."""
    yield "kind", op.kind
    yield "function", op.function
    yield "kernel", op.window.kernel
    yield "stride", op.window.strides
    yield "padding", op.window.pads
    yield "dilation", op.window.dilations
    yield "groups", _group_property(op)
    yield "settings", tuple(sorted((name, float(number)) for name, number in op.settings.items()))
    yield "operator", op.payload.signature if op.kind == "island" else ""
    yield "input count", len(op.inputs)
    size = net.values[op.output]
    yield "a picture of", (size.height, size.width)
    if op.kind in COMMUTATIVE:
        yield "broadcasts of", tuple(sorted(_operand_shapes(net, op)))


def _group_property(op: Op) -> Hashable:
    """The number of groups; for a depthwise convolution the number of outputs per channel."""
    if op.depthwise and op.weight is not None:
        return "each channel", op.weight.shape[0] // op.groups
    return op.groups


def _operand_shapes(net: Net, op: Op) -> Iterator[tuple[bool, int, int]]:
    """For each operand, whether one channel is broadcast to all, and its height and width."""
    result = net.values[op.output]
    for name in op.inputs:
        size = net.values[name]
        yield size.channels != result.channels, size.height, size.width


def _text(value: Hashable) -> str:
    """A property's value as text."""
    if not isinstance(value, tuple):
        return str(value)
    if value and isinstance(value[0], tuple):
        return ", ".join(" ".join(map(str, entry)) for entry in value)
    return " x ".join(map(str, value)) if value else "none"


_STEPS_AHEAD = 24
"""Operations of look-ahead where models do not end alike: more than the longest branch of known blocks.

Each step numbers all values again, which costs time.
"""
_ISLANDS_HINT = "islands = True runs what differs separately"
"""The end of messages about models that differ."""


def align(nets: Sequence[Net], *, islands: bool = False) -> Family:
    """Match the operations of *nets* and return them as one family.

    Widths, class counts and batches may differ; kinds, windows, functions and the sizes of pictures may not. *islands*:
    each model keeps what the others do not have as its *tail*; without it, a difference is a ``StitchError``. Models of
    one name get a number.
    """
    if not nets:
        raise StitchError("no models to stitch; give at least one")
    nets = _match_inputs(_rename_uniquely(nets))
    alignment = _Alignment([_AlignedModel(net) for net in nets], _output_marks(nets))
    layers = []
    for op in nets[0].ops:
        ops = alignment.match(op)
        if ops:
            layers.append(FamilyLayer(ops, op.inputs, op.output))
        elif not islands:
            raise StitchError(f"{alignment.first_difference(op)}; {_ISLANDS_HINT}")
    family = alignment.family(tuple(nets), layers)
    if not islands:
        _require_all_matched(family, alignment.tasks)
    elif not any(layer.op.kind == "conv" for layer in layers) and len(nets) > 1:
        raise StitchError(f"nothing to stitch: {_reason_without_layers(nets[0], alignment)}")
    return family


@dataclass(eq=False)
class _AlignedModel:
    """A model during the alignment: its matched values, and numbers for the operations that follow each value."""

    net: Net
    names: dict[str, str] = field(default_factory=dict)
    """Family value (task 0's name) -> this model's value."""
    used: set[str] = field(default_factory=set)
    """Outputs of the operations that belong to a layer already."""

    def __post_init__(self) -> None:
        self.readers: dict[str, list[tuple[Op, int]]] = defaultdict(list)
        """Value -> the operations that read it, each with the index of the input (0 if inputs commute)."""
        for op in self.net.ops:
            for index, value in enumerate(op.inputs):
                self.readers[value].append((op, 0 if op.kind in COMMUTATIVE else index))
        self.layer_keys = {op.output: layer_key(self.net, op) for op in self.net.ops}
        self.writers = {op.output: op for op in self.net.ops}
        self.ahead: list[dict[str, int]] = []
        """For each look-ahead, value -> a number for the operations that follow it, equal where these are equal.

        The first look-ahead is up to the outputs. If the models differ, those of 24 steps, 23, and so on follow.
        """

    @property
    def values(self) -> list[str]:
        """All values, in the order in which they are computed."""
        return [port.value for port in self.net.inputs] + [op.output for op in self.net.ops]

    def unused(self, value: str) -> list[Op]:
        """The operations that read *value* and belong to no layer yet."""
        readers = {op.output: op for op, _ in self.readers[value] if op.output not in self.used}
        return list(readers.values())


class _Alignment:
    """Matches task 0's operations with those of the other tasks, in order."""

    def __init__(self, tasks: list[_AlignedModel], marks: list[dict[str, Hashable]]) -> None:
        """*marks*: for each task, its outputs (see ``_output_marks``)."""
        self.tasks = tasks
        self._numbers: dict[Hashable, int] = {}
        """Key of ``_number`` or layer key -> its number, the same in all tasks."""
        input_names = [port.value for port in tasks[0].net.inputs]
        for task, mark in zip(tasks, marks, strict=True):
            task.names.update(zip(input_names, (port.value for port in task.net.inputs), strict=True))
            task.ahead.append(self._all_ahead(task, mark))
        at_inputs = [[task.ahead[0][port.value] for port in task.net.inputs] for task in tasks]
        if any(numbers != at_inputs[0] for numbers in at_inputs):  # the models are not equal as a whole
            for task, mark in zip(tasks, marks, strict=True):
                task.ahead += self._some_ahead(task, mark)

    def match(self, op: Op) -> tuple[Op, ...]:
        """The operations of all tasks that match *op*, with inputs in the order of *op*; empty if a task has none."""
        counterparts = [self._counterpart(task, op) for task in self.tasks[1:]]
        ops = [op, *(counterpart for counterpart in counterparts if counterpart is not None)]
        if len(ops) < len(self.tasks) or any(value not in self.tasks[0].names for value in op.inputs):
            return ()
        for task, counterpart in zip(self.tasks, ops, strict=True):
            task.names[op.output] = counterpart.output
            task.used.add(counterpart.output)
        return tuple(
            replace(counterpart, inputs=tuple(task.names[value] for value in op.inputs))
            for task, counterpart in zip(self.tasks, ops, strict=True)
        )

    def _counterpart(self, task: _AlignedModel, op: Op) -> Op | None:
        """The operation of *task* that matches *op*; None if there is none.

        Of several candidates, that whose following operations agree best is taken, then that with the most equal
        weights, then that of the same name.
        """
        first = self.tasks[0]
        inputs = [task.names.get(value) for value in op.inputs]
        if inputs[0] is None:
            return None
        wanted_key = first.layer_keys[op.output]
        candidates = [
            candidate
            for candidate in task.unused(inputs[0])
            if task.layer_keys[candidate.output] == wanted_key and _same_inputs(candidate, inputs)
        ]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        # whether the numbers agree, for each look-ahead: the longest one decides first when tuples are compared
        levels = list(zip(first.ahead, task.ahead, strict=True))
        agreement = [tuple(ahead[op.output] == other[rival.output] for ahead, other in levels) for rival in candidates]
        candidates = [rival for rival, agrees in zip(candidates, agreement, strict=True) if agrees == max(agreement)]
        if len(candidates) == 1:  # comparing weights takes time
            return candidates[0]
        return max(candidates, key=lambda rival: (_equal_weights(op, rival), rival.name == op.name))

    def family(self, nets: tuple[Net, ...], layers: list[FamilyLayer]) -> Family:
        """The family of the matched *layers*; operations that no layer has become tails."""
        first, tasks = self.tasks[0], self.tasks
        values: dict[str, tuple[Value, ...]] = {
            name: tuple(task.net.values[task.names[name]] for task in tasks) for name in first.names
        }
        outputs = self._outputs()
        inputs = tuple(port.value for port in first.net.inputs)
        tails = tuple(tuple(op for op in task.net.ops if op.output not in task.used) for task in tasks)
        # what each model's tail and own outputs read of the family
        bridges = tuple(
            _bridge(task, tail, outputs, index) for index, (task, tail) in enumerate(zip(tasks, tails, strict=True))
        )
        if not any(tails) and not any(bridges):
            tails, bridges = (), ()
        return Family(nets, tuple(layers), values, inputs, outputs, tails, bridges)

    def _outputs(self) -> dict[str, tuple[Port, ...]]:
        """Values that are an output of every model -> each model's port."""
        outputs: dict[str, tuple[Port, ...]] = {}
        ports = [{port.value: port for port in task.net.outputs} for task in self.tasks]
        for value in ports[0]:
            matching = [port_of.get(task.names.get(value, "")) for task, port_of in zip(self.tasks, ports, strict=True)]
            if all(matching):
                outputs[value] = tuple(port for port in matching if port is not None)
        return outputs

    def first_difference(self, op: Op) -> str:
        """The text of the message that *op* of task 0 has no counterpart in some task."""
        first = self.tasks[0]
        for task in self.tasks[1:]:
            if self._counterpart(task, op) is None:  # always so for some task, as ``match`` has failed
                break
        name, other_name = first.net.name, task.net.name
        rivals = task.unused(task.names.get(op.inputs[0], ""))
        if not rivals:
            source = first.writers.get(op.inputs[0])
            place = source.name if source else "its input"
            return f"{op.name} of {name} is {describe_kind(op)} after {place}; {other_name} has nothing in that place"
        # the most similar one: of the same kind and name if possible
        rival = min(rivals, key=lambda candidate: (candidate.kind != op.kind, candidate.name != op.name))
        text, other_text = difference(first.net, op, task.net, rival)
        if text == other_text:
            return f"{op.name} of {name} and {rival.name} of {other_name} are both {text}, but read different values"
        return f"{op.name} of {name} is {text}, {rival.name} of {other_name} {other_text}"

    def _all_ahead(self, task: _AlignedModel, marks: Mapping[str, Hashable]) -> dict[str, int]:
        """Value -> a number for all operations that follow it up to the outputs. *marks*: see ``_number``."""
        ahead: dict[str, int] = {}
        for value in reversed(task.values):
            ahead[value] = self._number(task, value, marks, ahead)
        return ahead

    def _some_ahead(self, task: _AlignedModel, marks: Mapping[str, Hashable]) -> list[dict[str, int]]:
        """For 24 steps ahead, then 23, down to 1: value -> a number for the operations within these steps."""
        levels = [dict.fromkeys(task.values, 0)]  # for 0 steps, 1 step, and so on
        for _ in range(_STEPS_AHEAD):
            levels.append({value: self._number(task, value, marks, levels[-1]) for value in task.values})
        return levels[:0:-1]  # without that for 0 steps

    def _number(self, task: _AlignedModel, value: str, marks: Mapping[str, Hashable], ahead: Mapping[str, int]) -> int:
        """A number for the operations that read *value*: equal for equal layer keys, input indices and outputs.

        *ahead*: the numbers of their outputs, for one step less. *marks*: the task's outputs (see ``_output_marks``).
        """
        layer_numbers = (
            self._numbers.setdefault(task.layer_keys[op.output], len(self._numbers)) for op, _ in task.readers[value]
        )
        reading_ops = zip(layer_numbers, ((index, ahead[op.output]) for op, index in task.readers[value]), strict=True)
        key = (marks.get(value), tuple(sorted(reading_ops)))
        return self._numbers.setdefault(key, len(self._numbers))


def _same_inputs(op: Op, inputs: Sequence[str | None]) -> bool:
    """Whether *op* reads *inputs*, in any order if it is commutative."""
    if op.kind in COMMUTATIVE:
        return None not in inputs and sorted(op.inputs) == sorted(name or "" for name in inputs)
    return op.inputs == tuple(inputs)


def _equal_weights(op: Op, other: Op) -> int:
    """The number of distinct weights that two operations have in common, at any place in their arrays."""
    pairs = ((op.weight, other.weight), (op.scale, other.scale), (op.shift, other.shift))
    return sum(np.intersect1d(left, right).size for left, right in pairs if left is not None and right is not None)


def _bridge(
    task: _AlignedModel, tail: Sequence[Op], outputs: Mapping[str, tuple[Port, ...]], index: int
) -> dict[str, str]:
    """Name in the model -> name in the family, for values of common layers that the model itself needs.

    These are values that its *tail* reads, or that it outputs and some model does not. *index*: the model's task.
    """
    family_names = {model_name: name for name, model_name in task.names.items()}
    family_outputs = {ports[index].value for ports in outputs.values()}
    needed = [value for op in tail for value in op.inputs]
    needed += [port.value for port in task.net.outputs if port.value not in family_outputs]
    return {value: family_names[value] for value in needed if value in family_names}


def _require_all_matched(family: Family, tasks: Sequence[_AlignedModel]) -> None:
    """Raise ``StitchError`` for an operation or an output of any model that has no counterpart in all others."""
    first = tasks[0].net
    for task in tasks:
        if unmatched := [op for op in task.net.ops if op.output not in task.used]:
            op = unmatched[0]
            words = f"{op.name} of {task.net.name} is {describe_kind(op)}, {first.name} has nothing in its place"
            raise StitchError(f"{words}; {_ISLANDS_HINT}")
    for index, task in enumerate(tasks):
        family_outputs = {ports[index].name for ports in family.outputs.values()}
        if extra := [port.name for port in task.net.outputs if port.name not in family_outputs]:
            raise StitchError(f"{extra[0]} is an output of {task.net.name} that not all others have; {_ISLANDS_HINT}")


def _reason_without_layers(first: Net, alignment: _Alignment) -> str:
    """The text of the message that the models have no convolution in common."""
    for op in first.ops:
        if op.output not in alignment.tasks[0].used:
            return f"{alignment.first_difference(op)}, and no convolution before that is in all models"
    return f"{first.name} has no convolution"


def _rename_uniquely(nets: Sequence[Net]) -> list[Net]:
    """*nets*, with a number added to a name that an earlier model has."""
    used_names: set[str] = set()
    renamed = []
    for net in nets:
        name, number = net.name, 1
        while name in used_names:
            number += 1
            name = f"{net.name}-{number}"
        used_names.add(name)
        renamed.append(net if name == net.name else replace(net, name=name))
    return renamed


def _match_inputs(nets: Sequence[Net]) -> list[Net]:
    """*nets* with their input ports in task 0's order: by name if all have the same names, else by position."""
    first = nets[0]
    by_name = _same_names([[port.name for port in net.inputs] for net in nets])
    reordered = []
    for net in nets:
        if len(net.inputs) != len(first.inputs):
            counts = f"{first.name} has {len(first.inputs)} inputs, {net.name} {len(net.inputs)}"
            raise StitchError(f"{counts}; models of as many inputs can be stitched")
        order = {port.name: port for port in net.inputs}
        ports = tuple(order[port.name] for port in first.inputs) if by_name else net.inputs
        for first_port, port in zip(first.inputs, ports, strict=True):
            _require_same_picture(first, first_port, net, port)
        reordered.append(replace(net, inputs=ports))
    return reordered


def _require_same_picture(first: Net, expected: Port, net: Net, port: Port) -> None:
    """Raise ``StitchError`` if two inputs have different heights or widths."""
    first_size, size = first.values[expected.value], net.values[port.value]
    if (first_size.height, first_size.width) != (size.height, size.width):
        sizes = f"{first_size.height}x{first_size.width}, {port.name} of {net.name} {size.height}x{size.width}"
        raise StitchError(f"{expected.name} of {first.name} is a picture of {sizes}; stitch models of one picture size")


def _output_marks(nets: Sequence[Net]) -> list[dict[str, Hashable]]:
    """For each model, output value -> its port's name if all models have the same names, else its index."""
    by_name = _same_names([[port.name for port in net.outputs] for net in nets])
    return [{port.value: port.name if by_name else index for index, port in enumerate(net.outputs)} for net in nets]


def _same_names(names: Sequence[Sequence[str]]) -> bool:
    """Whether all models (*names*: those of each) have the same names, in any order."""
    return all(set(other) == set(names[0]) for other in names)

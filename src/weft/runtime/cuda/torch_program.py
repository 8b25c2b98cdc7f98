"""Programs of ``torch.export``: their inputs and outputs, and their nodes, run piece by piece on a device.

A piece is the nodes between two cuts; cut 3 is before node 3. Tensors cross a cut; sizes that earlier nodes computed
are read from the shapes of tensors that the piece takes, or computed again. *Fixed* nodes, whose values are the same in
every run, are computed once and belong to no piece.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx.node import Node, map_aggregate
from torch.utils._pytree import tree_unflatten

from weft.base.errors import ModelError
from weft.runtime.cuda.node_costs import guess_s
from weft.runtime.cuda.torch_types import is_channels_last
from weft.runtime.onnxruntime_cpu.sessions import first_line

DATATYPES = {
    torch.float32: "FP32", torch.float16: "FP16", torch.float64: "FP64", torch.bool: "BOOL", torch.uint8: "UINT8",
    torch.int8: "INT8", torch.int16: "INT16", torch.int32: "INT32", torch.int64: "INT64",
}  # fmt: skip
"""Types of tensors that clients send and receive -> the protocol's names."""
_CHECKS = frozenset(
    ("_assert_scalar", "_assert_tensor_metadata", "_guards_fn", "sym_constrain_range", "sym_constrain_range_for_size")
)
"""Nodes that only check values."""
UNBOUNDED = 1 << 30
"""Upper bound from which a program counts as taking any number of rows."""
_CONVOLUTIONS = frozenset(("conv2d", "convolution", "conv_transpose2d"))


class ProgramTensor(NamedTuple):
    """An input or an output of a program."""

    name: str
    dtype: Any
    shape: tuple[int | str, ...]  # sizes; a name where a size is free
    node: str  # the name of its node in the program


class NodeStep(NamedTuple):
    """A node, and the names of the values that are not needed after it."""

    node: Any
    forget: tuple[str, ...]


class ProgramPiece(NamedTuple):
    """The nodes between two cuts."""

    steps: tuple[NodeStep, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: Mapping[str, tuple[str, int]]
    """Size that an earlier node computed -> an input of the piece, and its axis of the same size."""
    answers: tuple[ProgramTensor, ...]  # the outputs of the program that it computes or, at the end, returns


class NoCut(Exception):
    """A program cannot be cut somewhere; the text says why."""


def read_program(path: Path) -> Any:
    """Read the program in a file. Loading may run code of the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own code
            return without_writing(torch.export.load(str(path)))
    except ModelError:
        raise
    except Exception as error:  # the file decides which kinds are raised
        raise ModelError(
            f"cannot be read as a program of torch.export: {first_line(error)} (torch here is {torch.__version__})"
        ) from error


class TorchProgram:
    """A program on a device."""

    def __init__(self, exported: Any, device: str, dtype: Any = None, *, exits: bool = False) -> None:
        """exported: as ``read_program`` returns it. dtype: the type that floats are converted to; None: they stay.

        exits: whether its outputs are exits, shallow to deep; each is returned by the piece that computes it.
        """
        self._exported = exported
        self.device, self.dtype = torch.device(device), dtype
        self.inputs, self.outputs = _inputs(exported), _outputs(exported)
        self._inputs_by_node = {tensor.node: tensor for tensor in self.inputs}
        self.weights: dict[str, Any] = _weights(exported)
        """Node -> its weight; the caller moves the weights to the device (``hold``)."""
        self._constants = _constants(exported)
        nodes = [node for node in exported.graph.nodes if node.op in ("call_function", "get_attr")]
        nodes = [node for node in nodes if not _is_check(node)]
        self._fixed = _constant_nodes(nodes, {*self.weights, *self._constants})
        """Name -> node whose value is the same in every run."""
        self.nodes: list[Node] = [node for node in nodes if node.name not in self._fixed]
        self._output_node = next(node for node in exported.graph.nodes if node.op == "output")
        self._exits = exits
        self.exit_cuts: tuple[int, ...] = ()
        """The cuts behind all exits but the last, which is the end."""
        if exits:
            self.nodes, self.exit_cuts = _sort_by_exits(self.nodes, self.outputs)
        self._position = {node.name: index for index, node in enumerate(self.nodes)}
        reads = [
            (source.name, index)
            for index, node in enumerate((*self.nodes, *(() if exits else (self._output_node,))))
            for source in node.all_input_nodes
        ]
        self.last_use = dict(reads)
        """Node -> the index of the last node that reads it; without exits, the output counts as one after the last."""
        self.channels_last: frozenset[str] = frozenset()
        """Tensors whose channels come last in memory, as of the last observed run."""
        self.held: dict[str, Any] = {}
        """Node -> its value that is the same in every run: weights, constants and what is computed from them alone."""

    @property
    def half(self) -> bool:
        """Whether most weights of the program have 16 bits."""
        are_half = [self._cast_to(weight).itemsize == 2 for weight in self.weights.values()]
        return bool(2 * sum(are_half) > len(are_half))

    def cast(self, tensor: Any) -> Any:
        """Convert a tensor to the program's precision."""
        return tensor.to(self._cast_to(tensor))

    def _cast_to(self, tensor: Any) -> Any:
        """The type of *tensor* in the program's precision."""
        return self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype

    def spatial(self) -> frozenset[str]:
        """Names of the weights of two-dimensional convolutions, for which the layout in memory matters."""
        convolutions = [node for node in self.nodes if _operator_name(node) in _CONVOLUTIONS]
        names = {node.args[1].name for node in convolutions if isinstance(node.args[1], Node)}  # argument 1: the weight
        return frozenset(name for name in names & self.weights.keys() if self.weights[name].dim() == 4)

    def most_rows(self) -> int | None:
        """The largest number of rows that the program was exported for; None: any number."""
        row_sizes = {tensor.shape[0] for tensor in self.inputs if tensor.shape}
        limits = self._exported.range_constraints
        uppers = [allowed.upper for name, allowed in limits.items() if str(name) in row_sizes]
        return min((int(upper) for upper in uppers if upper.is_finite and upper < UNBOUNDED), default=None)

    def hold(self, weights: Mapping[str, Any]) -> None:
        """Use these weights (node -> tensor) from now on, and compute the nodes that depend on them alone, once."""
        self.held = {**{name: _move(constant, self.device) for name, constant in self._constants.items()}, **weights}
        with torch.inference_mode():
            for node in self._fixed.values():
                self.held[node.name] = self._value(node, {})

    # Cutting

    def piece(self, start: int, end: int) -> ProgramPiece:
        """The nodes from cut *start* to cut *end*; ``NoCut`` if a value crosses that is neither a tensor nor a size."""
        nodes, last = self.nodes[start:end], end == len(self.nodes)
        computed = {node.name for node in nodes}
        answers = tuple(out for out in self.outputs if (out.node in computed if self._exits else last))
        answer_nodes = {answer.node for answer in answers}
        read = [source for node in nodes for source in node.all_input_nodes]
        read += [source for source in self._output_node.all_input_nodes if source.name in answer_nodes]
        needed = dict.fromkeys(source for source in read if not self._is_available(source, start, end))
        tensors = [source for source in needed if _is_tensor(source)]
        sizes: dict[str, tuple[str, int]] = {}
        recomputed: dict[str, Node] = {}
        for value in needed:
            if not _is_tensor(value):
                self._recover_size(value, tensors, sizes, recomputed)
        inputs = dict.fromkeys((*(tensor.name for tensor in tensors), *(name for name, _ in sizes.values())))
        crossing = () if last else tuple(self._crossing_tensors(start, end))
        steps = _steps([*recomputed.values(), *nodes], {*crossing, *answer_nodes})
        outputs = (*crossing, *(answer.name for answer in answers))
        return ProgramPiece(steps, tuple(inputs), outputs, sizes, answers)

    def _is_available(self, node: Node, start: int, end: int) -> bool:
        """Whether a value need not be passed to the piece from cut *start* to *end*: it is fixed, or computed there."""
        held = node.name in self._fixed or node.name in self.weights or node.name in self._constants
        return held or start <= self._position.get(node.name, -1) < end

    def _recover_size(
        self, size: Node, tensors: Sequence[Node], sizes: dict[str, tuple[str, int]], recomputed: dict[str, Node]
    ) -> None:
        """Express a size by the shape of a tensor in *tensors* or of an input, or else plan to compute it again.

        Adds the size to *sizes*, or to *recomputed* with the sizes that it is computed from; ``NoCut`` if that fails.
        """
        if size.name in sizes or size.name in recomputed:
            return
        if not _is_size(size):
            raise NoCut(f"{size.name} is no tensor")
        expression = str(size.meta["val"])
        known_shapes = [(tensor.name, tensor.meta["val"].shape) for tensor in tensors]
        known_shapes += [(tensor.node, tensor.shape) for tensor in self.inputs]
        for name, shape in known_shapes:
            for index, dimension in enumerate(shape):
                if str(dimension) == expression:
                    sizes[size.name] = (name, index)
                    return
        if not all(map(_is_size, size.all_input_nodes)) or not size.all_input_nodes:
            raise NoCut(f"{size.name} cannot be told from what crosses")
        for dimension in size.all_input_nodes:
            self._recover_size(dimension, tensors, sizes, recomputed)
        recomputed[size.name] = size

    def _crossing_tensors(self, start: int, end: int) -> list[str]:
        """Names of the tensors that the piece from cut *start* to *end* computes and later nodes read.

        Sizes are left out, as they are recovered from shapes; ``NoCut`` if another kind of value crosses.
        """
        crossing = []
        for node in self.nodes[start:end]:
            if _is_size(node) or self.last_use.get(node.name, -1) < end:
                continue
            if not _is_tensor(node):
                raise NoCut(f"{node.name} is no tensor")
            crossing.append(node.name)
        return crossing

    def crossing(self, sizes_bytes: Mapping[str, int]) -> list[int | None]:
        """For each cut, the two ends included, the bytes that cross it; None where no cut is possible.

        sizes_bytes: tensor -> its bytes.
        """
        change = [0] * (len(self.nodes) + 2)  # cut -> bytes computed since the cut before, less those freed
        for index, node in enumerate(self.nodes):
            change[index + 1] += sizes_bytes.get(node.name, 0)
            change[max(index, self.last_use.get(node.name, index)) + 1] -= sizes_bytes.get(node.name, 0)
        # Without the last sum, at which the program's outputs are freed.
        sums, last = list(accumulate(change))[:-1], len(self.nodes)
        return [
            crossing_bytes if cut in (0, last) or self._can_cut(cut) else None
            for cut, crossing_bytes in enumerate(sums)
        ]

    def _can_cut(self, cut: int) -> bool:
        """Whether the program can be cut before node number *cut*: only tensors and recoverable sizes cross."""
        if _is_size(self.nodes[cut - 1]):  # a size stays with the nodes that read it
            return False
        try:
            self.piece(cut, len(self.nodes))
        except NoCut:
            return False
        neither = [node for node in self.nodes[:cut] if not _is_tensor(node) and not _is_size(node)]
        return all(self.last_use.get(node.name, -1) < cut for node in neither)

    # Running

    def run(self, piece: ProgramPiece, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run a piece on *values*, its inputs by name; returns its outputs by name."""
        env = {name: self.cast(values[name]) if name in self._inputs_by_node else values[name] for name in piece.inputs}
        env |= {name: env[source].shape[index] for name, (source, index) in piece.sizes.items()}
        for node, forget in piece.steps:
            env[node.name] = self._value(node, env)
            for name in forget:
                env.pop(name, None)
        answers = {answer.name: self._value_of(answer.node, env).to(answer.dtype) for answer in piece.answers}
        return {name: answers[name] if name in answers else env[name] for name in piece.outputs}

    def _value_of(self, name: str, env: Mapping[str, Any]) -> Any:
        """The value of a node, from this run (*env*) or, if it is the same in every run, from ``held``."""
        return env[name] if name in env else self.held[name]

    def _value(self, node: Node, env: Mapping[str, Any]) -> Any:
        """Compute a node on the values in *env* (by name), on the program's device and in its precision."""
        if node.op == "get_attr":
            return operator.attrgetter(node.target)(self._exported.graph_module)

        def leaf(value: Any) -> Any:
            """An argument for this run: the value of a node; devices and types were stored at the export."""
            if isinstance(value, Node):
                return self._value_of(value.name, env)
            if isinstance(value, torch.device):
                return self.device
            converted = self.dtype is not None and isinstance(value, torch.dtype) and value.is_floating_point
            return self.dtype if converted else value

        target: Any = node.target
        return target(*map_aggregate(node.args, leaf), **map_aggregate(node.kwargs, leaf))

    def held_by(self, piece: ProgramPiece) -> list[str]:
        """Names of the values of ``held`` that a piece reads."""
        read = [source.name for node, _ in piece.steps for source in node.all_input_nodes]
        read += [answer.node for answer in piece.answers]
        return [name for name in dict.fromkeys(read) if name in self.held]

    def observed(self, values: Mapping[str, Any]) -> tuple[dict[str, int], list[float]]:
        """Run once on *values*; returns the bytes of all tensors, by name, and the estimated seconds of each node."""
        computed, guesses_s = self.observed_values(values)
        return {name: _bytes(value) for name, value in computed.items()}, guesses_s

    def observed_values(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[float]]:
        """Run once on *values*; returns the value and the estimated seconds of each node. Sets ``channels_last``."""
        env: dict[str, Any] = {name: self.cast(value) for name, value in values.items()}
        guesses_s, channels_last = [], set()
        for node in self.nodes:
            result = env[node.name] = self._value(node, env)
            read = [self._value_of(source.name, env) for source in node.all_input_nodes]
            guesses_s.append(guess_s(sum(map(_bytes, (result, *read))), _count_products(node, result, read)))
            if isinstance(result, torch.Tensor) and is_channels_last(result):
                channels_last.add(node.name)
        self.channels_last = frozenset(channels_last)
        return {node.name: env[node.name] for node in self.nodes}, guesses_s


def without_writing(exported: Any) -> Any:
    """Replace in-place operators by operators that return new tensors; ``ModelError`` if the program keeps state."""
    operators = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    if any(getattr(call, "_schema", None) is not None and call._schema.is_mutable for call in operators):
        exported = exported.run_decompositions({})
    for spec in exported.graph_signature.output_specs:
        if spec.kind.name != "USER_OUTPUT":
            raise ModelError(f"it changes {spec.target!r}, which it keeps; export it after eval(), without such state")
    return exported


def _inputs(exported: Any) -> tuple[ProgramTensor, ...]:
    """The inputs that a request fills; ``ModelError`` if there are none."""
    named = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    inputs = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind.name == "USER_INPUT" and not hasattr(spec.arg, "value"):
            inputs.append(_describe_tensor(spec.arg.name, named[spec.arg.name], "input"))
    if not inputs:
        raise ModelError("it takes no tensors")
    return tuple(inputs)


def _describe_tensor(name: str, node: Node, kind: str) -> ProgramTensor:
    """Describe an input or output (*kind*); ``ModelError`` if it is no tensor of a type in ``DATATYPES``."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in DATATYPES:
        type_name = str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
        types = ", ".join(DATATYPES.values())
        raise ModelError(f"its {kind} {name!r} is {type_name}; export it with tensors of {types}")
    shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return ProgramTensor(name, value.dtype, shape, node.name)


def _outputs(exported: Any) -> tuple[ProgramTensor, ...]:
    """The outputs of a program, named by the keys of the mapping that it returns, else by numbers."""
    output_node = next(candidate for candidate in exported.graph.nodes if candidate.op == "output")
    taken_names = {named.name for named in exported.graph.nodes}
    outputs = []
    for name, node in zip(_output_names(exported, len(output_node.args[0])), output_node.args[0], strict=True):
        while name in taken_names and name != output_node.name:  # values are found by name, so names are unique
            name += "_"
        taken_names.add(name)
        if not isinstance(node, Node):
            raise ModelError(f"its output {name!r} is {node!r}; export it so that it gives tensors")
        outputs.append(_describe_tensor(name, node, "output"))
    return tuple(outputs)


def _output_names(exported: Any, count: int) -> list[str]:
    """The keys of the mapping that the program returns; else ``output``, or ``output_0`` and so on."""
    spec = exported.call_spec.out_spec
    tree = tree_unflatten(list(range(count)), spec) if spec is not None else None  # key -> number of the output
    if isinstance(tree, Mapping) and all(isinstance(position, int) for position in tree.values()):
        return [str(key) for key, _ in sorted(tree.items(), key=lambda item: item[1])]
    return ["output"] if count == 1 else [f"output_{index}" for index in range(count)]


def _weights(exported: Any) -> dict[str, Any]:
    """Node -> parameter or buffer; a tensor with several names occurs once."""
    signature = exported.graph_signature
    sources = {**exported.constants, **exported.state_dict}
    kinds = ("PARAMETER", "BUFFER", "CONSTANT_TENSOR")
    targets = {spec.arg.name: spec.target for spec in signature.input_specs if spec.kind.name in kinds}
    return {name: sources[target].detach() for name, target in targets.items()}


def _constants(exported: Any) -> dict[str, Any]:
    """Arguments that are not tensors: node -> value at the export; ``ModelError`` for objects of classes of its own."""
    constants = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind.name == "USER_INPUT" and hasattr(spec.arg, "value"):
            constants[spec.arg.name] = spec.arg.value
        elif spec.kind.name == "CUSTOM_OBJ":
            raise ModelError(f"it needs an object of its own, {spec.target!r}, which cannot be served")
    return constants


def _sort_by_exits(nodes: Sequence[Node], exits: Sequence[ProgramTensor]) -> tuple[list[Node], tuple[int, ...]]:
    """Sort nodes by the first exit that needs them; return them, and the cuts behind all exits but the last.

    Nodes that no exit needs are left out.
    """
    order: dict[Node, None] = {}
    ends = [0]
    for exit_ in exits:
        needed = {exit_.node}
        for node in reversed(nodes):
            if node.name in needed:
                needed.update(source.name for source in node.all_input_nodes)
        order |= dict.fromkeys(node for node in nodes if node.name in needed)
        ends.append(len(order))
        if ends[-1] == ends[-2]:
            raise ModelError(f"exit {exit_.name!r} is known as soon as the exit before it is")
    return list(order), tuple(ends[1:-1])


def _constant_nodes(nodes: Iterable[Node], held: set[str]) -> dict[str, Node]:
    """Nodes whose values are the same in every run; *held*: the names of weights and constants."""
    fixed: dict[str, Node] = {}
    for node in nodes:
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if not random and all(source.name in held or source.name in fixed for source in node.all_input_nodes):
            fixed[node.name] = node
    return fixed


def _steps(nodes: Sequence[Node], kept: set[str]) -> tuple[NodeStep, ...]:
    """The nodes as steps, each of which forgets the values that no later node reads; *kept*: values to keep."""
    last = {source.name: index for index, node in enumerate(nodes) for source in (node, *node.all_input_nodes)}
    forget: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in kept:
            forget.setdefault(index, []).append(name)
    return tuple(NodeStep(node, tuple(forget.get(index, ()))) for index, node in enumerate(nodes))


def _operator_name(node: Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")


def _is_check(node: Node) -> bool:
    return _operator_name(node) in _CHECKS or str(node.target) in _CHECKS


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt)) and not isinstance(node.meta.get("val"), bool)


def _move(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _count_products(node: Node, result: Any, read: Sequence[Any]) -> float:
    """Multiplications of a node: elements of its *result* times the terms summed for each; *read*: its inputs."""
    called, tensors = _operator_name(node), [value for value in read if isinstance(value, torch.Tensor)]
    if not isinstance(result, torch.Tensor) or len(tensors) < 2:
        return 0.0
    if called in _CONVOLUTIONS:
        return float(result.numel() * tensors[1][0].numel())  # the weight is [out, in, ...]
    if called in ("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "scaled_dot_product_attention"):
        terms = max(tensor.shape[-1] for tensor in tensors)
        return float(result.numel() * terms)
    return 0.0

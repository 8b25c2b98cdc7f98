"""Programs of ``torch.export``: what one takes and gives, and its nodes, run piece by piece on a device.

A piece is the nodes between two cuts. What crosses a cut are tensors; sizes that earlier nodes worked out are read off
the tensors that a piece takes, or worked out again.
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
from weft.runtime.onnxruntime_cpu.sessions import first_line

DATATYPES = {
    torch.float32: "FP32", torch.float16: "FP16", torch.float64: "FP64", torch.bool: "BOOL", torch.uint8: "UINT8",
    torch.int8: "INT8", torch.int16: "INT16", torch.int32: "INT32", torch.int64: "INT64",
}  # fmt: skip
"""Types of tensors that clients send and get, as the protocol names them."""
_CHECKS = frozenset(
    ("_assert_scalar", "_assert_tensor_metadata", "_guards_fn", "sym_constrain_range", "sym_constrain_range_for_size")
)
"""Nodes that only look."""
UNBOUNDED = 1 << 30
"""Programs that take any number of rows say a larger one."""
_CONVOLUTIONS = frozenset(("conv2d", "convolution", "conv_transpose2d"))


class ProgramTensor(NamedTuple):
    """An input or an output."""

    name: str
    dtype: Any
    shape: tuple[int | str, ...]
    """A name where a size is free."""
    node: str
    """What the program calls it."""


class NodeStep(NamedTuple):
    """A node, and what nobody needs after it."""

    node: Any
    forget: tuple[str, ...]


class ProgramPiece(NamedTuple):
    """The nodes between two cuts."""

    steps: tuple[NodeStep, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: Mapping[str, tuple[str, int]]
    """Sizes that were worked out before it -> the input, and which of its sizes, that tell the same."""
    last: bool


class NoCut(Exception):
    """A program cannot be cut somewhere; says why."""


def read_program(path: Path) -> Any:
    """The program in a file, which may run code of its own."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about what it does itself
            return _without_writing(torch.export.load(str(path)))
    except ModelError:
        raise
    except Exception as error:  # whatever the file makes it raise
        raise ModelError(
            f"cannot be read as a program of torch.export: {first_line(error)} (torch here is {torch.__version__})"
        ) from error


class TorchProgram:
    """A program on a device, in some precision; None: as it is."""

    def __init__(self, exported: Any, device: str, dtype: Any = None) -> None:
        self._exported = exported
        self.device, self.dtype = torch.device(device), dtype
        self.inputs, self.outputs = _inputs(exported), _outputs(exported)
        self._given = {each.node: each for each in self.inputs}
        self.weights: dict[str, Any] = _weights(exported)
        """By the names of nodes; whoever runs it puts them where they shall be."""
        self._constants = _constants(exported)
        nodes = [each for each in exported.graph.nodes if each.op in ("call_function", "get_attr")]
        nodes = [each for each in nodes if not _is_check(each)]
        self._fixed = _fixed(nodes, {*self.weights, *self._constants})
        self.nodes: list[Node] = [each for each in nodes if each.name not in self._fixed]
        self._ended = next(each for each in exported.graph.nodes if each.op == "output")
        self._position = {each.name: at for at, each in enumerate(self.nodes)}
        ends = [(each.name, at) for at, node in enumerate((*self.nodes, self._ended)) for each in node.all_input_nodes]
        self._last_use = dict(ends)
        """Node -> the last one that reads it; the end is behind all."""
        self.channels_last: frozenset[str] = frozenset()
        """Tensors whose channels lie last in memory, as they were last seen."""
        self._held: dict[str, Any] = {}

    @property
    def half(self) -> bool:
        """Whether most of its weights have 16 bits."""
        halves = [self._cast_to(each).itemsize == 2 for each in self.weights.values()]
        return bool(2 * sum(halves) > len(halves))

    def cast(self, tensor: Any) -> Any:
        """A tensor in the program's precision."""
        return tensor.to(self._cast_to(tensor))

    def _cast_to(self, tensor: Any) -> Any:
        return self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype

    def spatial(self) -> frozenset[str]:
        """Weights of two-dimensional convolutions."""
        users = [each for each in self.nodes if _called(each) in _CONVOLUTIONS]
        names = {each.args[1].name for each in users if isinstance(each.args[1], Node)}
        return frozenset(name for name in names & self.weights.keys() if self.weights[name].dim() == 4)

    def most_rows(self) -> int | None:
        """How many rows it was exported for; None: any number."""
        first = {each.shape[0] for each in self.inputs if each.shape}
        limits = self._exported.range_constraints
        uppers = [each.upper for name, each in limits.items() if str(name) in first]
        return min((int(each) for each in uppers if each.is_finite and each < UNBOUNDED), default=None)

    def hold(self, weights: Mapping[str, Any]) -> None:
        """Run with these weights from now on, and with what follows from them alone."""
        self._held = {**{name: _moved(each, self.device) for name, each in self._constants.items()}, **weights}
        with torch.inference_mode():
            for node in self._fixed.values():
                self._held[node.name] = self._value(node, {})

    # Cutting

    def piece(self, start: int, end: int) -> ProgramPiece:
        """The nodes from one cut to another; ``NoCut`` where what crosses the first is more than tensors."""
        nodes, last = self.nodes[start:end], end == len(self.nodes)
        read = [each for node in (*nodes, *((self._ended,) if last else ())) for each in node.all_input_nodes]
        needed = dict.fromkeys(each for each in read if not self._made_in(each, start, end))
        tensors = [each for each in needed if _is_tensor(each)]
        sizes: dict[str, tuple[str, int]] = {}
        before: dict[str, Node] = {}
        for each in needed:
            if not _is_tensor(each):
                self._find(each, tensors, sizes, before)
        inputs = dict.fromkeys((*(each.name for each in tensors), *(name for name, _ in sizes.values())))
        outputs = tuple(each.name for each in self.outputs) if last else tuple(self._leaving(start, end))
        kept = {each.node for each in self.outputs} if last else set(outputs)
        return ProgramPiece(_steps([*before.values(), *nodes], kept), tuple(inputs), outputs, sizes, last)

    def _made_in(self, node: Node, start: int, end: int) -> bool:
        held = node.name in self._fixed or node.name in self.weights or node.name in self._constants
        return held or start <= self._position.get(node.name, -1) < end

    def _find(
        self, size: Node, tensors: Sequence[Node], sizes: dict[str, tuple[str, int]], before: dict[str, Node]
    ) -> None:
        """Tell a size by a tensor that is there, or by one that clients send, or work it out once more."""
        if size.name in sizes or size.name in before:
            return
        if not _is_size(size):
            raise NoCut(f"{size.name} is no tensor")
        wanted = str(size.meta["val"])
        known = [(each.name, each.meta["val"].shape) for each in tensors]
        known += [(each.node, each.shape) for each in self.inputs]
        for name, shape in known:
            for at, each in enumerate(shape):
                if str(each) == wanted:
                    sizes[size.name] = (name, at)
                    return
        if not all(map(_is_size, size.all_input_nodes)) or not size.all_input_nodes:
            raise NoCut(f"{size.name} cannot be told from what crosses")
        for each in size.all_input_nodes:
            self._find(each, tensors, sizes, before)
        before[size.name] = size

    def _leaving(self, start: int, end: int) -> list[str]:
        """What is made here and needed later; sizes are found again."""
        found = []
        for node in self.nodes[start:end]:
            if _is_size(node) or self._last_use.get(node.name, -1) < end:
                continue
            if not _is_tensor(node):
                raise NoCut(f"{node.name} is no tensor")
            found.append(node.name)
        return found

    def crossing(self, sizes_bytes: Mapping[str, int]) -> list[int | None]:
        """For each cut, the two ends included, the bytes that cross it; None where it cannot be cut."""
        change = [0] * (len(self.nodes) + 2)
        for at, node in enumerate(self.nodes):
            change[at + 1] += sizes_bytes.get(node.name, 0)
            change[max(at, self._last_use.get(node.name, at)) + 1] -= sizes_bytes.get(node.name, 0)
        sums, last = list(accumulate(change))[:-1], len(self.nodes)
        return [each if cut in (0, last) or self._can_cut(cut) else None for cut, each in enumerate(sums)]

    def _can_cut(self, cut: int) -> bool:
        if _is_size(self.nodes[cut - 1]):  # which goes with what reads it
            return False
        try:
            self.piece(cut, len(self.nodes))
        except NoCut:
            return False
        strange = [node for node in self.nodes[:cut] if not _is_tensor(node) and not _is_size(node)]
        return all(self._last_use.get(node.name, -1) < cut for node in strange)

    # Running

    def run(self, piece: ProgramPiece, values: Mapping[str, Any]) -> dict[str, Any]:
        """What a piece makes of what it takes, by name."""
        env = {name: self.cast(values[name]) if name in self._given else values[name] for name in piece.inputs}
        env |= {name: env[source].shape[at] for name, (source, at) in piece.sizes.items()}
        for node, forget in piece.steps:
            env[node.name] = self._value(node, env)
            for name in forget:
                env.pop(name, None)
        if not piece.last:
            return {name: env[name] for name in piece.outputs}
        return {each.name: self._found(each.node, env).to(each.dtype) for each in self.outputs}

    def _found(self, name: str, env: Mapping[str, Any]) -> Any:
        return env[name] if name in env else self._held[name]

    def _value(self, node: Node, env: Mapping[str, Any]) -> Any:
        if node.op == "get_attr":
            return operator.attrgetter(node.target)(self._exported.graph_module)

        def leaf(value: Any) -> Any:
            if isinstance(value, Node):
                return self._found(value.name, env)
            if isinstance(value, torch.device):
                return self.device
            wide = self.dtype is not None and isinstance(value, torch.dtype) and value.is_floating_point
            return self.dtype if wide else value

        target: Any = node.target
        return target(*map_aggregate(node.args, leaf), **map_aggregate(node.kwargs, leaf))

    def observed(self, values: Mapping[str, Any]) -> tuple[dict[str, int], list[float]]:
        """Bytes of all tensors, by name, and roughly what each node takes; and see how channels lie."""
        env: dict[str, Any] = {name: self.cast(each) for name, each in values.items()}
        guesses, last = [], set()
        for node in self.nodes:
            made = env[node.name] = self._value(node, env)
            read = [self._found(each.name, env) for each in node.all_input_nodes]
            guesses.append(guess_s(sum(map(_bytes, (made, *read))), _products(node, made, read)))
            if isinstance(made, torch.Tensor) and made.dim() == 4 and not made.is_contiguous():
                last |= {node.name} if made.is_contiguous(memory_format=torch.channels_last) else set()
        self.channels_last = frozenset(last)
        return {node.name: _bytes(env[node.name]) for node in self.nodes}, guesses


def _without_writing(exported: Any) -> Any:
    """The program with operators that make something new in the place of those that write over what they take."""
    calls = [each.target for each in exported.graph.nodes if each.op == "call_function"]
    if any(getattr(each, "_schema", None) is not None and each._schema.is_mutable for each in calls):
        exported = exported.run_decompositions({})
    for each in exported.graph_signature.output_specs:
        if each.kind.name != "USER_OUTPUT":
            raise ModelError(f"it changes {each.target!r}, which it keeps; export it after eval(), without such state")
    return exported


def _inputs(exported: Any) -> tuple[ProgramTensor, ...]:
    named = {each.name: each for each in exported.graph.nodes if each.op == "placeholder"}
    found = []
    for each in exported.graph_signature.input_specs:
        if each.kind.name == "USER_INPUT" and not hasattr(each.arg, "value"):
            found.append(_described(each.arg.name, named[each.arg.name], "input"))
    if not found:
        raise ModelError("it takes no tensors")
    return tuple(found)


def _described(name: str, node: Node, kind: str) -> ProgramTensor:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in DATATYPES:
        what = str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ModelError(f"its {kind} {name!r} is {what}; export it with tensors of {', '.join(DATATYPES.values())}")
    shape = tuple(each if isinstance(each, int) else str(each) for each in value.shape)
    return ProgramTensor(name, value.dtype, shape, node.name)


def _outputs(exported: Any) -> tuple[ProgramTensor, ...]:
    """What it gives, by the keys of a mapping, or counted."""
    ended = next(each for each in exported.graph.nodes if each.op == "output")
    taken = {each.name for each in exported.graph.nodes}
    found = []
    for name, node in zip(_output_names(exported, len(ended.args[0])), ended.args[0], strict=True):
        while name in taken and name != ended.name:
            name += "_"
        taken.add(name)
        if not isinstance(node, Node):
            raise ModelError(f"its output {name!r} is {node!r}; export it so that it gives tensors")
        found.append(_described(name, node, "output"))
    return tuple(found)


def _output_names(exported: Any, count: int) -> list[str]:
    spec = exported.call_spec.out_spec
    tree = tree_unflatten(list(range(count)), spec) if spec is not None else None
    if isinstance(tree, Mapping) and all(isinstance(each, int) for each in tree.values()):
        return [str(key) for key, _ in sorted(tree.items(), key=lambda item: item[1])]
    return ["output"] if count == 1 else [f"output_{at}" for at in range(count)]


def _weights(exported: Any) -> dict[str, Any]:
    """Parameters and buffers; where a name occurs twice, once."""
    signature = exported.graph_signature
    sources = {**exported.constants, **exported.state_dict}
    kinds = ("PARAMETER", "BUFFER", "CONSTANT_TENSOR")
    wanted = {each.arg.name: each.target for each in signature.input_specs if each.kind.name in kinds}
    return {name: sources[target].detach() for name, target in wanted.items()}


def _constants(exported: Any) -> dict[str, Any]:
    """Arguments that are no tensors, as they were when it was exported."""
    found = {}
    for each in exported.graph_signature.input_specs:
        if each.kind.name == "USER_INPUT" and hasattr(each.arg, "value"):
            found[each.arg.name] = each.arg.value
        elif each.kind.name == "CUSTOM_OBJ":
            raise ModelError(f"it needs an object of its own, {each.target!r}, which cannot be served")
    return found


def _fixed(nodes: Iterable[Node], held: set[str]) -> dict[str, Node]:
    """Nodes whose values are the same in every run."""
    found: dict[str, Node] = {}
    for node in nodes:
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if not random and all(each.name in held or each.name in found for each in node.all_input_nodes):
            found[node.name] = node
    return found


def _steps(nodes: Sequence[Node], kept: set[str]) -> tuple[NodeStep, ...]:
    """Nodes in order, each with what none after it reads."""
    last = {each.name: at for at, node in enumerate(nodes) for each in (node, *node.all_input_nodes)}
    forget: dict[int, list[str]] = {}
    for name, at in last.items():
        if name not in kept:
            forget.setdefault(at, []).append(name)
    return tuple(NodeStep(node, tuple(forget.get(at, ()))) for at, node in enumerate(nodes))


def _called(node: Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")


def _is_check(node: Node) -> bool:
    return _called(node) in _CHECKS or str(node.target) in _CHECKS


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt)) and not isinstance(node.meta.get("val"), bool)


def _moved(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _products(node: Node, made: Any, read: Sequence[Any]) -> float:
    """How many products of numbers it forms: what it makes, times what each of that is a sum of."""
    called, tensors = _called(node), [each for each in read if isinstance(each, torch.Tensor)]
    if not isinstance(made, torch.Tensor) or len(tensors) < 2:
        return 0.0
    if called in _CONVOLUTIONS:
        return float(made.numel() * tensors[1][0].numel())
    if called in ("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "scaled_dot_product_attention"):
        wide = max(each.shape[-1] for each in tensors)
        return float(made.numel() * wide)
    return 0.0

"""torch models -> Net: ``read_module``, through torch.export, without decompositions.

A node of the exported graph becomes a picture (a tensor of the net's draft), a constant, or a *hidden* part of an
island (calls that a net cannot express). The result of an operator that writes in place reaches all views of the same
memory, as in torch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.base.errors import ModelError, StitchError
from weft_stitch.net import Net, Value, finite
from weft_stitch.reading.draft import Foreign, NetDraft, Picture, island_name, view_size
from weft_stitch.reading.torch_aten import HANDLERS, VIEWS, Arguments

try:
    import torch
    from torch.fx.node import map_arg
except ImportError as error:
    raise StitchError("reading a torch model needs torch: pip install 'weft[torch]'") from error


@dataclass(frozen=True, eq=False)
class TorchIsland:
    """Calls of torch that compute one value from others; only torch can run them."""

    nodes: tuple[Any, ...]
    """Nodes of a torch.fx graph, in order."""
    constants: Mapping[str, Any]
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    """The nodes it reads, with their shapes without rows."""
    output: str
    value: Value
    signature: str

    def run(self, *tensors: Any) -> Any:
        """Run the calls; inputs and output are [rows, C, H, W]."""
        first = tensors[0]
        known = {  # node -> its value
            name: tensor.reshape(tensor.shape[0], *view)
            for (name, view), tensor in zip(self.inputs, tensors, strict=True)
        }
        for name, constant in self.constants.items():
            known[name] = constant.to(first.device, first.dtype if constant.is_floating_point() else None)
        for node in self.nodes:
            known[node.name] = call(node, known)
        return known[self.output].reshape(first.shape[0], self.value.channels, self.value.height, self.value.width)


def call(node: Any, known: Mapping[str, Any]) -> Any:
    """The result of *node*; *known*: the values of the nodes it reads, which an in-place operator does not change."""
    args = map_arg(node.args, lambda source: known[source.name])
    kwargs = map_arg(node.kwargs, lambda source: known[source.name])
    if writes_in_place(node):
        args = (args[0].clone(), *args[1:])
    return node.target(*args, **kwargs)


def writes_in_place(node: Any) -> bool:
    """Whether the operator writes to its input."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def island_signature(nodes: Sequence[Any]) -> str:
    """Operators and settings as text, equal for islands that compute the same."""
    spelled = [f"{node.target} {map_arg((node.args, dict(node.kwargs)), lambda argument: '_')}" for node in nodes]
    return island_name([str(node.target) for node in nodes], spelled)


_ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size", "sym_constrain_range")
"""Operators that only check their inputs."""


def read_module(module: Any, example_inputs: Sequence[Any], *, islands: bool = False, name: str = "") -> Net:
    """Read *module* (or its ExportedProgram) for inputs like *example_inputs*, whose rows become its batch.

    *islands*: keep operators that are not understood as they are, to run model by model. Raises ``StitchError`` if the
    module cannot be exported or stitched.
    """
    title = name or type(module).__name__
    try:
        program = module if isinstance(module, torch.export.ExportedProgram) else _export(module, example_inputs)
        return _TorchReader(program, islands).net(title)
    except (ModelError, StitchError) as error:
        raise type(error)(" ".join(f"{title}: {error}".split())) from error


def _export(module: Any, example_inputs: Sequence[Any]) -> Any:
    """The module exported by torch.export; ``StitchError`` if it is in training mode or cannot be traced."""
    if module.training:
        raise StitchError("it is in training mode; call eval() on it first")
    try:
        with torch.no_grad():
            return torch.export.export(module, tuple(example_inputs))
    except Exception as error:  # whatever the model's own code raises while it is traced
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise StitchError(f"torch.export cannot follow it: {reason[0]}") from error


class _TorchReader:
    """Translates the nodes of one exported graph, in order, to a draft."""

    def __init__(self, program: Any, islands: bool) -> None:
        self._program = program
        self._islands = islands
        self._draft = NetDraft()
        self._pictures: dict[str, Picture] = {}
        self._constants: dict[str, Any] = {}
        """Node -> its tensor, for nodes that depend on weights only."""
        self._hidden: dict[str, Any] = {}
        """Name of a node inside an island -> the node."""
        self._memory: dict[str, str] = {}
        """Node -> the first node that uses the same memory."""
        self._rows = 0  # of all inputs; 0 until the first is read

    def net(self, title: str) -> Net:
        """Translate all nodes; return the net."""
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                self._read_placeholder(node)
            elif node.op == "call_function" and not _is_assertion(node):
                self._read(node)
        outputs = {}
        for name, node in zip(_output_names(self._program), self._outputs(), strict=True):
            if getattr(node, "name", None) not in self._pictures:
                raise StitchError(f"its output {name} does not depend on its inputs")
            outputs[name] = self._pictures[node.name]
        return self._draft.finish(title, outputs, self._rows)

    def _outputs(self) -> list[Any]:
        """The nodes that are outputs of the model; exported graphs also output buffers that the model changes."""
        (output_node,) = (node for node in self._program.graph.nodes if node.op == "output")
        user_outputs = [
            node
            for node, spec in zip(output_node.args[0], self._program.graph_signature.output_specs, strict=True)
            if spec.kind.name == "USER_OUTPUT"
        ]
        if not user_outputs:
            raise StitchError("it has no output")
        return user_outputs

    def _read_placeholder(self, node: Any) -> None:
        """Store a weight as a constant, or add an input of the model to the draft."""
        spec = next(entry for entry in self._program.graph_signature.input_specs if entry.arg.name == node.name)
        if spec.kind.name != "USER_INPUT":
            stored = self._program.state_dict.get(spec.target)
            self._constants[node.name] = self._program.constants[spec.target] if stored is None else stored
            return
        tensor = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dim() < 2:
            raise StitchError(f"its input {node.name} is not a tensor of rows of floats")
        shape = _fixed_shape(tensor.shape, node.name)
        if self._rows not in (0, shape[0]):
            raise StitchError(f"its input {node.name} has {shape[0]} rows, another {self._rows}")
        self._rows = shape[0]
        self._pictures[node.name] = self._draft.input(node.name, shape[1:])

    def _read(self, node: Any) -> None:
        """Translate one node: to a constant, an operation, or a part of an island."""
        try:
            if all(source.name in self._constants for source in node.all_input_nodes):
                self._fold(node)
                return
            try:
                self._translate(node)
            except Foreign as error:
                self._keep_foreign(node, str(error))
        except Foreign as error:
            raise StitchError(self._refusal(node, str(error))) from error
        except ModelError as error:
            raise ModelError(f"{_call_name(node)} ({node.target}): {error}") from error

    def _fold(self, node: Any) -> None:
        """Compute a call that reads weights only."""
        with torch.no_grad():
            self._constants[node.name] = call(node, self._constants)

    def _translate(self, node: Any) -> None:
        """Translate a call to operations of the net; ``Foreign`` if there is no handler for it."""
        if any(source.name in self._hidden for source in node.all_input_nodes):
            raise Foreign("it reads what is inside an island")
        kind = _operator_name(node)
        handler = HANDLERS.get(kind)
        if handler is None:
            raise Foreign("it is not understood")
        arguments = self._arguments(node)
        picture = handler(Arguments(_call_name(node), self._draft, arguments, self._rows))
        self._bind(node, picture, view=kind in VIEWS)

    def _arguments(self, node: Any) -> dict[str, Any]:
        """The call's arguments by the names of the schema, with defaults filled in, and the shape of the result."""
        schema = node.target._schema
        names = [argument.name for argument in schema.arguments]
        bound = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
        bound |= dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        arguments = {name: self._translate_argument(value) for name, value in bound.items()}
        arguments["shape of result"] = _fixed_shape(node.meta["val"].shape, node.name) if _is_tensor(node) else ()
        return arguments

    def _translate_argument(self, argument: Any) -> Any:
        """*argument* with its nodes replaced: by their pictures, or by float32 arrays if they are constants."""
        if isinstance(argument, list | tuple):
            return [self._translate_argument(element) for element in argument]
        if not isinstance(argument, torch.fx.Node):
            return argument
        if argument.name in self._pictures:
            return self._pictures[argument.name]
        array = self._constants[argument.name].detach().cpu().to(torch.float32).numpy()
        if not finite(array):
            raise ModelError(f"its weight {argument.name} holds numbers that are not finite")
        return np.array(array)  # a copy: the array shares its memory with the module's weight, which may change

    def _bind(self, node: Any, picture: Picture, *, view: bool) -> None:
        """Store *picture* as the result of *node*; after a write in place, for all views of that memory too.

        *view*: whether the result shares its memory with the first input.
        """
        source = node.all_input_nodes[0].name if node.all_input_nodes else node.name
        in_place = writes_in_place(node)
        shares_memory = view or in_place
        self._memory[node.name] = self._memory.get(source, source) if shares_memory else node.name
        if in_place:
            for other, other_memory in self._memory.items():
                if other_memory == self._memory[node.name] and other in self._pictures:
                    self._pictures[other] = Picture(picture.value, self._pictures[other].view, picture.pads)
            if source in self._pictures:  # also if it is an input, which is not in *_memory*
                self._pictures[source] = Picture(picture.value, self._pictures[source].view, picture.pads)
        self._pictures[node.name] = picture

    def _keep_foreign(self, node: Any, why: str) -> None:
        """Keep a node as an island, or as part of one; *why*: the reason why a net cannot express it.

        Raises ``Foreign`` if islands are not allowed or impossible here.
        """
        if not self._islands:
            raise Foreign(why)
        if writes_in_place(node) and len(node.args[0].users) > 1:
            raise Foreign(f"{why}, and it writes over what others read")
        for source in node.all_input_nodes:
            if source.name in self._pictures:
                self._pictures[source.name] = self._draft.apply_pads(self._pictures[source.name])
        shape = tuple(node.meta["val"].shape) if _is_tensor(node) else ()
        is_output = node.name in {getattr(output, "name", "") for output in self._outputs()}
        # what cannot be a value of the net becomes a part of the islands that read it
        if not is_output and (len(shape) not in (2, 4) or shape[0] != self._rows or not _is_float(node)):
            self._hidden[node.name] = node
            return
        if len(shape) < 2 or shape[0] != self._rows:  # an output of the model
            raise Foreign(f"{why}, and its result of {list(shape)} is not rows")
        island = self._island(node, shape[1:])
        inputs = [self._pictures[name] for name, _ in island.inputs]
        self._bind(node, self._draft.island(_call_name(node), inputs, island, shape[1:]), view=False)

    def _island(self, node: Any, view: tuple[int, ...]) -> TorchIsland:
        """The island that computes *node*, with the shape *view* of its output without rows."""
        nodes = list(dict.fromkeys(self._with_hidden(node)))
        sources = list(dict.fromkeys(source for member in nodes for source in member.all_input_nodes))
        pictures = [source.name for source in sources if source.name in self._pictures]
        constants = {source.name: self._constants[source.name] for source in sources if source.name in self._constants}
        inputs = tuple((name, self._pictures[name].view) for name in pictures)
        return TorchIsland(tuple(nodes), constants, inputs, node.name, view_size(view), island_signature(nodes))

    def _with_hidden(self, node: Any) -> Iterator[Any]:
        """The hidden nodes that *node* needs, directly or not, and *node*, in the order of the graph."""
        needed, stack = {node.name}, [node]
        while stack:
            for source in stack.pop().all_input_nodes:
                if source.name in self._hidden and source.name not in needed:
                    needed.add(source.name)
                    stack.append(source)
        return (candidate for candidate in self._program.graph.nodes if candidate.name in needed)

    def _refusal(self, node: Any, why: str) -> str:
        """The message for a node that is neither understood nor kept as an island."""
        way_out = (
            "it cannot be kept as an island" if self._islands else "islands=True runs it for each model separately"
        )
        lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines() if line.strip()]
        code_line = f" (in: {lines[-1]})" if lines else ""
        return f"{_call_name(node)} is the operator {node.target}{code_line}: {why}; {way_out}"


def _is_assertion(node: Any) -> bool:
    """Whether *node* only checks its inputs, so that it can be skipped."""
    return any(assertion in str(node.target) for assertion in _ASSERTIONS)


def _operator_name(node: Any) -> str:
    """The operator's key in ``HANDLERS``: no namespace, no overload, no underscore of an in-place version."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return "getitem" if node.target is operator.getitem else str(node.target)
    namespace, _, name = schema.name.partition("::")
    name = str(name)
    if namespace != "aten":
        return str(schema.name)
    return name.removesuffix("_") if schema.is_mutable else name


def _call_name(node: Any) -> str:
    """A name for messages: the path of the torch layer that makes the call, or else of its module, with the call."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    if not modules:
        return str(node.name)
    path, kind = modules[-1]
    path = str(path)
    if "torch.nn.modules" in str(kind) and path:
        return path
    return f"{path}.{node.name}" if path else str(node.name)


def _is_tensor(node: Any) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_float(node: Any) -> bool:
    return bool(node.meta["val"].is_floating_point())


def _fixed_shape(shape: Sequence[Any], name: str) -> tuple[int, ...]:
    """*shape* if all its sizes are numbers; else ``StitchError``."""
    if not all(isinstance(size, int) for size in shape):
        raise StitchError(f"{name} has open sizes ({', '.join(map(str, shape))}); export it with fixed ones")
    return tuple(shape)


def _output_names(program: Any) -> list[str]:
    """A name for each output tensor: by keys of a dictionary or indices of a tuple; ``output`` for a single one."""
    spec = program.call_spec.out_spec
    # the output as the model nests it, with the tensors' indices in place of tensors
    structure = spec.unflatten(range(spec.num_leaves)) if spec is not None else 0
    named = dict(_leaves(structure, ""))
    return [named.get(index, f"output_{index}") for index in range(len(named) or 1)]


def _leaves(structure: Any, path: str) -> Iterator[tuple[int, str]]:
    """Each tensor of a nested *structure*: its index, and its name made of keys and indices; *path*: those so far."""
    if isinstance(structure, int):
        yield structure, path or "output"
        return
    if isinstance(structure, Mapping):
        pairs = [(str(key), value) for key, value in structure.items()]
    elif isinstance(structure, Sequence):
        pairs = [(str(index), value) for index, value in enumerate(structure)]
    else:
        return
    for key, value in pairs:
        prefix = path or ("" if isinstance(structure, Mapping) else "output")
        yield from _leaves(value, f"{prefix}_{key}" if prefix else key)

"""ONNX graphs as modules of torch, for fixed shapes: what torch's compiler turns into kernels.

ONNX Runtime fixes the shapes and folds constants (``folded``); then every node means what the table of operators says.
A graph with an operator that has no meaning in torch is refused by the operator's name, and stays with ONNX Runtime.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.base.errors import ModelError
from weft.models.element_types import ElementType
from weft.models.onnx_graph import (
    Attributes,
    OnnxGraph,
    OnnxModel,
    OnnxNode,
    declared,
    dimensions,
    fill,
    initializers,
    load,
    node_name,
    opsets,
    qualified,
    request_inputs,
    save,
    to_array,
)
from weft.models.operators import TorchNode, find
from weft.runtime.cuda.device import HostDevice
from weft.runtime.cuda.segments import open_on
from weft.runtime.cuda.torch_attention import with_attention
from weft.runtime.cuda.torch_products import with_merged_products
from weft.runtime.cuda.torch_steps import Name, TorchStep
from weft.runtime.cuda.torch_types import PRECISIONS, TYPES, as_torch
from weft.runtime.tensors import Array

OLDEST = 7
"""The first operator set that is supported; in earlier ones, attributes decided how shapes were broadcast."""
LARGE_BYTES = 1 << 30
"""Models of more bytes are written with their weights in a file beside them."""


def folded(model: OnnxModel, shapes: Mapping[str, Sequence[int]]) -> OnnxModel:
    """Specialise *model* to inputs of exactly these *shapes*: values that depend on shapes alone become constants.

    The argument is changed, too. Raises the errors of ONNX Runtime.
    """
    # Old files list weights as inputs, too. Those that ONNX Runtime folds would stay inputs, without a value; as inputs
    # in files of version 4 and later, they would not be folded.
    fill(model.graph.input, request_inputs(model.graph))
    model.ir_version = max(4, model.ir_version)
    for value in model.graph.input:
        value.CopyFrom(declared(value.name, value.type.tensor_type.elem_type, list(shapes[value.name])))
    for value in model.graph.output:  # their declared sizes may be those of another batch, and would be kept
        if dimensions(value) is not None:
            value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    model = _without_constants(model)
    # ONNX Runtime inlines functions only after it has folded constants, so what they contain needs a second pass.
    return _without_constants(model) if any(node.op_type == "Shape" for node in model.graph.node) else model


def _without_constants(model: OnnxModel) -> OnnxModel:
    """The model after ONNX Runtime's constant folding."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "fixed.onnx", Path(folder) / "folded.onnx"
        save(model, source, outside=model.ByteSize() > LARGE_BYTES)
        open_on(HostDevice(), source, fold=True, channels_last=False, save=target)
        return load(target, weights=True)


class OnnxModule(torch.nn.Module):  # type: ignore[misc]  # torch's types are not followed
    """A folded graph; takes its inputs in order and returns a tuple of its outputs, in the types of the file."""

    def __init__(self, model: OnnxModel, dtype: Any = None, *, channels_last: bool = False) -> None:
        """dtype: the type that replaces float32; None: as in the file. channels_last: the memory layout of images."""
        super().__init__()
        graph = model.graph
        self.dtype, self.channels_last = dtype, channels_last
        self.inputs = tuple((value.name, _type(value)) for value in request_inputs(graph))
        self.outputs = tuple((value.name, _type(value)) for value in graph.output)
        versions = opsets(model)
        if versions.get("", OLDEST) < OLDEST:
            raise ModelError(
                f"its operator set is {versions['']}, and meanings in torch begin with {OLDEST}; convert it"
            )
        check_meanings(graph)
        self._arrays = {name: to_array(tensor) for name, tensor in initializers(graph).items()}
        self._buffer_of: dict[str, str] = {}
        self._constants: dict[Any, str] = {}
        """The numbers of each constant of ``store_constants``, and its type -> the buffer that holds it."""
        self._stores_constants = False
        steps = [self._step(node, versions) for node in graph.node]
        outputs = [name for name, _ in self.outputs]
        self.steps = with_merged_products(with_attention(steps, outputs, self._arrays), outputs, self._arrays)
        read = {argument for step in self.steps for argument in step.arguments if isinstance(argument, Name)}
        for name in sorted(self._arrays.keys() & {*read, *outputs}):
            self._register_weight(name, self._arrays[name])
        del self._arrays

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the steps on the inputs, in their order; returns the outputs."""
        tensors: dict[str, Any] = {name: getattr(self, buffer) for name, buffer in self._buffer_of.items()}
        tensors |= zip((name for name, _ in self.inputs), map(self._cast, inputs), strict=True)
        device = inputs[0].device if inputs else None
        for step in self.steps:
            arguments = [self._argument(step, position, tensors, device) for position in range(len(step.arguments))]
            try:
                result = step.function(step.context, *arguments)
            except ModelError as error:
                raise ModelError(f"{step.label} ({step.operator}): {error}") from error
            several = isinstance(result, tuple) and step.operator != "Shape"  # whose tuple is one result
            tensors |= zip(step.outputs, result if several else (result,), strict=False)
        return tuple(self._tensor(tensors[name], device).to(kind) for name, kind in self.outputs)

    def store_constants(self, *inputs: Any) -> None:
        """Run once on *inputs*, and register the constants that steps make from the shapes as buffers.

        The compiler gives constants that it meets in the code other names than the exported program has.
        """
        self._stores_constants = True
        self(*inputs)
        self._stores_constants = False

    def _constant(self, values: Sequence[float], device: Any, dtype: Any = None) -> Any:
        """A constant vector: a buffer of ``store_constants``, or a new tensor (``TorchNode.constant``)."""
        key = (tuple(values), dtype)
        if key not in self._constants:
            tensor = torch.tensor(values, device=device, dtype=dtype)
            if not self._stores_constants:
                return tensor
            self._constants[key] = f"constant_{len(self._constants)}"
            self.register_buffer(self._constants[key], tensor)
        return getattr(self, self._constants[key])

    def _step(self, node: OnnxNode, versions: Mapping[str, int]) -> TorchStep:
        """The step of a node; *versions*: the opset of each domain."""
        entry = find(qualified(node))
        assert entry.torch is not None
        attributes = {name: _text_attribute(value) for name, value in Attributes(node).values().items()}
        if entry.name == "Cast" and attributes.get("to") == ElementType.FLOAT and self.dtype is not None:
            attributes["to"] = next(number for number, kind in TYPES.items() if kind == self.dtype)
        # Whether a constant index has no negative numbers, and a single index itself, save operators of torch.
        if entry.name == "Gather" and (index := self._arrays.get(node.input[1])) is not None:
            attributes |= {"from_zero": int(not index.size or index.min() >= 0)}
            attributes |= {} if index.ndim else {"single_index": int(index)}
        numbers = entry.torch_numbers
        arguments = tuple(self._parse_argument(name, place in numbers) for place, name in enumerate(node.input))
        context = TorchNode(torch, attributes, len(node.output), versions.get(node.domain, 1), self._constant)
        return TorchStep(node_name(node), entry.name, entry.torch, context, arguments, numbers, tuple(node.output))

    def _parse_argument(self, name: str, as_numbers: bool) -> Any:
        """An argument of a step: None if left out, a constant as numbers if *as_numbers*, else the tensor's name."""
        if not name:
            return None
        stored = self._arrays.get(name) if as_numbers else None
        return Name(name) if stored is None else tuple(stored.ravel().tolist())

    def _argument(self, step: TorchStep, position: int, tensors: Mapping[str, Any], device: Any) -> Any:
        """The value of argument number *position* of a step, *tensors* by name; ``ModelError`` for a computed shape."""
        argument = step.arguments[position]
        if not isinstance(argument, Name):
            return argument
        value = tensors[argument]
        if position not in step.numbers:
            return self._tensor(value, device)
        if not isinstance(value, tuple):
            raise ModelError(
                f"{step.label} ({step.operator}): its input {argument!r} is computed from values, which decide a shape"
            )
        return value

    def _tensor(self, value: Any, device: Any) -> Any:
        """The value as a tensor; the results of ``Shape`` are tuples of numbers."""
        return self._constant(value, device) if isinstance(value, tuple) else value

    def _cast(self, value: Any) -> Any:
        """A tensor in the module's number type, and images in its memory layout."""
        if self.dtype is not None and value.dtype == torch.float32:
            value = value.to(self.dtype)
        is_image = self.channels_last and value.dim() == 4 and value.is_floating_point()
        return value.contiguous(memory_format=torch.channels_last) if is_image else value

    def _register_weight(self, name: str, array: Array) -> None:
        """Register a weight as a buffer of the module."""
        self._buffer_of[name] = f"weight_{len(self._buffer_of)}"
        tensor = as_torch(np.array(array))
        if self.dtype is not None and tensor.dtype == torch.float32:
            tensor = _narrowed(tensor, self.dtype)
        self.register_buffer(self._buffer_of[name], self._cast(tensor))


def conversion(
    path: Path, precision: str, exits: Sequence[str] = ()
) -> Callable[[Mapping[str, Sequence[int]]], OnnxModule]:
    """What makes the module of a file for inputs of given shapes; *exits*: its only outputs, if there are any."""
    dtype = PRECISIONS[precision]

    def converted(shapes: Mapping[str, Sequence[int]]) -> OnnxModule:
        model = load(path, weights=True)
        if exits:
            outputs = {value.name: value for value in model.graph.output}
            fill(model.graph.output, [outputs[name] for name in exits])
        return OnnxModule(folded(model, shapes), dtype, channels_last=dtype is not None)

    return converted


def check_meanings(graph: OnnxGraph) -> None:
    """Raise ``ModelError``, which names them, if operators of a graph have no meaning in torch."""
    missing = sorted({qualified(node) for node in graph.node if find(qualified(node)).torch is None})
    if missing:
        raise ModelError(f"{', '.join(missing)} {'has' if len(missing) == 1 else 'have'} no meaning in torch")


def _narrowed(tensor: Any, dtype: Any) -> Any:
    """A weight in 16 bits: masks stay finite, and small numbers that keep a divisor from 0 do not become 0."""
    limits = torch.finfo(dtype)
    least = limits.smallest_normal if dtype == torch.bfloat16 else 2.0**-24  # the smallest subnormal float16
    tensor = tensor.clamp(limits.min, limits.max)
    tiny = (tensor != 0) & (tensor.abs() < least)
    return torch.where(tiny, torch.copysign(torch.tensor(least), tensor), tensor).to(dtype)


def _type(value: Any) -> Any:
    """The torch type of a declared tensor; ``ModelError`` if torch has none."""
    number = value.type.tensor_type.elem_type
    if number not in TYPES:
        raise ModelError(f"{value.name!r} is of the ONNX type {number}, which torch has no counterpart of")
    return TYPES[number]


def _text_attribute(value: Any) -> Any:
    """An attribute's value; bytes are decoded as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

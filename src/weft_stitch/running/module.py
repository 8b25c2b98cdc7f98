"""A graph that runs in torch: ``StitchedModule``, and ``Captured``, the same replayed as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft.models.operators import Meaning, TorchNode, find
from weft_stitch.graph import DYNAMIC, Graph, GraphStep
from weft_stitch.net import Array
from weft_stitch.running.fused import FusedConv
from weft_stitch.running.fused import operator as fused_conv
from weft_stitch.running.operators import Tensor, meaning, torch

MODULES = {"FusedConv": fused_conv}
"""Operators that are torch modules of their own -> what makes one from a step and the graph's constants."""
FRESH = frozenset(("FusedConv", "MaxPool"))
"""Steps whose result shares memory with nothing: a module that is its last reader may write over it, if none of the
readers before it is one of ``ALIASES``."""
ALIASES = frozenset(
    ("Expand", "Flatten", "Identity", "Island", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")
)
"""Steps whose result may share memory with what they read."""
WARM_UPS = 3
"""Runs before a capture or a timing: cuDNN chooses its algorithms and Triton compiles in the first ones."""
_NOTHING: Mapping[str, Tensor] = MappingProxyType({})


class ReadyStep(NamedTuple):
    """One step, ready to run."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Names as ``Name``, everything else as it is."""
    outputs: tuple[str, ...]
    forget: tuple[str, ...]
    """Tensors that nothing reads after it."""


class Name(str):
    """The name of a tensor or a buffer among arguments."""

    __slots__ = ()


class StitchedModule(torch.nn.Module):
    """Runs the steps of *graph*; inputs and outputs are those of the graph, in order."""

    def __init__(self, graph: Graph, *, device: Any = "cpu", dtype: Any = None, channels_last: bool = False) -> None:
        super().__init__()
        self.graph = graph
        self.channels_last, self.dtype = channels_last, dtype
        self._buffer_names: dict[str, str] = {}
        self._spare = _spare(graph)
        self._calls = [self._call(step, forget) for step, forget in zip(graph.steps, _forgotten(graph), strict=True)]
        self.to(device=device, dtype=dtype)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if len(inputs) != len(self.graph.inputs):
            names = ", ".join(tensor.name for tensor in self.graph.inputs)
            raise StitchError(f"{self.graph.name} takes {len(self.graph.inputs)} tensors ({names}), not {len(inputs)}")
        tensors: dict[str, Any] = {}
        for tensor, given in zip(self.graph.inputs, inputs, strict=True):
            _require_shape(tensor.name, tensor.shape, tuple(given.shape))
            spatial = self.channels_last and given.dim() == 4
            tensors[tensor.name] = given.contiguous(memory_format=torch.channels_last) if spatial else given
        tensors = self.steps(tensors)
        return tuple(tensors[tensor.name] for tensor in self.graph.outputs)

    def steps(
        self,
        given: Mapping[str, Tensor],
        start: int = 0,
        end: int | None = None,
        into: Mapping[str, Tensor] = _NOTHING,
    ) -> dict[str, Any]:
        """What steps *start* to *end* leave that is still needed, by name; *given* is what they read and keep.

        into: where to put some of it, as far as the steps that make it can.
        """
        tensors: dict[str, Any] = {name: getattr(self, buffer) for name, buffer in self._buffer_names.items()}
        tensors.update(given)
        for call in self._calls[start:end]:
            arguments = [tensors[argument] if isinstance(argument, Name) else argument for argument in call.arguments]
            if isinstance(call.function, torch.nn.Module):
                keep = any(argument in given for argument in call.arguments)
                result = call.function(*arguments, into=into.get(call.outputs[0]), keep=keep)
            else:
                result = call.function(*arguments)
            if len(call.outputs) == 1:
                tensors[call.outputs[0]] = result
            else:
                tensors.update(zip(call.outputs, result, strict=True))
            for name in call.forget:
                del tensors[name]
        return tensors

    @property
    def fused_layers(self) -> list[FusedConv]:
        """The layers that one kernel computes for all tasks, in order."""
        return [layer for layer in self.modules() if isinstance(layer, FusedConv)]

    def captured(self, *example: Tensor) -> Captured:
        """The module as one CUDA graph, for inputs of the shapes of *example*."""
        devices = {str(tensor.device) for tensor in (*example, *self.buffers())}
        if any(not name.startswith("cuda") for name in devices):
            where = ", ".join(sorted(devices))
            raise StitchError(f"a CUDA graph needs the module and its inputs on a CUDA device, not on {where}")
        return Captured(self, example)

    def _call(self, step: GraphStep, forget: tuple[str, ...]) -> ReadyStep:
        if step.op in MODULES:
            module = MODULES[step.op](step, self.graph.constants)
            self.add_module(f"step_{len(self._modules)}", module)
            tensors = tuple(Name(name) for name in step.inputs if name and name not in self.graph.constants)
            module.reuses = self._may_reuse(tensors, forget)
            return ReadyStep(module, tensors, step.outputs, forget)
        if step.op == "Island":
            return ReadyStep(step.attributes["payload"].run, tuple(map(Name, step.inputs)), step.outputs, forget)
        function = meaning(step.op)
        if function is None:
            raise StitchError(
                f"{step.layer or step.outputs[0]}: the operator {step.op} does not run in torch; run it as ONNX"
            )
        arguments = [self._argument(step, place, name) for place, name in enumerate(step.inputs)]
        # The index of a stitched Gather counts from the front: no kernel has to make it do so.
        known: Mapping[str, Any] = {"StackRows": {"dtype": self.dtype}, "Gather": {"from_zero": 1}}.get(step.op, {})
        bound = _bound(function, {**step.attributes, **known}, len(step.outputs))
        return ReadyStep(bound, tuple(arguments), step.outputs, forget)

    def _may_reuse(self, tensors: tuple[Name, ...], forget: tuple[str, ...]) -> bool:
        """Whether the second of *tensors*, a residual, may be written over: not if it is the input as well."""
        source, *more = tensors
        return more != [] and more[0] != source and more[0] in forget and more[0] in self._spare

    def _argument(self, step: GraphStep, place: int, name: str) -> Any:
        if not name:
            return None
        if name not in self.graph.constants:
            return Name(name)
        array = self.graph.constants[name]
        if place in find(step.op).torch_numbers:
            return tuple(array.ravel().tolist())
        if name not in self._buffer_names:
            self._buffer_names[name] = f"constant_{len(self._buffer_names)}"
            self.register_buffer(self._buffer_names[name], self._tensor(array))
        return Name(name)

    def _tensor(self, array: Array) -> Tensor:
        tensor = torch.from_numpy(np.array(array))
        spatial = self.channels_last and tensor.dim() == 4 and tensor.is_floating_point()
        return tensor.contiguous(memory_format=torch.channels_last) if spatial else tensor


def warm_up(run: Callable[[], object]) -> None:
    """Run on a side stream, as CUDA asks before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)


class Captured:
    """A module replayed as one CUDA graph: outputs are overwritten by the next call."""

    def __init__(self, module: StitchedModule, example: tuple[Tensor, ...]) -> None:
        self.inputs = tuple(tensor.clone() for tensor in example)
        with torch.no_grad():
            warm_up(lambda: module(*self.inputs))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph), torch.no_grad():
            self.outputs: tuple[Tensor, ...] = module(*self.inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Copy *inputs* to where the graph reads them, and replay it."""
        for place, given in zip(self.inputs, inputs, strict=True):
            if place.shape != given.shape:
                raise StitchError(
                    f"the CUDA graph was made for {list(place.shape)}, not {list(given.shape)}; capture anew"
                )
            place.copy_(given)
        self.replay()
        return self.outputs

    def replay(self) -> None:
        self.graph.replay()


def _require_shape(name: str, wanted: tuple[int, ...], given: tuple[int, ...]) -> None:
    if len(given) == len(wanted) and all(size in (DYNAMIC, got) for size, got in zip(wanted, given, strict=True)):
        return
    way_out = ""
    if len(given) == len(wanted) and given[1:] == wanted[1:]:
        way_out = "; stitch with batches= for other numbers of rows, or dynamic=True for any"
    raise StitchError(f"{name} was planned as {list(wanted)}, not {list(given)}{way_out}")


def _bound(function: Meaning, attributes: Mapping[str, Any], outputs: int) -> Callable[..., Any]:
    settings = {name: value.decode() if isinstance(value, bytes) else value for name, value in attributes.items()}
    node = TorchNode(torch, settings, outputs)
    return lambda *arguments: function(node, *arguments)


def _spare(graph: Graph) -> set[str]:
    """The tensors that share memory with no other one."""
    fresh = {name for step in graph.steps if step.op in FRESH for name in step.outputs}
    return fresh.difference(*(step.inputs for step in graph.steps if step.op in ALIASES))


def _forgotten(graph: Graph) -> list[tuple[str, ...]]:
    """For each step, the tensors that no later step reads."""
    kept = {tensor.name for tensor in graph.outputs} | graph.constants.keys() | {""}
    forgotten: list[tuple[str, ...]] = []
    for step in reversed(graph.steps):
        names = {*step.inputs, *step.outputs} - kept
        kept |= names
        forgotten.append(tuple(sorted(names)))
    return forgotten[::-1]

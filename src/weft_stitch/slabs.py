"""Convolutions in slabs: ``slabs`` rewrites a graph for runtimes that unfold pictures before they multiply.

Such a runtime (onnxruntime on a CPU) copies every pixel once for each tap of the kernel; where a net has few output
channels the copies take longer than the products. Here a convolution unfolds only along the width: it writes one
slab for each row of its kernel, and a depthwise convolution over the slabs, laid under one another and dilated by one
row more than a slab has, adds them up, each shifted by a row. That second convolution also carries scale and shift,
each row's own where tasks differ, so that they cost nothing. With a stride, a slab has as many rows as the stride;
where kernels are wide, columns are first sorted by their remainder, so that unfolding copies runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from weft_stitch.graph import DYNAMIC, Graph, GraphStep, KernelOrigin
from weft_stitch.net import Array

_UNARY = frozenset(("Relu", "LeakyRelu", "Sigmoid", "Tanh", "HardSwish", "HardSigmoid", "Elu", "Clip"))
_TAPS = "slabs"
"""Prefix of the kernels that sum slabs."""
_WIDE_KERNEL = 5
"""From this many columns on it pays to sort columns by their remainder first."""


def slabs(graph: Graph, layers: Container[str] | None = None) -> Graph:
    """*graph* with the convolutions of *layers* (or all) in slabs, as far as ``slab_layers``."""
    rewriting = _Rewriting(graph)
    for step in graph.steps:
        if step.outputs[0] in rewriting.absorbed:
            continue
        plan = _geometry(step, graph) if layers is None or step.layer in layers else None
        if plan is not None:
            rewriting.convolve(step, plan)
        else:
            rewriting.keep(step)
    return rewriting.finish()


def slab_layers(graph: Graph) -> frozenset[str]:
    """The layers that have a convolution which can be computed in slabs."""
    return frozenset(step.layer for step in graph.steps if _geometry(step, graph) is not None)


def sums_slabs(step: GraphStep) -> bool:
    """Whether it is a convolution over slabs, whose kernel is no weight of a model."""
    return step.op == "Conv" and step.inputs[1].startswith(f"{_TAPS}.")


class _Geometry(NamedTuple):
    """The geometry of one convolution in slabs."""

    slabs: int
    slab_rows: int
    """Rows of the kernel in one slab: its stride."""
    rows: int
    """Height of a slab's output."""
    pads: tuple[int, int, int, int]
    """Pads of the first convolution."""
    outer: tuple[int, int]
    """Rows of zeros that the second convolution sees above and below."""
    phases: int
    """Into how many sets the columns are sorted; 1 leaves them alone."""
    taps: int
    """Columns of the first convolution's kernel."""
    lead: int
    """Zeros before the kernel's first column, so that phases line up."""


def _geometry(step: GraphStep, graph: Graph) -> _Geometry | None:
    """The geometry of *step* in slabs; None if it is no convolution that can be split."""
    if step.op != "Conv" or len(graph.shapes[step.inputs[0]]) != 4 or not _all_constant(graph, step.inputs[1:]):
        return None
    tall, wide = graph.constants[step.inputs[1]].shape[2:]
    down, across = step.attributes.get("strides", (1, 1))
    top, left, _, right = step.attributes.get("pads", (0, 0, 0, 0))
    count = -(-tall // down)
    height, width = graph.shapes[step.inputs[0]][2:]
    rows = graph.shapes[step.outputs[0]][2] + count - 1
    below = down * rows - height - top
    plain = tuple(step.attributes.get("dilations", (1, 1))) == (1, 1) and step.attributes.get("auto_pad") is None
    if count < 2 or below < 0 or not plain or graph.constants[step.inputs[1]].shape[1] == 1:
        return None
    outer = (int(top >= down), int(below >= down))
    top, below = top - down * outer[0], below - down * outer[1]
    phases, taps, lead, left, right = _columns(wide, across, left, right, width, graph.shapes[step.outputs[0]][3])
    return _Geometry(count, down, rows - sum(outer), (top, left, below, right), outer, phases, taps, lead)


def _all_constant(graph: Graph, names: Sequence[str]) -> bool:
    """Whether all of them are constants; an island may compute its weights, or leave the bias out by an empty name."""
    return all(name in graph.constants for name in names)


def _columns(wide: int, across: int, left: int, right: int, width: int, out: int) -> tuple[int, int, int, int, int]:
    """Phases, taps, leading zeros, and pads to the left and right."""
    lead = -left % across
    before = (left + lead) // across
    taps = -(-(wide + lead) // across)
    after = out + taps - 1 - width // across - before
    if across == 1 or wide < _WIDE_KERNEL or width % across or after < 0:
        return 1, wide, 0, left, right
    return across, taps, lead, before, after


class _Rewriting:
    """The new graph so far."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.absorbed: set[str] = set()
        """Outputs of steps that have become part of another."""
        self._steps: list[GraphStep] = []
        self._constants = dict(graph.constants)
        self._weights = set(graph.weights)
        self._shapes = dict(graph.shapes)
        self._readers = Counter(name for step in graph.steps for name in step.inputs)
        self._reader = {name: step for step in graph.steps for name in step.inputs}
        self._numbers: Counter[str] = Counter()
        self._slabbed: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Kernels -> what they are called in slabs, and how they lie there."""
        self._flat: dict[str, str] = {}
        """Tensors that exist as [1, rows x channels, ...], under another name; their own may not exist yet."""
        self._real = {tensor.name for tensor in graph.inputs} | set(graph.constants)

    def keep(self, step: GraphStep) -> None:
        """*step* as it is, on flat tensors where that saves a reshape."""
        if not self._try_flatten(step):
            for name in step.inputs:
                self._materialise(name)
            self._steps.append(step)
            self._real.update(step.outputs)

    def convolve(self, step: GraphStep, plan: _Geometry) -> None:
        """*step* in slabs, with the tables that scale and shift its output."""
        scale, shift, last = self._tables(step)
        source = step.inputs[0]
        self._materialise(source)
        if plan.phases > 1:
            source = self._sort_columns(source, step, plan.phases)
        outs = self.graph.shapes[step.outputs[0]][1]
        weight = self._constant(_slab_weight(self.graph.constants[step.inputs[1]], plan), step.inputs[1])
        self._slabbed[step.inputs[1]] = weight, (plan.slabs, plan.slab_rows, plan.taps, plan.phases, plan.lead)
        rows, _, _, width = self.graph.shapes[step.outputs[0]]
        attributes = {
            "kernel_shape": [plan.slab_rows, plan.taps],
            "strides": [plan.slab_rows, 1 if plan.phases > 1 else step.attributes.get("strides", (1, 1))[1]],
            "pads": list(plan.pads),
            "group": _groups(step),
        }
        cut = self._add("Conv", (source, weight), (rows, outs * plan.slabs, plan.rows, width), attributes, step.layer)
        if len(scale) > 1 or len(shift) > 1:
            self._flat[last] = self._add_up(step, plan, cut, scale, shift, "")
        else:
            self._add_up(step, plan, cut, scale, shift, last)
            self._real.add(last)

    def finish(self) -> Graph:
        used = {name for step in self._steps for name in step.inputs}
        constants = {name: array for name, array in self._constants.items() if name in used}
        graph = self.graph
        weights = frozenset(name for name in self._weights if name in constants)
        return replace(
            graph,
            steps=tuple(self._steps),
            constants=constants,
            weights=weights,
            shapes=self._shapes,
            origins=tuple(
                origin if origin.constant in constants else self._move_origin(origin) for origin in graph.origins
            ),
        )

    def _move_origin(self, origin: KernelOrigin) -> KernelOrigin:
        name, how = self._slabbed.get(origin.constant, (origin.constant, origin.slabs))
        return origin._replace(constant=name, slabs=how)

    def _add_up(self, step: GraphStep, plan: _Geometry, cut: str, scale: Array, shift: Array, output: str) -> str:
        """The depthwise convolution over slabs; [1, rows x channels] where rows differ in scale or shift."""
        rows, outs, height, width = self.graph.shapes[step.outputs[0]]
        copies = max(len(scale), len(shift))
        lead, channels = (rows, outs) if copies == 1 else (1, rows * outs)
        target = np.array([0 if lead == DYNAMIC else lead, channels, plan.slabs * plan.rows, width], np.int64)
        shape = (lead, channels, plan.slabs * plan.rows, width)
        under = self._add("Reshape", (cut, self._constant(target, "shape")), shape, {}, step.layer)
        factors = np.broadcast_to(scale, (copies, outs)).reshape(-1, 1, 1, 1)
        taps = self._constant(np.repeat(factors, plan.slabs, axis=2), _TAPS)
        bias: tuple[str, ...] = ()
        if shift.any():
            had_bias = len(step.inputs) > 2 and copies == 1
            bias = (
                self._constant(np.broadcast_to(shift, (copies, outs)).ravel(), step.inputs[2] if had_bias else "shift"),
            )
        attributes = {
            "kernel_shape": [plan.slabs, 1],
            "dilations": [plan.rows + 1, 1],
            "pads": [plan.outer[0], 0, plan.outer[1], 0],
            "group": channels,
        }
        shape = (lead, channels, height, width)
        return self._add("Conv", (under, taps, *bias), shape, attributes, step.layer, output)

    def _tables(self, step: GraphStep) -> tuple[Array, Array, str]:
        """Scale and shift [1 or rows, channels] out of the steps after *step*, and the output of the last of these."""
        dtype = self.graph.constants[step.inputs[1]].dtype
        outs = self.graph.shapes[step.outputs[0]][1]
        scale = np.ones((1, outs), dtype)
        shift = np.zeros((1, outs), dtype)
        if len(step.inputs) > 2:
            shift = self.graph.constants[step.inputs[2]].reshape(1, outs)
        last = step.outputs[0]
        for operator in ("Mul", "Add"):
            table = self._table_of(last, operator)
            if table is None:
                continue
            scale, shift = (scale * table, shift * table) if operator == "Mul" else (scale, shift + table)
            last = self._reader[last].outputs[0]
            self.absorbed.add(last)
        return scale, shift, last

    def _table_of(self, tensor: str, operator: str) -> Array | None:
        """[1 or rows, channels] of the constant that an *operator*, the only reader of *tensor*, combines it with."""
        reader = self._reader.get(tensor)
        if reader is None or self._readers[tensor] != 1 or reader.op != operator:
            return None
        other = reader.inputs[1] if reader.inputs[0] == tensor else reader.inputs[0]
        array = self.graph.constants.get(other)
        rows, outs = self.graph.shapes[tensor][:2]
        if array is None or array.shape not in ((1, outs, 1, 1), (rows, outs, 1, 1)) or array.dtype.kind != "f":
            return None
        return array.reshape(-1, outs)

    def _sort_columns(self, tensor: str, step: GraphStep, phases: int) -> str:
        """Columns by their remainder, each set as channels: [rows, groups x phases x ins, height, width / phases]."""
        rows, channels, height, width = self.graph.shapes[tensor]
        groups = _groups(step)
        split = (groups, channels // groups * height, width // phases, phases)
        whole = (phases * channels, height, width // phases)
        moved = (groups, phases, *split[1:3])
        cut = self._reshape(tensor, (rows, *split), step.layer)
        turned = self._add("Transpose", (cut,), (rows, *moved), {"perm": [0, 1, 4, 2, 3]}, step.layer)
        return self._reshape(turned, (rows, *whole), step.layer)

    def _try_flatten(self, step: GraphStep) -> bool:
        """Do an elementwise *step* on flat tensors, if it has one."""
        tensors = [name for name in step.inputs if name and name not in self._constants]
        if not any(name in self._flat for name in tensors):
            return False
        shape = self._shapes[step.outputs[0]]
        same = all(self._shapes[name] == shape for name in tensors)
        unary = step.op in _UNARY
        both = step.op in ("Add", "Mul") and len(tensors) == len(step.inputs)
        if not (same and (unary or both)):
            return False
        flat = (1, shape[0] * shape[1], *shape[2:])
        inputs = tuple(self._flatten(name, flat, step.layer) if name in tensors else name for name in step.inputs)
        self._flat[step.outputs[0]] = self._add(step.op, inputs, flat, step.attributes, step.layer)
        return True

    def _flatten(self, name: str, flat: tuple[int, ...], layer: str) -> str:
        if name not in self._flat:
            self._flat[name] = self._reshape(name, flat, layer)
        return self._flat[name]

    def _materialise(self, name: str) -> None:
        """Make sure that *name* exists under its own name."""
        if name not in self._real and name in self._flat:
            self._reshape(self._flat[name], self._shapes[name], "", name)
            self._real.add(name)

    def _reshape(self, tensor: str, shape: tuple[int, ...], layer: str, output: str = "") -> str:
        target = np.array([0 if size == DYNAMIC else size for size in shape], np.int64)
        return self._add("Reshape", (tensor, self._constant(target, "shape")), shape, {}, layer, output)

    def _constant(self, array: Array, hint: str) -> str:
        """Stored under a fresh name; a weight if *hint* is the name of one."""
        name = self._fresh(hint)
        self._constants[name] = np.ascontiguousarray(array)
        if hint in self.graph.weights:
            self._weights.add(name)
        return name

    def _add(
        self,
        op: str,
        inputs: tuple[str, ...],
        shape: tuple[int, ...],
        attributes: Mapping[str, Any],
        layer: str,
        output: str = "",
    ) -> str:
        name = output or self._fresh(op.lower())
        self._steps.append(GraphStep(op, inputs, (name,), attributes, layer))
        self._shapes[name] = shape
        return name

    def _fresh(self, hint: str) -> str:
        while True:
            self._numbers[hint] += 1
            name = f"{hint}.{self._numbers[hint]}"
            if name not in self._shapes and name not in self._constants:
                return name


def _groups(step: GraphStep) -> int:
    return int(step.attributes.get("group", 1))


def undo_slabs(weight: Array, how: Sequence[int], window: tuple[int, int]) -> Array:
    """Restore a kernel from its slab layout *how*: number of slabs, their rows, taps, phases, leading zeros."""
    slabs, rows, taps, phases, lead = how
    outs, ins = weight.shape[0] // slabs, weight.shape[1] // phases
    cut = weight.reshape(outs, slabs, phases, ins, rows, taps).transpose(0, 3, 1, 4, 5, 2)
    whole = cut.reshape(outs, ins, slabs * rows, taps * phases)
    return whole[:, :, : window[0], lead : lead + window[1]]


def _slab_weight(weight: Array, plan: _Geometry) -> Array:
    """[outs x slabs, ins (x phases), rows of a slab, taps]."""
    outs, ins, tall, wide = weight.shape
    tail = plan.phases * plan.taps - plan.lead - wide if plan.phases > 1 else 0
    padded = np.pad(weight, ((0, 0), (0, 0), (0, plan.slabs * plan.slab_rows - tall), (plan.lead, tail)))
    cut = padded.reshape(outs, ins, plan.slabs, plan.slab_rows, plan.taps, plan.phases)
    return cut.transpose(0, 2, 5, 1, 3, 4).reshape(outs * plan.slabs, plan.phases * ins, plan.slab_rows, plan.taps)

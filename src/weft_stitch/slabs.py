"""Convolutions in slabs: ``slabs`` rewrites a graph for runtimes that unfold pictures before they multiply.

Such a runtime (onnxruntime on a CPU) copies every pixel once for each tap of the kernel; where a net has few output
channels the copies take longer than the products. Here a first convolution unfolds only along the width: it writes one
picture, a *slab*, for each row of the kernel. Slabs lie below one another. A second, depthwise convolution with one tap
per slab adds them up; its dilation is the height of a slab plus 1, so that each slab is shifted by one more row. It
also has scale and shift, per row of the batch where tasks differ, so that these cost nothing. With a vertical stride, a
slab covers as many kernel rows as the stride. Where kernels are wide and have a horizontal stride, columns are first
sorted by their remainder modulo the stride (*phases*), so that unfolding copies contiguous runs.
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
_SUM_PREFIX = "slabs"
"""Prefix of the names of kernels that sum slabs; ``sums_slabs`` finds them by it."""
_WIDE_KERNEL = 5
"""Kernels at least this wide gain from sorting columns by their remainder first."""


def slabs(graph: Graph, layers: Container[str] | None = None) -> Graph:
    """Rewrite the convolutions of *layers* (None: of all) in slabs, where that is possible (see ``slab_layers``)."""
    rewriter = _SlabRewriter(graph)
    for step in graph.steps:
        if step.outputs[0] in rewriter.absorbed:
            continue
        geometry = _geometry(step, graph) if layers is None or step.layer in layers else None
        if geometry is not None:
            rewriter.convolve(step, geometry)
        else:
            rewriter.keep(step)
    return rewriter.finish()


def slab_layers(graph: Graph) -> frozenset[str]:
    """Names of the layers with a convolution that can be computed in slabs."""
    return frozenset(step.layer for step in graph.steps if _geometry(step, graph) is not None)


def sums_slabs(step: GraphStep) -> bool:
    """Whether *step* is a convolution that adds slabs, whose kernel holds no weights of a model."""
    return step.op == "Conv" and step.inputs[1].startswith(f"{_SUM_PREFIX}.")


class _Geometry(NamedTuple):
    """The geometry of one convolution in slabs."""

    slabs: int
    """Number of slabs."""
    slab_rows: int
    """Kernel rows that one slab covers: the vertical stride."""
    rows: int
    """Height of a slab's output."""
    pads: tuple[int, int, int, int]
    """Pads of the first convolution."""
    outer: tuple[int, int]
    """Rows of zeros above and below that the second convolution adds."""
    phases: int
    """Number of sets into which columns are sorted, by remainder modulo the horizontal stride; 1: not sorted."""
    taps: int
    """Columns of the first convolution's kernel."""
    lead: int
    """Zero columns before the kernel's first, so that it begins at a column of remainder 0."""


def _geometry(step: GraphStep, graph: Graph) -> _Geometry | None:
    """The geometry of *step* in slabs; None if it is no convolution that can be computed so."""
    if step.op != "Conv" or len(graph.shapes[step.inputs[0]]) != 4 or not _all_constant(graph, step.inputs[1:]):
        return None
    kernel_height, kernel_width = graph.constants[step.inputs[1]].shape[2:]
    stride_down, stride_across = step.attributes.get("strides", (1, 1))
    top, left, _, right = step.attributes.get("pads", (0, 0, 0, 0))
    slab_count = -(-kernel_height // stride_down)
    height, width = graph.shapes[step.inputs[0]][2:]
    rows = graph.shapes[step.outputs[0]][2] + slab_count - 1
    bottom = stride_down * rows - height - top  # the rows of zeros that the last slab reads below the picture
    is_plain = tuple(step.attributes.get("dilations", (1, 1))) == (1, 1) and step.attributes.get("auto_pad") is None
    # a single slab gains nothing; pictures with rows that no slab reads, dilations and depthwise kernels are kept
    if slab_count < 2 or bottom < 0 or not is_plain or graph.constants[step.inputs[1]].shape[1] == 1:
        return None
    # a whole slab of zeros above or below costs nothing as padding of the second convolution
    whole_slabs = (int(top >= stride_down), int(bottom >= stride_down))
    top, bottom = top - stride_down * whole_slabs[0], bottom - stride_down * whole_slabs[1]
    phases, taps, lead, left, right = _column_phases(
        kernel_width, stride_across, left, right, width, graph.shapes[step.outputs[0]][3]
    )
    return _Geometry(
        slab_count, stride_down, rows - sum(whole_slabs), (top, left, bottom, right), whole_slabs, phases, taps, lead
    )


def _all_constant(graph: Graph, names: Sequence[str]) -> bool:
    """Whether all *names* are constants; an island may compute its weights, or omit the bias (an empty name)."""
    return all(name in graph.constants for name in names)


def _column_phases(
    kernel_width: int, stride: int, left: int, right: int, width: int, output_width: int
) -> tuple[int, int, int, int, int]:
    """Phases, taps, leading zeros (see ``_Geometry``), and padding on the left and on the right of the picture.

    One phase if sorting columns is impossible or no gain.
    """
    lead = -left % stride
    phase_left = (left + lead) // stride
    taps = -(-(kernel_width + lead) // stride)
    phase_right = output_width + taps - 1 - width // stride - phase_left
    if stride == 1 or kernel_width < _WIDE_KERNEL or width % stride or phase_right < 0:
        return 1, kernel_width, 0, left, right
    return stride, taps, lead, phase_left, phase_right


class _SlabRewriter:
    """Builds the rewritten graph step by step."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.absorbed: set[str] = set()
        """Outputs of the steps that are computed within another step now."""
        self._steps: list[GraphStep] = []
        self._constants = dict(graph.constants)
        self._weights = set(graph.weights)
        self._shapes = dict(graph.shapes)
        self._read_counts = Counter(name for step in graph.steps for name in step.inputs)
        """Tensor -> how many inputs of steps read it."""
        self._last_reader = {name: step for step in graph.steps for name in step.inputs}
        """Tensor -> the last step that reads it."""
        self._name_counts: Counter[str] = Counter()
        self._slabbed: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Kernel -> the name of its constant in slabs, and the layout for ``undo_slabs``."""
        self._flat: dict[str, str] = {}
        """Tensor -> the name of its copy of shape [1, rows x channels, ...]; it need not be computed itself."""
        self._computed = {tensor.name for tensor in graph.inputs} | set(graph.constants)
        """Tensors that are computed under their own name already, not only as a flat copy."""

    def keep(self, step: GraphStep) -> None:
        """Copy *step* unchanged; an elementwise step runs on flat tensors where that saves a reshape."""
        if not self._try_flatten(step):
            for name in step.inputs:
                self._materialise(name)
            self._steps.append(step)
            self._computed.update(step.outputs)

    def convolve(self, step: GraphStep, geometry: _Geometry) -> None:
        """Write *step* in slabs, with the scale and shift of the steps after it."""
        scale, shift, last = self._absorb_affine(step)
        source = step.inputs[0]
        self._materialise(source)
        if geometry.phases > 1:
            source = self._sort_columns(source, step, geometry.phases)
        outs = self.graph.shapes[step.outputs[0]][1]
        kernel = step.inputs[1]
        weight = self._constant(_slab_weight(self.graph.constants[kernel], geometry), kernel)
        slab_layout = (geometry.slabs, geometry.slab_rows, geometry.taps, geometry.phases, geometry.lead)
        self._slabbed[kernel] = weight, slab_layout
        rows, _, _, width = self.graph.shapes[step.outputs[0]]
        attributes = {
            "kernel_shape": [geometry.slab_rows, geometry.taps],
            "strides": [geometry.slab_rows, 1 if geometry.phases > 1 else step.attributes.get("strides", (1, 1))[1]],
            "pads": list(geometry.pads),
            "group": _groups(step),
        }
        shape = (rows, outs * geometry.slabs, geometry.rows, width)
        slabs_tensor = self._add("Conv", (source, weight), shape, attributes, step.layer)
        if len(scale) > 1 or len(shift) > 1:  # rows differ: then the sum has them as channels of a flat tensor
            self._flat[last] = self._sum_slabs(step, geometry, slabs_tensor, scale, shift)
        else:
            self._sum_slabs(step, geometry, slabs_tensor, scale, shift, last)
            self._computed.add(last)

    def finish(self) -> Graph:
        """The rewritten graph, without constants that no step reads."""
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
        """*origin* for the constant that holds the kernels in slabs."""
        name, slab_layout = self._slabbed.get(origin.constant, (origin.constant, origin.slabs))
        return origin._replace(constant=name, slabs=slab_layout)

    def _sum_slabs(
        self, step: GraphStep, geometry: _Geometry, slabs_tensor: str, scale: Array, shift: Array, output: str = ""
    ) -> str:
        """Add the depthwise convolution that sums the slabs in *slabs_tensor*, times *scale* plus *shift*.

        Return its output, called *output* or a new name: [1, rows x channels, height, width] if rows differ in scale or
        shift, else [rows, channels, ...].
        """
        rows, outs, height, width = self.graph.shapes[step.outputs[0]]
        affine_rows = max(len(scale), len(shift))
        first_size, channels = (rows, outs) if affine_rows == 1 else (1, rows * outs)
        stacked_shape = (first_size, channels, geometry.slabs * geometry.rows, width)
        stacked = self._reshape(slabs_tensor, stacked_shape, step.layer)
        factors = np.broadcast_to(scale, (affine_rows, outs)).reshape(-1, 1, 1, 1)
        taps = self._constant(np.repeat(factors, geometry.slabs, axis=2), _SUM_PREFIX)
        bias: tuple[str, ...] = ()
        if shift.any():
            # named after the old bias, if there is one, so that it counts as a weight as the old one did
            hint = step.inputs[2] if len(step.inputs) > 2 and affine_rows == 1 else "shift"
            bias = (self._constant(np.broadcast_to(shift, (affine_rows, outs)).ravel(), hint),)
        attributes = {
            "kernel_shape": [geometry.slabs, 1],
            "dilations": [geometry.rows + 1, 1],
            "pads": [geometry.outer[0], 0, geometry.outer[1], 0],
            "group": channels,
        }
        shape = (first_size, channels, height, width)
        return self._add("Conv", (stacked, taps, *bias), shape, attributes, step.layer, output)

    def _absorb_affine(self, step: GraphStep) -> tuple[Array, Array, str]:
        """Absorb the Mul and Add after *step*: return scale and shift [1 or rows, channels], and the last output."""
        dtype = self.graph.constants[step.inputs[1]].dtype
        outs = self.graph.shapes[step.outputs[0]][1]
        scale = np.ones((1, outs), dtype)
        shift = np.zeros((1, outs), dtype)
        if len(step.inputs) > 2:  # the convolution has a bias
            shift = self.graph.constants[step.inputs[2]].reshape(1, outs)
        last = step.outputs[0]
        for operator in ("Mul", "Add"):
            table = self._table_of(last, operator)
            if table is None:
                continue
            scale, shift = (scale * table, shift * table) if operator == "Mul" else (scale, shift + table)
            last = self._last_reader[last].outputs[0]
            self.absorbed.add(last)
        return scale, shift, last

    def _table_of(self, tensor: str, operator: str) -> Array | None:
        """The constant [1 or rows, channels] that *operator* combines *tensor* with.

        None unless that step is the only reader of *tensor*, and its constant has one number per channel.
        """
        reader = self._last_reader.get(tensor)
        if reader is None or self._read_counts[tensor] != 1 or reader.op != operator:
            return None
        table_name = reader.inputs[1] if reader.inputs[0] == tensor else reader.inputs[0]
        array = self.graph.constants.get(table_name)
        rows, outs = self.graph.shapes[tensor][:2]
        if array is None or array.shape not in ((1, outs, 1, 1), (rows, outs, 1, 1)) or array.dtype.kind != "f":
            return None
        return array.reshape(-1, outs)

    def _sort_columns(self, tensor: str, step: GraphStep, phases: int) -> str:
        """Sort columns by remainder; each set of columns becomes channels.

        The result is [rows, groups x phases x ins, height, width / phases].
        """
        rows, channels, height, width = self.graph.shapes[tensor]
        groups = _groups(step)
        split = (groups, channels // groups * height, width // phases, phases)
        merged = (phases * channels, height, width // phases)
        phase_first = (groups, phases, *split[1:3])  # *split* with its last axis, the remainder, behind the groups
        separated = self._reshape(tensor, (rows, *split), step.layer)
        transposed = self._add("Transpose", (separated,), (rows, *phase_first), {"perm": [0, 1, 4, 2, 3]}, step.layer)
        return self._reshape(transposed, (rows, *merged), step.layer)

    def _try_flatten(self, step: GraphStep) -> bool:
        """Run an elementwise *step* on flat tensors (``_flat``) if one of its inputs is flat; return whether it did."""
        tensors = [name for name in step.inputs if name and name not in self._constants]
        if not any(name in self._flat for name in tensors):
            return False
        shape = self._shapes[step.outputs[0]]
        same_shape = all(self._shapes[name] == shape for name in tensors)
        is_unary = step.op in _UNARY
        is_binary = step.op in ("Add", "Mul") and len(tensors) == len(step.inputs)
        if not (same_shape and (is_unary or is_binary)):
            return False
        flat = (1, shape[0] * shape[1], *shape[2:])
        inputs = tuple(self._flatten(name, flat, step.layer) if name in tensors else name for name in step.inputs)
        self._flat[step.outputs[0]] = self._add(step.op, inputs, flat, step.attributes, step.layer)
        return True

    def _flatten(self, name: str, flat: tuple[int, ...], layer: str) -> str:
        """Return the copy of tensor *name* in the shape *flat*, which is computed once."""
        if name not in self._flat:
            self._flat[name] = self._reshape(name, flat, layer)
        return self._flat[name]

    def _materialise(self, name: str) -> None:
        """Make sure that the tensor *name* itself is computed, not only its flat copy."""
        if name not in self._computed and name in self._flat:
            self._reshape(self._flat[name], self._shapes[name], layer="", output=name)
            self._computed.add(name)

    def _reshape(self, tensor: str, shape: tuple[int, ...], layer: str, output: str = "") -> str:
        target = np.array([0 if size == DYNAMIC else size for size in shape], np.int64)  # 0 keeps the tensor's size
        return self._add("Reshape", (tensor, self._constant(target, "shape")), shape, {}, layer, output)

    def _constant(self, array: Array, hint: str) -> str:
        """Store *array* under a new name that begins with *hint*; a weight if *hint* names one."""
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
        """Add a step and return its output, which is called *output* or gets a new name."""
        name = output or self._fresh(op.lower())
        self._steps.append(GraphStep(op, inputs, (name,), attributes, layer))
        self._shapes[name] = shape
        return name

    def _fresh(self, hint: str) -> str:
        """An unused name that begins with *hint*."""
        while True:
            self._name_counts[hint] += 1
            name = f"{hint}.{self._name_counts[hint]}"
            if name not in self._shapes and name not in self._constants:
                return name


def _groups(step: GraphStep) -> int:
    return int(step.attributes.get("group", 1))


def undo_slabs(weight: Array, layout: Sequence[int], window: tuple[int, int]) -> Array:
    """Restore the kernel [out, in, height, width] of which ``_slab_weight`` made *weight*.

    *layout*: number of slabs, rows per slab, taps, phases, leading zeros. *window*: height and width of the kernel.
    """
    slabs, rows, taps, phases, lead = layout
    outs, ins = weight.shape[0] // slabs, weight.shape[1] // phases
    by_row = weight.reshape(outs, slabs, phases, ins, rows, taps).transpose(0, 3, 1, 4, 5, 2)
    padded = by_row.reshape(outs, ins, slabs * rows, taps * phases)
    return padded[:, :, : window[0], lead : lead + window[1]]


def _slab_weight(weight: Array, geometry: _Geometry) -> Array:
    """The kernel *weight* as the first convolution reads it: [outs x slabs, ins x phases, rows of a slab, taps]."""
    outs, ins, height, width = weight.shape
    # zero columns that fill up the last tap; unsorted columns need none
    trailing = geometry.phases * geometry.taps - geometry.lead - width if geometry.phases > 1 else 0
    missing_rows = geometry.slabs * geometry.slab_rows - height
    padded = np.pad(weight, ((0, 0), (0, 0), (0, missing_rows), (geometry.lead, trailing)))
    by_slab = padded.reshape(outs, ins, geometry.slabs, geometry.slab_rows, geometry.taps, geometry.phases)
    shape = (outs * geometry.slabs, geometry.phases * ins, geometry.slab_rows, geometry.taps)
    return by_slab.transpose(0, 2, 5, 1, 3, 4).reshape(shape)

"""A small builder of ONNX graphs whose trained values are declared, not generated.

A weight enters the graph as an initializer with dimensions, a type and a recipe (see ``weights``) but no data, so that
a network of a gigabyte is described in some kilobytes. Constants that give the graph its shape (reshape targets, slice
bounds, scalars) carry their data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from weft.base.errors import ModelError
from weft.models.element_types import ElementType
from weft.models.onnx_graph import (
    OnnxModel,
    OnnxNode,
    OnnxTensor,
    OnnxValue,
    declared,
    make_model,
    make_node,
    to_tensor,
)
from weft.models.zoo import weights

BATCH = "batch"
"""The symbolic first dimension of every input and output."""

OPSET = 20
"""The first opset with both LayerNormalization and Gelu."""
IR_VERSION = 10
"""The file version of ONNX 1.16; runtimes refuse files of versions newer than they support."""

Pair = int | tuple[int, int]


class GraphValue(NamedTuple):
    """A tensor in the graph."""

    name: str
    width: int
    """Size of the axis that layers reduce over: channels of an image, features of a vector."""


NOTHING = GraphValue("", 0)
"""An optional input that is left out."""


class GraphBuilder:
    """Collects the nodes of a graph in execution order; a node and its output have the same name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.metadata: dict[str, str] = {}
        self._nodes: list[OnnxNode] = []
        self._inputs: list[OnnxValue] = []
        self._outputs: list[OnnxValue] = []
        self._initializers: dict[str, OnnxTensor] = {}

    def proto(self) -> OnnxModel:
        return make_model(
            self._nodes,
            self.name,
            self._inputs,
            self._outputs,
            self._initializers.values(),
            opset=OPSET,
            ir_version=IR_VERSION,
            producer="weft",
            metadata=self.metadata,
        )

    # Ends of the graph

    def input(self, name: str, kind: int, dims: Sequence[int], width: int) -> GraphValue:
        """Add an input of element type *kind*; its shape is the batch, then *dims*."""
        self._inputs.append(declared(name, kind, [BATCH, *dims]))
        return GraphValue(name, width)

    def image(self, resolution: int, *, at_least: int = 1) -> GraphValue:
        """Add the input of a vision model, a square image of three channels.

        Raises ModelError for less than *at_least* pixels, with which the pools would leave no pixel.
        """
        if resolution < at_least:
            raise ModelError(f"{self.name}: resolution must be at least {at_least}, got {resolution}")
        return self.input("input", ElementType.FLOAT, (3, resolution, resolution), width=3)

    def ids(self, name: str, *dims: int) -> GraphValue:
        """Add an input of integers: tokens, users, masks."""
        return self.input(name, ElementType.INT64, dims, width=1)

    def output(self, value: GraphValue, name: str, *dims: int) -> None:
        """Make *value* an output named *name*; as its node's output is renamed, no other node may read it."""
        producer = next(node for node in reversed(self._nodes) if node.output[0] == value.name)
        producer.output[0] = name
        self._outputs.append(declared(name, ElementType.FLOAT, [BATCH, *dims]))

    # Pieces

    def node(self, op: str, name: str, *inputs: GraphValue, width: int = 0, **attributes: Any) -> GraphValue:
        """Add a node with one output; *width*: of the output, by default that of the first input."""
        names = [value.name for value in inputs]
        self._nodes.append(make_node(op, names, [name], name, **attributes))
        return GraphValue(name, width or inputs[0].width)

    def weight(self, name: str, dims: Sequence[int], recipe: str) -> GraphValue:
        """Declare a weight without values; *recipe*: how ``weights`` generates them."""
        self._initializers[name] = weights.declare(name, dims, recipe)
        return GraphValue(name, dims[-1])

    def constant(self, name: str, value: ArrayLike, dtype: type = np.float32) -> GraphValue:
        """Add a constant with a value; if *name* exists already, return the existing constant."""
        if name not in self._initializers:
            self._initializers[name] = to_tensor(np.asarray(value, dtype), name)
        return GraphValue(name, 1)

    def reshape(self, x: GraphValue, name: str, *dims: int, width: int = 0) -> GraphValue:
        """Reshape to *dims*, where 0 keeps the input's size of this axis."""
        shape = self.constant("shape_" + "_".join(map(str, dims)), dims, np.int64)
        return self.node("Reshape", name, x, shape, width=width)

    def slice(self, x: GraphValue, name: str, axis: int, start: int, end: int) -> GraphValue:
        bounds = [self.constant(f"index_{i}", [i], np.int64) for i in (start, end, axis)]
        return self.node("Slice", name, x, *bounds)

    # Layers

    def conv_bn(
        self,
        x: GraphValue,
        name: str,
        out: int,
        kernel: Pair = 1,
        *,
        stride: int = 1,
        pad: Pair | None = None,
        groups: int = 1,
        activation: str = "relu",
    ) -> GraphValue:
        """Convolution without bias, batch normalisation, then relu, relu6 or none.

        Without *pad*, an odd kernel keeps the size of the image at stride 1.
        """
        return self.conv(
            x, name, out, kernel, stride=stride, pad=pad, groups=groups, bias=False, norm=True, activation=activation
        )

    def conv(
        self,
        x: GraphValue,
        name: str,
        out: int,
        kernel: Pair = 1,
        *,
        stride: int = 1,
        pad: Pair | None = None,
        groups: int = 1,
        bias: bool = True,
        norm: bool = False,
        activation: str = "relu",
    ) -> GraphValue:
        """Convolution, batch normalisation if *norm*, then relu, relu6 or none."""
        biases = [self.weight(f"{name}.bias", (out,), weights.BIAS)] if bias else []
        size = _pair(kernel)
        pads = _pair(pad) if pad is not None else ((size[0] - 1) // 2, (size[1] - 1) // 2)
        dims = (out, x.width // groups, *size)
        recipe = weights.he(math.prod(dims[1:]), rectified=activation != "none")
        weight = self.weight(f"{name}.weight", dims, recipe)
        attributes = {"kernel_shape": size, "strides": (stride, stride), "pads": pads * 2, "group": groups}
        y = self.node("Conv", name, x, weight, *biases, width=out, **attributes)
        return self.activation(self._batch_norm(y, f"{name}.bn") if norm else y, name, activation)

    def norm_relu(self, x: GraphValue, name: str) -> GraphValue:
        """Batch normalisation that does not directly follow a convolution, then relu."""
        return self.node("Relu", f"{name}.relu", self._batch_norm(x, name))

    def activation(self, x: GraphValue, name: str, kind: str) -> GraphValue:
        if kind == "relu6":
            bounds = self.constant("relu6.min", 0), self.constant("relu6.max", 6)
            return self.node("Clip", f"{name}.relu6", x, *bounds)
        return self.node("Relu", f"{name}.relu", x) if kind == "relu" else x

    def _batch_norm(self, x: GraphValue, name: str) -> GraphValue:
        vectors = [self.weight(f"{name}.{part}", (x.width,), recipe) for part, recipe in weights.BATCH_NORM.items()]
        return self.node("BatchNormalization", name, x, *vectors)

    def pool(
        self, op: str, x: GraphValue, name: str, kernel: int, *, stride: int, pad: int = 0, partial: bool = False
    ) -> GraphValue:
        """``MaxPool`` or ``AveragePool``; an average includes the padding, as in the published models.

        partial: also pool windows that reach beyond the edge, as Caffe does.
        """
        sizes: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        if op == "AveragePool":
            sizes["count_include_pad"] = 1
        if partial:
            sizes["ceil_mode"] = 1
        return self.node(op, name, x, **sizes)

    def local_norm(self, x: GraphValue, name: str) -> GraphValue:
        """Local response normalisation over five channels (Krizhevsky et al. 2012, section 3.3)."""
        return self.node("LRN", name, x, size=5, alpha=1e-4, beta=0.75, bias=1.0)

    def classifier(self, x: GraphValue, name: str, classes: int) -> None:
        """Add global average pooling, a fully connected layer and the output with a logit per class."""
        x = self.node("Flatten", "flatten", self.node("GlobalAveragePool", "pool", x), axis=1)
        self.output(self.dense(x, name, classes), "logits", classes)

    def dense(self, x: GraphValue, name: str, out: int) -> GraphValue:
        """A fully connected layer on vectors, as one Gemm with bias."""
        weight = self.weight(f"{name}.weight", (out, x.width), weights.xavier(x.width, out))
        bias = self.weight(f"{name}.bias", (out,), weights.BIAS)
        return self.node("Gemm", name, x, weight, bias, width=out, transB=1)

    def project(self, x: GraphValue, name: str, out: int, *, bias: bool = True) -> GraphValue:
        """A fully connected layer on every token, as MatMul and Add."""
        weight = self.weight(f"{name}.weight", (x.width, out), weights.xavier(x.width, out))
        y = self.node("MatMul", name, x, weight, width=out)
        return self.shift(y, f"{name}.shifted", f"{name}.bias") if bias else y

    def shift(self, x: GraphValue, name: str, bias: str) -> GraphValue:
        """Add a trained vector, the weight named *bias*, to *x*."""
        return self.node("Add", name, x, self.weight(bias, (x.width,), weights.BIAS))

    def layer_norm(self, x: GraphValue, name: str) -> GraphValue:
        scale = self.weight(f"{name}.scale", (x.width,), weights.SCALE)
        bias = self.weight(f"{name}.bias", (x.width,), weights.BIAS)
        return self.node("LayerNormalization", name, x, scale, bias, axis=-1, epsilon=1e-12)

    def embedding(self, ids: GraphValue, name: str, rows: int, width: int) -> GraphValue:
        table = self.weight(f"{name}.weight", (rows, width), weights.TABLE)
        return self.node("Gather", name, table, ids, width=width, axis=0)


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value

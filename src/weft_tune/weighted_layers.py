"""The layers of an ONNX file that have weights: convolutions and matrix products by a constant.

They are named after their weights without the ending: ``conv1.weight`` belongs to ``conv1``. If the name of the weight
has no such ending, the node's name is used. Names are unique and contain no blank, so that a text file can say
``conv1.weight`` and ``conv1.input``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import ModelError, TuneError
from weft.models.onnx_graph import (
    STANDARD_DOMAINS,
    OnnxGraph,
    OnnxModel,
    OnnxNode,
    constant_tensor,
    constants,
    evaluate,
    fill,
    initializers,
    inlined,
    load,
    makers,
    needed_nodes,
    request_inputs,
    to_array,
)

Floats = npt.NDArray[np.float32]

KINDS = {"Conv": "conv", "ConvTranspose": "conv", "Gemm": "fc", "MatMul": "fc"}
"""Operator -> kind of layer."""

CONSTANTS_ARE_NO_INPUTS = 4
"""The first file version in which initialisers need not be inputs, too."""

_WEIGHT_NAME = re.compile(r"^(.+?)[._/](?:weights?|kernel|[wW])(?::\d+)?$")
"""Names of weights with an ending that says so."""


class WeightedLayer(NamedTuple):
    """A node whose second operand is constant."""

    name: str
    op: str
    position: int
    """The place of its node in the graph."""
    weight: Floats
    """The weights, laid out as the node takes them."""
    stored: str | None
    """The initialiser that is the weight; None where the weight is computed, from a transposed one for example."""

    @property
    def kind(self) -> str:
        return KINDS[self.op]


def load_flat(path: str | os.PathLike[str]) -> OnnxModel:
    """Read a file with its functions inlined and its Constant nodes as initialisers, which are no inputs any more."""
    path = Path(path)
    if not path.is_file():
        raise ModelError(
            f"{path}: {'is a directory' if path.is_dir() else 'there is no such file'}; name an .onnx file"
        )
    try:
        model = load(path, weights=True)
    except Exception as error:  # protobuf and missing weight files each raise their own kinds
        raise ModelError(f"{path}: is no ONNX file: {' '.join(str(error).split())[:200]}") from error
    if not model.graph.node:
        raise ModelError(f"{path}: is no ONNX file, or has no node")
    return flat(model)


def flat(model: OnnxModel) -> OnnxModel:
    """Return the flat graph of a model in memory; changes the model."""
    model = inlined(model)
    _hoist_constants(model.graph)
    fill(model.graph.input, request_inputs(model.graph))
    model.ir_version = max(model.ir_version, CONSTANTS_ARE_NO_INPUTS)
    return model


def _hoist_constants(graph: OnnxGraph) -> None:
    """Turn the Constant nodes of *graph* into initialisers."""
    hoisted = constants(graph).values()
    fill(graph.node, [node for node in graph.node if constant_tensor(node) is None])
    fill(graph.initializer, hoisted)


def find_layers(model: OnnxModel) -> tuple[WeightedLayer, ...]:
    """Return all layers with weights, in the order of the graph."""
    folded = _FoldedTensors(model)
    taken_names: set[str] = set()
    layers = []
    for position, node in enumerate(model.graph.node):
        if node.op_type not in KINDS or node.domain not in STANDARD_DOMAINS or len(node.input) < 2:
            continue
        roots = folded.roots(node.input[1])
        # Products of two activations, or of two constants, are no layers.
        if roots is None or folded.roots(node.input[0]) is not None:
            continue
        weight = folded.value(node.input[1])
        if weight.dtype.kind in "iu":  # integers are not tuned
            continue
        name = _unique(_name(node, roots), taken_names)
        if weight.dtype != np.float32:
            raise TuneError(f"layer {name!r} has weights of type {weight.dtype}; convert the model to float32")
        stored = node.input[1] if node.input[1] in roots else None
        layers.append(WeightedLayer(name, node.op_type, position, np.ascontiguousarray(weight), stored))
    if not layers:
        operators = ", ".join(sorted({node.op_type for node in model.graph.node}))
        raise TuneError(f"no layer to tune: no {', '.join(KINDS)} has constant weights; the operators are {operators}")
    return tuple(layers)


class _FoldedTensors:
    """Computes the tensors of a graph that depend on none of its inputs."""

    def __init__(self, model: OnnxModel) -> None:
        self._model = model
        self._stored = initializers(model.graph)
        self._makers = makers(model.graph.node)

    def roots(self, name: str) -> list[str] | None:
        """The initialisers that tensor *name* is computed from; None if it depends on an input of the graph."""
        roots, pending = list[str](), [name]
        while pending:
            tensor = pending.pop()
            if tensor in self._stored:
                roots.append(tensor)
            elif tensor in self._makers and all(self._makers[tensor].input):
                pending += self._makers[tensor].input
            else:
                return None
        return roots or None

    def value(self, name: str) -> npt.NDArray[Any]:
        """The value of tensor *name*; raises TuneError if it cannot be computed."""
        try:
            return self._computed(name)
        except Exception as error:  # numpy and the reference operators each raise their own kinds
            raise TuneError(f"weight {name!r} cannot be read: {' '.join(str(error).split())[:200]}") from error

    def _computed(self, name: str) -> npt.NDArray[Any]:
        """Read tensor *name*, or evaluate the nodes that compute it from initialisers."""
        if name in self._stored:
            return to_array(self._stored[name])
        nodes = needed_nodes(self._model.graph.node, [name])
        read = {tensor for node in nodes for tensor in node.input if tensor in self._stored}
        (value,) = evaluate(self._model, nodes, {tensor: to_array(self._stored[tensor]) for tensor in read}, [name])
        return value


def _name(node: OnnxNode, roots: list[str]) -> str:
    """A name for the layer of *node*: conv1.weight -> conv1; /fc1/MatMul -> fc1; otherwise its kind, as conv1.

    roots: names of the initialisers that its weight is computed from.
    """
    for root in roots:
        if (match := _WEIGHT_NAME.match(root)) is not None:
            return match[1]
    if node.name:
        node_name: str = node.name
        return node_name.strip("/").removesuffix(f"/{node.op_type}")
    return f"{KINDS[node.op_type]}1"


def _unique(name: str, taken: set[str]) -> str:
    """*name* without special characters, counted up if it is in *taken*; the result is added to *taken*."""
    clean = re.sub(r"/{2,}", "/", re.sub(r"[^\w./:+-]", "_", name)).strip("/") or "layer1"
    stem = clean.rstrip("0123456789")
    counter, separator = (int(clean[len(stem) :]), "") if stem != clean else (1, "_")
    candidate = clean
    while candidate in taken:
        counter += 1
        candidate = f"{stem}{separator}{counter}"
    taken.add(candidate)
    return candidate

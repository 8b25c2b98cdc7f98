"""A model whose layers are computed in float16, by casts around each; on most processors that helps nobody."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from weft_tune.export.emitter import Emitter
from weft_tune.runtime_target.prepared import FastLayer, PreparedModel
from weft_tune.runtime_target.qdq import WrittenVariant, replace_nodes

LARGEST = 65504.0
"""In float16."""


def write_halves(prepared: PreparedModel) -> WrittenVariant:
    """The model with all its layers in float16."""
    model = ModelProto()
    model.CopyFrom(prepared.model)
    emitter, owners = Emitter(model.graph), dict[str, str]()
    layers = {layer.position: layer for layer in prepared.layers}
    nodes: list[NodeProto] = []
    for position, node in enumerate(model.graph.node):
        around = _halved(node, layers[position], emitter) if position in layers else [node]
        owners |= {each.output[0]: layers[position].name for each in around if position in layers}
        nodes += around
    replace_nodes(model.graph, nodes, emitter.constants)
    return WrittenVariant(model, owners)


def _halved(node: NodeProto, layer: FastLayer, emitter: Emitter) -> list[NodeProto]:
    """The node between its casts."""
    enters, inside = emitter.name(f"{layer.name}/half"), emitter.name(f"{layer.name}/half/out")
    before = helper.make_node("Cast", [node.input[0]], [enters], name=enters, to=TensorProto.FLOAT16)
    after = helper.make_node("Cast", [inside], [node.output[0]], name=f"{inside}/Cast", to=TensorProto.FLOAT)
    node.input[0], node.output[0] = enters, inside
    for place, values in ((1, layer.weight), (2, layer.bias)):
        if values is not None:
            half = np.clip(values, -LARGEST, LARGEST).astype(np.float16)
            node.input[place] = emitter.stored(numpy_helper.from_array(half, ""), f"{layer.name}/half/{place}")
    return [before, node, after]

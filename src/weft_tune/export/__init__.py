"""A tuned network as an ONNX file: ``export`` in memory, ``write_export`` to disk.

Four styles. ``qdq``: inputs whose format is an ONNX type become that, by QuantizeLinear and DequantizeLinear, and their
weights too, where both are integers; other weights are kept as codes with a table, other inputs are rounded by
arithmetic. ``packed``: every weight of up to 8 bits takes exactly the bits of its format. ``simulated``: float32
weights, already rounded, and arithmetic; the plainest to read. Those three run in a stock onnxruntime. ``qonnx``: nodes
of the QONNX dialect, for tools that read it; onnxruntime does not.

On x86 processors without VNNI, onnxruntime adds products of 8-bit integers in 16 bits, which may overflow in ``qdq``
models; with the entry ``session.x64quantprecision`` of its session options set to 1 it does not.

``tensors`` writes tensors in a format; ``emitter`` has types, opsets and unique names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from weft.base.errors import TuneError, unknown_name
from weft.models.onnx_graph import (
    OnnxGraph,
    OnnxModel,
    OnnxNode,
    add_opset,
    copied,
    metadata,
    needed_nodes,
    node_name,
    replace_nodes,
    set_metadata,
    write_model,
)
from weft.models.onnx_import.widths import FORMATS, Widths, noted
from weft_tune.export import tensors
from weft_tune.export.emitter import LEAST_OPSET, Emitter, onnx_type, raise_opset
from weft_tune.network import Network, check_layers
from weft_tune.numbers.configuration import AnyFormat, Configuration
from weft_tune.numbers.format import FLOAT32
from weft_tune.weighted_layers import find_layers, flat, load_flat

__all__ = ["FORMATS", "STYLES", "Style", "export", "write_export"]

Style = Literal["qdq", "packed", "simulated", "qonnx"]
STYLES: tuple[Style, ...] = get_args(Style)

DATA, WEIGHT = 0, 1
"""Positions of the operands among the inputs of a node."""

# Style -> the function that writes inputs, and the function that writes weights.
_INPUT_WRITERS: dict[Style, Callable[[Emitter, str, AnyFormat], str]] = {
    "qdq": tensors.quantise,
    "packed": tensors.quantise,
    "simulated": tensors.simulate,
    "qonnx": tensors.quantise_qonnx,
}
_WEIGHT_WRITERS = {
    "qdq": tensors.store_codes,
    "packed": tensors.store_codes,
    "simulated": tensors.store_rounded,
    "qonnx": tensors.store_rounded,
}


class Site(NamedTuple):
    """A tuned layer in a graph, where ``export`` makes a node read rounded tensors."""

    layer: str
    position: int
    """The place of its node in the graph."""
    weight: npt.NDArray[np.float32]


def export(
    model: str | os.PathLike[str] | OnnxModel,
    network: Network,
    configuration: Configuration,
    style: Style = "qdq",
) -> OnnxModel:
    """Return *model* with the weights and inputs of the network's layers in the formats of *configuration*.

    A model in memory is not changed. Raises TuneError if the formats cannot be expressed in the *style*.
    """
    if style not in STYLES:
        raise TuneError(unknown_name("style", style, STYLES))
    for name in configuration:
        if name not in network.objects:
            raise TuneError(f"{network.name}: {unknown_name('object', name, network.objects)}")
    source = load_flat(model) if isinstance(model, str | os.PathLike) else flat(copied(model))  # the caller's stays
    proto = raise_opset(source, max(_least_opset(layer, configuration, style) for layer in network.layers))
    emitter = Emitter(proto.graph)
    sites = find_sites(proto, network)
    widths = _operand_widths(proto.graph, sites, configuration)
    nodes_before, rounded = _quantise(proto.graph, sites, configuration, style, emitter)
    nodes = [added for n, node in enumerate(proto.graph.node) for added in (*nodes_before.get(n, ()), node)]
    replace_nodes(proto.graph, needed_nodes(nodes, [output.name for output in proto.graph.output]), emitter.constants)
    if style == "qonnx":
        add_opset(proto, tensors.QONNX_DOMAIN, tensors.QONNX_VERSION)
    set_metadata(proto, {**metadata(proto), FORMATS: configuration.text, **noted(widths, rounded)})
    return proto


def write_export(
    path: str | os.PathLike[str],
    model: str | os.PathLike[str] | OnnxModel,
    network: Network,
    configuration: Configuration,
    style: Style = "qdq",
) -> None:
    """Write the file; very large weights go to ``<path>.data`` beside it."""
    write_model(path, export(model, network, configuration, style), TuneError)


def find_sites(model: OnnxModel, network: Network) -> list[Site]:
    """Find the nodes and weights of the network's layers, in the order of the graph.

    model: as ``flat`` returns it, without functions and Constant nodes.
    """
    known = {layer.name: layer for layer in find_layers(model)}
    check_layers(network, known, network.name)
    sites = [Site(name, known[name].position, known[name].weight) for name in network.layers]
    return sorted(sites, key=lambda site: site.position)


def _least_opset(layer: str, configuration: Configuration, style: Style) -> int:
    """The least opset that has the operators for the formats of a layer."""
    if style not in ("qdq", "packed"):
        return LEAST_OPSET
    data = tensors.activation_type(configuration[f"{layer}.input"])
    weight = onnx_type(configuration[f"{layer}.weight"]) if _both_integers(layer, configuration, style) else None
    return max([LEAST_OPSET, *(target.opset for target in (data, weight) if target)])


def _both_integers(layer: str, configuration: Configuration, style: Style) -> bool:
    """Whether the weight may be stored as integers with DequantizeLinear: in style qdq, if the input is integer, too.

    With a float input, onnxruntime would quantise the input itself, to use its kernels for integer weights.
    """
    data = tensors.activation_type(configuration[f"{layer}.input"])
    weight = onnx_type(configuration[f"{layer}.weight"])
    return style == "qdq" and bool(data and weight and data.integer and weight.integer)


def _quantise(
    graph: OnnxGraph, sites: list[Site], configuration: Configuration, style: Style, emitter: Emitter
) -> tuple[dict[int, list[OnnxNode]], dict[str, str]]:
    """Make the nodes of *sites* read rounded tensors.

    Returns the nodes to be written before each site, by its position, and rounded input -> its source.
    """
    nodes_before: dict[int, list[OnnxNode]] = {}
    # (tensor, format, whether DequantizeLinear produces it) -> the rounded tensor; layers share it.
    shared: dict[tuple[str, AnyFormat, bool], str] = {}
    rounded: dict[str, str] = {}
    for site in sites:
        node = graph.node[site.position]
        integers = _both_integers(site.layer, configuration, style)
        for role, operand in (("weight", WEIGHT), ("input", DATA)):
            form, source = configuration[f"{site.layer}.{role}"], node.input[operand]
            if form == FLOAT32:
                continue
            key = (source, form, integers and operand == WEIGHT)
            if key not in shared and operand == DATA:
                shared[key] = _INPUT_WRITERS[style](emitter, source, form)
            elif key not in shared:
                shared[key] = _write_weight(emitter, site, form, style, integers)
            node.input[operand] = shared[key]
            if operand == DATA and shared[key] != source:
                rounded[shared[key]] = source
        nodes_before[site.position] = emitter.take()
    return nodes_before, rounded


def _write_weight(emitter: Emitter, site: Site, form: AnyFormat, style: Style, integers: bool) -> str:
    """Write the weight of *site* in *form*; return the name of the tensor with its rounded values."""
    write = tensors.store_integers if integers else _WEIGHT_WRITERS[style]
    name = write(emitter, site.weight, form, f"{site.layer}.weight")
    return tensors.quantise_qonnx(emitter, name, form) if style == "qonnx" else name


def _operand_widths(graph: OnnxGraph, sites: list[Site], configuration: Configuration) -> dict[str, Widths]:
    """Node -> the bits of its operands."""
    return {
        node_name(graph.node[site.position]): Widths(
            configuration[f"{site.layer}.weight"].bits, configuration[f"{site.layer}.input"].bits
        )
        for site in sites
    }

"""A tuned network as an ONNX file: ``export`` in memory, ``write_export`` to disk.

Four styles. ``qdq``: inputs whose format is an ONNX type become that, by QuantizeLinear and DequantizeLinear, and their
weights too, where both are integers; other weights are kept as codes with a table, other inputs are rounded by
arithmetic. ``packed``: every weight of up to 8 bits takes exactly the bits of its format. ``simulated``: float32
weights, already rounded, and arithmetic; the plainest to read. Those three run in a stock onnxruntime. ``qonnx``: nodes
of the QONNX dialect, for tools that read it; onnxruntime does not.

On x86 processors without VNNI, onnxruntime adds products of 8-bit integers in 16 bits, which may overflow in ``qdq``
models; with the entry ``session.x64quantprecision`` of its session options set to 1 it does not.

``types`` says which formats are ONNX types, ``weights`` and ``activations`` write them, ``qonnx`` writes the dialect,
``sites`` finds the layers, ``emitter`` and ``opsets`` look after names and versions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import onnx
from onnx import helper

from weft.base.errors import TuneError, unknown_name
from weft.base.files import replacing
from weft.models.onnx_import.walk import names_read
from weft.models.onnx_import.widths import FORMATS, Widths, node_name, noted
from weft.models.weighted_layers import flat, load_flat
from weft_tune.export import activations, qonnx, weights
from weft_tune.export.emitter import Emitter
from weft_tune.export.opsets import LEAST, raised
from weft_tune.export.sites import DATA, WEIGHT, Site, find_sites
from weft_tune.export.types import typed
from weft_tune.network import Network
from weft_tune.numbers.configuration import AnyFormat, Configuration
from weft_tune.numbers.format import FLOAT32

__all__ = ["FORMATS", "STYLES", "Style", "export", "write_export"]

Style = Literal["qdq", "packed", "simulated", "qonnx"]
STYLES: tuple[Style, ...] = get_args(Style)

MOST_BYTES_IN_FILE = 1_800_000_000
"""Protobuf ends at 2 GiB; a larger model keeps its weights in a file beside it."""

_INPUTS: dict[Style, Callable[[Emitter, str, AnyFormat], str]] = {
    "qdq": activations.quantised,
    "packed": activations.quantised,
    "simulated": activations.simulated,
    "qonnx": qonnx.quantised,
}
_WEIGHTS = {"qdq": weights.packed, "packed": weights.packed, "simulated": weights.plain, "qonnx": weights.plain}

_Key = tuple[str, AnyFormat, bool]
"""A tensor, its format, and whether DequantizeLinear makes it."""


def export(
    model: str | os.PathLike[str] | onnx.ModelProto,
    network: Network,
    configuration: Configuration,
    style: Style = "qdq",
) -> onnx.ModelProto:
    """*model* with the weights and inputs of the network's layers in the formats of *configuration*."""
    if style not in STYLES:
        raise TuneError(unknown_name("style", style, STYLES))
    _check_objects(network, configuration)
    proto = raised(_read(model), max(_opset(layer, configuration, style) for layer in _layers(network)))
    emitter = Emitter(proto.graph)
    sites = find_sites(proto, network)
    widths = _widths(proto.graph, sites, configuration)
    before, rounded = _quantise(proto.graph, sites, configuration, style, emitter)
    _rebuild(proto.graph, before, emitter)
    if style == "qonnx":
        proto.opset_import.append(helper.make_opsetid(qonnx.DOMAIN, qonnx.VERSION))
    kept = {entry.key: entry.value for entry in proto.metadata_props}
    helper.set_model_props(proto, {**kept, FORMATS: configuration.text, **noted(widths, rounded)})
    return proto


def write_export(
    path: str | os.PathLike[str],
    model: str | os.PathLike[str] | onnx.ModelProto,
    network: Network,
    configuration: Configuration,
    style: Style = "qdq",
) -> None:
    """Write the file; very large weights go to ``<path>.data`` beside it."""
    proto = export(model, network, configuration, style)
    data = os.path.basename(os.path.realpath(path)) + ".data"
    outside = proto.ByteSize() > MOST_BYTES_IN_FILE
    with replacing(path, TuneError) as beside:
        onnx.save_model(proto, str(beside), save_as_external_data=outside, location=data)


def _read(model: str | os.PathLike[str] | onnx.ModelProto) -> onnx.ModelProto:
    """Flat, and the caller's own stays as it is."""
    if not isinstance(model, onnx.ModelProto):
        return load_flat(os.fspath(model))
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return flat(copy)


def _layers(network: Network) -> Iterator[str]:
    return (layer for target in network.targets for layer in target.layers)


def _opset(layer: str, configuration: Configuration, style: Style) -> int:
    """The least that has the operators for the formats of a layer."""
    if style not in ("qdq", "packed"):
        return LEAST
    data = activations.pair_type(configuration[f"{layer}.input"])
    weight = typed(configuration[f"{layer}.weight"]) if _both_integers(layer, configuration, style) else None
    return max([LEAST, *(each.opset for each in (data, weight) if each)])


def _both_integers(layer: str, configuration: Configuration, style: Style) -> bool:
    """Whether DequantizeLinear may stand before the weight.

    It must not if the input is no integer: onnxruntime would make one of it to use its kernels for such weights.
    """
    data, weight = activations.pair_type(configuration[f"{layer}.input"]), typed(configuration[f"{layer}.weight"])
    return style == "qdq" and bool(data and weight and data.integer and weight.integer)


def _check_objects(network: Network, configuration: Configuration) -> None:
    known = {name for target in network.targets for role in ("weight", "input") for name in target.objects(role)}
    for name in configuration:
        if name not in known:
            raise TuneError(f"{network.name}: {unknown_name('object', name, known)}")


def _quantise(
    graph: onnx.GraphProto, sites: list[Site], configuration: Configuration, style: Style, emitter: Emitter
) -> tuple[dict[int, list[onnx.NodeProto]], dict[str, str]]:
    """Rewire the nodes of *sites*; the nodes to be written before each, by its position, and what is rounded."""
    before: dict[int, list[onnx.NodeProto]] = {}
    made: dict[_Key, str] = {}
    rounded: dict[str, str] = {}
    for site in sites:
        node = graph.node[site.position]
        pair = _both_integers(site.layer, configuration, style)
        for role, place in (("weight", WEIGHT), ("input", DATA)):
            form, source = configuration[f"{site.layer}.{role}"], node.input[place]
            if form == FLOAT32:
                continue
            key = (source, form, pair and place == WEIGHT)
            if key not in made:
                made[key] = _written(emitter, site, key, place, style)
            node.input[place] = made[key]
            if place == DATA and made[key] != source:
                rounded[made[key]] = source
        before[site.position] = emitter.take()
    return before, rounded


def _widths(graph: onnx.GraphProto, sites: list[Site], configuration: Configuration) -> dict[str, Widths]:
    """Node -> the bits of what it reads."""
    return {
        node_name(graph.node[site.position]): Widths(
            configuration[f"{site.layer}.weight"].bits, configuration[f"{site.layer}.input"].bits
        )
        for site in sites
    }


def _written(emitter: Emitter, site: Site, what: _Key, place: int, style: Style) -> str:
    source, form, pair = what
    if place == DATA:
        return _INPUTS[style](emitter, source, form)
    write = weights.dequantised if pair else _WEIGHTS[style]
    name = write(emitter, site.weight, form, f"{site.layer}.weight")
    return qonnx.quantised(emitter, name, form) if style == "qonnx" else name


def _rebuild(graph: onnx.GraphProto, before: dict[int, list[onnx.NodeProto]], emitter: Emitter) -> None:
    """The graph in order again, with its new constants and without what nobody reads any more."""
    nodes = [each for place, node in enumerate(graph.node) for each in (*before.get(place, ()), node)]
    wanted = {each.name for each in graph.output}
    kept = []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted |= names_read(node)
    constants = [each for each in (*graph.initializer, *emitter.constants) if each.name in wanted]
    for field, values in (("node", kept[::-1]), ("initializer", constants)):
        copies = [type(each).FromString(each.SerializeToString()) for each in values]
        graph.ClearField(field)
        getattr(graph, field).extend(copies)

"""Import of ONNX files: every layer's arithmetic, weights and traffic, without reading the weights.

The steps: read the file and fix the input shapes (here), walk the graph (``walk``) while the outputs of each node
are inferred (``infer``) and its work is counted (``weft.models.operators``), fuse activations and biases into the
products before them (``walk.fuse``), find where the graph can be cut (``cuts``), then name layers, assign parameters
and apply the bit widths of tuned files (``widths``).
"""

from __future__ import annotations

import math
import os
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.base.errors import ModelError, ShapeNeeded
from weft.base.files import refuse_special_file
from weft.base.shapes import Dimension, describe_dimensions, settle
from weft.models.element_types import ElementType, dtype_bits
from weft.models.layer import Layer, Model
from weft.models.onnx_graph import (
    OnnxGraph,
    OnnxModel,
    bodies,
    inlined,
    load,
    metadata,
    opsets,
    request_inputs,
)
from weft.models.onnx_import.cuts import Subnets, block_ends, named_exits
from weft.models.onnx_import.drafts import LayerDraft
from weft.models.onnx_import.infer import Inference, size_of, tensor_type
from weft.models.onnx_import.tensors import MAX_ELEMENTS, Stored, Tensor
from weft.models.onnx_import.walk import walk
from weft.models.onnx_import.widths import narrowed, widths_in, without_rounding
from weft.models.stitched_files import shapes_for_task

_MOST_MACS = 2**62
"""Most MACs of a model, since counts are put into 64-bit arrays; a model beyond this is damaged or mistyped."""

TABLES = "weft.tables"
"""Model metadata: with the value 'stream', every query is charged for reading whole embedding tables."""


def import_onnx(
    source: str | os.PathLike[str] | OnnxModel,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    name: str | None = None,
    exits: Sequence[str] | None = None,
    task: str = "",
) -> Model:
    """Import an ONNX model from a file or from memory as layers.

    shapes: input -> full shape, or name of an axis -> size, if the file leaves sizes open. An open first size that is
    not in *shapes* is the batch and taken as 1; operators and shapes that stay unknown are listed in the model's
    ``unknown_ops`` and ``guesses``. exits: the outputs that are exits, from shallow to deep, the last being the end; by
    default the exits in the file's metadata. task: the model of a stitched file that is requested alone; by
    default, a row for every model in it.
    """
    folder: Path | None = None
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        proto, folder, title, where = read_onnx(path), path.parent, name or path.stem, str(source)
    else:
        proto = source
        title = where = name or source.graph.name or "model"
    try:
        if task:
            shapes, title = shapes_for_task(proto, task, shapes or {}), name or task
        return _import_model(proto, folder, title, shapes or {}, exits)
    except ShapeNeeded as error:
        raise error.for_model(_one_line(where)) from error
    except ModelError as error:
        raise ModelError(_one_line(f"{where}: {error}")) from error
    except RecursionError as error:
        raise ModelError(f"{where}: graphs are nested too deeply; inline them before importing") from error


def _import_model(
    proto: OnnxModel,
    folder: Path | None,
    title: str,
    shapes: Mapping[str, tuple[int, ...]],
    exits: Sequence[str] | None,
) -> Model:
    """Import a model in memory; *folder*: the folder of its external data. The other arguments: ``import_onnx``."""
    proto = without_rounding(_without_functions(proto))
    if not proto.graph.node and not proto.graph.output:
        raise ModelError("holds no graph with nodes or outputs; is it an ONNX model?")
    try:
        "".join(_texts(proto.graph))
    except TypeError as error:  # protobuf returns bytes if a text is not UTF-8
        raise ModelError("names in it are not text; the file is damaged, export or download it again") from error
    inference = Inference(opsets(proto), proto.ir_version, folder)
    inputs = graph_inputs(proto.graph, shapes, inference)
    names = named_exits(proto, exits)
    subnets = Subnets.of(proto.graph, names) if names else None
    segments = subnets.segments(len(proto.graph.node)) if subnets else None
    drafts, _, guesses = walk(proto.graph, ChainMap(dict(inputs)), inference, segments)
    layers = narrowed(_name_uniquely(_with_parameters(drafts)), widths_in(proto))
    if metadata(proto).get(TABLES) == "stream":
        layers = tuple(map(_stream_embedding, layers))
    if sum(layer.macs for layer in layers) > _MOST_MACS:
        raise ModelError("its multiplications do not fit 64 bits; check the sizes passed with --shape")
    ends = block_ends(drafts)
    return Model(
        name=title,
        layers=layers,
        inputs=tuple((name, tensor.shape) for name, tensor in inputs.items()),
        unknown_ops=tuple(dict.fromkeys(layer.op for layer in layers if layer.kind == "unknown")),
        guesses=tuple(guesses),
        exits=subnets.exits(drafts) if subnets else (),
        block_ends=tuple(end.after for end in ends),
        block_shapes=tuple(end.shape for end in ends),
    )


def _stream_embedding(layer: Layer) -> Layer:
    """The layer; an embedding is charged for reading its whole table for each query."""
    return replace(layer, weights=layer.parameters, lookups=0) if layer.kind == "embedding" else layer


def read_onnx(path: Path) -> OnnxModel:
    """Read a model without its external weights; raises ModelError with the reason if the file is not readable."""
    if path.is_dir():
        raise ModelError(f"{path} is a directory; name the .onnx file in it")
    refuse_special_file(path, ModelError)
    try:
        if path.stat().st_size == 0:
            raise ModelError(f"{path} is empty; export or download the model again")
        return load(path)
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; check the path") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    except ModelError:
        raise
    except Exception as error:  # protobuf, text and JSON parsers each raise their own kinds
        reason = _one_line(str(error))[:120]
        raise ModelError(f"{path} is not an ONNX model ({reason}); export or download it again") from error


def _without_functions(proto: OnnxModel) -> OnnxModel:
    """The model with its functions inlined; raises ModelError if that is not possible."""
    try:
        return inlined(proto)
    except Exception as error:  # onnx's C++ code raises several unrelated types
        raise ModelError(f"its functions cannot be inlined: {error}") from error


def _texts(graph: OnnxGraph) -> Iterator[str]:
    """Yield all names that the importer may show or compare; bytes if a name is not UTF-8."""
    for info in (*graph.input, *graph.output, *graph.value_info):
        yield info.name
        tensor = tensor_type(info.type)
        if tensor is not None:
            yield from (dim.dim_param for dim in tensor.shape.dim)
    yield from (weight.name for weight in graph.initializer)
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
        for nested in bodies(node):
            yield from _texts(nested)


def graph_inputs(graph: OnnxGraph, shapes: Mapping[str, tuple[int, ...]], inference: Inference) -> dict[str, Tensor]:
    """The graph's inputs with fixed sizes; also sets the sizes of symbolic dimensions in *inference*."""
    declared = {value.name: value.type for value in request_inputs(graph)}
    settled = settle(shapes, {name: dimensions_of(kind) for name, kind in declared.items()})
    for name, shape in settled.items():
        if math.prod(shape) > MAX_ELEMENTS:
            text = "x".join(map(str, shape))
            raise ModelError(f"input {name!r}: {text} is more than any machine holds; pass smaller sizes")
    # Sizes of symbolic dimensions in *shapes* also fix the other inputs with these dimensions.
    inference.sizes = _symbols((declared[name], shape) for name, shape in settled.items())
    result = {}
    for name, kind in declared.items():
        shape = settled[name] if name in settled else _default_shape(name, kind, inference)
        declared_tensor = tensor_type(kind)
        dtype = int(ElementType.FLOAT) if declared_tensor is None else declared_tensor.elem_type
        result[name] = Tensor(shape, dtype, dtype_bits(dtype))
    inference.sizes = _symbols((declared[name], tensor.shape) for name, tensor in result.items())
    return result


def dimensions_of(kind: Any) -> tuple[Dimension, ...] | None:
    """The dimensions of a type: sizes, or the names of axes; None if it has no rank."""
    tensor = tensor_type(kind)
    if tensor is None or not tensor.HasField("shape"):
        return None
    return tuple(dim.dim_param or None if size_of(dim) is None else size_of(dim) for dim in tensor.shape.dim)


def _default_shape(name: str, kind: Any, inference: Inference) -> tuple[int, ...]:
    """An input's shape by the file alone, with an open first size as 1; raises ShapeNeeded for other open sizes."""
    if kind.WhichOneof("value") in ("sequence_type", "optional_type", "map_type"):
        return tuple(1 if size is None else size for size in inference.dims(kind) or ())
    dims = inference.dims(kind)
    if dims is None:
        raise ShapeNeeded(f"input {name!r} declares no shape", name, "AxBxC")
    if dims and dims[0] is None:
        dims[0] = 1
    if None in dims:
        letters = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        example = "x".join(next(letters, "N") if size is None else str(size) for size in dims)
        raise ShapeNeeded(f"input {name!r} is {describe_dimensions(dimensions_of(kind))} in the file", name, example)
    return tuple(size for size in dims if size is not None)


def _symbols(inputs: Iterable[tuple[Any, tuple[int, ...]]]) -> dict[str, int]:
    """Symbolic dimension -> its size; "?" and symbols with contradicting sizes are left out.

    inputs: the declared type and the shape of each input.
    """
    values: dict[str, set[int]] = {}
    for kind, shape in inputs:
        tensor = tensor_type(kind)
        for dim, size in zip(tensor.shape.dim if tensor is not None else (), shape, strict=False):
            if dim.dim_param and dim.dim_param != "?":
                values.setdefault(dim.dim_param, set()).add(size)
    return {symbol: sizes.pop() for symbol, sizes in values.items() if len(sizes) == 1}


def _with_parameters(drafts: Sequence[LayerDraft]) -> list[Layer]:
    """The layers with their numbers of parameters; a shared tensor counts only for the first layer that uses it."""
    counted: set[Stored] = set()
    layers = []
    for layer_draft in drafts:
        new = [stored for stored in layer_draft.stored if stored not in counted]
        counted.update(new)
        layers.append(replace(layer_draft.layer, parameters=sum(stored.elements for stored in new)))
    return layers


def _name_uniquely(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The layers with unique names: repeated names get the suffixes _2, _3, ..."""
    used: set[str] = set()
    result = []
    for layer in layers:
        name, number = layer.name, 2
        while name in used:
            name, number = f"{layer.name}_{number}", number + 1
        used.add(name)
        result.append(layer if name == layer.name else replace(layer, name=name))
    return tuple(result)


def _one_line(text: str) -> str:
    return " ".join(text.split())

"""Bit widths of the weights and inputs of tuned layers, and the rounded tensors of a tuned file: two metadata entries.

ONNX has no type of three bits, for example, so the types in a tuned file do not say how many bytes a device would
fetch. ``weft tune`` and ``weft stitch`` write the entries (``noted``); the importer applies them (``narrowed``), and
removes the operators that round the inputs of layers, which a device would not run (``without_rounding``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from weft.base.errors import ModelError
from weft.models.layer import Layer
from weft.models.onnx_graph import OnnxModel, copied, metadata, prune, rename_inputs

FORMATS = "weft.formats"
"""Model metadata: the configuration that a file was tuned to, as in its text file."""
WIDTHS = "weft.widths"
"""Model metadata: JSON, node -> bits of its weights and of its inputs."""
ROUNDED = "weft.rounded"
"""Model metadata: JSON, rounded tensor -> the tensor before rounding."""

_MOST_BITS = 64  # the widest type of ONNX; larger numbers come from a damaged file


class Widths(NamedTuple):
    """Bits of a weight and of an input of a layer; 32 if it was not tuned."""

    weight: int = 32
    input: int = 32


def noted(widths: Mapping[str, Widths], rounded: Mapping[str, str]) -> dict[str, str]:
    """The metadata entries for these widths and rounded tensors."""
    return {
        WIDTHS: _compact({node: list(bits) for node, bits in widths.items()}),
        ROUNDED: _compact(dict(rounded)),
    }


def widths_in(model: OnnxModel) -> dict[str, Widths]:
    """Node -> its widths; empty for a file that was not tuned."""
    table = _read_table(model, WIDTHS)
    try:
        widths = {node: Widths(*map(int, bits)) for node, bits in table.items()}
    except (TypeError, ValueError) as error:
        raise ModelError(f"its {WIDTHS} is no table of bits; tune it again") from error
    if any(not 1 <= bits <= _MOST_BITS for layer_bits in widths.values() for bits in layer_bits):
        raise ModelError(f"its {WIDTHS} has bits that are not from 1 to {_MOST_BITS}; tune it again")
    return widths


def rounded_in(model: OnnxModel) -> dict[str, str]:
    """Rounded tensor -> the tensor before rounding; empty for a file that rounds nothing."""
    sources: dict[str, str] = _read_table(model, ROUNDED)
    if not all(isinstance(source, str) for source in sources.values()):
        raise ModelError(f"its {ROUNDED} is no table of tensors; tune it again")
    return sources


def narrowed(layers: Iterable[Layer], widths: Mapping[str, Widths]) -> tuple[Layer, ...]:
    """The layers with the widths of their nodes."""
    return tuple(_set_widths(layer, widths) for layer in layers)


def without_rounding(model: OnnxModel) -> OnnxModel:
    """A copy of *model* without the operators that round inputs of layers; *model* itself if it has none."""
    rounded = rounded_in(model)
    if not rounded:
        return model
    plain = copied(model)
    rename_inputs(plain.graph.node, rounded)
    prune(plain.graph)
    return plain


def _set_widths(layer: Layer, widths: Mapping[str, Widths]) -> Layer:
    """A layer with the widths of its node; unchanged if *widths* has none of its nodes."""
    layer_widths = next((widths[name] for name in (layer.name, *layer.nodes) if name in widths), None)
    if layer_widths is None or not layer.weights:
        return layer
    # In a tuned file the parameters may be indices into a small table, so that only the table was counted.
    parameters = max(layer.parameters, layer.weights)
    return replace(layer, weight_bits=layer_widths.weight, activation_bits=layer_widths.input, parameters=parameters)


def _read_table(model: OnnxModel, key: str) -> dict[str, Any]:
    """The JSON object in a metadata entry, empty if the model does not have it; raises ModelError if it is damaged."""
    text = metadata(model).get(key, "")
    try:
        table = json.loads(text or "{}")
    except ValueError as error:
        raise ModelError(f"its {key} cannot be read; tune it again") from error
    if not isinstance(table, dict):
        raise ModelError(f"its {key} is no table; tune it again")
    return table


def _compact(table: Mapping[str, object]) -> str:
    return json.dumps(table, ensure_ascii=False, separators=(",", ":"))

"""The layers of a model that are tuned: their numbers of weights, inputs and products, and their ranges of values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from weft.base.errors import TuneError, unknown_name
from weft.models.onnx_graph import Attributes, OnnxNode
from weft.runtime.tensors import Array
from weft_tune.network import Network, Target, join_targets
from weft_tune.quantised.data import check_inputs
from weft_tune.quantised.opened import Opened, choose_batch, open_for_tuning, tensors_by_batch
from weft_tune.weighted_layers import KINDS, WeightedLayer


def find_targets(
    model: str | Path | Opened,
    calibration: Mapping[str, Array],
    *,
    layers: str | Sequence[str] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> Network:
    """The layers that may be tuned, in the order in which they run.

    *layers*: names, patterns such as ``block1.*``, ``conv`` for all convolutions or ``fc`` for all matrix products;
    all by default. *groups*: name -> layers that share one format. Samples of *calibration* show the range of inputs.
    """
    opened = model if isinstance(model, Opened) else open_for_tuning(model)
    targets = _observe(opened, select(opened.layers, layers), check_inputs(calibration, opened.inputs))
    return Network(opened.path.stem, tuple(_group_targets(targets, groups or {})))


def select(layers: Sequence[WeightedLayer], wanted: str | Sequence[str] | None) -> tuple[WeightedLayer, ...]:
    """Select layers by name, pattern or kind."""
    if wanted is None:
        return tuple(layers)
    chosen: set[str] = set()
    for word in [wanted] if isinstance(wanted, str) else wanted:
        matches = {layer.name for layer in layers if layer.name == word or fnmatchcase(layer.name, word)}
        if not matches and word in KINDS.values():
            matches = {layer.name for layer in layers if layer.kind == word}
        if not matches:
            raise TuneError(unknown_name("layer", word, [layer.name for layer in layers]))
        chosen |= matches
    if not chosen:
        raise TuneError("no layer is named; leave the choice out to tune all of them")
    return tuple(layer for layer in layers if layer.name in chosen)


def _observe(opened: Opened, layers: Sequence[WeightedLayer], inputs: Mapping[str, Array]) -> dict[str, Target]:
    """Run the float model and measure the tensors that enter and leave the layers."""
    nodes = {layer.name: opened.model.graph.node[layer.position] for layer in layers}
    names = list(dict.fromkeys(name for node in nodes.values() for name in (node.input[0], node.output[0])))
    # one sample alone, for sizes: of a batch they need not be a multiple
    (alone,) = tensors_by_batch(opened, names, {name: values[:1] for name, values in inputs.items()}, 1)
    rows = opened.fixed_batch or 1
    largest = dict.fromkeys(nodes, 0.0)
    for tensors in tensors_by_batch(opened, names, inputs, choose_batch(opened, inputs)):
        for name, node in nodes.items():
            top = float(np.abs(tensors[node.input[0]]).max(initial=0.0))
            if not math.isfinite(top):
                raise TuneError(
                    f"{opened.path}: NaN or infinity enters layer {name!r}; take the samples out that do it"
                )
            largest[name] = max(largest[name], top)
    targets = {}
    for layer in layers:
        node = nodes[layer.name]
        entering, leaving = alone[node.input[0]], alone[node.output[0]]
        targets[layer.name] = Target(
            layer.name,
            weights=layer.weight.size,
            inputs=entering.size // rows,
            weight_max=float(np.abs(layer.weight).max(initial=0.0)),
            input_max=largest[layer.name],
            macs=_products(layer, entering, leaving, node) // rows,
        )
    return targets


def _products(layer: WeightedLayer, entering: Array, leaving: Array, node: OnnxNode) -> int:
    """Multiply-accumulate operations of a layer."""
    sizes = layer.weight.shape
    if layer.op == "ConvTranspose":
        return int(entering.size) * math.prod(sizes[1:])
    if layer.op == "Conv":
        return int(leaving.size) * math.prod(sizes[1:])
    transposed = Attributes(node).integer("transB", 0)
    depth: int = sizes[-1] if transposed or len(sizes) == 1 else sizes[-2]
    return int(leaving.size) * depth


def _group_targets(targets: Mapping[str, Target], groups: Mapping[str, Sequence[str]]) -> Iterator[Target]:
    """Targets as they are, and in the place of the first of each group, the group."""
    owner: dict[str, str] = {}
    for group, members in groups.items():
        if not members:
            raise TuneError(f"group {group!r} has no layer")
        for name in members:
            if name not in targets:
                raise TuneError(f"group {group!r}: {unknown_name('layer', name, targets)}")
            if name in owner:
                raise TuneError(f"layer {name!r} is in the groups {owner[name]!r} and {group!r}; leave it in one")
            owner[name] = group
    for name, target in targets.items():
        if name not in owner:
            yield target
        else:
            group = owner[name]
            members = [member for member in targets if owner.get(member) == group]
            if name == members[0]:
                yield join_targets(group, [targets[member] for member in members])

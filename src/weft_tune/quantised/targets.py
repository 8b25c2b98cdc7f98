"""Which layers of a model are tuned: how many weights, inputs and products each has, and how large they get."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np
from onnx import NodeProto

from weft.base.errors import TuneError, unknown_name
from weft.models.weighted_layers import KINDS, WeightedLayer
from weft.runtime.tensors import Array
from weft_tune.network import Network, Target
from weft_tune.quantised.data import check_inputs
from weft_tune.quantised.feeding import batches, count_rows, feed
from weft_tune.quantised.opened import Opened, open_for_tuning
from weft_tune.quantised.stages import choose_batch, run_on, session_for


class _SeenLayer(NamedTuple):
    """Of one layer, while samples ran through it."""

    inputs: int
    macs: int
    input_max: float


def find_targets(
    model: str | Path | Opened,
    calibration: Mapping[str, Array],
    *,
    layers: str | Sequence[str] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> Network:
    """The layers that may be tuned, in the order in which they run.

    *layers*: names, patterns such as ``block1.*``, ``conv`` for all convolutions or ``fc`` for all matrix products;
    all if not said. *groups*: name -> layers that share one format. How large inputs get is seen on *calibration*.
    """
    opened = model if isinstance(model, Opened) else open_for_tuning(model)
    chosen = select(opened.layers, layers)
    seen = _observe(opened, chosen, check_inputs(calibration, opened.inputs))
    targets = {layer.name: _target(layer, seen[layer.name]) for layer in chosen}
    return Network(opened.path.stem, tuple(_grouped(targets, groups or {})))


def select(layers: Sequence[WeightedLayer], wanted: str | Sequence[str] | None) -> tuple[WeightedLayer, ...]:
    """Layers by name, pattern or kind."""
    if wanted is None:
        return tuple(layers)
    chosen: set[str] = set()
    for word in [wanted] if isinstance(wanted, str) else wanted:
        found = {each.name for each in layers if each.name == word or fnmatchcase(each.name, word)}
        if not found and word in KINDS.values():
            found = {each.name for each in layers if each.kind == word}
        if not found:
            raise TuneError(unknown_name("layer", word, [each.name for each in layers]))
        chosen |= found
    if not chosen:
        raise TuneError("no layer is named; leave the choice out to tune all of them")
    return tuple(each for each in layers if each.name in chosen)


def _observe(opened: Opened, layers: Sequence[WeightedLayer], inputs: Mapping[str, Array]) -> dict[str, _SeenLayer]:
    """Run the float model and look at what enters and leaves the layers."""
    nodes = {layer.name: opened.model.graph.node[layer.position] for layer in layers}
    names = list(dict.fromkeys(name for node in nodes.values() for name in (node.input[0], node.output[0])))
    made = [name for name in names if name not in inputs]
    session = session_for(opened, made)
    sample = feed(inputs, np.arange(1), opened.fixed_batch)
    rows = count_rows(sample)
    one = dict(zip(made, run_on(opened, session, made, sample), strict=True)) | sample
    largest = dict.fromkeys(nodes, 0.0)
    for given in batches(inputs, choose_batch(opened, inputs), opened.fixed_batch):
        tensors = dict(zip(made, run_on(opened, session, made, given), strict=True)) | given
        for name, node in nodes.items():
            top = float(np.abs(tensors[node.input[0]]).max(initial=0.0))
            if not math.isfinite(top):
                raise TuneError(
                    f"{opened.path}: NaN or infinity enters layer {name!r}; take the samples out that do it"
                )
            largest[name] = max(largest[name], top)
    return {
        layer.name: _SeenLayer(
            one[nodes[layer.name].input[0]].size // rows,
            _products(layer, one[nodes[layer.name].input[0]], one[nodes[layer.name].output[0]], nodes[layer.name])
            // rows,
            largest[layer.name],
        )
        for layer in layers
    }


def _products(layer: WeightedLayer, entering: Array, leaving: Array, node: NodeProto) -> int:
    """Multiply-accumulate operations of a layer."""
    sizes = layer.weight.shape
    if layer.op == "ConvTranspose":
        return int(entering.size) * math.prod(sizes[1:])
    if layer.op == "Conv":
        return int(leaving.size) * math.prod(sizes[1:])
    transposed = any(each.name == "transB" and each.i for each in node.attribute)
    depth: int = sizes[-1] if transposed or len(sizes) == 1 else sizes[-2]
    return int(leaving.size) * depth


def _target(layer: WeightedLayer, seen: _SeenLayer) -> Target:
    largest = float(np.abs(layer.weight).max(initial=0.0))
    return Target(layer.name, layer.weight.size, seen.inputs, largest, seen.input_max, seen.macs)


def _grouped(targets: Mapping[str, Target], groups: Mapping[str, Sequence[str]]) -> Iterator[Target]:
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
        elif name == next(each for each in targets if owner.get(each) == owner[name]):
            group = owner[name]
            yield _joined(group, [each for each in targets.values() if owner.get(each.name) == group])


def _joined(name: str, branches: Sequence[Target]) -> Target:
    return Target(
        name,
        sum(each.weights for each in branches),
        sum(each.inputs for each in branches),
        max(each.weight_max for each in branches),
        max(each.input_max for each in branches),
        sum(each.macs for each in branches),
        tuple(each.name for each in branches),
    )

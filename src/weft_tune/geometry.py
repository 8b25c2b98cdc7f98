"""Which layers of a model the targets of a network are, and the shape of their arithmetic.

A target knows how much there is to multiply; how well that fills an accelerator depends on the windows, channels and
filters of its layer, which the model knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.base.errors import TuneError, unknown_name
from weft.models import Layer, Model
from weft.models.weighted_layers import find_layers, load_flat
from weft_tune.network import Network, Target


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The arithmetic of one tuned layer, for one sample; of all in the batch, where a file takes a fixed number."""

    name: str
    """The name as a configuration has it, without the role: ``conv1``."""
    windows: int
    """Output positions; 1 for a fully connected layer."""
    channels: int
    """Input channels of a group."""
    kernel: int
    """Positions of the kernel, Kx times Ky."""
    filters: int
    """Output channels of a group."""
    groups: int
    convolution: bool

    @property
    def macs(self) -> int:
        return self.windows * self.channels * self.kernel * self.filters * self.groups


def work_of(model: Model, network: Network, nodes: Mapping[str, str] | None = None) -> tuple[LayerWork, ...]:
    """The tuned layers in the order of the network; *nodes* as for ``places``."""
    return tuple(_work(name, model.layers[place]) for name, place in places(model, network, nodes).items())


def places(model: Model, network: Network, nodes: Mapping[str, str] | None = None) -> dict[str, int]:
    """Tuned layer -> its place among the model's layers.

    *nodes*: tuned layer -> its node (``node_names``), for files in which the two are called differently. A layer of the
    model is known by its own name and by those of the nodes it stands for.
    """
    known: dict[str, int] = {}
    weighted = [(place, layer) for place, layer in enumerate(model.layers) if layer.gemm and layer.weights]
    for place, layer in weighted:
        known.setdefault(layer.name, place)
    for place, layer in weighted:
        for name in layer.nodes:
            known.setdefault(name, place)
    found = {}
    for name in _layers(network):
        node = (nodes or {}).get(name, name)
        if node not in known:
            raise TuneError(f"{model.name}: {unknown_name('layer', node, [layer.name for _, layer in weighted])}")
        found[name] = known[node]
    return found


def node_names(path: str | Path) -> dict[str, str]:
    """Layer with weights -> the node it is, for an ONNX file; nodes without a name by the one of their output."""
    model = load_flat(path)
    named = [(layer.name, model.graph.node[layer.position]) for layer in find_layers(model)]
    return {name: node.name or f"node_of_{node.output[0]}" for name, node in named}


def network_of(model: Model, kinds: Collection[str] = ("conv", "gemm")) -> Network:
    """The network of a model without weights, for sizes and speeds: nothing is known of how large values get."""
    targets = tuple(
        Target(layer.name, layer.weights, layer.input_elements, 0.0, 0.0, layer.macs)
        for layer in model.layers
        if layer.kind in kinds and layer.weights
    )
    return Network(model.name, targets)


def _layers(network: Network) -> Iterator[str]:
    return (layer for target in network.targets for layer in target.layers)


def _work(name: str, layer: Layer) -> LayerWork:
    gemm = layer.gemm
    assert gemm is not None
    return LayerWork(name, gemm.m, gemm.k // gemm.kernel, gemm.kernel, gemm.n, gemm.groups, layer.kind == "conv")

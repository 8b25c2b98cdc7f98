"""Where the tuned layers of a network lie in an ONNX graph: their node and their weight."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx

from weft.base.errors import TuneError, unknown_name
from weft.models.weighted_layers import find_layers
from weft_tune.network import Network

DATA, WEIGHT = 0, 1
"""Which input of the node is which."""


class Site(NamedTuple):
    """A tuned layer in a graph."""

    layer: str
    position: int
    """The place of its node in the graph."""
    weight: npt.NDArray[np.float32]


def find_sites(model: onnx.ModelProto, network: Network) -> list[Site]:
    """The sites of all layers of a flat model, in the order of the graph."""
    known = {each.name: each for each in find_layers(model)}
    found = []
    for layer in (name for target in network.targets for name in target.layers):
        if layer not in known:
            raise TuneError(f"{network.name}: {unknown_name('layer', layer, known)}")
        found.append(Site(layer, known[layer].position, known[layer].weight))
    return sorted(found, key=lambda site: site.position)

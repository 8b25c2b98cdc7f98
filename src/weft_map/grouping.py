"""Groups of layers that stay together: cut where a single activation crosses, never inside a fused kernel.

A compiler joins a product with the normalisation, addition, activation and pooling that follow it; going to another
unit in between would undo that. The importer has joined what reads nothing but the product; here come what reads a
second activation (a residual addition and what follows it) and pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from weft.base.errors import ModelError
from weft.models import Layer, Model
from weft.models.operators import find

_ELEMENTS_WORTH = 32
"""MACs that take about as long as moving one value, for shares of work where no unit is known."""

_POOLED = ("conv", "gemm", "elementwise")
"""Kinds of layers whose kernel can pool what it writes."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Consecutive layers of a model."""

    name: str
    layers: tuple[Layer, ...]
    output_elements: int
    """What crosses to the group after, for one sample."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the network inside; the layers' names where a layer does not say."""
        return tuple(dict.fromkeys(node for layer in self.layers for node in layer.nodes or (layer.name,)))

    @property
    def work(self) -> int:
        """MACs, and values moved at their worth in MACs."""
        moved = sum(layer.weights + layer.input_elements + layer.output_elements for layer in self.layers)
        return sum(layer.macs for layer in self.layers) + _ELEMENTS_WORTH * moved


def group_layers(model: Model, *, max_groups: int | None = None) -> tuple[LayerGroup, ...]:
    """The smallest groups of *model* that break no chain; of more than *max_groups* the smallest neighbours join."""
    if max_groups is not None and max_groups < 1:
        raise ModelError(f"{model.name}: max_groups = {max_groups} must be at least 1")
    if not model.layers:
        raise ModelError(f"{model.name}: nothing in it takes time, so there is nothing to place")
    cuts = [0, *(end for end in model.block_ends if not _held(model.layers, end)), len(model.layers)]
    crossing = _crossing(model)
    groups = [_group(model.layers[here:there], crossing.get(there)) for here, there in pairwise(cuts)]
    return tuple(groups) if max_groups is None else _fewer(groups, max_groups)


def _fewer(groups: list[LayerGroup], most: int) -> tuple[LayerGroup, ...]:
    """The neighbours with the least work together join, the first of equals, until *most* are left."""
    work = [group.work for group in groups]
    spans = [(place, place + 1) for place in range(len(groups))]
    while len(spans) > most:
        together = [left + right for left, right in pairwise(work)]
        place = together.index(min(together))
        work[place : place + 2] = [together[place]]
        spans[place : place + 2] = [(spans[place][0], spans[place + 1][1])]
    return tuple(
        _group(
            tuple(layer for group in groups[here:there] for layer in group.layers), groups[there - 1].output_elements
        )
        for here, there in spans
    )


def follows(layer: Layer, before: Layer) -> bool:
    """Whether *layer* is fused into *before*: an elementwise operation on the values that it writes."""
    return layer.kind == "elementwise" and find(layer.op).fuses and layer.output_elements == before.output_elements


def _held(layers: tuple[Layer, ...], end: int) -> bool:
    """Whether the layers before and after *end* belong together."""
    before, after = layers[end - 1], layers[end]
    return follows(after, before) or (after.kind == "pool" and before.kind in _POOLED)


def _crossing(model: Model) -> dict[int, int]:
    sizes = (positions * channels for positions, channels in model.block_shapes)
    return dict(zip(model.block_ends, sizes, strict=False))


def _group(layers: tuple[Layer, ...], crossing: int | None) -> LayerGroup:
    first, last = layers[0].name, layers[-1].name
    elements = layers[-1].output_elements if crossing is None else crossing
    return LayerGroup(first if len(layers) == 1 else f"{first} .. {last}", layers, elements)

"""Which of the models share weights, so that a plan can say where stitching may pay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from weft.base.errors import ModelError
from weft.models.equal_weights import shared_share, weight_digests
from weft.planning.asked import AskedModel

LEAST_SHARE = 0.2
MOST_BYTES = 2 << 30
"""Larger models are not looked into."""


class SharedWeights(NamedTuple):
    """Two models with weights in common."""

    one: str
    other: str
    share: float
    """Of the smaller one's weights."""


def shared_weights(models: Sequence[AskedModel]) -> list[SharedWeights]:
    """Pairs of models that share weights, those that share most first; tensors that are equal as a whole count."""
    files = {model.path: model for model in models if not model.body}
    if len(files) < 2 or sum(model.bytes for model in files.values()) > MOST_BYTES:
        return []
    try:
        digests = [(model.source, weight_digests(path)) for path, model in files.items()]
    except ModelError:  # it can be served all the same, and this is only advice
        return []
    pairs = [
        SharedWeights(one, other, shared_share(first, second))
        for (one, first), (other, second) in combinations(digests, 2)
    ]
    return sorted((pair for pair in pairs if pair.share >= LEAST_SHARE), key=lambda pair: -pair.share)

"""What the nodes of a graph roughly take on a device: by the bytes they move and the products they form.

That is a first guess of where to cut. How long segments really take is measured, and the guess scaled by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from weft.models.element_types import numpy_dtype
from weft.models.onnx_graph import OnnxGraph, OnnxNode, qualified
from weft.models.operators import find
from weft.runtime.cutting import SeenTensor

BYTES_PER_S, PRODUCTS_PER_S, LAUNCH_S = 2e12, 5e13, 2e-6
"""A large GPU: of smaller ones everything takes longer, and only the proportions matter."""


def guessed_s(graph: OnnxGraph, tensors: Mapping[str, SeenTensor]) -> list[float]:
    """Seconds of each node."""
    weights = {each.name: (list(each.dims), each.data_type) for each in graph.initializer}
    return [_guess(node, tensors, weights) for node in graph.node]


def _guess(
    node: OnnxNode, tensors: Mapping[str, SeenTensor], weights: Mapping[str, tuple[Sequence[int], int]]
) -> float:
    made = sum(tensors[name].size_bytes for name in node.output if name in tensors)
    moved = made + sum(tensors[name].size_bytes for name in node.input if name in tensors)
    products, is_product = 0.0, find(qualified(node)).product
    for name in node.input:
        if name in weights:
            dims, kind = weights[name]
            item = numpy_dtype(kind).itemsize
            moved += math.prod(dims) * item
            if is_product and len(dims) > 1:
                products = max(products, made / item * math.prod(dims) / max(dims[0], dims[-1]))
    return guess_s(moved, products)


def guess_s(moved_bytes: float, products: float) -> float:
    """Seconds of a node that moves so many bytes and forms so many products."""
    return LAUNCH_S + max(moved_bytes / BYTES_PER_S, products / PRODUCTS_PER_S)


def scaled(guesses: Sequence[float], cuts: Sequence[int], measured_s: Sequence[float]) -> list[float]:
    """The guesses, so that those of each segment between *cuts* come to what it was measured to take."""
    found: list[float] = []
    for (start, end), took_s in zip(pairwise((0, *cuts, len(guesses))), measured_s, strict=True):
        factor = took_s / max(sum(guesses[start:end]), 1e-12)
        found += [each * factor for each in guesses[start:end]]
    return found

"""Rough estimates of node times on a device, from the bytes they move and the multiplications they do.

They are the first guess of where to cut; segments are then measured, and the estimates scaled to that.
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
"""Memory bandwidth, multiplications and launch time of a large GPU; for smaller GPUs the proportions are similar."""


def guessed_s(graph: OnnxGraph, tensors: Mapping[str, SeenTensor]) -> list[float]:
    """Estimated seconds of each node."""
    weights = {weight.name: (list(weight.dims), weight.data_type) for weight in graph.initializer}
    return [_estimate_s(node, tensors, weights) for node in graph.node]


def _estimate_s(
    node: OnnxNode, tensors: Mapping[str, SeenTensor], weights: Mapping[str, tuple[Sequence[int], int]]
) -> float:
    """Estimated seconds of a node; *weights*: name -> shape and element type."""
    output_bytes = sum(tensors[name].size_bytes for name in node.output if name in tensors)
    moved_bytes = output_bytes + sum(tensors[name].size_bytes for name in node.input if name in tensors)
    products, is_product = 0.0, find(qualified(node)).product
    for name in node.input:
        if name in weights:
            dims, kind = weights[name]
            item_bytes = numpy_dtype(kind).itemsize
            moved_bytes += math.prod(dims) * item_bytes
            # Each output element sums over the weight but for its output dimension: the first or the last, the larger.
            if is_product and len(dims) > 1:
                products = max(products, output_bytes / item_bytes * math.prod(dims) / max(dims[0], dims[-1]))
    return guess_s(moved_bytes, products)


def guess_s(moved_bytes: float, products: float) -> float:
    """Estimated seconds of a node, from the bytes it moves and the multiplications it does."""
    return LAUNCH_S + max(moved_bytes / BYTES_PER_S, products / PRODUCTS_PER_S)


def scaled(guesses: Sequence[float], cuts: Sequence[int], measured_s: Sequence[float]) -> list[float]:
    """Scale *guesses* (seconds of nodes) so that the nodes of each segment add up to its *measured_s*.

    *cuts*: the index of the first node of each segment but the first.
    """
    scaled_s: list[float] = []
    for (start, end), took_s in zip(pairwise((0, *cuts, len(guesses))), measured_s, strict=True):
        factor = took_s / max(sum(guesses[start:end]), 1e-12)  # not by 0
        scaled_s += [guess * factor for guess in guesses[start:end]]
    return scaled_s

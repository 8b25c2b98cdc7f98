"""Merging of products: where one tensor is multiplied by several weights, their product is computed at once.

The queries, keys and values of an attention are such products. One wide product uses a GPU better than several narrow
ones, and needs fewer kernels. A bias that is added to a product becomes part of it, as cuBLAS adds it in the same
kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from weft.models.operators import TorchNode
from weft.runtime.cuda.torch_steps import Name, TorchStep
from weft.runtime.tensors import Array

PRODUCTS = "products"
"""The name of the operator among steps."""


class _BiasedProduct(NamedTuple):
    """A product with a weight, and the addition of a bias to it, if there is one."""

    product: TorchStep
    weight: str
    addition: TorchStep | None = None
    bias: str = ""

    @property
    def output(self) -> str:
        return (self.addition or self.product).outputs[0]


def with_merged_products(
    steps: Sequence[TorchStep], outputs: Sequence[str], weights: MutableMapping[str, Array]
) -> list[TorchStep]:
    """The steps, with products of one tensor merged; *weights*: the constants by name, to which merged ones are added.

    outputs: names of the outputs of the graph. Only weights that no other step reads are merged, as they would be
    stored twice otherwise.
    """
    reads = Counter([*outputs, *(name for step in steps for name in step.arguments if isinstance(name, Name))])
    readers: dict[str, TorchStep] = {name: step for step in steps for name in step.arguments if reads[name] == 1}
    groups: dict[tuple[Any, ...], list[_BiasedProduct]] = {}
    for step in steps:
        if (product := _product_at(step, readers, reads, weights)) is not None:
            weight = weights[product.weight]
            key = (step.arguments[0], len(weight), weight.dtype, product.addition is None)
            groups.setdefault(key, []).append(product)
    merged_at: dict[str, TorchStep] = {}
    """Output of the first product of a group -> the step in the place of the group."""
    dropped: set[str] = set()
    for group in groups.values():
        if len(group) > 1 or group[0].addition is not None:
            merged_at[group[0].product.outputs[0]] = _merged(group, weights)
            dropped.update(step.outputs[0] for part in group for step in (part.product, part.addition) if step)
    return [
        merged_at.get(step.outputs[0], step)
        for step in steps
        if step.outputs[0] in merged_at or step.outputs[0] not in dropped
    ]


def _product_at(
    step: TorchStep, readers: Mapping[str, TorchStep], reads: Mapping[str, int], weights: Mapping[str, Array]
) -> _BiasedProduct | None:
    """The product that *step* computes, if it multiplies a computed tensor by a matrix that only it reads; else None.

    readers: tensor -> the step that reads it, for tensors that are read once. reads: how often each tensor is read.
    """
    if step.operator != "MatMul" or step.arguments[0] in weights or not isinstance(step.arguments[0], Name):
        return None
    weight = step.arguments[1]
    if weight not in weights or weights[weight].ndim != 2 or reads[weight] > 1:
        return None
    addition = readers.get(step.outputs[0])
    if addition is not None and addition.operator == "Add":
        bias = next((name for name in addition.arguments if name != step.outputs[0]), "")
        if bias in weights and weights[bias].shape == weights[weight].shape[1:] and reads[bias] == 1:
            return _BiasedProduct(step, weight, addition, bias)
    return _BiasedProduct(step, weight)


def _merged(group: Sequence[_BiasedProduct], weights: MutableMapping[str, Array]) -> TorchStep:
    """The step that computes all products of a group; adds its weight, and its bias if they have any, to *weights*."""
    first = group[0]
    names = [Name(f"{first.weight}:merged")]
    weights[names[0]] = np.concatenate([weights[part.weight] for part in group], axis=1)
    if first.addition is not None:
        names.append(Name(f"{first.bias}:merged"))
        weights[names[1]] = np.concatenate([weights[part.bias] for part in group])
    ends = accumulate((weights[part.weight].shape[1] for part in group), initial=0)
    return first.product._replace(
        operator=PRODUCTS,
        function=split_product,
        context=TorchNode(first.product.context.torch, {"columns": tuple(pairwise(ends))}),
        arguments=(first.product.arguments[0], *names),
        outputs=tuple(part.output for part in group),
    )


def split_product(t: TorchNode, tensor: Any, weight: Any, bias: Any = None) -> tuple[Any, ...]:
    """The product of *tensor* and *weight*, plus *bias*, as views of its columns.

    t: the step's attribute ``columns`` (begin and end of each view), and torch.
    """
    if bias is None or tensor.dim() < 2:
        product = t.torch.matmul(tensor, weight)
        product = product if bias is None else product + bias
    else:  # one kernel of cuBLAS adds the bias; as an operator of its own it would be a second kernel
        product = t.torch.addmm(bias, tensor.reshape(-1, tensor.shape[-1]), weight).view(*tensor.shape[:-1], -1)
    return tuple(product[..., begin:end] for begin, end in t.get("columns"))

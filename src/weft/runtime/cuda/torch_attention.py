"""Fusion of attention (products, scale, mask and softmax) into torch's one operator for it.

Steps are replaced if no other step reads their intermediate results, so that results change by rounding only. Shapes
are known when the new step runs: if torch's operator does not support them, it computes the steps that it replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from weft.models.operators import TorchNode
from weft.runtime.cuda.torch_steps import TorchStep
from weft.runtime.tensors import Array

ATTENTION = "attention"
"""The name of the operator among steps."""


def with_attention(steps: Sequence[TorchStep], outputs: Sequence[str], weights: Mapping[str, Array]) -> list[TorchStep]:
    """The steps, with each attention fused into one step and unneeded steps removed.

    outputs: names of the outputs of the graph.
    """
    graph = _Steps(steps, outputs, weights)
    kept_steps, needed = list[TorchStep](), set(outputs)
    for step in reversed(steps):
        if not needed.isdisjoint(step.outputs):
            kept_steps.append(graph.attention_at(step) or step)
            needed.update(name for name in kept_steps[-1].arguments if isinstance(name, str))
    return kept_steps[::-1]


class _Steps:
    """The steps of a graph, by the tensors that they produce."""

    def __init__(self, steps: Sequence[TorchStep], outputs: Sequence[str], weights: Mapping[str, Array]) -> None:
        self._weights = weights
        self._producers = {step.outputs[0]: step for step in steps}
        self._reads = Counter([*outputs, *(name for step in steps for name in step.arguments)])
        """Tensor -> how often it is read; outputs of the graph count as read."""

    def attention_at(self, last: TorchStep) -> TorchStep | None:
        """The fused step for the attention that ends with the step *last*; None if there is no attention."""
        softmax = self._producer(last.arguments[0], "Softmax") if last.operator == "MatMul" else None
        if softmax is None:
            return None
        scaled, mask = self._scaled_product(softmax.arguments[0]), None
        if scaled is None and (addition := self._producer(softmax.arguments[0], "Add")) is not None:
            # One side of the addition is the scaled product, the other the mask.
            products = [self._scaled_product(name) for name in addition.arguments]
            if (side := next((index for index, product in enumerate(products) if product is not None), None)) is None:
                return None
            scaled, mask = products[side], addition.arguments[1 - side]
        if scaled is None:
            return None
        product, scale = scaled
        # The default axis of Softmax, since opset 13 and before.
        axis = softmax.context.get("axis", -1 if softmax.context.version >= 13 else 1)
        attributes = {"scale": scale, "axis": axis, "softmax": partial(softmax.function, softmax.context)}
        return last._replace(
            operator=ATTENTION,
            function=scaled_attention,
            context=TorchNode(last.context.torch, attributes),
            arguments=(*product.arguments, last.arguments[1], mask),
        )

    def _producer(self, name: Any, *operators: str) -> TorchStep | None:
        """The step that produces *name*, if it is one of *operators* and only one step reads the tensor; else None."""
        step = self._producers.get(name)
        return step if step is not None and step.operator in operators and self._reads[name] == 1 else None

    def _scaled_product(self, name: Any) -> tuple[TorchStep, float] | None:
        """The MatMul whose result, times a constant factor, is the tensor *name*, and that factor; else None."""
        scale = 1.0
        while (step := self._producer(name, "Mul", "Div")) is not None:
            name, factor = step.arguments
            if step.operator == "Mul" and name in self._weights:
                name, factor = factor, name
            number = self._weights.get(factor)
            if number is None or number.size != 1 or number.ndim > 1 or not number.item():
                return None
            scale = scale * number.item() if step.operator == "Mul" else scale / number.item()
        product = self._producer(name, "MatMul")
        return None if product is None else (product, scale)


def scaled_attention(t: TorchNode, queries: Any, transposed_keys: Any, values: Any, mask: Any) -> Any:
    """Softmax of the scaled product of queries and transposed keys plus the mask (or None), times the values.

    t: the step's attributes, and torch. queries: [..., rows, width]; transposed_keys: [..., width, keys]; values:
    [..., keys, columns]; mask: [rows, keys] with any leading axes.
    """
    rank = queries.dim()
    supported = queries.shape[:-2] == transposed_keys.shape[:-2] == values.shape[:-2] and rank > 2
    supported = supported and t.get("axis") in (-1, rank - 1) and (mask is None or mask.dim() <= rank)
    if supported and mask is not None:
        sizes = (*queries.shape[:-1], transposed_keys.shape[-1])
        pairs = zip(reversed(mask.shape), reversed(sizes), strict=False)
        supported = all(size in (1, full_size) for size, full_size in pairs)
        mask = mask.expand(sizes) if supported else mask
    if supported:
        keys = transposed_keys.transpose(-1, -2)
        return t.nn.scaled_dot_product_attention(queries, keys, values, mask, scale=t.get("scale"))
    scores = t.torch.matmul(queries, transposed_keys) * t.get("scale")
    return t.torch.matmul(t.get("softmax")(scores if mask is None else scores + mask), values)

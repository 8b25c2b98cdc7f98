"""Output shapes of com.microsoft operators, which ONNX itself knows nothing about.

Those that keep the shape of their first input (norms, activations) need no rule: it is the guess anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from weft.models.onnx_import.attributes import Attributes
from weft.models.onnx_import.tensors import Tensor

Shape = tuple[int, ...]
Inputs = Sequence[Tensor | None]


def foreign_shape(op: str, inputs: Inputs, attributes: Attributes) -> Shape | None:
    """The shape of the first output, or None where there is no rule or too little to apply it to."""
    rule = _RULES.get(op)
    return rule(inputs, attributes) if rule is not None and inputs and inputs[0] is not None else None


def broadcast(first: Sequence[int], second: Sequence[int]) -> Shape:
    """The common shape of two batches, aligned at the right; a size that disagrees is the first's."""
    pairs = list(zip_longest(reversed(first), reversed(second), fillvalue=1))
    return tuple(b if a == 1 else a for a, b in reversed(pairs))


def _product(place: int) -> Callable[[Inputs, Attributes], Shape | None]:
    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        left, right = _shape(inputs, 0), _shape(inputs, place)
        if len(left) < 2 or len(right) < 2:
            return None
        rows = left[-1 if attributes.integer("transA", 0) else -2]
        columns = right[-2 if attributes.integer("transB", 0) else -1]
        return (*broadcast(left[:-2], right[:-2]), rows, columns)

    return rule


def _packed_product(inputs: Inputs, attributes: Attributes) -> Shape | None:
    return (*_shape(inputs, 0)[:-1], attributes.integer("N", 1))


def _attention(inputs: Inputs, attributes: Attributes) -> Shape | None:
    left, right = _shape(inputs, 0), _shape(inputs, 1)
    sizes = attributes.integers("qkv_hidden_sizes", (right[-1] // 3,) if right else ())
    return (*left[:-1], sizes[-1]) if left and sizes else None


def _embedding(inputs: Inputs, attributes: Attributes) -> Shape | None:
    table = _shape(inputs, 2)
    return (*_shape(inputs, 0), table[-1]) if table else None


def _shape(inputs: Inputs, place: int) -> Shape:
    tensor = inputs[place] if place < len(inputs) else None
    return () if tensor is None else tensor.shape


_RULES: dict[str, Callable[[Inputs, Attributes], Shape | None]] = {
    "com.microsoft:Attention": _attention,
    "com.microsoft:EmbedLayerNormalization": _embedding,
    "com.microsoft:FusedGemm": _product(1),
    "com.microsoft:FusedMatMul": _product(1),
    "com.microsoft:MatMulNBits": _packed_product,
    "com.microsoft:QAttention": _attention,
    "com.microsoft:QGemm": _product(3),
}

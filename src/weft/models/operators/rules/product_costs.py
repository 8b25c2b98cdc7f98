"""Costs of operators that multiply matrices, as GEMMs: convolutions, products, recurrent cells.

The constant operand is the weight and takes the place of the right matrix (k x n) whichever side it stands on in the
file, so that ``m`` always counts the rows of activations that meet the weight.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from weft.base.errors import ModelError
from weft.models.layer import Gemm
from weft.models.onnx_import.drafts import ImportedNode, LayerDraft, draft
from weft.models.onnx_import.tensors import Tensor
from weft.models.operators.rules.shapes import broadcast, operand

Operand = tuple[Tensor, tuple[int, ...]]
"""A factor and its shape as it enters the product, after any transposition."""


def conv(node: ImportedNode, w: int = 1, bias: int = 2, channels: int = 1) -> list[LayerDraft]:
    """One row per output position; the reduction runs over input channels and the kernel window."""
    data, weight = need(node, 0), need(node, w)
    groups = node.attributes.integer("group", 1)
    if len(weight.shape) < 3:
        raise ModelError(f"a convolution weight has at least 3 axes, not {_times(weight.shape)}")
    outs, per_group, *window = weight.shape
    if groups < 1 or outs % groups:
        raise ModelError(f"{outs} output channels do not split into {groups} groups")
    given = data.shape[channels] if len(data.shape) > 1 else per_group * groups
    _agree(given, per_group * groups, "input channels", data, weight)
    kernel = math.prod(window)
    gemm = sized_gemm(node.outputs[0].elements // max(outs, 1), per_group * kernel, outs // groups, groups, kernel)
    return _convolution(node, gemm, weight, node.input(bias))


def conv_integer(node: ImportedNode) -> list[LayerDraft]:
    return conv(node, bias=len(node.inputs))


def conv_transpose(node: ImportedNode, bias: int = 2) -> list[LayerDraft]:
    """One row per *input* position, spread over the window: output positions would count zeros as work."""
    data, weight = need(node, 0), need(node, 1)
    groups = node.attributes.integer("group", 1)
    if len(weight.shape) < 3 or len(data.shape) < 2:
        raise ModelError(f"a transposed convolution weight has at least 3 axes, not {_times(weight.shape)}")
    channels, outs, *window = weight.shape
    if groups < 1 or channels % groups:
        raise ModelError(f"{channels} input channels do not split into {groups} groups")
    _agree(data.shape[1], channels, "input channels", data, weight)
    gemm = sized_gemm(data.elements // max(data.shape[1], 1), channels // groups, outs * math.prod(window), groups)
    return _convolution(node, gemm, weight, node.input(bias))


def gemm(node: ImportedNode, b: int = 1, c: int = 2) -> list[LayerDraft]:
    """A product, either side transposed where an attribute says so; *b* and *c* are the places of matrix and bias."""
    left, right = need(node, 0), need(node, b)
    a_shape, b_shape = (operand(tensor.shape, node.attributes, side) for tensor, side in ((left, "A"), (right, "B")))
    return _product(node, (left, a_shape), (right, b_shape), (node.input(c),))


def matmul(node: ImportedNode, b: int = 1) -> list[LayerDraft]:
    left, right = need(node, 0), need(node, b)
    return _product(node, (left, left.shape), (right, right.shape), ())


def ordered_matmul(node: ImportedNode) -> list[LayerDraft]:
    """Quantised for one memory layout: in some the right matrix lies transposed."""
    left, right = need(node, 0), need(node, 2)
    turned = len(right.shape) == 2 and bool(left.shape) and right.shape[0] != left.shape[-1]
    shape = right.shape[::-1] if turned else right.shape
    return _product(node, (left, left.shape), (right, shape), (node.input(5),))


def distances(node: ImportedNode) -> list[LayerDraft]:
    """Distances between all pairs of rows, computed as a product."""
    left, right = need(node, 0), need(node, 1)
    return _product(node, (left, left.shape), (right, right.shape[::-1]), ())


def einsum(node: ImportedNode) -> list[LayerDraft]:
    """Letters in both operands and the result are groups, in both but not the result are summed over."""
    operands = [tensor for tensor in node.inputs if tensor is not None]
    inputs, output = _letters(node.attributes.text("equation"), operands)
    if len(operands) != 2:
        return [draft(node, "elementwise")]
    sizes = {
        letter: size
        for letters, tensor in zip(inputs, operands, strict=True)
        for letter, size in zip(letters, tensor.shape, strict=True)
        if size != 1
    }
    left, right = (set(letters) for letters in inputs)
    shared, kept = left & right, set(output)

    def count(letters: set[str]) -> int:
        return math.prod(sizes.get(letter, 1) for letter in letters)

    m, k, n = count((left - right) & kept), count(shared - kept), count((right - left) & kept)
    if operands[0].constant:
        return _weighted_product(node, sized_gemm(n, k, m, count(shared & kept)), operands[0])
    return _weighted_product(node, sized_gemm(m, k, n, count(shared & kept)), operands[1])


def sized_gemm(m: int, k: int, n: int, groups: int = 1, kernel: int = 1) -> Gemm | None:
    """A GEMM, or None where an empty tensor leaves nothing to multiply."""
    return Gemm(m, k, n, groups, kernel) if min(m, k, n, groups, kernel) > 0 else None


def need(node: ImportedNode, place: int) -> Tensor:
    tensor = node.input(place)
    if tensor is None:
        raise ModelError(f"input {place} is missing")
    return tensor


def recurrent(node: ImportedNode, gates: int, inner: int = 2) -> list[LayerDraft]:
    """Each step multiplies its input and its state by the weights of every gate; *inner*: the axis that meets them."""
    data, w, r = need(node, 0), need(node, 1), need(node, 2)
    if not len(data.shape) == len(w.shape) == len(r.shape) == 3:
        raise ModelError("a recurrent layer needs an input, W and R of 3 axes each")
    directions, width, hidden = w.shape[0], w.shape[inner], r.shape[inner]
    # Sequence and batch are the two leading axes in either layout: their product is the same.
    gemm = sized_gemm(data.shape[0] * data.shape[1], width + hidden, gates * hidden, directions)
    if gemm is None:
        return []
    result = draft(node, "rnn", gemm=gemm, weight=w, trained=(w, r, node.input(3), node.input(7)))
    if w.constant and r.constant:
        result = replace(result, layer=replace(result.layer, weights=w.elements + r.elements))
    return [result]


def _product(node: ImportedNode, left: Operand, right: Operand, trained: Sequence[Tensor | None]) -> list[LayerDraft]:
    """The product of two operands of any rank, as numpy's matmul defines it."""
    (a, a_shape), (b, b_shape) = left, right
    if not a_shape or not b_shape:
        raise ModelError("a matrix product needs operands of at least 1 axis")
    *a_batch, m, k = a_shape if len(a_shape) > 1 else (1, *a_shape)
    *b_batch, k2, n = b_shape if len(b_shape) > 1 else (*b_shape, 1)
    _agree(k, k2, "inner sizes", a, b)
    if a.constant and not b.constant:
        a_batch, b_batch, m, n, a, b = b_batch, a_batch, n, m, b, a
    batch = math.prod(broadcast(a_batch, b_batch))
    # A weight shared by the batch meets all its rows at once; one matrix each makes groups.
    groups = math.prod(b_batch) if b.constant else batch
    gemm = sized_gemm(m * batch // max(groups, 1), k, n, groups)
    return _weighted_product(node, gemm, b, trained)


def _convolution(node: ImportedNode, gemm: Gemm | None, weight: Tensor, bias: Tensor | None) -> list[LayerDraft]:
    return [draft(node, "conv", gemm=gemm, weight=weight, trained=(weight, bias))] if gemm else []


def _weighted_product(
    node: ImportedNode, gemm: Gemm | None, weight: Tensor, trained: Sequence[Tensor | None] = ()
) -> list[LayerDraft]:
    if gemm is None:
        return []
    kind = "gemm" if weight.constant else "matmul"
    return [draft(node, kind, gemm=gemm, weight=weight, trained=(weight, *trained))]


def _agree(here: int, there: int, what: str, a: Tensor, b: Tensor) -> None:
    """Refuse sizes that contradict each other, unless one of them was guessed."""
    if here != there and a.exact and b.exact:
        raise ModelError(f"{what} differ: {here} in {_times(a.shape)}, {there} in {_times(b.shape)}")


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _letters(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """One letter per axis for each operand and for the result; an ellipsis becomes spare letters."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise ModelError(f"the equation {equation!r} does not fit {len(operands)} operands")
    spare = [chr(code) for code in range(0x3B1, 0x3B1 + 64)]
    visible = [len(term.replace("...", "")) for term in terms]
    hidden = [len(tensor.shape) - seen for seen, tensor in zip(visible, operands, strict=True)]
    if any(extra < 0 or (extra and "..." not in term) for term, extra in zip(terms, hidden, strict=True)):
        raise ModelError(f"the equation {equation!r} does not fit the ranks of its operands")
    # Hidden axes align at the right, as broadcasting does, so the last letters are shared.
    expanded = [term.replace("...", "".join(spare[64 - n :])) for term, n in zip(terms, hidden, strict=True)]
    dots = "".join(spare[64 - max(hidden) :])
    once = sorted(letter for letter, times in Counter(left).items() if times == 1 and letter.isalpha())
    return expanded, right.replace("...", dots) if arrow else dots + "".join(once)

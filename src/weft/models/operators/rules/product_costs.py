"""Costs of operators that multiply matrices, as GEMMs: convolutions, products, recurrent cells.

The constant operand is the weight and becomes the right matrix (k x n), even if it is the left factor in the file, so
that ``m`` always counts the rows of activations that are multiplied by the weight.
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
"""A factor, and its shape in the product, after any transposition."""


def conv(node: ImportedNode, w: int = 1, bias: int = 2, channels: int = 1) -> list[LayerDraft]:
    """Cost of a convolution: a row per output position, reduced over input channels and the kernel window.

    w, bias: indices of the inputs with weight and bias. channels: the axis of the input channels.
    """
    data, weight = need(node, 0), need(node, w)
    groups = node.attributes.integer("group", 1)
    if len(weight.shape) < 3:
        raise ModelError(f"a convolution weight has at least 3 axes, not {_shape_text(weight.shape)}")
    out_channels, per_group, *window = weight.shape
    if groups < 1 or out_channels % groups:
        raise ModelError(f"{out_channels} output channels do not split into {groups} groups")
    in_channels = data.shape[channels] if len(data.shape) > 1 else per_group * groups
    _check_equal(in_channels, per_group * groups, "input channels", data, weight)
    kernel = math.prod(window)
    positions = node.outputs[0].elements // max(out_channels, 1)
    gemm = sized_gemm(positions, per_group * kernel, out_channels // groups, groups, kernel)
    return _convolution(node, gemm, weight, node.input(bias))


def conv_integer(node: ImportedNode) -> list[LayerDraft]:
    return conv(node, bias=len(node.inputs))  # it has no bias


def conv_transpose(node: ImportedNode, bias: int = 2) -> list[LayerDraft]:
    """Cost of a transposed convolution: a row per *input* position, as rows per output would count inserted zeros.

    bias: index of the input with the bias.
    """
    data, weight = need(node, 0), need(node, 1)
    groups = node.attributes.integer("group", 1)
    if len(weight.shape) < 3 or len(data.shape) < 2:
        raise ModelError(f"a transposed convolution weight has at least 3 axes, not {_shape_text(weight.shape)}")
    channels, out_channels, *window = weight.shape
    if groups < 1 or channels % groups:
        raise ModelError(f"{channels} input channels do not split into {groups} groups")
    _check_equal(data.shape[1], channels, "input channels", data, weight)
    columns = out_channels * math.prod(window)
    gemm = sized_gemm(data.elements // max(data.shape[1], 1), channels // groups, columns, groups)
    return _convolution(node, gemm, weight, node.input(bias))


def gemm(node: ImportedNode, b: int = 1, c: int = 2) -> list[LayerDraft]:
    """Cost of a matrix product with the attributes transA and transB; *b*, *c*: indices of right matrix and bias."""
    left, right = need(node, 0), need(node, b)
    a_shape, b_shape = (operand(tensor.shape, node.attributes, side) for tensor, side in ((left, "A"), (right, "B")))
    return _product(node, (left, a_shape), (right, b_shape), (node.input(c),))


def matmul(node: ImportedNode, b: int = 1) -> list[LayerDraft]:
    """Cost of a plain matrix product; *b*: index of the input with the right matrix."""
    left, right = need(node, 0), need(node, b)
    return _product(node, (left, left.shape), (right, right.shape), ())


def ordered_matmul(node: ImportedNode) -> list[LayerDraft]:
    """Cost of QOrderedMatMul, whose right matrix is stored transposed in some memory layouts."""
    left, right = need(node, 0), need(node, 2)
    transposed = len(right.shape) == 2 and bool(left.shape) and right.shape[0] != left.shape[-1]
    shape = right.shape[::-1] if transposed else right.shape
    return _product(node, (left, left.shape), (right, shape), (node.input(5),))


def distances(node: ImportedNode) -> list[LayerDraft]:
    """Cost of CDist, the distances between all pairs of rows, which are computed as a product."""
    left, right = need(node, 0), need(node, 1)
    return _product(node, (left, left.shape), (right, right.shape[::-1]), ())


def einsum(node: ImportedNode) -> list[LayerDraft]:
    """Cost of an einsum. With two operands it is a product; otherwise it costs its activation traffic.

    Letters in both operands and the result are groups; letters in both operands only are summed over.
    """
    operands = [tensor for tensor in node.inputs if tensor is not None]
    inputs, output = _parse_equation(node.attributes.text("equation"), operands)
    if len(operands) != 2:
        return [draft(node, "elementwise")]
    sizes = {
        letter: size
        for letters, tensor in zip(inputs, operands, strict=True)
        for letter, size in zip(letters, tensor.shape, strict=True)
        if size != 1
    }
    left, right = (set(letters) for letters in inputs)
    shared, result = left & right, set(output)

    def count(letters: set[str]) -> int:
        return math.prod(sizes.get(letter, 1) for letter in letters)

    m, k, n = count((left - right) & result), count(shared - result), count((right - left) & result)
    groups = count(shared & result)
    if operands[0].constant:
        return _weighted_product(node, sized_gemm(n, k, m, groups), operands[0])
    return _weighted_product(node, sized_gemm(m, k, n, groups), operands[1])


def sized_gemm(m: int, k: int, n: int, groups: int = 1, kernel: int = 1) -> Gemm | None:
    """A GEMM of these sizes, or None if a size is 0 because a tensor is empty."""
    return Gemm(m, k, n, groups, kernel) if min(m, k, n, groups, kernel) > 0 else None


def need(node: ImportedNode, index: int) -> Tensor:
    """The input number *index* of a node; raises ModelError if it is left out."""
    tensor = node.input(index)
    if tensor is None:
        raise ModelError(f"input {index} is missing")
    return tensor


def recurrent(node: ImportedNode, gates: int, inner: int = 2) -> list[LayerDraft]:
    """Cost of a recurrent layer: each step multiplies input and state by the weights W and R of every gate.

    gates: their number, such as 4 in an LSTM. inner: the axis of W and R that is summed over.
    """
    data, w, r = need(node, 0), need(node, 1), need(node, 2)
    if not len(data.shape) == len(w.shape) == len(r.shape) == 3:
        raise ModelError("a recurrent layer needs an input, W and R of 3 axes each")
    directions, width, hidden = w.shape[0], w.shape[inner], r.shape[inner]
    # Sequence and batch are the two leading axes in either layout: their product is the same.
    gemm = sized_gemm(data.shape[0] * data.shape[1], width + hidden, gates * hidden, directions)
    if gemm is None:
        return []
    # inputs 3 and 7: biases and peepholes
    result = draft(node, "rnn", gemm=gemm, weight=w, trained=(w, r, node.input(3), node.input(7)))
    if w.constant and r.constant:
        result = replace(result, layer=replace(result.layer, weights=w.elements + r.elements))
    return [result]


def _product(node: ImportedNode, left: Operand, right: Operand, trained: Sequence[Tensor | None]) -> list[LayerDraft]:
    """Cost of the product of two operands of any rank, as numpy's matmul defines it; *trained*: biases."""
    (a, a_shape), (b, b_shape) = left, right
    if not a_shape or not b_shape:
        raise ModelError("a matrix product needs operands of at least 1 axis")
    *a_batch, m, k = a_shape if len(a_shape) > 1 else (1, *a_shape)
    *b_batch, k2, n = b_shape if len(b_shape) > 1 else (*b_shape, 1)
    _check_equal(k, k2, "inner sizes", a, b)
    if a.constant and not b.constant:  # a weight becomes the right matrix
        a_batch, b_batch, m, n, a, b = b_batch, a_batch, n, m, b, a
    batch = math.prod(broadcast(a_batch, b_batch))
    # A weight without batch axes multiplies all rows at once; each matrix of a batch of weights is a group.
    groups = math.prod(b_batch) if b.constant else batch
    gemm = sized_gemm(m * batch // max(groups, 1), k, n, groups)
    return _weighted_product(node, gemm, b, trained)


def _convolution(node: ImportedNode, gemm: Gemm | None, weight: Tensor, bias: Tensor | None) -> list[LayerDraft]:
    return [draft(node, "conv", gemm=gemm, weight=weight, trained=(weight, bias))] if gemm else []


def _weighted_product(
    node: ImportedNode, gemm: Gemm | None, weight: Tensor, trained: Sequence[Tensor | None] = ()
) -> list[LayerDraft]:
    """The layer of a GEMM whose right matrix is *weight*, which may be an activation; *trained*: biases."""
    if gemm is None:
        return []
    kind = "gemm" if weight.constant else "matmul"
    return [draft(node, kind, gemm=gemm, weight=weight, trained=(weight, *trained))]


def _check_equal(a_size: int, b_size: int, what: str, a: Tensor, b: Tensor) -> None:
    """Raise ModelError if the sizes of two tensors differ, unless one of the shapes was guessed."""
    if a_size != b_size and a.exact and b.exact:
        raise ModelError(f"{what} differ: {a_size} in {_shape_text(a.shape)}, {b_size} in {_shape_text(b.shape)}")


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _parse_equation(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """The letters of each operand and of the result of an einsum, one per axis; ``...`` becomes unused letters."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise ModelError(f"the equation {equation!r} does not fit {len(operands)} operands")
    spare = [chr(code) for code in range(0x3B1, 0x3B1 + 64)]  # from alpha on; equations have Latin letters
    named = [len(term.replace("...", "")) for term in terms]
    hidden = [len(tensor.shape) - count for count, tensor in zip(named, operands, strict=True)]
    if any(count < 0 or (count and "..." not in term) for term, count in zip(terms, hidden, strict=True)):
        raise ModelError(f"the equation {equation!r} does not fit the ranks of its operands")
    # The axes of an ellipsis align at the right, as in broadcasting, so operands share the last spare letters.
    expanded = [term.replace("...", "".join(spare[64 - n :])) for term, n in zip(terms, hidden, strict=True)]
    ellipsis = "".join(spare[64 - max(hidden) :])
    # Without an arrow, the result has the letters that occur once, in alphabetic order.
    once = sorted(letter for letter, times in Counter(left).items() if times == 1 and letter.isalpha())
    return expanded, right.replace("...", ellipsis) if arrow else ellipsis + "".join(once)

"""Fusion of attention into one operator, which a GPU computes several times faster than the operators of exporters.

The pattern begins with three tensors (samples, rows, columns): heads are split off, queries and keys multiplied,
scaled, masked, weighted by a softmax and multiplied with the values, and the heads joined again. A variant that differs
in anything is not fused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.models.element_types import ElementType, numpy_dtype
from weft.models.onnx_graph import (
    Attributes,
    OnnxGraph,
    OnnxModel,
    OnnxNode,
    add_opset,
    constant_tensor,
    declared,
    dimensions,
    fill,
    inferred,
    initializers,
    load,
    make_model,
    make_node,
    makers,
    names_read,
    opsets,
    save,
    to_array,
    to_tensor,
)
from weft.models.onnx_import.infer import write_defaults

DOMAIN = "com.microsoft"  # of ONNX Runtime's own operators
SPLIT, KEYS, TURNED = (0, 2, 1, 3), (0, 2, 3, 1), (0, 1, 3, 2)
"""Orders of axes: heads before rows; the same with keys transposed; transposition alone."""

LAST_AXIS = 13
"""From this opset on, a softmax without an axis is over the last one."""

SMALL = 64
"""Weights of at most this many numbers may be sizes, so that shape inference needs their values."""

Size = int | str | None
"""Size of an axis: a number, the name of a free axis, or None if it is unknown."""


class _Heads(NamedTuple):
    """A tensor (samples, rows, heads * width) from which the heads of an attention are split off."""

    source: str
    outer: tuple[Size, ...]  # its sizes before the last: samples, and rows of each
    heads: int  # their number
    width: int  # columns of one head

    @property
    def rows(self) -> Size:
        return self.outer[1]


class _Match(NamedTuple):
    """The operands of an attention pattern that was found in a graph."""

    queries: _Heads
    keys: _Heads
    values: _Heads
    scale: float  # factor of the scores before the softmax
    mask: str | None  # its name
    end: OnnxNode  # the node that joins the heads


def with_attention(path: Path, folder: Path) -> Path:
    """The path of the model with fused attention, a new file in *folder*; *path* itself if nothing can be fused."""
    if all(node.op_type != "Softmax" for node in load(path).graph.node):
        return path
    model = load(path, weights=True)
    if not fuse_attention(model):
        return path
    target = folder / "attention.onnx"
    save(model, target, outside=model.ByteSize() > 1 << 30)  # a file of protocol buffers has at most 2 GiB
    return target


def fuse_attention(model: OnnxModel) -> int:
    """Replace every attention pattern by one operator; returns the number of replacements."""
    graph = _Graph(model)
    matches = [match for node in graph.nodes if node.op_type == "Softmax" and (match := graph.attention_at(node))]
    usable = [(match, mask) for match in matches if (mask := graph.mask_for(match)) is not None]
    for match, mask in usable:
        names = [match.queries.source, match.keys.source, match.values.source]
        fused = make_node(
            "MultiHeadAttention",
            [*names, "", "", mask] if mask else names,  # "": no bias, and no padding of keys
            match.end.output,
            f"{match.end.name or match.end.output[0]}/attention",
            domain=DOMAIN,
            num_heads=match.queries.heads,
            scale=match.scale,
        )
        graph.replace(match.end, fused)
    if usable:
        graph.write_to(model)
        add_opset(model, DOMAIN, 1)
    return len(usable)


class _Graph:
    """A graph in which attention is being fused, with the known sizes and types of its tensors."""

    def __init__(self, model: OnnxModel) -> None:
        graph = model.graph
        self.nodes = list(graph.node)
        self._outputs = [output.name for output in graph.output]
        self._producers = makers(self.nodes)
        self._weights = initializers(graph)
        self._input_names = {tensor.name for tensor in graph.input}
        modern = opsets(model).get("", 1) >= LAST_AXIS
        self._default_axis = -1 if modern else 1  # of a softmax
        self._last_axes = {-1, 3} if modern else {3}  # ways to name the last of its four axes
        outline = _make_outline(model)
        write_defaults(outline)
        known = inferred(outline).graph
        self._sizes, self._types = dict(_sizes(known)), dict(_types(known))
        self._repeated_masks: dict[tuple[str, int], str] = {}
        """Mask of one row, and a number of rows -> the mask repeated to that many rows."""
        self._mask_nodes: list[OnnxNode] = []

    # Matching

    def attention_at(self, softmax: OnnxNode) -> _Match | None:
        """Match the attention around a softmax; None if there is no attention, or a variant that is not fused."""
        # Forward from the softmax: product with the values, then the heads are joined.
        product = self._only_reader(softmax, "MatMul")
        join_heads = self._only_reader(self._only_reader(product, "Transpose", SPLIT), "Reshape")
        if join_heads is None or product is None or product.input[0] != softmax.output[0]:  # the weights stand left
            return None
        if _attribute(softmax, "axis", self._default_axis) not in self._last_axes:
            return None
        # Backward: mask, scale, and the product of queries and keys.
        scores, mask = self._split_mask(softmax.input[0])
        scores, scale = self._split_scale(scores)
        score_product = self._maker_of(scores, "MatMul")
        if score_product is None:
            return None
        (left, left_scale), (right, right_scale) = (self._split_scale(name) for name in score_product.input)
        keys = self._heads(right, KEYS)
        # Some exporters split the heads of the keys off first, and transpose them afterwards.
        if keys is None and (transposed := self._maker_of(right, "Transpose", TURNED)) is not None:
            right, inner_scale = self._split_scale(transposed.input[0])
            keys, right_scale = self._heads(right, SPLIT), right_scale * inner_scale
        queries, values = self._heads(left, SPLIT), self._heads(product.input[1], SPLIT)
        if queries is None or keys is None or values is None:
            return None
        consistent = queries.heads == keys.heads == values.heads and queries.width == keys.width
        consistent = consistent and keys.outer == values.outer and queries.outer[0] == keys.outer[0] is not None
        sizes = self._sizes.get(join_heads.output[0], ())
        if not consistent or len(sizes) != 3 or sizes[1:] != (queries.rows, values.heads * values.width):
            return None
        scale *= left_scale * right_scale
        if not np.isfinite(scale) or not np.float32(scale):  # to the operator, 0 means its default scale
            return None
        return _Match(queries, keys, values, scale, mask, join_heads)

    def mask_for(self, match: _Match) -> str | None:
        """The name of the mask with a row per query, as the operator takes it; empty: no mask; None: unusable mask."""
        if match.mask is None:
            return ""
        sizes, rows = self._sizes.get(match.mask, ()), match.queries.rows  # sizes: samples, heads, queries, keys
        if len(sizes) != 4 or sizes[1] not in (1, match.queries.heads) or sizes[3] != match.keys.rows:
            return None
        if sizes[0] not in (1, match.queries.outer[0]):
            return None
        if sizes[2] == rows:
            return match.mask
        if sizes[2] != 1 or not isinstance(rows, int):
            return None
        return self._repeat_mask(match.mask, rows)

    def _maker_of(self, name: str, kind: str, order: Sequence[int] | None = None) -> OnnxNode | None:
        """The node that produces *name*, if its operator is *kind* and, for a Transpose, its axes have this *order*."""
        node: OnnxNode | None = self._producers.get(name)
        if node is None or node.op_type != kind or (order and _attribute(node, "perm", ()) != tuple(order)):
            return None
        return node

    def _only_reader(self, node: OnnxNode | None, kind: str, order: Sequence[int] | None = None) -> OnnxNode | None:
        """The only node that reads the output of *node*, if its operator is *kind*, with this *order*; else None."""
        if node is None or node.output[0] in self._outputs:
            return None
        users = [user for user in self.nodes if node.output[0] in user.input]
        return self._maker_of(users[0].output[0], kind, order) if len(users) == 1 else None  # the reader, or None

    def _split_mask(self, name: str) -> tuple[str, str | None]:
        """Split the tensor *name* into the scores before a mask was added, and the mask (None: no mask)."""
        addition = self._maker_of(name, "Add")
        if addition is None:
            return name, None
        first, second = addition.input
        # The scores are a product.
        return (first, second) if self._maker_of(self._split_scale(first)[0], "MatMul") else (second, first)

    def _split_scale(self, name: str) -> tuple[str, float]:
        """The tensor that was multiplied with, or divided by, constant numbers to give *name*; and their product."""
        scale = 1.0
        while (node := self._maker_of(name, "Mul") or self._maker_of(name, "Div")) is not None:
            left, right = node.input
            if node.op_type == "Mul" and self._constant_number(left) is not None:
                left, right = right, left
            number = self._constant_number(right)
            if number is None or not number:
                break
            name, scale = left, scale * number if node.op_type == "Mul" else scale / number
        return name, scale

    def _constant_number(self, name: str) -> float | None:
        """The number that a constant tensor of one element holds; None for other tensors."""
        weight, node = self._weights.get(name), self._maker_of(name, "Constant")
        if weight is None and node is not None:
            weight = constant_tensor(node)
        if weight is None or name in self._input_names or not all(size == 1 for size in weight.dims):
            return None
        return float(to_array(weight).ravel()[0])

    def _heads(self, name: str, order: Sequence[int]) -> _Heads | None:
        """The heads that a Reshape and a Transpose of this *order* split off, with *name* as result; else None."""
        transposed = self._maker_of(name, "Transpose", order)
        split = self._maker_of(transposed.input[0], "Reshape") if transposed is not None else None
        if split is None:
            return None
        before, after = (self._sizes.get(tensor, ()) for tensor in (split.input[0], split.output[0]))
        # From (samples, rows, heads * width) to (samples, rows, heads, width).
        if len(before) != 3 or len(after) != 4 or before[1] is None or before[1] != after[1]:
            return None
        count, width = after[2:]
        if not isinstance(count, int) or not isinstance(width, int) or before[2] != count * width:
            return None
        return _Heads(split.input[0], before[:2], count, width)

    # Rewriting

    def _repeat_mask(self, mask: str, rows: int) -> str:
        """Repeat a mask of one row to *rows* rows, by an addition of zeros; returns the name of the new tensor."""
        if (mask, rows) not in self._repeated_masks:
            name = self._repeated_masks[mask, rows] = f"{mask}/rows{rows}"
            kind = numpy_dtype(self._types.get(mask, ElementType.FLOAT))
            zeros = to_tensor(np.zeros((1, 1, rows, 1), kind), f"{name}/zeros")
            self._weights[zeros.name] = zeros
            self._mask_nodes.append(make_node("Add", [mask, zeros.name], [name], name))
        return self._repeated_masks[mask, rows]

    def replace(self, node: OnnxNode, by: OnnxNode) -> None:
        self.nodes[self.nodes.index(node)] = by

    def write_to(self, model: OnnxModel) -> None:
        """Write the nodes that are still needed to *model*, producers before their readers."""
        graph, wanted_names, needed_nodes = model.graph, set(self._outputs), list[OnnxNode]()
        masks = {node.output[0]: node for node in self._mask_nodes}
        for node in reversed(self.nodes):  # so that readers come before producers
            if wanted_names.intersection(node.output):
                needed_nodes.append(node)
                wanted_names |= names_read(node)
                for name in [source for source in node.input if source in masks]:
                    wanted_names |= {*masks[name].input}
        needed_nodes.reverse()
        for mask in (adder for name, adder in masks.items() if name in wanted_names):
            producers = [index for index, node in enumerate(needed_nodes) if mask.input[0] in node.output]
            needed_nodes.insert(producers[0] + 1 if producers else 0, mask)
        fill(graph.node, needed_nodes)
        weight_names = wanted_names | self._input_names
        fill(graph.initializer, [weight for name, weight in self._weights.items() if name in weight_names])


def _make_outline(model: OnnxModel) -> OnnxModel:
    """The model with its large weights replaced by inputs, which is enough to infer shapes."""
    graph = model.graph
    input_names = {tensor.name for tensor in graph.input}
    large = [weight for weight in graph.initializer if prod(weight.dims) > SMALL and weight.name not in input_names]
    small = [weight for weight in graph.initializer if prod(weight.dims) <= SMALL]
    inputs = [*graph.input, *(declared(weight.name, weight.data_type, weight.dims) for weight in large)]
    outline = make_model(graph.node, graph.name, inputs, graph.output, small, like=model)
    outline.graph.value_info.extend(graph.value_info)
    del outline.functions[:]  # shapes inside functions are not needed
    return outline


def _sizes(graph: OnnxGraph) -> Iterator[tuple[str, tuple[Size, ...]]]:
    """Yield the name and the sizes of every tensor with known dimensions."""
    for tensor in (*graph.input, *graph.value_info, *graph.output):
        if (sizes := dimensions(tensor)) is not None:
            yield tensor.name, tuple(None if size == "" else size for size in sizes)
    for weight in graph.initializer:
        yield weight.name, tuple(weight.dims)


def _types(graph: OnnxGraph) -> Iterator[tuple[str, int]]:
    """Yield the name and the element type of every tensor that the graph declares."""
    for tensor in (*graph.input, *graph.value_info, *graph.output):
        yield tensor.name, tensor.type.tensor_type.elem_type
    for weight in graph.initializer:
        yield weight.name, weight.data_type


def _attribute(node: OnnxNode, name: str, default: object) -> object:
    value = Attributes(node).values().get(name, default)
    return tuple(value) if isinstance(value, list) else value

"""What a node of known small values computes: the shape arithmetic that exporters write into graphs.

One rule per operator serves every version of the operator set: where axes, sizes or limits moved from an attribute
to an input, a rule takes whichever is there. A rule that raises has met a node that no runtime could run either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import onnx

from weft.base.errors import ModelError
from weft.models.onnx_import.attributes import Attributes
from weft.models.onnx_import.tensors import Array


@dataclass(frozen=True, slots=True)
class NodeCall:
    """A node with the values of its inputs, None for those left out."""

    values: Sequence[Array | None]
    attributes: Attributes
    outputs: int

    def value(self, place: int) -> Array | None:
        return self.values[place] if place < len(self.values) else None

    def need(self, place: int) -> Array:
        value = self.value(place)
        if value is None:
            raise ModelError(f"input {place} is missing")
        return value

    def integers(self, name: str, place: int) -> tuple[int, ...] | None:
        """What newer versions take as an input and older ones as an attribute; None where neither is there."""
        value = self.value(place)
        if value is not None:
            return tuple(int(each) for each in value.reshape(-1))
        return self.attributes.integers(name, ()) if self.attributes.has(name) else None


Rule = Callable[[NodeCall], Array | tuple[Array, ...] | None]


def fold(op: str, call: NodeCall) -> tuple[Array, ...] | None:
    """One value per output, or None where no rule of ours says what the operator computes."""
    rule = RULES.get(op)
    if rule is None:
        return None
    with np.errstate(all="ignore"):
        found = rule(call)
    if found is None:
        return None
    arrays = found if isinstance(found, tuple) else (np.asarray(found),)
    known = len(arrays) == call.outputs and all(each.dtype.kind in "biuf" for each in arrays)
    return arrays if known else None


# Element by element


def _unary(function: Callable[[Array], Any]) -> Rule:
    def rule(call: NodeCall) -> Array:
        value = call.need(0)
        return np.asarray(function(value)).astype(value.dtype)

    return rule


def _binary(function: Callable[[Array, Array], Any], logical: bool = False) -> Rule:
    """A function of two values, whose result has the type of the first or is a truth value."""

    def rule(call: NodeCall) -> Array:
        left, right = call.need(0), _aligned(call)
        return np.asarray(function(left, right)).astype(np.bool_ if logical else left.dtype)

    return rule


def _aligned(call: NodeCall) -> Array:
    """The second operand; before opset 7 an attribute says at which axis of the first its axes begin."""
    left, right = call.need(0), call.need(1)
    if not call.attributes.integer("broadcast", 0) or not call.attributes.has("axis"):
        return right
    axis = call.attributes.integer("axis", 0) % max(left.ndim, 1)
    return right.reshape(right.shape + (1,) * (left.ndim - axis - right.ndim))


def _variadic(function: Callable[[Array, Array], Any]) -> Rule:
    return lambda call: np.asarray(reduce(function, [each for each in call.values if each is not None]))


def _divide(left: Array, right: Array) -> Array:
    """Division as C has it: of integers, towards zero."""
    if left.dtype.kind not in "iu":
        return np.asarray(left / right)
    if not np.all(right):
        raise ModelError("it divides an integer by 0")
    quotient = left // right
    return np.asarray(quotient + ((quotient < 0) & (quotient * right != left)))


def _modulo(call: NodeCall) -> Array:
    left, right = call.need(0), call.need(1)
    return np.asarray((np.fmod if call.attributes.integer("fmod", 0) else np.mod)(left, right))


def _mean(call: NodeCall) -> Array:
    total = np.asarray(reduce(np.add, [each for each in call.values if each is not None]))
    return np.asarray(total / len(call.values)).astype(total.dtype)


def _shift(call: NodeCall) -> Array:
    left = call.attributes.text("direction") == "LEFT"
    return np.asarray((np.left_shift if left else np.right_shift)(call.need(0), call.need(1)))


def _clip(call: NodeCall) -> Array:
    value = call.need(0)
    low, high = (_limit(call, place, name) for place, name in ((1, "min"), (2, "max")))
    value = value if low is None else np.maximum(value, low)
    value = value if high is None else np.minimum(value, high)
    return value.astype(call.need(0).dtype)


def _limit(call: NodeCall, place: int, name: str) -> Array | float | None:
    given = call.value(place)
    return call.attributes.number(name) if given is None else given


def _cast(call: NodeCall) -> Array:
    to = next((each for each in call.attributes.node.attribute if each.name == "to"), None)
    if to is None:
        raise ModelError("it does not say what to cast to")
    number = onnx.TensorProto.DataType.Value(to.s.decode()) if to.s else to.i  # a text before opset 6
    return call.need(0).astype(onnx.helper.tensor_dtype_to_np_dtype(number))


def _cumulated(call: NodeCall) -> Array:
    value, axis = call.need(0), int(call.need(1).reshape(()))
    backwards, exclusive = (call.attributes.integer(name, 0) for name in ("reverse", "exclusive"))
    value = np.flip(value, axis) if backwards else value
    total = np.cumsum(value, axis, dtype=value.dtype) - (value if exclusive else 0)
    return np.asarray(np.flip(total, axis) if backwards else total).astype(value.dtype)


# Over axes


def _reduction(function: Callable[..., Any]) -> Rule:
    def rule(call: NodeCall) -> Array:
        value, axes = call.need(0), call.integers("axes", 1)
        if not axes and call.attributes.integer("noop_with_empty_axes", 0):
            return value
        keep = bool(call.attributes.integer("keepdims", 1))
        return np.asarray(function(value, axis=axes or None, keepdims=keep)).astype(value.dtype)

    return rule


def _extreme(function: Callable[..., Any]) -> Rule:
    def rule(call: NodeCall) -> Array:
        value, axis = call.need(0), call.attributes.integer("axis", 0)
        last = bool(call.attributes.integer("select_last_index", 0))
        found = function(np.flip(value, axis) if last else value, axis=axis)
        found = value.shape[axis] - 1 - found if last else found
        keep = call.attributes.integer("keepdims", 1)
        return np.asarray(np.expand_dims(found, axis) if keep else found).astype(np.int64)

    return rule


def _top(call: NodeCall) -> tuple[Array, ...]:
    value, axis = call.need(0), call.attributes.integer("axis", -1)
    wanted = call.value(1)
    count = call.attributes.integer("k", 1) if wanted is None else int(wanted.item())
    order = np.argsort(-value.astype(np.float64) if call.attributes.integer("largest", 1) else value, axis, "stable")
    chosen = np.take(order, range(count), axis)
    return np.take_along_axis(value, chosen, axis), chosen.astype(np.int64)


# The same values seen differently


def _reshape(call: NodeCall) -> Array:
    value = call.need(0)
    wanted = call.integers("shape", 1) or ()
    copied = not call.attributes.integer("allowzero", 0)
    sizes = [value.shape[place] if size == 0 and copied else size for place, size in enumerate(wanted)]
    return value.reshape(sizes)


def _flatten(call: NodeCall) -> Array:
    value, axis = call.need(0), call.attributes.integer("axis", 1)
    return value.reshape(int(np.prod(value.shape[:axis], dtype=np.int64)), -1)


# Choosing and joining


def _concat(call: NodeCall) -> Array:
    parts = [each for each in call.values if each is not None]
    return np.concatenate(parts, call.attributes.integer("axis", 1))


def _slice(call: NodeCall) -> Array:
    value = call.need(0)
    starts, ends = call.integers("starts", 1) or (), call.integers("ends", 2) or ()
    axes = call.integers("axes", 3) or range(len(starts))
    steps = call.integers("steps", 4) or (1,) * len(starts)
    chosen = [slice(None)] * value.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        chosen[axis] = slice(start, _end(end, step, value.shape[axis]), step)
    return value[tuple(chosen)]


def _end(end: int, step: int, size: int) -> int | None:
    """A slice's end for Python, where an end before the first element has no number of its own."""
    return None if step < 0 and end < -size else end


def _split(call: NodeCall) -> tuple[Array, ...]:
    value, axis = call.need(0), call.attributes.integer("axis", 0)
    size = value.shape[axis]
    even = -(-size // call.outputs)
    lengths = call.integers("split", 1) or [even] * (call.outputs - 1)
    return tuple(np.split(value, np.cumsum(lengths)[: call.outputs - 1], axis))


def _elements(call: NodeCall) -> tuple[Array, ...]:
    """Where the elements lie that indices name along one axis, each at its own place along the others."""
    indices, axis = call.need(1), call.attributes.integer("axis", 0)
    places: list[Array] = [*np.indices(indices.shape)]
    places[axis] = indices
    return tuple(places)


def _gather_nd(call: NodeCall) -> Array | None:
    if call.attributes.integer("batch_dims", 0):
        return None
    return np.asarray(call.need(0)[tuple(np.moveaxis(call.need(1), -1, 0))])


def _scatter(places: Callable[[NodeCall], tuple[Array, ...]]) -> Rule:
    def rule(call: NodeCall) -> Array | None:
        if call.attributes.text("reduction") not in ("", "none"):
            return None
        result = call.need(0).copy()
        result[places(call)] = call.need(2)
        return result

    return rule


def _compress(call: NodeCall) -> Array:
    kept = np.flatnonzero(call.need(1))
    axis = call.attributes.integer("axis", 0) if call.attributes.has("axis") else None
    return np.take(call.need(0), kept, axis)


def _nonzero(call: NodeCall) -> Array:
    value = call.need(0)
    return np.array(np.nonzero(value if value.ndim else value.reshape(1)), dtype=np.int64)


# Making and growing


def _constant_of_shape(call: NodeCall) -> Array:
    fill = call.attributes.tensor("value")
    value = np.zeros(1, np.float32) if fill is None else onnx.numpy_helper.to_array(fill)
    return np.full(tuple(call.need(0)), value.reshape(()), dtype=value.dtype)


def _range(call: NodeCall) -> Array:
    start, limit, step = (call.need(place).item() for place in range(3))
    return np.arange(start, limit, step, dtype=call.need(0).dtype)


def _expand(call: NodeCall) -> Array:
    value = call.need(0)
    return np.broadcast_to(value, np.broadcast_shapes(value.shape, tuple(call.need(1))))


def _tile(call: NodeCall) -> Array | None:
    value, repeats = call.need(0), call.need(1)
    return np.tile(value, tuple(repeats)) if len(call.values) == 2 and repeats.size == value.ndim else None


def _pad(call: NodeCall) -> Array | None:
    value = call.need(0)
    amounts = call.integers("pads", 1) or call.attributes.integers("paddings", ())
    axes = call.integers("axes", 3) or range(value.ndim)
    if min(amounts, default=0) < 0:
        return None
    widths = [(0, 0)] * value.ndim
    for axis, before, after in zip(axes, amounts, amounts[len(amounts) // 2 :], strict=False):
        widths[axis] = (before, after)
    match call.attributes.text("mode") or "constant":
        case "constant":
            fill = call.value(2)
            number = call.attributes.number("value") or 0.0 if fill is None else fill.item()
            return np.pad(value, widths, "constant", constant_values=number)
        case "edge" | "reflect" as mode:
            return np.pad(value, widths, mode)
        case _:
            return None


def _one_hot(call: NodeCall) -> Array:
    indices, depth, values = call.need(0), int(call.need(1).reshape(())), call.need(2)
    axis = call.attributes.integer("axis", -1)
    hot = np.equal(np.mod(indices[..., None], depth), np.arange(depth)) & (np.abs(indices[..., None]) <= depth)
    return np.moveaxis(np.where(hot, values[1], values[0]), -1, axis)


def _triangle(call: NodeCall) -> Array:
    diagonal = call.value(1)
    cut = np.triu if call.attributes.integer("upper", 1) else np.tril
    return np.asarray(cut(call.need(0), 0 if diagonal is None else int(diagonal.reshape(()))))


_UNARY: Mapping[str, Callable[[Array], Any]] = {
    "Abs": np.abs, "Neg": np.negative, "Floor": np.floor, "Ceil": np.ceil, "Round": np.rint, "Sqrt": np.sqrt,
    "Exp": np.exp, "Log": np.log, "Reciprocal": np.reciprocal, "Sign": np.sign, "Not": np.logical_not,
    "BitwiseNot": np.invert, "Identity": np.asarray,
}  # fmt: skip

_BINARY: Mapping[str, Callable[[Array, Array], Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": _divide, "Pow": np.power,
    "BitwiseAnd": np.bitwise_and, "BitwiseOr": np.bitwise_or, "BitwiseXor": np.bitwise_xor,
}  # fmt: skip

_LOGICAL: Mapping[str, Callable[[Array, Array], Any]] = {
    "And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor, "Equal": np.equal, "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal, "Less": np.less, "LessOrEqual": np.less_equal,
}  # fmt: skip

_REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "ReduceSum": np.sum, "ReduceProd": np.prod, "ReduceMax": np.max, "ReduceMin": np.min, "ReduceMean": np.mean,
}  # fmt: skip

RULES: Mapping[str, Rule] = {
    **{name: _unary(function) for name, function in _UNARY.items()},
    **{name: _binary(function) for name, function in _BINARY.items()},
    **{name: _binary(function, logical=True) for name, function in _LOGICAL.items()},
    **{name: _variadic(function) for name, function in {"Sum": np.add, "Min": np.minimum, "Max": np.maximum}.items()},
    **{name: _reduction(function) for name, function in _REDUCTIONS.items()},
    "ArgMax": _extreme(np.argmax), "ArgMin": _extreme(np.argmin), "TopK": _top,
    "Mod": _modulo, "Mean": _mean, "BitShift": _shift, "Clip": _clip, "CumSum": _cumulated,
    "Where": lambda call: np.where(call.need(0), call.need(1), call.need(2)),
    "Cast": _cast, "CastLike": lambda call: call.need(0).astype(call.need(1).dtype),
    "Reshape": _reshape, "Flatten": _flatten,
    "Squeeze": lambda call: np.squeeze(call.need(0), call.integers("axes", 1) or None),
    "Unsqueeze": lambda call: np.expand_dims(call.need(0), call.integers("axes", 1) or ()),
    "Transpose": lambda call: np.transpose(call.need(0), call.attributes.integers("perm", ()) or None),
    "Concat": _concat, "Slice": _slice, "Split": _split,
    "Gather": lambda call: np.take(call.need(0), call.need(1), call.attributes.integer("axis", 0)),
    "GatherElements": lambda call: np.asarray(call.need(0)[_elements(call)]), "GatherND": _gather_nd,
    "ScatterND": _scatter(lambda call: tuple(np.moveaxis(call.need(1), -1, 0))),
    **dict.fromkeys(("ScatterElements", "Scatter"), _scatter(_elements)),
    "Compress": _compress, "NonZero": _nonzero,
    "ConstantOfShape": _constant_of_shape, "Range": _range, "Expand": _expand, "Tile": _tile, "Pad": _pad,
    "OneHot": _one_hot, "Trilu": _triangle,
}  # fmt: skip

"""The meanings of operators as functions of torch: ``Meaning``, ``TorchNode`` and the meanings of general use.

Torch is never imported here. The first argument *t* of a meaning is a ``TorchNode``: the torch module and the node's
attributes. The others are the node's inputs: tensors, None for an input that is left out, and tuples of numbers for
inputs in ``Operator.numbers``. A meaning returns a tensor, or a tuple with a tensor for each output of the node.
Meanings hold for inference, from opset 7 on, and for tensors of the types in ``DTYPES``. They raise ``ModelError`` for
attributes without a counterpart in torch; the node is then left to ONNX Runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import attrgetter
from typing import Any, TypeAlias

from weft.base.errors import ModelError

TorchTensor: TypeAlias = Any
"""torch.Tensor; torch is not imported, so its types are not checked."""
Meaning = Callable[..., Any]
Numbers = tuple[Any, ...]

NEWEST = 25
"""The opset assumed for a node without a version."""

DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64",
    16: "bfloat16",
}  # fmt: skip
"""ONNX's number of a type -> its name in torch, for the types that torch computes with."""


@dataclass(frozen=True, slots=True)
class TorchNode:
    """The torch module, and a node's attributes as Python values: strings are str, lists are sequences."""

    torch: Any
    attributes: Mapping[str, Any]
    outputs: int = 1
    """Number of outputs of the node."""
    version: int = NEWEST
    """Opset of the node's operator."""
    stored: Callable[[Sequence[float], Any, Any], TorchTensor] | None = None
    """Instead of ``constant``, for a module that stores its constants; None: they are made anew."""

    @property
    def nn(self) -> Any:
        return self.torch.nn.functional

    def get(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def numbers(self, name: str, value: Numbers | None) -> Numbers | None:
        """The *value* of an input that older opsets have as the attribute *name*; None if the node has neither."""
        values = self.get(name) if value is None else value
        return None if values is None else tuple(values)

    def constant(self, values: Sequence[float], like: TorchTensor, dtype: Any = None) -> TorchTensor:
        """A vector of *values* on the device of *like*; *dtype*: its torch type, None: int64."""
        if self.stored is not None:
            return self.stored(values, like.device, dtype)
        return self.torch.tensor(values, device=like.device, dtype=dtype)

    def dtype(self, number: int) -> Any:
        """The torch type of ONNX's element type *number*; raises ModelError if torch has none."""
        if number not in DTYPES:
            raise ModelError(f"torch has no counterpart of the ONNX type {number}")
        return getattr(self.torch, DTYPES[number])

    def refuse(self, condition: Any, what: str) -> None:
        """Raise ``ModelError`` if *condition* holds: the meaning does not cover *what*."""
        if condition:
            raise ModelError(f"{what} has no counterpart in torch; run it as ONNX")


def call(path: str) -> Meaning:
    """The meaning of an operator that is the torch function at *path* (``nn.functional.mish``), without attributes."""
    look_up = attrgetter(path)
    return lambda t, *tensors: look_up(t.torch)(*tensors)


def chained(path: str) -> Meaning:
    """The meaning of an operator that applies the binary torch function at *path* to all inputs, from the left."""
    look_up = attrgetter(path)
    return lambda t, *tensors: reduce(look_up(t.torch), tensors)


# Element by element


def mean_of(t: TorchNode, *tensors: TorchTensor) -> TorchTensor:
    """The mean of several tensors, element by element."""
    return sum(tensors[1:], tensors[0]) / len(tensors)


def divide(t: TorchNode, left: TorchTensor, right: TorchTensor) -> TorchTensor:
    return t.torch.div(left, right, rounding_mode=None if left.is_floating_point() else "trunc")


def power(t: TorchNode, base: TorchTensor, exponent: TorchTensor) -> TorchTensor:
    return t.torch.pow(base, exponent).to(base.dtype)


def modulo(t: TorchNode, left: TorchTensor, right: TorchTensor) -> TorchTensor:
    return (t.torch.fmod if t.get("fmod") else t.torch.remainder)(left, right)


def shift(t: TorchNode, left: TorchTensor, right: TorchTensor) -> TorchTensor:
    return getattr(t.torch, f"bitwise_{t.get('direction').lower()}_shift")(left, right)


def clip(t: TorchNode, x: TorchTensor, low: Numbers | None = None, high: Numbers | None = None) -> TorchTensor:
    """Clip with optional bounds, which are inputs or, in older opsets, attributes."""
    bounds = [t.get(name) if value is None else value[0] for name, value in (("min", low), ("max", high))]
    return x if bounds == [None, None] else t.torch.clamp(x, *bounds)


def is_infinite(t: TorchNode, x: TorchTensor) -> TorchTensor:
    """IsInf, for both signs or only the signs that the attributes name."""
    sides = [side for side in ("positive", "negative") if t.get(f"detect_{side}", 1)]
    matches = [getattr(t.torch, f"is{side[:3]}inf")(x) for side in sides]
    return reduce(t.torch.logical_or, matches) if matches else t.torch.zeros_like(x, dtype=t.torch.bool)


def hard_sigmoid(t: TorchNode, x: TorchTensor) -> TorchTensor:
    return t.torch.clamp(x * t.get("alpha", 0.2) + t.get("beta", 0.5), 0.0, 1.0)


def selu(t: TorchNode, x: TorchTensor) -> TorchTensor:
    alpha, gamma = t.get("alpha", 1.6732632423543772), t.get("gamma", 1.0507009873554805)  # defaults of the standard
    return gamma * t.nn.elu(x, alpha)


def shrink(t: TorchNode, x: TorchTensor) -> TorchTensor:
    bias, edge = t.get("bias", 0.0), t.get("lambd", 0.5)
    return t.torch.where(x < -edge, x + bias, t.torch.where(x > edge, x - bias, t.torch.zeros_like(x)))


def fast_gelu(t: TorchNode, x: TorchTensor, bias: TorchTensor = None) -> TorchTensor:
    return t.nn.gelu(x if bias is None else x + bias, approximate="tanh")


def activated(t: TorchNode, x: TorchTensor) -> TorchTensor:
    """*x* through the activation that ONNX Runtime's optimiser wrote into the attribute ``activation``."""
    first, second = (*t.get("activation_params", ()), 0.0, 0.0)[:2]
    functions: dict[str, Callable[[], TorchTensor]] = {
        "": lambda: x,
        "Relu": lambda: t.torch.relu(x),
        "Sigmoid": lambda: t.torch.sigmoid(x),
        "Tanh": lambda: t.torch.tanh(x),
        "LeakyRelu": lambda: t.nn.leaky_relu(x, first),
        "Clip": lambda: t.torch.clamp(x, first, second),
        "HardSigmoid": lambda: t.torch.clamp(x * first + second, 0.0, 1.0),
    }
    name = t.get("activation", "")
    t.refuse(name not in functions, f"the fused activation {name}")
    return functions[name]()


# Quantised values


def quantize(t: TorchNode, x: TorchTensor, scale: TorchTensor, zero: TorchTensor = None) -> TorchTensor:
    t.refuse(t.get("block_size", 0) or t.get("output_dtype", 0), "quantising by blocks, or to a type by its number")
    dtype = t.torch.uint8 if zero is None else zero.dtype
    scale, zero = (_align_to_axis(t, x, values) for values in (scale, zero))
    levels = t.torch.round(x / scale) + (0 if zero is None else zero)
    limits = t.torch.iinfo(dtype)
    return t.torch.clamp(levels, limits.min, limits.max).to(dtype)


def dequantize(t: TorchNode, x: TorchTensor, scale: TorchTensor, zero: TorchTensor = None) -> TorchTensor:
    t.refuse(t.get("block_size", 0), "quantising by blocks")
    dtype = scale.dtype
    scale, zero = (_align_to_axis(t, x, values) for values in (scale, zero))
    return (x.to(t.torch.int32) - (0 if zero is None else zero.to(t.torch.int32))).to(dtype) * scale


def _align_to_axis(t: TorchNode, x: TorchTensor, parameter: TorchTensor) -> TorchTensor:
    """Reshape a scale or zero point to broadcast with *x*: a single value, or a vector along the attribute ``axis``."""
    if parameter is None or parameter.dim() == 0:
        return parameter
    sizes = [1] * x.dim()
    if parameter.numel() > 1:
        sizes[t.get("axis", 1)] = -1
    return parameter.reshape(sizes)


# Along axes


def reduced(
    function: Callable[[TorchNode, TorchTensor, list[int], bool], TorchTensor],
    before: str = "",
    after: str = "",
) -> Meaning:
    """The meaning of a reduction by *function*(t, x, axes, keepdims).

    before, after: names of torch functions that are applied to each element and to the result.
    """

    def meaning(t: TorchNode, x: TorchTensor, axes_input: Numbers | None = None) -> TorchTensor:
        axes = t.numbers("axes", axes_input)
        x = getattr(t.torch, before)(x) if before else x
        if axes or not t.get("noop_with_empty_axes", 0):
            x = function(t, x, list(axes or range(x.dim())), bool(t.get("keepdims", 1)))
        return getattr(t.torch, after)(x) if after else x

    return meaning


def over_axes(name: str) -> Callable[[TorchNode, TorchTensor, list[int], bool], TorchTensor]:
    """The torch reduction *name* (such as ``sum``), which takes several axes, as a function for ``reduced``."""

    def function(t: TorchNode, x: TorchTensor, axes: list[int], keep: bool) -> TorchTensor:
        t.refuse(name in ("amax", "amin") and 0 in x.shape, "the extreme of no elements")
        return getattr(t.torch, name)(x, dim=axes, keepdim=keep) if axes else x

    return function


def product_over_axes(t: TorchNode, x: TorchTensor, axes: list[int], keep: bool) -> TorchTensor:
    """The product over several axes, one after another, since torch's ``prod`` takes a single axis."""
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(dim=axis, keepdim=keep)
    return x


def extreme(name: str) -> Meaning:
    """The meaning of ``argmax`` or ``argmin``: the index of the first or, by attribute, the last extreme value."""

    def meaning(t: TorchNode, x: TorchTensor) -> TorchTensor:
        axis, keep, last = t.get("axis", 0), bool(t.get("keepdims", 1)), t.get("select_last_index", 0)
        index = getattr(t.torch, name)(x.flip(axis) if last else x, dim=axis, keepdim=keep)
        return x.shape[axis] - 1 - index if last else index

    return meaning


def top_k(t: TorchNode, x: TorchTensor, k_input: Numbers | None = None) -> tuple[TorchTensor, ...]:
    """TopK by a stable sort: of equal values ONNX takes the first, which torch's topk does not guarantee."""
    axis, (k,) = t.get("axis", -1), k_input or (t.get("k"),)
    values, indices = t.torch.sort(x, dim=axis, descending=bool(t.get("largest", 1)), stable=True)
    return values.narrow(axis, 0, k), indices.narrow(axis, 0, k)


def cumulated(name: str, neutral: int) -> Meaning:
    """The meaning of ``cumsum`` or ``cumprod``, with the attributes ``reverse`` and ``exclusive``.

    neutral: the first value of an exclusive result.
    """

    def meaning(t: TorchNode, x: TorchTensor, axis: Numbers) -> TorchTensor:
        x = x.flip(axis) if t.get("reverse", 0) else x
        result = getattr(t.torch, name)(x, dim=axis[0]).to(x.dtype)
        if t.get("exclusive", 0):
            first = t.torch.full_like(x.narrow(axis[0], 0, 1), neutral)
            result = t.torch.cat([first, result.narrow(axis[0], 0, x.shape[axis[0]] - 1)], dim=axis[0])
        return result.flip(axis) if t.get("reverse", 0) else result

    return meaning


def softmax(name: str) -> Meaning:
    """The meaning of ``softmax`` or ``log_softmax``; before opset 13 over all axes from ``axis`` to the last."""

    def meaning(t: TorchNode, x: TorchTensor) -> TorchTensor:
        function = getattr(t.torch, name)
        if t.version >= 13:
            return function(x, dim=t.get("axis", -1))
        axis = t.get("axis", 1) % max(1, x.dim())
        return function(x.reshape(math.prod(x.shape[:axis]), -1), dim=-1).reshape(x.shape)

    return meaning


def hardmax(t: TorchNode, x: TorchTensor) -> TorchTensor:
    t.refuse(t.version < 13, "Hardmax before operator set 13")
    axis = t.get("axis", -1)
    return t.torch.zeros_like(x).scatter(axis, x.argmax(dim=axis, keepdim=True), 1)


# Norms


def batch_norm(
    t: TorchNode, x: TorchTensor, scale: TorchTensor, bias: TorchTensor, mean: TorchTensor, variance: TorchTensor
) -> TorchTensor:
    t.refuse(t.get("training_mode", 0) or t.outputs > 1, "a batch norm in training mode")
    # False, 0.0: not in training, without momentum
    return t.nn.batch_norm(x, mean, variance, scale, bias, False, 0.0, t.get("epsilon", 1e-5))


def instance_norm(t: TorchNode, x: TorchTensor, scale: TorchTensor, bias: TorchTensor) -> TorchTensor:
    return t.nn.group_norm(x, x.shape[1], scale, bias, t.get("epsilon", 1e-5))


def layer_norm(t: TorchNode, x: TorchTensor, scale: TorchTensor, bias: TorchTensor = None) -> Any:
    """Layer normalisation; with more than one output also the mean and the inverse deviation."""
    axes = list(range(t.get("axis", -1) % x.dim(), x.dim()))
    sizes, epsilon = [x.shape[axis] for axis in axes], t.get("epsilon", 1e-5)
    # torch's function only takes parameters with the shape of the normalised axes; ONNX also broadcasts them.
    broadcast = any([values is not None and list(values.shape) != sizes for values in (scale, bias)])
    result = t.nn.layer_norm(x, sizes, *((None, None) if broadcast else (scale, bias)), epsilon)
    result = result * scale + (0 if bias is None else bias) if broadcast else result
    if t.outputs == 1:
        return result
    mean = x.mean(dim=axes, keepdim=True)
    return result, mean, t.torch.rsqrt(x.var(dim=axes, keepdim=True, unbiased=False) + epsilon)


def rms_norm(t: TorchNode, x: TorchTensor, scale: TorchTensor) -> TorchTensor:
    t.refuse(t.outputs > 1, "a norm that also gives out its deviation")
    axes = list(range(t.get("axis", -1) % x.dim(), x.dim()))
    return x * t.torch.rsqrt(x.square().mean(dim=axes, keepdim=True) + t.get("epsilon", 1e-5)) * scale


def skip_norm(norm: Meaning) -> Meaning:
    """The meaning of a norm of a sum *x* + *skip* + bias; with four outputs the last is the sum.

    Inputs after *skip*: the parameters of *norm*, then an optional bias.
    """

    def meaning(t: TorchNode, x: TorchTensor, skip: TorchTensor, *parameters: TorchTensor) -> Any:
        t.refuse(t.outputs not in (1, 4), "a norm that also gives out its mean")
        count = 2 if norm is layer_norm else 1  # scale and bias, or only a scale
        norm_parameters, bias = parameters[:count], parameters[count] if len(parameters) > count else None
        total = x + skip if bias is None else x + skip + bias
        norm_node = TorchNode(t.torch, {"epsilon": t.get("epsilon", 1e-12)}, 1, t.version)
        result = norm(norm_node, total, *norm_parameters)
        return result if t.outputs == 1 else (result, None, None, total)  # None: mean and deviation, for training

    return meaning


def lp_norm(t: TorchNode, x: TorchTensor) -> TorchTensor:
    length = t.torch.linalg.vector_norm(x, ord=t.get("p", 2), dim=t.get("axis", -1), keepdim=True)
    return t.torch.where(length == 0, t.torch.zeros_like(x), x / length)


def mean_variance(t: TorchNode, x: TorchTensor) -> TorchTensor:
    axes = list(t.get("axes", (0, 2, 3)))
    centred = x - x.mean(dim=axes, keepdim=True)
    # The function body in the ONNX standard adds 1e-9 to the deviation.
    return centred / (t.torch.sqrt(centred.square().mean(dim=axes, keepdim=True)) + 1e-9)


def local_response(t: TorchNode, x: TorchTensor) -> TorchTensor:
    size = t.get("size")
    t.refuse(size % 2 == 0, "a local response norm over an even number of channels")
    factors = t.get("alpha", 1e-4), t.get("beta", 0.75), t.get("bias", 1.0)
    return t.nn.local_response_norm(x.float(), size, *factors).to(x.dtype)  # squares exceed float16


# Products


def gemm(t: TorchNode, a: TorchTensor, b: TorchTensor, c: TorchTensor = None) -> TorchTensor:
    """Gemm: alpha * A B + beta * C; by torch's ``linear`` if both factors are 1 and C is a bias."""
    alpha, beta = t.get("alpha", 1.0), t.get("beta", 1.0)
    a = a.t() if t.get("transA") else a
    if alpha == 1.0 and beta == 1.0 and (c is None or c.dim() == 1):
        return t.nn.linear(a, b if t.get("transB") else b.t(), c)
    result = alpha * (a @ (b.t() if t.get("transB") else b))
    return result if c is None else result + beta * c


def fused_gemm(t: TorchNode, *inputs: TorchTensor) -> TorchTensor:
    first, second = (t.get(f"activation_{name}", 0.0) for name in ("alpha", "beta"))
    return activated(_with_attributes(t, activation_params=(first, second)), gemm(t, *inputs))


def fused_matmul(t: TorchNode, a: TorchTensor, b: TorchTensor) -> TorchTensor:
    t.refuse(t.get("transBatchA", 0) or t.get("transBatchB", 0), "a product that transposes its batch")
    a = a.transpose(-1, -2) if t.get("transA", 0) else a
    b = b.transpose(-1, -2) if t.get("transB", 0) else b
    return t.get("alpha", 1.0) * t.torch.matmul(a, b)


def matmul_integer(t: TorchNode, a: TorchTensor, b: TorchTensor, *zeros: TorchTensor) -> TorchTensor:
    """The product of two quantised matrices as int32; *zeros*: optional zero points of *a* and *b*."""
    zero_a, zero_b = (*zeros, None, None)[:2]
    if zero_a is not None and zero_a.dim() == 1:  # one for each row
        zero_a = zero_a.unsqueeze(-1)
    a, b = (
        matrix.to(t.torch.int32) - (0 if zero is None else zero.to(t.torch.int32))
        for matrix, zero in ((a, zero_a), (b, zero_b))
    )
    return t.torch.matmul(a, b)


def einsum(t: TorchNode, *operands: TorchTensor) -> TorchTensor:
    return t.torch.einsum(t.get("equation").replace(" ", ""), *operands)


def _with_attributes(t: TorchNode, **attributes: Any) -> TorchNode:
    """The node with these attributes replaced or added."""
    return replace(t, attributes={**t.attributes, **attributes})


# Shapes


def shape(t: TorchNode, x: TorchTensor) -> Numbers:
    return tuple(x.shape[t.get("start", 0) : t.get("end", x.dim())])


def reshape(t: TorchNode, x: TorchTensor, sizes: Numbers) -> TorchTensor:
    zero_keeps_size = not t.get("allowzero", 0)
    return x.reshape([x.shape[axis] if size == 0 and zero_keeps_size else size for axis, size in enumerate(sizes)])


def flatten(t: TorchNode, x: TorchTensor) -> TorchTensor:
    axis = t.get("axis", 1)
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def squeeze(t: TorchNode, x: TorchTensor, axes_input: Numbers | None = None) -> TorchTensor:
    axes = t.numbers("axes", axes_input)
    return x.squeeze() if axes is None else x.squeeze(axes)


def unsqueeze(t: TorchNode, x: TorchTensor, axes_input: Numbers | None = None) -> TorchTensor:
    axes = t.numbers("axes", axes_input) or ()
    for axis in sorted(axis % (x.dim() + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def transpose(t: TorchNode, x: TorchTensor) -> TorchTensor:
    return x.permute(t.get("perm") or tuple(reversed(range(x.dim()))))


def dropout(t: TorchNode, x: TorchTensor, ratio: Any = None, training: Numbers | None = None) -> Any:
    t.refuse(training and training[0], "a dropout in training mode")
    t.refuse(t.outputs > 1 and t.version < 12, "the mask of a dropout before operator set 12")
    return x if t.outputs == 1 else (x, t.torch.ones_like(x, dtype=t.torch.bool))


def expand(t: TorchNode, x: TorchTensor, sizes: Numbers) -> TorchTensor:
    return x.expand(t.torch.broadcast_shapes(x.shape, sizes))


# Moving and choosing


def concat(t: TorchNode, *parts: Any) -> Any:
    if isinstance(parts[0], tuple):  # sizes, as the meaning ``shape`` returns them
        return tuple(number for part in parts for number in part)
    return t.torch.cat(parts, dim=t.get("axis"))


def split(t: TorchNode, x: TorchTensor, sizes_input: Numbers | None = None) -> tuple[TorchTensor, ...]:
    axis, sizes = t.get("axis", 0), t.numbers("split", sizes_input)
    equal_size = -(-x.shape[axis] // t.outputs)
    return tuple(t.torch.split(x, equal_size if sizes is None else list(sizes), dim=axis))


def slice_(
    t: TorchNode,
    x: TorchTensor,
    starts: Numbers | None = None,
    ends: Numbers | None = None,
    axes: Numbers | None = None,
    steps: Numbers | None = None,
) -> TorchTensor:
    """Slice; axes with negative steps are flipped first, since torch's slices only go forward."""
    index = [slice(None)] * x.dim()
    starts, ends, axes = t.numbers("starts", starts) or (), t.numbers("ends", ends) or (), t.numbers("axes", axes)
    for start, end, axis, step in zip(
        starts, ends, axes or range(len(starts)), steps or (1,) * len(starts), strict=True
    ):
        if step > 0:
            index[axis] = slice(start, end, step)
            continue
        # an end before the first element, which slice() would count from the end, means: including the first
        selected = range(*slice(start, end if end >= -x.shape[axis] else None, step).indices(x.shape[axis]))
        x = x.flip(axis)
        first = x.shape[axis] - 1 - selected.start
        index[axis] = slice(first, first + (len(selected) - 1) * -step + 1, -step) if selected else slice(0, 0)
    return x[tuple(index)]


def pad(
    t: TorchNode,
    x: TorchTensor,
    pads_input: Numbers | None = None,
    fill: Numbers | None = None,
    axes: Numbers | None = None,
) -> TorchTensor:
    """Pad constants by torch's function, other modes by selecting elements; *fill*: the constant as a tuple of one."""
    amounts = t.numbers("pads", pads_input) or ()  # before each axis, then after each axis
    widths, count = [(0, 0)] * x.dim(), len(amounts) // 2
    for axis, before, after in zip(axes or range(x.dim()), amounts[:count], amounts[count:], strict=True):
        widths[axis] = (before, after)
    mode = t.get("mode", "constant")
    if mode == "constant":
        amounts_from_last = [amount for before_after in reversed(widths) for amount in before_after]
        return t.nn.pad(x, amounts_from_last, value=fill[0] if fill else t.get("value", 0))
    for axis, (before, after) in enumerate(widths):
        if before or after:
            indices = [_source_index(target, x.shape[axis], mode) for target in range(-before, x.shape[axis] + after)]
            x = x.index_select(axis, t.constant(indices, x))
    return x


def _source_index(target: int, size: int, mode: str) -> int:
    """The index of the element that is copied to *target*, which is below 0 or from *size* on in the padding."""
    if mode == "edge":
        return min(max(target, 0), size - 1)
    if mode == "wrap":
        return target % size
    phase = target % max(1, 2 * size - 2)  # reflect: forward, then backward without the end elements
    return min(phase, 2 * size - 2 - phase)


def gather(t: TorchNode, x: TorchTensor, index: TorchTensor) -> TorchTensor:
    """Gather by index_select, which is faster than indexing with a tensor of several dimensions.

    Two attributes are weft's, not ONNX's: ``single_index`` is the index if it is one constant, ``from_zero`` says that
    no index is negative.
    """
    axis = t.get("axis", 0) % x.dim()
    if t.get("single_index") is not None:
        return x.select(axis, t.get("single_index"))
    if not t.get("from_zero", 0):
        index = _from_zero(t, index, x.shape[axis])
    if index.dim() == 1:
        return t.torch.index_select(x, axis, index)
    selected = t.torch.index_select(x, axis, index.reshape(-1))
    return selected.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def gather_elements(t: TorchNode, x: TorchTensor, index: TorchTensor) -> TorchTensor:
    axis = t.get("axis", 0)
    return t.torch.gather(x, axis, _from_zero(t, index, x.shape[axis]))


def gather_nd(t: TorchNode, x: TorchTensor, index: TorchTensor) -> TorchTensor:
    """GatherND: the last axis of *index* holds coordinates; batch axes are indexed by their own positions."""
    batch = t.get("batch_dims", 0)
    rank = index.dim() - 1
    rows = [
        t.torch.arange(x.shape[axis], device=x.device).reshape([-1 if other == axis else 1 for other in range(rank)])
        for axis in range(batch)
    ]
    return x[(*rows, *index.unbind(-1))]


def scatter_elements(t: TorchNode, x: TorchTensor, index: TorchTensor, updates: TorchTensor) -> TorchTensor:
    """Write *updates* at *index* along an axis; a reduction combines them with the values that are there."""
    axis, how = t.get("axis", 0), t.get("reduction", "none")
    index = _from_zero(t, index, x.shape[axis])
    if how == "none":
        return t.torch.scatter(x, axis, index, updates)
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return t.torch.scatter_reduce(x, axis, index, updates, names[how])


def scatter_nd(t: TorchNode, x: TorchTensor, index: TorchTensor, updates: TorchTensor) -> TorchTensor:
    how = t.get("reduction", "none")
    t.refuse(how not in ("none", "add"), f"ScatterND with the reduction {how}")
    return t.torch.index_put(x, index.unbind(-1), updates, accumulate=how == "add")


def _from_zero(t: TorchNode, index: TorchTensor, size: int) -> TorchTensor:
    """Indices as int64, with negative indices (from the end) converted to indices from 0."""
    index = index.to(t.torch.int64)
    return t.torch.where(index < 0, index + size, index)


def one_hot(t: TorchNode, index: TorchTensor, depth: Numbers, values: TorchTensor) -> TorchTensor:
    """OneHot; *depth*: the number of categories, in a tuple; *values*: [off, on]."""
    axis, size = t.get("axis", -1), int(depth[0])
    positions = t.torch.arange(size, device=index.device)
    index = index.to(t.torch.int64).unsqueeze(-1)
    hot = (t.torch.where(index < 0, index + size, index) == positions).movedim(-1, axis)
    return t.torch.where(hot, values[1], values[0])


def triangle(t: TorchNode, x: TorchTensor, diagonal: Numbers | None = None) -> TorchTensor:
    return (t.torch.triu if t.get("upper", 1) else t.torch.tril)(x, diagonal=diagonal[0] if diagonal else 0)


def depth_to_space(t: TorchNode, x: TorchTensor) -> TorchTensor:
    """Move blocks of channels to squares of pixels; ``space_to_depth`` is the inverse."""
    rows, channels, height, width = x.shape
    size = t.get("blocksize")
    if t.get("mode", "DCR") == "CRD":  # order of axes in a channel: depth, column, row; or column, row, depth
        return t.nn.pixel_shuffle(x, size)
    x = x.reshape(rows, size, size, channels // size**2, height, width).permute(0, 3, 4, 1, 5, 2)
    return x.reshape(rows, channels // size**2, height * size, width * size)


def space_to_depth(t: TorchNode, x: TorchTensor) -> TorchTensor:
    rows, channels, height, width = x.shape
    size = t.get("blocksize")
    if t.get("mode", "DCR") == "CRD":
        return t.nn.pixel_unshuffle(x, size)
    x = x.reshape(rows, channels, height // size, size, width // size, size).permute(0, 3, 5, 1, 2, 4)
    return x.reshape(rows, channels * size**2, height // size, width // size)


def reverse_sequence(t: TorchNode, x: TorchTensor, lengths: TorchTensor) -> TorchTensor:
    """Reverse the first ``lengths[i]`` steps of each sequence; later steps stay."""
    batch, time = t.get("batch_axis", 1), t.get("time_axis", 0)
    rank: Sequence[int] = range(x.dim())
    steps = t.torch.arange(x.shape[time], device=x.device).reshape([-1 if axis == time else 1 for axis in rank])
    ends = lengths.to(t.torch.int64).reshape([-1 if axis == batch else 1 for axis in rank])
    return t.torch.gather(x, time, t.torch.where(steps < ends, ends - 1 - steps, steps).expand(x.shape))

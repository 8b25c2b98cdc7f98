"""The steps of a graph in torch: ``OPERATORS`` by ONNX name, each a function of its attributes and its inputs.

Inputs that only say how (shapes, sizes, bounds; ``STATIC``) come as tuples of numbers, the others as tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from weft.base.errors import StitchError

try:
    import torch
    from torch.nn import functional
except ImportError as error:
    raise StitchError("running a stitched graph in torch needs torch: pip install 'weft[torch]'") from error

__all__ = ["OPERATORS", "STATIC", "Tensor", "torch"]

Tensor: TypeAlias = Any
"""torch.Tensor, whose types are not followed."""
Attributes = Mapping[str, Any]
Numbers = tuple[Any, ...]

STATIC: Mapping[str, tuple[int, ...]] = {
    "Clip": (1, 2), "Expand": (1,), "Pad": (1, 2, 3), "ReduceMax": (1,), "ReduceMean": (1,), "ReduceSum": (1,),
    "Reshape": (1,), "Slice": (1, 2, 3, 4), "Split": (1,), "Squeeze": (1,), "Unsqueeze": (1,),
}  # fmt: skip
"""Which inputs of an operator are numbers, not tensors."""


def conv(settings: Attributes, x: Tensor, weight: Tensor, bias: Tensor = None) -> Tensor:
    x, padding = _padded(x, settings, 0.0)
    strides, dilations = settings.get("strides", [1, 1]), settings.get("dilations", [1, 1])
    return functional.conv2d(x, weight, bias, strides, padding, dilations, settings.get("group", 1))


def gemm(settings: Attributes, a: Tensor, b: Tensor, c: Tensor = None) -> Tensor:
    a = a.t() if settings.get("transA") else a
    if settings.get("alpha", 1.0) == 1.0 and settings.get("beta", 1.0) == 1.0:
        return functional.linear(a, b if settings.get("transB") else b.t(), c)
    product = settings.get("alpha", 1.0) * (a @ (b.t() if settings.get("transB") else b))
    return product if c is None else product + settings.get("beta", 1.0) * c


def max_pool(settings: Attributes, x: Tensor) -> Tensor:
    kernel = settings["kernel_shape"]
    x, padding = _padded(x, settings, float("-inf"), most=[size // 2 for size in kernel])
    strides, dilations = settings.get("strides", [1, 1]), settings.get("dilations", [1, 1])
    return functional.max_pool2d(x, kernel, strides, padding, dilations, bool(settings.get("ceil_mode", 0)))


def average_pool(settings: Attributes, x: Tensor) -> Tensor:
    kernel, strides = settings["kernel_shape"], settings.get("strides", [1, 1])
    if any(size != 1 for size in settings.get("dilations", ())) or settings.get("ceil_mode", 0):
        raise StitchError("an average pool with dilations or rounding up has no counterpart in torch; run it as ONNX")
    counted = bool(settings.get("count_include_pad", 0))
    padded, padding = _padded(x, settings, 0.0, most=[size // 2 for size in kernel])
    if padded is x or counted:
        return functional.avg_pool2d(padded, kernel, strides, padding, False, counted)
    ones, _ = _padded(torch.ones_like(x[:1, :1]), settings, 0.0, most=[size // 2 for size in kernel])
    shares = functional.avg_pool2d(ones, kernel, strides)
    return functional.avg_pool2d(padded, kernel, strides) / shares


def _padded(
    x: Tensor, settings: Attributes, fill: float, most: Sequence[int] | None = None
) -> tuple[Tensor, list[int]]:
    """*x* with pads that torch's own padding cannot say, and the padding that is left to say."""
    top, left, bottom, right = settings.get("pads", [0, 0, 0, 0])
    allowed = most is None or (top <= most[0] and left <= most[1])
    if (top, left) == (bottom, right) and allowed:
        return x, [top, left]
    return functional.pad(x, (left, right, top, bottom), value=fill), [0, 0]


def concat(settings: Attributes, *parts: Any) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(number for part in parts for number in part)
    return torch.cat(parts, dim=settings["axis"])


def split(settings: Attributes, x: Tensor, sizes: Numbers | None = None) -> tuple[Tensor, ...]:
    axis = settings.get("axis", 0)
    if sizes is None:
        return tuple(torch.tensor_split(x, settings["num_outputs"], dim=axis))
    return tuple(torch.split(x, list(sizes), dim=axis))


def slice_(
    _: Attributes, x: Tensor, starts: Numbers, ends: Numbers, axes: Numbers | None = None, *steps: Numbers
) -> Tensor:
    index = [slice(None)] * x.dim()
    by = steps[0] if steps else (1,) * len(starts)
    for start, end, axis, step in zip(starts, ends, axes or range(len(starts)), by, strict=True):
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


def gather(settings: Attributes, x: Tensor, index: Tensor) -> Tensor:
    axis = settings.get("axis", 0) % x.dim()
    if index.dim() == 1:
        return torch.index_select(x, axis, index)
    taken = torch.index_select(x, axis, index.reshape(-1))
    return taken.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def reshape(_: Attributes, x: Tensor, shape: Numbers) -> Tensor:
    return x.reshape([x.shape[place] if size == 0 else size for place, size in enumerate(shape)])


def flatten(settings: Attributes, x: Tensor) -> Tensor:
    axis = settings.get("axis", 1)
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def shape_of(settings: Attributes, x: Tensor) -> Numbers:
    return tuple(x.shape[settings.get("start", 0) : settings.get("end", x.dim())])


def pad(_: Attributes, x: Tensor, pads: Numbers, fill: Numbers | None = None, axes: Numbers | None = None) -> Tensor:
    named = range(x.dim()) if axes is None else axes
    amounts = [[0, 0] for _ in range(x.dim())]
    for axis, before, after in zip(named, pads[: len(pads) // 2], pads[len(pads) // 2 :], strict=True):
        amounts[axis] = [before, after]
    flat = [amount for both in reversed(amounts) for amount in both]
    return functional.pad(x, flat, value=float(fill[0]) if fill else 0.0)


def clip(_: Attributes, x: Tensor, low: Numbers | None = None, high: Numbers | None = None) -> Tensor:
    return torch.clamp(x, None if low is None else low[0], None if high is None else high[0])


def expand(_: Attributes, x: Tensor, shape: Numbers) -> Tensor:
    return x.expand(shape) if x.dim() <= len(shape) else x


def reduced(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduce(settings: Attributes, x: Tensor, axes: Numbers | None = None) -> Tensor:
        return function(x, dim=list(axes or range(x.dim())), keepdim=bool(settings.get("keepdims", 1)))

    return reduce


def plain(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operator without attributes."""
    return lambda _, *tensors: function(*tensors)


def hard_sigmoid(settings: Attributes, x: Tensor) -> Tensor:
    return torch.clamp(x * settings.get("alpha", 0.2) + settings.get("beta", 0.5), 0.0, 1.0)


def stack_rows(settings: Attributes, *parts: Tensor) -> Tensor:
    """The rows of *parts* with so many columns, zeros in those they do not have, and columns next to each other.

    dtype: what they become; None: they stay.
    """
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    rows, channels, height, width = joined.shape
    lying = joined.new_empty((rows, height, width, settings["columns"]), dtype=settings.get("dtype"))
    lying[..., :channels] = joined.permute(0, 2, 3, 1)
    lying[..., channels:] = 0
    return lying.permute(0, 3, 1, 2)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "Abs": plain(torch.abs),
    "Add": plain(torch.add),
    "AveragePool": average_pool,
    "Clip": clip,
    "Concat": concat,
    "Conv": conv,
    "Div": plain(torch.div),
    "Elu": lambda settings, x: functional.elu(x, settings.get("alpha", 1.0)),
    "Erf": plain(torch.erf),
    "Exp": plain(torch.exp),
    "Expand": expand,
    "Flatten": flatten,
    "Gather": gather,
    "Gelu": lambda settings, x: functional.gelu(x, approximate=settings.get("approximate", "none")),
    "Gemm": gemm,
    "GlobalAveragePool": lambda _, x: x.mean(dim=(2, 3), keepdim=True),
    "GlobalMaxPool": lambda _, x: x.amax(dim=(2, 3), keepdim=True),
    "HardSigmoid": hard_sigmoid,
    "HardSwish": plain(functional.hardswish),
    "Identity": lambda _, x: x,
    "LeakyRelu": lambda settings, x: functional.leaky_relu(x, settings.get("alpha", 0.01)),
    "MatMul": plain(torch.matmul),
    "MaxPool": max_pool,
    "Mul": plain(torch.mul),
    "Neg": plain(torch.neg),
    "Pad": pad,
    "Pow": plain(torch.pow),
    "ReduceMax": reduced(torch.amax),
    "ReduceMean": reduced(torch.mean),
    "ReduceSum": reduced(torch.sum),
    "Relu": plain(torch.relu),
    "Reshape": reshape,
    "Shape": shape_of,
    "Sigmoid": plain(torch.sigmoid),
    "Slice": slice_,
    "Softmax": lambda settings, x: torch.softmax(x, dim=settings.get("axis", -1)),
    "Softplus": plain(functional.softplus),
    "Split": split,
    "Sqrt": plain(torch.sqrt),
    "Squeeze": lambda _, x, axes: x.squeeze(tuple(axes)),
    "StackRows": stack_rows,
    "Sub": plain(torch.sub),
    "Tanh": plain(torch.tanh),
    "Transpose": lambda settings, x: x.permute(settings["perm"]),
    "Unsqueeze": lambda _, x, axes: unsqueeze(x, axes),
    "Where": plain(torch.where),
}
"""To add an operator, write it and add one line here."""


def unsqueeze(x: Tensor, axes: Numbers) -> Tensor:
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x

"""Translate ONNX nodes to operations of a ``NetDraft``: ``read_node``, with a handler for each form in ``FORMS``.

A form is how the stitcher understands an operator: the facet ``stitching`` of its entry in ``weft.models.operators``. A
*picture* is a tensor of the model as the draft knows it, without rows; its shape is ``Picture.view``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weft.base.errors import ModelError
from weft.models.element_types import ElementType
from weft.models.operators import StitchForm, find
from weft_stitch.net import Array, Value, Window, finite
from weft_stitch.reading.draft import Foreign, NetDraft, Pads, Picture, same_pads
from weft_stitch.reading.onnx_source import FLOATS, SourceNode, float32


@dataclass(frozen=True, eq=False)
class Operands:
    """One node with its inputs, and the draft to write it to; handlers call it *o*."""

    node: SourceNode
    draft: NetDraft
    pictures: Mapping[str, Picture]
    """Tensors that depend on the model's inputs, by name."""
    constants: Mapping[str, Array]
    """Arrays of constants by name."""
    rows: int
    """The number of rows for which the model is read."""
    opset: int
    half_precision: bool
    """Whether the file is in half precision."""

    @property
    def name(self) -> str:
        return self.node.name

    def has_input(self, index: int) -> bool:
        """Whether the node has the input *index*."""
        return index < len(self.node.inputs) and bool(self.node.inputs[index])

    def picture(self, index: int = 0) -> Picture:
        """The input *index*, which must not be a constant."""
        self._require(index)
        picture = self.pictures.get(self.node.inputs[index])
        if picture is None:
            raise Foreign(f"its input {self.node.inputs[index]} is a constant")
        return picture

    def is_constant(self, index: int) -> bool:
        """Whether the input *index* is a constant; ``ModelError`` if the node does not have it."""
        self._require(index)
        return self.node.inputs[index] in self.constants

    def array(self, index: int) -> Array:
        """The constant input *index* as it is stored; ``Foreign`` if it is computed."""
        if not self.is_constant(index):
            raise Foreign(f"its input {self.node.inputs[index]} is computed from the model's inputs")
        return self.constants[self.node.inputs[index]]

    def integers(self, index: int) -> tuple[int, ...]:
        """The numbers of the constant input *index*."""
        array = self.array(index)
        if array.dtype.kind not in "iu":
            raise ModelError(f"{self.node.inputs[index]} should hold integers and holds {array.dtype}")
        return tuple(int(number) for number in array.reshape(-1))

    def weight(self, index: int) -> Array:
        """The constant input *index* as float32; ``ModelError`` if a number is not finite."""
        tensor = self.node.inputs[index] if self.has_input(index) else ""
        array = float32(self.array(index), tensor)
        if not finite(array):
            raise ModelError(f"its tensor {tensor} holds numbers that are not finite in float32")
        return array

    def operand(self, index: int) -> Picture | Array:
        """The input *index*: a picture, or a constant as ``weight`` reads it."""
        return self.weight(index) if self.is_constant(index) else self.picture(index)

    def optional_weight(self, index: int) -> Array | None:
        """The constant input *index*; None if the node does not have it."""
        return self.weight(index) if self.has_input(index) else None

    def _require(self, index: int) -> None:
        """Raise ``ModelError`` unless the node has the input *index*."""
        if not self.has_input(index):
            raise ModelError(f"its input {index + 1} is missing")


Handler = Callable[[Operands], Picture]
"""Reads a node: adds its operations to the draft and returns the picture of its output."""


def _concat(o: Operands) -> Picture:
    """A concatenation along the channels (axis 1)."""
    pictures = [o.picture(index) for index in range(len(o.node.inputs))]
    if not pictures:
        raise ModelError("it joins nothing")
    if _axis(o, o.node.integer("axis", 1), pictures[0]) != 1:
        raise Foreign("it does not join along the channels (axis 1)")
    return o.draft.concat(o.name, pictures)


def _reduce(o: Operands, pool: Callable[..., Picture]) -> Picture:
    """A mean or a maximum over all positions; *pool*: the method of the draft that adds it."""
    x = o.picture()
    axes = o.integers(1) if o.has_input(1) else o.node.integers("axes", ())
    if sorted({_axis(o, axis, x) for axis in axes}) != list(range(2, len(x.view) + 1)):
        raise Foreign(f"it reduces the dimensions {list(axes)}; all but rows and channels are understood")
    return pool(o.name, x, keep=bool(o.node.integer("keepdims", 1)))


def _axis(o: Operands, axis: int, x: Picture) -> int:
    """*axis* counted from the front, with the rows; ``ModelError`` if *x* has no such dimension."""
    rank = len(x.view) + 1
    if not -rank <= axis < rank:
        raise ModelError(f"it has no dimension {axis}")
    return axis % rank


def _flatten(o: Operands) -> Picture:
    """A flatten of each row (axis 1)."""
    x = o.picture()
    if _axis(o, o.node.integer("axis", 1), x) != 1:
        raise Foreign("it does not flatten each row (axis 1)")
    return o.draft.reshape(x, (math.prod(x.view),))


def _reshape(o: Operands) -> Picture:
    """A reshape to a constant target that keeps the rows; 0 and -1 in it are resolved."""
    x = o.picture()
    shape = (o.rows, *x.view)
    target = list(o.integers(1) if o.has_input(1) else o.node.integers("shape", ()))  # an attribute in old files
    if not o.node.integer("allowzero", 0):
        target = [shape[axis] if size == 0 and axis < len(shape) else size for axis, size in enumerate(target)]
    if target.count(-1) > 1 or any(size < -1 or size == 0 for size in target):
        raise ModelError(f"it asks for the shape {target}")
    if -1 in target:
        known_size = math.prod(size for size in target if size != -1)
        target[target.index(-1)] = math.prod(shape) // known_size
    return _with_rows(o, x, target)


def _with_rows(o: Operands, x: Picture, shape: Sequence[int]) -> Picture:
    """Reshape *x* to *shape*; ``Foreign`` unless its first dimension stays the rows."""
    if len(shape) < 2 or shape[0] != o.rows:
        raise Foreign(f"it reshapes {o.rows} rows of {list(x.view)} to {list(shape)}, which are not rows")
    return o.draft.reshape(x, shape[1:])


def _squeeze(o: Operands) -> Picture:
    """The removal of dimensions of size 1, by default of all."""
    x = o.picture()
    full_shape = (o.rows, *x.view)
    if o.has_input(1) or o.node.has("axes"):
        axes = o.integers(1) if o.has_input(1) else o.node.integers("axes", ())
    else:
        axes = tuple(position for position, size in enumerate(full_shape) if size == 1)
    removed = {_axis(o, axis, x) for axis in axes}
    if any(full_shape[position] != 1 for position in removed):
        raise ModelError(f"it squeezes dimensions {sorted(removed)} of {list(full_shape)}")
    return _with_rows(o, x, [size for position, size in enumerate(full_shape) if position not in removed])


def _unsqueeze(o: Operands) -> Picture:
    """The insertion of dimensions of size 1."""
    x = o.picture()
    axes = o.integers(1) if o.has_input(1) else o.node.integers("axes", ())
    rank = len(x.view) + 1 + len(axes)
    # no exporter inserts more than a few; a damaged file may ask for millions
    if len(axes) > 8 or any(not -rank <= axis < rank for axis in axes):
        raise ModelError(f"it has no dimensions {list(axes)[:8]}")
    inserted = {axis % rank for axis in axes}
    remaining_sizes = iter((o.rows, *x.view))
    return _with_rows(o, x, [1 if position in inserted else next(remaining_sizes, 1) for position in range(rank)])


def _transpose(o: Operands) -> Picture:
    """A transposition, understood only if it moves nothing but dimensions of size 1: then it is a reshape."""
    x = o.picture()
    full_shape = (o.rows, *x.view)
    order = o.node.integers("perm", tuple(reversed(range(len(full_shape)))))
    if sorted(order) != list(range(len(full_shape))):
        raise ModelError(f"its order {list(order)} is not one of {len(full_shape)} dimensions")
    moved = [axis for axis in order[1:] if full_shape[axis] != 1]
    if order[0] != 0 or moved != sorted(moved):
        raise Foreign("it moves dimensions")
    return o.draft.reshape(x, [full_shape[axis] for axis in order[1:]])


def _identity(o: Operands) -> Picture:
    return o.picture()


def _dropout(o: Operands) -> Picture:
    """A dropout at inference, which changes nothing."""
    if any(o.node.outputs[1:]):
        raise Foreign("its mask is an output that is read")
    if o.has_input(2) and o.array(2).any():
        raise Foreign("it is in training mode; export the model for inference")
    return o.picture()


def _cast(o: Operands) -> Picture:
    """A cast between float types; nets compute in float32 anyway."""
    target_type = o.node.integer("to", 0)
    if target_type not in FLOATS:
        raise Foreign("its result is not of a float type")
    if target_type in (ElementType.FLOAT16, ElementType.BFLOAT16) and not o.half_precision:
        raise Foreign("it rounds to half precision in a model that is not")
    return o.picture()


def _pad(o: Operands) -> Picture:
    """A padding with zeros along height and width."""
    x = o.picture()
    rank = len(x.view) + 1
    pads = o.integers(1) if o.has_input(1) else o.node.integers("pads", o.node.integers("paddings", ()))
    is_nonzero = o.array(2).reshape(-1)[:1].any() if o.has_input(2) else o.node.number("value", 0.0) != 0
    if o.node.text("mode", "constant") != "constant" or is_nonzero or o.has_input(3):  # input 3: axes
        raise Foreign("it pads with something else than zeros, or along chosen axes")
    if len(pads) != 2 * rank:
        raise ModelError(f"it has {len(pads)} pads for {rank} dimensions")
    # *pads*: first the beginnings of all dimensions, then their ends
    if rank != 4 or any(pads[index] for index in (0, 1, 4, 5)):
        raise Foreign("it pads rows or channels")
    return o.draft.pad(x, (pads[2], pads[3], pads[6], pads[7]))


SHAPE_FORMS: Mapping[str, Handler] = {
    "concat": _concat,
    "mean": lambda o: _reduce(o, o.draft.global_pool),
    "largest": lambda o: _reduce(o, o.draft.global_max),
    "flatten": _flatten,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "transpose": _transpose,
    "same": _identity,
    "dropout": _dropout,
    "cast": _cast,
    "pad": _pad,
}
"""Form -> handler, for operators that change shapes."""


FormHandler = Callable[[Operands, StitchForm], Picture]
"""Reads a node of an operator whose form has settings."""


def _conv(o: Operands) -> Picture:
    """A 2d convolution with its bias."""
    x, weight = o.picture(), o.weight(1)
    if weight.ndim != 4:
        raise Foreign(f"it is a {weight.ndim - 2}d convolution; those over pictures (2d) are understood")
    kernel = (weight.shape[2], weight.shape[3])
    window = _window(o, kernel, o.draft.size(x))
    bias = o.optional_weight(2)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ModelError(f"it has {bias.size} biases for {weight.shape[0]} channels")
    return o.draft.convolve(o.name, x, weight, bias, window, o.node.integer("group", 1))


def _batch_norm(o: Operands) -> Picture:
    """A batch normalisation with stored statistics."""
    # before opset 7, training was the default
    if o.node.integer("training_mode", 0) or (o.opset < 7 and not o.node.integer("is_test", 0)):
        raise Foreign("it is in training mode; export the model for inference")
    scale, bias, mean, variance = (o.weight(index) for index in (1, 2, 3, 4))
    return o.draft.batch_norm(o.name, o.picture(), scale, bias, mean, variance, o.node.number("epsilon", 1e-5))


def _gemm(o: Operands) -> Picture:
    """A fully connected layer: rows times a constant matrix, with scaling factors and a bias."""
    if o.node.integer("transA", 0):
        raise Foreign("it transposes its rows (transA)")
    matrix = o.weight(1)
    if matrix.ndim != 2:
        raise ModelError(f"its weight has {matrix.ndim} dimensions, not 2")
    weight = matrix if o.node.integer("transB", 0) else matrix.T
    bias = o.optional_weight(2)
    weight = _multiply_by(weight, o.node.number("alpha", 1.0))
    if bias is not None:
        bias = _bias_per_output(_multiply_by(bias, o.node.number("beta", 1.0)), weight.shape[0])
    return o.draft.linear(o.name, o.picture(), weight, bias)


def _matmul(o: Operands) -> Picture:
    """A fully connected layer without bias."""
    matrix = o.weight(1)
    if matrix.ndim != 2:
        raise Foreign(f"its second factor has {matrix.ndim} dimensions; two are understood")
    return o.draft.linear(o.name, o.picture(), matrix.T, None)


def _multiply_by(array: Array, factor: float) -> Array:
    """*array* times *factor*; ``ModelError`` if the factor is not finite."""
    if not math.isfinite(factor):
        raise ModelError(f"its factor is {factor}")
    return array if factor == 1 else array * np.float32(factor)


def _bias_per_output(bias: Array, outs: int) -> Array:
    """*bias* as an array [outs]; ``Foreign`` if it is neither one number nor one per output."""
    if bias.size != 1 and (bias.size != outs or bias.shape[-1] != outs):
        raise Foreign(f"its term of {bias.shape} is not one number per output")
    return np.broadcast_to(bias.reshape(-1), (outs,)).copy()


def _div(o: Operands) -> Picture:
    """A division by a constant per channel."""
    divisor = o.draft.per_channel(o.picture(0), o.weight(1))
    if not divisor.all():
        raise ModelError(f"it divides by zero ({o.node.inputs[1]})")
    factor = (1 / divisor.astype(np.float64)).astype(np.float32)
    return o.draft.affine(o.name, o.picture(0), factor, None)


def _pow(o: Operands) -> Picture:
    """A power with exponent 1 or 2."""
    exponent = o.weight(1)
    if exponent.size != 1 or float(exponent.reshape(())) not in (1.0, 2.0):
        raise Foreign("its exponent is not 2")
    x = o.picture()
    return x if float(exponent.reshape(())) == 1 else o.draft.combine(o.name, "mul", x, x)


def _sum(o: Operands) -> Picture:
    """The sum of any number of values."""
    total = o.picture(0)
    for index in range(1, len(o.node.inputs)):
        total = o.draft.combine(o.name, "add", total, o.picture(index))
    return total


def _unary(o: Operands, form: StitchForm) -> Picture:
    """An elementwise function whose attributes are numbers; *form* has the function and the attributes' defaults."""
    settings = {name: o.node.number(name, default) for name, default in form.settings.items()}
    if not all(map(math.isfinite, settings.values())):
        raise ModelError(f"its settings are {settings}")
    return o.draft.unary(o.name, o.picture(), form.function, **settings)


def _gelu(o: Operands) -> Picture:
    tanh = o.node.text("approximate", "none") == "tanh"
    return o.draft.unary(o.name, o.picture(), "Gelu", tanh=float(tanh))


def _swish(o: Operands) -> Picture:
    if o.node.number("alpha", 1.0) != 1:
        raise Foreign("its alpha is not 1")
    return o.draft.unary(o.name, o.picture(), "Silu")


def _prelu(o: Operands) -> Picture:
    return o.draft.prelu(o.name, o.picture(), o.draft.per_channel(o.picture(), o.weight(1)))


_LARGEST = float(np.finfo(np.float32).max)
"""Default bound of ``Clip`` before opset 11, with either sign."""


def _clip(o: Operands) -> Picture:
    """A clip; its bounds are attributes before opset 11, and constant inputs since."""
    if o.opset < 11:
        bounds = {"min": o.node.number("min", -_LARGEST), "max": o.node.number("max", _LARGEST)}
    else:
        bound_inputs = (("min", 1), ("max", 2))
        bounds = {name: _bound(o, index) for name, index in bound_inputs if o.has_input(index)}
    return _clip_between(o, bounds)


def _bound_side(o: Operands, side: str) -> Picture:
    """Min or Max of a value and a constant: a clip with one bound, *side* ("max" for Min, "min" for Max)."""
    if len(o.node.inputs) != 2:
        raise Foreign(f"it compares {len(o.node.inputs)} values; a value and a number are understood")
    return _clip_between(o, {side: _bound(o, 1)})


def _bound(o: Operands, index: int) -> float:
    """The constant bound at input *index*; ``Foreign`` unless it is one number."""
    array = float32(o.array(index), o.node.inputs[index])
    if array.size != 1 or np.isnan(array).any():
        raise Foreign("its bound is not one number")
    return float(array.reshape(()))


def _clip_between(o: Operands, bounds: dict[str, float]) -> Picture:
    """Clip between *bounds* ("min", "max"), without those at the limits of float32; only a lower bound of 0: a Relu."""
    finite_bounds = {name: bound for name, bound in bounds.items() if abs(bound) < _LARGEST}
    if finite_bounds == {"min": 0.0}:
        return o.draft.unary(o.name, o.picture(), "Relu")
    return o.draft.unary(o.name, o.picture(), "Clip", **finite_bounds) if finite_bounds else o.picture()


def _pool(o: Operands, form: StitchForm) -> Picture:
    """A maximum or average pool, as ``form.function`` says."""
    if any(o.node.outputs[1:]):
        raise Foreign("its indices of the largest numbers are an output that is read")
    x = o.picture()
    kernel = o.node.integers("kernel_shape", ())
    if len(kernel) != 2:
        raise Foreign(f"its window has {len(kernel)} dimensions; 2 are understood")
    window = _window(o, o.node.pair("kernel_shape", 1), o.draft.size(x))
    if any(pad >= size for pad, size in zip(window.pads, window.kernel * 2, strict=True)):  # both sides of both axes
        raise ModelError(f"its padding {list(window.pads)} is not smaller than its window {list(window.kernel)}")
    counted, ceil = bool(o.node.integer("count_include_pad", 0)), bool(o.node.integer("ceil_mode", 0))
    return o.draft.pool(o.name, x, form.function, window, ceil=ceil, count_pads=counted)


def _window(o: Operands, kernel: tuple[int, int], size: Value) -> Window:
    """The window of a convolution or a pool over an input of *size*, from the node's attributes."""
    strides, dilations = o.node.pair("strides", 1), o.node.pair("dilations", 1)
    pads = o.node.integers("pads", (0, 0, 0, 0))
    if len(pads) != 4 or min(pads) < 0:
        raise ModelError(f"its pads are {list(pads)}, not four numbers from 0 on")
    sides: Pads = (pads[0], pads[1], pads[2], pads[3])
    auto_pad = o.node.text("auto_pad", "NOTSET")
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        sides = same_pads(kernel, strides, dilations, size, upper=auto_pad == "SAME_UPPER")
    elif auto_pad == "VALID":
        sides = (0, 0, 0, 0)
    elif auto_pad not in ("NOTSET", ""):
        raise ModelError(f"its auto_pad is {auto_pad!r}")
    return Window(kernel, strides, sides, dilations)


def _ignoring_form(handler: Handler) -> FormHandler:
    """Wrap a handler that needs no settings of its form."""
    return lambda o, form: handler(o)


FORMS: Mapping[str, FormHandler] = {
    "unary": _unary,
    "pool": _pool,
    **{
        name: _ignoring_form(handler)
        for name, handler in {
            **SHAPE_FORMS,
            "convolution": _conv,
            "batch_norm": _batch_norm,
            "gemm": _gemm,
            "matmul": _matmul,
            "add": lambda o: o.draft.add_scaled(o.name, o.operand(0), o.operand(1)),
            "mul": lambda o: o.draft.multiply(o.name, o.operand(0), o.operand(1)),
            "sub": lambda o: o.draft.add_scaled(o.name, o.operand(0), o.operand(1), -1.0),
            "div": _div,
            "pow": _pow,
            "sum": _sum,
            "gelu": _gelu,
            "swish": _swish,
            "prelu": _prelu,
            "clip": _clip,
            "min": lambda o: _bound_side(o, "max"),
            "max": lambda o: _bound_side(o, "min"),
            "global_average": lambda o: o.draft.global_pool(o.name, o.picture(), keep=True),
            "global_max": lambda o: o.draft.global_max(o.name, o.picture(), keep=True),
        }.items()
    },
}
"""Form -> handler. The table of operators (``weft.models.operators``) says which operator has which form."""


def read_node(o: Operands) -> Picture:
    """Add the node to the draft and return the picture of its output; ``Foreign`` if no form fits it."""
    form = find(o.node.op).stitching
    if form is None:
        raise Foreign("it is not understood")
    return FORMS[form.form](o, form)

"""ONNX operators that arrange what there is: shapes, axes, zeros around pictures; ``SHAPE_HANDLERS``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from onnx import TensorProto

from weft.base.errors import ModelError
from weft_stitch.reading.draft import Foreign, Picture
from weft_stitch.reading.onnx_folding import is_float
from weft_stitch.reading.onnx_operands import Handler, Operands


def _concat(o: Operands) -> Picture:
    parts = [o.picture(index) for index in range(len(o.node.inputs))]
    if not parts:
        raise ModelError("it joins nothing")
    if _axis(o, o.node.integer("axis", 1), parts[0]) != 1:
        raise Foreign("it does not join along the channels (axis 1)")
    return o.draft.concat(o.name, parts)


def _reduce(o: Operands) -> Picture:
    """A mean or a maximum over all positions."""
    x = o.picture()
    axes = o.integers(1) if o.given(1) else o.node.integers("axes", ())
    if sorted({_axis(o, each, x) for each in axes}) != list(range(2, len(x.view) + 1)):
        raise Foreign(f"it reduces the dimensions {list(axes)}; all but rows and channels are understood")
    keep = bool(o.node.integer("keepdims", 1))
    how = o.draft.global_pool if o.node.op == "ReduceMean" else o.draft.global_max
    return how(o.name, x, keep=keep)


def _axis(o: Operands, axis: int, x: Picture) -> int:
    rank = len(x.view) + 1
    if not -rank <= axis < rank:
        raise ModelError(f"it has no dimension {axis}")
    return axis % rank


def _flatten(o: Operands) -> Picture:
    x = o.picture()
    if _axis(o, o.node.integer("axis", 1), x) != 1:
        raise Foreign("it does not flatten each row (axis 1)")
    return o.draft.reshape(x, (math.prod(x.view),))


def _reshape(o: Operands) -> Picture:
    x = o.picture()
    whole = (o.rows, *x.view)
    target = list(o.integers(1) if o.given(1) else o.node.integers("shape", ()))
    if not o.node.integer("allowzero", 0):
        target = [whole[place] if size == 0 and place < len(whole) else size for place, size in enumerate(target)]
    if target.count(-1) > 1 or any(size < -1 or size == 0 for size in target):
        raise ModelError(f"it asks for the shape {target}")
    if -1 in target:
        known = math.prod(size for size in target if size != -1)
        target[target.index(-1)] = math.prod(whole) // known
    return _with_rows(o, x, target)


def _with_rows(o: Operands, x: Picture, shape: Sequence[int]) -> Picture:
    if len(shape) < 2 or shape[0] != o.rows:
        raise Foreign(f"it reshapes {o.rows} rows of {list(x.view)} to {list(shape)}, which are not rows")
    return o.draft.reshape(x, shape[1:])


def _squeeze(o: Operands) -> Picture:
    x = o.picture()
    whole = (o.rows, *x.view)
    if o.given(1) or o.node.has("axes"):
        axes = o.integers(1) if o.given(1) else o.node.integers("axes", ())
    else:
        axes = tuple(place for place, size in enumerate(whole) if size == 1)
    gone = {_axis(o, each, x) for each in axes}
    if any(whole[place] != 1 for place in gone):
        raise ModelError(f"it squeezes dimensions {sorted(gone)} of {list(whole)}")
    return _with_rows(o, x, [size for place, size in enumerate(whole) if place not in gone])


def _unsqueeze(o: Operands) -> Picture:
    x = o.picture()
    axes = o.integers(1) if o.given(1) else o.node.integers("axes", ())
    rank = len(x.view) + 1 + len(axes)
    if len(axes) > 8 or any(not -rank <= each < rank for each in axes):
        raise ModelError(f"it has no dimensions {list(axes)[:8]}")
    new = {each % rank for each in axes}
    left = iter((o.rows, *x.view))
    return _with_rows(o, x, [1 if place in new else next(left, 1) for place in range(rank)])


def _transpose(o: Operands) -> Picture:
    """Understood only where it moves nothing but dimensions of one."""
    x = o.picture()
    whole = (o.rows, *x.view)
    order = o.node.integers("perm", tuple(reversed(range(len(whole)))))
    if sorted(order) != list(range(len(whole))):
        raise ModelError(f"its order {list(order)} is not one of {len(whole)} dimensions")
    moved = [place for place in order[1:] if whole[place] != 1]
    if order[0] != 0 or moved != sorted(moved):
        raise Foreign("it moves dimensions")
    return o.draft.reshape(x, [whole[place] for place in order[1:]])


def _same(o: Operands) -> Picture:
    return o.picture()


def _dropout(o: Operands) -> Picture:
    if any(o.node.outputs[1:]):
        raise Foreign("it also gives out its mask")
    if o.given(2) and o.array(2).any():
        raise Foreign("it is in training mode; export the model for inference")
    return o.picture()


def _cast(o: Operands) -> Picture:
    to = o.node.integer("to", 0)
    if not is_float(to):
        raise Foreign("it makes other numbers than floats")
    if to in (TensorProto.FLOAT16, TensorProto.BFLOAT16) and not o.coarse:
        raise Foreign("it rounds to half precision in a model that is not")
    return o.picture()


def _pad(o: Operands) -> Picture:
    x = o.picture()
    rank = len(x.view) + 1
    pads = o.integers(1) if o.given(1) else o.node.integers("pads", o.node.integers("paddings", ()))
    value = o.array(2).reshape(-1)[:1].any() if o.given(2) else o.node.number("value", 0.0) != 0
    if o.node.text("mode", "constant") != "constant" or value or o.given(3):
        raise Foreign("it pads with something else than zeros, or along chosen axes")
    if len(pads) != 2 * rank:
        raise ModelError(f"it has {len(pads)} pads for {rank} dimensions")
    if rank != 4 or any(pads[place] for place in (0, 1, 4, 5)):
        raise Foreign("it pads rows or channels")
    return o.draft.pad(x, (pads[2], pads[3], pads[6], pads[7]))


SHAPE_HANDLERS: Mapping[str, Handler] = {
    "Concat": _concat,
    "ReduceMean": _reduce,
    "ReduceMax": _reduce,
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Identity": _same,
    "Dropout": _dropout,
    "Cast": _cast,
    "Pad": _pad,
}

"""Rules for output shapes of ai.onnx.ml: one row per sample, columns as attributes list them."""

from __future__ import annotations

import math

from weft.models.onnx_import.attributes import Attributes
from weft.models.onnx_import.shape_rules import Inputs, Rule, Shape, shape_of


def targets(names: str) -> Rule:
    """One row per sample, one column per class or target: as many as an attribute lists."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        rows = (shape_of(inputs, 0) or ())[:1] if len(shape_of(inputs, 0) or ()) > 1 else (1,)
        columns = max((attributes.length(name) for name in names.split()), default=0)
        return (*rows, columns or max(1, attributes.integer("targets", attributes.integer("n_targets", 1))))

    return rule


def predictions(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape = shape_of(inputs, 0) or ()
    return shape[:1] if len(shape) > 1 else (1,)


def picked(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape, picked = shape_of(inputs, 0), inputs[1] if len(inputs) > 1 else None
    if not shape or picked is None:
        return None
    return (*(shape[:-1] if len(shape) > 1 else (1,)), picked.elements)


def categories(inputs: Inputs, attributes: Attributes) -> Shape | None:
    count = max(attributes.length("cats_int64s"), attributes.length("cats_strings"))
    return (*(shape_of(inputs, 0) or ()), count)


def vector(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shapes = [tensor.shape for tensor in inputs if tensor is not None]
    return (shapes[0][0] if len(shapes[0]) > 1 else 1, sum(math.prod(shape[1:]) or shape[0] for shape in shapes))

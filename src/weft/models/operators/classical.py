"""Classical machine learning (``ai.onnx.ml``): tensors of (samples, features), and weights in attributes."""

from __future__ import annotations

import math
from functools import partial

from weft.models.element_types import ElementType
from weft.models.onnx_graph import Attributes
from weft.models.onnx_import.drafts import ImportedNode, LayerDraft, draft
from weft.models.onnx_import.tensors import Stored, Tensor, dtype_bits
from weft.models.operators.operator import CLASSICAL, Operator
from weft.models.operators.rules import costs, rows
from weft.models.operators.rules.product_costs import need, sized_gemm
from weft.models.operators.rules.shapes import Inputs, Shape, ShapeRule, like, shape_of

_FLOAT = ElementType.FLOAT


def _linear_cost(node: ImportedNode) -> list[LayerDraft]:
    """Cost of LinearClassifier and LinearRegressor, whose weights are an attribute."""
    return _product_cost(node, node.attributes.length("coefficients"))


def _support_vector_cost(node: ImportedNode) -> list[LayerDraft]:
    """Cost of a support vector machine: each sample times each support vector; without vectors, a linear model."""
    vectors = node.attributes.length("support_vectors")
    return _product_cost(node, vectors or node.attributes.length("coefficients"))


def _tree_cost(node: ImportedNode) -> list[LayerDraft]:
    """Cost of a tree ensemble: activation traffic, and a stored threshold per tree node."""
    nodes = max(node.attributes.length(name) for name in ("nodes_values", "nodes_treeids"))
    return [draft(node, "elementwise", trained=(_attribute_weight((nodes,)),))]


def _product_cost(node: ImportedNode, values: int) -> list[LayerDraft]:
    """Cost of a product of the samples' features with a weight of *values* values; no layer if it is empty."""
    data = need(node, 0)
    features = data.shape[-1] if data.shape else 1
    gemm = sized_gemm(data.elements // max(1, features), features, values // max(1, features))
    if gemm is None:
        return []
    weight = _attribute_weight((gemm.k, gemm.n))
    return [draft(node, "gemm", gemm=gemm, weight=weight, trained=(weight,))]


def _attribute_weight(shape: tuple[int, ...]) -> Tensor:
    """A weight of float values that is stored in an attribute of a node."""
    return Tensor(shape, _FLOAT, dtype_bits(_FLOAT), constant=True, stored=(Stored(math.prod(shape), _FLOAT),))


def _target_columns(names: str) -> ShapeRule:
    """A shape rule: a row per sample, a column per entry of the longest of the list attributes *names*.

    names: separated by spaces. If all are empty, the attribute ``targets`` or ``n_targets`` has the number of columns.
    """

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        rows = (shape_of(inputs, 0) or ())[:1] if len(shape_of(inputs, 0) or ()) > 1 else (1,)
        columns = max((attributes.length(name) for name in names.split()), default=0)
        return (*rows, columns or max(1, attributes.integer("targets", attributes.integer("n_targets", 1))))

    return rule


def _label_shape(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of one label per sample; a vector is a single sample."""
    shape = shape_of(inputs, 0) or ()
    return shape[:1] if len(shape) > 1 else (1,)


def _picked_shape(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of the columns of the first input that the indices in the second select."""
    shape, indices = shape_of(inputs, 0), inputs[1] if len(inputs) > 1 else None
    if not shape or indices is None:
        return None
    return (*(shape[:-1] if len(shape) > 1 else (1,)), indices.elements)


def _one_hot_shape(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of the first input with an additional last axis of the categories."""
    count = max(attributes.length("cats_int64s"), attributes.length("cats_strings"))
    return (*(shape_of(inputs, 0) or ()), count)


def _joined_features_shape(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of all inputs' features side by side, a row per sample; a vector is a single sample."""
    shapes = [tensor.shape for tensor in inputs if tensor is not None]
    return (shapes[0][0] if len(shapes[0]) > 1 else 1, sum(math.prod(shape[1:]) or shape[0] for shape in shapes))


_CLASSES = "classlabels_ints classlabels_int64s classlabels_strings"
_elementwise = partial(Operator, cost=costs.elementwise, shapes=(like(0),))
_movement = partial(Operator, cost=costs.movement)

OPERATORS = (
    Operator(
        f"{CLASSICAL}LinearClassifier",
        cost=_linear_cost,
        shapes=(_label_shape, _target_columns(_CLASSES)),
        rows=rows.features,
    ),
    Operator(f"{CLASSICAL}LinearRegressor", cost=_linear_cost, shapes=(_target_columns(""),), rows=rows.features),
    Operator(f"{CLASSICAL}SVMClassifier", cost=_support_vector_cost, shapes=(_label_shape, _target_columns(_CLASSES))),
    Operator(f"{CLASSICAL}SVMRegressor", cost=_support_vector_cost, shapes=(_target_columns(""),)),
    Operator(f"{CLASSICAL}TreeEnsemble", cost=_tree_cost, shapes=(_target_columns(""),)),
    Operator(
        f"{CLASSICAL}TreeEnsembleClassifier",
        cost=_tree_cost,
        shapes=(_label_shape, _target_columns(_CLASSES)),
        rows=rows.features,
    ),
    Operator(f"{CLASSICAL}TreeEnsembleRegressor", cost=_tree_cost, shapes=(_target_columns(""),), rows=rows.features),
    _elementwise(f"{CLASSICAL}Binarizer"),
    _elementwise(f"{CLASSICAL}CategoryMapper"),
    _elementwise(f"{CLASSICAL}Imputer", rows=rows.features),
    _elementwise(f"{CLASSICAL}LabelEncoder", rows=rows.elementwise),
    _elementwise(f"{CLASSICAL}Scaler", rows=rows.features),
    _elementwise(f"{CLASSICAL}Normalizer", cost=costs.norm, rows=rows.features),
    Operator(f"{CLASSICAL}ArrayFeatureExtractor", cost=costs.selection, shapes=(_picked_shape,), rows=rows.features),
    _movement(f"{CLASSICAL}OneHotEncoder", shapes=(_one_hot_shape,), rows=rows.features),
    _movement(f"{CLASSICAL}FeatureVectorizer", shapes=(_joined_features_shape,)),
    _movement(f"{CLASSICAL}DictVectorizer"),
    Operator(f"{CLASSICAL}ZipMap", cost=costs.free, shapes=(like(0),)),
    Operator(f"{CLASSICAL}CastMap", cost=costs.free),
)

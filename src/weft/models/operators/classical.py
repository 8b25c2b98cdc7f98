"""Classical machine learning (``ai.onnx.ml``): one row per sample, columns as attributes list them."""

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


def _linear(node: ImportedNode) -> list[LayerDraft]:
    """ai.onnx.ml LinearClassifier and LinearRegressor: the weights are an attribute."""
    return _by_rows(node, node.attributes.length("coefficients"))


def _support_vectors(node: ImportedNode) -> list[LayerDraft]:
    """Every sample meets every support vector; without any, the coefficients are those of a linear model."""
    vectors = node.attributes.length("support_vectors")
    return _by_rows(node, vectors or node.attributes.length("coefficients"))


def _trees(node: ImportedNode) -> list[LayerDraft]:
    """Comparisons along a path: traffic, and a threshold stored per node."""
    nodes = max(node.attributes.length(name) for name in ("nodes_values", "nodes_treeids"))
    kept = _in_attributes((nodes,))
    return [draft(node, "elementwise", trained=(kept,))]


def _by_rows(node: ImportedNode, values: int) -> list[LayerDraft]:
    data = need(node, 0)
    features = data.shape[-1] if data.shape else 1
    gemm = sized_gemm(data.elements // max(1, features), features, values // max(1, features))
    if gemm is None:
        return []
    weight = _in_attributes((gemm.k, gemm.n))
    return [draft(node, "gemm", gemm=gemm, weight=weight, trained=(weight,))]


def _in_attributes(shape: tuple[int, ...]) -> Tensor:
    """Trained values in the attributes of a node."""
    return Tensor(shape, _FLOAT, dtype_bits(_FLOAT), constant=True, stored=(Stored(math.prod(shape), _FLOAT),))


def _targets(names: str) -> ShapeRule:
    """One row per sample, one column per class or target that an attribute lists."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        rows = (shape_of(inputs, 0) or ())[:1] if len(shape_of(inputs, 0) or ()) > 1 else (1,)
        columns = max((attributes.length(name) for name in names.split()), default=0)
        return (*rows, columns or max(1, attributes.integer("targets", attributes.integer("n_targets", 1))))

    return rule


def _predictions(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape = shape_of(inputs, 0) or ()
    return shape[:1] if len(shape) > 1 else (1,)


def _picked_shape(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape, chosen = shape_of(inputs, 0), inputs[1] if len(inputs) > 1 else None
    if not shape or chosen is None:
        return None
    return (*(shape[:-1] if len(shape) > 1 else (1,)), chosen.elements)


def _categories(inputs: Inputs, attributes: Attributes) -> Shape | None:
    count = max(attributes.length("cats_int64s"), attributes.length("cats_strings"))
    return (*(shape_of(inputs, 0) or ()), count)


def _vector(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shapes = [tensor.shape for tensor in inputs if tensor is not None]
    return (shapes[0][0] if len(shapes[0]) > 1 else 1, sum(math.prod(shape[1:]) or shape[0] for shape in shapes))


_CLASSES = "classlabels_ints classlabels_int64s classlabels_strings"
_elementwise = partial(Operator, cost=costs.elementwise, shapes=(like(0),))
_movement = partial(Operator, cost=costs.movement)

OPERATORS = (
    Operator(
        f"{CLASSICAL}LinearClassifier",
        cost=_linear,
        shapes=(_predictions, _targets(_CLASSES)),
        rows=rows.features,
    ),
    Operator(f"{CLASSICAL}LinearRegressor", cost=_linear, shapes=(_targets(""),), rows=rows.features),
    Operator(f"{CLASSICAL}SVMClassifier", cost=_support_vectors, shapes=(_predictions, _targets(_CLASSES))),
    Operator(f"{CLASSICAL}SVMRegressor", cost=_support_vectors, shapes=(_targets(""),)),
    Operator(f"{CLASSICAL}TreeEnsemble", cost=_trees, shapes=(_targets(""),)),
    Operator(
        f"{CLASSICAL}TreeEnsembleClassifier",
        cost=_trees,
        shapes=(_predictions, _targets(_CLASSES)),
        rows=rows.features,
    ),
    Operator(f"{CLASSICAL}TreeEnsembleRegressor", cost=_trees, shapes=(_targets(""),), rows=rows.features),
    _elementwise(f"{CLASSICAL}Binarizer"),
    _elementwise(f"{CLASSICAL}CategoryMapper"),
    _elementwise(f"{CLASSICAL}Imputer", rows=rows.features),
    _elementwise(f"{CLASSICAL}LabelEncoder", rows=rows.elementwise),
    _elementwise(f"{CLASSICAL}Scaler", rows=rows.features),
    _elementwise(f"{CLASSICAL}Normalizer", cost=costs.norm, rows=rows.features),
    Operator(f"{CLASSICAL}ArrayFeatureExtractor", cost=costs.selection, shapes=(_picked_shape,), rows=rows.features),
    _movement(f"{CLASSICAL}OneHotEncoder", shapes=(_categories,), rows=rows.features),
    _movement(f"{CLASSICAL}FeatureVectorizer", shapes=(_vector,)),
    _movement(f"{CLASSICAL}DictVectorizer"),
    Operator(f"{CLASSICAL}ZipMap", cost=costs.free, shapes=(like(0),)),
    Operator(f"{CLASSICAL}CastMap", cost=costs.free),
)

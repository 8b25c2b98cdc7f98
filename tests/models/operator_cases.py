"""Single nodes with their inputs and outputs: those of onnx's own tests, and nodes of ONNX Runtime's operators."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, NodeProto, helper, numpy_helper

from weft.models.onnx_graph import qualified
from weft.models.operators import Operator
from weft.models.operators.rules.meanings import DTYPES, TorchNode

Array = np.ndarray[Any, Any]


class NodeCase(NamedTuple):
    """A node of one operator, at a version of its operator set, with what it reads and what it should give out."""

    title: str
    node: NodeProto
    version: int
    inputs: Sequence[Array | None]
    outputs: Sequence[Array]


@cache
def standard_cases() -> tuple[NodeCase, ...]:
    """Onnx's own tests of single nodes whose inputs and outputs are all dense tensors; outputs by its reference."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its authors divide by zero on purpose
        from onnx.backend.test.case.node import collect_testcases

        return tuple(_standard(collect_testcases(None)))


def _standard(cases: Any) -> Iterator[NodeCase]:
    for case in cases:
        if case.model is None or len(case.model.graph.node) != 1:
            continue
        node, (given, expected) = case.model.graph.node[0], case.data_sets[0]
        if all(isinstance(value, np.ndarray | np.generic) for value in (*given, *expected)):
            fed = dict(zip((each.name for each in case.model.graph.input), map(np.asarray, given), strict=True))
            versions = {each.domain: each.version for each in case.model.opset_import}
            inputs = [fed[name] if name else None for name in node.input]
            yield NodeCase(case.name, node, versions[node.domain], inputs, [np.asarray(each) for each in expected])


def in_torch(torch: Any, operator: Operator, case: NodeCase) -> list[Array]:
    """The outputs of a case by its operator's meaning in torch, those that the node does not name left out."""
    assert operator.torch is not None
    attributes = {each.name: _plain(helper.get_attribute_value(each)) for each in case.node.attribute}
    context = TorchNode(torch, attributes, len(case.node.output), case.version)
    arguments = [
        None
        if value is None
        else tuple(value.reshape(-1).tolist())
        if place in operator.torch_numbers
        else torch.from_numpy(np.array(value))
        for place, value in enumerate(case.inputs)
    ]
    with torch.no_grad():
        result = operator.torch(context, *arguments)
    results = result if isinstance(result, tuple) and operator.name != "Shape" else (result,)
    named = [value for value, name in zip(results, case.node.output, strict=False) if name]
    return [np.asarray(value, np.int64) if isinstance(value, tuple) else value.numpy() for value in named]


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


MS = "com.microsoft"
X, ROWS = _drawn(2, 3, 4), _drawn(2, 5, 8)
RUNTIME: Sequence[tuple[str, str, Sequence[Array | None], dict[str, Any], int]] = (
    # operator, domain, inputs, attributes, outputs
    ("Gelu", MS, [X], {}, 1),
    ("FastGelu", MS, [X, _drawn(4)], {}, 1),
    ("BiasGelu", MS, [X, _drawn(4)], {}, 1),
    ("QuickGelu", MS, [X], {"alpha": 1.3}, 1),
    ("Cast", "", [X], {"to": 7}, 1),
    ("Cast", "", [X], {"to": 10}, 1),
    ("CastLike", "", [X, np.zeros(1, np.float64)], {}, 1),
    ("Inverse", MS, [_drawn(2, 3, 3)], {}, 1),
    ("SimplifiedLayerNormalization", "", [X, _drawn(4)], {"epsilon": 1e-3}, 1),
    ("SkipLayerNormalization", MS, [X, _drawn(2, 3, 4, seed=1), _drawn(4), _drawn(4, seed=1)], {}, 1),
    ("SkipLayerNormalization", MS, [X, _drawn(2, 3, 4, seed=1), _drawn(4), None, _drawn(4, seed=2)], {}, 1),
    ("SkipSimplifiedLayerNormalization", MS, [X, _drawn(2, 3, 4, seed=1), _drawn(4)], {}, 1),
    ("GlobalLpPool", "", [_drawn(2, 3, 4, 5)], {"p": 3}, 1),
    ("FusedConv", MS, [_drawn(2, 4, 5, 5), _drawn(6, 2, 3, 3), _drawn(6)],
     {"activation": "Relu", "group": 2, "pads": [1, 0, 1, 2], "strides": [2, 1]}, 1),
    ("FusedConv", MS, [_drawn(2, 4, 5, 5), _drawn(6, 4, 1, 1), _drawn(6), _drawn(2, 6, 5, 5)],
     {"activation": "LeakyRelu", "activation_params": [0.1]}, 1),
    ("FusedGemm", MS, [_drawn(5, 8), _drawn(6, 8), _drawn(6)], {"activation": "Relu", "transB": 1, "alpha": 0.5}, 1),
    ("FusedMatMul", MS, [_drawn(2, 8, 5), _drawn(6, 8)], {"transA": 1, "transB": 1, "alpha": 0.5}, 1),
    ("GRU", "", [ROWS, _drawn(2, 9, 8), _drawn(2, 9, 3), _drawn(2, 18)],
     {"hidden_size": 3, "linear_before_reset": 1, "direction": "bidirectional"}, 2),
    ("LSTM", "", [ROWS, _drawn(1, 12, 8), _drawn(1, 12, 3), _drawn(1, 24), None, _drawn(1, 5, 3), _drawn(1, 5, 3)],
     {"hidden_size": 3, "direction": "reverse"}, 3),
    ("RNN", "", [ROWS, _drawn(2, 3, 8), _drawn(2, 3, 3), _drawn(2, 6)],
     {"hidden_size": 3, "direction": "bidirectional", "activations": ["Relu", "Relu"]}, 2),
    ("RNN", "", [ROWS, _drawn(1, 3, 8), _drawn(1, 3, 3)], {"hidden_size": 3, "activations": ["Tanh"]}, 1),
    ("Attention", MS, [ROWS, _drawn(8, 24), _drawn(24)], {"num_heads": 2}, 1),
    ("Attention", MS, [ROWS, _drawn(8, 24), _drawn(24)], {"num_heads": 2, "unidirectional": 1}, 1),
    ("MultiHeadAttention", MS, [ROWS, _drawn(2, 7, 8), _drawn(2, 7, 8, seed=1), _drawn(24)], {"num_heads": 2}, 1),
    ("GroupNormalization", "", [_drawn(2, 6, 4, 3), _drawn(6), _drawn(6, seed=1)], {"num_groups": 3}, 1),
    ("Upsample", "", [_drawn(1, 2, 3, 4), np.array([1, 1, 2, 3], np.float32)], {"mode": "nearest"}, 1),
    ("Resize", "", [_drawn(1, 2, 3, 4), None, None, np.array([1, 2, 6, 7])],
     {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}, 1),
)  # fmt: skip
"""Nodes that onnx has no test of, or not with these attributes; the outputs are ONNX Runtime's."""

VERSIONS = {"Upsample": 9, "GroupNormalization": 21}


@cache
def runtime_cases() -> tuple[NodeCase, ...]:
    return tuple(_by_runtime(*case, number) for number, case in enumerate(RUNTIME))


def _by_runtime(
    kind: str, domain: str, inputs: Sequence[Array | None], attributes: dict[str, Any], outputs: int, number: int
) -> NodeCase:
    names = ["" if value is None else f"in{place}" for place, value in enumerate(inputs)]
    node = helper.make_node(kind, names, [f"out{place}" for place in range(outputs)], domain=domain, **attributes)
    case = NodeCase(f"{kind} {number}", node, 1 if domain else VERSIONS.get(kind, 17), inputs, [])
    session = opened(case)
    assert session is not None, case.title
    return case._replace(outputs=session.run(None, fed(case)))


def cases_by_operator() -> dict[str, list[NodeCase]]:
    cases = defaultdict(list)
    for case in (*standard_cases(), *runtime_cases()):
        cases[qualified(case.node)].append(case)
    return cases


def known_to_torch(case: NodeCase) -> bool:
    """Whether torch computes with the types, and takes them from numpy, which has no bfloat16."""
    known = set(DTYPES.values()) - {"bfloat16"}
    return all(str(np.asarray(value).dtype) in known for value in (*case.inputs, *case.outputs) if value is not None)


def fed(case: NodeCase) -> dict[str, Array]:
    pairs = zip(case.node.input, case.inputs, strict=True)
    return {name: value for name, value in pairs if value is not None}


def opened(case: NodeCase) -> Any:
    """An ONNX Runtime session of the node, None where it does not have the operator in this version or type."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), None)
        for name, value in fed(case).items()
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in case.node.output if name]
    graph = helper.make_graph([case.node], "node", inputs, outputs)
    sets = [helper.make_opsetid(*each) for each in {"": 17, case.node.domain: case.version}.items()]
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        model = helper.make_model(graph, opset_imports=sets, ir_version=10)
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # whatever ONNX Runtime raises for a node that it does not take
        return None


def at_known_version(case: NodeCase) -> NodeCase:
    """The case at a version of its operator set that ONNX Runtime has."""
    older = (case._replace(version=version) for version in (22, 13))
    return case if opened(case) is not None else next((each for each in older if opened(each) is not None), case)


def taken(case: NodeCase) -> bool:
    """Whether ONNX Runtime computes the case."""
    try:
        session = opened(case)
        return session is not None and bool(session.run(None, fed(case)))
    except Exception:  # it raises several unrelated kinds
        return False


def alone(case: NodeCase, held: Sequence[int]) -> tuple[ModelProto, dict[str, Array]]:
    """A model of the node with fixed shapes, and what its inputs hold; those at the places *held* are constants."""
    constants = {name for place, name in enumerate(case.node.input) if place in held and name}
    feed = {name: np.asarray(value) for name, value in fed(case).items()}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feed.items()
        if name not in constants
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in case.node.output if name]
    weights = [numpy_helper.from_array(feed.pop(name), name) for name in sorted(constants)]
    sets = [helper.make_opsetid(*each) for each in {"": 17, case.node.domain: case.version}.items()]
    net = helper.make_graph([case.node], "node", inputs, outputs, weights)
    return helper.make_model(net, opset_imports=sets, ir_version=10), feed

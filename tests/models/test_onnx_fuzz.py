"""Damaged files: whatever the bytes, the importer answers with a model or with a ModelError."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests.models.damage import changed, spliced
from weft.base.errors import ModelError
from weft.models.onnx_import import import_onnx
from weft.models.onnx_import.infer import FOLDED as RULES
from weft.models.operators import OPERATORS


def small_file() -> bytes:
    """A little of everything the importer follows: constants, shape arithmetic, fusion, a branch."""
    node = helper.make_node
    then = helper.make_graph(
        [node("Sigmoid", ["g"], ["a"])],
        "then",
        [],
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, None)],
    )
    other = helper.make_graph(
        [node("Exp", ["g"], ["e"])], "else", [], [helper.make_tensor_value_info("e", TensorProto.FLOAT, None)]
    )
    nodes = [
        node("Conv", ["x", "w"], ["h"], name="conv", pads=[1, 1, 1, 1], group=1),
        node("Relu", ["h"], ["r"]),
        node("Shape", ["r"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Concat", ["n", "rest"], ["target"], axis=0),
        node("Reshape", ["r", "target"], ["flat"]),
        node("Gemm", ["flat", "fc", "b"], ["g"], transB=1),
        node("If", ["c"], ["y"], then_branch=then, else_branch=other),
        node("LSTM", ["q", "lw", "lr"], ["z"], hidden_size=2),
        node("Einsum", ["q", "q"], ["k"], equation="sbi,tbi->st"),
    ]
    constants = [
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 3, 3, 3]),
        TensorProto(name="fc", data_type=TensorProto.FLOAT16, dims=[5, 64]),
        TensorProto(name="b", data_type=TensorProto.FLOAT, dims=[5]),
        TensorProto(name="lw", data_type=TensorProto.FLOAT, dims=[1, 8, 3]),
        TensorProto(name="lr", data_type=TensorProto.FLOAT, dims=[1, 8, 2]),
        numpy_helper.from_array(np.array([0], dtype=np.int64), "zero"),
        numpy_helper.from_array(np.array([-1], dtype=np.int64), "rest"),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 4, 4]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        helper.make_tensor_value_info("q", TensorProto.FLOAT, [6, 1, 3]),
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "z", "k")]
    graph = helper.make_graph(nodes, "small", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()


VALID = small_file()
FUZZ = settings(
    max_examples=75,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def import_bytes(path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        import_onnx(path)
    except ModelError as error:
        assert "\n" not in str(error)
        assert path.name in str(error)


def test_the_file_is_valid_before_it_is_damaged(tmp_path):
    path = tmp_path / "small.onnx"
    path.write_bytes(VALID)
    model = import_onnx(path)
    assert [layer.op for layer in model.layers] == ["Conv+Relu", "Gemm", "Sigmoid", "LSTM", "Einsum"]


@FUZZ
@given(content=changed(VALID))
def test_changed_bytes(tmp_path, content):
    import_bytes(tmp_path / "small.onnx", content)


@FUZZ
@given(content=spliced(VALID))
def test_spliced_bytes(tmp_path, content):
    import_bytes(tmp_path / "small.onnx", content)


@pytest.mark.parametrize("step", [7])
def test_truncated_files(tmp_path, step):
    for end in range(0, len(VALID), step):
        import_bytes(tmp_path / "small.onnx", VALID[:end])


NUMBERS = st.sampled_from([0, 1, 2, 3, 5, -1, -7, 2**31, 2**62, -(2**63), 2**63 - 1])


@FUZZ
@given(data=st.data())
def test_changed_fields(tmp_path, data):
    """Files that parse but lie: random sizes, attributes, operators and wires."""
    proto = onnx.ModelProto.FromString(VALID)
    graph = proto.graph
    for _ in range(data.draw(st.integers(1, 3))):
        match data.draw(st.sampled_from(["dims", "attribute", "op", "wire", "drop", "input"])):
            case "dims":
                dims = data.draw(st.sampled_from(graph.initializer)).dims
                dims[data.draw(st.integers(0, len(dims) - 1))] = data.draw(NUMBERS)
            case "attribute":
                owner = data.draw(st.sampled_from([each for each in graph.node if each.attribute]))
                attribute = data.draw(st.sampled_from(owner.attribute))
                attribute.i = data.draw(NUMBERS)
                attribute.ints.append(data.draw(NUMBERS))
                attribute.type = data.draw(st.integers(0, 14))
            case "op":
                names = [
                    "Conv",
                    "MatMul",
                    "Einsum",
                    "Loop",
                    "Scan",
                    "If",
                    "Attention",
                    "Slice",
                    "Resize",
                    "Tile",
                ]
                data.draw(st.sampled_from(graph.node)).op_type = data.draw(st.sampled_from(names))
            case "wire":
                owner = data.draw(st.sampled_from(graph.node))
                place = data.draw(st.integers(0, len(owner.input) - 1))
                owner.input[place] = data.draw(st.sampled_from(["", "x", "w", "h", "y", "rest", "target", "c"]))
            case "drop":
                owner = data.draw(st.sampled_from(graph.node))
                if len(owner.input) > 1:
                    del owner.input[-1]
            case "input":
                dim = data.draw(st.sampled_from(graph.input[0].type.tensor_type.shape.dim))
                dim.dim_value = data.draw(NUMBERS)
    import_bytes(tmp_path / "small.onnx", proto.SerializeToString())


SMALL = st.integers(-3, 4)
VALUES = st.one_of(
    st.builds(lambda sizes: np.zeros(sizes, np.float32), st.lists(st.integers(0, 3), max_size=4)),
    st.builds(lambda numbers: np.array(numbers, np.int64), st.lists(SMALL, max_size=4)),
    st.builds(lambda number: np.array(number, np.int64), SMALL),
    st.builds(lambda number: np.array(number, np.bool_), st.booleans()),
)
ATTRIBUTES = st.dictionaries(
    st.sampled_from(
        [
            "axis",
            "axes",
            "perm",
            "to",
            "starts",
            "ends",
            "split",
            "keepdims",
            "pads",
            "mode",
            "num_heads",
            "K",
            "N",
            "bits",
            "k",
            "value",
        ]
    ),
    st.one_of(SMALL, st.lists(SMALL, min_size=1, max_size=3), st.sampled_from(["", "edge"])),
    max_size=3,
)
DOMAINS = [("", 11), ("com.microsoft", 1), ("ai.onnx.ml", 3), ("com.microsoft.nchwc", 1)]


@FUZZ
@given(
    op=st.sampled_from(sorted({*RULES, *OPERATORS})),
    inputs=st.lists(VALUES, max_size=5),
    attributes=ATTRIBUTES,
    opset=st.integers(1, 23),
    known=st.booleans(),
)
def test_operators_with_rules_of_ours_answer_any_input(op, inputs, attributes, opset, known):
    """Nodes that no runtime would run: of known values, or of an input that a query brings."""
    domain, _, kind = op.rpartition(":")
    node = helper.make_node(
        kind, [f"i{place}" for place in range(len(inputs))], ["y", "z"], domain=domain, **attributes
    )
    constants = [numpy_helper.from_array(value, f"i{place}") for place, value in enumerate(inputs)]
    query = [] if known or not constants else [constants.pop(0)]
    given = [helper.make_tensor_value_info(each.name, each.data_type, each.dims) for each in query]
    graph = helper.make_graph([node], "one", given, [helper.make_empty_tensor_value_info("y")], constants)
    opsets = [helper.make_opsetid(name, version if name else opset) for name, version in DOMAINS]
    try:
        import_onnx(helper.make_model(graph, opset_imports=opsets))
    except ModelError as error:
        assert "\n" not in str(error)

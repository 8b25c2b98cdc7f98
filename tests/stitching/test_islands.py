"""Operators that are kept as they stand, through the whole of ``weft stitch``: the models' answers, or one line."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.stitching.files import model, node, numbers
from tests.stitching.outcomes import STITCHED, outcome
from tests.support.tuning import FORMAT_CASES, formats_for, network_of
from tests.tuning.onnx_nets import chain
from weft.cli.main import main
from weft_stitch.graph import Builder
from weft_tune.export import export

STEM = node("Conv", ["x", "stem"], ["s"])
"""Something to stitch: four channels of three."""


def family(*nodes: onnx.NodeProto, shape=(1, 3, 6, 6), stem=STEM, outputs=("y",), **constants) -> list[onnx.ModelProto]:
    """Two models that differ in one filter of their first convolution."""
    made = []
    for task in range(2):
        kernel = numbers(4, shape[1], *[1] * len(stem.input[1:]), *[1] * (len(shape) - 3))
        kernel[0] += task
        made.append(model([stem, *nodes], {"stem": kernel, **constants}, inputs={"x": shape}, outputs=outputs))
    return made


@pytest.mark.parametrize("places", [(7,), (3, 4, 3)])
@pytest.mark.parametrize("strides", [1, 2])
def test_convolutions_over_one_and_three_dimensions_are_islands(places, strides, tmp_path):
    nodes = [
        node("Reshape", ["s", "apart"], ["f"]),
        node("Conv", ["f", "w"], ["c"], strides=[strides] * len(places)),
        node("Flatten", ["c"], ["y"]),
    ]
    constants = {"apart": np.array([1, 4, *places]), "w": numbers(3, 4, *[2] * len(places))}
    models = family(*nodes, shape=(1, 3, 1, int(np.prod(places))), **constants)
    assert outcome(models, tmp_path, islands=True) == STITCHED


def test_a_transform_that_leaves_its_defaults_out_is_an_island(tmp_path):
    nodes = [
        node("Flatten", ["s"], ["f"]),
        node("STFT", ["f", "step", "", "length"], ["t"]),
        node("Flatten", ["t"], ["v"]),
        node("Gemm", ["v", "w"], ["y"]),
    ]
    constants = {"step": np.int64(4), "length": np.int64(16), "w": numbers(5 * 9 * 2, 3)}
    assert outcome(family(*nodes, shape=(1, 3, 1, 8), **constants), tmp_path, islands=True) == STITCHED


@pytest.mark.parametrize("style", ["qdq", "packed", "simulated"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_tuned_files_are_stitched(style, dynamic, tmp_path):
    net = chain()
    models = [export(net, network_of(net), formats_for(network_of(net), *FORMAT_CASES["8 bits"]), style)] * 2
    assert outcome(models, tmp_path, jumpy=True, islands=True, dynamic=dynamic) == STITCHED


def test_a_tuned_file_of_another_dialect_is_refused_in_one_line(tmp_path):
    net = chain()
    models = [export(net, network_of(net), formats_for(network_of(net), *FORMAT_CASES["8 bits"]), "qonnx")]
    paths = [tmp_path / "a.onnx"]
    onnx.save(models[0], paths[0])
    with pytest.raises(SystemExit) as leaving:
        main(["stitch", str(paths[0]), "-o", str(tmp_path / "out.onnx"), "--islands"])
    assert leaving.value.code == 2


def test_a_weight_may_be_computed_from_the_input(tmp_path):
    nodes = [
        node("ReduceMean", ["s"], ["m"], keepdims=1),
        node("Mul", ["w", "m"], ["k"]),
        node("Conv", ["s", "k"], ["y"]),
    ]
    assert outcome(family(*nodes, w=numbers(2, 4, 1, 1)), tmp_path, islands=True) == STITCHED


def test_a_convolution_in_an_island_may_leave_its_kernel_and_bias_to_others(tmp_path):
    """It reads what is inside an island, in four dimensions: those of a picture, but no rows."""
    nodes = [
        node("Transpose", ["s"], ["t"], perm=[1, 0, 2, 3]),
        node("Conv", ["t", "w", ""], ["c"]),
        node("Transpose", ["c"], ["y"], perm=[1, 0, 2, 3]),
    ]
    assert outcome(family(*nodes, shape=(2, 3, 6, 6), w=numbers(2, 2, 3, 3)), tmp_path, islands=True) == STITCHED


def test_outputs_that_are_left_out_do_not_become_inputs_that_are(tmp_path):
    nodes = [
        node("Reshape", ["s", "steps"], ["r"]),
        node("GRU", ["r", "w", "u"], ["", "h"], hidden_size=2),
        node("Clip", ["h", "", "one"], ["k"]),
        node("Transpose", ["k"], ["y"], perm=[1, 0, 2]),
    ]
    constants = {"steps": np.array([4, 1, 36]), "w": numbers(1, 6, 36), "u": numbers(1, 6, 2), "one": np.float32(0.1)}
    assert outcome(family(*nodes, **constants), tmp_path, islands=True) == STITCHED


def test_single_numbers_keep_their_shape(tmp_path):
    """A row of an index would leave a dimension of one, over which softmax is one."""
    nodes = [node("Gather", ["s", "second"], ["g"], axis=3), node("Softmax", ["g"], ["y"], axis=-1)]
    assert outcome(family(*nodes, second=np.array(1)), tmp_path, islands=True) == STITCHED
    builder = Builder("net")
    builder.constant(np.array(1))
    assert [array.shape for array in builder.finish().constants.values()] == [()]


def test_weights_in_eight_bits_are_read_in_every_operator_set(tmp_path):
    constants = {"q": np.array([[[[3]], [[-4]]]] * 2, np.int8).reshape(1, 4, 1, 1), "scale": np.float32(0.5)}
    nodes = [node("DequantizeLinear", ["q", "scale"], ["w"]), node("Conv", ["s", "w"], ["y"])]
    assert outcome(family(*nodes, **constants), tmp_path) == STITCHED


def test_an_island_that_is_added_to_a_layer_takes_nothing_from_its_sharing(tmp_path):
    nodes = [node("Sin", ["s"], ["i"]), node("Add", ["s", "i"], ["y"])]
    assert outcome(family(*nodes), tmp_path, islands=True, form="mts") == STITCHED


def test_zeros_around_a_picture_are_part_of_its_shape(tmp_path):
    pads = np.array([0, 0, 1, 0, 0, 0, 0, 1])
    nodes = [
        node("Pad", ["s", "pads"], ["p"]),
        node("Shape", ["p"], ["sizes"]),
        node("Gather", ["sizes", "two"], ["high"]),
        node("Cast", ["high"], ["number"], to=TensorProto.FLOAT),
        node("Flatten", ["p"], ["f"]),
        node("Mul", ["f", "number"], ["y"]),
    ]
    assert outcome(family(*nodes, pads=pads, two=np.array(2)), tmp_path) == STITCHED


def test_rounding_to_half_precision_on_the_way_is_kept(tmp_path):
    nodes = [
        node("Cast", ["s"], ["half"], to=TensorProto.FLOAT16),
        node("Cast", ["half"], ["f"], to=TensorProto.FLOAT),
        node("GlobalMaxPool", ["f"], ["y"]),
    ]
    assert outcome(family(*nodes), tmp_path, islands=True) == STITCHED
    assert "it rounds to half precision" in outcome(family(*nodes), tmp_path)


def test_a_model_in_half_precision_may_store_no_weights(tmp_path):
    made = model([node("Reshape", ["x", "flat"], ["y"])], {"flat": np.array([2, -1])}, dtype=TensorProto.FLOAT16)
    assert outcome([made] * 2, tmp_path) == STITCHED
    made.graph.input.insert(0, helper.make_tensor_value_info("flat", TensorProto.INT64, [2]))  # as old files list it
    assert outcome([made] * 2, tmp_path) == STITCHED


def test_doubles_in_an_island_are_computed_in_float32(tmp_path):
    nodes = [
        node("ArgMax", ["s"], ["i"], axis=1),
        node("Cast", ["i"], ["d"], to=TensorProto.DOUBLE),
        node("Mul", ["d", "third"], ["m"]),
        node("Cast", ["m"], ["y"], to=TensorProto.FLOAT),
    ]
    assert outcome(family(*nodes, third=np.array(1 / 3)), tmp_path, islands=True) == STITCHED


REFUSED = {
    "whole numbers": ([node("ArgMax", ["s"], ["y"], axis=1)], "its output y is of type int64"),
    "chance": ([node("RandomNormalLike", ["s"], ["y"])], "it draws random numbers"),
    "training": ([node("Dropout", ["s", "half", "yes"], ["y"])], "it draws random numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_island_can_hold_is_named(case, tmp_path):
    nodes, words = REFUSED[case]
    constants = {"half": np.float32(0.5), "yes": np.array(True)} if case == "training" else {}
    made = family(*nodes, **constants)
    for each in made if case == "whole numbers" else ():
        each.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.INT64, None))
    assert words in outcome(made, tmp_path, islands=True)


TIED = {
    "sizes": [node("Resize", ["s", "", "", "sizes"], ["y"], mode="nearest")],
    "all rows": [node("ReduceMean", ["s"], ["m"], axes=[0]), node("Sub", ["s", "m"], ["y"])],
    "range": [
        node("DynamicQuantizeLinear", ["s"], ["q", "scale", "zero"]),
        node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ],
}


@pytest.mark.parametrize("case", TIED)
def test_models_that_mix_their_rows_are_not_stitched_for_any_number_of_them(case, tmp_path):
    models = family(*TIED[case], **({"sizes": np.array([1, 4, 12, 12])} if case == "sizes" else {}))
    refused = outcome(models, tmp_path, islands=True, dynamic=True)
    assert refused == "m0 needs the other rows of a batch for its output y; leave out --dynamic"
    assert outcome(models, tmp_path, islands=True) == STITCHED


def test_a_model_for_one_number_of_rows_is_not_stitched_for_any(tmp_path):
    nodes = [
        node("Reshape", ["s", "steps"], ["r"]),
        node("Transpose", ["r"], ["t"], perm=[1, 0, 2]),
        node("GRU", ["t", "w", "u", "", "", "start"], ["", "h"], hidden_size=2),
        node("Transpose", ["h"], ["y"], perm=[1, 0, 2]),
    ]
    constants = {
        "steps": np.array([1, 4, 36]),
        "w": numbers(1, 6, 36),
        "u": numbers(1, 6, 2),
        "start": numbers(1, 1, 2),
    }
    refused = outcome(family(*nodes, **constants), tmp_path, islands=True, dynamic=True)
    assert refused == "m0 runs with the number of rows in its file (1) only; leave out --dynamic"
    assert outcome(family(*nodes, **constants), tmp_path, islands=True) == STITCHED


def test_a_model_that_cannot_run_is_named_while_it_is_measured(tmp_path):
    """onnxruntime has no dilated convolutions with padding left to it."""
    nodes = [
        node("Transpose", ["s"], ["t"], perm=[1, 0, 2, 3]),
        node("Conv", ["t", "w"], ["c"], auto_pad="SAME_UPPER", dilations=[2, 2]),
        node("Transpose", ["c"], ["y"], perm=[1, 0, 2, 3]),
    ]
    path = tmp_path / "a.onnx"
    onnx.save(family(*nodes, w=numbers(1, 1, 2, 2))[0], path)
    with pytest.raises(SystemExit) as leaving:
        main(["stitch", str(path), "-o", str(tmp_path / "out.onnx"), "--islands"])
    assert leaving.value.code == 2


def test_models_without_weights_fit_under_a_cap(tmp_path):
    made = [model([node("Relu", ["x"], ["y"])])]
    assert outcome(made, tmp_path, memory_cap="1m") == STITCHED

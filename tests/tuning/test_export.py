"""Tuned networks as ONNX files: the same answers in a stock onnxruntime, in fewer bytes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.tuning import FORMAT_CASES, formats_for, network_of
from tests.tuning.onnx_nets import NETS, samples, save, tangle
from weft.base.errors import TuneError
from weft.models.classifiers import model_path, validation
from weft_tune.export import FORMATS, export, write_export
from weft_tune.network import Network, Target
from weft_tune.numbers.arrays import rounded
from weft_tune.numbers.configuration import Configuration, parse_configuration
from weft_tune.numbers.format import (
    BIN,
    EXP,
    FIXED,
    FLOAT,
    FLOAT16,
    FLOAT32,
    Format,
    TwosComplement,
)
from weft_tune.quantised.opened import make_plan, open_for_tuning
from weft_tune.quantised.runner import LayerFormats, PlanRunner, SampleOrder
from weft_tune.weighted_layers import find_layers, flat, load_flat

RUNNABLE = ("qdq", "packed", "simulated")


def one_thread(**settings):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for name, value in settings.items():
        setattr(options, name, value)
    return options


def run(model, *inputs, **settings):
    session = onnxruntime.InferenceSession(model.SerializeToString(), one_thread(**settings))
    return session.run(None, dict(zip([each.name for each in session.get_inputs()], inputs, strict=True)))[0]


def as_written(model, *inputs):
    return run(model, *inputs, graph_optimization_level=onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)


def layer_by_layer(model, configuration, *inputs):
    """The simulated evaluation: every node in a session of its own, weights and inputs rounded between them."""
    names = {layer.position: layer.name for layer in find_layers(model)}
    values = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    values |= dict(zip([each.name for each in model.graph.input], inputs, strict=True))
    for place, node in enumerate(model.graph.node):
        feeds = {name: values[name] for name in node.input}
        if place in names:
            for name, role in zip(node.input, ("input", "weight"), strict=False):
                feeds[name] = rounded(values[name], configuration[f"{names[place]}.{role}"])
        values[node.output[0]] = _alone(node, feeds, model.opset_import)
    return values[model.graph.output[0].name]


def _alone(node, feeds, opsets):
    types = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    graph = helper.make_graph([node], "node", types, [helper.make_empty_tensor_value_info(node.output[0])])
    made = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return onnxruntime.InferenceSession(made.SerializeToString(), one_thread()).run(None, feeds)[0]


@pytest.fixture(scope="module")
def lenet():
    return load_flat(model_path("lenet"))


@pytest.fixture(scope="module")
def digits():
    found = validation("lenet")
    return found.inputs()[:100], found.label[:100]


@pytest.fixture(scope="module", params=FORMAT_CASES)
def simulated(request, lenet, digits):
    """A case of formats and the answers it comes to."""
    configuration = formats_for(network_of(lenet), *FORMAT_CASES[request.param])
    return request.param, configuration, layer_by_layer(lenet, configuration, digits[0])


@pytest.mark.parametrize("style", RUNNABLE)
def test_an_exported_network_answers_as_the_simulated_one(lenet, digits, simulated, style):
    network, (images, labels), (case, configuration, want) = network_of(lenet), digits, simulated
    made = export(lenet, network, configuration, style)
    onnx.checker.check_model(made, full_check=True)
    wide = case in ("half", "mixed", "others")  # sums in another order may fall on the other side of a rounding
    assert np.abs(as_written(made, images) - want).max() <= (0.02 if wide else 1e-5)
    got = run(made, images)
    assert np.abs(got - want).max() <= (0.02 if wide else 1e-5)
    assert ((got.argmax(1) == labels).mean()) == ((want.argmax(1) == labels).mean())


def test_onnxruntime_leaves_float_weights_and_biases_alone(digits):
    """Its optimiser quantises both where it can see a product between DequantizeLinear and QuantizeLinear."""
    model = load_flat(model_path("mlp-m"))
    network = network_of(model)
    names = [target.name for target in network.targets]
    configuration = Configuration({f"{name}.input": FIXED(4, -1) for name in names})
    flat = digits[0]
    want = layer_by_layer(model, configuration, flat)
    assert np.abs(run(export(model, network, configuration), flat) - want).max() <= 1e-4


def test_files_shrink_with_the_formats(lenet):
    network = network_of(lenet)
    whole, weights = lenet.ByteSize(), network.weights

    def size(style, form, data=FLOAT32):
        return export(lenet, network, formats_for(network, [form], [data]), style).ByteSize()

    overhead = whole - 4 * weights + 6000
    assert size("qdq", FIXED(8)) < weights + overhead
    assert size("qdq", EXP(3)) < weights * 3 / 8 + overhead
    assert size("packed", FIXED(3)) < weights * 3 / 8 + overhead
    assert size("packed", FIXED(2)) < weights / 4 + overhead
    assert size("qdq", FLOAT(8)) < weights + overhead
    assert size("qdq", FLOAT16) < weights * 2 + overhead
    assert size("qdq", FIXED(3), FIXED(8)) < weights / 2 + overhead  # int4, the least that has a type
    assert size("packed", FIXED(3), FIXED(8)) < weights * 3 / 8 + overhead


@pytest.mark.parametrize(
    "form", [*(FIXED(bits) for bits in range(2, 18)), *(EXP(bits) for bits in range(2, 10)), BIN()]
)
@pytest.mark.parametrize("style", RUNNABLE)
def test_weights_come_back_as_they_were_rounded(form, style):
    weight = np.random.default_rng(1).standard_normal((3, 7)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="fc")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 7])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    made = export(model, network_of(model), Configuration({"fc.weight": form}), style)
    assert np.array_equal(run(made, np.eye(3, dtype=np.float32)), rounded(weight, form))


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
@pytest.mark.parametrize("weight", [FIXED(3, -1), FIXED(8, -1)], ids=str)
@pytest.mark.parametrize(
    "data", [FLOAT32, FIXED(4, -1), FIXED(8, -1), FIXED(12, -1), EXP(5, 8), FLOAT(8), TwosComplement(8, 4)], ids=str
)
def test_narrow_weights_do_not_make_inputs_narrow(op, weight, data):
    """For int4 and int8 weights onnxruntime has kernels that round float inputs to 8 bits."""
    rng = np.random.default_rng(3)
    values, x = rng.standard_normal((64, 48)).astype(np.float32), rng.standard_normal((32, 64)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "w"], ["y"], name="fc")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [32, 48])],
        [numpy_helper.from_array(values, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    made = export(model, network_of(model), Configuration({"fc.weight": weight, "fc.input": data}))
    want = rounded(x, data).astype(np.float64) @ rounded(values, weight)
    assert np.allclose(run(made, x), want, rtol=0, atol=1e-4)


def odd_model(opset=13):
    """A weight of two layers, one in a Constant node, one transposed, and an input that two layers read."""
    rng = np.random.default_rng(7)
    square, third, fourth = (rng.standard_normal((4, 4)).astype(np.float32) for _ in range(3))
    nodes = [
        helper.make_node("Constant", [], ["c.weight"], value=numpy_helper.from_array(third, "")),
        helper.make_node("Transpose", ["d.weight"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "shared.weight"], ["a"], name="a"),
        helper.make_node("MatMul", ["x", "c.weight"], ["b"], name="b"),
        helper.make_node("Add", ["a", "b"], ["sum"]),
        helper.make_node("Gemm", ["sum", "shared.weight", "bias"], ["g"], name="g", transB=1),
        helper.make_node("MatMul", ["g", "turned"], ["y"], name="d"),
    ]
    stored = {"shared.weight": square, "d.weight": fourth, "bias": rng.standard_normal(4).astype(np.float32)}
    graph = helper.make_graph(
        nodes,
        "odd",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=7), stored | {"c": third}


@pytest.mark.parametrize("style", RUNNABLE)
@pytest.mark.parametrize("opset", [9, 13, 21])
def test_weights_may_be_shared_turned_and_in_nodes(style, opset):
    model, stored = odd_model(opset)
    before = model.SerializeToString()
    names = [layer.name for layer in find_layers(flat_copy(model))]
    network = Network("odd", tuple(Target(name, 16, 4, 1.0, 1.0) for name in names))
    forms = dict(zip(names, (FIXED(4, 0), EXP(4, 5), FIXED(3, 0), FIXED(12, -1)), strict=True))
    data = {names[0]: FIXED(8, -1), names[1]: FIXED(8, -1), names[2]: FIXED(6, -3), names[3]: EXP(5, 9)}
    configuration = Configuration(
        {f"{name}.weight": form for name, form in forms.items()}
        | {f"{name}.input": form for name, form in data.items()}
    )
    x = np.random.default_rng(8).standard_normal((5, 4)).astype(np.float32)
    entering = rounded(x, FIXED(8, -1))
    total = entering @ rounded(stored["shared.weight"], FIXED(4, 0)) + entering @ rounded(stored["c"], EXP(4, 5))
    g = rounded(total, FIXED(6, -3)) @ rounded(stored["shared.weight"], FIXED(3, 0)).T + stored["bias"]
    want = rounded(g, EXP(5, 9)) @ rounded(stored["d.weight"], FIXED(12, -1)).T
    made = export(model, network, configuration, style)
    onnx.checker.check_model(made, full_check=True)
    assert np.allclose(run(made, x), want, rtol=1e-5, atol=1e-5)
    assert model.SerializeToString() == before
    assert not {"shared.weight", "d.weight"} & {each.name for each in made.graph.initializer}
    if style != "simulated":
        quantised = [node for node in made.graph.node if node.op_type == "QuantizeLinear"]
        assert len(quantised) == 2  # x once for two layers, and the sum


@pytest.mark.parametrize("style", RUNNABLE)
@pytest.mark.parametrize("net", ["fixed batch", "old file", "residual", "tokens", "tangle"])
def test_graphs_of_any_shape_answer_as_their_pieces_do(net, style, tmp_path):
    """The evaluator's own pieces; sums in another order may fall on the other side of a few roundings."""
    model = tangle(3) if net == "tangle" else NETS[net]()
    opened, inputs = open_for_tuning(save(model, tmp_path)), samples(model, 12)
    plan = make_plan(opened, opened.layers, inputs)
    forms = formats_for(
        network_of(opened.model), [FIXED(4, 1), EXP(4, 8), FLOAT(6)], [FIXED(6, -2), FLOAT(7), EXP(5, 9)]
    )
    runner = PlanRunner(plan, 0)
    runner.add("all", SampleOrder(inputs, np.arange(12)))
    layers = {
        each.name: LayerFormats(forms[f"{each.name}.weight"], forms[f"{each.name}.input"]) for each in opened.layers
    }
    want = np.concatenate(runner.run("all", layers, range(12 // plan.batch)))
    made = export(opened.path, network_of(opened.model), forms, style)
    (entering,) = inputs.values()
    got = np.concatenate([run(made, entering[at : at + plan.batch]) for at in range(0, 12, plan.batch)])
    assert np.isclose(got, want, rtol=1e-4, atol=1e-4).mean() > 0.9


def flat_copy(model):
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return flat(copy)


def test_branches_share_a_format_by_name(lenet):
    network = network_of(lenet, branches=("conv1", "conv2"))
    configuration = Configuration({"conv1.weight": FIXED(3, 2), "conv2.weight": FIXED(3, 2)})
    made = export(lenet, network, configuration, "simulated")
    kept = {each.name: numpy_helper.to_array(each) for each in made.graph.initializer}
    originals = {layer.name: layer.weight for layer in find_layers(lenet)}
    for name in ("conv1", "conv2"):
        assert any(np.array_equal(value, rounded(originals[name], FIXED(3, 2))) for value in kept.values())


def test_nothing_to_do_leaves_the_network_as_it_is(lenet, digits):
    images = digits[0][:20]
    for style in RUNNABLE:
        assert np.array_equal(
            run(export(lenet, network_of(lenet), Configuration({}), style), images), run(lenet, images)
        )


def test_the_file_says_which_formats_it_has(lenet, tmp_path):
    network = network_of(lenet)
    configuration = formats_for(network, [EXP(4, 9)], [FIXED(6, -3)])
    write_export(tmp_path / "tuned.onnx", model_path("lenet"), network, configuration)
    read = onnx.load(tmp_path / "tuned.onnx")
    (text,) = [each.value for each in read.metadata_props if each.key == FORMATS]
    assert parse_configuration(text) == configuration


def test_weights_beside_a_file_that_is_linked_to_stand_beside_the_file(lenet, tmp_path, monkeypatch):
    monkeypatch.setattr("weft.models.onnx_graph.MOST_BYTES_IN_FILE", 100)
    (tmp_path / "far").mkdir()
    (tmp_path / "link.onnx").symlink_to("far/tuned.onnx")
    sizes = []
    for _ in range(2):  # written over, not behind, what is there
        write_export(tmp_path / "link.onnx", lenet, network_of(lenet), Configuration({}))
        sizes.append((tmp_path / "far/tuned.onnx.data").stat().st_size)
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["far", "link.onnx", "tuned.onnx", "tuned.onnx.data"]
    assert sizes[0] == sizes[1]
    onnx.checker.check_model(tmp_path / "far/tuned.onnx", full_check=True)


def test_metadata_survives_a_raise_of_the_opset():
    model, _ = odd_model(13)
    helper.set_model_props(model, {"author": "somebody"})
    name = find_layers(flat_copy(model))[0].name
    network = Network("odd", (Target(name, 16, 4, 1.0, 1.0),))
    made = export(model, network, Configuration({f"{name}.weight": FIXED(4), f"{name}.input": FIXED(8)}))
    assert next(each.version for each in made.opset_import if not each.domain) == 21
    assert {"author": "somebody"}.items() <= {each.key: each.value for each in made.metadata_props}.items()


def test_qonnx_nodes_carry_the_format_in_their_inputs(lenet):
    network = network_of(lenet)
    forms = [FIXED(3, 2), EXP(4, 9), FLOAT(8, -2), BIN(3)]
    made = export(lenet, network, formats_for(network, forms, [FIXED(5, -3), TwosComplement(6, 2)]), "qonnx")
    onnx.checker.check_model(made)
    assert ("qonnx.custom_op.general", 1) in [(each.domain, each.version) for each in made.opset_import]
    constants = {each.name: numpy_helper.to_array(each) for each in made.graph.initializer}
    found = {}
    for node in made.graph.node:
        if node.domain:
            fields = [float(constants[name]) for name in node.input[1:]]
            found[node.input[0]] = (
                node.op_type,
                fields,
                {each.name: helper.get_attribute_value(each) for each in node.attribute},
            )
    op, fields, attributes = found["conv1.weight_2"]
    assert (op, fields) == ("IntQuant", [2.0**-3, 0, 3])
    assert (attributes["signed"], attributes["narrow"], attributes["rounding_mode"]) == (1, 1, b"ROUND")
    assert found["conv2.weight_2"][:2] == ("FloatQuant", [1.0, 3, 0, 9, 2.0**-2])
    assert found["ip1.weight_2"][:2] == ("FloatQuant", [2.0**3, 4, 3, 1, 1.875 * 2.0**14])
    assert found["ip2.weight_2"][:2] == ("BipolarQuant", [2.0**-3])
    assert found["pool1"][2]["rounding_mode"] == b"HALF_UP"


def test_qonnx_has_no_floats_without_a_sign(lenet):
    with pytest.raises(TuneError, match="CUSTOM 0 4 3 7 has no sign"):
        export(lenet, network_of(lenet), Configuration({"conv1.input": Format(0, 4, 3, 7)}), "qonnx")


@pytest.mark.parametrize("form", [FIXED(4, 200), BIN(-140), FLOAT(8, -140), TwosComplement(4, -130)], ids=str)
def test_scales_that_qonnx_cannot_say_are_refused(lenet, form):
    with pytest.raises(TuneError, match="reaches too far for QONNX; choose a bias nearer"):
        export(lenet, network_of(lenet), Configuration({"conv1.input": form}), "qonnx")


def test_what_cannot_be_exported_is_said_in_one_line(lenet, tmp_path):
    network = network_of(lenet)
    some = Configuration({"conv1.weight": FIXED(4)})
    with pytest.raises(TuneError, match="unknown style 'qqd'"):
        export(lenet, network, some, "qqd")
    with pytest.raises(TuneError, match=r"unknown object 'conv9\.weight'"):
        export(lenet, network, Configuration({"conv9.weight": FIXED(4)}))
    with pytest.raises(TuneError, match="unknown layer 'conv9'"):
        export(lenet, Network("net", (Target("conv9", 1, 1, 1.0, 1.0),)), Configuration({}))
    with pytest.raises(TuneError, match="cannot write"):
        write_export(tmp_path / "none" / "x.onnx", lenet, network, some)

"""Models cut before their layers: what comes out is what the whole graph gives with every operand rounded."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.models.onnx_graphs import F16, graph, node, tensor
from tests.tuning.onnx_nets import (
    CLASSES,
    NETS,
    chain,
    draw,
    model_of,
    outputs_by_twin,
    residual,
    samples,
    save,
    tangle,
)
from weft.base.errors import ModelError, TuneError
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import EXP, FIXED, FLOAT
from weft_tune.quantised.opened import make_plan, open_for_tuning
from weft_tune.quantised.runner import LayerFormats, PlanRunner, SampleOrder

COUNT = 11
FORMATS = (FIXED(5, -1), EXP(4, 7), FLOAT(6), FIXED(3), FLOAT(32))


def run(opened, layers, configuration, inputs, cache_bytes=1 << 20):
    plan = make_plan(opened, layers, inputs)
    runner = PlanRunner(plan, cache_bytes)
    runner.add("all", SampleOrder(inputs, np.arange(COUNT)))
    formats = {
        layer.name: LayerFormats(configuration[f"{layer.name}.weight"], configuration[f"{layer.name}.input"])
        for layer in layers
    }
    return np.concatenate(runner.run("all", formats, range(-(-COUNT // plan.batch))))


@pytest.fixture(params=NETS)
def net(request, tmp_path):
    model = NETS[request.param]()
    return open_for_tuning(save(model, tmp_path)), samples(model, COUNT)


def by_twin(opened, configuration, inputs):
    """In batches of the size that the model takes."""
    batch = opened.fixed_batch or COUNT
    parts = []
    for start in range(0, COUNT, batch):
        rows = np.minimum(np.arange(start, start + batch), COUNT - 1)
        parts.append(outputs_by_twin(opened, configuration, {name: each[rows] for name, each in inputs.items()}))
    return np.concatenate(parts)[:COUNT]


def test_without_formats_the_pieces_give_what_the_whole_model_gives(net):
    opened, inputs = net
    found = run(opened, opened.layers, Configuration({}), inputs)
    assert np.allclose(found, by_twin(opened, Configuration({}), inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_every_layer_sees_its_own_rounded_operands(net, seed):
    opened, inputs = net
    rng = np.random.default_rng(seed)
    objects = [f"{layer.name}.{role}" for layer in opened.layers for role in ("weight", "input")]
    configuration = Configuration({name: FORMATS[rng.integers(len(FORMATS))] for name in objects})
    found = run(opened, opened.layers, configuration, inputs)
    assert np.allclose(found, by_twin(opened, configuration, inputs), rtol=1e-4, atol=1e-5)
    assert not np.allclose(found, by_twin(opened, Configuration({}), inputs), rtol=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_any_graph_without_cycles_can_be_cut(tmp_path, seed):
    model = tangle(seed)
    opened, inputs = open_for_tuning(save(model, tmp_path)), samples(model, COUNT)
    rng = np.random.default_rng(seed)
    chosen = [layer for layer in opened.layers if rng.random() < 0.7] or list(opened.layers)
    objects = [f"{layer.name}.{role}" for layer in chosen for role in ("weight", "input")]
    configuration = Configuration({name: FORMATS[rng.integers(len(FORMATS))] for name in objects})
    found = run(opened, chosen, configuration, inputs)
    assert np.allclose(found, by_twin(opened, configuration, inputs), rtol=1e-4, atol=1e-5)


def test_only_the_chosen_layers_are_cut_out(tmp_path):
    model = residual()
    opened, inputs = open_for_tuning(save(model, tmp_path)), samples(model, COUNT)
    chosen = [layer for layer in opened.layers if layer.name in ("depth", "fc")]
    configuration = Configuration({"depth.input": FIXED(3), "fc.weight": FIXED(4)})
    assert len(make_plan(opened, chosen, inputs).stages) == 3  # what comes before, and one for each
    assert np.allclose(
        run(opened, chosen, configuration, inputs), by_twin(opened, configuration, inputs), rtol=1e-4, atol=1e-5
    )


def test_a_tensor_that_several_layers_read_is_rounded_for_each_alone(tmp_path):
    """left and depth read the same tensor as the sum does; only left gets it rounded to nothing."""
    model = residual()
    opened, inputs = open_for_tuning(save(model, tmp_path)), samples(model, COUNT)
    nothing = Configuration({"left.input": FIXED(2, -20)})  # all values are below half a step
    weightless = Configuration({"left.weight": FIXED(2, -20)})
    assert np.allclose(
        run(opened, opened.layers, nothing, inputs), run(opened, opened.layers, weightless, inputs), atol=1e-6
    )


def test_batches_are_no_larger_than_the_model_allows(tmp_path):
    """The free batch is a lie: the graph reshapes to one row."""
    weights = {"fc.weight": draw(1, 4, CLASSES), "shape": np.array([1, 4], np.int64)}
    nodes = [node("Reshape", ["x", "shape"], ["r"]), node("Gemm", ["r", "fc.weight"], ["y"])]
    model = model_of(nodes, [tensor("x", "n", 4)], [tensor("y", "n", CLASSES)], weights)
    opened, inputs = open_for_tuning(save(model, tmp_path)), samples(model, COUNT)
    assert make_plan(opened, opened.layers, inputs).batch == 1
    assert run(opened, opened.layers, Configuration({}), inputs).shape == (COUNT, CLASSES)


def test_large_tensors_make_small_batches(tmp_path):
    side = 512  # 8 channels of 1 MiB each fill a batch
    weights = {"c.weight": draw(1, 8, 1, 1, 1), "f.weight": draw(2, 8, CLASSES)}
    nodes = [
        node("Conv", ["x", "c.weight"], ["a"]),
        node("GlobalAveragePool", ["a"], ["p"]),
        node("Flatten", ["p"], ["q"]),
        node("Gemm", ["q", "f.weight"], ["y"]),
    ]
    model = model_of(nodes, [tensor("x", "n", 1, side, side)], [tensor("y", "n", CLASSES)], weights)
    opened = open_for_tuning(save(model, tmp_path))
    assert make_plan(opened, opened.layers, samples(model, 3)).batch == 1


def test_only_what_the_chosen_output_needs_is_kept(tmp_path):
    model = chain()
    model.graph.output.append(tensor("d", "n", 96))
    path = save(model, tmp_path)
    assert [layer.name for layer in open_for_tuning(path).layers] == ["conv1", "conv2", "fc"]
    assert [layer.name for layer in open_for_tuning(path, "d").layers] == ["conv1", "conv2"]
    with pytest.raises(TuneError, match="unknown output 'z'"):
        open_for_tuning(path, "z")


def test_layers_are_called_the_same_whichever_output_is_scored(tmp_path):
    weights = {"1": draw(1, 4, CLASSES), "2": draw(2, 4, CLASSES)}
    nodes = [node("MatMul", ["x", "1"], ["y"]), node("MatMul", ["x", "2"], ["z"]), node("Relu", ["x"], ["r"])]
    outputs = [tensor(name, "n", CLASSES) for name in "yz"]
    path = save(model_of(nodes, [tensor("x", "n", 4)], [*outputs, tensor("r", "n", 4)], weights), tmp_path)
    assert [[layer.name for layer in open_for_tuning(path, name).layers] for name in "yz"] == [["fc1"], ["fc2"]]
    with pytest.raises(TuneError, match="no layer to tune: output 'r' needs none that has weights"):
        open_for_tuning(path, "r")


def test_weights_may_lie_beside_the_file(tmp_path):
    model = chain()
    inputs = samples(model, COUNT)
    whole = open_for_tuning(save(model, tmp_path))
    onnx.save(model, tmp_path / "parts.onnx", save_as_external_data=True, location="parts.bin", size_threshold=0)
    parts = open_for_tuning(tmp_path / "parts.onnx")
    assert parts.digest == whole.digest
    found = [run(each, each.layers, Configuration({"fc.weight": FIXED(4)}), inputs) for each in (whole, parts)]
    assert np.array_equal(*found)


def test_control_flow_is_refused(tmp_path):
    branch = [graph([node("Identity", ["y0"], [name])], [], [name]) for name in ("yes", "no")]
    model = chain()
    model.graph.node[-1].output[0] = "y0"
    model.graph.initializer.append(helper.make_tensor("go", 9, [], [True]))
    model.graph.node.append(node("If", ["go"], ["y"], then_branch=branch[0], else_branch=branch[1]))
    with pytest.raises(TuneError, match=r"net\.onnx: has control flow \(If\), so it cannot be cut between its layers"):
        open_for_tuning(save(model, tmp_path))


def test_half_precision_is_refused(tmp_path):
    weights = {"fc.weight": draw(1, 4, CLASSES).astype(np.float16)}
    nodes = [node("Gemm", ["x", "fc.weight"], ["y"])]
    model = model_of(nodes, [tensor("x", "n", 4, dtype=F16)], [tensor("y", "n", CLASSES, dtype=F16)], weights)
    with pytest.raises(TuneError, match="layer 'fc' has weights of type float16; convert the model to float32"):
        open_for_tuning(save(model, tmp_path))


def test_files_that_are_no_models_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"nothing\.onnx: there is no such file"):
        open_for_tuning(tmp_path / "nothing.onnx")
    (tmp_path / "junk.onnx").write_bytes(b"junk" * 30)
    with pytest.raises(ModelError, match=r"junk\.onnx: cannot be loaded"):
        open_for_tuning(tmp_path / "junk.onnx")

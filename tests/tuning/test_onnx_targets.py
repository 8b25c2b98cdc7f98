"""The layers of a model: their names, their sizes worked by hand, and groups of them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper

from tests.models.onnx_graphs import node, tensor
from tests.tuning.onnx_nets import CLASSES, chain, draw, model_of, residual, samples, save, tokens
from weft.base.errors import TuneError
from weft_tune.quantised.opened import find_targets
from weft_tune.weighted_layers import find_layers, load_flat


@pytest.fixture
def found(tmp_path):
    def find(model, **options):
        network = find_targets(save(model, tmp_path), samples(model, 20), **options)
        return {target.name: target for target in network.targets}

    return find


def test_counts_of_a_chain(found):
    targets = found(chain())
    assert list(targets) == ["conv1", "conv2", "fc"]
    assert [t.weights for t in targets.values()] == [4 * 9, 6 * 4 * 9, CLASSES * 96]
    assert [t.inputs for t in targets.values()] == [64, 4 * 36, 96]
    assert [t.macs for t in targets.values()] == [4 * 36 * 9, 6 * 16 * 4 * 9, CLASSES * 96]


def test_counts_of_grouped_and_transposed_convolutions(found):
    targets = found(residual())
    assert targets["depth"].macs == 4 * 64 * 9  # each channel sees one
    assert targets["up"].macs == 8 * 64 * 2 * 4  # every value that enters goes to two channels of 2 x 2
    assert targets["up"].weights == 8 * 2 * 4 and targets["up"].inputs == 8 * 64


def test_counts_of_products_in_three_dimensions(found):
    targets = found(tokens())
    assert list(targets) == ["up", "down", "head"]
    assert (targets["up"].inputs, targets["up"].macs) == (7 * 6, 7 * 6 * 8)
    assert (targets["down"].inputs, targets["down"].macs) == (7 * 8, 7 * 8 * 6)
    assert (targets["head"].inputs, targets["head"].macs) == (6, 6 * CLASSES)


def test_a_fixed_batch_does_not_change_the_counts(found):
    free, fixed = found(chain()), found(chain(8))
    assert [t.inputs for t in free.values()] == [t.inputs for t in fixed.values()]
    assert [t.input_max for t in fixed.values()] == pytest.approx([t.input_max for t in free.values()])


def test_magnitudes_are_those_of_weights_and_samples(found):
    model = chain()
    targets = found(model)
    assert targets["conv1"].input_max == np.abs(samples(model, 20)["x"]).max()
    assert targets["conv1"].weight_max == np.abs(draw(1, 4, 1, 3, 3)).max()


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (None, ["conv1", "conv2", "fc"]),
        ("conv", ["conv1", "conv2"]),
        ("fc", ["fc"]),
        (["fc", "conv1"], ["conv1", "fc"]),
        ("conv*", ["conv1", "conv2"]),
        ("*2", ["conv2"]),
    ],
)
def test_layers_are_chosen_by_name_pattern_or_kind(found, layers, names):
    assert list(found(chain(), layers=layers)) == names


def test_unknown_layers_are_named(found):
    with pytest.raises(TuneError, match="unknown layer 'conv3'; did you mean conv2 or conv1"):
        found(chain(), layers=["conv3"])


def test_branches_are_summed(found):
    alone = found(residual())
    joined = found(residual(), groups={"block": ["depth", "left"]})
    block = joined["block"]
    assert list(joined) == ["stem", "block", "up", "fc"] and block.branches == ("left", "depth")
    assert block.weights == alone["left"].weights + alone["depth"].weights
    assert block.macs == alone["left"].macs + alone["depth"].macs
    assert block.weight_max == max(alone["left"].weight_max, alone["depth"].weight_max)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"b": ["lefd"]}, "group 'b': unknown layer 'lefd'; did you mean left"),
        ({"b": ["left"], "c": ["left"]}, "layer 'left' is in the groups 'b' and 'c'"),
        ({"b": []}, "group 'b' has no layer"),
    ],
)
def test_groups_that_make_no_sense(found, groups, message):
    with pytest.raises(TuneError, match=message):
        found(residual(), groups=groups)


def named(tmp_path, *layers):
    """Matrix products in a row: (name of the weight, name of the node)."""
    weights = {weight: draw(at, CLASSES, CLASSES) for at, (weight, _) in enumerate(layers)}
    nodes = [node("MatMul", [f"t{at}", weight], [f"t{at + 1}"], name=name) for at, (weight, name) in enumerate(layers)]
    model = model_of(nodes, [tensor("t0", "n", CLASSES)], [tensor(f"t{len(layers)}", "n", CLASSES)], weights)
    return [layer.name for layer in find_layers(load_flat(save(model, tmp_path)))]


def test_names_come_from_weights_then_nodes_then_operators(tmp_path):
    assert named(
        tmp_path,
        ("block.0.fc1.weight", "/x/MatMul"),
        ("dense/kernel:0", ""),
        ("onnx::MatMul_17", "/block.1/fc2/MatMul"),
        ("19", ""),
        ("20", ""),
    ) == ["block.0.fc1", "dense", "block.1/fc2", "fc1", "fc2"]


def test_names_fit_into_a_text_file_and_are_unique(tmp_path):
    assert named(tmp_path, ("a b#c.weight", ""), ("x//y.weight", ""), ("1", "same"), ("2", "same")) == [
        "a_b_c",
        "x/y",
        "same",
        "same_2",
    ]


def test_a_weight_that_two_layers_share_is_tuned_for_each(found):
    weights = {"w.weight": draw(1, CLASSES, CLASSES)}
    nodes = [node("MatMul", ["x", "w.weight"], ["h"]), node("MatMul", ["h", "w.weight"], ["y"])]
    model = model_of(nodes, [tensor("x", "n", CLASSES)], [tensor("y", "n", CLASSES)], weights)
    assert list(found(model)) == ["w", "w_2"]


def test_weights_in_constant_nodes_are_found(found):
    constant = numpy_helper.from_array(draw(1, CLASSES, CLASSES))
    nodes = [
        node("Constant", [], ["w.weight"], value=constant),
        node("Identity", ["w.weight"], ["same"]),
        node("MatMul", ["x", "same"], ["y"]),
    ]
    model = model_of(nodes, [tensor("x", "n", CLASSES)], [tensor("y", "n", CLASSES)], {})
    assert found(model)["w"].weights == CLASSES**2


def test_products_of_two_inputs_are_no_layers(found):
    nodes = [node("Transpose", ["x"], ["t"], perm=[1, 0]), node("MatMul", ["x", "t"], ["y"])]
    model = model_of(nodes, [tensor("x", "n", CLASSES)], [tensor("y", "n", "n")], {})
    with pytest.raises(
        TuneError, match=r"no layer to tune: .* has constant weights; the operators are MatMul, Transpose"
    ):
        found(model)


def test_products_of_whole_numbers_are_no_layers(found):
    weights = {"w.weight": draw(1, CLASSES, CLASSES), "i.weight": np.eye(CLASSES, dtype=np.int32)}
    nodes = [
        node("MatMul", ["x", "w.weight"], ["h"]),
        node("Cast", ["h"], ["c"], to=6),
        node("MatMul", ["c", "i.weight"], ["i"]),
        node("Cast", ["i"], ["y"], to=1),
    ]
    model = model_of(nodes, [tensor("x", "n", CLASSES)], [tensor("y", "n", CLASSES)], weights)
    assert list(found(model)) == ["w"]


def test_a_damaged_weight_is_named():
    model = chain()
    model.graph.initializer[0].dims[0] = 127
    with pytest.raises(TuneError, match=r"weight 'conv1\.weight' cannot be read: "):
        find_layers(model)


def test_inputs_that_are_no_numbers_are_told(found):
    """A root of something negative, on the way."""
    weights = {"w.weight": draw(1, CLASSES, CLASSES)}
    nodes = [node("Sqrt", ["x"], ["s"]), node("MatMul", ["s", "w.weight"], ["y"])]
    model = model_of(nodes, [tensor("x", "n", CLASSES)], [tensor("y", "n", CLASSES)], weights)
    with pytest.raises(TuneError, match="NaN or infinity enters layer 'w'"):
        found(model)


def test_functions_are_looked_into(found):
    model = chain()
    body = helper.make_function(
        "own", "F", ["x", "w"], ["y"], [node("MatMul", ["x", "w"], ["y"])], [helper.make_opsetid("", 17)]
    )
    weights = {"f.weight": draw(1, CLASSES, CLASSES)}
    model = model_of(
        [node("F", ["x", "f.weight"], ["y"], domain="own")],
        [tensor("x", "n", CLASSES)],
        [tensor("y", "n", CLASSES)],
        weights,
    )
    model.functions.append(body)
    model.opset_import.append(helper.make_opsetid("own", 1))
    assert list(found(model)) == ["f"]

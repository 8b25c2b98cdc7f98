"""Generated weight-shared models: what is planted is there, nothing else is, and sizes are those of the papers."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.stitching.nets import TINY, images, macs, run, tiny
from weft.base.errors import StitchError
from weft_stitch.family import wire
from weft_stitch.making.architectures import ARCHITECTURES, plan
from weft_stitch.making.generator import FamilyRecipe, generate, save_nets
from weft_stitch.reading.alignment import align


def parameters(net):
    return sum(op.weight.size for op in net.ops if op.weight is not None)


def rows_and_columns(recipe, op, task, tasks):
    """The channels a convolution of *task* writes and reads that all of *tasks* have, in the blocks' order."""

    def members(value):
        start = 0
        for space in (recipe.planted[name] for name in recipe.plan.carries[value]):
            common = [block.members[task] + start for block in space.blocks if tasks <= block.tasks]
            yield np.concatenate([*common, np.zeros(0, int)]).astype(int)
            start += space.widths[task]

    return np.concatenate(list(members(op.output))), np.concatenate(list(members(op.inputs[0])))


def common_part(recipe, nets, number, task, tasks):
    op = nets[task].ops[number]
    rows, columns = rows_and_columns(recipe, op, task, tasks)
    return op.weight[rows] if op.depthwise else op.weight[rows][:, columns]


@pytest.mark.parametrize("architecture", TINY)
def test_what_is_planted_is_equal_bit_for_bit_and_the_rest_is_not(architecture):
    recipe = FamilyRecipe(
        architecture, 4, pruning=0.3, sharing=0.6, clusters=[(0, 1), (1, 2, 3)], widths=[1, 1.2, 1, 0.9]
    )
    nets = list(recipe.nets())
    convs = [number for number, op in enumerate(nets[0].ops) if op.kind == "conv"]
    for number, (one, two) in itertools.product(convs, itertools.combinations(range(4), 2)):
        mine = common_part(recipe, nets, number, one, {one, two})
        theirs = common_part(recipe, nets, number, two, {one, two})
        assert mine.size or nets[0].ops[number].output == recipe.plan.output.removesuffix(".bias")
        np.testing.assert_array_equal(mine, theirs)
        both = np.intersect1d(nets[one].ops[number].weight, nets[two].ops[number].weight)
        assert len(both) - len(np.unique(mine)) <= 2  # float32 is coarse enough for a coincidence


@pytest.mark.parametrize("architecture", TINY)
@pytest.mark.parametrize("norm", ["per_task", "shared", "folded"])
def test_normalisations_agree_on_shared_channels_unless_they_are_per_task(architecture, norm):
    recipe = FamilyRecipe(architecture, 2, sharing=0.5, norm=norm, seed=3)
    nets = list(recipe.nets())
    for ours, theirs in zip(*(net.ops for net in nets), strict=True):
        if ours.kind != "affine" or recipe.plan.output == ours.output:
            continue
        start = 0
        for space in (recipe.planted[name] for name in recipe.plan.carries[ours.output]):
            mine, other = (space.blocks[0].members[task] + start for task in (0, 1))
            assert (ours.shift[mine] == theirs.shift[other]).all() == (norm != "per_task")
            start += space.widths[0]
        if norm == "folded" or "norm" not in ours.name:
            assert (ours.scale == 1).all()
        else:
            assert 0.7 <= ours.scale.min() < ours.scale.max() <= 1.3


def test_one_model_does_not_depend_on_the_others():
    every = generate("tinynet", 3, seed=5).nets
    alone = FamilyRecipe("tinynet", 3, seed=5).net(2)
    for ours, theirs in zip(every[2].ops, alone.ops, strict=True):
        assert ours.weight is theirs.weight is None or (ours.weight == theirs.weight).all()
    other = FamilyRecipe("tinynet", 3, seed=6).net(2)
    assert not (other.ops[0].weight == alone.ops[0].weight).any()


def test_channels_lie_in_another_order_in_each_task_unless_told_otherwise():
    moved, kept = (generate("tinynet", 2, sharing=0.8, permute=permute).planted for permute in (True, False))
    first, own, *_ = kept["stem.conv"].blocks
    assert [list(first.members[task]) for task in (0, 1)] == [list(range(16))] * 2
    assert list(own.members[0]) == [16, 17, 18, 19]
    assert list(moved["stem.conv"].order(0)) != list(moved["stem.conv"].order(1)) != list(range(20))


def test_spaces_are_shared_where_they_can_be():
    recipe = FamilyRecipe("tinynet", 3, sharing=0.7, classes=[2, 3, 4])
    widths = {name: (space.shared_width, space.widths) for name, space in recipe.planted.spaces.items()}
    assert widths == {
        "image": (3, (3, 3, 3)),
        "stem.conv": (14, (20, 20, 20)),
        "block1.1.conv": (14, (20, 20, 20)),
        "block2.1.conv": (28, (40, 40, 40)),
        "block2.2.conv": (28, (40, 40, 40)),
        "fc": (0, (2, 3, 4)),
    }
    assert recipe.plan.carries["block1.2.conv"] == recipe.plan.carries["stem.conv"] == ("stem.conv",)
    assert recipe.plan.carries["block2.project.conv"] == ("block2.2.conv",)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_planted_spaces_are_those_that_the_models_have(architecture):
    found = generate(architecture, 2, pruning=0.8, resolution=32, widths=[1, 1.5], classes=[3, 4])
    wiring = wire(align(found.nets))
    assert wiring.widths == {name: space.widths for name, space in found.planted.spaces.items()}


@pytest.mark.parametrize(
    ("ratio", "multiple", "shared"),
    [(0.9, 1, 18), (0.9, 8, 16), (0.8, 3, 15), (1.0, 8, 16), (1.0, 12, 12), (0.0, 1, 0), (1, 64, 20)],
)
def test_shared_widths_round_to_a_multiple_that_fits(ratio, multiple, shared):
    assert FamilyRecipe("tinynet", 2, sharing=ratio, multiple=multiple).planted["stem.conv"].shared_width == shared


def test_sharing_may_differ_by_space_and_width_by_task():
    by_name = FamilyRecipe("tinynet", 2, sharing={"stem.conv": 0.5}, widths=[1, 0.5], pruning=0.2)
    assert by_name.planted["stem.conv"].widths == (16, 8)
    assert by_name.planted["stem.conv"].shared_width == 4
    assert by_name.planted["block1.1.conv"].shared_width == 7
    by_rule = FamilyRecipe("tinynet", 2, sharing=lambda space: 1.0 if space.startswith("stem") else 0.0)
    assert [by_rule.planted[name].shared_width for name in ("stem.conv", "block2.1.conv")] == [20, 0]


def test_clusters_share_what_is_left():
    space = FamilyRecipe("tinynet", 4, sharing=0.5, clusters=[(0, 1), (2, 3)], cluster_sharing=0.6).planted["stem.conv"]
    assert [(sorted(block.tasks), block.width) for block in space.blocks] == [
        ([0, 1, 2, 3], 10), ([0, 1], 6), ([2, 3], 6), ([0], 4), ([1], 4), ([2], 4), ([3], 4)
    ]  # fmt: skip


@pytest.mark.parametrize("architecture", TINY)
@pytest.mark.parametrize("norm", ["per_task", "folded"])
def test_answers_are_of_order_one_and_depend_on_the_picture(architecture, norm):
    found = tiny(architecture, norm=norm, batches=[8, 8, 8])
    for net, pictures in zip(found.nets, images(found.nets), strict=True):
        (answers,) = run(net, pictures)
        assert answers.shape == (8, net.outputs[0].shape[0])
        assert 0.05 < answers.std() < 5
        assert answers.std(0).min() > 1e-3


@pytest.mark.parametrize(
    ("architecture", "pruning", "resolution"),
    [("resnet18", 0.9, 64), ("resnet50", 0.75, 64), ("vgg16", 0.9, 32), ("mobilenet", 0.5, 64)],
)
def test_answers_of_deep_networks_are_of_order_one_too(architecture, pruning, resolution):
    net = FamilyRecipe(architecture, 2, pruning=pruning, resolution=resolution, classes=50).net(1)
    (answers,) = run(net, *images((net,)))
    assert 0.1 < answers.std() < 10


@pytest.mark.parametrize(
    ("architecture", "pruning", "classes", "mmacs", "millions"),
    [
        ("resnet18", 0.0, 1000, 1814, 11.68),
        ("resnet18", 0.9, 10, 27.6, 0.113),
        ("resnet50", 0.0, 1000, 4089, 25.50),
        ("vgg16", 0.9, 10, 161, 1.34),
        ("mobilenet", 0.0, 1000, 217, 5.45),
    ],
)
def test_sizes_are_those_of_the_networks_they_are_named_after(architecture, pruning, classes, mmacs, millions):
    net = FamilyRecipe(architecture, 1, pruning=pruning, classes=classes).net(0)
    assert macs(net) / 1e6 == pytest.approx(mmacs, rel=0.01)
    assert parameters(net) / 1e6 == pytest.approx(millions, rel=0.01)


def test_the_first_dense_layer_of_vgg_reads_the_whole_picture():
    (net,) = generate("vgg16", 1, pruning=0.9, classes=10).nets
    assert {op.name: op.weight.shape for op in net.ops if op.name in ("fc1", "fc2")} == {
        "fc1": (410, 51, 7, 7), "fc2": (410, 410, 1, 1)
    }  # fmt: skip


@pytest.mark.parametrize("architecture", TINY)
def test_saved_models_answer_the_same(architecture, tmp_path):
    found = tiny(architecture, batches=[1, 2, 1])
    for net, path, pictures in zip(found.nets, save_nets(found.nets, tmp_path), images(found.nets), strict=True):
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (answers,) = session.run(["logits"], {"image": pictures})
        np.testing.assert_allclose(answers, run(net, pictures)[0], atol=1e-5)


def test_saved_models_hold_every_weight_as_it_is(tmp_path):
    found = tiny("tinynet")
    for net, path in zip(found.nets, save_nets(found.nets, tmp_path), strict=True):
        stored = {onnx.numpy_helper.to_array(each).tobytes() for each in onnx.load(path).graph.initializer}
        assert {op.weight.tobytes() for op in net.ops if op.kind == "conv"} <= stored


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"architecture": "resnet19"}, "unknown architecture 'resnet19'; did you mean resnet18"),
        ({"architecture": "nonsense"}, "unknown architecture 'nonsense'; known: resnet18, resnet50, vgg16, mobilenet"),
        ({"tasks": 0}, "0 tasks: give 1 or more"),
        ({"pruning": 1.0}, "pruning 1.0: give a part from 0 to below 1"),
        ({"multiple": 0}, "multiple 0: give 1 or more"),
        ({"norm": "batch"}, "norm is 'batch'; it may be per_task, shared or folded"),
        ({"widths": [1.0]}, "1 widths for 2 tasks"),
        ({"classes": [3, 4, 5]}, "classes are [3, 4, 5]; give 2 numbers"),
        ({"batches": 0}, "batches are [0, 0]"),
        ({"sharing": 1.5}, "a sharing of 1.5 is not from 0 to 1"),
        ({"sharing": {"stem": 0.5}}, "tinynet has no space stem; it has image, stem.conv"),
        ({"clusters": [(0, 2)]}, "a cluster of tasks 0, 2, but tasks go from 0 to 1"),
        ({"resolution": 1}, "a picture of 1 pixels ends before stem.pool"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(settings, words):
    with pytest.raises(StitchError) as caught:
        generate(**{"architecture": "tinynet", "tasks": 2, **settings})
    assert words in str(caught.value)


def test_activations_can_be_exchanged_but_gates_stay():
    functions = {node.function for node in plan("tiny-mobile", activation="Sigmoid").nodes if node.kind == "unary"}
    assert functions >= {"Sigmoid", "HardSigmoid"}
    net = generate("tinynet", 1, activation="Tanh").nets[0]
    assert {op.function for op in net.ops if op.kind == "unary"} == {"Tanh"}

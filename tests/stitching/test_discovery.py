"""Finding the channels that models share, and files that say so."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stitching.families import BLOCKS, Drawing, Planted, changed, family_of, pairs, plant, random_family, stored
from tests.stitching.nets import TINY, tiny
from weft.base.errors import StitchError
from weft_stitch.discovery import discover
from weft_stitch.discovery.comparison import verify
from weft_stitch.discovery.partition import NONE, Partition
from weft_stitch.family import Block, ChannelSpace, Family, Sharing, wire
from weft_stitch.net import Op
from weft_stitch.reading.alignment import align
from weft_stitch.sharing_map import read_sharing, write_sharing


@st.composite
def families(draw, **settings):
    """A random family with residual blocks, concatenations and gates, and with subsets of tasks that share more."""
    tasks = draw(st.integers(2, 4))
    some = st.lists(st.integers(0, tasks - 1), min_size=2, max_size=tasks, unique=True)
    return random_family(
        draw(st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=4)),
        tasks,
        draw(st.integers(0, 2**20)),
        ratio=draw(st.sampled_from([0.3, 0.6, 0.9])),
        clusters=draw(st.lists(some, max_size=2)),
        **settings,
    )


def random_weights(name: str, task: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([task, len(name), *name.encode()]).standard_normal(shape, np.float32)


def same_weights(name: str, task: int, shape: tuple[int, ...]) -> np.ndarray:
    return random_weights(name, 0, shape)


def residual_net(tasks: int) -> Drawing:
    drawing = Drawing([3] * tasks)
    stem = drawing.add("conv", "image", width=[6] * tasks, kernel=3)
    inner = drawing.add("conv", drawing.add("affine", stem), width=[4] * tasks, kernel=3)
    total = drawing.add("add", stem, drawing.add("conv", inner, width=[6] * tasks))
    drawing.add("conv", drawing.add("global_pool", total), width=[5] * tasks)
    return drawing


@settings(max_examples=20)
@given(families())
def test_all_that_was_planted_is_found(planted: Planted):
    found = discover(planted.family)
    verify(planted.family, found)
    assert pairs(planted.sharing) <= pairs(found)


@settings(max_examples=15)
@given(families(zeros=0.15))
def test_pruned_filters_do_not_mislead(planted: Planted):
    found = discover(planted.family)
    verify(planted.family, found)
    assert stored(planted.family, found) <= stored(planted.family, planted.sharing)


@pytest.mark.parametrize("tolerance", [1e-3, 0.3, 3.0])
def test_a_larger_tolerance_finds_no_less(tolerance):
    (net,) = tiny(tasks=1).nets
    rng = np.random.default_rng(0)

    def shake(op: Op) -> Op:
        if op.weight is None:
            return op
        return replace(op, weight=(op.weight + rng.uniform(-5e-4, 5e-4, op.weight.shape)).astype(np.float32))

    family = align([net, replace(net, name="copy", ops=tuple(map(shake, net.ops)))])
    found = discover(family, tolerance=tolerance)
    same = {(space, 0, channel, 1, channel) for space, *_ in pairs(found) for channel in range(found[space].widths[0])}
    assert pairs(found) == same and set(wire(family).widths) == {space for space, *_ in same}


@settings(max_examples=15)
@given(families(misleading=0.5))
def test_channels_that_only_look_shared_at_first_do_not_mislead(planted: Planted):
    found = discover(planted.family)
    verify(planted.family, found)
    assert stored(planted.family, found) <= stored(planted.family, planted.sharing)


@settings(max_examples=12)
@given(families(), st.integers(0, 2**20))
def test_noise_within_the_tolerance_is_passed_over(planted: Planted, seed: int):
    rng = np.random.default_rng(seed)

    def shake(task: int, op: Op) -> Op:
        if op.weight is None:
            return op
        return replace(op, weight=(op.weight + rng.uniform(-4e-6, 4e-6, op.weight.shape)).astype(np.float32))

    family = changed(planted.family, shake)
    found = discover(family, tolerance=1e-5)
    verify(family, found, tolerance=1e-5)
    assert pairs(planted.sharing) <= pairs(found)
    assert {space for space, *_ in pairs(discover(family))} == {"image"}


@pytest.mark.parametrize("architecture", TINY)
@pytest.mark.parametrize("clusters", [None, [[0, 1], [1, 2, 3]]])
def test_all_that_was_generated_is_found(architecture, clusters):
    generated = tiny(architecture, 4, clusters=clusters, widths=[1, 1.2, 1, 0.9])
    family = align(generated.nets)
    found = discover(family)
    verify(family, found)
    assert pairs(generated.planted) <= pairs(found)


def test_one_model_shares_with_nobody():
    found = discover(residual_net(1).family(random_weights))
    assert all(space.stitched_width == space.widths[0] and len(space.blocks) == 1 for space in found.spaces.values())


def test_models_that_are_the_same_share_everything():
    found = discover(residual_net(3).family(same_weights))
    assert all(space.shared_width == space.widths[0] for space in found.spaces.values())


def test_filters_that_are_all_the_same_are_matched_in_order():
    family = residual_net(3).family(lambda name, task, shape: np.ones(shape, np.float32))
    assert all(space.shared_width == space.widths[0] for space in discover(family).spaces.values())


def test_models_with_nothing_in_common_share_their_input_alone():
    found = discover(residual_net(3).family(random_weights))
    assert {name: space.shared_width for name, space in found.spaces.items() if space.shared_width} == {"image": 3}


def test_inputs_of_different_channels_are_not_shared():
    drawing = Drawing([3, 1])
    drawing.add("conv", "image", width=[4, 4])
    found = discover(drawing.family(random_weights))
    assert all(len(block.tasks) == 1 for space in found.spaces.values() for block in space.blocks)


def test_a_difference_of_one_bit_is_seen():
    def nudge(task: int, op: Op) -> Op:
        if task != 1 or op.weight is None or op.name != "conv0":
            return op
        weight = op.weight.copy()
        weight[2, 1, 0, 0] = np.nextafter(weight[2, 1, 0, 0], np.float32(9))
        return replace(op, weight=weight)

    family = changed(residual_net(2).family(same_weights), nudge)
    lost = pairs(discover(residual_net(2).family(same_weights))) - pairs(discover(family))
    assert lost == {("conv0", 0, 2, 1, 2)}
    assert len(pairs(discover(family, tolerance=1e-6))) == len(lost) + len(pairs(discover(family)))


def test_signs_count_but_not_that_of_zero():
    def flip(task: int, op: Op) -> Op:
        if task == 0 or op.weight is None:
            return op
        weight = op.weight.copy()
        weight[0] = -weight[0]
        weight[weight == 0] = -0.0
        return replace(op, weight=weight)

    def weigh(name: str, task: int, shape: tuple[int, ...]) -> np.ndarray:
        weight = np.where(same_weights(name, task, shape) > 0, np.float32(1), np.float32(-1))
        weight[:, 0, 0, 0] = 0
        return weight

    drawing = Drawing([3, 3])
    drawing.add("conv", "image", width=[8, 8], kernel=3)
    found = discover(changed(drawing.family(weigh), flip))
    assert found["conv0"].shared_width == 7


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_number_formats(dtype):
    family = changed(
        residual_net(2).family(same_weights),
        lambda task, op: op if op.weight is None else replace(op, weight=op.weight.astype(dtype)),
    )
    assert all(space.shared_width == space.widths[0] for space in discover(family).spaces.values())


def test_weights_that_are_not_numbers_are_compared_too():
    def spoil(task: int, op: Op) -> Op:
        if op.name != "conv0" or op.weight is None:
            return op
        weight = op.weight.copy()
        weight[1, 0, 0, 0], weight[2, 0, 0, 0], weight[3, 0, 0, 0] = np.nan, np.inf, np.inf if task else -np.inf
        return replace(op, weight=weight)

    family = changed(residual_net(2).family(same_weights), spoil)
    assert {space.shared_width for space in discover(family).spaces.values()} == {3, 4, 5}
    assert discover(family, tolerance=1e-3)["conv0"].shared_width in (4, 5)


def test_depthwise_filters_of_the_input_may_differ_within_the_tolerance():
    drawing = Drawing([3, 3])
    drawing.add("depthwise", "image", kernel=3)
    family = drawing.family(lambda name, task, shape: same_weights(name, 0, shape) + np.float32(task * 1e-5))
    assert discover(family)["image"].shared_width == 0
    assert discover(family, tolerance=1e-4)["image"].shared_width == 3


def test_channels_behind_islands_and_grouped_convolutions_are_each_tasks_own():
    drawing = Drawing([4, 4])
    drawing.add("conv", "image", width=[4, 4])

    def group(task: int, op: Op) -> Op:
        return replace(op, weight=op.weight[:, :2], groups=2)

    found = discover(changed(drawing.family(same_weights), group))
    assert found["conv0"].shared_width == 0


def test_progress_is_told_to_the_end():
    told: list[tuple[int, int]] = []
    discover(residual_net(2).family(same_weights), on_progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert told[-1][0] == told[-1][1]


@pytest.mark.parametrize("tolerance", [-1.0, float("nan")])
def test_a_tolerance_is_a_distance(tolerance):
    with pytest.raises(StitchError, match="give the largest difference of two weights, 0 for none"):
        discover(residual_net(2).family(same_weights), tolerance=tolerance)


# An oracle: all sharings of two tiny models


def all_matchings(one: int, two: int) -> list[ChannelSpace]:
    """Every way to share channels between two tasks."""
    found = []
    for count in range(min(one, two) + 1):
        for mine in itertools.combinations(range(one), count):
            for theirs in itertools.permutations(range(two), count):
                members = [[a, b] for a, b in zip(mine, theirs, strict=True)]
                members += [[a, NONE] for a in range(one) if a not in mine]
                members += [[NONE, b] for b in range(two) if b not in theirs]
                partition = Partition((one, two))
                partition.replace(np.array(members))
                found.append(partition.space())
    return found


def in_order(block: Block) -> bool:
    return len(block.tasks) == 1 or np.array_equal(block.members[0], block.members[1])


def fits(layer, before: ChannelSpace, after: ChannelSpace) -> bool:
    """Whether the layer's weights agree where both ends are shared, and shared outputs have a shared input."""
    (ins,), (outs,) = ([b for b in space.blocks if len(b.tasks) == 2] or [None] for space in (before, after))
    if outs is None or ins is None:
        return outs is None
    first, second = (op.weight[np.ix_(outs.members[task], ins.members[task])] for task, op in enumerate(layer.ops))
    return np.array_equal(first, second)


def least_stored(family: Family) -> int:
    """The fewest weights that any sharing of the family leaves."""
    wiring = wire(family)
    choices = {space: all_matchings(*widths) for space, widths in wiring.widths.items()}
    choices["image"] = [space for space in all_matchings(3, 3) if all(map(in_order, space.blocks))]
    dense = [layer for layer in family.layers if layer.op.kind == "conv"]
    ends = [(wiring.carries[layer.inputs[0]][0], wiring.carries[layer.output][0]) for layer in dense]
    good = [
        np.array([[fits(layer, before, after) for after in choices[b]] for before in choices[a]])
        for layer, (a, b) in zip(dense, ends, strict=True)
    ]
    best = stored(family, Sharing({name: ChannelSpace.completed(widths) for name, widths in wiring.widths.items()}))
    for picked in itertools.product(*(range(len(each)) for each in choices.values())):
        at = dict(zip(choices, picked, strict=True))
        if all(table[at[a], at[b]] for table, (a, b) in zip(good, ends, strict=True)):
            best = min(best, stored(family, Sharing({name: choices[name][index] for name, index in at.items()})))
    return best


@settings(max_examples=10)
@given(st.integers(0, 2**20), st.sampled_from([0.3, 0.6]), st.sampled_from(["chain", "loop"]))
def test_no_sharing_stores_less_than_the_one_found(seed: int, ratio: float, shape: str):
    drawing = Drawing([3, 3])
    stem = drawing.add("conv", "image", width=[2, 3])
    inner = drawing.add("conv", stem, width=[3, 2])
    if shape == "loop":
        drawing.add("add", stem, drawing.add("conv", inner, width=[2, 3]))
    planted = plant(drawing, np.random.default_rng(seed), ratio=ratio, misleading=0.5)
    found = discover(planted.family)
    verify(planted.family, found)
    assert stored(planted.family, found) == least_stored(planted.family)


# Files


def named(family: Family, *names: str) -> Family:
    return family_of([replace(net, name=name) for net, name in zip(family.nets, names, strict=True)])


@pytest.fixture
def two() -> Family:
    return named(residual_net(2).family(same_weights), "cats", "dogs")


def test_a_sharing_is_read_as_it_was_written(tmp_path):
    planted = random_family(["residual", "dense", "excite"], 3, 4, clusters=[[0, 2]])
    found = discover(planted.family)
    write_sharing(tmp_path / "map.json", found, planted.family)
    assert pairs(read_sharing(tmp_path / "map.json", planted.family)) == pairs(found)
    lines = (tmp_path / "map.json").read_text().splitlines()
    blocks = sum(len(block.tasks) > 1 for space in found.spaces.values() for block in space.blocks)
    assert len(lines) <= blocks + len(found.spaces) + 3, "a block is on one line"


def written(tmp_path, spaces, version=1):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"format": version, "spaces": spaces}))
    return path


def test_a_file_need_not_say_everything(tmp_path, two):
    read = read_sharing(written(tmp_path, {"add4": [{"dogs": [5, 0], "cats": [5, 0]}]}), two)
    assert pairs(read) == {("conv0", 0, 5, 1, 5), ("conv0", 0, 0, 1, 0), *(("image", 0, c, 1, c) for c in range(3))}


def test_weights_that_are_not_the_same_are_named(tmp_path, two):
    path = written(tmp_path, {"conv0": [{"cats": [5, 1], "dogs": [5, 2]}]})
    with pytest.raises(
        StitchError, match="space conv0: channel 1 of cats and channel 2 of dogs are not the same in conv0"
    ):
        read_sharing(path, two)
    assert len(pairs(read_sharing(path, two, tolerance=100))) == 5


@pytest.mark.parametrize(
    ("spaces", "message"),
    [
        ({"conv00": []}, "unknown space 'conv00'; did you mean conv0"),
        ({"conv0": [], "add4": []}, "add4 is space conv0, which the file has already"),
        ({"conv0": {}}, "space conv0 is not a list of blocks"),
        ({"conv0": [{"bats": [1]}]}, "unknown model 'bats'; did you mean cats"),
        ({"conv0": [{"cats": [1], "dogs": [True]}]}, "the channels of dogs are not a list of whole numbers"),
        ({"conv0": [{"cats": [1], "dogs": [6]}]}, "dogs has channels 0 to 5, not 6"),
        ({"conv0": [{"cats": [1, 1], "dogs": [1, 2]}]}, "channel 1 of cats is listed twice"),
        ({"conv0": [{"cats": [1, 2], "dogs": [1]}]}, "as many channels in every model, but here cats 2, dogs 1"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, two, spaces, message):
    with pytest.raises(StitchError, match=message):
        read_sharing(written(tmp_path, spaces), two)


def test_other_files_are_refused(tmp_path, two):
    with pytest.raises(StitchError, match="not a sharing map"):
        read_sharing(written(tmp_path, {}, version=2), two)
    (tmp_path / "cats.onnx").write_bytes(b"\x08\xee")
    with pytest.raises(StitchError, match=r"cats\.onnx: not a JSON file: it is not text"):
        read_sharing(tmp_path / "cats.onnx", two)


def test_models_of_one_name_cannot_be_told_apart(tmp_path, two):
    twins = named(two, "cats", "cats")
    with pytest.raises(StitchError, match="two models are called cats"):
        write_sharing(tmp_path / "map.json", discover(two), twins)


def test_a_value_of_several_spaces_is_not_one(tmp_path):
    drawing = Drawing([3, 3])
    both = drawing.add("concat", "image", drawing.add("conv", "image", width=[4, 4]))
    with pytest.raises(StitchError, match=f"{both} carries several spaces; name one of image, conv0"):
        read_sharing(written(tmp_path, {both: []}), drawing.family(same_weights))


def test_a_sharing_of_other_models_is_refused(two):
    sharing = discover(two)
    with pytest.raises(StitchError, match="space conv0 is in the sharing or in the models, but not in both"):
        verify(two, Sharing({name: each for name, each in sharing.spaces.items() if name != "conv0"}))
    with pytest.raises(StitchError, match=r"conv0 has .7, 7. channels in the sharing"):
        verify(two, Sharing({**sharing.spaces, "conv0": ChannelSpace.common(7, 2)}))

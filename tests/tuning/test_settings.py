"""Points of the search space and the steps between them."""

from __future__ import annotations

import pytest

from weft_tune.network import Network, Target
from weft_tune.numbers.configuration import Configuration, parse_configuration
from weft_tune.numbers.format import EXP, FIXED
from weft_tune.platform import Unbiased, load_platform, parse_platform
from weft_tune.search_space import (
    MOST_RAISED,
    SearchSpace,
    TuningSetting,
    bias_moves,
    change_type,
    first_scale,
    narrowing_moves,
    space_of,
    type_moves,
    width_moves,
)

LENET = Network("lenet", (Target("conv1", 500, 784, 0.579, 0.996), Target("conv2", 25000, 2880, 0.165, 5.06)))
"""The chapter's example."""


def space(layerwise: str = "WGT-ONLY", platform: str = "fpga") -> SearchSpace:
    return space_of(LENET, load_platform(platform), layerwise)  # type: ignore[arg-type]


def uniform(kind: str, bits: int, layerwise: str = "WGT-ONLY") -> TuningSetting:
    return space(layerwise).uniform(lambda group: Unbiased(kind, bits))  # type: ignore[arg-type]


def test_biases_start_where_the_chapters_trace_does():
    found = space().configuration(uniform("FIXED", 3))
    text = "conv1.weight FIXED 3 0\nconv1.input FIXED 3 0\nconv2.weight FIXED 3 2\nconv2.input FIXED 3 -3"
    assert found == parse_configuration(text)


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(0.0, 0), (1.0, 0), (0.5, 1), (0.51, 0), (1.01, -1), (2.0, -1), (1e-30, 99), (3e38, -128), (2.0**-149, 149)],
)
def test_the_first_scale_just_holds_the_largest_value(largest, scale):
    assert first_scale(largest) == scale


@pytest.mark.parametrize(
    ("layerwise", "groups"),
    [
        ("WGT-ONLY", ["conv1.weight", "every input", "conv2.weight"]),
        ("ACT-ONLY", ["every weight", "conv1.input", "conv2.input"]),
        ("BOTH", ["conv1.weight", "conv1.input", "conv2.weight", "conv2.input"]),
        ("NONE", ["every weight", "every input"]),
    ],
)
def test_groups_share_type_and_width_but_every_object_has_its_bias(layerwise, groups):
    made = space(layerwise)
    assert [group.name for group in made.groups] == groups
    assert len(bias_moves(made, uniform("FIXED", 4, layerwise), 1)) == 4
    assert len(width_moves(made, uniform("FIXED", 4, layerwise), narrower=True)) == len(groups)


def test_branches_have_the_format_of_their_target():
    net = Network("branched", (Target("block", 10, 10, 1.0, 1.0, branches=("left", "right")),))
    made = space_of(net, load_platform("fpga"), "BOTH")
    found = made.configuration(made.uniform(lambda group: Unbiased("FIXED", 5)))
    assert found == Configuration(dict.fromkeys(["left.weight", "right.weight", "left.input", "right.input"], FIXED(5)))


def test_a_width_keeps_the_range():
    """FIXED keeps its bias; EXP moves it, so that the top value stays."""
    made, before = space(), uniform("EXP", 4)
    after = width_moves(made, before, narrower=True)[2].setting
    assert made.configuration(before)["conv2.weight"] == EXP(4, 9)
    assert made.configuration(after)["conv2.weight"] == EXP(3, 5)
    assert made.configuration(after)["conv2.weight"].largest == made.configuration(before)["conv2.weight"].largest
    narrower = width_moves(made, uniform("FIXED", 4), narrower=True)[2].setting
    assert made.configuration(narrower)["conv2.weight"] == FIXED(3, 2)


def test_ternary_fixed_and_exp_change_into_each_other_and_mean_the_same():
    made, fixed = space(), uniform("FIXED", 2)
    exponent = change_type(made, fixed, 2, Unbiased("EXP", 2))
    one, other = made.configuration(fixed)["conv2.weight"], made.configuration(exponent)["conv2.weight"]
    assert (one, other) == (FIXED(2, 2), EXP(2, 3))
    assert (one.largest, one.smallest) == (other.largest, other.smallest)


@pytest.mark.parametrize("bits", [3, 5, 9])
def test_a_type_keeps_the_largest_value_nearly_and_comes_back_to_itself(bits):
    made, fixed = space(), uniform("FIXED", bits)
    exponent = change_type(made, fixed, 2, Unbiased("EXP", bits))
    before, after = (made.configuration(each)["conv2.weight"].largest for each in (fixed, exponent))
    assert 1 <= after / before < 2**0.5
    assert change_type(made, exponent, 2, Unbiased("FIXED", bits)) == fixed


def test_types_of_the_same_width_or_the_widest_below():
    names = [move.name for move in type_moves(space(), uniform("FIXED", 16))]
    assert names == [
        f"{kind} {group}" for group in ("conv1.weight", "every input", "conv2.weight") for kind in ("FLOAT", "EXP")
    ]
    widest = type_moves(space(), uniform("FIXED", 16))[1].setting.types[0]
    assert widest == Unbiased("EXP", 9)
    assert [move.name for move in type_moves(space(), uniform("FIXED", 2))] == [
        "EXP conv1.weight", "EXP every input", "EXP conv2.weight",
    ]  # fmt: skip


def test_wide_floats_have_no_bias_to_move_and_halve():
    made, setting = space(), uniform("FLOAT", 32)
    assert (
        bias_moves(made, setting, 1)
        == bias_moves(made, setting, -1)
        == width_moves(made, setting, narrower=False)
        == []
    )
    assert width_moves(made, setting, narrower=True)[0].setting.types[0] == Unbiased("FLOAT", 16)


def test_moves_end_at_the_ends_of_the_platform():
    assert (
        width_moves(space(), uniform("FIXED", 2), narrower=True)
        == width_moves(space(), uniform("FIXED", 32), narrower=False)
        == []
    )
    assert width_moves(space(), uniform("EXP", 9), narrower=False) == []


def test_biases_go_up_only_so_far():
    made, setting, steps = space(), uniform("FIXED", 4), 0
    while moves := bias_moves(made, setting, 1):
        setting, steps = moves[0].setting, steps + 1
    assert steps == 4 * MOST_RAISED


def test_biases_of_one_group():
    assert [move.name for move in bias_moves(space(), uniform("FIXED", 4), 1, 1)] == [
        "+1 conv1.input",
        "+1 conv2.input",
    ]


def test_narrower_in_any_type():
    found = narrowing_moves(space(), uniform("FIXED", 4))
    assert [(group, move.setting.types[group]) for group, move in found][:2] == [
        (0, Unbiased("FIXED", 3)),
        (0, Unbiased("EXP", 3)),
    ]
    scarce = space_of(LENET, parse_platform({"name": "x", "formats": ["FIXED 2", "BIN"]}, "x"), "NONE")
    down = narrowing_moves(scarce, scarce.uniform(lambda group: Unbiased("FIXED", 2)))
    assert [move.setting.types[group] for group, move in down] == [Unbiased("BIN", 1)] * 2

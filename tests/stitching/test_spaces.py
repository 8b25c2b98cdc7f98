"""Which values carry the same channels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.stitching.families import Drawing, family_of
from weft.base.errors import StitchError
from weft_stitch.family import role, wire
from weft_stitch.net import Op, Port, Value, assemble


@dataclass(frozen=True)
class Strange:
    """What an island carries."""

    signature: str
    value: Value


def test_what_keeps_channels_apart_keeps_the_space():
    drawing = Drawing([3, 3])
    conv = drawing.add("conv", "image", width=[4, 5])
    affine = drawing.add("affine", conv)
    depthwise = drawing.add("depthwise", drawing.add("unary", affine), kernel=3)
    pool = drawing.add("global_pool", depthwise)
    wiring = wire(drawing.family())
    assert wiring.carries[pool] == wiring.carries[depthwise] == wiring.carries[affine] == (conv,)
    assert wiring.widths == {"image": (3, 3), conv: (4, 5)}
    assert [(each.role, each.value) for each in wiring.writers[conv]] == [("dense", conv), ("depthwise", depthwise)]
    assert [each.role for each in wiring.writers["image"]] == ["input"]


def test_an_addition_puts_its_operands_into_one_space():
    drawing = Drawing([3])
    stem = drawing.add("conv", "image", width=[4])
    inner = drawing.add("conv", stem, width=[6])
    branch = drawing.add("conv", inner, width=[4])
    total = drawing.add("add", branch, drawing.add("unary", stem))
    wiring = wire(drawing.family())
    assert wiring.carries[total] == wiring.carries[branch] == (stem,)
    assert wiring.carries[inner] == (inner,)
    assert [writer.value for writer in wiring.writers[stem]] == [stem, branch]


def test_a_gate_of_one_position_is_in_the_space_of_what_it_scales():
    drawing = Drawing([3])
    stem = drawing.add("conv", "image", width=[4])
    gate = drawing.add("conv", drawing.add("global_pool", stem), width=[4])
    drawing.add("mul", stem, gate)
    assert wire(drawing.family()).carries[gate] == (stem,)


def test_a_concatenation_carries_spaces_after_another():
    drawing = Drawing([3, 3])
    one, two = drawing.add("conv", "image", width=[4, 5]), drawing.add("conv", "image", width=[2, 3])
    both = drawing.add("affine", drawing.add("concat", one, two, one))
    wiring = wire(drawing.family())
    assert wiring.carries[both] == (one, two, one)
    assert list(wiring.slices(both, 1)) == [(one, slice(0, 5)), (two, slice(5, 8)), (one, slice(8, 13))]


def test_a_wide_space_is_cut_where_it_meets_a_concatenation():
    drawing = Drawing([3, 3])
    wide = drawing.add("conv", "image", width=[6, 8])
    one, two = drawing.add("conv", "image", width=[4, 5]), drawing.add("conv", "image", width=[2, 3])
    drawing.add("add", drawing.add("concat", one, two), wide)
    wiring = wire(drawing.family())
    assert wiring.carries[wide] == (f"{wide}[0]", f"{wide}[1]")
    assert wiring.carries[one] == (f"{wide}[0]",)
    assert wiring.widths[f"{wide}[1]"] == (2, 3)
    assert [(each.value, each.position) for each in wiring.writers[f"{wide}[1]"]] == [(wide, 1), (two, 0)]


def test_cuts_go_through_what_was_joined_before():
    drawing = Drawing([3])
    parts = [drawing.add("conv", "image", width=[each]) for each in (1, 2, 3)]
    joined = drawing.add("concat", *parts)
    early, late = drawing.add("conv", "image", width=[6]), drawing.add("conv", "image", width=[6])
    drawing.add("add", early, late)
    drawing.add("add", late, joined)
    wiring = wire(drawing.family())
    assert wiring.carries[early] == wiring.carries[late] == wiring.carries[joined]
    assert [wiring.widths[space] for space in wiring.carries[early]] == [(1,), (2,), (3,)]


def test_concatenations_that_cross_join_their_overlap():
    drawing = Drawing([3])
    one, two = drawing.add("conv", "image", width=[4]), drawing.add("conv", "image", width=[4])
    total = drawing.add("add", drawing.add("concat", one, two), drawing.add("concat", two, one))
    assert wire(drawing.family()).carries[total] == (one, one)


def test_parts_that_cross_between_models_are_an_error():
    drawing = Drawing([3, 3])
    parts = [drawing.add("conv", "image", width=each) for each in ([2, 4], [4, 2], [3, 3], [3, 3])]
    drawing.add("add", drawing.add("concat", *parts[:2]), drawing.add("concat", *parts[2:]))
    with pytest.raises(StitchError, match="add of concat4 and concat5: one of them is a concatenation"):
        wire(drawing.family())


def test_a_broadcast_over_channels_is_an_error():
    drawing = Drawing([3])
    one, two = drawing.add("conv", "image", width=[4]), drawing.add("conv", "image", width=[1])
    product = drawing.add("mul", one, two)
    with pytest.raises(StitchError, match=f"{product}: mul of 4 and 1 channels in net0; a broadcast over channels"):
        wire(drawing.family())


@pytest.mark.parametrize(
    ("shape", "groups", "expected"),
    [
        ((4, 4, 1, 1), 1, "dense"),
        ((4, 1, 1, 1), 4, "depthwise"),
        ((8, 1, 1, 1), 4, "separate"),
        ((4, 2, 1, 1), 2, "separate"),
    ],
)
def test_roles_of_convolutions(shape, groups, expected):
    op = Op("filter", "conv", ("image",), "filter", np.zeros(shape, np.float32), groups=groups)
    net = assemble("net", (Port("image", "image", (4, 4, 4)),), [op], (Port("answer", "filter", (shape[0],)),))
    family = family_of([net])
    assert role(family.layers[0]) == expected
    assert wire(family).carries["filter"] == (("image",) if expected == "depthwise" else ("filter",))


def test_a_depthwise_convolution_of_one_channel_is_one_beside_wider_ones():
    drawing = Drawing([1, 3])
    depthwise = drawing.add("depthwise", "image", kernel=3)
    assert wire(drawing.family()).carries[depthwise] == ("image",)


def test_an_island_has_a_space_of_its_own():
    island = Op("sort", "island", ("image",), "sort", payload=Strange("Sort", Value(4, 4, 4)))
    after = Op("after", "unary", ("sort",), "after", function="Relu")
    net = assemble("net", (Port("image", "image", (4, 4, 4)),), [island, after], (Port("answer", "after", (4, 4, 4)),))
    wiring = wire(family_of([net, replace(net, name="other")]))
    assert wiring.carries["after"] == ("sort",)
    assert [writer.role for writer in wiring.writers["sort"]] == ["separate"]

"""Which operation of one model is which of the others, and how a difference is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.errors import StitchError
from weft_stitch.family import Family
from weft_stitch.making.generator import generate
from weft_stitch.net import Net, Op, Port, Window, assemble
from weft_stitch.reading.alignment import align

RNG = np.random.default_rng(0)


def conv(name: str, x: str, outs: int, ins: int, kernel: int = 3, *, stride: int = 1, groups: int = 1) -> Op:
    weight = RNG.normal(size=(outs, ins // groups, kernel, kernel)).astype(np.float32)
    window = Window((kernel, kernel), (stride, stride), (kernel // 2,) * 4)
    return Op(name, "conv", (x,), name, weight=weight, window=window, groups=groups)


def unary(name: str, x: str, function: str = "Relu", **settings: float) -> Op:
    return Op(name, "unary", (x,), name, function=function, settings=settings)


def join(name: str, kind: str, *inputs: str) -> Op:
    return Op(name, kind, inputs, name)


def net(ops: Sequence[Op], *outputs: str, name: str = "a", size: tuple[int, ...] = (3, 8, 8), batch: int = 1) -> Net:
    values = outputs or (ops[-1].output,)
    draft = assemble(name, (Port("x", "x", size),), list(ops), (), batch)
    ports = [Port(f"{each}.out", each, _shape(draft, each)) for each in values]
    return replace(draft, outputs=tuple(ports))


def _shape(draft: Net, value: str) -> tuple[int, ...]:
    size = draft.values[value]
    return size.channels, size.height, size.width


def chain(name: str = "a", *, width: int = 4, kernel: int = 3, middle: str = "Relu", **options) -> Net:
    ops = [
        conv("conv1", "x", width, options.get("size", (3,))[0]),
        unary("act", "conv1", middle),
        conv("conv2", "act", 5, width, kernel),
    ]
    return net(ops, name=name, **options)


def pairs(family: Family, task: int) -> dict[str, str]:
    """Task 0's operations -> those of *task*."""
    return {layer.name: layer.ops[task].name for layer in family.layers}


def test_widths_batches_and_input_channels_may_differ():
    family = align([chain("a"), chain("b", width=7, batch=3), chain("c", size=(1, 8, 8))])
    assert [layer.name for layer in family.layers] == ["conv1", "act", "conv2"]
    assert [size.channels for size in family.values["act"]] == [4, 7, 4]
    assert [size.channels for size in family.values["x"]] == [3, 3, 1]
    assert family.batches == (1, 3, 1)
    assert [port.name for port in family.outputs["conv2"]] == ["conv2.out"] * 3
    assert (family.inputs, family.tails, family.bridges) == (("x",), (), ())


def test_one_model_is_a_family_too():
    assert len(align([chain()]).layers) == 3


def test_models_of_one_name_are_told_apart():
    assert [each.name for each in align([chain("m"), chain("m"), chain("m")]).nets] == ["m", "m-2", "m-3"]


# Branches


def block(name: str, order: Sequence[int], names: Sequence[str], *, swap: bool = False) -> Net:
    """A residual block whose branches begin with the same kind of convolution, listed in this *order*."""
    first, second, shortcut = names
    ops = [
        [conv(first, "x", 4, 3, 1), unary(f"{first}.act", first)],
        [conv(second, f"{first}.act", 6, 4, 3)],
        [conv(shortcut, "x", 6, 3, 1)],
    ]
    sums = (shortcut, second) if swap else (second, shortcut)
    listed = [op for index in order for op in ops[index]]
    return net([*listed, join("sum", "add", *sums)], name=name)


def test_branches_listed_in_another_order_are_matched_by_what_follows_them():
    family = align([block("a", (0, 1, 2), ("p", "q", "s")), block("b", (2, 0, 1), ("u", "v", "p"), swap=True)])
    assert pairs(family, 1) == {"p": "u", "p.act": "u.act", "q": "v", "s": "p", "sum": "sum"}
    addition = family.layers[-1]
    assert addition.inputs == ("q", "s")
    assert addition.ops[1].inputs == ("v", "p")


def test_the_places_in_a_concatenation_tell_branches_apart():
    def branches(name: str, first: str, second: str, order: tuple[str, str]) -> Net:
        return net([conv(first, "x", 2, 3), conv(second, "x", 2, 3), join("cat", "concat", *order)], name=name)

    family = align([branches("a", "l", "r", ("l", "r")), branches("b", "l", "r", ("r", "l"))])
    assert pairs(family, 1) == {"l": "r", "r": "l", "cat": "cat"}


def test_equal_branches_are_matched_by_the_weights_they_have_in_common():
    one, two = conv("one", "x", 2, 3), conv("two", "x", 2, 3)
    renamed = [replace(two, name="one", output="one"), replace(one, name="two", output="two")]
    nets = [
        net([*ops, join("sum", "add", "one", "two")], name=name) for name, ops in (("a", [one, two]), ("b", renamed))
    ]
    assert pairs(align(nets), 1) == {"one": "two", "two": "one", "sum": "sum"}


def test_heads_are_matched_by_the_names_of_their_outputs():
    def heads(name: str, order: tuple[str, str]) -> Net:
        return net([conv("body", "x", 4, 3), *(conv(each, "body", 2, 4) for each in order)], *order, name=name)

    family = align([heads("a", ("boxes", "scores")), heads("b", ("scores", "boxes"))])
    assert pairs(family, 1) == {"body": "body", "boxes": "boxes", "scores": "scores"}
    assert [port.name for port in family.outputs["boxes"]] == ["boxes.out", "boxes.out"]


def test_inputs_are_matched_by_name_where_names_agree():
    def two(name: str, order: tuple[str, str]) -> Net:
        ports = tuple(Port(each, each, (2, 4, 4)) for each in order)
        ops = [unary("r", "left"), join("sum", "add", "r", "right")]
        return assemble(name, ports, ops, (Port("y", "sum", (2, 4, 4)),))

    family = align([two("a", ("left", "right")), two("b", ("right", "left"))])
    assert [port.name for port in family.nets[1].inputs] == ["left", "right"]
    assert len(family.layers) == 2


@pytest.mark.parametrize("architecture", ["resnet18", "resnet50", "mobilenet"])
@settings(max_examples=6)
@given(seed=st.integers(0, 10**6))
def test_models_whose_operations_are_shuffled_align_as_before(architecture, seed):
    nets, wanted = aligned(architecture)
    assert pairs(align([nets[0], shuffled(nets[1], seed)]), 1) == wanted


@cache
def aligned(architecture: str):
    """Two models, and which operations of them belong together."""
    nets = generate(architecture, 2, pruning=0.9, resolution=32, classes=(3, 5)).nets
    wanted = pairs(align(nets), 1)
    assert set(wanted) == set(wanted.values())
    return nets, wanted


def shuffled(given: Net, seed: int) -> Net:
    """The same model, its operations in another order they can run in, sums the other way round."""
    rng = np.random.default_rng(seed)
    known, left, ops = {port.value for port in given.inputs}, list(given.ops), []
    while left:
        ready = [op for op in left if known.issuperset(op.inputs)]
        op = ready[rng.integers(len(ready))]
        left.remove(op)
        known.add(op.output)
        ops.append(replace(op, inputs=op.inputs[::-1]) if op.kind in ("add", "mul") else op)
    return replace(given, ops=tuple(ops))


# Differences

DIFFERENT = {
    "kernel": (chain("b", kernel=5), "conv2 of a is a 3x3 convolution, conv2 of b a 5x5 convolution"),
    "function": (chain("b", middle="Tanh"), "act of a is a Relu, act of b a Tanh"),
    "stride": (
        net([conv("c1", "x", 4, 3, stride=2)], name="b"),
        "conv1 of a is a 3x3 convolution with stride 1 x 1, c1 of b one with stride 2 x 2",
    ),
    "groups": (
        net([conv("c1", "x", 3, 3, groups=3)], name="b"),
        "conv1 of a is a 3x3 convolution, c1 of b a 3x3 depthwise convolution",
    ),
    "kind": (
        net([conv("c1", "x", 4, 3), Op("bn", "affine", ("c1",), "bn", scale=np.ones(4))], name="b"),
        "act of a is a Relu, bn of b a scale and shift per channel",
    ),
    "shorter": (
        net([conv("c1", "x", 4, 3), unary("r", "c1")], name="b"),
        "conv2 of a is a 3x3 convolution after act; b has nothing in that place",
    ),
    "longer": (
        net([*chain("b").ops, unary("last", "conv2")], name="b"),
        "last of b is a Relu, a has nothing in its place",
    ),
    "output": (net(chain("b").ops, "conv2", "act", name="b"), "act.out is an output of b that not all others have"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_the_first_difference_is_told_in_words(case):
    other, words = DIFFERENT[case]
    with pytest.raises(StitchError) as caught:
        align([chain("a"), chain("same"), other])
    assert str(caught.value).startswith(words)
    assert str(caught.value).endswith("; islands = True runs what differs separately")


def test_settings_are_told():
    nets = [net([unary("leak", "x", "LeakyRelu", alpha=alpha)], name=name) for name, alpha in (("a", 0.1), ("b", 0.2))]
    with pytest.raises(StitchError, match=r"leak of a is a LeakyRelu with settings alpha 0\.1, leak of b one with"):
        align(nets)


def test_the_same_operation_on_other_values_is_told():
    def residual(name: str, source: str) -> Net:
        return net([conv("c", "x", 3, 3), unary("r", "c"), unary("s", "r"), join("sum", "add", "s", source)], name=name)

    with pytest.raises(StitchError, match=r"sum of a and sum of b are both an addition, but read different values"):
        align([residual("a", "c"), residual("b", "r")])


def test_pictures_of_other_sizes_are_refused():
    with pytest.raises(StitchError, match="x of a is a picture of 8x8, x of b 6x8; stitch models of one picture size"):
        align([chain("a"), chain("b", size=(3, 6, 8))], islands=True)


def test_other_numbers_of_inputs_are_refused():
    two = assemble("b", (Port("x", "x", (3, 8, 8)), Port("z", "z", (3, 8, 8))), [], (Port("y", "z", (3, 8, 8)),))
    with pytest.raises(StitchError, match="a has 1 inputs, b 2"):
        align([chain("a"), two])


def test_no_models_are_refused():
    with pytest.raises(StitchError, match="give at least one"):
        align([])


# Islands


def test_what_differs_becomes_the_tail_of_each_model():
    first = net([*chain("a").ops, unary("soft", "conv2", "Sigmoid")], name="a")
    second = net([*chain("b").ops[:2], conv("head", "act", 9, 4, 1)], name="b")
    family = align([first, second], islands=True)
    assert [layer.name for layer in family.layers] == ["conv1", "act"]
    assert [[op.name for op in tail] for tail in family.tails] == [["conv2", "soft"], ["head"]]
    assert family.bridges == ({"act": "act"}, {"act": "act"})
    assert family.outputs == {}


def test_an_output_only_one_model_has_is_bridged():
    family = align([chain("a"), net(chain("b").ops, "conv2", "act", name="b")], islands=True)
    assert [port.name for port in family.outputs["conv2"]] == ["conv2.out", "conv2.out"]
    assert family.tails == ((), ())
    assert family.bridges == ({}, {"act": "act"})


def test_what_aligns_beside_a_difference_is_kept():
    def forked(name: str, left: int) -> Net:
        ops = [
            conv("body", "x", 4, 3),
            conv("left", "body", 2, 4, left),
            conv("right", "body", 2, 4, 1),
            unary("end", "right"),
        ]
        return net(ops, "left", "end", name=name)

    family = align([forked("a", 3), forked("b", 5)], islands=True)
    assert [layer.name for layer in family.layers] == ["body", "right", "end"]
    assert [[op.name for op in tail] for tail in family.tails] == [["left"], ["left"]]


def test_branches_are_still_told_apart_when_the_ends_differ():
    def with_end(given: Net, function: str) -> Net:
        return net([*given.ops, unary("end", "sum", function)], name=given.name)

    one = with_end(block("a", (0, 1, 2), ("p", "q", "s")), "Relu")
    two = with_end(block("b", (2, 0, 1), ("u", "v", "p"), swap=True), "Tanh")
    family = align([one, two], islands=True)
    assert pairs(family, 1) == {"p": "u", "p.act": "u.act", "q": "v", "s": "p", "sum": "sum"}


def test_islands_do_not_change_models_that_align():
    family = align([chain("a"), chain("b")], islands=True)
    assert (len(family.layers), family.tails, family.bridges) == (3, (), ())


def test_models_with_nothing_in_common_are_refused_all_the_same():
    other = net([conv("c", "x", 4, 3, 5)], name="b")
    with pytest.raises(StitchError, match="nothing to stitch: conv1 of a is a 3x3 convolution, c of b a 5x5 conv"):
        align([chain("a"), other], islands=True)

"""The one-kernel form: packing, its plain twin, the kernel under Triton's interpreter, and the form as a whole."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: its kernels then run as Python, without a GPU

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stitching.families import TANGLED, TANGLES, Drawing, family_of, plant, random_family
from tests.stitching.graphs import assert_close, separately
from tests.stitching.nets import images
from weft.base.errors import StitchError
from weft_stitch.cost import count
from weft_stitch.discovery import discover
from weft_stitch.family import Block, ChannelSpace
from weft_stitch.graph_steps import plain_graph
from weft_stitch.lowering import lower
from weft_stitch.making.generator import generate
from weft_stitch.net import Op, Port, Window, assemble
from weft_stitch.packing import Activation, columns, pack
from weft_stitch.reading.alignment import align
from weft_stitch.running.module import FusedConv, Shape, StitchedModule, activated, plain
from weft_stitch.summary import count_kernels

RELU = Activation("Relu")


def space(rng, widths, shared, subset=()):
    """Channels in random order: *shared* by all, some by a subset of the tasks, the rest each task's own."""
    orders, taken = [rng.permutation(width) for width in widths], [0] * len(widths)

    def take(tasks, width):
        members = {task: orders[task][taken[task] : taken[task] + width] for task in tasks}
        for task in tasks:
            taken[task] += width
        return [Block(members)] if width else []

    blocks = take(range(len(widths)), shared)
    blocks += take(subset, 2) if subset else []
    for task, width in enumerate(widths):
        blocks += take([task], width - taken[task])
    return ChannelSpace(tuple(widths), tuple(blocks))


def kernels(rng, inputs, output, taps):
    """Random kernels that agree where the tasks share both ends."""
    found = [
        rng.normal(size=(width, sum(each.widths[task] for each in inputs), *taps)).astype(np.float32)
        for task, width in enumerate(output.widths)
    ]
    for out in output.blocks:
        for number, each in enumerate(inputs):
            for block in each.blocks:
                first, *others = sorted(out.tasks & block.tasks) or [None]
                for task in others:
                    found[task][place(out, block, inputs, number, task)] = found[first][
                        place(out, block, inputs, number, first)
                    ]
    return found


def place(out, block, inputs, number, task):
    start = sum(each.widths[task] for each in inputs[:number])
    return np.ix_(out.members[task], start + block.members[task])


class Case:
    """A layer of three tasks with inputs, and what torch makes of each task alone."""

    def __init__(self, rng, inputs, output, window, *, align, rows=(1, 2, 1), activation=RELU, residual=False, size=4):
        self.rows, self.inputs, self.output = rows, inputs, output
        self.weights = kernels(rng, inputs, output, window.kernel)
        self.packed = pack(self.weights, inputs, output, window, align=align)
        self.scale, self.shift = ([rng.normal(size=w).astype(np.float32) for w in output.widths] for _ in range(2))
        self.layer = FusedConv(
            self.packed,
            rows,
            activation,
            self.packed.weights,
            self.packed.spread(self.scale),
            self.packed.spread(self.shift),
        )
        self.images = [
            rng.normal(size=(count, sum(each.widths[task] for each in inputs), size, size)).astype(np.float32)
            for task, count in enumerate(rows)
        ]
        self.activation = activation
        tall, wide = window.output(size, size)
        self.residual = None
        if residual:
            self.residual = rng.normal(size=(sum(rows), tall, wide, self.packed.outputs)).astype(np.float32)

    @property
    def x(self):
        size = self.images[0].shape[2:]
        x = np.zeros((sum(self.rows), *size, self.packed.inputs), np.float32)
        for task, first in enumerate(np.cumsum([0, *self.rows[:-1]])):
            for run in columns(self.inputs, task, self.packed.input_align):
                start = sum(each.widths[task] for each in self.inputs[: run.space])
                picked = self.images[task][:, start + run.block.members[task]].transpose(0, 2, 3, 1)
                x[first : first + self.rows[task], :, :, run.start : run.start + run.block.width] = picked
        return x

    def wanted(self, task):
        window = self.packed.window
        top, left, bottom, right = window.pads
        image = torch.nn.functional.pad(torch.from_numpy(self.images[task]), (left, right, top, bottom))
        weight = torch.from_numpy(self.weights[task])
        y = torch.nn.functional.conv2d(image, weight, stride=window.strides, dilation=window.dilations).numpy()
        return y * self.scale[task][:, None, None] + self.shift[task][:, None, None]

    def check(self, y):
        scale = 1.0
        for task, first in enumerate(np.cumsum([0, *self.rows[:-1]])):
            rows, wanted = slice(first, first + self.rows[task]), self.wanted(task)
            scale = max(scale, float(np.abs(wanted).max()))
            for run in self.packed.output_runs[task]:
                at = slice(run.start, run.start + run.block.width)
                want = wanted[:, run.block.members[task]].transpose(0, 2, 3, 1)
                if self.residual is not None:
                    want = want + self.residual[rows, :, :, at]
                assert np.abs(y[rows, :, :, at] - activated(want, self.activation)).max() <= 1e-5 * scale


def plainly(case):
    return case.layer.run_plain(torch.from_numpy(case.x), residual_of(case)).numpy()


def by_kernel(case, shape):
    case.layer.shape = shape
    return case.layer.launch(torch.from_numpy(case.x), residual_of(case)).numpy()


def residual_of(case):
    return None if case.residual is None else torch.from_numpy(case.residual)


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """TF32 would round the interpreter's products too."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


THREE = Window((3, 3), (1, 1), (1, 1, 1, 1))
SLIM = Window((1, 3), (1, 1), (0, 1, 0, 1))
"""Three taps, where it is about channels: the interpreter computes tap by tap."""
CASES = {
    "picture": lambda rng: ([ChannelSpace.common(3, 3)], space(rng, [9] * 3, 6), Window((3, 3), (2, 2), (1,) * 4)),
    "shared and own": lambda rng: ([space(rng, [9, 9, 9], 6)], space(rng, [40, 40, 40], 33), THREE),
    "unequal widths": lambda rng: ([space(rng, [9, 8, 11], 6)], space(rng, [12, 11, 13], 8), THREE),
    "point": lambda rng: ([space(rng, [9, 9, 9], 6)], space(rng, [12, 12, 12], 8), Window()),
    "strided point": lambda rng: ([space(rng, [9, 9, 9], 6)], space(rng, [12, 12, 12], 8), Window((1, 1), (2, 2))),
    "nothing shared": lambda rng: ([space(rng, [9, 9, 9], 0)], space(rng, [12, 12, 12], 0), SLIM),
    "all shared": lambda rng: ([ChannelSpace.common(9, 3)], ChannelSpace.common(12, 3), SLIM),
    "subsets": lambda rng: ([space(rng, [9, 9, 9], 4, (0, 2))], space(rng, [12, 11, 13], 8, (1, 2)), SLIM),
    "concatenation": lambda rng: (
        [space(rng, [9, 9, 9], 4), space(rng, [5, 6, 5], 3)],
        space(rng, [9, 9, 9], 6),
        SLIM,
    ),
    "own, concatenated": lambda rng: (
        [space(rng, [9, 9, 9], 0), space(rng, [5, 5, 5], 0)],
        space(rng, [9, 9, 9], 6),
        SLIM,
    ),
    "twice the same": lambda rng: ([space(rng, [9, 8, 11], 6)] * 2, space(rng, [12, 11, 13], 8), SLIM),
    "twice the same, all shared": lambda rng: ([ChannelSpace.common(5, 3)] * 2, ChannelSpace.common(12, 3), SLIM),
    "dilated, lopsided": lambda rng: (
        [space(rng, [9, 9, 9], 6)],
        space(rng, [12, 12, 12], 8),
        Window((3, 2), (2, 1), (2, 1, 0, 1), (2, 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("align", [1, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_the_plain_twin_equals_each_model_alone(name, align):
    rng = np.random.default_rng(1)
    case = Case(rng, *CASES[name](rng), align=align, residual=name != "picture")
    case.check(plainly(case))


@pytest.mark.parametrize("flat", [False, True], ids=["by tap", "flat"])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_its_twin(name, flat):
    rng = np.random.default_rng(2)
    several_tiles = name == "unequal widths"
    case = Case(rng, *CASES[name](rng), align=4, residual=name == "subsets", size=7 if several_tiles else 4)
    y = by_kernel(case, Shape(32, 32, 16, flat=flat))
    case.check(y)
    assert np.abs(y - plainly(case)).max() <= 1e-4


def test_a_tasks_own_channels_ride_along_or_have_tiles_of_their_own():
    rng = np.random.default_rng(3)
    case = Case(rng, *CASES["shared and own"](rng), align=8, residual=True)
    case.layer.shape = Shape(32, 64, 16)
    assert case.layer.rider_width == 16
    case.check(by_kernel(case, Shape(32, 64, 16)))
    case.layer.shape = Shape(32, 16, 16)
    assert case.layer.rider_width == 0
    case.check(by_kernel(case, Shape(32, 16, 16)))


@pytest.mark.parametrize(
    "activation",
    [Activation(), Activation("Sigmoid"), Activation("Silu"), Activation("HardSwish"), Activation("LeakyRelu", 0.1),
     Activation("HardSigmoid", 1 / 6, 0.5), Activation("Clip", 0.0, 6.0)],
    ids=lambda each: each.function or "none",
)  # fmt: skip
def test_what_follows_the_product_is_computed_with_it(activation):
    rng = np.random.default_rng(4)
    case = Case(rng, *CASES["point"](rng), align=4, activation=activation, residual=True)
    case.check(by_kernel(case, Shape(16, 16, 16)))
    case.check(plainly(case))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_columns_that_are_not_a_rows_own_come_out_as_zeros_even_beside_infinite_weights():
    rng = np.random.default_rng(5)
    case = Case(rng, *CASES["shared and own"](rng), align=8)
    case.packed.weights[:] = np.where(np.abs(case.packed.weights) > 2.5, np.inf, case.packed.weights)
    owned = np.zeros((3, case.packed.outputs), bool)
    for task, runs in enumerate(case.packed.output_runs):
        for run in runs:
            owned[task, run.start : run.start + run.block.width] = True
    case.layer.weights.copy_(torch.from_numpy(case.packed.weights))
    y = by_kernel(case, Shape(32, 32, 16))
    assert not np.isfinite(y).all()
    assert (y[0][:, :, ~owned[0]] == 0).all() and (y[3][:, :, ~owned[2]] == 0).all()


def test_every_weight_is_stored_once_and_alignment_costs_little():
    rng = np.random.default_rng(6)
    inputs, output = space(rng, [512] * 8, 461), space(rng, [512] * 8, 461)
    weights = kernels(rng, [inputs], output, (1, 1))
    unique = 461 * 461 + 8 * (512 * 512 - 461 * 461)
    exact, wide = (pack(weights, [inputs], output, Window(), align=align) for align in (1, 8))
    assert exact.unique == wide.unique == unique == exact.weights.size
    assert unique < wide.weights.size < 1.006 * unique


@settings(max_examples=12)
@given(st.data())
def test_tiles_cover_every_output_of_every_task_once(data):
    tasks = data.draw(st.integers(1, 4))
    widths = data.draw(st.lists(st.integers(1, 40), min_size=tasks, max_size=tasks))
    shared = data.draw(st.integers(0, min(widths)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    output, inputs = space(rng, widths, shared), ChannelSpace.common(2, tasks)
    align = data.draw(st.sampled_from([1, 4, 8]))
    packed = pack(kernels(rng, [inputs], output, (1, 1)), [inputs], output, Window(), align=align)
    positions = data.draw(st.lists(st.integers(0, 9), min_size=tasks, max_size=tasks))
    tall, wide = data.draw(st.sampled_from([4, 8])), data.draw(st.sampled_from([16, 32]))
    narrow = data.draw(st.sampled_from([0, 16]))
    seen = np.zeros((sum(positions), packed.outputs), int)
    for row in packed.tiles(positions, tall, wide, narrow).reshape(-1, 2, len(packed.targets[0][0])):
        for tile, size in zip(row, (wide, narrow), strict=True):
            tile = packed.targets[0][0]._make(tile)
            last = min(tile.first_position + tall, tile.end_position)
            channels = slice(tile.column + tile.first_channel, tile.column + min(tile.first_channel + size, tile.span))
            seen[tile.first_position : last, channels] += 1
    for task, end in enumerate(np.cumsum(positions)):
        owned = np.zeros(packed.outputs, bool)
        for run in packed.output_runs[task]:
            owned[run.start : run.start + run.block.width] = True
        mine = seen[end - positions[task] : end]
        assert (mine[:, owned] == 1).all() and mine.max(initial=0) <= 1


@pytest.mark.parametrize("align_by", [1, 8])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("tinynet", {}),
        ("tinynet", {"norm": "shared", "sharing": 0.6}),
        ("tinynet", {"widths": (1, 0.9, 1.25), "classes": (3, 5, 4), "batches": (1, 2, 1)}),
        ("tiny-sigmoid", {}),
        ("tiny-dense", {}),
        ("mobilenet", {"pruning": 0.9, "resolution": 32}),
    ],
)
def test_fused_graphs_equal_the_models_one_by_one(architecture, changes, align_by):
    made = generate(architecture, 3, **{"resolution": 16, "sharing": 0.8, "seed": 5, **changes})
    family = align(made.nets)
    sharing = discover(family)
    graph = lower(family, sharing, "fused", align=align_by)
    torch.manual_seed(0)
    inputs = [torch.randn(net.batch, *net.inputs[0].shape) for net in made.nets]
    for net, x, y in zip(made.nets, inputs, StitchedModule(graph)(*inputs), strict=True):
        want = StitchedModule(plain_graph(net))(x)[0]
        assert (y - want).abs().max() <= 1e-5 * max(1.0, float(want.abs().max()))
    if align_by == 1:
        assert count(graph).weight_bytes == 4 * count_kernels(family, sharing).unique


def check_fused(planted, align_by):
    family = planted.family
    module = StitchedModule(lower(family, planted.sharing, "fused", align=align_by))
    pictures = images(family.nets)
    found = [each.numpy() for each in module(*map(torch.from_numpy, pictures))]
    assert_close(found, separately(family.nets, pictures))


@settings(max_examples=12)
@given(planted=TANGLED, align_by=st.sampled_from([1, 4, 8]))
def test_concatenations_and_additions_in_any_order(planted, align_by):
    check_fused(planted, align_by)


@pytest.mark.parametrize("block", TANGLES)
@pytest.mark.parametrize("align_by", [1, 4])
def test_a_space_twice_and_several_spaces_at_once(block, align_by):
    check_fused(random_family([block, "conv"], 3, 1), align_by)


def test_a_concatenation_that_all_share_is_stacked_where_its_spaces_begin():
    drawing = Drawing([3, 3])
    both = drawing.add("concat", "image", drawing.add("unary", "image"))
    drawing.add("conv", drawing.add("global_pool", both), width=[5, 5])
    check_fused(plant(drawing, np.random.default_rng(0)), 4)


def test_the_twin_is_what_runs_without_cuda():
    rng = np.random.default_rng(7)
    case = Case(rng, *CASES["point"](rng), align=1)
    given = (case.packed.spread(case.scale), case.packed.spread(case.shift))
    y = plain(case.packed, case.rows, RELU, case.x, case.packed.weights, *given)
    assert np.array_equal(case.layer(torch.from_numpy(case.x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).numpy(), y)


def test_a_result_may_take_the_place_of_its_residual():
    rng = np.random.default_rng(8)
    case = Case(rng, *CASES["unequal widths"](rng), align=4, residual=True)
    for task, first in enumerate(np.cumsum([0, *case.rows[:-1]])):
        spare = np.ones(case.packed.outputs, bool)
        for run in case.packed.output_runs[task]:
            spare[run.start : run.start + run.block.width] = False
        case.residual[first : first + case.rows[task]][..., spare] = 0
    wanted, given = by_kernel(case, Shape(32, 32, 16)), residual_of(case).clone()
    got = case.layer.launch(torch.from_numpy(case.x), given, given)
    assert got.data_ptr() == given.data_ptr() and np.array_equal(got.numpy(), wanted)


def test_only_a_dead_residual_is_written_over():
    made = generate("tinynet", 2, resolution=16, seed=5)
    family = align(made.nets)
    module = StitchedModule(lower(family, discover(family), "fused"))
    reusing = [each.overwrites_residual for each in module.modules() if isinstance(each, FusedConv)]
    adding = [len(step.inputs) > 4 for step in module.graph.steps if step.op == "FusedConv"]
    assert reusing == adding and sum(adding) == 2


def test_a_residual_that_is_the_input_too_is_not_written_over():
    planted = random_family(["loop"], 2, 0)
    module = StitchedModule(lower(planted.family, planted.sharing, "fused"))
    steps = [step for step in module.graph.steps if step.op == "FusedConv" and len(step.inputs) > 4]
    assert [step.inputs[0] == step.inputs[4] for step in steps] == [True]
    assert not any(each.overwrites_residual for each in module.modules() if isinstance(each, FusedConv))


def test_a_residual_of_which_somebody_keeps_a_view_is_not_written_over():
    """Rows taken out of a tensor are views of it: the second layer that reads them comes after the addition."""
    rng = np.random.default_rng(0)

    def net(name):
        def conv(name, source):
            return Op(name, "conv", (source,), name, rng.standard_normal((5, 5, 1, 1), np.float32))

        ops = [
            conv("first", "x"),
            conv("early", "first"),
            conv("branch", "early"),
            Op("sum", "add", ("first", "branch"), "sum"),
            conv("late", "first"),
            Op("all", "add", ("sum", "late"), "all"),
        ]
        return assemble(name, (Port("x", "x", (5, 4, 4)),), ops, (Port("y", "all", (5, 4, 4)),), 2)

    family = family_of([net("a"), net("b")])
    forms = dict.fromkeys(("first", "branch"), "fused") | dict.fromkeys(("early", "late"), "separate")
    module = StitchedModule(lower(family, discover(family), forms))
    assert any(len(step.inputs) > 4 for step in module.graph.steps if step.op == "FusedConv")
    assert not any(each.overwrites_residual for each in module.modules() if isinstance(each, FusedConv))


def test_more_weights_than_places_can_count_are_refused(monkeypatch):
    planted = random_family(["conv"], 2, 0)
    monkeypatch.setattr("weft_stitch.forms.whole.LARGEST", 100)
    with pytest.raises(
        StitchError, match=r"conv\d: the form 'fused' cannot do it, its \d+ weights are more than the 100"
    ):
        lower(planted.family, planted.sharing, "fused")


def test_a_kernel_with_too_many_taps_is_refused():
    wide = Op("conv", "conv", ("x",), "y", np.ones((3, 2, 1, 33), np.float32), window=Window((1, 33)))
    net = assemble("wide", (Port("x", "x", (2, 40, 40)),), [wide], (Port("y", "y", (3, 40, 8)),))
    family = align([net])
    with pytest.raises(StitchError, match="conv: the form 'fused' cannot do it, its kernel is wider than 31"):
        lower(family, discover(family), "fused")

"""Every form equals the separate models, whatever they share, and costs what it says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stitching.families import TANGLED
from tests.stitching.graphs import Runner, assert_close, execute, separately
from tests.stitching.nets import TINY, _unary, images, macs, tiny
from weft.base.errors import StitchError
from weft_stitch.cost import count
from weft_stitch.family import Block, ChannelSpace, Sharing, wire
from weft_stitch.graph import DYNAMIC, Builder
from weft_stitch.graph_steps import plain_graph
from weft_stitch.layouts import COMPACT, STACKED, STITCHED, Channels, Layout, channels, pieces, tidy
from weft_stitch.lowering import formed_layers, keeps_zero, lower
from weft_stitch.net import Net, Op, Port, Value, Window, assemble
from weft_stitch.planning.planner import ANYWHERE
from weft_stitch.reading.alignment import align
from weft_stitch.summary import count_kernels

ANY_BATCH = ("mts", "split", "half", "separate")
NORMS = ("per_task", "shared", "folded")


def check(nets, sharing, forms, **options):
    """The graph, after it has been compared with the models."""
    graph = lower(align(nets), sharing, forms, **options)
    pictures = images(nets)
    assert_close(execute(graph, pictures), separately(nets, pictures))
    return graph


@pytest.mark.parametrize("ratio", [0.0, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("form", ANYWHERE)
def test_a_form_equals_the_models(form, norm, ratio):
    made = tiny(norm=norm, sharing=ratio, pruning=0.0)
    check(made.nets, made.planted, form)


@pytest.mark.parametrize("tasks", [1, 2, 5])
@pytest.mark.parametrize("form", ANYWHERE)
def test_any_number_of_tasks(form, tasks):
    made = tiny(tasks=tasks, sharing=0.6)
    check(made.nets, made.planted, form)


@pytest.mark.parametrize("architecture", TINY)
@pytest.mark.parametrize("form", ANY_BATCH)
def test_unequal_widths_batches_and_classes(form, architecture):
    made = tiny(architecture, widths=[1.0, 0.7, 1.3], batches=[1, 3, 2])
    check(made.nets, made.planted, form)


@pytest.mark.parametrize("architecture", TINY)
@pytest.mark.parametrize("batch", [1, 2])
def test_grouped_pads_unequal_widths(architecture, batch):
    made = tiny(architecture, widths=[1.0, 0.7, 1.3], batches=batch)
    check(made.nets, made.planted, "grouped")


@pytest.mark.parametrize("form", ANYWHERE)
@pytest.mark.parametrize("clusters", [[[0, 1]], [[0, 1], [2, 3]], [[0, 2], [1, 2, 3]]])
def test_blocks_of_some_tasks(form, clusters):
    made = tiny(tasks=4, sharing=0.5, clusters=clusters, pruning=0.0)
    assert any(1 < len(block.tasks) < 4 for space in made.planted.spaces.values() for block in space.blocks)
    check(made.nets, made.planted, form)


@settings(max_examples=15)
@given(data=st.data())
def test_any_mixture_of_forms(data):
    tasks = data.draw(st.integers(1, 4))
    batch = data.draw(st.sampled_from([1, 2, [1 + task % 3 for task in range(tasks)]]))
    made = tiny(
        data.draw(st.sampled_from(TINY)),
        tasks=tasks,
        sharing=data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        norm=data.draw(st.sampled_from(NORMS)),
        widths=data.draw(st.none() | st.lists(st.sampled_from([0.75, 1.0, 1.25]), min_size=tasks, max_size=tasks)),
        batches=batch,
        clusters=data.draw(st.sampled_from([None, [[0, tasks - 1]]])),
        seed=data.draw(st.integers(0, 9)),
    )
    dynamic = data.draw(st.booleans())
    names = list(ANYWHERE) if isinstance(batch, int) and not dynamic else list(ANY_BATCH)
    forms = {layer.name: data.draw(st.sampled_from(names)) for layer in formed_layers(align(made.nets))}
    graph = check(made.nets, made.planted, forms, dynamic=dynamic)
    read = {name for step in graph.steps for name in step.inputs} | {tensor.name for tensor in graph.outputs}
    assert all(set(step.outputs) & read for step in graph.steps), "no step is in vain"


@settings(max_examples=12)
@given(planted=TANGLED)
def test_concatenations_and_additions_in_any_order(planted):
    for form in ANYWHERE:
        check(planted.family.nets, planted.sharing, form)


@pytest.mark.parametrize("architecture", ["tinynet", "tiny-sigmoid", "tiny-mobile"])
@pytest.mark.parametrize("form", ANY_BATCH)
def test_rows_known_at_run_time(form, architecture):
    made = tiny(architecture, widths=[1.0, 0.8, 1.2])
    graph = lower(align(made.nets), made.planted, form, dynamic=True)
    assert all(tensor.shape[0] == DYNAMIC for tensor in (*graph.inputs, *graph.outputs))
    runner = Runner(graph)
    for rows in ([1, 1, 1], [3, 0, 2], [0, 4, 0], [0, 0, 0]):
        pictures = images([replace(net, batch=each) for net, each in zip(made.nets, rows, strict=True)])
        assert_close(runner(pictures), separately(made.nets, pictures))


@pytest.mark.parametrize("form", ANY_BATCH)
def test_batches_given_instead_of_the_models_own(form):
    made = tiny(batches=1)
    graph = lower(align(made.nets), made.planted, form, batches=[2, 1, 3])
    assert [tensor.shape[0] for tensor in graph.inputs] == [2, 1, 3]
    pictures = images([replace(net, batch=each) for net, each in zip(made.nets, [2, 1, 3], strict=True)])
    assert_close(execute(graph, pictures), separately(made.nets, pictures))


@pytest.mark.parametrize("form", ANYWHERE)
@pytest.mark.parametrize("architecture", ["tinynet", "tiny-sigmoid", "tiny-mobile"])
def test_infinities_in_foreign_blocks_stay_there(form, architecture):
    """Task 0's own filters are so large that other tasks' pictures overflow in them; its own picture is black."""
    made = tiny(architecture, norm="folded", sharing=0.6, pruning=0.0)
    family = align(made.nets)
    space = wire(family).carries[formed_layers(family)[0].output][0]
    own = [block for block in made.planted[space].blocks_of(0) if len(block.tasks) == 1]
    mine = [channel for block in own for channel in block.members[0]]
    assert mine
    first = made.nets[0].ops[0]
    weight = first.weight.copy()
    weight[mine] = 3e38
    nets = (replace(made.nets[0], ops=(replace(first, weight=weight), *made.nets[0].ops[1:])), *made.nets[1:])
    pictures = images(nets)
    pictures[0][:] = 0
    with np.errstate(over="ignore"):
        overflowing = (pictures[1][0].sum(0) * np.float32(3e38)).astype(np.float32)
    assert np.isinf(overflowing).any()
    found = execute(lower(align(nets), made.planted, form), pictures)
    assert_close(found, separately(nets, pictures))


def test_split_stores_every_weight_once_and_multiplies_nothing_twice():
    for clusters in (None, [[0, 1], [1, 2]]):
        made = tiny(tasks=4, sharing=0.5, clusters=clusters, pruning=0.0, batches=[1, 2, 1, 1])
        family = align(made.nets)
        counts = count(lower(family, made.planted, "split"))
        assert counts.weight_bytes == 4 * count_kernels(family, made.planted).unique
        assert counts.macs == sum(net.batch * macs(net) for net in made.nets)


def test_half_stores_every_weight_once_where_all_share_or_none():
    made = tiny(tasks=3, sharing=0.6, pruning=0.0)
    family = align(made.nets)
    assert count(lower(family, made.planted, "half")).weight_bytes == 4 * count_kernels(family, made.planted).unique


@pytest.mark.parametrize("form", ["mts", "grouped"])
def test_weights_of_the_matrix_forms_follow_their_formula(form):
    made = tiny("tiny-mobile", tasks=3, sharing=0.6, widths=[1.0, 0.8, 1.2])
    family = align(made.nets)
    wiring, planted = wire(family), tidy(made.planted)
    layout, copies = (STITCHED, 1) if form == "mts" else (COMPACT, 3)
    numbers = 0
    for layer in formed_layers(family):
        outs = channels(layer.output, wiring, planted).width(layout)
        ins = 1 if layer.op.depthwise else channels(layer.inputs[0], wiring, planted).width(layout)
        numbers += copies * outs * ins * np.prod(layer.op.window.kernel)
    assert count(lower(family, made.planted, form)).weight_bytes == 4 * numbers


def test_pieces_cut_a_layer_at_its_blocks():
    made = tiny(tasks=2, sharing=0.5, pruning=0.0)
    family = align(made.nets)
    layer = formed_layers(family)[1]
    found = pieces(layer, wire(family), made.planted)
    assert {piece.tasks for piece in found} == {frozenset({0, 1}), frozenset({0}), frozenset({1})}
    for piece in found:
        for task in piece.tasks:
            own = layer.ops[task].weight[np.ix_(piece.out.members[task], piece.inp.members[task])]
            assert np.array_equal(piece.array, own)


def test_everything_shared_is_one_model_on_all_rows():
    made = tiny("tiny-vgg", norm="shared", sharing=1.0)
    for form in ("mts", "split", "half"):
        graph = lower(align(made.nets), made.planted, {**dict.fromkeys(names(made.nets), form), "fc2": "separate"})
        ops = [step.op for step in graph.steps]
        assert ops.count("Conv") + ops.count("Gemm") == len(names(made.nets)) - 1 + len(made.nets)
        assert not {"Where", "Gather", "Mul"} & set(ops)


def test_a_mask_only_before_channels_mix():
    made = tiny("tiny-vgg", norm="shared", sharing=0.6)
    graph = lower(align(made.nets), made.planted, "mts")
    masks = [step for step in graph.steps if step.op == "Where"]
    assert len(masks) == len(names(made.nets)) - 1, "the picture is shared, so the first layer needs none"
    convs = [step for step in graph.steps if step.op in ("Conv", "Flatten")]
    assert {step.inputs[0] for step in convs[1:]} >= {mask.outputs[0] for mask in masks}


def test_relu_follows_its_convolution_at_once():
    made = tiny("tiny-vgg", norm="shared", sharing=0.6)
    for form in ("mts", "grouped", "separate"):
        graph = lower(align(made.nets), made.planted, form)
        products = {step.outputs[0] for step in graph.steps if step.op == "Conv"}
        assert {step.op for step in graph.steps if step.inputs[0] in products} == {"Relu"}


def test_outputs_that_are_shared_in_another_order():
    """Both models have the same classifier, each with its classes in an order of its own."""
    rng = np.random.default_rng(0)
    weight, orders = rng.standard_normal((4, 3, 1, 1), np.float32), [np.array([2, 0, 3, 1]), np.array([1, 3, 0, 2])]
    nets = tuple(
        plain_net(f"n{task}", [Op("fc", "conv", ("x",), "y", weight[order])]) for task, order in enumerate(orders)
    )
    members = {task: np.argsort(order) for task, order in enumerate(orders)}
    sharing = Sharing({"x": ChannelSpace.common(3, 2), "y": ChannelSpace((4, 4), (Block(members),))})
    for form in ANYWHERE:
        check(nets, sharing, form)


def test_bias_and_normalisation_one_after_another_become_one():
    rng = np.random.default_rng(0)

    def net(task):
        affine = [
            Op(f"a{number}", "affine", (f"v{number}",), f"v{number + 1}", scale=scale, shift=rng.standard_normal(4))
            for number, scale in enumerate([None, rng.standard_normal(4)])
        ]
        conv = Op("conv", "conv", ("x",), "v0", rng.standard_normal((4, 3, 1, 1), np.float32))
        return plain_net(f"n{task}", [conv, *affine], output="v2")

    nets = (net(0), net(1))
    sharing = Sharing({"x": ChannelSpace.common(3, 2), "v0": ChannelSpace.completed((4, 4))})
    for form in ANYWHERE:
        graph = check(nets, sharing, form)
        assert not any(step.op in ("Mul", "Where") for step in graph.steps if form != "mts")


def test_normalisation_before_a_convolution():
    """It cannot be folded, and its shift must not reach foreign blocks."""
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((2, 6, 3, 1, 1), np.float32), rng.standard_normal((6, 6, 3, 3), np.float32)
    first[1, :4], second = first[0, :4], np.stack([second, rng.standard_normal((6, 6, 3, 3), np.float32)])
    second[1, :4, :4] = second[0, :4, :4]

    def net(task):
        return plain_net(
            f"n{task}",
            [
                Op("one", "conv", ("x",), "a", first[task]),
                Op("pool", "max_pool", ("a",), "b", window=Window((2, 2), (1, 1), (0, 0, 1, 1))),
                Op("norm", "affine", ("b",), "c", scale=rng.standard_normal(6), shift=rng.standard_normal(6)),
                Op("act", "unary", ("c",), "d", function="Sigmoid"),
                Op("two", "conv", ("d",), "y", second[task], window=Window((3, 3), (1, 1), (1, 1, 1, 1))),
            ],
            size=(5, 5),
        )

    blocks = (Block({0: np.arange(4), 1: np.arange(4)}), Block({0: np.arange(4, 6)}), Block({1: np.arange(4, 6)}))
    space = ChannelSpace((6, 6), blocks)
    for form in ANYWHERE:
        check((net(0), net(1)), Sharing({"x": ChannelSpace.common(3, 2), "a": space, "y": space}), form)


@dataclass(frozen=True)
class Softmax:
    """Foreign to the stitcher, as it mixes channels."""

    value: Value
    signature: str = "Softmax"

    def steps(self, builder: Builder, inputs: list[str]) -> str:
        return builder.add("Softmax", inputs[0], shape=builder.shape(inputs[0]), axis=1)


@pytest.mark.parametrize("form", ANYWHERE)
def test_islands_and_grouped_convolutions_run_task_by_task(form):
    made = tiny("tiny-vgg", batches=2, pruning=0.0)
    family = align(made.nets)
    cut = next(number for number, op in enumerate(made.nets[0].ops) if op.kind == "max_pool")

    def with_island(net):
        value, after = net.ops[cut].output, [*net.ops[cut + 1 :]]
        size = net.values[value]
        weight = np.random.default_rng(size.channels).standard_normal((size.channels, 1, 3, 3), np.float32)
        window, half = Window((3, 3), (1, 1), (1, 1, 1, 1)), size.channels // 2
        pairs = np.concatenate([weight[: 2 * half]] * 2, axis=1)
        island = Op("soft", "island", (value,), "soft", payload=Softmax(size))
        grouped = Op("pairs", "conv", ("soft",), "paired", pairs, window=window, groups=half)
        after[0] = replace(after[0], inputs=("paired",), weight=after[0].weight[:, : 2 * half])
        return assemble(net.name, net.inputs, [*net.ops[: cut + 1], island, grouped, *after], net.outputs, net.batch)

    nets = tuple(map(with_island, made.nets))
    wiring = wire(align(nets))
    spaces = {
        name: made.planted.spaces.get(name) or ChannelSpace.completed(wiring.widths[name]) for name in wiring.widths
    }
    reader = wire(family).carries[made.nets[0].ops[cut + 1].output][0]
    spaces[reader] = ChannelSpace.completed(wiring.widths[reader])
    graph = lower(align(nets), Sharing(spaces), form)
    assert sum(step.op == "Softmax" for step in graph.steps) == 3
    pictures = images(nets)
    alone = [answer for net, each in zip(nets, pictures, strict=True) for answer in execute(plain_graph(net), [each])]
    assert_close(execute(graph, pictures), alone)


@pytest.mark.parametrize("form", ANYWHERE)
def test_tails_that_differ(form):
    made = tiny(batches=2)

    def with_tail(net, task):
        answer = net.outputs[0]
        tail = [Op("act", "unary", (answer.value,), "last", function=["Sigmoid", "Tanh", "Relu"][task])]
        return assemble(net.name, net.inputs, [*net.ops, *tail], (replace(answer, value="last"),), net.batch)

    nets = tuple(with_tail(net, task) for task, net in enumerate(made.nets))
    family = align(nets, islands=True)
    assert all(len(tail) == 1 for tail in family.tails)
    pictures = images(nets)
    assert_close(execute(lower(family, made.planted, form), pictures), separately(nets, pictures))


def test_ports_are_named_after_their_models():
    made = tiny(tasks=2)
    graph = lower(align(made.nets), made.planted, "split")
    assert [tensor.name for tensor in graph.inputs] == ["tinynet-0.image", "tinynet-1.image"]
    assert [(tensor.name, tensor.shape) for tensor in graph.outputs] == [
        ("tinynet-0.logits", (1, 3)),
        ("tinynet-1.logits", (1, 4)),
    ]


def test_what_cannot_be_done_says_why():
    made = tiny(batches=[1, 2, 1])
    family = align(made.nets)
    first = names(made.nets)[0]
    with pytest.raises(StitchError, match=rf"{first}.*'grouped'.*\[1, 2, 1\].*'separate'"):
        lower(family, made.planted, "grouped")
    with pytest.raises(StitchError, match="'grouped' cannot do it, its rows are only known at run time"):
        lower(family, made.planted, "grouped", dynamic=True)
    with pytest.raises(StitchError, match=f"{first}: no form is named for it"):
        lower(family, made.planted, {})
    with pytest.raises(StitchError, match="unknown form 'splitt'; did you mean split"):
        lower(family, made.planted, "splitt")
    with pytest.raises(StitchError, match="2 batches for 3 models"):
        lower(family, made.planted, "split", batches=[1, 1])
    twins = replace(family, nets=tuple(replace(net, name="same") for net in family.nets))
    with pytest.raises(StitchError, match=r"two ports are called same\.image"):
        lower(twins, made.planted, "split")


@pytest.mark.parametrize("function", [
    "Relu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "LeakyRelu", "Elu", "Clip", "Softplus", "Gelu", "Exp", "Neg",
    "Abs", "Sqrt", "Silu",
])  # fmt: skip
def test_functions_that_move_zero_are_known(function):
    for settings_ in ({"alpha": 0.2, "beta": 0.5}, {"alpha": 0.2, "beta": 0.0, "min": 0.1}, {"min": -1.0, "max": 6.0}):
        given_ = {"alpha": 0.2, "beta": 0.5, **settings_}
        op = Op("act", "unary", ("x",), "y", function=function, settings=given_)
        assert keeps_zero(op) == (_unary(op, np.zeros(1))[0] == 0)


def test_columns_of_the_layouts():
    """Two spaces: the first shared by all but for one channel each, the second only in parts."""
    one = ChannelSpace((3, 2), (Block({0: np.array([1, 2]), 1: np.array([0, 1])}), Block({0: np.array([0])})))
    two = ChannelSpace((1, 2), (Block({0: np.array([0])}), Block({1: np.array([1, 0])})))
    both = Channels((one, two))
    assert both.order(0).tolist() == [1, 2, 0, 3]
    assert both.order(1).tolist() == [0, 1, 3, 2]
    assert both.columns(STITCHED, 0).tolist() == [0, 1, 2, 3]
    assert both.columns(STITCHED, 1).tolist() == [0, 1, 4, 5]
    assert both.columns(COMPACT, 0).tolist() == [0, 1, 2, 3]
    assert both.columns(COMPACT, 1).tolist() == [0, 1, 3, 4]
    assert both.columns(STACKED, 1).tolist() == [5, 6, 8, 9]
    aligned = Layout("compact", 4)
    assert both.width(aligned) == 12
    assert both.columns(aligned, 0).tolist() == [0, 1, 4, 8]
    assert both.owned(COMPACT).tolist() == [[True, True, True, True, False], [True, True, False, True, True]]


def test_tidy_puts_one_block_for_each_set_of_tasks():
    own = [Block({0: np.array([3])}), Block({0: np.array([1])}), Block({1: np.array([0])})]
    common = [Block({0: np.array([2]), 1: np.array([2])}), Block({0: np.array([0]), 1: np.array([1])})]
    space = tidy(Sharing({"s": ChannelSpace((4, 3), (*own[:2], *common, own[2]))}))["s"]
    assert [sorted(block.tasks) for block in space.blocks] == [[0, 1], [0], [1]]
    assert space.order(0).tolist() == [0, 2, 1, 3]
    assert space.order(1).tolist() == [1, 2, 0]


def test_counts_of_a_graph_written_by_hand():
    builder = Builder("hand")
    x = builder.input("x", (1, 2, 4, 4))
    weight = builder.constant(np.ones((3, 2, 1, 1), np.float32), "weight", weight=True)
    builder.layer = "conv"
    y = builder.add("Conv", x, weight, shape=(1, 3, 4, 4), kernel_shape=[1, 1])
    z = builder.add("Relu", y, shape=(1, 3, 4, 4))
    builder.layer = ""
    flat = builder.add("Flatten", z, shape=(1, 48), axis=1)
    builder.output(flat, "out")
    counts = count(builder.finish())
    assert counts.macs == 3 * 2 * 16
    assert counts.weight_bytes == 24
    assert counts.table_bytes == 0
    assert counts.launches == 2, "views and outputs are none"
    assert counts.activation_bytes == 4 * (48 + 48), "x is gone when the relu runs"
    assert counts.layers["conv"].macs == 96
    assert counts.layers["conv"].launches == 2


def test_counts_by_layer_add_up():
    made = tiny("tiny-mobile", tasks=2)
    for form in ANYWHERE:
        counts = count(lower(align(made.nets), made.planted, form))
        assert sum(each.macs for each in counts.layers.values()) == counts.macs
        assert sum(each.weight_bytes for each in counts.layers.values()) == counts.weight_bytes
        assert sum(each.launches for each in counts.layers.values()) == counts.launches
    dynamic = lower(align(made.nets), made.planted, "split", dynamic=True)
    assert count(dynamic).macs > 0


def names(nets) -> list[str]:
    return [layer.name for layer in formed_layers(align(nets))]


def plain_net(name: str, ops: list[Op], *, size: tuple[int, ...] = (1, 1), output: str = "y") -> Net:
    """A net of one input ``x`` of three channels."""
    inside = assemble(name, (Port("in", "x", (3, *size)),), ops, ())
    last = inside.values[output]
    return replace(inside, outputs=(Port("out", output, (last.channels, last.height, last.width)),))

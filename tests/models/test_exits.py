"""Models with exits: where a graph can be cut, exits placed in any model, and outputs of a file named as exits."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from tests.models.onnx_graphs import BOOL, F32, graph, ints, node, proto, read, scalar, tensor, unshaped, weight
from tests.support.commands import run
from weft.base.errors import ModelError
from weft.models import (
    Exit,
    Gemm,
    Layer,
    Model,
    import_onnx,
    subnets,
    with_exits,
)
from weft.models.exits import exit_shares
from weft.models.sources import load_model
from weft.models.zoo import ZOO, load


def chain(*macs: int, block_ends: tuple[int, ...] | None = None, **more) -> Model:
    """A model of one column each; it may be cut anywhere unless told otherwise."""
    layers = tuple(
        Layer(f"l{place}", "gemm", "Gemm", Gemm(1, size, 1), weights=size, output_elements=1)
        for place, size in enumerate(macs)
    )
    return Model("chain", layers, block_ends=tuple(range(1, len(macs))) if block_ends is None else block_ends, **more)


def refused(call, *args, **more) -> str:
    with pytest.raises(ModelError) as caught:
        call(*args, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestTheValue:
    def test_exits_stand_in_order_within_the_model(self):
        model = chain(1, 1, 1, exits=(Exit("a", 1), Exit("b", 2)))
        assert [list(each) for each in subnets(model)] == [[0], [1], [2]]

    @pytest.mark.parametrize(
        ("exits", "says"),
        [
            ((Exit("a", 0),), "exit 'a' is after 0 layers, must be 1 to 2"),
            ((Exit("a", 3),), "exit 'a' is after 3 layers, must be 1 to 2; the end needs no exit"),
            ((Exit("b", 2), Exit("a", 1)), "exit 'a' (after 1 layers) must come after 'b' (after 2)"),
            ((Exit("a", 1), Exit("b", 1)), "list exits from shallow to deep"),
            ((Exit("a", 1), Exit("a", 2)), "each its own"),
            ((Exit("", 1),), "exits need names"),
        ],
    )
    def test_others_are_refused(self, exits, says):
        assert says in refused(chain, 1, 1, 1, exits=exits)

    @pytest.mark.parametrize("ends", [(0,), (2, 1), (1, 1), (3,)])
    def test_block_ends_ascend_within_the_model(self, ends):
        assert "block_ends must ascend within 3 layers" in refused(chain, 1, 1, 1, block_ends=ends)

    def test_every_block_end_has_its_shape_or_none_has(self):
        assert "1 block_shapes for 2 block_ends" in refused(chain, 1, 1, 1, block_shapes=((1, 1),))

    def test_a_model_without_exits_is_one_subnet(self):
        assert subnets(chain(1, 2)) == (range(2),)
        assert exit_shares(chain(1, 2)) == (1.0,)


def conv(x: str, y: str, *, name: str | None = None) -> onnx.NodeProto:
    return node("Conv", [x, "w"], [y], name=name or y, pads=[1, 1, 1, 1])


IMAGE, WEIGHT = tensor("x", 1, 4, 6, 6), weight("w", 4, 4, 3, 3)


class TestBlockEnds:
    def test_a_chain_can_be_cut_between_any_two_layers(self):
        model = read(
            [conv("x", "a"), node("MaxPool", ["a"], ["b"], kernel_shape=[2, 2]), conv("b", "y")],
            [IMAGE],
            ["y"],
            [WEIGHT],
        )
        assert model.block_ends == (1, 2)
        assert model.block_shapes == ((36, 4), (25, 4))

    def test_a_skip_connection_holds_a_block_together(self):
        nodes = [conv("x", "a"), conv("a", "b"), conv("b", "c"), node("Add", ["a", "c"], ["d"]), conv("d", "y")]
        assert read(nodes, [IMAGE], ["y"], [WEIGHT]).block_ends == (1, 4)

    def test_folded_followers_belong_to_their_layer(self):
        nodes = [conv("x", "a"), node("Relu", ["a"], ["b"]), conv("b", "c"), node("Relu", ["c"], ["y"])]
        model = read(nodes, [IMAGE], ["y"], [WEIGHT])
        assert [layer.op for layer in model.layers] == ["Conv+Relu", "Conv+Relu"]
        assert model.block_ends == (1,)

    def test_a_finished_output_does_not_cross(self):
        nodes = [conv("x", "a"), node("GlobalAveragePool", ["a"], ["early"]), conv("a", "y")]
        assert read(nodes, [IMAGE], ["early", "y"], [WEIGHT]).block_ends == (1, 2)

    def test_an_output_that_is_read_again_crosses(self):
        nodes = [conv("x", "a"), conv("a", "b"), node("Add", ["a", "b"], ["y"])]
        assert read(nodes, [IMAGE], ["a", "y"], [WEIGHT]).block_ends == (1,)

    def test_inputs_and_masks_made_of_them_do_not_count(self):
        nodes = [node("Sigmoid", ["m"], ["mask"]), conv("x", "a"), node("Mul", ["a", "mask"], ["b"]), conv("b", "c"),
                 node("Mul", ["c", "mask"], ["d"]), node("Sub", ["d", "x"], ["y"])]  # fmt: skip
        model = read(nodes, [IMAGE, tensor("m", 1, 4, 6, 6)], ["y"], [WEIGHT])
        assert model.layers[0].op == "Sigmoid"
        assert model.block_ends == (2, 3, 4, 5)

    def test_a_sequence_keeps_alive_what_was_put_into_it(self):
        nodes = [conv("x", "a"), conv("a", "b"), node("SequenceConstruct", ["a", "b"], ["s"]), conv("b", "c"),
                 node("ConcatFromSequence", ["s"], ["d"], axis=1), node("Add", ["c", "c2"], ["e"]),
                 node("Concat", ["d", "e"], ["y"], axis=1)]  # fmt: skip
        model = read(nodes, [IMAGE], ["y"], [WEIGHT, weight("c2", 4, 6, 6)])
        assert 2 not in model.block_ends and 1 in model.block_ends

    def test_the_body_of_a_branch_is_not_cut(self):
        then = graph([conv("a", "t1"), conv("t1", "t2")], [], ["t2"])
        other = graph([node("Relu", ["a"], ["e"])], [], ["e"])
        nodes = [conv("x", "a"), node("If", ["c"], ["b"], then_branch=then, else_branch=other), conv("b", "y")]
        model = read(nodes, [IMAGE, tensor("c", dtype=BOOL)], ["y"], [WEIGHT])
        assert [layer.name for layer in model.layers] == ["a", "If_1/then/t1", "If_1/then/t2", "y"]
        assert model.block_ends == (1, 3)

    def test_a_computed_condition_crosses_until_its_branch(self):
        then = graph([conv("b", "t")], [], ["t"])
        other = graph([conv("b", "e")], [], ["e"])
        nodes = [
            conv("x", "a"),
            node("ReduceMax", ["a"], ["top"], keepdims=0),
            node("Greater", ["top", "half"], ["sure"]),
            conv("a", "b"),
            conv("b", "b2"),
            node("If", ["sure"], ["y"], then_branch=then, else_branch=other),
        ]
        model = read(nodes, [IMAGE], ["y", "b2"], [WEIGHT, scalar("half", np.float32(0.5))])
        assert model.block_ends == (1,)

    def test_the_results_of_a_loop_keep_its_body_alive(self):
        body = graph(
            [conv("s", "s2"), node("Identity", ["s2"], ["kept"]), node("Identity", ["go"], ["on"])],
            [tensor("i", dtype=7), tensor("go", dtype=BOOL), tensor("s", 1, 4, 6, 6)],
            [tensor("on", dtype=BOOL), tensor("s2", 1, 4, 6, 6), tensor("kept", 1, 4, 6, 6)],
        )
        nodes = [conv("x", "a"), node("Loop", ["n", "", "a"], ["last", "all"], body=body), conv("last", "b"),
                 node("ReduceSum", ["all", "axis"], ["sum"], keepdims=0), node("Add", ["b", "sum"], ["y"])]  # fmt: skip
        model = read(nodes, [IMAGE], ["y"], [WEIGHT, scalar("n", np.int64(3)), ints("axis", 0)])
        assert [layer.op for layer in model.layers] == ["Conv", "Conv", "Conv", "ReduceSum", "Add"]
        assert model.block_ends == (1, 2)

    def test_an_operator_of_several_layers_is_not_cut(self):
        nodes = [
            node("MatMul", ["x", "w"], ["a"]),
            node("Attention", ["a", "qkv"], ["b"], domain="com.microsoft", num_heads=2),
            node("MatMul", ["b", "w"], ["y"]),
        ]
        model = read(nodes, [tensor("x", 1, 5, 8)], ["y"], [weight("w", 8, 8), weight("qkv", 8, 24)])
        assert len(model.layers) == 5
        assert model.block_ends == (1, 4)
        assert model.block_shapes == ((5, 8), (5, 8))

    def test_channels_are_the_axis_that_is_multiplied_next(self):
        def two(op: str, x: tuple[int, ...], u: tuple[int, ...], v: tuple[int, ...]) -> Model:
            nodes = [node(op, ["x", "u"], ["a"]), node(op, ["a", "v"], ["y"])]
            return read(nodes, [tensor("x", *x)], ["y"], [weight("u", *u), weight("v", *v)])

        tokens, signal = two("MatMul", (1, 3, 8), (8, 16), (16, 2)), two("Conv", (1, 8, 30), (16, 8, 1), (2, 16, 1))
        assert (tokens.block_shapes, signal.block_shapes) == (((3, 16),), ((30, 16),))

    def test_before_a_flattened_image_the_product_behind_tells_the_channels(self):
        nodes = [
            node("Conv", ["x", "w"], ["a"]),
            node("Transpose", ["a"], ["b"], perm=[0, 2, 3, 1]),
            node("Flatten", ["b"], ["c"]),
            node("Gemm", ["c", "fc"], ["y"]),
        ]
        model = read(nodes, [tensor("x", 1, 2, 6, 5)], ["y"], [weight("w", 7, 2, 3, 3), weight("fc", 84, 3)])
        assert model.block_shapes == ((12, 7), (12, 7))


class TestPlacing:
    @pytest.mark.parametrize(
        ("name", "shares"), [("resnet50", (0.28, 0.53, 0.75)), ("inception-v3", (0.23, 0.48, 0.72))]
    )
    def test_three_exits_lie_where_a_second_implementation_put_them(self, name, shares):
        assert exit_shares(with_exits(load(name), 3)) == pytest.approx((*shares, 1), abs=0.006)

    @pytest.mark.parametrize("name", [name for name in ZOO if not name.endswith("large")])
    @pytest.mark.parametrize("head", ["fc", "conv"])
    def test_every_network_of_the_zoo_takes_three(self, name, head):
        plain = load(name)
        model = with_exits(plain, 3, head=head)
        assert tuple(layer for layer in model.layers if not layer.name.startswith("exit")) == plain.layers
        assert len({layer.name for layer in model.layers}) == len(model.layers)
        assert [each.name for each in model.exits] == ["exit1", "exit2", "exit3"]
        added = model.macs / plain.macs - 1
        assert 0.02 < added < 0.04 if head == "conv" else added < 0.005

    def test_the_head_of_a_resnet_averages_channels_and_tells_its_classes_apart(self):
        model = with_exits(load("resnet50"), 1)
        pool, fc = model.layers[model.exits[0].after - 2 : model.exits[0].after]
        assert (pool.name, pool.kind, pool.input_elements, pool.output_elements) == (
            "exit1/pool",
            "pool",
            14 * 14 * 1024,
            1024,
        )
        assert (fc.name, fc.gemm, fc.weights, fc.parameters) == ("exit1/fc", Gemm(1, 1024, 1000), 1024000, 1025000)

    def test_classes_can_be_given(self):
        model = with_exits(load("resnet50"), 2, classes=7)
        assert [layer.gemm.n for layer in model.layers if layer.name.endswith("/fc")] == [7, 7]

    def test_a_convolution_is_three_by_three_where_it_has_enough_channels(self):
        deep = with_exits(load("mobilenet-v2"), 3, head="conv")
        kernels = [layer.gemm.kernel for layer in deep.layers if layer.name.endswith("/conv")]
        channels = [layer.gemm.n for layer in deep.layers if layer.name.endswith("/conv")]
        assert kernels == [1, 1, 9]
        assert min(channels) >= 32

    def test_the_head_stands_before_the_next_multiplication_and_cuts_remain(self):
        model = with_exits(chain(10, 10, 10, 10), 1)
        assert [layer.name for layer in model.layers] == ["l0", "l1", "exit1/pool", "exit1/fc", "l2", "l3"]
        assert model.exits == (Exit("exit1", 4),)
        assert model.block_ends == (1, 2, 4, 5)

    def test_the_norm_after_a_product_belongs_to_the_block(self):
        plain = chain(10, 10)
        norm = Layer("norm", "norm", "LayerNormalization", output_elements=1)
        model = with_exits(replace(plain, layers=(plain.layers[0], norm, plain.layers[1]), block_ends=(1, 2)), 1)
        assert [layer.name for layer in model.layers][:3] == ["l0", "norm", "exit1/pool"]

    def test_an_exit_leaves_room_for_those_after_it(self):
        model = with_exits(chain(1, 1, 1, 100), 3)
        names = [layer.name for layer in model.layers if not layer.name.endswith("/pool")]
        assert names == ["l0", "exit1/fc", "l1", "exit2/fc", "l2", "exit3/fc", "l3"]

    def test_no_exit_comes_before_the_first_multiplication_or_after_the_last(self):
        plain = chain(5, 5)
        norm = Layer("norm", "norm", "LayerNormalization", output_elements=1)
        model = replace(plain, layers=(norm, *plain.layers, replace(norm, name="last")), block_ends=(1, 2, 3))
        assert "has room for 1 exits" in refused(with_exits, model, 2)
        assert with_exits(model, 1).layers[2].name == "exit1/pool"

    def test_impossible_wishes_are_refused_in_one_line(self):
        model = chain(1, 1, 1)
        assert "exits = 0 must be at least 1" in refused(with_exits, model, 0)
        assert "has room for 2 exits" in refused(with_exits, model, 3)
        assert "did you mean conv?" in refused(with_exits, model, 1, head="covn")
        assert "at least 1 class, got 0" in refused(with_exits, model, 1, classes=0)
        assert "has exits already (exit1)" in refused(with_exits, with_exits(model, 1), 1)
        taken = replace(model, layers=(replace(model.layers[0], name="exit1/fc"), *model.layers[1:]))
        assert "a layer called 'exit1/fc' already" in refused(with_exits, taken, 1)
        weightless = Model("m", (Layer("a", "matmul", "MatMul", Gemm(1, 1, 1)),) * 2, block_ends=(1,))
        assert "say how many classes" in refused(with_exits, weightless, 1)

    @given(st.lists(st.integers(0, 100), min_size=2, max_size=25), st.data())
    def test_anywhere_exits_are_distinct_nearest_and_leave_the_model_as_it_was(self, macs, data):
        ends = data.draw(st.lists(st.integers(1, len(macs) - 1), unique=True).map(sorted))
        plain = Model(
            "m",
            tuple(
                Layer(f"l{i}", "gemm", "Gemm", Gemm(1, size, 1), weights=size)
                if size
                else Layer(f"l{i}", "norm", "Norm")
                for i, size in enumerate(macs)
            ),
            block_ends=tuple(ends),
        )
        done = {sum(macs[:end]) for end in ends} - {0, sum(macs)}
        count = data.draw(st.integers(1, 6))
        if count > len(done):
            assert f"has room for {len(done)} exits" in refused(with_exits, plain, count, classes=2)
            return
        model = with_exits(plain, count, classes=2)
        assert tuple(layer for layer in model.layers if not layer.name.startswith("exit")) == plain.layers
        assert [i for each in subnets(model) for i in each] == list(range(len(model.layers)))
        own = [[i for i in each if not model.layers[i].name.startswith("exit")] for each in subnets(model)]
        reached = [sum(model.layers[i].macs for each in own[: k + 1] for i in each) for k in range(count)]
        assert set(reached) <= done
        assert all(here < there for here, there in pairwise(reached))
        best = min(abs(place - sum(macs) / (count + 1)) for place in done)
        assert count > 1 or abs(reached[0] - sum(macs) / 2) == best
        assert {each.after for each in model.exits} <= set(model.block_ends)


def head(k: int, output: str) -> list[onnx.NodeProto]:
    pool = node("GlobalAveragePool", [f"t{k}"], [f"p{k}"], name=f"pool{k}")
    return [pool, node("Conv", [f"p{k}", "h"], [output], name=f"head{k}")]


def three_exits() -> onnx.ModelProto:
    """A trunk of three convolutions; the heads of the two exits stand at the end of the file."""
    trunk = [conv("x", "t1"), conv("t1", "t2"), conv("t2", "t3"), *head(3, "logits")]
    return proto(
        [*trunk, *head(1, "exit1"), *head(2, "exit2")],
        [IMAGE],
        ["logits", "exit1", "exit2"],
        [WEIGHT, weight("h", 10, 4, 1, 1)],
    )


NAMES = ("exit1", "exit2", "logits")


class TestNamedOutputs:
    def test_each_exit_comes_as_soon_as_all_it_needs_is_there(self):
        model = import_onnx(three_exits(), exits=NAMES)
        assert [layer.name for layer in model.layers] == [
            "t1", "pool1", "head1", "t2", "pool2", "head2", "t3", "pool3", "head3"
        ]  # fmt: skip
        assert model.exits == (Exit("exit1", 3), Exit("exit2", 6))
        assert model.block_ends == (1, 3, 4, 6, 7, 8)

    def test_without_names_the_file_stays_as_it_is(self):
        model = import_onnx(three_exits())
        assert model.exits == ()
        assert [layer.name for layer in model.layers][:3] == ["t1", "t2", "t3"]

    def test_a_file_marks_its_exits_in_its_metadata(self, tmp_path):
        file = three_exits()
        helper.set_model_props(file, {"weft.exits": " exit1, exit2 ,logits"})
        onnx.save(file, tmp_path / "net.onnx")
        assert [each.name for each in load_model(str(tmp_path / "net.onnx")).exits] == ["exit1", "exit2"]
        other = load_model(str(tmp_path / "net.onnx"), exits=("exit2", "logits"))
        assert [each.name for each in other.exits] == ["exit2"]
        assert "has exits already (exit1, exit2)" in refused(load_model, str(tmp_path / "net.onnx"), exits=1)

    def test_a_file_that_marks_only_its_end_has_no_early_exits(self):
        file = three_exits()
        helper.set_model_props(file, {"weft.exits": "logits"})
        assert import_onnx(file).exits == ()

    def test_what_no_exit_needs_comes_last(self):
        model = import_onnx(three_exits(), exits=("exit2", "logits"))
        assert [layer.name for layer in model.layers][-2:] == ["pool1", "head1"]
        assert [list(each) for each in subnets(model)] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]

    @pytest.mark.parametrize(
        ("exits", "says"),
        [
            (("exit1", "nope"), "no output is called 'nope' to be an exit; the outputs are: logits, exit1, exit2"),
            (("exit1", "exit1", "logits"), "the exit 'exit1' is named twice"),
            (("logits", "exit1"), "exits are out of order: 'logits' needs 15592 MACs and 'exit1' after it 5224"),
            (("exit2", "exit1", "logits"), "name them from shallow to deep"),
            (("logits",), "exits need at least two outputs"),
            ((), "exits need at least two outputs"),
            ("logits", "must be a list of output names"),
        ],
    )
    def test_exits_that_make_no_sense_are_refused(self, exits, says):
        assert says in refused(import_onnx, three_exits(), exits=exits)

    def test_an_exit_adds_a_layer_to_those_before_it(self):
        nodes = [
            conv("x", "a"),
            node("Relu", ["a"], ["b"]),
            node("Softmax", ["b"], ["y"]),
            node("Identity", ["b"], ["c"]),
        ]
        names = refused(import_onnx, proto(nodes, [IMAGE], ["y", "b", "c"], [WEIGHT]), exits=("y", "b"))
        assert "the exit 'b' adds no layer to what 'y' needs; name exits from shallow to deep" in names
        assert "'c' adds no layer to what 'b'" in refused(
            import_onnx, proto(nodes, [IMAGE], ["y", "b", "c"], [WEIGHT]), exits=("b", "c", "y")
        )

    def test_an_input_handed_out_is_no_exit(self):
        nodes = [node("Identity", ["x"], ["same"]), conv("x", "y")]
        assert "the exit 'same' needs no layer" in refused(
            import_onnx, proto(nodes, [IMAGE], ["same", "y"], [WEIGHT]), exits=("same", "y")
        )

    def test_exits_inside_one_branch_cannot_be_cut_apart(self):
        then = graph([conv("x", "t1"), conv("t1", "t2")], [], ["t1", "t2"])
        other = graph([conv("x", "e1"), conv("e1", "e2")], [], ["e1", "e2"])
        step = node("If", ["c"], ["early", "late"], name="gate", then_branch=then, else_branch=other)
        file = proto([step], [IMAGE, tensor("c", dtype=BOOL)], ["early", "late"], [WEIGHT])
        assert "come out of the body of gate, which cannot be cut" in refused(
            import_onnx, file, exits=("early", "late")
        )

    def test_a_branch_stays_whole_on_its_side_of_an_exit(self):
        then = graph([conv("a", "t1"), conv("t1", "t2")], [], ["t2"])
        other = graph([node("Relu", ["a"], ["e"])], [], ["e"])
        nodes = [conv("x", "a"), node("If", ["c"], ["b"], name="gate", then_branch=then, else_branch=other),
                 node("Conv", ["a", "w"], ["early"], name="early"), conv("b", "y")]  # fmt: skip
        model = import_onnx(
            proto(nodes, [IMAGE, tensor("c", dtype=BOOL)], ["early", "y"], [WEIGHT]), exits=("early", "y")
        )
        assert [layer.name for layer in model.layers] == ["a", "early", "gate/then/t1", "gate/then/t2", "y"]
        assert model.exits == (Exit("early", 2),)

    def test_marks_that_are_not_text_are_a_damaged_file(self, tmp_path):
        file = three_exits()
        helper.set_model_props(file, {"weft.exits": "exit1,logits"})
        path = tmp_path / "net.onnx"
        path.write_bytes(file.SerializeToString().replace(b"exit1,logits", b"exit1,\xff\xfe\xff\xfe\xff\xfe"))
        assert "net.onnx" in refused(import_onnx, path)


class Drawn:
    """A random graph of convolutions, activations, sums and views, with what its names mean worked out plainly."""

    def __init__(self, choices: list[tuple[int, int, int]]) -> None:
        self.inputs: dict[str, list[str]] = {}
        self.ops: dict[str, str] = {}
        self.known: dict[str, frozenset[str]] = {"x": frozenset()}
        names = ["x"]
        for place, (kind, first, second) in enumerate(choices):
            op = ("Conv", "Conv", "Relu", "Sigmoid", "Add", "MaxPool", "Identity")[kind]
            reads = [names[first % len(names)], names[second % len(names)]][: 2 if op == "Add" else 1]
            self.ops[f"n{place}"], self.inputs[f"n{place}"] = op, reads
            names.append(f"n{place}")
        read_names = {each for reads in self.inputs.values() for each in reads}
        self.sinks = [name for name in self.ops if name not in read_names]

    def proto(self, outputs: list[str]) -> onnx.ModelProto:
        attributes = {"Conv": {"pads": [1] * 4}, "MaxPool": {"kernel_shape": [3, 3], "pads": [1] * 4}}
        nodes = [
            node(
                op, [*self.inputs[name], *(["w"] if op == "Conv" else [])], [name], name=name, **attributes.get(op, {})
            )
            for name, op in self.ops.items()
        ]
        return proto(nodes, [IMAGE], [unshaped(name, F32) for name in outputs], [WEIGHT])

    def needs(self, name: str) -> frozenset[str]:
        """A tensor's node and all before it."""
        if name not in self.known:
            self.known[name] = frozenset([name]).union(*(self.needs(each) for each in self.inputs[name]))
        return self.known[name]

    def layers(self, name: str) -> frozenset[str]:
        return frozenset(each for each in self.needs(name) if self.ops[each] != "Identity")

    def convolutions(self, name: str) -> int:
        return sum(self.ops[each] == "Conv" for each in self.needs(name))


STEPS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40), st.integers(0, 40)), min_size=3, max_size=14)
GRAPHS = STEPS.map(Drawn).filter(lambda drawn: set(drawn.ops.values()) != {"Identity"})


def counts(model: Model) -> Counter[Layer]:
    """Layers whatever their order; a weight that layers share counts for the first of them."""
    return Counter(replace(layer, parameters=0) for layer in model.layers)


class TestRandomGraphs:
    @settings(max_examples=30)
    @given(GRAPHS, st.data())
    def test_naming_exits_only_reorders_layers_and_producers_stay_first(self, drawn, data):
        early = data.draw(st.lists(st.sampled_from(sorted(drawn.ops)), min_size=1, max_size=3, unique=True))
        chosen = sorted({*early, drawn.sinks[-1]}, key=lambda name: (drawn.convolutions(name), len(drawn.layers(name))))
        outputs = list(dict.fromkeys([*drawn.sinks, *chosen]))
        before: frozenset[str] = frozenset()
        adds = []
        for name in chosen:
            adds.append(bool(drawn.layers(name) - before))
            before |= drawn.layers(name)
        if len(chosen) < 2 or not all(adds):
            with pytest.raises(ModelError, match="exit"):
                import_onnx(drawn.proto(outputs), exits=chosen)
            return
        plain, model = import_onnx(drawn.proto(outputs)), import_onnx(drawn.proto(outputs), exits=chosen)
        assert counts(model) == counts(plain)
        place = {layer.name: index for index, layer in enumerate(model.layers)}
        assert all(place[other] <= place[name] for name in place for other in drawn.needs(name) if other in place)
        reached: frozenset[str] = frozenset()
        for each, name in zip(model.exits, chosen, strict=False):
            reached |= drawn.layers(name)
            assert set(list(place)[: each.after]) == reached & place.keys()

    @settings(max_examples=30)
    @given(GRAPHS)
    def test_block_ends_are_where_one_activation_crosses(self, drawn):
        model = import_onnx(drawn.proto(drawn.sinks))
        place = {layer.name: index for index, layer in enumerate(model.layers)}

        def layer_of(name: str) -> int:
            """A view or a folded follower belongs to the layer it reads."""
            return -1 if name == "x" else place[name] if name in place else layer_of(drawn.inputs[name][0])

        def memory(name: str) -> str:
            return memory(drawn.inputs[name][0]) if drawn.ops.get(name) == "Identity" else name

        edges = {
            (memory(source), layer_of(source), layer_of(name))
            for name, sources in drawn.inputs.items()
            for source in sources
            if drawn.ops[name] != "Identity" and source != "x" and drawn.convolutions(source)
        }
        crossing = [{name for name, here, there in edges if here < cut <= there} for cut in range(len(model.layers))]
        assert model.block_ends == tuple(cut for cut, names in enumerate(crossing) if len(names) == 1)


class TestDamage:
    VALID = (lambda file: helper.set_model_props(file, {"weft.exits": ",".join(NAMES)}) or file.SerializeToString())(
        three_exits()
    )

    @settings(max_examples=50)
    @given(st.integers(0, len(VALID) - 1), st.integers(0, 255))
    def test_a_damaged_file_is_a_model_or_one_line(self, place, value):
        content = bytearray(self.VALID)
        content[place] = value
        try:
            file = onnx.ModelProto.FromString(bytes(content))
        except Exception:  # not a protobuf any more
            return
        try:
            import_onnx(file, name="damaged")
        except ModelError as error:
            assert "\n" not in str(error)


class TestSources:
    def test_exits_are_placed_in_a_network_of_the_zoo(self):
        model = load_model("resnet50", exits=2, exit_head="conv")
        assert [each.name for each in model.exits] == ["exit1", "exit2"]
        assert load_model("resnet50", exits=2, exit_head="conv") is model
        assert load_model("resnet50").exits == ()

    def test_names_are_for_files(self):
        assert "say how many to place" in refused(load_model, "resnet50", exits=("a", "logits"))

    def test_exits_are_placed_in_a_file(self, tmp_path):
        onnx.save(three_exits(), tmp_path / "net.onnx")
        assert len(load_model(str(tmp_path / "net.onnx"), exits=2).exits) == 2
        assert "no output is called 'a'" in refused(load_model, str(tmp_path / "net.onnx"), exits=("a", "b"))


class TestCommandLine:
    def test_show_prints_exits_and_their_shares(self, capsys, tmp_path):
        out = tmp_path / "model.json"
        code, printed, _ = run(capsys, "models", "show", "resnet50", "--exits", "3", "--json", str(out))
        assert code == 0
        assert [line.split() for line in printed.splitlines() if line.startswith(("exit1", "exit3", "end"))] == [
            ["exit1", "26", "26", "28.3%"],
            ["exit3", "71", "22", "74.8%"],
            ["end", "94", "23", "100.0%"],
        ]
        written = json.loads(out.read_text())
        assert written["exits"][0] == {"name": "exit1", "after": 26}
        assert 26 in written["block_ends"]

    def test_show_takes_the_names_of_outputs(self, capsys, tmp_path):
        path = tmp_path / "net.onnx"
        onnx.save(three_exits(), path)
        code, printed, _ = run(capsys, "models", "show", str(path), "--exits", "exit1, exit2,logits")
        assert code == 0
        assert [line.split()[:2] for line in printed.splitlines()[-3:]] == [
            ["exit1", "3"],
            ["exit2", "6"],
            ["end", "9"],
        ]

    @pytest.mark.parametrize("exits", ["0", "-1", "+-3", "40", "9" * 5000, "a,b", "", ","])
    def test_bad_exits_are_one_line(self, capsys, tmp_path, exits):
        path = tmp_path / "net.onnx"
        onnx.save(three_exits(), path)
        code, _, error = run(capsys, "models", "show", str(path), "--exits", exits)
        assert (code, error.count("\n")) == (2, 1)

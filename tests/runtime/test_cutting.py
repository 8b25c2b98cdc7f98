"""Where graphs are cut, and that the pieces do what the whole does."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from tests.models.onnx_graphs import F32, I64, node, proto, tensor
from weft.models.onnx_graph import prune
from weft.runtime.cutting import (
    BANDWIDTH_BYTES_PER_S,
    CUT_COST_S,
    SeenTensor,
    choose_cuts,
    crossing_bytes,
    scratch_bytes,
    split,
    weight_bytes,
    whole_because,
)
from weft.runtime.onnxruntime_cpu.model import Blueprint, CpuModel, SegmentSpec
from weft.runtime.onnxruntime_cpu.profiler import profile
from weft.runtime.onnxruntime_cpu.sessions import open_session, specs
from weft.runtime.samples import sample

# --- choosing ---------------------------------------------------------------------------------------------------------


def lengths(times_s, cuts):
    return [sum(times_s[start:end]) for start, end in pairwise((0, *cuts, len(times_s)))]


def cost(cuts, crossing):
    return sum(crossing[cut] / BANDWIDTH_BYTES_PER_S + CUT_COST_S for cut in cuts)


def allowed(cuts, times_s, crossing, grain_s):
    """No piece longer than the grain, unless nothing inside it may be cut."""
    for start, end in pairwise((0, *cuts, len(times_s))):
        inner = [cut for cut in range(start + 1, end) if crossing[cut] is not None]
        if inner and sum(times_s[start:end]) > grain_s * (1 + 1e-6):
            return False
    return True


@st.composite
def timed_chains(draw):
    times = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    inner = draw(st.lists(st.none() | st.integers(0, 10**6), min_size=len(times) - 1, max_size=len(times) - 1))
    return [each / 1000 for each in times], [0, *inner, 0]


@given(timed_chains(), st.integers(1, 12))
def test_cuts_are_the_cheapest_of_all_that_keep_to_the_grain(chain, grain):
    times_s, crossing = chain
    grain_s = grain / 1000
    cuts = choose_cuts(times_s, crossing, grain_s, max_pieces=99)
    if sum(times_s) < 1.6 * grain_s:
        assert cuts == ()
        return
    places = [cut for cut in range(1, len(times_s)) if crossing[cut] is not None]
    every = (each for count in range(len(places) + 1) for each in combinations(places, count))
    best = min(cost(each, crossing) for each in every if allowed(each, times_s, crossing, grain_s))
    assert allowed(cuts, times_s, crossing, grain_s)
    assert cost(cuts, crossing) == pytest.approx(best)


def test_a_node_longer_than_the_grain_is_alone():
    times_s = [0.001, 0.002, 0.03, 0.001, 0.002]
    assert choose_cuts(times_s, [0] * 6, 0.005, 64) == (2, 3)


def test_cuts_go_where_little_crosses():
    assert choose_cuts([0.002] * 7, [0, 9**6, 9**6, 9**6, 100, 9**6, 9**6, 0], 0.008, 64) == (4,)


def test_a_model_shorter_than_1_6_grains_stays_whole():
    assert choose_cuts([0.001] * 7, [0] * 8, 0.005, 64) == ()
    assert choose_cuts([0.001] * 8, [0] * 9, 0.005, 64) != ()


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_the_grain_grows_until_the_pieces_are_few_enough(most):
    times_s = [0.001] * 40
    cuts = choose_cuts(times_s, [0] * 41, 0.001, most)
    assert len(cuts) + 1 <= most
    assert max(lengths(times_s, cuts)) <= 2 * 0.04 / most


def test_a_graph_that_may_be_cut_nowhere_stays_whole():
    assert choose_cuts([0.01] * 3, [0, None, None, 0], 0.001, 64) == ()


# --- what crosses -----------------------------------------------------------------------------------------------------


def chain_with_skip():
    """x -> a -> b -> c = a + b; b is an output too."""
    nodes = [node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["b"]), node("Add", ["a", "b"], ["c"])]
    return proto(nodes, [tensor("x", 4)], ["c", "b"])


def test_what_crosses_is_made_before_and_needed_after():
    sizes = {"a": SeenTensor(F32, 16), "b": SeenTensor(F32, 100), "c": SeenTensor(F32, 7)}
    assert crossing_bytes(chain_with_skip().graph, sizes) == [0, 16, 116, 0]


def test_a_cut_is_not_allowed_where_a_tensor_of_unknown_type_crosses():
    assert crossing_bytes(chain_with_skip().graph, {"b": SeenTensor(F32, 4), "c": SeenTensor(F32, 4)}) == [
        0,
        None,
        None,
        0,
    ]


def test_scratch_memory_is_what_lives_at_once_at_most():
    sizes = {"a": SeenTensor(F32, 16), "b": SeenTensor(F32, 100), "c": SeenTensor(F32, 7)}
    assert scratch_bytes(chain_with_skip().graph, sizes) == 123


def test_nodes_that_nothing_needs_are_pruned():
    graph = chain_with_skip().graph
    graph.node.insert(1, node("Exp", ["a"], ["dead"]))
    graph.node.append(node("Split", ["c"], ["", "dead2"]))
    prune(graph)
    assert graph == chain_with_skip().graph


def test_weights_are_counted_by_their_type():
    weights = [numpy_helper.from_array(np.zeros((3, 5), np.float32), "w"), numpy_helper.from_array(np.zeros(2), "v")]
    assert weight_bytes(proto([], [], [], weights).graph) == 60 + 16


def test_control_flow_keeps_a_graph_whole():
    branch = onnx.helper.make_graph([node("Neg", ["x"], ["n"])], "then", [], [tensor("n", 4)])
    nodes = [node("Relu", ["x"], ["a"]), node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)]
    assert whole_because(proto(nodes, [tensor("x", 4)], ["y"]).graph) == "has control flow (If)"
    assert whole_because(chain_with_skip().graph) is None


# --- the pieces -------------------------------------------------------------------------------------------------------

WIDTH = 6
UNARY = ("Relu", "Sigmoid", "Tanh", "Neg", "Exp")
BINARY = ("Add", "Mul", "Sub", "Max")


@st.composite
def graphs(draw):
    """Branches that part, skip and join, several outputs, one of them maybe an input or an inner tensor."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names, nodes, weights = ["x", "z"], [], []
    for index in range(draw(st.integers(2, 12))):
        op = draw(st.sampled_from((*UNARY, *BINARY, "MatMul", "Split", "LayerNormalization")))
        ins = [draw(st.sampled_from(names)) for _ in range(2 if op in BINARY else 1)]
        outs = [f"t{index}"]
        if op == "MatMul":
            weights.append(numpy_helper.from_array(rng.standard_normal((WIDTH, WIDTH), dtype=np.float32), f"w{index}"))
            nodes.append(node("MatMul", [*ins, f"w{index}"], outs))
        elif op == "LayerNormalization":
            weights.append(numpy_helper.from_array(rng.standard_normal(WIDTH, dtype=np.float32), f"w{index}"))
            nodes.append(node(op, [*ins, f"w{index}"], outs))
        elif op == "Split":
            outs = [f"t{index}", f"t{index}b"]
            halves = [f"h{index}", f"h{index}b"]
            nodes += [
                node("Split", ins, halves, axis=1),
                node("Concat", halves, outs[:1], axis=1),
                node("Concat", halves[::-1], outs[1:], axis=1),
            ]
        else:
            nodes.append(node(op, ins, outs))
        names += outs
    wanted = draw(st.lists(st.sampled_from(names[2:]), max_size=3, unique=True))
    wanted = list(dict.fromkeys([*wanted, names[-1], *draw(st.sampled_from([[], ["x"]]))]))
    inputs = [tensor("x", "n", WIDTH), tensor("z", "n", WIDTH)]
    return proto(nodes, inputs, [tensor(name, "n", WIDTH) for name in wanted], weights)


def optimised(model, folder):
    """The graph as ONNX Runtime optimises it, and the session that did."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
    model.ir_version = 8
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(options.optimized_model_filepath)
    prune(graph.graph)
    return graph, session


def joined(pieces, session):
    segments = tuple(SegmentSpec(name=each.name, inputs=each.inputs, outputs=each.outputs) for each in pieces)
    inputs, outputs = specs(session.get_inputs()), specs(session.get_outputs())
    blueprint = Blueprint(inputs=inputs, outputs=outputs, segments=segments, warm_shapes=None)
    return CpuModel(blueprint, [open_session(each.model.SerializeToString(), 1, optimise=False) for each in pieces])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(), st.data())
def test_a_graph_cut_anywhere_gives_the_same_bits(model, data):
    with TemporaryDirectory() as folder:
        graph, session = optimised(model, folder)
        inputs = specs(session.get_inputs())
        feed = sample(inputs, {spec.name: (3, WIDTH) for spec in inputs}, 5)
        found = profile(graph, Path(folder), 1, feed)
        wanted = session.run(None, feed)
        crossing = crossing_bytes(graph.graph, found.tensors)
        places = [cut for cut in range(1, len(graph.graph.node)) if crossing[cut] is not None]
        assert len(places) == max(len(graph.graph.node) - 1, 0)
        types = {name: each.element_type for name, each in found.tensors.items()}
        several = [data.draw(st.sets(st.sampled_from(places)), label="cuts") for _ in range(2)] if places else []
        for cuts in [[], *([cut] for cut in places), places, *map(sorted, several)]:
            got = joined(split(graph, cuts, types), session).run(feed)
            assert [got[each.name].tobytes() for each in session.get_outputs()] == [each.tobytes() for each in wanted]


def test_tensors_of_other_types_cross_cuts_and_what_is_done_with_is_dropped(tmp_path):
    shape = numpy_helper.from_array(np.array([0, -1]), "flat")
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Greater", ["x", "x2"], ["g"]),
        node("Cast", ["x"], ["d"], to=onnx.TensorProto.DOUBLE),
        node("Reshape", ["x", "flat"], ["r"]),
        node("Where", ["g", "x", "x2"], ["w"]),
        node("Expand", ["w", "s"], ["e"]),
    ]
    inputs = [tensor("x", "n", 4), tensor("x2", "n", 4)]
    outputs = [tensor("e", "n", 4), tensor("d", "n", 4, dtype=onnx.TensorProto.DOUBLE), tensor("r", "n", 4)]
    graph, session = optimised(proto(nodes, inputs, outputs, [shape]), tmp_path)
    feed = sample(specs(session.get_inputs()), {"x": (2, 4), "x2": (2, 4)}, 1)
    found = profile(graph, tmp_path, 1, feed)
    types = {name: each.element_type for name, each in found.tensors.items()}
    assert {types["s"], types["g"]} == {I64, onnx.TensorProto.BOOL}
    pieces = split(graph, range(1, len(graph.graph.node)), types)
    model = joined(pieces, session)
    values = feed
    for index, piece in enumerate(pieces):
        values = model.run_segment(index, values)
        later = {name for each in pieces[index + 1 :] for name in each.inputs} | {"e", "d", "r"}
        assert set(piece.outputs) <= set(values) <= later
    for wanted, name in zip(session.run(None, feed), ("e", "d", "r"), strict=True):
        assert values[name].tobytes() == wanted.tobytes()


def test_an_output_that_became_a_weight_is_given_all_the_same(tmp_path):
    weight = numpy_helper.from_array(np.array([1.0, -1.0], np.float32), "w")
    nodes = [node("Relu", ["w"], ["c"]), node("Sigmoid", ["x"], ["y"]), node("Tanh", ["y"], ["z"])]
    graph, session = optimised(proto(nodes, [tensor("x", 2)], [tensor("z", 2), tensor("c", 2)], [weight]), tmp_path)
    assert [each.op_type for each in graph.graph.node] == ["Sigmoid", "Tanh"]
    model = joined(split(graph, [1], {"y": F32}), session)
    assert model.run({"x": np.zeros(2, np.float32)})["c"].tolist() == [1.0, 0.0]

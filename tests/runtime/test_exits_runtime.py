"""Models with exits, prepared: cut where samples may leave, and batches whose samples keep their data come what may."""

from __future__ import annotations

from itertools import chain, combinations, pairwise

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import helper, numpy_helper

from tests.models.onnx_graphs import F32, I64, node, proto, tensor
from tests.runtime.clocks import ANY_LENGTH_S, NO_LENGTH_S
from tests.runtime.exit_nets import CLASSES, EXITS, SIDE, Alone, conv_net, samples, token_net
from weft.base.errors import ModelError
from weft.runtime.cutting import BANDWIDTH_BYTES_PER_S, CUT_COST_S, arrange, choose_cuts
from weft.runtime.exits import Counted, ExitSpec, confidence, join, keep
from weft.runtime.onnxruntime_cpu.preparing import LoadOptions, prepare

FINE = LoadOptions(grain_s=ANY_LENGTH_S, max_batch=8, exits=EXITS)


# --- how sure ---------------------------------------------------------------------------------------------------------


@given(hnp.arrays(np.float32, st.tuples(st.integers(0, 5), st.integers(2, 6)), elements=st.floats(-80, 80, width=32)))
def test_confidence_of_logits_is_the_largest_of_their_softmax(values):
    exact = np.exp(values.astype(np.float64) - values.max(axis=1, keepdims=True))
    assert np.allclose(confidence(values, "logits"), (exact / exact.sum(axis=1, keepdims=True)).max(axis=1), rtol=1e-5)


def test_confidence_of_probabilities_is_the_largest_of_them():
    values = np.array([[0.25, 0.75], [0.5, 0.5]], np.float16)
    found = confidence(values, "probabilities")
    assert found.tolist() == [0.75, 0.5] and found.dtype == np.float32


@pytest.mark.parametrize("row", [[np.nan, 1.0], [np.inf, 1.0], [np.inf, np.inf], [-np.inf, -np.inf]])
@pytest.mark.parametrize("threshold", [1e-9, 0.5, 1.0, 2.0])
def test_scores_that_are_no_numbers_are_never_sure(row, threshold):
    (found,) = confidence(np.array([row], np.float32), "logits")
    assert np.isnan(found) and not found >= threshold


def test_one_sure_class_is_sure_even_where_the_others_are_impossible():
    assert confidence(np.array([[3.0, -np.inf]], np.float32), "logits").tolist() == [1.0]
    assert np.isnan(confidence(np.array([[np.nan, 0.9]], np.float32), "probabilities"))


# --- what is kept and joined ------------------------------------------------------------------------------------------

ROWLESS = {"n": Counted(dtype="int64", shape=(2,), first=(1, 7), step=(1, 0)), "c": None}


def live(ids):
    """The values of these samples at some cut."""
    numbers = np.array(ids, np.float32)
    flat = np.array([str(each).encode() for each in ids], np.object_)
    return {
        "a": numbers[:, None] * [1.0, 2.0],
        "b": flat,
        "n": np.array([len(ids), 7]),
        "c": np.array([3.0]),
    }


def same(got, wanted):
    return list(got) == list(wanted) and all(np.array_equal(got[name], wanted[name]) for name in wanted)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=8), st.data())
def test_rows_are_kept_in_the_order_asked_for(ids, data):
    rows = data.draw(st.lists(st.integers(0, len(ids) - 1), unique=True))
    assert same(keep(live(ids), rows, ROWLESS), live([ids[row] for row in rows]))


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), min_size=1, max_size=4))
def test_batches_are_joined_in_order(batches):
    joined = join([live(ids) for ids in batches], ROWLESS)
    assert same({name: joined[name] for name in "abnc"}, live(list(chain(*batches))))


# --- where it is cut --------------------------------------------------------------------------------------------------


def ladder():
    """Two exits and the end, their nodes listed as an exporter might: the trunk first, then the heads."""
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("Tanh", ["a"], ["b"]),
        node("Neg", ["b"], ["c"]),
        node("Exp", ["c"], ["end"]),
        node("Sigmoid", ["b"], ["e2"]),
        node("Sigmoid", ["a"], ["e1"]),
        node("Abs", ["c"], ["features"]),
    ]
    return proto(nodes, [tensor("x", 4)], ["end", "features", "e1", "e2"])


def test_what_an_exit_needs_comes_before_what_only_later_ones_need():
    graph = ladder().graph
    assert arrange(graph, ("e1", "e2", "end")) == (2, 4)
    assert [each.output[0] for each in graph.node] == ["a", "e1", "b", "e2", "c", "end"]
    assert [each.name for each in graph.output] == ["e1", "e2", "end"]


@pytest.mark.parametrize(
    ("exits", "complaint"),
    [
        (("end", "e1"), "exit 'end' is deeper than 'e1', which follows it; name exits shallow to deep"),
        (("e2", "e1", "end"), "exit 'e2' is deeper than 'e1'"),
        (("e1", "end", "e2"), "exit 'end' is deeper than 'e2'"),
        (("c", "b"), "exit 'b' is known as soon as exit 'c' is; name exits shallow to deep"),
        (("x", "end"), "exit 'x' is known before anything is computed"),
    ],
)
def test_exits_out_of_order_are_refused(exits, complaint):
    graph = ladder().graph
    graph.output.extend([tensor(name, 4) for name in ("b", "c", "x")])
    with pytest.raises(ModelError, match=complaint):
        arrange(graph, exits)


@st.composite
def timed_chains(draw):
    times = draw(st.lists(st.integers(0, 9), min_size=2, max_size=8))
    inner = draw(st.lists(st.none() | st.integers(0, 10**6), min_size=len(times) - 1, max_size=len(times) - 1))
    crossing = [0, *inner, 0]
    possible = [cut for cut in range(1, len(times)) if crossing[cut] is not None]
    forced = draw(st.sets(st.sampled_from(possible))) if possible else set()
    return [each / 1000 for each in times], crossing, tuple(sorted(forced))


@given(timed_chains(), st.integers(1, 12))
def test_between_forced_cuts_the_cheapest_ones_are_chosen(chain, grain):
    times_s, crossing, forced = chain
    grain_s = grain / 1000
    cuts = choose_cuts(times_s, crossing, grain_s, 99, forced)
    assert set(forced) <= set(cuts) and list(cuts) == sorted(set(cuts))
    for start, end in pairwise((0, *forced, len(times_s))):
        inside = [cut for cut in cuts if start < cut < end]
        if sum(times_s[start:end]) < 1.6 * grain_s:
            assert inside == []
            continue
        places = [cut for cut in range(start + 1, end) if crossing[cut] is not None]
        every = (each for count in range(len(places) + 1) for each in combinations(places, count))
        fitting = [each for each in every if fits((start, *each, end), times_s, crossing, grain_s)]
        assert tuple(inside) in fitting
        assert cost(inside, crossing) == pytest.approx(min(cost(each, crossing) for each in fitting))


def cost(cuts, crossing):
    return sum(crossing[cut] / BANDWIDTH_BYTES_PER_S + CUT_COST_S for cut in cuts)


def fits(ends, times_s, crossing, grain_s):
    """No piece longer than the grain, unless nothing inside it may be cut."""
    return not any(
        sum(times_s[start:end]) > grain_s * (1 + 1e-6)
        and any(crossing[cut] is not None for cut in range(start + 1, end))
        for start, end in pairwise(ends)
    )


@pytest.mark.parametrize("most", [1, 3, 5, 40])
def test_forced_cuts_are_made_however_few_pieces_are_wanted(most):
    cuts = choose_cuts([0.001] * 40, [0] * 41, 0.001, most, (10, 30))
    assert {10, 30} <= set(cuts) and len(cuts) + 1 <= max(most, 3)


# --- prepared ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nets")
    return {"conv": conv_net(folder / "conv.onnx"), "token": token_net(folder / "token.onnx")}


SHAPES = {"conv": (1, SIDE, SIDE), "token": (4, 6)}


@pytest.fixture(scope="module")
def models(nets):
    """Each cut at its exits alone, and cut everywhere."""
    coarse = LoadOptions(grain_s=NO_LENGTH_S, max_batch=8, exits=EXITS)
    return {
        (name, kind): prepare(nets[name], options)
        for name in nets
        for kind, options in (("coarse", coarse), ("fine", FINE))
    }


def bits(values):
    return {name: each.tobytes() for name, each in values.items()}


@pytest.mark.parametrize("kind", ["coarse", "fine"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_model_is_cut_at_its_exits_and_gives_the_bits_of_the_whole(nets, models, name, kind):
    model = models[name, kind]
    assert len(model.segments) == 3 if kind == "coarse" else len(model.segments) > 3
    assert [each.output for each in model.exits.specs] == list(EXITS)
    assert model.exits.specs[-1].segment == len(model.segments) - 1 and model.batching.mergeable and model.remarks == ()
    assert [spec.name for spec in model.outputs] == ["logits"]
    for count in (1, 3):
        feed = {"x": samples(count, SHAPES[name], seed=count)}
        wanted = dict(zip(EXITS, Alone(nets[name])._session.run(list(EXITS), feed), strict=True))
        assert bits(model.run_to_exits(feed)) == bits(wanted)
        assert bits(model.run(feed)) == bits({"logits": wanted["logits"]})


def test_the_numbers_of_samples_that_cross_a_cut_are_found(models):
    rowless = models["token", "coarse"].rowless
    assert rowless["samples"] == Counted(dtype="int64", shape=(1,), first=(1,), step=(1,))
    assert rowless["samples"].at(5).tolist() == [5]
    assert models["conv", "coarse"].rowless == {}


def test_a_file_may_name_its_exits(tmp_path):
    path = conv_net(tmp_path / "marked.onnx", marked=True)
    assert [each.output for each in prepare(path, LoadOptions(max_batch=1)).exits.specs] == list(EXITS)
    assert [each.output for each in prepare(path, LoadOptions(max_batch=1, exits=("exit2", "logits"))).exits.specs] == [
        "exit2",
        "logits",
    ]
    whole = prepare(path, LoadOptions(max_batch=1, exits=("logits",)))
    assert whole.exits is None and len(whole.outputs) == 3


def test_a_model_with_exits_comes_back_from_the_cache(tmp_path):
    path, cache, said = conv_net(tmp_path / "net.onnx"), tmp_path / "cache", []
    options = LoadOptions(grain_s=NO_LENGTH_S, max_batch=2, exits=EXITS, confidence="probabilities")
    first = prepare(path, options, cache)
    again = prepare(path, options, cache, said.append)
    assert said == ["loading it from the cache"] and again.blueprint == first.blueprint
    assert again.exits.specs[0] == ExitSpec(output="exit1", segment=0) and again.exits.confidence == "probabilities"
    feed = {"x": samples(2)}
    assert bits(again.run_to_exits(feed)) == bits(first.run_to_exits(feed))


def test_batches_of_models_without_exits_can_be_joined_too(nets):
    model = prepare(nets["conv"], LoadOptions(grain_s=ANY_LENGTH_S, max_batch=4))
    assert model.exits is None and len(model.segments) > 3 and model.batching.mergeable


# --- what cannot be ---------------------------------------------------------------------------------------------------


def saved(folder, nodes, outputs, weights=(), *, rows="n", marked=()):
    graph = helper.make_graph(nodes, "net", [tensor("x", rows, 6)], outputs, list(weights))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if marked:
        helper.set_model_props(model, {"weft.exits": ",".join(marked)})
    onnx.save(model, folder / "net.onnx")
    return folder / "net.onnx"


def stem(last="x"):
    return [node("Tanh", [last], ["a"]), node("Sigmoid", ["a"], ["b"])]


TWO = [tensor("b", "n", 6), tensor("y", "n", 6)]


def test_an_output_that_is_not_there_is_no_exit(tmp_path):
    path = saved(tmp_path, [*stem(), node("Exp", ["b"], ["y"])], TWO)
    with pytest.raises(ModelError, match=r"net\.onnx: exits: unknown output 'bb'; did you mean b\?"):
        prepare(path, LoadOptions(exits=("bb", "y")))


@pytest.mark.parametrize("given_by", ["options", "file"])
def test_an_exit_named_twice_is_refused(tmp_path, given_by):
    twice = ("b", "b", "y")
    path = saved(tmp_path, [*stem(), node("Exp", ["b"], ["y"])], TWO, marked=twice)
    with pytest.raises(ModelError, match="exit 'b' is named twice"):
        prepare(path, LoadOptions(exits=twice if given_by == "options" else ()))


def test_an_unknown_kind_of_confidence_is_refused():
    with pytest.raises(ModelError, match="unknown kind of confidence 'logit'; did you mean logits"):
        LoadOptions(confidence="logit")


COLUMN = numpy_helper.from_array(np.ones((6, 1), np.float32), "w")
WIDE = numpy_helper.from_array(np.ones((6, 7), np.float32), "w")


@pytest.mark.parametrize(
    ("last", "weights", "complaint"),
    [
        (
            node("MatMul", ["b", "w"], ["y"]),
            [WIDE],
            r"exit 'b' gives float32 of shape \(1, 6\), the end 'y' float32 of",
        ),
        (node("Unsqueeze", ["b", "w"], ["y"]), [numpy_helper.from_array(np.array([2]), "w")], "samples by classes"),
        (node("Cast", ["b"], ["y"], to=I64), [], "exit 'y' gives int64"),
        (node("Cast", ["b"], ["y"], to=onnx.TensorProto.DOUBLE), [], "all exits must give the same"),
    ],
)
def test_exits_that_do_not_give_the_same_are_refused(tmp_path, last, weights, complaint):
    output = {
        "MatMul": tensor("y", "n", 7),
        "Unsqueeze": tensor("y", "n", 6, 1),
        "Cast": tensor("y", "n", 6, dtype=last.attribute[0].i if last.attribute else F32),
    }[last.op_type]
    path = saved(tmp_path, [*stem(), last], [tensor("b", "n", 6), output], weights)
    with pytest.raises(ModelError, match=complaint) as caught:
        prepare(path, LoadOptions(exits=("b", "y")))
    assert "\n" not in str(caught.value)


def test_one_class_is_not_enough(tmp_path):
    nodes = [*stem(), node("MatMul", ["a", "w"], ["e"]), node("MatMul", ["b", "w"], ["y"])]
    path = saved(tmp_path, nodes, [tensor("e", "n", 1), tensor("y", "n", 1)], [COLUMN])
    with pytest.raises(ModelError, match="a score for each of two or more classes"):
        prepare(path, LoadOptions(exits=("e", "y")))


ROWS_MEET = [node("CumSum", ["a", "zero"], ["s"]), node("Exp", ["s"], ["y"])]
MEAN_CROSSES = [
    node("Tanh", ["x"], ["a"]),
    node("ReduceMean", ["a"], ["m"], axes=[0]),
    node("Add", ["a", "m"], ["b"]),
    node("Mul", ["b", "m"], ["y"]),
]
LOOSE = {
    "rows that meet": ([*stem(), *ROWS_MEET], "n", "'y', which crosses a cut, is not one row per sample"),
    "a fixed number of samples": ([*stem(), node("Exp", ["b"], ["y"])], 1, "has no free first dimension"),
    "a mean over the batch that crosses": (MEAN_CROSSES, "n", "which crosses a cut, is not one row per sample"),
}


@pytest.mark.parametrize(("nodes", "rows", "reason"), LOOSE.values(), ids=LOOSE)
def test_a_model_that_cannot_be_left_is_refused_if_asked_and_served_whole_if_not(tmp_path, nodes, rows, reason):
    outputs = [tensor("b", rows, 6), tensor("y", rows, 6)]
    zero = numpy_helper.from_array(np.array(0), "zero")
    path = saved(tmp_path, nodes, outputs, [zero], rows=rows, marked=("b", "y"))
    with pytest.raises(ModelError, match=rf"cannot be left at its exits b, y: .*({reason})") as caught:
        prepare(path, LoadOptions(exits=("b", "y")))
    assert "\n" not in str(caught.value)
    model = prepare(path, LoadOptions())
    assert model.exits is None and [spec.name for spec in model.outputs] == ["b", "y"]
    assert any("cannot be left at the exits its file names" in remark for remark in model.remarks)
    feed = {"x": np.ones((1, 6), np.float32)}
    assert set(model.run(feed)) == {"b", "y"}


def test_control_flow_cannot_be_cut_at_exits(tmp_path):
    branch = helper.make_graph([node("Neg", ["a"], ["n"])], "then", [], [tensor("n", "k", 6)])
    flag = numpy_helper.from_array(np.array(True), "flag")
    nodes = [*stem(), node("ReduceSum", ["a"], ["t"], keepdims=0), node("IsNaN", ["t"], ["c"])]
    nodes += [node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)]
    path = saved(tmp_path, nodes, TWO, [flag])
    with pytest.raises(ModelError, match=r"cannot be left at its exits b, y: it has control flow \(If\)"):
        prepare(path, LoadOptions(exits=("b", "y")))


def test_exits_cannot_be_checked_without_a_run(tmp_path):
    graph = helper.make_graph(
        [node("Tanh", ["x"], ["a"]), node("Exp", ["a"], ["y"])],
        "net",
        [tensor("x", "n", "free")],
        [tensor("a", "n", "free"), tensor("y", "n", "free")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "net.onnx")
    with pytest.raises(ModelError, match="cannot be checked without a run; give shapes for the free dimensions of x"):
        prepare(tmp_path / "net.onnx", LoadOptions(exits=("a", "y")))
    assert prepare(tmp_path / "net.onnx", LoadOptions(exits=("a", "y"), shapes={"x": (1, 5)})).batching.mergeable


# --- every sample keeps its data --------------------------------------------------------------------------------------

COUNT = 24


@pytest.fixture(scope="module")
def alone(nets):
    """What each exit gives for each sample when it is computed alone."""
    found = {}
    for name, shape in SHAPES.items():
        inputs, session = samples(COUNT, shape), Alone(nets[name])
        found[name] = inputs, [[answer for answer, _ in session.exits(each[None])] for each in inputs]
    return found


class Flight:
    """Batches of one model in flight, driven step by step by a test."""

    def __init__(self, model, inputs):
        self.model, self.inputs = model, inputs
        self.waiting = list(range(len(inputs)))
        self.batches: list[tuple[int, list[int], dict]] = []
        self.left: dict[int, tuple[int, np.ndarray]] = {}

    def begin(self, count):
        ids, self.waiting = self.waiting[:count], self.waiting[count:]
        self.batches.append((0, ids, {"x": self.inputs[ids]}))

    def step(self, place, stays):
        """Compute a batch's next segment; at an exit, *stays* says of each sample whether it goes on."""
        segment, ids, values = self.batches.pop(place)
        values = self.model.run_segment(segment, values)
        for number, each in enumerate(self.model.exits.specs, start=1):
            if each.segment == segment:
                end = number == len(self.model.exits.specs)
                rows = [] if end else [row for row in range(len(ids)) if stays()]
                for row in set(range(len(ids))) - set(rows):
                    assert ids[row] not in self.left, "it left twice"
                    self.left[ids[row]] = number, values[each.output][row]
                ids, values = [ids[row] for row in rows], keep(values, rows, self.model.rowless)
        if ids:
            self.batches.append((segment + 1, ids, values))

    def merge(self):
        """Join two batches at the same segment, if there are any."""
        for (i, one), (j, other) in combinations(enumerate(self.batches), 2):
            if one[0] == other[0] > 0:
                values = join([one[2], other[2]], self.model.rowless)
                self.batches = [each for k, each in enumerate(self.batches) if k not in (i, j)]
                self.batches.append((one[0], one[1] + other[1], values))
                return


@pytest.mark.parametrize("kind", ["coarse", "fine"])
@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_samples_keep_their_data_through_any_shrinking_and_merging(models, alone, name, kind, seed):
    inputs, wanted = alone[name]
    rng = np.random.default_rng(seed)
    flight, staying, begins = Flight(models[name, kind], inputs), rng.random(), rng.random()
    while flight.waiting or flight.batches:
        if flight.waiting and (not flight.batches or rng.random() < begins):
            flight.begin(rng.integers(1, 9))
        else:
            flight.step(rng.integers(len(flight.batches)), lambda: rng.random() < staying)
        if rng.random() < 0.7:
            flight.merge()
    assert sorted(flight.left) == list(range(COUNT))
    for sample, (number, answer) in flight.left.items():
        reference = wanted[sample][number - 1]
        assert answer.shape == (CLASSES,) and answer.argmax() == reference.argmax()
        assert np.allclose(answer, reference, rtol=1e-4, atol=1e-5)

"""Scores of an ONNX model under formats: exact, bounded, cached, and the same however they are computed."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

from tests.models.onnx_graphs import node, tensor
from tests.tuning.onnx_nets import (
    CLASSES,
    NETS,
    chain,
    draw,
    float_classes,
    model_of,
    nearly_right,
    outputs_by_twin,
    samples,
    save,
)
from weft.base.errors import EvaluationError, TuneError
from weft.models import classifiers
from weft_tune.network import ROLES, Network, Target
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import EXP, FIXED
from weft_tune.quantised.evaluator import OnnxEvaluator
from weft_tune.quantised.opened import find_targets, open_for_tuning

COUNT = 700
COARSE = Configuration({"conv1.weight": FIXED(3, 1), "conv2.input": FIXED(3), "fc.weight": EXP(3, 7)})
NOTHING = Configuration({"fc.weight": FIXED(2, -20)})  # all weights become zero


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    model = chain()
    path = save(model, tmp_path_factory.mktemp("net"))
    inputs = samples(model, COUNT)
    return open_for_tuning(path), inputs, nearly_right(model, inputs), find_targets(path, inputs)


@pytest.fixture
def evaluator(made):
    with OnnxEvaluator(*made) as found:
        yield found


def test_the_score_is_the_share_of_right_samples(made, evaluator):
    opened, inputs, labels, _ = made
    for configuration in (Configuration({}), COARSE):
        right = np.argmax(outputs_by_twin(opened, configuration, inputs), axis=1) == labels
        score = evaluator.evaluate(configuration, "full")
        assert score.exact and score.samples == COUNT and score.value == pytest.approx(right.mean(), abs=2 / COUNT)
    assert evaluator.evaluate(Configuration({}), "full").value == 0.9


@pytest.mark.parametrize("name", NETS)
def test_a_float_model_gets_its_own_classes_right(name, tmp_path):
    model = NETS[name]()
    inputs = samples(model, 40)
    free = NETS["chain"]() if name == "fixed batch" else model
    path = save(model, tmp_path)
    with OnnxEvaluator(path, inputs, float_classes(free, inputs), find_targets(path, inputs)) as evaluator:
        assert evaluator.evaluate(Configuration({}), "full").value == 1
        wide = {f"{layer}.{role}": FIXED(16, -3) for layer in evaluator.layers for role in ("weight", "input")}
        assert evaluator.evaluate(Configuration(wide), "full").value > 0.95


def test_a_trained_network_keeps_its_score_with_eight_bits_and_loses_it_with_two():
    held = classifiers.validation("lenet")
    opened = open_for_tuning(classifiers.model_path("lenet"))
    inputs, labels = {opened.inputs[0].name: held.inputs()[:400]}, held.label[:400]
    network = find_targets(opened, inputs)
    with OnnxEvaluator(opened, inputs, labels, network) as evaluator:
        base = evaluator.evaluate(Configuration({}), "full").value
        assert base > 0.97
        for bits, keeps in ((8, True), (2, False)):
            formats = {
                name: FIXED(bits, -int(np.ceil(np.log2(target.largest(role)))))
                for target in network.targets
                for role in ROLES
                for name in target.objects(role)
            }
            score = evaluator.evaluate(Configuration(formats), "full", needed=base - 0.02)
            assert (score.value >= base - 0.02) == keeps == score.exact


def test_hopeless_configurations_are_given_up_early(evaluator):
    exact = evaluator.evaluate(NOTHING, "full")
    stopped = evaluator.evaluate(NOTHING, "full", needed=0.85)
    assert exact.exact and exact.value < 0.5
    assert not stopped.exact and exact.value <= stopped.value < 0.85
    assert stopped.samples == 256  # two chunks of seven hundred samples


def test_a_bound_is_never_below_the_score_and_enough_is_always_exact(evaluator):
    exact = evaluator.evaluate(COARSE, "full").value
    for needed in np.linspace(0, 1.1, 23):
        score = evaluator.evaluate(COARSE, "full", needed=float(needed))
        assert score.value >= exact
        assert score.exact or score.value < needed
        assert score.exact == (score.value == exact) or exact < needed
        assert needed > exact or score == (exact, True, COUNT)


def test_samples_that_the_float_model_gets_wrong_come_first(evaluator):
    """Seventy are wrong, and as no sample is right for a constant output but those of one class, the bound is low."""
    score = evaluator.evaluate(NOTHING, "full", needed=0.999)
    assert score.samples == 128 and score.value <= 1 - 70 / COUNT


def test_the_small_set_is_drawn_by_the_seed(made):
    scores = set()
    for seed in (1, 1, 2):
        with OnnxEvaluator(*made, small=0.1, seed=seed) as evaluator:
            score = evaluator.evaluate(COARSE, "small")
            assert score.samples == 70
            scores.add((seed, score.value, evaluator.fingerprint))
    assert len(scores) == 2


@pytest.mark.parametrize("cache_bytes", [0, 100_000, 1 << 28])
def test_the_cache_changes_nothing(made, cache_bytes):
    rng = np.random.default_rng(5)
    objects = [f"{layer}.{role}" for layer in ("conv1", "conv2", "fc") for role in ("weight", "input")]
    with OnnxEvaluator(*made, cache_bytes=cache_bytes) as cached, OnnxEvaluator(*made, cache_bytes=0) as plain:
        current = dict(COARSE)
        for _ in range(8):
            current[objects[rng.integers(6)]] = FIXED(int(rng.integers(2, 6)), int(rng.integers(-1, 2)))
            assert cached.evaluate(Configuration(current), "full") == plain.evaluate(Configuration(current), "full")


def test_what_two_configurations_share_is_run_once(made, monkeypatch):
    """Only the last layer differs: the pieces before it do not run again."""
    ran = []
    with OnnxEvaluator(*made) as evaluator:
        evaluator.evaluate(COARSE, "full")
        inner, stages = evaluator._runner._run_stage, evaluator._plan.stages
        monkeypatch.setattr(
            evaluator._runner, "_run_stage", lambda at, *rest: ran.append(stages[at].layer) or inner(at, *rest)
        )
        evaluator.evaluate(Configuration(dict(COARSE) | {"fc.weight": EXP(4, 7)}), "full")
    assert set(ran) == {"fc"} and len(ran) == -(-COUNT // 32)


def test_many_configurations_come_back_in_order(evaluator):
    seen = []
    configurations = [COARSE, Configuration({}), NOTHING]
    scores = evaluator.evaluate_many(configurations, "small", lambda at, score: seen.append((at, score)))
    assert scores == [evaluator.evaluate(each, "small") for each in configurations]
    assert seen == list(enumerate(scores))


def test_other_samples_are_measured_whole(made, evaluator):
    _, inputs, labels, _ = made
    assert evaluator.measure(COARSE, inputs, labels) == evaluator.evaluate(COARSE, "full").value
    assert evaluator.measure(Configuration({}), {"x": inputs["x"][:50]}, labels[:50]) == 0.9
    with pytest.raises(TuneError, match="labels are 0 to 9, but the model has the classes 0 to 4"):
        evaluator.measure(COARSE, inputs, np.arange(COUNT) % 10)


def test_the_fingerprint_is_of_all_that_a_score_depends_on(made, tmp_path):
    opened, inputs, labels, network = made
    other = chain()
    other.graph.initializer[0].raw_data = other.graph.initializer[0].raw_data[::-1]
    cases = {
        "same": ((opened, inputs, labels, network), {}),
        "path": ((opened.path, inputs, labels, network), {}),
        "model": ((save(other, tmp_path), inputs, labels, network), {}),
        "data": ((opened, {"x": inputs["x"] * 2}, labels, network), {}),
        "labels": ((opened, inputs, labels[::-1], network), {}),
        "metric": ((opened, inputs, labels, network), {"metric": lambda outputs, right: np.ones(len(right))}),
        "small": ((opened, inputs, labels, network), {"small": 0.3}),
        "workers": ((opened, inputs, labels, network), {"workers": 3}),
    }
    prints = {name: OnnxEvaluator(*given, **options).fingerprint for name, (given, options) in cases.items()}
    assert prints["same"] == prints["path"] == prints["workers"]
    assert len(set(prints.values())) == len(cases) - 2


def test_any_labels_and_constants_have_a_fingerprint(made, tmp_path):
    """Text inside a model is no array of bytes, and dates have no buffer."""
    _, inputs, labels, network = made
    prints = set()
    for text in ("one", "one", "two"):
        model = chain()
        model.graph.initializer.append(numpy_helper.from_array(np.array([text] * 2, object), "names"))
        with OnnxEvaluator(
            save(model, tmp_path),
            inputs,
            labels.astype("M8[s]"),
            network,
            metric=lambda outputs, right: right.astype(int) > 0,
        ) as evaluator:
            prints.add((text, evaluator.fingerprint))
    assert len({each for _, each in prints}) == len(prints) == 2


def test_what_fails_before_the_first_score_may_go_well_the_next_time(evaluator, monkeypatch):
    engine, add = evaluator._runner, evaluator._runner.add

    def fails(name, samples):
        if name == "small":
            raise EvaluationError("a worker process was ended")
        add(name, samples)

    with monkeypatch.context() as patch, pytest.raises(EvaluationError, match="was ended"):
        patch.setattr(engine, "add", fails)
        evaluator.evaluate(COARSE, "full")
    assert evaluator.evaluate(COARSE, "small").exact


def test_branches_take_their_own_formats(made):
    opened, inputs, labels, _ = made
    network = find_targets(opened, inputs, groups={"convs": ["conv1", "conv2"]})
    (objects,) = [target.objects("weight") for target in network.targets if target.name == "convs"]
    with OnnxEvaluator(opened, inputs, labels, network) as evaluator, OnnxEvaluator(*made) as plain:
        configuration = Configuration(dict.fromkeys(objects, FIXED(3)))
        assert evaluator.evaluate(configuration, "full") == plain.evaluate(configuration, "full")


def test_unknown_names_are_refused(made, evaluator):
    opened, inputs, labels, _ = made
    with pytest.raises(TuneError, match=r"unknown object 'conv1\.weigth'; did you mean conv1\.weight"):
        evaluator.evaluate(Configuration({"conv1.weigth": FIXED(3)}), "full")
    with pytest.raises(TuneError, match=r"net\.onnx: unknown layer 'conv9'"):
        OnnxEvaluator(opened, inputs, labels, Network("n", (Target("conv9", 1, 1, 1.0, 1.0),)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"small": 0}, "the small set is 0 of all samples, must be above 0"),
        ({"small": 1.5}, "the small set is 1.5 of all samples"),
        ({"workers": 0}, "workers = 0 must be at least 1"),
        ({"cache_bytes": -1}, "cache_bytes = -1 must not be negative"),
    ],
)
def test_options_that_make_no_sense(made, options, message):
    with pytest.raises(TuneError, match=message):
        OnnxEvaluator(*made, **options)


def test_labels_that_are_no_classes(made):
    opened, inputs, labels, network = made
    with pytest.raises(TuneError, match="labels are 1 to 5, but the model has the classes 0 to 4; number them from 0"):
        OnnxEvaluator(opened, inputs, labels + 1, network)


def test_a_model_that_knows_nothing_is_not_worth_tuning(made):
    opened, inputs, _, network = made
    wrong = (np.argmax(outputs_by_twin(opened, Configuration({}), inputs), axis=1) + 1) % CLASSES
    with pytest.raises(TuneError, match="gets none of 700 samples right as it is; check the labels, the scale"):
        OnnxEvaluator(opened, inputs, wrong, network).evaluate(COARSE, "full")


def test_an_output_without_a_row_per_sample_is_refused(tmp_path):
    nodes = [node("MatMul", ["x", "w.weight"], ["h"]), node("ReduceMean", ["h"], ["y"], axes=[0], keepdims=1)]
    weights = {"w.weight": draw(1, 4, CLASSES)}
    model = model_of(nodes, [tensor("x", 8, 4)], [tensor("y", 1, CLASSES)], weights)
    path, inputs = save(model, tmp_path), samples(model, 16)
    with pytest.raises(
        TuneError, match="output 'y' is 1x5, must have a row for each of 8 samples; name another output"
    ):
        OnnxEvaluator(path, inputs, np.zeros(16, int), find_targets(path, inputs))


def test_a_model_that_fails_on_a_sample_says_where(tmp_path):
    """The third value of the last sample is no row of the table."""
    nodes = [
        node("MatMul", ["x", "w.weight"], ["h"]),
        node("Cast", ["i"], ["ids"], to=7),
        node("Gather", ["table", "ids"], ["e"]),
        node("Add", ["h", "e"], ["y"]),
    ]
    weights = {"w.weight": draw(1, 4, CLASSES), "table": draw(2, 3, CLASSES)}
    inputs = [tensor("x", "n", 4), tensor("i", "n")]
    path = save(model_of(nodes, inputs, [tensor("y", "n", CLASSES)], weights), tmp_path)
    given = {"x": draw(3, 64, 4), "i": np.zeros(64, np.float32)}
    network = find_targets(path, given)
    spoilt = given | {"i": np.where(np.arange(64) == 63, 7, 0).astype(np.float32)}
    with OnnxEvaluator(path, spoilt, np.zeros(64, int), network) as evaluator:
        with pytest.raises(EvaluationError, match="the model fails from layer 'w' on: "):
            evaluator.evaluate(Configuration({"w.weight": FIXED(4)}), "full")
        (failure,) = evaluator.evaluate_many([Configuration({"w.weight": FIXED(4)})], "full")
        assert isinstance(failure, EvaluationError)


def test_a_metric_of_the_users_own_takes_any_labels(made):
    opened, inputs, labels, network = made
    wanted = np.eye(CLASSES)[labels]

    def closeness(outputs, right):
        shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
        return (shares * right).sum(axis=1)

    with OnnxEvaluator(opened, inputs, wanted, network, metric=closeness) as evaluator:
        exact = evaluator.evaluate(COARSE, "full").value
        assert 0 < exact < 1
        assert not (stopped := evaluator.evaluate(COARSE, "full", needed=0.9)).exact and stopped.value >= exact

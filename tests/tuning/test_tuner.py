"""The search as a whole, on networks that are only arithmetic."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuning.synthetic_nets import SyntheticNet
from weft.base.errors import EvaluationError, TuneError
from weft_tune import Tuning, find_formats
from weft_tune.evaluation import Database, Score, Subset
from weft_tune.network import Network, Target
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import EXP, FIXED, FLOAT16, FLOAT32
from weft_tune.platform import Platform, Unbiased, load_platform, parse_platform
from weft_tune.result import Progress
from weft_tune.search_space import LAYERWISE
from weft_tune.tuner import BIAS_RULES

margins = st.sampled_from([0.0, 0.01, 0.07, 0.3, 0.9])
nets = st.builds(SyntheticNet, st.integers(0, 10_000), st.integers(1, 3))


def formats(tuning: Tuning, role: str) -> list[Unbiased]:
    names = [name for target in tuning.network.targets for name in target.objects(role)]
    return [Unbiased(tuning.configuration[name].kind, tuning.configuration[name].bits) for name in names]


@settings(max_examples=15)
@given(nets, margins, st.sampled_from(LAYERWISE), st.sampled_from(["fpga", "int8", "small-floats"]))
def test_the_result_is_feasible_smaller_and_of_the_platform(net, margin, layerwise, platform):
    tuning = find_formats(net.network, net, platform=platform, margin=margin, layerwise=layerwise)
    machine = load_platform(platform)
    assert net.evaluate(tuning.configuration, "full").value == tuning.score >= tuning.thresholds["full"]
    assert tuning.objective <= tuning.base_objective
    assert all(form in machine.weight for form in formats(tuning, "weight"))
    assert all(form in machine.activation for form in formats(tuning, "input"))
    if layerwise in ("WGT-ONLY", "NONE"):
        assert len(set(formats(tuning, "input"))) == 1
    if layerwise in ("ACT-ONLY", "NONE"):
        assert len(set(formats(tuning, "weight"))) == 1


@settings(max_examples=15)
@given(nets, margins, st.sampled_from(LAYERWISE), st.sampled_from(BIAS_RULES))
def test_fast_finds_what_faithful_finds_with_fewer_samples(net, margin, layerwise, bias):
    fast = find_formats(net.network, net, margin=margin, layerwise=layerwise, bias=bias)
    full = find_formats(net.network, net, margin=margin, layerwise=layerwise, bias=bias, faithful=True)
    assert fast.configuration == full.configuration
    assert fast.path == full.path
    assert sum(fast.samples.values()) <= sum(full.samples.values())
    assert fast.iterations <= full.iterations


@settings(max_examples=12)
@given(st.integers(0, 10_000), margins, st.sampled_from(BIAS_RULES))
def test_an_evaluator_that_never_stops_early_leads_to_the_same_place(seed, margin, bias):
    eager, patient = SyntheticNet(seed), SyntheticNet(seed, stops_early=False)
    fast = find_formats(eager.network, eager, margin=margin, bias=bias)
    whole = find_formats(patient.network, patient, margin=margin, bias=bias)
    assert whole.configuration == fast.configuration
    asked = [(configuration, subset) for configuration, subset, _ in patient.asked]
    assert len(asked) == len(set(asked))


@settings(max_examples=12)
@given(nets, margins)
def test_nothing_is_scored_twice_but_to_finish_what_was_stopped(net, margin):
    find_formats(net.network, net, margin=margin)
    known: dict[tuple[Configuration, Subset], float] = {}
    for configuration, subset, needed in list(net.asked):
        assert known.get((configuration, subset), math.inf) >= needed
        score = net.evaluate(configuration, subset, needed)
        known[configuration, subset] = -math.inf if score.exact else score.value


@settings(max_examples=12)
@given(nets, margins, st.sampled_from(BIAS_RULES))
def test_the_way_leads_down(net, margin, bias):
    tuning = find_formats(net.network, net, margin=margin, bias=bias)
    for phases in ((1,), (2,), (4,)):
        kept = [each for each in tuning.path if each.phase in phases and each.step != "type"]
        assert [each.objective for each in kept] == sorted((each.objective for each in kept), reverse=True)
    last = tuning.path[-1]
    assert (last.configuration, last.objective) == (tuning.configuration, tuning.objective)
    assert all(each.score >= tuning.thresholds["small" if each.phase <= 2 else "full"] for each in tuning.path)


@settings(max_examples=15)
@given(nets, margins)
def test_trials_are_numbered_and_say_what_was_kept(net, margin):
    tuning = find_formats(net.network, net, margin=margin)
    numbers = [trial.iteration for trial in tuning.trials if trial.step != "base"]
    assert numbers == list(range(1, tuning.iterations + 1))
    assert {kept.configuration for kept in tuning.path} <= {
        trial.configuration for trial in tuning.trials if trial.chosen
    }
    for trial in tuning.trials:
        assert trial.feasible == (trial.exact and trial.score >= tuning.thresholds[trial.subset])
    assert sum(trial.samples for trial in tuning.trials) == sum(tuning.samples.values())


class Interrupted(SyntheticNet):
    """Stopped by the user in its n-th evaluation."""

    left = math.inf

    def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().evaluate(configuration, subset, needed)


FEW = parse_platform({"name": "few", "formats": ["FLOAT 32", "FIXED 4..8", "EXP 4..5"]}, "test")


@pytest.mark.parametrize(
    ("stops_early", "faithful", "bias"),
    [(True, False, "repair"), (True, True, "repair"), (False, False, "keep"), (True, False, "chapter")],
)
def test_interrupted_anywhere_and_resumed_is_as_if_nothing_had_been(stops_early, faithful, bias):
    net = Interrupted(5, 1, stops_early=stops_early)
    search = partial(find_formats, net.network, net, platform=FEW, margin=0.02, faithful=faithful, bias=bias)
    expected = search()
    evaluations = len(net.asked)
    assert {trial.phase for trial in expected.trials} >= {1, 2, 4}
    for done in range(evaluations):
        with Database() as database:
            net.left = done
            with pytest.raises(KeyboardInterrupt):
                search(database=database)
            net.left = evaluations - done
            resumed = search(database=database)
            assert resumed == expected
            assert (net.left, resumed.reused) == (0, done)


def test_a_search_interrupted_again_and_again_ends(tmp_path: Path):
    net = Interrupted(6)
    expected = find_formats(net.network, net, margin=0.07)
    stops = 0
    while True:
        net.left = 15
        try:
            resumed = find_formats(net.network, net, margin=0.07, database=tmp_path / "scores.db")
            break
        except KeyboardInterrupt:
            stops += 1
    assert resumed == expected
    assert stops >= 3


class Failing(SyntheticNet):
    """Cannot score weights of some formats."""

    works = False

    def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
        if not self.works and configuration["l0.weight"].kind == "EXP":
            self.asked.append((configuration, subset, needed))
            raise EvaluationError("eval.py ended with 1", "no kernel for EXP")
        return super().evaluate(configuration, subset, needed)


@pytest.mark.parametrize("stops_early", [True, False])
def test_a_failure_stops_the_search_and_is_tried_again(tmp_path: Path, stops_early):
    net = Failing(3, stops_early=stops_early)
    with pytest.raises(EvaluationError, match="ended with 1") as caught:
        find_formats(net.network, net, margin=0.07, database=tmp_path / "scores.db")
    assert caught.value.output == "no kernel for EXP"
    net.works = True
    again = find_formats(net.network, net, margin=0.07, database=tmp_path / "scores.db")
    assert again == find_formats(net.network, net, margin=0.07)


@pytest.mark.parametrize("stops_early", [True, False])
def test_failures_can_be_skipped_and_are_not_repeated(tmp_path: Path, stops_early):
    net = Failing(3, stops_early=stops_early)
    first = find_formats(net.network, net, margin=0.07, on_failure="skip", database=tmp_path / "scores.db")
    assert first.configuration["l0.weight"].kind != "EXP"
    failed = [trial for trial in first.trials if trial.failure]
    assert failed and all(trial.failure == "eval.py ended with 1" and not trial.feasible for trial in failed)
    net.asked.clear()
    assert find_formats(net.network, net, margin=0.07, on_failure="skip", database=tmp_path / "scores.db") == first
    assert net.asked == []


def test_a_base_that_fails_stops_the_search_always():
    class Broken(SyntheticNet):
        def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
            raise EvaluationError("no data")

    with pytest.raises(EvaluationError, match="no data"):
        find_formats(Broken(0).network, Broken(0), on_failure="skip")


class Flat:
    """Every configuration scores the same: nothing ever fails."""

    fingerprint, stops_early = "flat", True

    def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
        return Score(0.9)

    def evaluate_many(self, configurations, subset, scored=None):
        return [Score(0.9) for _ in configurations]

    def close(self) -> None:
        """Nothing was started."""


LAYER = Network("one", (Target("fc", 100, 10, 1.0, 1.0),))


@pytest.mark.parametrize("bias", BIAS_RULES)
def test_a_score_that_never_falls_ends_at_two_bits(bias):
    """I2 and E2 are equally small; the printed algorithm would go from one to the other for ever."""
    tuning = find_formats(LAYER, Flat(), bias=bias)
    assert (tuning.weight_bits, tuning.activation_bits) == (200, 20)
    assert tuning.iterations < 150


def test_phases_follow_the_chapter_on_a_layer_that_needs_three_bits():
    class ThreeBits(Flat):
        def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
            return Score(1.0 if all(configuration[name].bits >= 3 for name in ("fc.weight", "fc.input")) else 0.5)

    tuning = find_formats(LAYER, ThreeBits())
    coarse = [trial.configuration["fc.weight"] for trial in tuning.trials if trial.step in ("base", "coarse")][:8]
    assert coarse == [
        FLOAT32,
        FLOAT16,
        FIXED(16),
        FIXED(8),
        FIXED(4),
        FIXED(2),
        FIXED(3),
        EXP(2, 1),
    ]
    assert [trial.iteration for trial in tuning.trials][:8] == list(range(8))
    assert (tuning.weight_bits, tuning.activation_bits) == (300, 30)


def test_recovery_adds_bits_where_all_samples_need_them():
    class Harder(Flat):
        """Two bits do for the small set, all samples need weights of five."""

        def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
            return Score(1.0 if subset == "small" else min(5, configuration["fc.weight"].bits) / 5)

    tuning = find_formats(LAYER, Harder(), margin=0.0)
    assert configuration_bits(tuning) == {"fc.weight": 5, "fc.input": 2}
    assert [kept.phase for kept in tuning.path if kept.step == "recovery"] == [3]


def test_recovery_falls_back_to_uniform_formats_where_more_bits_do_not_help():
    class NeedsFloat(Flat):
        def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
            kinds = {configuration["fc.weight"].kind, configuration["fc.input"].kind}
            return Score(1.0 if subset == "small" or kinds == {"FLOAT"} else 0.1)

    assert configuration_bits(find_formats(LAYER, NeedsFloat())) == {"fc.weight": 16, "fc.input": 16}


def configuration_bits(tuning: Tuning) -> dict[str, int]:
    return {name: tuning.configuration[name].bits for name in ("fc.weight", "fc.input")}


def test_a_platform_without_a_passing_format_is_refused():
    class OnlyFloat32(Flat):
        def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
            return Score(0.25 if configuration else 1.0)

    with pytest.raises(TuneError, match=r"no formats of platform 'stripes' were found that keep a score of 0.99"):
        find_formats(LAYER, OnlyFloat32(), platform="stripes")
    assert find_formats(LAYER, OnlyFloat32()).configuration == Configuration({})


def test_scores_below_zero_have_a_threshold_below_them():
    class Loss(Flat):
        def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
            return Score(-1.0 - 1.0 / configuration["fc.weight"].bits)

    tuning = find_formats(LAYER, Loss(), margin=0.1)
    assert tuning.thresholds["full"] == pytest.approx(tuning.base["full"] * 1.1)
    assert tuning.score >= tuning.thresholds["full"]
    assert tuning.configuration["fc.weight"].bits == math.ceil(1 / (1.1 * (1 + 1 / 32) - 1))


def test_one_pass_uses_all_samples_from_the_start():
    net = SyntheticNet(2)
    tuning = find_formats(net.network, net, margin=0.07, two_passes=False)
    assert {subset for _, subset, _ in net.asked} == {"full"}
    assert {trial.phase for trial in tuning.trials} == {1, 2}
    assert tuning.score >= tuning.thresholds["full"]


def test_another_base_can_be_given():
    net = SyntheticNet(2)
    base = Configuration({name: FIXED(4) for name in net.values})
    tuning = find_formats(net.network, net, margin=0.01, base=base)
    assert tuning.base["full"] == net.evaluate(base, "full").value
    assert tuning.base_objective == 4 * (net.network.weights + net.network.inputs)


def test_the_objective_decides_what_gets_small():
    net = SyntheticNet(4, layers=2)
    common = {"margin": 0.2, "layerwise": "BOTH"}
    weights = find_formats(net.network, net, objective="weights", **common)
    inputs = find_formats(net.network, net, objective="activations", **common)
    assert weights.weight_bits < inputs.weight_bits
    assert inputs.activation_bits < weights.activation_bits


def test_flat_stretches_of_an_objective_are_crossed():
    """Words of 32 bits hold four values of 8 or 7 bits, five of 6: one bit fewer gains nothing at first."""
    tuning = find_formats(LAYER, Flat(), objective="sum(-(32 // l.weight_bits) for l in layers)", margin=0.5)
    assert tuning.configuration["fc.weight"].bits == 2


def test_progress_is_told():
    told: list[Progress] = []
    net = SyntheticNet(1)
    tuning = find_formats(net.network, net, margin=0.07, progress=told.append)
    assert told[-1].iteration == tuning.iterations
    assert [each.phase for each in told] == sorted(each.phase for each in told)
    assert min(each.objective for each in told if each.phase == 4) == tuning.objective


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"margin": 1.0}, "margin = 1.0 must be"),
        ({"margin": math.nan}, "margin = nan must be"),
        ({"bias": "kep"}, "did you mean keep"),
        ({"on_failure": "wait"}, "must be stop or skip"),
        ({"layerwise": "SOME"}, "must be one of BOTH"),
        ({"platform": "fgpa"}, "did you mean fpga"),
        ({"objective": "wights"}, "did you mean weights"),
    ],
)
def test_nonsense_is_refused(wrong, message):
    with pytest.raises(TuneError, match=message):
        find_formats(LAYER, Flat(), **wrong)


@pytest.mark.parametrize("score", [math.inf, math.nan])
def test_a_base_without_a_finite_score_is_refused(score):
    class Odd(Flat):
        def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
            return Score(score)

    with pytest.raises(TuneError, match=r"finite|not a number"):
        find_formats(LAYER, Odd())


def test_a_platform_of_one_format_tunes_biases_only():
    only: Platform = parse_platform({"name": "i6", "formats": ["FIXED 6"]}, "test")
    net = SyntheticNet(8)
    tuning = find_formats(net.network, net, platform=only, margin=0.5)
    assert set(formats(tuning, "weight") + formats(tuning, "input")) == {Unbiased("FIXED", 6)}

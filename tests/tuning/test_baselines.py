"""Ristretto and the Stripes quantizer over score functions small enough to work out by hand."""

from __future__ import annotations

import math

import pytest

from weft.base.errors import TuneError
from weft_tune.baselines import BASELINES, covering_format, integer_length, relaxed_ristretto, ristretto, stripes
from weft_tune.evaluation import CallableEvaluator, Evaluator, Score, Subset
from weft_tune.network import Network, Target
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import FIXED, FLOAT32, TwosComplement

CONV = Target("conv", weights=500, inputs=784, weight_max=0.579, input_max=0.996, macs=288000)
FC = Target("fc", weights=2000, inputs=200, weight_max=0.165, input_max=5.06, macs=2000)
NET = Network("net", (CONV, FC))


def scorer(function) -> Evaluator:
    return CallableEvaluator(lambda configuration, subset: function(configuration), name="test")


def loss_of_widths(conv: int, fc: int, inputs: int, each: float = 0.008):
    """A part of the score is lost by every group that has fewer bits than it needs, a little by every one that
    is quantised at all."""

    def score(configuration: Configuration) -> float:
        value = 1.0
        for name, needed in (("conv.weight", conv), ("fc.weight", fc), ("conv.input", inputs)):
            value -= each * (configuration[name] != FLOAT32) + 0.1 * (configuration[name].bits < needed)
        return value

    return score


class Racer:
    """Stops as soon as the score lies below what is needed; counts what it was asked."""

    fingerprint, stops_early = "racer", True

    def __init__(self, function) -> None:
        self.function = function
        self.asked: list[tuple[Configuration, Subset]] = []

    def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
        self.asked.append((configuration, subset))
        value = self.function(configuration)
        return Score(value, True, 100) if value >= needed else Score((value + needed) / 2, False, 10)

    def close(self) -> None:
        """Nothing was started."""


@pytest.mark.parametrize(
    ("largest", "weight", "activation"),
    [(0.579, 1, 0), (0.996, 1, 0), (1.0, 1, 0), (5.06, 4, 3), (0.165, -1, -2), (0.0, 0, 0)],
)
def test_integer_lengths_follow_ristrettos_rules(largest, weight, activation):
    target = Target("x", 1, 1, largest, largest)
    assert (integer_length(target, "weight"), integer_length(target, "input")) == (weight, activation)


def test_ristretto_takes_the_narrowest_width_of_each_group_before_its_first_failure():
    found = ristretto(NET, scorer(loss_of_widths(conv=4, fc=8, inputs=2)), margin=0.03)
    assert found.configuration == Configuration(
        {
            "conv.weight": TwosComplement(4, 3),
            "fc.weight": TwosComplement(8, 9),
            "conv.input": TwosComplement(2, 2),
            "fc.input": TwosComplement(2, -1),
        }
    )
    assert found.feasible and not found.repaired and found.base == 1
    assert found.score == pytest.approx(1 - 3 * 0.008) and found.threshold == pytest.approx(0.97)
    steps = [trial.step for trial in found.trials]
    assert steps == ["base", *["conv weights"] * 4, *["fc weights"] * 3, *["inputs"] * 5, "combined"]


def test_a_group_that_passes_at_no_width_stays_in_float32():
    found = ristretto(NET, scorer(loss_of_widths(conv=4, fc=17, inputs=2)), margin=0.03)
    assert found.configuration["fc.weight"] == FLOAT32 and found.feasible


def test_only_a_pass_before_the_first_failure_counts():
    """Two bits would pass again, but the sweep ended at four."""

    def score(configuration: Configuration) -> float:
        return 0.5 if configuration["conv.weight"].bits == 4 else 1.0

    assert ristretto(NET, scorer(score), margin=0.01).configuration["conv.weight"].bits == 8


def test_a_combination_that_fails_is_reported_and_repaired_only_when_asked():
    score = loss_of_widths(conv=4, fc=8, inputs=2)
    plain = ristretto(NET, scorer(score), margin=0.02)
    assert not plain.feasible and plain.score == pytest.approx(0.976)
    repaired = ristretto(NET, scorer(score), margin=0.02, repair=True)
    assert repaired.feasible and repaired.repaired
    assert sum(form != FLOAT32 for form in (repaired.configuration[n] for n in ("conv.weight", "fc.weight"))) == 1


def test_relaxed_ristretto_finds_widths_between_the_powers_of_two():
    found = relaxed_ristretto(NET, scorer(loss_of_widths(conv=3, fc=11, inputs=5)), margin=0.03)
    assert [found.configuration[name].bits for name in ("conv.weight", "fc.weight", "fc.input")] == [3, 11, 5]
    assert found.method == "relaxed Ristretto" and found.feasible


def test_relaxed_ristretto_never_goes_below_two_bits():
    found = relaxed_ristretto(NET, scorer(lambda configuration: 1.0), margin=0.0)
    assert {form.bits for form in found.configuration.values()} == {2}


def test_inputs_may_be_covered_instead_of_saturated():
    found = ristretto(NET, scorer(loss_of_widths(conv=4, fc=8, inputs=2)), margin=0.03, covering=True)
    assert (found.configuration["conv.input"], found.configuration["fc.input"]) == (
        TwosComplement(2, 1),
        TwosComplement(2, -2),
    )
    assert found.configuration["conv.weight"] == TwosComplement(4, 3)


def test_branches_share_a_width():
    split = Network("split", (Target("block", 10, 10, 1.0, 1.0, 100, ("a", "b")),))
    found = ristretto(split, scorer(lambda configuration: 1.0), margin=0.0)
    assert set(found.configuration) == {"a.weight", "b.weight", "a.input", "b.input"}


def test_stripes_covers_every_value_with_16_bits():
    assert [covering_format(CONV, role) for role in ("weight", "input")] == [FIXED(16, 0), FIXED(16, 0)]
    assert [covering_format(FC, role) for role in ("weight", "input")] == [FIXED(16, 2), FIXED(16, -3)]


def needs(conv_range: float, conv_step: float, fc_range: float, fc_step: float):
    """Scores one, less a part for each demand that the inputs' formats do not meet."""

    def score(configuration: Configuration) -> float:
        conv, fc = configuration["conv.input"], configuration["fc.input"]
        missed = (conv.largest < conv_range) + (conv.step > conv_step) + (fc.largest < fc_range) + (fc.step > fc_step)
        return 1.0 - 0.1 * missed

    return score


def test_stripes_takes_bits_from_both_ends_until_the_threshold():
    found = stripes(NET, scorer(needs(0.9, 2**-3, 4.5, 2**-1)), margin=0.05)
    weights = {"conv.weight": FIXED(16, 0), "fc.weight": FIXED(16, 2)}
    assert found.configuration == Configuration(weights | {"conv.input": FIXED(5, 0), "fc.input": FIXED(5, -2)})
    assert found.feasible and found.score == 1.0


def test_stripes_that_cannot_start_says_so():
    found = stripes(NET, scorer(lambda configuration: 1.0 if not configuration else 0.5), margin=0.01)
    assert not found.feasible and found.score == 0.5 and found.evaluations == 2
    assert {form.bits for form in found.configuration.values()} == {16}


def test_stripes_may_take_its_margin_from_the_16_bit_network():
    found = stripes(
        NET, scorer(lambda configuration: 1.0 if not configuration else 0.5), margin=0.01, reference="fixed"
    )
    assert found.feasible and found.base == 0.5
    assert {found.configuration[name].bits for name in ("conv.input", "fc.input")} == {2}


@pytest.mark.parametrize("name", BASELINES)
def test_an_evaluator_that_stops_early_gives_the_same_result_with_fewer_samples(name):
    def score(configuration: Configuration) -> float:
        errors = [2.0**-form.bits * (3 if key.startswith("fc") else 1) for key, form in configuration.items()]
        return 1.0 - sum(errors)

    racer = Racer(score)
    found, plain = BASELINES[name](NET, racer, margin=0.1), BASELINES[name](NET, scorer(score), margin=0.1)
    assert found.configuration == plain.configuration and found.score == plain.score
    assert found.samples < 100 * found.evaluations
    assert {subset for _, subset in racer.asked} == {"full"}


@pytest.mark.parametrize("name", BASELINES)
def test_the_smaller_set_and_progress_can_be_asked_for(name):
    seen = []
    racer = Racer(lambda configuration: 1.0)
    BASELINES[name](NET, racer, margin=0.0, subset="small", progress=lambda *each: seen.append(each))
    assert {subset for _, subset in racer.asked} == {"small"}
    assert [number for number, *_ in seen] == list(range(1, len(racer.asked) + 1))


@pytest.mark.parametrize("margin", [-0.1, 1.0, math.nan])
def test_a_margin_that_is_none_is_refused(margin):
    with pytest.raises(TuneError, match="margin"):
        ristretto(NET, scorer(lambda configuration: 1.0), margin=margin)


@pytest.mark.parametrize("name", BASELINES)
def test_a_database_saves_every_evaluation_of_the_second_run(name, tmp_path):
    first, second = Racer(loss_of_widths(4, 8, 2)), Racer(loss_of_widths(4, 8, 2))
    found, again = (BASELINES[name](NET, each, margin=0.03, database=tmp_path / "scores") for each in (first, second))
    assert found == again and first.asked and not second.asked

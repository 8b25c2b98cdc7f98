"""Objectives: what they see, and what they must not be able to do."""

from __future__ import annotations

import math

import pytest

from weft.base.errors import TuneError
from weft_tune.network import Network, Target
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import EXP, FIXED, TwosComplement
from weft_tune.objective import DEFAULT, layers_of, objective_from, parse_objective, total_bits

NET = Network("net", (Target("a", 10, 3, 1.0, 1.0, 100), Target("b", 20, 5, 1.0, 1.0, 200, branches=("b1", "b2"))))
FORMATS = Configuration(
    {"a.weight": FIXED(4), "b1.weight": EXP(3), "b2.weight": EXP(3), "b1.input": TwosComplement(8, 2)}
)


def test_layers_are_the_targets_with_their_widths():
    assert [(each.weight_bits, each.input_bits) for each in layers_of(NET, FORMATS)] == [(4, 32), (3, 32)]
    assert total_bits(NET, FORMATS) == (4 * 10 + 3 * 20, 32 * 8)
    assert total_bits(NET, Configuration({})) == (32 * 30, 32 * 8)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (DEFAULT, 100 + 256),
        ("weights", 100),
        ("  2 * weights - activations / 2 ", 72),
        ("sum(l.macs * l.weight_bits for l in layers)", 400 + 600),
        ("sum(l.weights for l in layers if l.name == 'a')", 10),
        ("sum(l.weights for l in layers if l.name in ('a', 'b'))", 30),
        ("max([l.weight_bits for l in layers]) ** 2", 16),
        ("layers[-1].weight_bits", 3),
        ("len(layers) if weights > 50 else 0", 2),
        ("-min(32 // l.weight_bits for l in layers)", -8),
        ("ceil(log2(weights)) + floor(sqrt(16)) + abs(-1)", 7 + 4 + 1),
        ("weights > 50 and activations < 1e9", 1),
        ("weights ** -1", 0.01),
    ],
)
def test_expressions(text, value):
    assert parse_objective(text)(NET, FORMATS) == pytest.approx(value)


def test_names_of_the_caller_are_computed_only_where_they_are_used():
    asked: list[Configuration] = []

    def latency_s(configuration: Configuration) -> float:
        asked.append(configuration)
        return 0.5

    extras = {"latency_s": latency_s}
    assert parse_objective("weights", extras)(NET, FORMATS) == 100
    assert asked == []
    assert parse_objective("latency_s * 1e3 + latency_s", extras)(NET, FORMATS) == 500.5
    assert asked == [FORMATS]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no expression"),
        ("weights +", "is no expression"),
        ("x = 1", "is no expression"),
        ("wieghts", "unknown name 'wieghts'; did you mean weights"),
        ("latency_s", "unknown name 'latency_s'"),
        ("layers[0].bits", "unknown attribute 'bits'"),
        ("layers.__class__", "unknown attribute '__class__'"),
        ("().__class__", "may not|no number|unknown attribute"),
        ("__import__('os')", "unknown name|cannot be called"),
        ("layers.count(1)", "unknown attribute|cannot be called"),
        ("(lambda: 1)()", "Lambda may not be used|cannot be called"),
        ("[l for l in layers][0](1)", "cannot be called"),
        ("max(*layers)", "Starred may not be used"),
        ("max(weights, key=abs)", "cannot be called"),
        ("(weights := 2)", "NamedExpr may not be used|meaning already"),
        ("sum(weights for weights in layers)", "'weights' has a meaning already"),
        ("f'{weights}'", "JoinedStr may not be used"),
        ("'a' * 10", "is no number"),
        ("{1: 2}", "Dict may not be used"),
        ("weights ** weights", "must be a constant of at most 8"),
        ("2 ** 9 ** 9", "must be a constant of at most 8"),
        ("((weights ** 8) ** 8) ** 8", "a power of a power"),
        ("weights << 99", "LShift may not be used"),
        ("None", "is no number"),
        ("1j", "is no number"),
        ("...", "is no number"),
        ("(" * 500 + ")" * 500, "is no expression"),
    ],
)
def test_what_is_not_arithmetic_is_refused(text, message):
    with pytest.raises(TuneError, match=message):
        parse_objective(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weights / 0", "division by zero"),
        ("log2(0)", "math domain error|expected a positive"),
        ("layers", "must be a finite number"),
        ("layers[0].name", "must be a finite number"),
        ("layers[9].weights", "index out of range"),
        ("layers.weights", "'tuple' object has no attribute 'weights'"),
        ("sum(l.weights for l in layers) + l", "'l' is not defined"),
        ("layers + 1", "concatenate|unsupported"),
        ("1e308 * 10", "gave inf; it must be a finite number"),
        ("10 ** 8 " * 1 + " * 1e300 * 1e300", "must be a finite number"),
    ],
)
def test_an_expression_without_a_finite_number_is_an_error(text, message):
    with pytest.raises(TuneError, match=message):
        parse_objective(text)(NET, FORMATS)


def test_a_function_is_an_objective_too():
    assert objective_from(lambda network, configuration: len(network.targets))(NET, FORMATS) == 2.0
    with pytest.raises(TuneError, match="finite number"):
        objective_from(lambda network, configuration: math.nan)(NET, FORMATS)

"""Searches for number formats with known results, and the formats that exports are tested with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from weft.runtime.timing import Turns
from weft_tune import Tuning, find_formats
from weft_tune.evaluation import CallableEvaluator, Subset
from weft_tune.network import Network, Target
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import BIN, EXP, FIXED, FLOAT, FLOAT16, Format, TwosComplement
from weft_tune.weighted_layers import find_layers


def small_network(layers: int = 2) -> Network:
    return Network("net", tuple(Target(f"conv{n}", 500 * n, 784, 0.5, 2.0, 10_000) for n in range(1, layers + 1)))


def softly(configuration: Configuration, subset: Subset) -> float:
    """Loses a little with every bit; the full set is harder than the small one promises."""
    lost = sum(2.0 ** -configuration[name].bits for name in configuration)
    return 0.98 - (0.02 if subset == "small" else 0.03) * lost


@cache
def tuned(layers: int = 2, **options: object) -> Tuning:
    return find_formats(small_network(layers), CallableEvaluator(softly), margin=0.01, layerwise="BOTH", **options)  # type: ignore[arg-type]


def fix_times(monkeypatch: pytest.MonkeyPatch, eight_bits_s: float) -> None:
    """The model as it was takes 2 s and each of its layers 1 s; float16 takes longer, 8 bits as long as is said."""

    def in_turns(runs: Sequence[Any], turns: int) -> tuple[Turns, ...]:
        return tuple(Turns((whole(run.__self__.written),) * turns) for run in runs)

    def layer_times(variants: Sequence[Any], layers: Sequence[str], given: Any) -> list[dict[str, float]]:
        return [dict.fromkeys(layers, 0.5 * whole(each)) for each in variants]

    def whole(written: Any) -> float:
        made = {node.op_type for node in written.model.graph.node} if written else set()
        return eight_bits_s if "QuantizeLinear" in made else 4.0 if "Cast" in made else 2.0

    monkeypatch.setattr("weft_tune.runtime_target.bench.time_in_turns", in_turns)
    monkeypatch.setattr("weft_tune.runtime_target.bench.layer_times", layer_times)


def network_of(model, branches=()):
    layers = [layer for layer in find_layers(model) if layer.name not in branches[1:]]
    return Network(
        "net",
        tuple(
            Target(layer.name, layer.weight.size, 1, 1.0, 1.0, branches=branches if layer.name in branches else ())
            for layer in layers
        ),
    )


def formats_for(network, weights, inputs):
    names = [layer for target in network.targets for layer in target.layers]
    found = {f"{name}.weight": weights[place % len(weights)] for place, name in enumerate(names)}
    return Configuration(found | {f"{name}.input": inputs[place % len(inputs)] for place, name in enumerate(names)})


FORMAT_CASES = {
    "8 bits": ([FIXED(8, 1)], [FIXED(8, -3)]),
    "4 bits": ([FIXED(4, 2)], [FIXED(4, -2)]),
    "ternary": ([FIXED(2, 3)], [FIXED(2, 0)]),
    "exponents": ([EXP(4, 9)], [EXP(6, 20)]),
    "floats": ([FLOAT(8), FLOAT(6, 5)], [FLOAT(8), FLOAT(7)]),
    "half": ([FLOAT16], [FLOAT16]),
    "mixed": ([FIXED(3, 2), EXP(3, 8), FLOAT(5, 4), FIXED(9, 1)], [FIXED(5, -3), EXP(5, 8), FLOAT(6), FIXED(12, -4)]),
    "others": ([TwosComplement(4, 4), BIN(4), Format(1, 3, 1, 6)], [TwosComplement(6, 2), FIXED(20, -4), FLOAT(20)]),
}

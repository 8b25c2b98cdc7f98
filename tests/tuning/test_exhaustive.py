"""All of a small space, and how near the search comes to it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.tuning.synthetic_nets import SyntheticNet
from weft.base.errors import TuneError
from weft_tune import find_formats
from weft_tune.baselines import exhaustive
from weft_tune.objective import parse_objective
from weft_tune.platform import Platform, parse_platform
from weft_tune.search_space import TuningSetting, space_of
from weft_tune.tuner import BiasRule


def small(*formats: str) -> Platform:
    return parse_platform({"name": "small", "formats": list(formats)}, "test")


def test_the_optimum_is_that_of_trying_everything():
    net, platform, biases = SyntheticNet(7, 1), small("FIXED 3..6", "EXP 3", "FLOAT 32"), range(-1, 3)
    space = space_of(net.network, platform, "WGT-ONLY")
    measure = parse_objective("weights + activations")
    found = exhaustive(net.network, net, platform=platform, biases=biases, margin=0.1)
    every = [
        space.configuration(
            TuningSetting(types, tuple(item.start + by for item, by in zip(space.items, shift, strict=True)))
        )
        for types in product(*(group.choices for group in space.groups))
        for shift in product(biases, repeat=len(space.items))
    ]
    feasible = [each for each in every if net.evaluate(each, "full").value >= found.threshold]
    assert found.objective == min(measure(net.network, each) for each in feasible)
    assert found.configuration in feasible
    assert found.size == len(set(every)) > found.scored


def test_nothing_feasible():
    net = SyntheticNet(7, 1)
    found = exhaustive(net.network, net, platform=small("FIXED 2"), margin=0.0)
    assert found.configuration is None and found.scored == found.size == 1


def test_too_many_are_refused():
    net = SyntheticNet(0, 3)
    with pytest.raises(TuneError, match="too many to try"):
        exhaustive(net.network, net, platform="fpga", biases=range(4))


def test_a_second_time_from_the_database(tmp_path: Path):
    net, platform = SyntheticNet(7, 1), small("FIXED 2..8")
    first = exhaustive(net.network, net, platform=platform, margin=0.1, database=tmp_path / "scores.db")
    net.asked.clear()
    assert exhaustive(net.network, net, platform=platform, margin=0.1, database=tmp_path / "scores.db") == first
    assert net.asked == []


FEW = small("FLOAT 32", "FIXED 2..6", "EXP 2..4")


def test_the_thorough_search_mostly_finds_the_optimum():
    ratios: dict[BiasRule, list[float]] = {"chapter": [], "repair": []}
    for seed in range(12):
        net = SyntheticNet(seed, 1)
        best = exhaustive(net.network, net, platform=FEW, biases=range(5), margin=0.1)
        for bias, found in ratios.items():
            found.append(find_formats(net.network, net, platform=FEW, margin=0.1, bias=bias).objective / best.objective)
    assert sum(ratio <= 1 for ratio in ratios["repair"]) >= 10
    assert max(ratios["repair"]) < 1.15
    assert sum(ratios["repair"]) < sum(ratios["chapter"])

"""The two-resource bound: by hand, against brute force, and proved by its own prices."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.naive import play, program, scenes
from weft.engine.policies import bound
from weft.engine.policies.bound import (
    EQUALITY_LOSS,
    Prices,
    QueryDemand,
    alone_ticks,
    best_mix,
    demand_of,
    least_share,
    mix_prices,
    prices,
    raise_starved,
)

HEAVY = QueryDemand(compute=8, memory=2, alone=8)
LIGHT = QueryDemand(compute=2, memory=8, alone=8)

DEMANDS = st.builds(
    lambda compute, memory, overlap: QueryDemand(
        compute, memory, max(compute, memory) + overlap * min(compute, memory)
    ),
    st.integers(1, 50),
    st.integers(1, 50),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)


def worth(demands, rates):
    return sum(rate * demand.alone for rate, demand in zip(rates, demands, strict=True))


def busiest(demands, rates):
    """Share of the time that the busier resource works at these rates."""
    compute = sum(rate * demand.compute for rate, demand in zip(rates, demands, strict=True))
    memory = sum(rate * demand.memory for rate, demand in zip(rates, demands, strict=True))
    return max(compute, memory)


# By hand


def test_two_opposite_streams_use_both_resources_to_the_full():
    # x queries of each a tick: 8x + 2x = 1 of both resources, so x = 0.1, worth 0.1 * 8 each
    dual = prices([HEAVY, LIGHT])
    assert dual.bound == pytest.approx(1.6)
    assert (dual.compute, dual.memory) == pytest.approx((0.8, 0.8))
    assert dual.of(HEAVY) == pytest.approx(8)


def test_two_unequal_streams():
    # 6a + 1b = 1 and 2a + 3b = 1: a = 1/8, b = 1/4, worth 6/8 + 3/4
    assert prices([QueryDemand(6, 2, 6), QueryDemand(1, 3, 3)]).bound == pytest.approx(6 / 8 + 3 / 4)


def test_a_lone_stream_is_worth_what_its_busier_resource_allows():
    assert prices([QueryDemand(8, 2, 8)]) == Prices(1.0, 0.0)
    assert prices([QueryDemand(2, 8, 8)]) == Prices(0.0, 1.0)
    assert prices([QueryDemand(8, 2, 10)]).bound == pytest.approx(10 / 8)  # alone it leaves the array idle at times


def test_streams_of_one_kind_cannot_share():
    assert prices([QueryDemand(8, 2, 8), QueryDemand(5, 4, 5)]).bound == pytest.approx(1.0)


def test_a_stream_without_compute_and_one_without_weights_do_not_meet():
    assert prices([QueryDemand(0, 8, 8), QueryDemand(8, 0, 8)]).bound == pytest.approx(2.0)
    assert prices([QueryDemand(0, 8, 8), QueryDemand(8, 2, 8)]).bound == pytest.approx(1 + 6 / 8)


def test_a_given_mix_is_limited_by_the_resource_it_uses_most():
    # three heavy queries to a light one: 26 of the array, 14 of the channel, worth 32
    assert mix_prices([HEAVY, LIGHT], (3, 1)) == Prices(32 / 26, 0.0)
    assert mix_prices([HEAVY, LIGHT], (1, 3)) == Prices(0.0, 32 / 26)
    assert mix_prices([HEAVY, LIGHT], (1, 1)).bound == pytest.approx(1.6)


def test_the_best_mix_is_equal_where_the_streams_are_opposite():
    assert best_mix([HEAVY, LIGHT]) == pytest.approx((0.1, 0.1))


def test_a_stream_the_optimum_does_without_keeps_its_least_share():
    # both compute-bound and as good as each other alone; the third is worse for both
    rates = best_mix([HEAVY, LIGHT, QueryDemand(8, 8, 8)])
    assert rates[2] == pytest.approx(0.1 / (3 * 8))
    assert busiest([HEAVY, LIGHT, QueryDemand(8, 8, 8)], rates) == pytest.approx(1)


# Against brute force


@settings(max_examples=20, derandomize=True, deadline=None)
@given(demands=st.lists(DEMANDS, min_size=2, max_size=4))
def test_no_mix_on_a_grid_beats_the_bound_and_the_best_comes_near_it(demands):
    steps = {2: 400, 3: 30, 4: 12}[len(demands)]
    limit = prices(demands).bound
    best = 0.0
    for mix in product(range(steps + 1), repeat=len(demands)):
        if sum(mix) == steps:
            best = max(best, worth(demands, mix) / busiest(demands, mix))
    assert best <= limit * (1 + 1e-9)
    # a grid of 1/steps misses the best mix by at most a step; the ratio of two demands is at most 50
    if len(demands) == 2:
        assert best >= limit * 0.98


@settings(max_examples=40, derandomize=True, deadline=None)
@given(demands=st.lists(DEMANDS, min_size=1, max_size=5))
def test_the_prices_cover_every_stream_and_some_mix_reaches_them(demands):
    """Feasible prices and a feasible mix of the same value prove each other optimal."""
    dual = prices(demands)
    assert min(dual.compute, dual.memory) >= 0
    assert all(dual.of(demand) >= demand.alone * (1 - 1e-9) for demand in demands)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound, "LEAST_SHARE", 1e-12)
        rates = best_mix(demands)
    assert min(rates) > 0
    assert busiest(demands, rates) <= 1 + 1e-9
    assert worth(demands, rates) == pytest.approx(dual.bound, rel=1e-6)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(demands=st.lists(DEMANDS, min_size=1, max_size=5))
def test_the_best_mix_leaves_every_stream_its_least_share_and_fills_a_resource(demands):
    rates = best_mix(demands)
    for rate, demand in zip(rates, demands, strict=True):
        assert rate * demand.alone >= 0.1 / len(demands) * (1 - 1e-12)
    assert busiest(demands, rates) == pytest.approx(1)
    assert worth(demands, rates) <= prices(demands).bound * (1 + 1e-9)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(demands=st.lists(DEMANDS, min_size=2, max_size=4), data=st.data())
def test_a_given_mix_is_never_worth_more_than_the_free_one(demands, data):
    mix = [data.draw(st.floats(0.1, 10)) for _ in demands]
    limit = mix_prices(demands, mix).bound
    assert limit == pytest.approx(worth(demands, mix) / busiest(demands, mix))
    assert limit <= prices(demands).bound * (1 + 1e-9)


# Alone


def test_alone_a_compute_bound_model_takes_its_compute_time_and_a_memory_bound_one_its_fetch_time():
    assert alone_ticks(program("a", (3, 10), (5, 20)), 100) == 30
    assert alone_ticks(program("a", (30, 10), (50, 20)), 1000) == 80


def test_alone_with_room_for_one_layer_fetch_and_compute_take_turns():
    assert alone_ticks(program("a", (10, 7)), 10) == 17
    assert alone_ticks(program("a", (10, 7), (10, 3)), 10) == 30


def test_alone_with_half_a_layer_of_room_half_the_fetch_is_hidden():
    assert alone_ticks(program("a", (10, 7)), 15) == 5 + 7  # 5 come in under the compute, 5 after it


@settings(max_examples=25, derandomize=True, deadline=None)
@given(scene=scenes(streams=1, layers=8))
def test_alone_lies_between_the_busier_resource_and_both_in_turn(scene):
    (only,), buffer = scene
    assert max(only.total_compute, only.total_fetch) <= alone_ticks(only, buffer)
    assert alone_ticks(only, buffer) <= only.total_compute + only.total_fetch


@settings(max_examples=25, derandomize=True, deadline=None)
@given(scene=scenes(streams=1, layers=8))
def test_alone_with_ample_room_is_the_busier_resource(scene):
    (only,), _ = scene
    assert alone_ticks(only, 4 * only.total_fetch + 1) == max(only.total_compute, only.total_fetch)


@settings(max_examples=15, derandomize=True, deadline=None)
@given(scene=scenes(streams=1, layers=4, ticks=12))
def test_alone_is_what_a_long_run_played_tick_by_tick_comes_to(scene):
    (only,), buffer = scene
    layers = list(zip(only.fetch, only.compute, strict=True))
    ends = [when.compute_end for when in play(layers * 60, buffer)][len(layers) - 1 :: len(layers)]
    assert alone_ticks(only, buffer) == pytest.approx((ends[59] - ends[29]) / 30)


def test_a_demand_is_what_a_query_keeps_busy():
    assert demand_of(program("a", (10, 7), (10, 3)), 10) == QueryDemand(10, 20, 30.0)


def test_equals_share_the_device_equally():
    """Two copies of a model gain nothing from an uneven mix, so neither waits for the other."""
    twin = QueryDemand(100, 40, 100.0)
    rates = best_mix([twin, twin])
    assert rates[0] == pytest.approx(rates[1])


def test_evening_costs_at_most_a_thousandth():
    demands = [QueryDemand(100, 20, 100.0), QueryDemand(15, 90, 90.0)]
    worth = sum(rate * d.alone for rate, d in zip(best_mix(demands), demands, strict=True))
    assert worth >= prices(demands).bound * (1 - EQUALITY_LOSS - 1e-9)


# Shares of those who starve


def test_a_starved_stream_is_raised_to_its_least_share_in_time_of_its_own():
    # 1/20 of the time is for the second stream alone, and the first has 1.4 in the rest
    assert raise_starved([1.4, 0.0]) == pytest.approx([1.4 * 19 / 20, 1 / 20])
    assert raise_starved([1.0, 0.4]) == [1.0, 0.4]


@given(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=6))
def test_raised_shares_leave_nobody_below_and_cost_the_time_that_the_starved_ran_alone(shares):
    found, least = raise_starved(shares), least_share(len(shares))
    assert min(found) >= least * (1 - 1e-9)
    rest = min((after / before for after, before in zip(found, shares, strict=True) if before), default=None)
    if rest is not None and rest < 1:
        alone = sum(after - rest * before for after, before in zip(found, shares, strict=True))
        assert alone == pytest.approx(1 - rest)

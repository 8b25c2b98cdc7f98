"""Each policy's decisions, worked by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.naive import greedy_order, play, program, scenes
from weft.base.errors import InputError, InvalidStart
from weft.devices.costs.program import Program
from weft.devices.decoupled import DeviceClocks, Resident
from weft.engine import Engine, SaturatedStreams, SimulatedNpu
from weft.engine.policies import Candidate, Policy, Setting, Start, View, make_policy
from weft.engine.policies.layerweaver import Layerweaver, idle_of


def head(stream: int, fetch: int, compute: int, *, query: int = 0, layer: int = 0, last_issued: int = -1) -> Candidate:
    return Candidate(stream, query, layer, fetch, compute, last_issued, program=stream)


def view(device: DeviceClocks, *candidates: Candidate) -> View:
    return View(device, candidates, candidates)


def chosen(policy: Policy, device: DeviceClocks, *candidates: Candidate) -> int:
    return policy.decide(view(device, *candidates)).candidate.stream


def executed(name: str, setting: Setting, **options: bool | int | float) -> SimulatedNpu:
    """The device after the setting's rounds have been issued."""
    executor = SimulatedNpu(setting)
    policy = make_policy(name, setting, options)
    work = setting.rounds * sum(p.total_work for p in setting.programs)
    Engine(SaturatedStreams(setting, policy.band, work), policy, executor).run()
    return executor


def letters(executor: SimulatedNpu) -> str:
    """The order of issues, a letter for each stream, a capital for the first layer of a query."""
    return "".join("AB"[task.stream] if task.layer == 0 else "ab"[task.stream] for task, _ in executor.log)


FRESH = DeviceClocks()
FULL_LATER = DeviceClocks(channel_free=10, array_free=100, array_began=40, resident=(Resident(60, 100),))
"""60 of a buffer of 100 taken until 100."""


# Layerweaver: what a candidate costs


def test_compute_idle_is_how_long_the_array_waits_for_the_weights():
    state = DeviceClocks(channel_free=10, array_free=30)
    assert idle_of(head(0, 35, 5), state, 100, largest=0).compute == 10 + 35 - 30
    assert idle_of(head(0, 20, 5), state, 100, largest=0).compute == 0


def test_compute_idle_counts_the_stall_of_a_full_buffer():
    # 40 of 50 come in at once, the other 10 when the array is done at 100
    assert idle_of(head(0, 50, 5), FULL_LATER, 100, largest=0).compute == 10


def test_memory_idle_is_what_prefetching_takes_from_a_layer_that_computes_long():
    # on chip at 30; 20 more fit beside 60 + 20 until 100; the buffer then takes 100 - 20 - 20 = 60 of the 70 ticks
    assert idle_of(head(0, 20, 70), FULL_LATER, 100, largest=0).memory == 70 - 60


def test_memory_idle_is_never_below_nothing():
    idle = idle_of(head(0, 20, 50), FULL_LATER, 100, largest=0)
    assert (idle.memory, idle.inherent) == (0, False)


def test_memory_idle_that_no_order_avoids_is_not_charged():
    # 90 ticks of compute and 80 of buffer: 10 are inherent, and 20 of prefetching add 20
    idle = idle_of(head(0, 20, 90), FULL_LATER, 100, largest=0)
    assert (idle.memory, idle.inherent) == (90 - 60 - 10, True)


def test_potential_idle_is_what_the_largest_layer_would_wait_if_it_came_next():
    idle = idle_of(head(0, 10, 25), FRESH, 100, largest=40)
    assert (idle.distance, idle.potential) == (25, 40 - 25)
    assert idle_of(head(0, 10, 45), FRESH, 100, largest=40).potential == 0


def test_the_total_is_the_sum_of_the_three():
    idle = idle_of(head(0, 50, 60), FULL_LATER, 100, largest=70)
    assert (idle.compute, idle.memory, idle.potential) == (10, 0, 10)
    assert idle.total == 20


# Layerweaver: whom it takes

HEAVY, LIGHT = program("heavy", (10, 200)), program("light", (100, 10))


def weaver(*programs: Program, buffer: int = 100, failsafe: bool = True) -> Layerweaver:
    return Layerweaver(Setting(programs or (HEAVY, LIGHT), buffer), failsafe)


def test_the_least_idle_candidate_goes():
    state = DeviceClocks(channel_free=0, array_free=50)
    # largest = 100: the second leaves a distance of 40 + 80, the first one of 45 + 10
    assert chosen(weaver(), state, head(0, 5, 10), head(1, 10, 80)) == 1


def test_among_equally_idle_candidates_one_without_inherent_idle_goes():
    # 95 > 100 - 10; both leave the array idle for 10
    policy = weaver(program("a", (10, 95)), program("b", (10, 50)), failsafe=False)
    assert chosen(policy, FRESH, head(0, 10, 95), head(1, 10, 50)) == 1


def test_among_those_the_one_with_the_larger_distance_goes():
    policy = weaver(program("a", (10, 20)), program("b", (10, 30)), failsafe=False)
    assert chosen(policy, FRESH, head(0, 10, 20), head(1, 10, 30)) == 1


def test_among_those_the_first_stream_goes():
    policy = weaver(program("a", (10, 20)), program("b", (10, 20)), failsafe=False)
    assert chosen(policy, FRESH, head(0, 10, 20), head(1, 10, 20)) == 0


def test_where_the_array_must_wait_the_compute_bound_model_goes_on():
    # the light model's layer would cost 10 + 95, the heavy one's 30 + 95
    assert chosen(weaver(), FRESH, head(0, 30, 5), head(1, 10, 5)) == 0


def test_where_one_candidate_does_not_make_the_array_wait_the_least_idle_goes():
    state = DeviceClocks(channel_free=0, array_free=10)
    assert chosen(weaver(), state, head(0, 30, 5), head(1, 10, 5)) == 1


def test_where_the_channel_must_wait_the_memory_bound_model_goes_on():
    # memory idle of 10 and of 15; both leave a distance above 100
    policy = weaver(program("heavy", (20, 200)), program("light", (20, 75), (100, 1)))
    assert chosen(policy, FULL_LATER, head(0, 20, 70), head(1, 20, 75)) == 1


def test_where_one_candidate_does_not_make_the_channel_wait_the_least_idle_goes():
    policy = weaver(program("heavy", (20, 200)), program("light", (20, 75), (100, 1)))
    assert chosen(policy, FULL_LATER, head(0, 20, 60), head(1, 20, 75)) == 0


def test_where_no_model_is_of_the_wanted_kind_the_least_idle_goes():
    policy = weaver(program("a", (50, 5)), program("b", (50, 5)), failsafe=False)
    assert chosen(policy, FRESH, head(0, 30, 5), head(1, 10, 5)) == 1


@pytest.mark.parametrize(
    ("kind", "programs"),
    [
        ("compute", (program("a", (1, 9), (1, 9)), program("b", (1, 5)))),
        ("memory", (program("a", (9, 1), (9, 1)), program("b", (5, 1)))),
    ],
)
def test_the_failsafe_runs_one_model_at_a_time_and_says_so(kind, programs):
    setting = Setting(programs, 20, rounds=2)
    policy = make_policy("layerweaver", setting)
    assert policy.remark == f"failsafe: all models are {kind}-bound here, so they run one at a time"
    assert letters(executed("layerweaver", setting)) == letters(executed("fifo", setting)) == "AaAaBB"


def test_without_the_failsafe_the_greedy_choice_stands_and_nothing_is_said():
    setting = Setting((program("a", (1, 9), (1, 9)), program("b", (1, 15))), 20, rounds=1)
    assert make_policy("layerweaver", setting, {"failsafe": False}).remark == ""
    assert letters(executed("layerweaver", setting, failsafe=False))[0] == "B"


def test_a_model_of_each_kind_needs_no_failsafe():
    assert weaver().remark == ""
    assert not weaver().disabled


@settings(max_examples=25, derandomize=True, deadline=None)
@given(scene=scenes(streams=4), rounds=st.integers(1, 3))
def test_layerweaver_chooses_as_the_scanning_pseudo_code_does(scene, rounds):
    programs, buffer = scene
    executor = executed("layerweaver", Setting(programs, buffer, rounds), failsafe=False)
    work = rounds * sum(p.total_work for p in programs)
    assert [task.stream for task, _ in executor.log] == greedy_order(programs, buffer, work)


# AI-MT

AIMT = make_policy("aimt", Setting((HEAVY, LIGHT), 100), {"compute_threshold": 0.5, "memory_threshold": 0.2})


def test_aimt_with_little_room_runs_what_computes_shortest_whatever_its_size():
    crowded = DeviceClocks(0, 200, 0, (Resident(81, 200),))  # 19 of 100 free
    assert chosen(AIMT, crowded, head(0, 1, 50), head(1, 90, 49)) == 1
    roomy = DeviceClocks(0, 200, 0, (Resident(80, 200),))  # 20 free: not below the threshold
    assert chosen(AIMT, roomy, head(0, 60, 50), head(1, 90, 49), head(2, 1, 2)) == 0


def test_aimt_with_little_ready_compute_rebuilds_it():
    short = DeviceClocks(0, 49)
    assert chosen(AIMT, short, head(0, 10, 30), head(1, 10, 31), head(2, 90, 100)) == 1  # 21 ahead beats 20 and 10
    enough = DeviceClocks(0, 50)
    assert chosen(AIMT, enough, head(0, 10, 30), head(1, 10, 31), head(2, 100, 100)) == 2


def test_aimt_without_a_compute_heavy_layer_rebuilds_with_the_longest_waiting():
    assert chosen(AIMT, DeviceClocks(0, 49), head(0, 30, 10, last_issued=7), head(1, 30, 30, last_issued=4)) == 1


def test_aimt_with_slack_spends_it_on_the_memory_heavy_layer_that_waited_longest():
    heads = head(0, 9, 90, last_issued=1), head(1, 50, 5, last_issued=7), head(2, 60, 5, last_issued=4)
    assert chosen(AIMT, DeviceClocks(0, 60), *heads) == 2


def test_aimt_with_slack_and_nothing_memory_heavy_runs_the_longest_waiting():
    assert chosen(AIMT, DeviceClocks(0, 60), head(0, 9, 90, last_issued=3), head(1, 5, 50, last_issued=2)) == 1


def test_aimt_breaks_ties_by_stream():
    crowded, short, slack = DeviceClocks(0, 200, 0, (Resident(90, 200),)), DeviceClocks(0, 1), DeviceClocks(0, 60)
    assert chosen(AIMT, crowded, head(0, 5, 5), head(1, 4, 5)) == 0
    assert chosen(AIMT, short, head(0, 5, 9), head(1, 4, 8)) == 0
    assert chosen(AIMT, slack, head(0, 5, 5), head(1, 6, 5)) == 0


@pytest.mark.parametrize("value", [-0.1, 100.5, float("nan")])
def test_a_threshold_that_is_no_share_is_refused(value):
    with pytest.raises(InputError, match=r"compute_threshold = .* must be from 0 to 10 times the weight buffer"):
        make_policy("aimt", Setting((HEAVY,), 100), {"compute_threshold": value})


# One model at a time

PAIR = Setting((program("a", (4, 2), (4, 2)), program("b", (2, 6))), buffer=10, rounds=2)


def test_fifo_runs_all_queries_of_the_first_model_and_then_of_the_next():
    assert letters(executed("fifo", PAIR)) == "AaAaBB"


def test_round_robin_runs_a_query_of_each_in_turn():
    assert letters(executed("round-robin", PAIR)) == "AaBAaB"


def test_fair_gives_each_model_the_same_time_in_a_row():
    # a needs 8 a query, b 2: of 20 ticks in all each gets 10, which is two queries of a and five of b
    setting = Setting((program("a", (4, 2), (4, 2)), program("b", (1, 2))), 10, rounds=2)
    assert letters(executed("fair", setting)) == "AaAaBB"
    longer = Setting(setting.programs, 10, rounds=6)
    assert letters(executed("fair", longer)) == "Aa" * 4 + "B" * 14  # 30 each: 4 queries of 8 pass it, then the rest


def test_eager_prefetch_brings_the_next_model_in_under_this_ones_compute():
    times = [tuple(issue) for _, issue in executed("round-robin", PAIR).log]
    assert times[:4] == [(0, 4, 4, 6), (4, 8, 8, 10), (8, 10, 10, 16), (10, 14, 16, 18)]


def test_double_buffering_fetches_no_further_than_one_layer_ahead():
    lone = Setting((program("a", (2, 9), (3, 1)),), buffer=100, rounds=2)
    assert [tuple(issue) for _, issue in executed("double-buffer", lone).log] == [
        (0, 2, 2, 11),
        (2, 5, 11, 12),  # may start once the first computes
        (11, 13, 13, 22),  # waits for the second to compute, although the channel is free at 5
        (13, 16, 22, 23),
    ]


@settings(max_examples=20, derandomize=True, deadline=None)
@given(scene=scenes(streams=2))
def test_double_buffering_equals_a_device_played_tick_by_tick(scene):
    programs, buffer = scene
    log = executed("double-buffer", Setting(programs, buffer, 2)).log
    layers = [(programs[task.stream].fetch[task.layer], programs[task.stream].compute[task.layer]) for task, _ in log]
    assert [tuple(issue) for _, issue in log] == [tuple(when) for when in play(layers, buffer, double_buffered=True)]


def test_double_buffering_has_the_order_of_fifo():
    assert letters(executed("double-buffer", PAIR)) == letters(executed("fifo", PAIR))


# weft


def test_weft_takes_the_play_with_the_least_priced_idle_time():
    # a: fetch 8, compute 2; b: fetch 2, compute 8. Alternating keeps both busy, so no two of a kind follow each other.
    setting = Setting((program("a", (8, 2)), program("b", (2, 8))), buffer=30, rounds=20)
    order = letters(executed("weft", setting, horizon=8, commit=1))
    assert order.count("A") == order.count("B") == 20
    assert executed("weft", setting, horizon=8, commit=1).log[-1][1].compute_end <= 20 * 10 + 2 * 8


def test_weft_prices_the_resource_that_limits_and_never_gives_one_away():
    setting = Setting((program("a", (8, 2)),), buffer=30)
    compute_price, memory_price = make_policy("weft", setting).prices
    assert memory_price == 2**20  # alone = 8 ticks a query, all of them of the channel
    assert compute_price == 1


def test_weft_keeps_the_mix_asked_for_or_else_the_best_one():
    programs = program("a", (8, 2)), program("b", (2, 8))
    assert make_policy("weft", Setting(programs, 30, mix=(1.0, 3.0), max_lag=0.5)).band == ((1.0, 3.0), 0.5)
    assert make_policy("weft", Setting(programs, 30)).band.mix == pytest.approx((1, 1))


@pytest.mark.parametrize(("horizon", "commit"), [(4, 5), (0, 0), (8, 0), (5000, 16)])
def test_weft_refuses_a_horizon_or_a_commitment_that_make_no_sense(horizon, commit):
    with pytest.raises(InputError, match=f"horizon = {horizon}, commit = {commit}: must be"):
        make_policy("weft", PAIR, {"horizon": horizon, "commit": commit})


# Names and options


def test_an_unknown_policy_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match=r"unknown policy 'layerweave'; did you mean layerweaver or layerweaver\+\?"):
        make_policy("layerweave", PAIR)


def test_an_unknown_option_is_refused_with_those_there_are():
    with pytest.raises(InputError, match="weft has no option 'horizn'; it has: horizon, commit"):
        make_policy("weft", PAIR, {"horizn": 3})
    with pytest.raises(InputError, match="fifo has no option 'depth'; it has: none"):
        make_policy("fifo", PAIR, {"depth": 3})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("weft", "horizon", 2.5),
        ("weft", "horizon", True),
        ("layerweaver", "failsafe", 1),
        ("aimt", "memory_threshold", True),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused(name, key, value):
    with pytest.raises(InputError, match=f"{name}: option {key} = {value!r} must be of the kind of its default"):
        make_policy(name, PAIR, {key: value})


def test_a_whole_number_will_do_for_a_share():
    assert make_policy("aimt", PAIR, {"memory_threshold": 0}).thresholds == (2, 0)


# The engine's check


@dataclass(frozen=True)
class Cheat(Policy):
    """Starts a layer that nobody offered."""

    def decide(self, view: View) -> Start:
        return Start(view.candidates[0]._replace(layer=1))


def test_a_policy_that_starts_what_is_not_on_offer_is_stopped():
    with pytest.raises(InvalidStart, match=r"Cheat chose Candidate\(.*layer=1.* not on offer"):
        Engine(SaturatedStreams(PAIR, None, work=10), Cheat(PAIR), SimulatedNpu(PAIR)).run()

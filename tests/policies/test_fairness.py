"""The fairness rule: no stream falls behind its mix further than the band, whatever the policy wants.

The lag is counted here from the order of issues alone, apart from the report's own figure.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.naive import largest_lag, largest_share, profile, profiles, program, small_npu
from weft.base.errors import WorkloadError
from weft.devices import load_npu
from weft.devices.costs.layer_costs import LayerCost, Profile, estimate
from weft.engine.policies import POLICIES, Band, make_policy
from weft.engine.policies.fairness import ROUND, may_go
from weft.engine.policies.in_order import InOrder
from weft.models import zoo
from weft.simulation import simulate
from weft.simulation.saturated import make_setting
from weft.workloads import Saturated

ROUNDING = 1e-6
"""Progress is counted in 2^-32 of a round, rounded down at each layer."""


# By hand


def test_a_layer_advances_its_stream_by_its_share_of_the_longer_of_its_times():
    # 10, 20 and 10 of 40 ticks; two queries a round, so a query is half a round
    gains = Band((2.0,), 0.25).gains([program("a", (10, 3), (5, 20), (10, 10))])
    assert [gain / ROUND for gain in gains[0]] == [1 / 8, 1 / 4, 1 / 8]


def test_the_layers_of_a_query_add_up_exactly_however_they_divide():
    gains = Band((3.0,), 0.25).gains([program("a", (1, 0), (1, 0), (1, 0), (4, 0))])
    assert sum(gains[0]) == round(ROUND / 3)


def test_a_stream_may_go_as_long_as_it_stays_within_the_band_of_the_last():
    assert may_go([10, 0], [5, 5], max_lag_units=15) == [True, True]
    assert may_go([11, 0], [5, 5], max_lag_units=15) == [False, True]


def test_the_last_stream_may_always_go_even_with_a_layer_longer_than_the_band():
    assert may_go([0, 10], [100, 1], max_lag_units=10) == [True, False]


def test_of_several_last_streams_the_first_may_always_go():
    assert may_go([0, 0, 0], [100, 100, 5], max_lag_units=10) == [True, False, True]


WHOLE_QUERIES = [name for name, kind in POLICIES.items() if issubclass(kind, InOrder)]


def claimed(policy: str, band: float) -> float:
    """The lag a policy claims to keep: the band, or a round where it cuts no query."""
    return max(1.0, band) if policy in WHOLE_QUERIES else band


def test_policies_of_whole_queries_keep_a_mix_to_the_round_and_cut_no_query():
    pair = [profile(name, (10, 20), (20, 10)) for name in "ab"]
    for policy in WHOLE_QUERIES:
        order = simulate(pair, small_npu(100), policy, Saturated(4, mix=(1, 1), max_lag=0.01)).trace.stream.tolist()
        assert order in ([0, 0, 1, 1] * 4, [0, 0, 1, 1, 1, 1, 0, 0] * 2), policy


def test_two_equal_streams_in_a_narrow_band_take_turns_under_every_other_policy():
    pair = [profile(name, (10, 20), (20, 10)) for name in "ab"]
    for policy in set(POLICIES) - set(WHOLE_QUERIES):
        workload = Saturated(4, mix=(1, 1), max_lag=0.01)
        order = simulate(pair, small_npu(100), policy, workload, pieces=1).trace.stream.tolist()
        assert order in ([0, 1] * 8, [0, 1, 1, 0] * 4), policy


def test_without_a_mix_only_weft_keeps_one():
    pair = [profile("a", (10, 20), (20, 10)), profile("b", (20, 10))]
    own = {"weft": {"trial": False}}
    lags = {
        policy: simulate(pair, small_npu(100), policy, Saturated(2), options=own.get(policy)).report.max_lag
        for policy in POLICIES
    }
    assert [policy for policy, lag in lags.items() if lag is not None] == ["weft"]


# Every policy, any mix


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=6, derandomize=True, deadline=None)
@given(given_=profiles(), data=st.data())
def test_the_lag_never_exceeds_the_band_or_the_largest_layer_and_every_query_asked_for_completes(policy, given_, data):
    models, npu = given_
    mix = tuple(data.draw(st.integers(1, 4)) for _ in models)
    mix = tuple(part / min(mix) for part in mix)
    band = data.draw(st.sampled_from([0.01, 0.25, 0.6, 2.0]))
    rounds = data.draw(st.sampled_from([6, 12]))  # whole queries of 1, 4/3, 3/2, 2, 3 and 4 a round
    workload = Saturated(rounds, mix=mix, max_lag=band)
    run = simulate(models, npu, policy, workload)
    programs = make_setting(models, npu, workload, pieces=run.report.pieces).programs
    lag = float(largest_lag(programs, run.trace.stream.tolist(), mix))
    assert lag <= max(claimed(policy, band), float(largest_share(programs, mix))) + ROUNDING
    assert run.report.max_lag == pytest.approx(lag, abs=ROUNDING)
    assert [stream.queries for stream in run.report.streams] == [round(part * rounds) for part in mix]
    assert len(run.trace) == sum(round(part * rounds) * len(p) for part, p in zip(mix, programs, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_unequal_mix_of_real_models_is_kept(policy):
    npu = load_npu("tpuv3-like")
    pair = [estimate(zoo.load(model), npu) for model in ("mobilenet-v2", "bert-base")]
    run = simulate(pair, npu, policy, Saturated(5, mix=(3, 1), max_lag=0.5))
    programs = make_setting(pair, npu, Saturated(5), pieces=run.report.pieces).programs
    assert [stream.queries for stream in run.report.streams] == [15, 5]
    assert largest_lag(programs, run.trace.stream.tolist(), (3, 1)) <= claimed(policy, 0.5) + ROUNDING


def test_a_mix_may_be_given_in_any_unit():
    pair = [profile("a", (10, 20)), profile("b", (20, 10))]
    orders = [
        simulate(pair, small_npu(100), "weft", Saturated(5, mix=mix), pieces=1).trace.stream.tolist()
        for mix in ((3.0, 1.0), (0.75, 0.25), (300.0, 100.0))
    ]
    assert orders[0] == orders[1] == orders[2]
    assert orders[0].count(0) == 15


@pytest.mark.parametrize("mix", [(1.0,), (1.0, 2.0, 3.0)])
def test_a_mix_of_another_number_of_streams_is_refused(mix):
    with pytest.raises(WorkloadError, match=f"mix has {len(mix)} parts for 2 models"):
        simulate([profile("a", (1, 1))] * 2, small_npu(9), "fifo", Saturated(1, mix=mix))


@pytest.mark.parametrize("part", [0.0, -1.0, float("nan"), float("inf")])
def test_a_mix_that_is_no_proportion_is_refused(part):
    with pytest.raises(WorkloadError, match="must be positive numbers"):
        Saturated(1, mix=(1.0, part))


@pytest.mark.parametrize("lag", [0.0, -1.0, float("nan"), float("inf")])
def test_a_lag_that_is_no_lag_is_refused(lag):
    with pytest.raises(WorkloadError, match="max lag"):
        Saturated(1, mix=(1.0, 1.0), max_lag=lag)


@pytest.mark.parametrize("rounds", [0, -1, 10**10])
def test_a_number_of_queries_that_makes_no_sense_is_refused(rounds):
    with pytest.raises(WorkloadError, match="queries = "):
        Saturated(rounds)


# No stream starves


@settings(max_examples=15, derandomize=True, deadline=None)
@given(given_=profiles(streams=4))
def test_under_weft_every_stream_completes_queries_and_its_own_rollouts_keep_to_the_best_mix(given_):
    models, npu = given_
    workload = Saturated(40)  # at a tenth of its equal share a stream has four, and at most one in arrears
    run = simulate(models, npu, "weft", workload)
    assert all(stream.queries >= 1 for stream in run.report.streams)
    rolled = simulate(models, npu, "weft", workload, options={"trial": False})
    setting = make_setting(models, npu, workload)
    mix = make_policy("weft", setting).band.mix
    lag = float(largest_lag(setting.programs, rolled.trace.stream.tolist(), mix))
    assert lag <= max(0.25, float(largest_share(setting.programs, mix))) + ROUNDING


STARVING = [
    (("inception-v3", "xlnet-large"), 80),
    (("resnet50", "bert-base", "inception-v3", "xlnet-large"), 16),
]
"""Models and tokens at which the greedy choice never comes back to one of them."""


@pytest.mark.parametrize(("models", "tokens"), STARVING)
def test_where_the_papers_greedy_starves_a_stream_weft_completes_queries_of_all_and_more_in_sum(models, tokens):
    npu = load_npu("tpuv3-like")
    loaded = [zoo.load(m, seq_len=tokens) if m.startswith(("bert", "xlnet")) else zoo.load(m) for m in models]
    priced = [estimate(model, npu) for model in loaded]
    greedy, ours = (simulate(priced, npu, policy, Saturated(40)).report for policy in ("layerweaver", "weft"))
    assert greedy.remark == ""  # no failsafe: this is the greedy choice
    assert min(stream.queries for stream in greedy.streams) == 0
    assert greedy.antt is None
    assert min(stream.queries for stream in ours.streams) >= 3
    assert ours.antt is not None
    assert ours.stp > greedy.stp


def test_the_greedy_starves_a_stream_that_always_looks_worse_and_the_band_saves_it():
    # c computes as long as it fetches and is never the least idle beside a and b, which hide each other
    models = [profile("a", (10, 30)), profile("b", (30, 10)), profile("c", (35, 35))]
    free = simulate(models, small_npu(100), "layerweaver", Saturated(50)).report
    assert [stream.queries > 0 for stream in free.streams] == [True, True, False]
    held = simulate(models, small_npu(100), "layerweaver", Saturated(50, mix=(1, 1, 1))).report
    assert [stream.queries for stream in held.streams] == [50, 50, 50]


def test_a_stream_that_is_done_does_not_lag():
    """The quota of 1.4 queries rounds to 1, so that stream ends early: from then on nobody waits for it."""
    layers = tuple(LayerCost(f"l{i}", 1e-5, 1000) for i in range(20))
    profiles = [Profile(name, "chip", 1, layers) for name in ("a", "b")]
    report = simulate(profiles, load_npu("tpuv3-like"), "weft", Saturated(1, (1, 1.4), 0.1)).report
    assert [stream.queries for stream in report.streams] == [1, 1]
    assert report.max_lag <= 0.1

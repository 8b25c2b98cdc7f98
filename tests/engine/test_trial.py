"""Before a run ``weft`` tries what it could imitate and smaller pieces, and is never below either."""

from __future__ import annotations

from dataclasses import asdict, replace
from random import Random

import pytest

from tests.engine.naive import program
from weft.base.errors import WorkloadError
from weft.devices import Npu, load_npu
from weft.devices.costs.layer_costs import Profile, estimate
from weft.engine import Engine, SaturatedStreams, SimulatedNpu, trial
from weft.engine.compiled import compiled_order
from weft.engine.policies import Setting, make_policy
from weft.engine.policies.bound import least_share, raise_starved
from weft.engine.policies.least_shares import WithLeastShares
from weft.engine.policies.weft import Weft
from weft.engine.trial import best_contender
from weft.models.packaged import PACKAGED, packaged_models
from weft.models.sources import load_model
from weft.simulation import simulate
from weft.simulation.saturated import make_setting
from weft.workloads import Saturated

RIVALS = ("fifo", "fair", "round-robin", "aimt", "layerweaver")
FEW = Saturated(24)


def scene(buffer_mib: float, tokens: int, *models: str) -> tuple[list[Profile], Npu]:
    """Real models on an NPU with that much buffer."""
    for model in PACKAGED.keys() & set(models):
        if model not in packaged_models():
            pytest.skip(f"{PACKAGED[model].package} is not installed")
    npu = load_npu("tpuv3-like").model_copy(update={"weight_buffer_mib": buffer_mib})
    return [estimate(load_model(model, parameters={"seq_len": tokens}), npu) for model in models], npu


# Never below what it could imitate


@pytest.mark.parametrize(("buffer_mib", "tokens", "pieces"), [(48.0, 16, 1), (48.0, 16, 8), (6.0, 64, None)], ids=str)
def test_weft_is_not_below_any_policy_with_the_same_pieces(buffer_mib, tokens, pieces):
    models, npu = scene(buffer_mib, tokens, "pp-ocr-det", "bert-base")
    ours = simulate(models, npu, "weft", FEW, pieces=pieces).report
    for rival in RIVALS:
        theirs = simulate(models, npu, rival, FEW, pieces=ours.pieces).report
        assert ours.stp >= 0.999 * theirs.stp, rival


def test_who_is_close_to_the_best_is_tried_for_longer():
    """Of fifteen ``aimt`` the best of 24 rounds is not the best of 60."""
    models, npu = scene(48.0, 16, "xlnet-base", "magika")
    ours, theirs = (simulate(models, npu, name, Saturated(60)).report.stp for name in ("weft", "aimt"))
    assert ours >= 0.999 * theirs


def test_the_best_of_few_rounds_is_believed_only_if_it_is_the_best_of_more():
    class Fading(trial.TrialJudge):
        """Rollouts begin well, and fall behind."""

        def shares(self, policy):
            return [0.5 if type(policy) is Weft and policy.setting.rounds > trial.ROUNDS else 0.7, 0.6]

    setting = Setting((program("a", (10, 30)), program("b", (30, 10))), 100, 60)
    judge = Fading(**asdict(trial.TrialJudge.of(setting)))
    tried = [trial._try_policy(make_policy(name, setting), judge, trial.ROUNDS) for name in ("weft", "aimt")]
    assert type(trial._winner(tried, Weft).policy) is Weft
    assert type(trial._winner(trial._confirm(tried, judge, Weft), Weft).policy) is not Weft


def test_what_weft_goes_on_as_is_said():
    models, npu = scene(6.0, 64, "pp-ocr-det", "bert-base")
    assert simulate(models, npu, "weft", FEW).report.remark.startswith("after a trial: ")
    assert simulate(models, npu, "weft", FEW, options={"trial": False}).report.remark == ""


def test_weft_is_not_below_a_policy_that_starves_a_stream_and_starves_none():
    """Here the bound's own mix is out of reach: a buffer of 12 MiB does not hide what it takes for hidden."""
    npu = load_npu("nnpi-like").model_copy(update={"weight_buffer_mib": 12.0})
    models = [estimate(load_model(model), npu, batch=8) for model in ("resnet50", "xlnet-large", "ncf")]
    ours, theirs = (simulate(models, npu, policy, Saturated(60), pieces=1).report for policy in ("weft", "layerweaver"))
    assert [stream.queries for stream in theirs.streams][1] == 0
    assert min(stream.queries for stream in ours.streams) > 0
    assert ours.stp >= theirs.stp
    assert "kept at a mix of" in ours.remark


def test_with_a_mix_too_weft_is_not_below_what_it_could_imitate():
    """Rollouts alone are 2.5 % behind ``aimt`` here."""
    random = Random(53)
    programs = tuple(
        program(name, *((random.randrange(1, 60), random.randrange(1, 60)) for _ in range(4))) for name in "abc"
    )
    setting = Setting(programs, 100, 24, (1.0, 1.0, 1.0), pieces=1)
    judge = trial.TrialJudge.of(setting)
    ours, theirs = (sum(judge.shares(best_contender(make_policy(name, setting)))) for name in ("weft", "aimt"))
    assert ours >= 0.999 * theirs


def test_a_policy_that_starves_a_stream_is_not_imitated():
    # c computes as long as it fetches and is never the least idle beside a and b, which hide each other
    programs = tuple(program(name, layer) for name, layer in (("a", (10, 30)), ("b", (30, 10)), ("c", (35, 35))))
    setting = Setting(programs, 100, 50)
    greedy = make_policy("layerweaver", setting, {"failsafe": False})
    judge = trial.TrialJudge.of(setting)
    assert min(judge.shares(greedy)) < trial.least_share(3)
    assert sum(judge.shares(greedy)) > sum(
        judge.shares(best_contender(make_policy("weft", replace(setting, pieces=1))))
    )
    assert trial._try_policy(greedy, judge, 50).stp == 0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("weaver", ["layerweaver", "aimt", "round-robin"])
def test_starved_streams_get_their_least_share_beside_the_weave_of_the_others(weaver, seed):
    """In the plain engine and in the compiled order alike."""
    random = Random(seed)
    count = random.choice((3, 4))
    at_least = tuple(random.sample(range(count), random.randrange(1, count - 1)))
    programs = tuple(
        program(name, *((random.randrange(1, 40), random.randrange(1, 40)) for _ in range(random.randrange(1, 6))))
        for name in "abcd"[:count]
    )
    setting = Setting(programs, 100, 200)
    inner = make_policy(weaver, setting, {"failsafe": False} if weaver == "layerweaver" else {})
    policy = WithLeastShares(setting, inner, at_least)
    order = compiled_order(policy, setting.work, None)
    npu = SimulatedNpu(setting)
    Engine(SaturatedStreams(setting, None, setting.work), policy, npu).run()
    assert order.tolist() == [head.stream for head, _ in npu.log]
    shares = trial.TrialJudge.of(setting).shares(policy)
    assert all(0.97 * trial.least_share(count) < shares[stream] < 1.2 * trial.least_share(count) for stream in at_least)


def test_weft_is_not_below_a_weave_of_two_that_is_charged_for_the_third():
    """``layerweaver`` starves xlnet-base; a band around any mix holds the other two back, and was 0.9 % below."""
    if "light-squeezenet" not in packaged_models():
        pytest.skip("the package of light-squeezenet is not installed")
    npu = load_npu("nnpi-like").model_copy(update={"weight_buffer_mib": 48.0})
    names = {"light-squeezenet": {}, "xlnet-base": {"seq_len": 64}, "alexnet": {}}
    models = [estimate(load_model(name, parameters=sizes), npu, batch=16) for name, sizes in names.items()]
    ours, theirs = (simulate(models, npu, policy, Saturated(60), pieces=2).report for policy in ("weft", "layerweaver"))
    shares = [stream.progress * stream.standalone_s / theirs.makespan_s for stream in theirs.streams]
    assert min(shares) < least_share(3)
    assert ours.stp >= 0.999 * sum(raise_starved(shares))
    assert all(s.progress * s.standalone_s / ours.makespan_s >= least_share(3) for s in ours.streams)
    assert "layerweaver (failsafe=False) with xlnet-base at the least share" in ours.remark


def test_a_policy_without_rivals_is_not_tried():
    setting = Setting((program("a", (10, 30)),), 100, 5)
    policy = make_policy("layerweaver", setting)
    assert best_contender(policy) is policy


def test_a_policy_that_inherits_from_weft_is_not_replaced():
    class Own(Weft):
        """Ours to change."""

    policy = Own(Setting((program("a", (10, 30)), program("b", (30, 10))), 100, 5))
    assert best_contender(policy) is policy


# Pieces


def test_a_cut_program_is_the_same_work_in_pieces_of_at_most_the_size():
    whole = program("m", (10, 7), (25, 9), (3, 4))
    cut = whole.cut(10)
    assert cut.fetch == (10, 8, 8, 9, 3)
    assert cut.compute == (7, 3, 3, 3, 4)
    assert cut.names == (whole.names[0], *(f"{whole.names[1]}[{i}/3]" for i in (1, 2, 3)), whole.names[2])
    assert sum(cut.weight_bytes) == sum(whole.weight_bytes)


def test_a_piece_is_a_number_of_whole_bytes():
    """On a slow channel a byte takes several ticks."""
    whole = replace(program("m", (30, 9)), weight_bytes=(10,))
    cut = whole.cut(10)
    assert (cut.weight_bytes, cut.fetch) == ((2, 3, 2, 3), (6, 9, 6, 9))


def test_every_piece_but_the_first_costs_what_the_device_says():
    assert program("m", (10, 7), (25, 9)).cut(10, cost=5).compute == (7, 3, 8, 8)
    npu = load_npu("tpuv3-like").model_copy(update={"piece_cycles": 7, "weight_buffer_mib": 12.0})
    models = [estimate(load_model("bert-base"), npu)]
    cut, whole = (make_setting(models, npu, FEW, pieces=pieces).programs[0] for pieces in (8, 1))
    ticks = 7 / npu.clock_hz * npu.bandwidth_bytes_per_s
    assert cut.total_compute - whole.total_compute == (len(cut) - len(whole)) * round(ticks)


def test_standalone_times_and_the_bound_stay_those_of_whole_layers():
    models, npu = scene(12.0, 16, "mobilenet-v2", "bert-base")
    whole, cut = (simulate(models, npu, "layerweaver", FEW, pieces=pieces).report for pieces in (1, 8))
    assert (whole.pieces, cut.pieces) == (1, 8)
    assert cut.bound_stp == whole.bound_stp
    assert [stream.standalone_s for stream in cut.streams] == [stream.standalone_s for stream in whole.streams]
    assert cut.stp > whole.stp


@pytest.mark.parametrize("tokens", [16, 64])
def test_with_a_small_buffer_weft_cuts_layers_and_comes_nearer_to_the_bound(tokens):
    models, npu = scene(12.0, tokens, "resnet50", "bert-base")
    run = simulate(models, npu, "weft", FEW)
    whole = simulate(models, npu, "weft", FEW, pieces=1).report
    assert run.report.pieces > 1 and run.trace.settings["pieces"] == run.report.pieces
    assert any("[1/" in name for name in run.trace.layers[0])
    assert run.report.fraction_of_bound > whole.fraction_of_bound + 0.005


def test_with_a_large_buffer_weft_leaves_layers_whole():
    models, npu = scene(48.0, 16, "mobilenet-v2", "bert-base")
    run = simulate(models, npu, "weft", FEW)
    assert run.report.pieces == 1
    assert run.trace.layers == simulate(models, npu, "fifo", FEW).trace.layers


@pytest.mark.parametrize("pieces", [0, -1, 1025])
def test_pieces_that_make_no_sense_are_refused(pieces):
    models, npu = scene(48.0, 16, "mobilenet-v2")
    with pytest.raises(WorkloadError, match=f"pieces = {pieces} must be from 1"):
        simulate(models, npu, "fifo", FEW, pieces=pieces)


def test_the_compiled_and_the_plain_engine_run_the_same_choice():
    models, npu = scene(12.0, 16, "mobilenet-v2", "bert-base")
    fast, slow = (simulate(models, npu, "weft", Saturated(1), compiled=compiled) for compiled in (True, False))
    assert list(fast.trace.spans) == list(slow.trace.spans)
    assert fast.report == slow.report

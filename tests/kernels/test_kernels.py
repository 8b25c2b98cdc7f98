"""Compiled loops equal the plain ones exactly: the order of issues and every time.

Run as a script, this file compares a few cases and prints how many: that is how the loops
themselves are checked, with the JIT off.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.naive import greedy_order, in_turn, play, profiles, program, scenes
from tests.kernels.jit import said_with_the_jit_off
from tests.kernels.saturated import OPTIONS, compiled_run, plain_run, ticks_of_work
from weft.devices import load_npu
from weft.devices.costs.layer_costs import estimate
from weft.devices.costs.program import Program, lower
from weft.devices.decoupled import DeviceClocks, issue
from weft.engine.compiled import replay_order
from weft.engine.policies import Option, Setting, make_policy
from weft.models import zoo
from weft.simulation import simulate
from weft.workloads import Saturated

NETWORKS = ("inception-v3", "mobilenet-v2", "resnet50", "resnext50-32x4d")
ENCODERS = ("bert-base", "bert-large", "xlnet-large", "ncf")
PAIRS = list(zip(NETWORKS, ENCODERS, strict=True))
DEVICES = [("tpuv3-like", 1), ("nnpi-like", 16)]
"""The paper's two NPUs and the batch it runs on each."""


def assert_equal(name: str, setting: Setting, options: Mapping[str, Option], quota: list[int] | None = None) -> None:
    assert compiled_run(name, setting, quota, options) == plain_run(name, setting, quota, options)


def quota_of(setting: Setting) -> list[int] | None:
    return [max(1, round(part * setting.rounds)) for part in setting.mix] if setting.mix else None


# The zoo


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("device", "batch"), DEVICES)
@pytest.mark.parametrize(
    ("network", "encoder"), [PAIRS[0], *(pytest.param(*pair, marks=pytest.mark.long) for pair in PAIRS[1:])]
)
def test_on_all_models_of_the_paper_the_kernel_issues_what_the_plain_loop_issues(device, batch, network, encoder, name):
    npu = load_npu(device)
    programs = tuple(lower(estimate(zoo.load(model), npu, batch=batch), npu) for model in (network, encoder))
    rounds = 1 if name == "weft" else 2
    assert_equal(name, Setting(programs, npu.weight_buffer_bytes, rounds), OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_on_four_models_of_the_zoo_too(name):
    npu = load_npu("tpuv3-like")
    models = ("resnet50", "bert-base", "mobilenet-v2", "ncf")
    programs = tuple(lower(estimate(zoo.load(model), npu), npu) for model in models)
    assert_equal(name, Setting(programs, npu.weight_buffer_bytes, 1), OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_simulate_comes_to_the_same_trace_and_report_either_way(name):
    npu = load_npu("tpuv3-like")
    pair = [estimate(zoo.load(model), npu) for model in ("mobilenet-v2", "bert-base")]
    fast, slow = (
        simulate(pair, npu, name, Saturated(1), options=OPTIONS[name], compiled=compiled) for compiled in (True, False)
    )
    assert list(fast.trace.spans) == list(slow.trace.spans)
    assert fast.report == slow.report


# Random programs


@settings(max_examples=25, derandomize=True, deadline=None)
@given(scene=scenes(streams=6), rounds=st.integers(1, 3))
def test_the_greedy_kernel_issues_what_the_plain_loop_and_the_scanning_pseudo_code_issue(scene, rounds):
    programs, buffer = scene
    setting = Setting(programs, buffer, rounds)
    assert_equal("layerweaver", setting, {"failsafe": False})
    assert compiled_run("layerweaver", setting, None, {"failsafe": False})[0] == greedy_order(
        programs, buffer, ticks_of_work(setting, None)
    )


@settings(max_examples=18, derandomize=True, deadline=None)
@given(scene=scenes(streams=4), rounds=st.integers(1, 3))
def test_layerweaver_with_its_failsafe_issues_what_the_plain_loop_issues(scene, rounds):
    assert_equal("layerweaver", Setting(*scene, rounds), {})


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    scene=scenes(streams=6),
    rounds=st.integers(1, 4),
    compute_threshold=st.sampled_from([0.0, 0.2, 0.5, 1.0, 3.0]),
    memory_threshold=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_the_aimt_kernel_issues_what_the_plain_loop_issues(scene, rounds, compute_threshold, memory_threshold):
    options = {"compute_threshold": compute_threshold, "memory_threshold": memory_threshold}
    assert_equal("aimt", Setting(*scene, rounds), options)


@settings(max_examples=20, derandomize=True, deadline=None)
@given(scene=scenes(streams=6, layers=4), rounds=st.integers(1, 2), horizon=st.integers(1, 3), data=st.data())
def test_the_rollout_kernel_issues_what_the_plain_loop_issues(scene, rounds, horizon, data):
    programs, _ = scene
    commit = data.draw(st.integers(1, horizon))
    mix = data.draw(st.none() | st.tuples(*(st.sampled_from([1.0, 1.5, 2.0, 3.0]) for _ in programs)))
    max_lag = data.draw(st.sampled_from([0.001, 0.25, 1.0, 10.0]))
    setting = Setting(*scene, rounds, mix, max_lag)
    assert_equal("weft", setting, {"horizon": horizon, "commit": commit}, quota_of(setting))


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "weft"])
@settings(max_examples=12, derandomize=True, deadline=None)
@given(scene=scenes(streams=5), rounds=st.integers(1, 3), asked=st.booleans(), data=st.data())
def test_a_kernel_with_a_band_issues_what_the_plain_loop_issues(name, scene, rounds, asked, data):
    """The mix is one that the user asked for, with a number of queries each, or one that a trial found."""
    mix = tuple(data.draw(st.sampled_from([1.0, 1.5, 2.0, 3.0])) for _ in scene[0])
    max_lag = data.draw(st.sampled_from([0.001, 0.25, 1.0, 10.0]))
    setting = Setting(*scene, rounds, max_lag=max_lag, **{"mix" if asked else "kept_mix": mix})
    for options in ({}, OPTIONS[name]):
        assert_equal(name, setting, options, quota_of(setting))


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=12, derandomize=True, deadline=None)
@given(given_=profiles(streams=3))
def test_layers_cut_into_chunks_are_issued_alike(name, given_):
    models, npu = given_
    programs = tuple(lower(model, npu) for model in models)
    assert_equal(name, Setting(programs, npu.weight_buffer_bytes, 1), OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("scale", [1, 10**6, 10**9])
def test_long_layers_are_issued_alike(name, scale):
    """Up to 10^11 ticks a layer: about half a second on the fast channel of the paper."""
    assert_equal(name, Setting(*scaled(Random(1), scale), 2), OPTIONS[name])


def test_very_long_layers_are_issued_alike_by_the_rollout_kernel():
    for seed in range(40):
        assert_equal("weft", Setting(*scaled(Random(seed), 2**36), 2), {"horizon": 32, "commit": 8})


def scaled(random: Random, scale: int) -> tuple[tuple[Program, ...], int]:
    def pick() -> int:
        return random.randrange(1, 100) * scale

    return tuple(program(f"m{i}", *((pick(), pick()) for _ in range(4))) for i in range(2)), 100 * scale


# Replay


@settings(max_examples=25, derandomize=True, deadline=None)
@given(scene=scenes(streams=4), data=st.data())
def test_replaying_any_order_gives_the_times_of_issue_and_of_a_device_played_tick_by_tick(scene, data):
    programs, buffer = scene
    order = data.draw(st.lists(st.integers(0, len(programs) - 1), min_size=1, max_size=30))
    layers = [(programs[s].fetch[i], programs[s].compute[i]) for s, _, i in in_turn(programs, order)]
    state, times = DeviceClocks(), []
    for fetch, compute in layers:
        state, when = issue(state, fetch, compute, buffer)
        times.append(list(when))
    replay = replay_order(make_policy("fifo", Setting(programs, buffer)), np.array(order, np.int64)).tolist()
    assert replay == times == [list(when) for when in play(layers, buffer)]


# The loops themselves


def compare_a_few() -> int:
    """A few cases of every kernel, small enough for a loop that is not compiled; returns how many."""
    random = Random(7)
    compared = 0
    for streams in (1, 2, 2, 3, 6):
        buffer = random.randrange(5, 40)
        programs = tuple(
            program(f"m{i}", *((random.randrange(buffer + 1), random.randrange(1, 60)) for _ in range(5)))
            for i in range(streams)
        )
        for name, options in OPTIONS.items():
            assert_equal(name, Setting(programs, buffer, 2), options)
            compared += 1
        mixed = Setting(programs, buffer, 2, tuple(1.0 + i % 2 for i in range(streams)))
        assert_equal("weft", mixed, OPTIONS["weft"], quota_of(mixed))
        compared += 1
    return compared


def test_the_loops_are_right_with_the_jit_off():
    assert said_with_the_jit_off("tests.kernels.test_kernels") == (0, "JIT off: 40 equal\n", "")


def test_the_same_cases_are_right_with_the_jit_on():
    assert not numba.config.DISABLE_JIT
    assert compare_a_few() == 40


if __name__ == "__main__":
    print(f"JIT {'off' if numba.config.DISABLE_JIT else 'on'}: {compare_a_few()} equal")  # noqa: T201 - read by the test

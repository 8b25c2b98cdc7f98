"""Tuned networks on weft's devices: fewer bytes, less time on the channel, more from a shared device."""

from __future__ import annotations

import pytest

from weft.devices import load_npu
from weft.devices.costs.layer_costs import estimate, read_profile, write_profile
from weft.models.layer import Gemm, Layer, Model
from weft.models.sources import load_model
from weft.simulation import simulate
from weft.workloads import Saturated
from weft_tune.hardware import Latency, latency_s, network_of, tuned_model
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import EXP, FIXED
from weft_tune.objective import parse_objective


@pytest.fixture(scope="module")
def npu():
    return load_npu("tpuv3-like")


@pytest.fixture(scope="module")
def dense():
    layers = (
        Layer("fc1", "gemm", "Gemm", Gemm(1, 1024, 1024), weights=1 << 20, input_elements=1024, output_elements=1024),
        Layer("fc2", "gemm", "Gemm", Gemm(1, 1024, 512), weights=1 << 19, input_elements=1024, output_elements=512),
    )
    return Model("dense", layers)


def weights(network, form):
    return Configuration({f"{target.name}.weight": form for target in network.targets})


def test_weight_bytes_follow_the_formats(npu, dense):
    network = network_of(dense)
    mixed = Configuration({"fc1.weight": FIXED(3), "fc2.weight": EXP(4), "fc2.input": FIXED(6)})
    tuned = tuned_model(dense, network, mixed)
    assert [layer.weight_bits for layer in tuned.layers] == [3, 4]
    assert [layer.activation_bits for layer in tuned.layers] == [32, 6]
    before, after = estimate(dense, npu), estimate(tuned, npu)
    assert [layer.weight_bytes for layer in before.layers] == [2 << 20, 2 << 19]  # 16 bits on this device
    assert [layer.weight_bytes for layer in after.layers] == [3 << 17, 4 << 16]
    assert [layer.compute_s for layer in before.layers] == [layer.compute_s for layer in after.layers]
    assert dense.layers[0].weight_bits == 32


def test_a_wider_format_than_the_device_has_costs_what_the_device_has(npu, dense):
    network = network_of(dense)
    assert estimate(tuned_model(dense, network, weights(network, FIXED(24))), npu).weight_bytes == 3 << 20


def test_the_profile_is_one_for_simulate(npu, dense, tmp_path):
    network = network_of(dense)
    profile = estimate(tuned_model(dense, network, weights(network, FIXED(4))), npu)
    write_profile(profile, tmp_path / "tuned.json")
    assert read_profile(tmp_path / "tuned.json").layers == profile.layers


def test_latency_is_fetching_and_the_last_computation(npu, dense):
    profile = estimate(dense, npu)
    fetch = profile.weight_bytes / npu.bandwidth_bytes_per_s
    assert latency_s(profile, npu) == pytest.approx(fetch + profile.layers[-1].compute_s, rel=1e-3)


def test_latency_falls_with_the_bits_and_is_remembered(npu, dense, monkeypatch):
    network = network_of(dense)
    latency = Latency(dense, network, npu)
    whole, narrow = latency(Configuration({})), latency(weights(network, FIXED(4)))
    assert narrow < whole / 2
    monkeypatch.setattr("weft_tune.hardware.latency_s", None)  # not asked again
    assert latency(weights(network, FIXED(4, bias=3))) == narrow


def test_latency_can_be_an_objective(npu, dense):
    network = network_of(dense)
    objective = parse_objective("latency * 1e6 + weights * 0", {"latency": Latency(dense, network, npu)})
    assert objective(network, weights(network, FIXED(2))) < objective(network, weights(network, FIXED(8)))


@pytest.mark.parametrize(("memory_heavy", "compute_heavy"), [("alexnet", "resnet50"), ("bert-large", "resnet50")])
def test_tuning_the_memory_heavy_model_lifts_the_pair(npu, memory_heavy, compute_heavy):
    """Counted by the times before tuning; by its own shorter times the tuned model would seem to do less."""
    heavy, other = load_model(memory_heavy), load_model(compute_heavy)
    network = network_of(heavy)
    before = [estimate(heavy, npu), estimate(other, npu)]
    after = [estimate(tuned_model(heavy, network, weights(network, FIXED(4))), npu), before[1]]
    reports = [simulate(profiles, npu, "weft", Saturated(50)).report for profiles in (before, after)]
    reference = [stream.standalone_s for stream in reports[0].streams]
    was, now = (
        sum(stream.progress * alone_s for stream, alone_s in zip(report.streams, reference, strict=True))
        / report.makespan_s
        for report in reports
    )
    assert was == pytest.approx(reports[0].stp)
    assert now > 1.5 * was
    assert reports[1].stp < reports[0].stp
    assert after[0].weight_bytes * 3 < before[0].weight_bytes

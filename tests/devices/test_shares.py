"""Shares of a GPU: what work is like, what it does to its neighbour, and how far that is from what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.base.errors import DeviceError, WorkloadError
from weft.devices import load_any, load_device, read_host, write_host
from weft.devices.gpu_pairs import GpuPairs, PairError, fitted, left_out, read_pairs
from weft.devices.host import GpuCuts, Host
from weft.devices.shares import Contention, GpuLikeness, Share, Shares, ladder
from weft.simulation.comparison import compare_requests
from weft.simulation.requests import prepare, simulate_requests
from weft.workloads.requests import Workload

LARGE = GpuLikeness(speeds={84: 0.7, 48: 0.42}, kernel_us=40, memory=0.1)
STREAMING = GpuLikeness(speeds={84: 0.97, 48: 0.88}, kernel_us=10, memory=0.6)
TINY = GpuLikeness(speeds={84: 1.0, 48: 0.98}, kernel_us=5, memory=0.02)


@pytest.fixture(scope="module")
def measured() -> GpuPairs:
    return read_pairs()


@pytest.mark.parametrize(("like", "bound"), [(LARGE, "compute"), (STREAMING, "memory"), (TINY, "launches")])
def test_speeds_on_shares_tell_what_work_is_bound_by(like: GpuLikeness, bound: str) -> None:
    assert like.bound(132) == bound


def test_a_share_that_was_not_measured_follows_from_how_much_of_the_gpu_work_fills() -> None:
    perfect = GpuLikeness(speeds={66: 0.5}, kernel_us=10)
    assert perfect.fill(132) == pytest.approx(1)
    assert perfect.speed(33, 132) == pytest.approx(0.25)
    assert perfect.speed(132, 132) == 1
    assert LARGE.speed(48, 132) < LARGE.speed(64, 132) < LARGE.speed(84, 132)


def test_shares_overlap_by_their_multiprocessors() -> None:
    whole, large, small = Share(0, 132), Share(0, 84), Share(84, 48)
    assert large.within(small) == small.within(large) == 0
    assert large.within(whole) == small.within(whole) == 1
    assert whole.within(small) == pytest.approx(48 / 132)


def lanes_of(*kinds: GpuLikeness) -> Shares:
    return Shares(132, ladder(132, [(84, 48), (68, 64)], streams=2), kinds, Contention())


def test_the_lanes_of_a_gpu() -> None:
    shares = lanes_of(LARGE)
    assert [str(each) for each in shares.lanes] == ["132", "132", "132 high", "84", "48", "68", "64"]
    assert (shares.whole, shares.high, shares.cuts) == ((0, 1), 2, ((3, 4), (5, 6)))


def test_nobody_goes_faster_beside_another_and_a_cut_protects_from_long_kernels() -> None:
    shares = lanes_of(LARGE, STREAMING)
    alone = [shares.speeds([kind], [lane])[0] for kind, lane in ((0, 3), (1, 4))]
    cut, streams = shares.speeds([0, 1], [3, 4]), shares.speeds([0, 1], [0, 1])
    assert all(together < speed for together, speed in zip(cut, alone, strict=True))
    assert streams[1] < 0.4 < cut[1]
    assert streams[0] > cut[0]


def test_the_one_with_priority_waits_less() -> None:
    shares = lanes_of(LARGE, STREAMING)
    equal, favoured = shares.speeds([0, 1], [0, 1]), shares.speeds([0, 1], [0, 2])
    assert favoured[1] > equal[1] and favoured[0] < equal[0]


def test_the_constants_are_those_that_meet_what_was_measured(measured: GpuPairs) -> None:
    found = fitted(measured)
    for name in ("beside", "filled", "order", "memory"):
        assert getattr(found, name) == pytest.approx(getattr(Contention(), name), rel=0.02)
    errors = [PairError(pair, tuple(measured.predicted(pair, Contention()))).error for pair in measured.pairs]
    assert sum(errors) / len(errors) < 0.065


@pytest.mark.long  # fits the model anew without each pair; that the constants meet all pairs is tested above
def test_pairs_that_the_model_was_not_fitted_to_are_met_within_a_tenth(measured: GpuPairs) -> None:
    errors = [each.error for each in left_out(measured)]
    assert len(errors) == len(measured.pairs)
    assert sum(errors) / len(errors) < 0.085


def saturated(*models: str) -> Workload:
    streams = [
        {"model": each, "arrival": "closed", "clients": 2, "deadline_ms": 1e5, "max_batch": 1} for each in models
    ]
    return Workload.model_validate({"duration_s": 0.15, "warmup_s": 0.0, "stream": streams})


def test_a_simulated_gpu_is_a_device_like_others(measured: GpuPairs, tmp_path: Path) -> None:
    gpu = load_device("h200")
    assert isinstance(gpu, Host) and gpu == load_any("h200") == measured.device()
    write_host(gpu, tmp_path / "gpu.json")
    assert read_host(tmp_path / "gpu.json") == gpu
    made = compare_requests(saturated("encoder-b64", "llm7b-b1"), gpu, policies=["fifo", "streams", "abreast"])
    fifo, streams, abreast = (report.stp for report in made.reports)
    assert abreast > 1.1 * fifo and abreast > 1.1 * streams


def test_who_chooses_shares_is_refused_where_there_are_none() -> None:
    gpu = load_device("h200")
    assert isinstance(gpu, Host)
    case = prepare(saturated("encoder-b64"), gpu.model_copy(update={"gpu": None}))
    with pytest.raises(WorkloadError, match="Abreast chooses shares of a GPU, and h200 has none"):
        simulate_requests(case, "abreast")


def test_files_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not add up to 132"):
        GpuCuts(sms=132, cuts=((84, 50),))
    gpu = load_device("h200")
    assert isinstance(gpu, Host)
    raw = gpu.model_dump(mode="json")
    raw["models"]["llm7b-b1"]["like"] = {}
    (tmp_path / "gpu.json").write_text(json.dumps(raw), "utf-8")
    with pytest.raises(DeviceError, match="llm7b-b1 has no `like`"):
        read_host(tmp_path / "gpu.json")

"""What requests take of a kind of machine: from NPUs, measured hosts, and as stated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.planning.machines import host
from weft.base.errors import PlacingError, WorkloadError
from weft.devices import load_npu
from weft.devices.costs.layer_costs import estimate
from weft.devices.host import write_host
from weft.models.sources import load_model
from weft.workloads.requests import Workload, parse_workload
from weft_cluster.placing.demand import demands_of
from weft_cluster.placing.machines import Machines, parse_machines


def workload(*streams: dict[str, Any], **more: Any) -> Workload:
    return parse_workload({"stream": [{"rate": 10, "deadline_ms": 50, **each} for each in streams], **more})


def there(folder: str = ".", models: dict[str, Any] | None = None, **kind: Any) -> Machines:
    given = {"kinds": {"k": {"memory_gib": 16, **kind}}, "machine": [{"kind": "k"}]}
    return parse_machines({**given, "models": models or {}, "folder": folder})


def test_an_npu_has_two_resources() -> None:
    npu = load_npu("tpuv3-like")
    profile = estimate(load_model("resnet50"), npu)
    (demand,) = demands_of(workload({"model": "resnet50"}), there(device="tpuv3-like"))
    need = demand.needs["k"]
    assert need.compute_s == pytest.approx(profile.compute_s, rel=1e-4)
    assert need.memory_s == pytest.approx(profile.weight_bytes / npu.bandwidth_bytes_per_s, rel=1e-4)
    assert need.weight_bytes == profile.weight_bytes
    assert max(need.compute_s, need.memory_s) <= need.alone_s <= need.compute_s + need.memory_s
    assert 0 < need.segment_s < need.alone_s
    assert (demand.rate, demand.deadline_s) == (10, 0.05)


def test_half_the_speed_takes_twice_the_time() -> None:
    full, half = (
        demands_of(workload({"model": "resnet50"}), there(device="tpuv3-like", speed=speed))[0].needs["k"]
        for speed in (1.0, 0.5)
    )
    assert half.compute_s == 2 * full.compute_s and half.alone_s == 2 * full.alone_s
    assert half.weight_bytes == full.weight_bytes


def test_a_measured_host_divides_its_time_by_its_lanes(tmp_path: Path) -> None:
    write_host(host(2, memory_bytes=2**27, camera=[4.0], words=[3.0, 2.0]), tmp_path / "here.json")
    streams = workload({"model": "camera.onnx"}, {"model": "words.onnx"})
    camera, words = demands_of(streams, there(str(tmp_path), device="here.json"))
    assert camera.needs["k"].compute_s == camera.needs["k"].memory_s == 0
    assert words.needs["k"].other_s == pytest.approx(0.005 / 2, rel=0.05)
    assert words.needs["k"].segment_s == pytest.approx(0.003, rel=0.05)
    assert words.needs["k"].alone_s >= 0.005
    assert camera.needs["k"].weight_bytes == 2**26  # its file is not here: half of what was measured


def test_peaks_tell_computing_from_memory(tmp_path: Path) -> None:
    write_host(host(1, resnet50=[4.0]), tmp_path / "gpu.json")
    more = {"device": "gpu.json", "peak_tflops": 0.01, "bandwidth_gb_s": 1e6}
    (busy,) = demands_of(workload({"model": "resnet50"}), there(str(tmp_path), **more))
    assert busy.needs["k"].compute_s == pytest.approx(0.004, rel=0.01)
    more |= {"peak_tflops": 1e6, "bandwidth_gb_s": 0.01}
    (waits,) = demands_of(workload({"model": "resnet50"}), there(str(tmp_path), **more))
    assert waits.needs["k"].memory_s == pytest.approx(0.004, rel=0.01)
    assert waits.needs["k"].weight_bytes == pytest.approx(25.5e6 * 4, rel=0.02)


def test_a_rule_states_what_nobody_measured() -> None:
    on = {"k": {"compute_ms": 2, "memory_ms": 1, "other_ms": 0.5, "weights_mib": 3, "segment_ms": 1}}
    rules = {"mine": {"replicas": 1, "on": on}}
    (demand,) = demands_of(workload({"model": "mine"}, {"model": "mine", "deadline_ms": 20}), there(models=rules))
    need = demand.needs["k"]
    assert (need.compute_s, need.memory_s, need.other_s, need.alone_s) == (0.002, 0.001, 0.0005, 0.0035)
    assert (need.weight_bytes, need.segment_s) == (3 * 2**20, 0.001)
    assert (demand.rate, demand.deadline_s) == (20, 0.02)  # both streams, by the tighter deadline


def test_what_nobody_knows_is_one_line() -> None:
    with pytest.raises(PlacingError, match=r"mine: nothing says what it takes on k; .* under \[models.mine.on.k\]"):
        demands_of(workload({"model": "mine"}), there())
    with pytest.raises(PlacingError, match=r"models\.other: no stream of the workload asks for it"):
        demands_of(workload({"model": "resnet50"}), there(device="tpuv3-like", models={"other": {}}))
    with pytest.raises(WorkloadError, match="closed clients follow the server's pace"):
        demands_of(workload({"model": "resnet50", "arrival": "closed", "rate": None}), there(device="tpuv3-like"))

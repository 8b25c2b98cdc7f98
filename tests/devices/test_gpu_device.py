"""A GPU as a device: its twin on the cores, measured as the server runs it, and loads that it is asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.runtime.cuda.nets import chain
from weft.base.errors import DeviceError, InputError
from weft.devices import load_any, read_host, write_host
from weft.devices.host import is_device, is_measured
from weft.engine.lane_queues import DEVICE_AHEAD
from weft.planning.survey.host_measurement import measure
from weft.planning.survey.measure import _Survey
from weft.runtime.cuda.device import TWIN_CUTS
from weft.simulation.requests import prepare, simulate_requests
from weft.workloads.requests import parse_workload

TWIN = "cuda:twin"


@pytest.mark.long  # a plan for the twin, which measures it, is made and served in planning/test_plan_device.py, too
@pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")
def test_a_gpu_is_measured_as_the_server_runs_it_and_can_be_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.planning.survey.measure.WARM_S", 0.05)
    model = chain(tmp_path / "chain.onnx")
    (tmp_path / "chain.toml").write_text("max_batch = 2\ngrain_ms = 0.0001\n")
    measured = measure([model], device=TWIN, seconds=0.2, cache=tmp_path / "cache")
    assert (measured.name, measured.lanes, measured.ahead) == (TWIN, 1, DEVICE_AHEAD)
    assert set(measured.models["chain"].times_s) == {1, 2} and len(measured.models["chain"].segments) > 1
    write_host(measured, tmp_path / "gpu.json")
    assert read_host(tmp_path / "gpu.json") == measured
    stream = {"model": "chain", "rate": 20.0, "deadline_ms": 1000.0}
    case = prepare(parse_workload({"duration_s": 1.0, "stream": [stream]}, "w"), measured)
    assert measured.gpu == TWIN_CUTS and set(measured.models["chain"].like) == {1, 2}
    for policy in ("punctual", "abreast"):
        (seen,) = simulate_requests(case, policy).report.streams
        assert seen.completed == seen.arrived > 0


def test_what_passes_between_batches_is_no_hand_over_of_a_gpu_which_has_the_next_one() -> None:
    found = {
        device: _Survey((), (1,), 1, 1.0, Path("cut"), None, None, device=device, full_gaps_s=[0.01] * 20)._gaps([])
        for device in (TWIN, "host")
    }
    assert found == {TWIN: [], "host": [0.01] * 20}


def test_a_gpu_has_one_lane_and_is_not_read_by_its_name() -> None:
    with pytest.raises(InputError, match="cuda:0 has one lane, not 2"):
        measure(["x.onnx"], device="cuda:0", lanes=2)
    with pytest.raises(InputError, match="cuda:x is not measured"):
        measure(["x.onnx"], device="cuda:x")
    with pytest.raises(DeviceError, match=r"--device cuda:0 -o host\.json"):
        load_any("cuda:0")
    assert is_device("cuda:1") and is_measured("host") and not is_device("host") and not is_measured("cuda:100")

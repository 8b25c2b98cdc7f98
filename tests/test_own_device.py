"""A device that another package adds: ``examples/backend``, built, installed in a folder, and used by its name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests import ROOT
from tests.registering import register
from tests.serving import live
from weft.base.errors import InputError
from weft.base.registry import _read
from weft.devices.host import is_device
from weft.planning.machine import plan_target
from weft.runtime.device_kinds import on_device
from weft.runtime.isolated.limits import WorkerLimits
from weft.serving.config import ServerConfig
from weft.serving.gpu_sharing import sharing_for
from weft.serving.process import ServerProcess
from weft.workloads.requests import parse_workload

SLOW = "slow:0"
STREAM = {"model": "mlp.onnx", "rate": 5.0, "deadline_ms": 200.0}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed, entry points and all."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel; pip install -e .[dev] brings it")
    folder = tmp_path_factory.mktemp("site-packages")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT / "examples" / "backend", check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    return folder


@pytest.fixture
def installed(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, for processes that find the package."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
    return live.mlp(tmp_path / "mlp.onnx").parent


def weft(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "weft"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_device_of_another_package_serves(installed: Path) -> None:
    path, row = installed / "mlp.onnx", np.linspace(-1, 1, 64, dtype=np.float32)[None]
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 64], "data": row[0].tolist()}]}
    with ServerProcess(str(path), "--device", SLOW, "--cache", str(installed / "cache")) as server:
        asked = urllib.request.Request(f"{server.url}/v2/models/mlp/infer", json.dumps(body).encode())
        (output,) = _json(asked)["outputs"]
        assert _json(f"{server.url}/v2/models/mlp")["platform"] == "onnx_reference"
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            assert f'weft_device_busy_seconds_total{{device="{SLOW}"}}' in answer.read().decode()
    (expected,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": row})
    np.testing.assert_allclose(np.reshape(output["data"], output["shape"]), expected, rtol=1e-4, atol=1e-6)


def _json(request: str | urllib.request.Request) -> Any:
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_without_the_package_the_name_is_no_device(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TOOLS", "own")
    refused = weft(installed, "serve", "mlp.onnx", "--device", SLOW)
    assert refused.returncode and "must be a device, as cuda:0" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.long
def test_a_device_of_another_package_is_measured_and_planned_for(installed: Path) -> None:
    measured = weft(installed, "profile", "mlp.onnx", "--device", SLOW, "--seconds", "0.1", "-o", "slow.json")
    assert measured.returncode == 0, measured.stderr
    host = json.loads((installed / "slow.json").read_text())
    assert (host["name"], host["lanes"], host["ahead"]) == (SLOW, 1, 0) and host["source"].startswith("onnx.reference")
    (installed / "load.toml").write_text("[[stream]]\n" + "".join(f"{key} = {STREAM[key]!r}\n" for key in STREAM))
    planned = weft(
        installed, "plan", "load.toml", "--device", SLOW, "--seconds", "0.1", "-o", "plan", "--cache", "kept"
    )
    assert planned.returncode == 0, planned.stderr
    plan = json.loads((installed / "plan" / "plan.json").read_text())
    assert plan["settings"]["device"] == SLOW and plan["machine"]["gpu"] == host["source"].partition(" (")[0]
    with ServerProcess(str(installed / "plan")) as server:
        assert _json(f"{server.url}/v2/models/mlp")["platform"] == "onnx_reference"


# By its kind, in this process


class Plain:
    """A kind of device that is never here."""

    ahead, shares, engine = 0, False, None

    def check(self, name: str) -> str | None:
        raise InputError(f"{name}: its driver is missing")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "devices", "plain", f"{__name__}:Plain", names="[0-3]", example="plain:0")


@pytest.mark.usefixtures("plain")
def test_a_device_is_known_by_its_kind_and_by_the_names_that_it_registers() -> None:
    assert is_device("plain:3") and is_device("cuda:3")
    assert not any(map(is_device, ("plain:4", "plain:", "plain", "other:0", "host")))
    assert ServerConfig(models=("m",), device="plain:0,plain:1").execution.lanes == 2
    with pytest.raises(InputError, match="must be a device, as cuda:0 or plain:0, or several of a kind"):
        ServerConfig(models=("m",), device="plain:4")


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ('[devices.host]\nexample = "host:0"', "devices.host cannot be the beginning of a device's name"),
        ('[devices."a:b"]\nexample = "a:b:0"', "devices.a:b cannot be the beginning of a device's name"),
        ('[devices.tpu]\nnames = "[0-9"\nexample = "tpu:0"', "devices.tpu: names must be a regular expression"),
        ('[devices.tpu]\nnames = "[0-9]"', "devices.tpu needs an example of a device's name, as tpu:0"),
        ('[devices.tpu]\nnames = "[0-9]"\nexample = "tpu:x"', "devices.tpu needs an example of a device's name"),
    ],
)
def test_a_tool_whose_devices_could_not_be_named_is_left_out_with_a_line(
    entry: str, wrong: str, tmp_path: Path
) -> None:
    (tmp_path / "tool.toml").write_text(f'api = 1\nname = "tpu"\n{entry}\ntarget = "tpu:Kind"\n')
    with pytest.raises(ValueError, match=re.escape(wrong)):
        _read(tmp_path / "tool.toml", "tpu", own=False)


@pytest.mark.usefixtures("plain")
def test_what_a_device_lacks_is_said_before_anything_is_opened() -> None:
    workload = parse_workload({"duration_s": 1.0, "device": "plain:0", "stream": [STREAM]}, "w")
    with pytest.raises(InputError, match="plain:0: its driver is missing"):
        on_device("plain:0", WorkerLimits())
    with pytest.raises(InputError, match="plain:0: its driver is missing"):
        plan_target([], workload)
    with pytest.raises(InputError, match="plain:9: a plan is for one device, by its name; name it alone, as plain:0"):
        plan_target(["plain:9"], workload)


@pytest.mark.usefixtures("plain")
def test_devices_of_two_kinds_do_not_share_models_and_a_plain_one_has_no_shares() -> None:
    with pytest.raises(InputError, match="models run on devices of one kind"):
        on_device("plain:0,cuda:0", WorkerLimits())
    with pytest.raises(InputError, match="abreast chooses shares of a device, and plain:0 has none"):
        sharing_for("abreast", "plain:0")

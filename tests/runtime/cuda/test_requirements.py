"""What is said where a GPU cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

from weft.base.errors import InputError
from weft.runtime.cuda import requirements
from weft.serving.config import ServerConfig


def complaint(monkeypatch: pytest.MonkeyPatch, device: str = "cuda:0", **there: Any) -> str:
    """What is said on a machine that has so much; by default everything."""
    there = {"cuda": True, "new": True, "torch": True, "twice": False, "gpus": 1} | there
    providers = ["CPUExecutionProvider", *(["CUDAExecutionProvider"] if there["cuda"] else [])]
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: providers)
    monkeypatch.setattr(
        "onnxruntime.InferenceSession", type("New", (), {"get_input_memory_infos": 1} if there["new"] else {})
    )
    monkeypatch.setattr(requirements, "find_spec", lambda name: object() if there["torch"] else None)
    monkeypatch.setattr(requirements, "installed_twice", lambda: there["twice"])
    monkeypatch.setattr(requirements, "gpus", lambda: there["gpus"])
    try:
        return requirements.check(device) or ""
    except InputError as error:
        return str(error)


def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert complaint(monkeypatch) == ""
    assert complaint(monkeypatch, cuda=False) == ""  # torch runs ONNX files
    assert complaint(monkeypatch, new=False).endswith(" is too old; install 1.23 or later")
    assert complaint(monkeypatch, torch=False) == "cuda:0: torch is not installed; pip install 'weft[cuda]'"
    assert "no NVIDIA driver with a GPU was found" in complaint(monkeypatch, gpus=0)
    assert complaint(monkeypatch, "cuda:2", gpus=2) == "cuda:2: this machine has 2 GPU(s), the last is cuda:1"


def test_two_packages_that_write_the_same_folder_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert complaint(monkeypatch, twice=True).startswith("onnxruntime and onnxruntime-gpu are both installed")
    assert complaint(monkeypatch, twice=True, cuda=False).startswith("cuda:0: onnxruntime and onnxruntime-gpu are both")


def test_packages_are_found_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requirements.folder_of("onnx") is not None and requirements.folder_of("no-such-package") is None
    monkeypatch.setattr(requirements, "folder_of", {"onnxruntime": "a", "onnxruntime-gpu": "a"}.get)
    assert requirements.installed_twice()
    monkeypatch.setattr(requirements, "folder_of", {"onnxruntime": "a", "onnxruntime-gpu": "b"}.get)
    assert not requirements.installed_twice()


class Driver:
    """CUDA's, with one GPU; it has its own way of answering."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, number: Any, index: int) -> int:
        number._obj.value = index
        return 0 if index == 0 else 101

    def cuDeviceGetName(self, name: Any, size: int, number: Any) -> int:
        name.value = b"NVIDIA H200"[: size - 1]
        return number.value


def test_a_gpu_is_called_what_its_driver_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver())
    assert [requirements.gpu_called(each) for each in ("cuda:0", "cuda:1")] == ["NVIDIA H200", ""]

    def none(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", none)
    assert (requirements.gpu_called("cuda:0"), requirements.gpus()) == ("", 0)
    assert requirements.gpu_called("cuda:twin") == "the twin of a GPU"


def test_a_device_has_one_lane_and_precision_needs_a_device() -> None:
    assert ServerConfig(device="cuda:0", precision="fp16", lanes=4).execution.lanes == 1
    with pytest.raises(InputError, match="precision = fp16 needs a device"):
        ServerConfig(precision="fp16")
    with pytest.raises(InputError, match="device_memory_bytes = 1 needs a device"):
        ServerConfig(device_memory_bytes=1)
    with pytest.raises(InputError, match="gates = True needs a device"):
        ServerConfig(gates=True)
    with pytest.raises(InputError, match="isolation = process cannot go with device = cuda:0"):
        ServerConfig(device="cuda:0", isolation="process")
    with pytest.raises(InputError, match="device"):
        ServerConfig(device="gpu")

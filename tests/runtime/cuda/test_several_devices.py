"""A model on several devices, without a process: where its steps go, and what cannot be one model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.base.errors import InputError, ModelError
from weft.runtime.isolated import devices
from weft.runtime.isolated.limits import WorkerLimits
from weft.serving.config import ServerConfig


class Opened:
    """A device that opens what it is told to."""

    limits, name, platform, grain_s, now = WorkerLimits(), "x", "y", 1.0, None

    def __init__(self, device: str, limits: WorkerLimits, memory_bytes: int | None, **how: Any) -> None:
        self.device, self.how, self.kept, self.closed = device, how, list[Any](), 0

    def open(self, path: Path, options: Any, cache: Path, say: Any, *, learn: bool) -> Any:
        self.kept.append(cache)
        count = int(path.stem) if self.device == "cuda:1" else 2
        return SimpleNamespace(segments=("a",) * count, max_batch=1, exits=(), remarks=(), close=self._count)

    def _count(self) -> None:
        self.closed += 1

    def close(self) -> None:
        """Nothing is left."""


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> devices.SeveralDevices:
    monkeypatch.setattr(devices, "DeviceBackend", Opened)
    return devices.SeveralDevices(["cuda:0", "cuda:1"], WorkerLimits(), numbers=[0, 1])


def test_devices_share_what_was_learned_and_where_it_is_kept(two: Any, tmp_path: Path) -> None:
    two.open(Path("2.onnx"), None, tmp_path)
    assert [each.how for each in two._each] == [
        {"label": "cuda:0", "kept_as": "cuda:0,cuda:1", "number": 0},
        {"label": "cuda:1", "kept_as": "cuda:0,cuda:1", "number": 1},
    ]
    two.open(Path("2.onnx"), None)
    assert two._each[0].kept == two._each[1].kept and two._each[0].kept[0] == tmp_path
    folder = two._each[0].kept[1]
    assert folder.is_dir()
    two.close()
    assert not folder.exists()


def test_a_model_that_comes_out_otherwise_on_one_of_them_is_refused(two: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^3\.onnx: comes out otherwise on cuda:1 than on cuda:0"):
        two.open(Path("3.onnx"), None, tmp_path)
    assert [each.closed for each in two._each] == [1, 1]


def test_a_device_that_is_named_again_has_another_label() -> None:
    assert devices._labels(["cuda:0", "cuda:1", "cuda:0", "cuda:0"]) == ("cuda:0", "cuda:1", "cuda:0#2", "cuda:0#3")


@pytest.mark.parametrize("names", ["cuda:0,", "cuda:0, cuda:1", "cuda:0,cpu", ",", ""])
def test_what_is_no_list_of_devices_is_refused(names: str) -> None:
    with pytest.raises((InputError, ValueError), match="as cuda:0, or several of a kind with commas between them"):
        ServerConfig(models=("m",), device=names)

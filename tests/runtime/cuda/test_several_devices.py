"""A model on several devices, without a process: where its steps go, and what cannot be one model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.hosts import Away
from weft.base.errors import InputError, ModelError
from weft.runtime.backend import LoadOptions
from weft.runtime.engines import AUTO, COMPILED, ONNXRUNTIME
from weft.runtime.facets import Batching, ModelResidency
from weft.runtime.isolated import device as devices
from weft.runtime.isolated.limits import WorkerLimits
from weft.serving.config import ServerConfig

OPTIONS = LoadOptions(engine=AUTO)


class Opened:
    """A device that opens what it is told to."""

    limits, name, platform, grain_s, now, default_engine = WorkerLimits(), "x", "y", 1.0, None, AUTO

    def __init__(self, device: str, limits: WorkerLimits, memory_bytes: int | None, **how: Any) -> None:
        self.device, self.how, self.kept, self.closed = device, how, list[Any](), 0

    def open(self, path: Path, options: Any, cache: Path, say: Any, *, learn: bool) -> Any:
        self.kept.append(cache)
        slower = self.device == "cuda:1" and path.suffix == ".slower"
        engine = ONNXRUNTIME if slower or options.engine == ONNXRUNTIME else COMPILED
        count = int(path.stem) if self.device == "cuda:1" else 2
        plain = {"batching": Batching(), "exits": None, "residency": ModelResidency(), "remarks": ()}
        timing = SimpleNamespace(engine=engine)
        return SimpleNamespace(segments=("a",) * count, timing=timing, **plain, close=self._count)

    def _count(self) -> None:
        self.closed += 1

    def close(self) -> None:
        """Nothing is left."""


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> devices.SeveralDevices:
    monkeypatch.setattr(devices, "DeviceBackend", Opened)
    return devices.SeveralDevices(["cuda:0", "cuda:1"], WorkerLimits(), numbers=[0, 1])


def test_devices_share_what_was_learned_and_where_it_is_kept(two: Any, tmp_path: Path) -> None:
    two.open(Path("2.onnx"), OPTIONS, tmp_path)
    assert [each.how for each in two._backends] == [
        {"label": "cuda:0", "cache_name": "cuda:0,cuda:1", "number": 0, "packager": None},
        {"label": "cuda:1", "cache_name": "cuda:0,cuda:1", "number": 1, "packager": None},
    ]
    two.open(Path("2.onnx"), OPTIONS)
    assert two._backends[0].kept == two._backends[1].kept and two._backends[0].kept[0] == tmp_path
    folder = two._backends[0].kept[1]
    assert folder.is_dir()
    two.close()
    assert not folder.exists()


def test_a_model_is_as_far_away_as_on_the_device_that_has_it_soonest() -> None:
    models: Any = [SimpleNamespace(remarks=(), residency=Away(8, 4, 2.0, away_s)) for away_s in (2.0, 0.5)]
    held = devices.SpreadModel(models, ["cuda:0", "cuda:1"]).residency
    assert (held.memory_bytes, held.moving_bytes, held.return_s, held.away_s) == (8, 4, 2.0, 0.5)


def test_a_model_that_comes_out_otherwise_on_one_of_them_is_refused(two: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^3\.onnx: is cut differently on cuda:1 than on cuda:0"):
        two.open(Path("3.onnx"), OPTIONS, tmp_path)
    assert [each.closed for each in two._backends] == [1, 1]


def test_all_devices_run_a_model_with_one_engine(two: Any, tmp_path: Path) -> None:
    assert two.open(Path("2.onnx"), OPTIONS, tmp_path).timing.engine == COMPILED
    assert two.open(Path("2.slower"), OPTIONS, tmp_path).timing.engine == ONNXRUNTIME
    assert [each.closed for each in two._backends] == [1, 1]


def test_a_device_that_is_named_again_has_another_label() -> None:
    assert devices._labels(["cuda:0", "cuda:1", "cuda:0", "cuda:0"]) == ("cuda:0", "cuda:1", "cuda:0#2", "cuda:0#3")


@pytest.mark.parametrize("names", ["cuda:0,", "cuda:0, cuda:1", "cuda:0,cpu", ",", ""])
def test_what_is_no_list_of_devices_is_refused(names: str) -> None:
    with pytest.raises((InputError, ValueError), match="as cuda:0, or several of a kind with commas between them"):
        ServerConfig(models=("m",), device=names)

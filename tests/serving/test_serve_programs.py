"""Programs of torch at the server: none is loaded unless that is allowed, and none without a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving import live
from tests.support.kinds import register
from weft.base.errors import InputError, ModelError
from weft.runtime.backends import make_backend
from weft.runtime.isolated.limits import WorkerLimits
from weft.serving.isolation import check_device
from weft.serving.repository import Repository


def test_a_program_is_not_loaded_unless_somebody_allows_it(tmp_path: Path) -> None:
    (tmp_path / "flat.pt2").write_bytes(b"code")
    (tmp_path / "flat.toml").write_text("max_batch = 2\n")
    folder = tmp_path / "folder" / "1"
    folder.mkdir(parents=True)
    (folder / "model.pt2").write_bytes(b"code")
    found = Repository([tmp_path], tmp_path / "scratch")
    assert found.names() == [] and not found.remarks
    for name in ("flat", "folder"):
        assert "may run code that lies in it; allow_programs = true" in found.problems[name]
    allowed = Repository([tmp_path], tmp_path / "scratch", programs=True)
    assert allowed.names() == ["flat", "folder"] and allowed.entry("flat").config.max_batch == 2
    assert Repository([tmp_path / "flat.pt2"], tmp_path / "scratch", programs=True).names() == ["flat"]
    with pytest.raises(InputError, match=r"'none\.pt2' is not there"):
        Repository(["none.pt2"], tmp_path / "scratch", programs=True)
    (tmp_path / "flat.txt").write_bytes(b"")
    with pytest.raises(InputError, match="is not a model"):
        Repository([tmp_path / "flat.txt"], tmp_path / "scratch", programs=True)


def test_without_a_device_a_program_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "flat.pt2").write_bytes(b"code")
    with live.running(tmp_path, allow_programs=True) as server:
        said = server.server.service.why_not_ready()
    assert ".pt2 files, of the kind torch-program, run on cuda only: serve with --device cuda:0, or export" in said


def test_a_kind_of_another_package_says_what_it_needs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "nowhere", suffix=".other")
    backend = make_backend("onnxruntime", WorkerLimits())
    with pytest.raises(
        ModelError, match=r"\.other files, of the kind other, run on cuda only: serve with --device cuda:0"
    ):
        check_device(tmp_path / "net.other", backend)
    check_device(tmp_path / "net.onnx", backend)

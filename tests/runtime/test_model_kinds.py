"""Kinds of model files: how a file is known, and a kind that another package brings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.kinds import register
from weft.base.errors import ModelError, NotLearned
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda.device import HostDevice
from weft.runtime.cuda.model import ModelOnHost
from weft.runtime.cuda.onnx_files import OnnxFile
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.metadata import kind_of, suffixes


def written(path: Path, **metadata: str) -> Path:
    """A network of one node, with metadata."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "one", [ports[0]], [ports[1]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, {name.replace("_", "."): value for name, value in metadata.items()})
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [({}, "onnx"), ({"weft_exits": "y"}, "onnx"), ({"weft_stitched": "{}"}, "stitched"),
     ({"weft_stitched": "{}", "weft_body": ""}, "body")],
)  # fmt: skip
def test_an_onnx_file_is_known_by_its_metadata(metadata: dict[str, str], kind: str, tmp_path: Path) -> None:
    assert kind_of(written(tmp_path / "net.onnx", **metadata), "cuda").name == kind


def test_a_program_is_known_by_its_ending_and_all_else_is_taken_for_onnx(tmp_path: Path) -> None:
    for name, kind in (("net.pt2", "torch-program"), ("net.bin", "onnx"), ("absent.onnx", "onnx")):
        if "absent" not in name:
            (tmp_path / name).write_bytes(b"\xff" * 100)
        assert kind_of(tmp_path / name, "cuda").name == kind
    assert suffixes() == (".onnx", ".pt2")


def test_a_kind_is_chosen_for_the_devices_that_it_names(tmp_path: Path) -> None:
    assert kind_of(tmp_path / "net.pt2", "cpu").name == "onnx", "which will refuse it"


class OtherFile(OnnxFile):
    """A kind of another package: ONNX files that end otherwise."""


def refuse(*given: Any) -> None:
    raise AssertionError("opened without the files that it takes over")


def test_a_kind_of_another_package_is_opened_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, f"{__name__}:OtherFile", suffix=".other")
    calls: list[Path] = []
    monkeypatch.setattr(OtherFile, "built", lambda file: calls.append(file.path) or OnnxFile.built(file))
    model = prepare_on(HostDevice(), written(tmp_path / "net.other"), LoadOptions(max_batch=1))
    assert not isinstance(model, ModelOnHost) and calls == [tmp_path / "net.other"] and ".other" in suffixes()


@pytest.mark.parametrize("devices", [["cuda"], ["cpu", "cuda"]])
def test_what_a_kind_lacks_is_one_line_or_the_cpu(
    devices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "absent_package.file:File", metadata="other", devices=devices)
    path, lacking = written(tmp_path / "net.onnx", other=""), "other needs absent_package, which is not installed"
    if "cpu" in devices:
        assert any(lacking in remark for remark in prepare_on(HostDevice(), path, LoadOptions()).remarks)
        return
    with pytest.raises(ModelError, match=lacking + r"; pip install 'other\[gpu\]'") as error:
        prepare_on(HostDevice(), path, LoadOptions())
    assert "\n" not in str(error.value)


def test_only_kinds_that_take_over_are_asked_before_they_are_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, f"{__name__}:refuse", suffix=".other")
    with pytest.raises(NotLearned):
        prepare_on(HostDevice(), written(tmp_path / "net.other"), LoadOptions(), learn=False)


def test_what_the_versions_of_packages_change_is_prepared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, f"{__name__}:OtherFile", suffix=".other", packages=["numpy"])
    path, cache = written(tmp_path / "net.other"), tmp_path / "cache"
    prepare_on(HostDevice(), path, LoadOptions(max_batch=1), cache)
    prepare_on(HostDevice(), path, LoadOptions(max_batch=1), cache, learn=False)
    monkeypatch.setattr("weft.runtime.cuda.preparing.version", lambda package: "another")
    with pytest.raises(NotLearned):
        prepare_on(HostDevice(), path, LoadOptions(max_batch=1), cache, learn=False)


def test_no_tool_is_imported_to_say_which_kind_a_file_is_of(tmp_path: Path) -> None:
    path = written(tmp_path / "net.onnx", weft_body="")
    code = (
        "import sys; from pathlib import Path; from weft.runtime.metadata import kind_of\n"
        f"assert kind_of(Path({str(path)!r}), 'cuda').name == 'body'\n"
        "assert not [name for name in sys.modules if name.startswith('weft_') or name == 'torch']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

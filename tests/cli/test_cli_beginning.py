"""The first minutes with weft: its help, what is typed in the wrong place, and names that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import refused, run
from weft.base.registry import registered
from weft.models.packaged import packaged_models
from weft.serving.repository import Repository

README = Path(__file__).parents[2] / "README.md"


def test_help_tells_the_story_of_the_readme(capsys):
    _, shown, _ = run(capsys, "--help")
    told = " ".join(shown.split())
    assert "on one machine" in told and told.index("weft plan -o plan/") < told.index("weft serve plan/")
    assert list(registered("commands"))[:3] == ["plan", "serve", "bench"]
    assert "one machine, well" in README.read_text("utf-8")


@pytest.mark.parametrize("model", ["model.onnx", "resnet50"])
def test_a_model_in_the_place_of_a_workload_is_shown_as_a_stream(capsys, model):
    for command in ("plan", "bench"):
        said = refused(capsys, command, model)
        assert f"{model} is a model, and a workload file (TOML) is wanted here" in said
        assert f"-s {model}:rate=10,deadline=100" in said


def test_a_model_in_the_place_of_a_workload_file_is_told(capsys):
    assert "is a model, and a workload (TOML) is wanted" in refused(capsys, "sustain", "model.onnx")


def test_simulate_takes_a_workload_as_the_others_do(capsys, tmp_path):
    path = tmp_path / "load.toml"
    path.write_text('duration_s = 1.0\n[[stream]]\nmodel = "resnet18"\nrate = 5\ndeadline_ms = 100\nmax_batch = 1\n')
    # a policy without a compiled loop, which would take longest of all
    rest = ("-d", "tpuv3-like", "-p", "fluid")
    named, stated = (run(capsys, "simulate", *way, *rest) for way in ((str(path),), ("-w", str(path))))
    assert named == stated and named[0] == 0
    assert "give one of them" in refused(capsys, "simulate", str(path), "-w", str(path))
    assert "does not apply to --bench" in refused(capsys, "simulate", str(path), "--bench", "b.json")


@pytest.mark.parametrize("name", ["light-squeezenet", "pp-ocr-cls"])
def test_models_of_packages_are_exported_as_they_are(capsys, tmp_path, name):
    if name not in packaged_models():
        pytest.skip(f"the package of {name} is not installed")
    code, _, error = run(capsys, "models", "export", name, "-o", str(tmp_path / "x.onnx"))
    assert code == 0, error
    assert (tmp_path / "x.onnx").read_bytes() == packaged_models()[name].read_bytes()
    assert "none are drawn" in refused(capsys, "models", "export", name, "-o", str(tmp_path / "x.onnx"), "--seed", "1")


def test_a_network_that_was_trained_here_is_served_by_its_name(tmp_path):
    assert Repository(["mnist-vit"], tmp_path).entry("mnist-vit").path.name == "mnist-vit.onnx"

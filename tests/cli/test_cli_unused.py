"""An option that was given and would come to nothing is refused in one line, with the way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from tests.cli.inputs import DEVICE, EXITS, PROFILE, WORKLOAD
from tests.serving import live
from tests.support.benchmarks import benchmark_report
from tests.support.commands import refused, run
from weft.cli.app import app
from weft.cli.simulate import FORM_NAMES, OPTIONS, CommandForms

SIMULATE = next(
    command
    for name, command in typer.main.get_command(app).commands.items()
    if name == "simulate"  # type: ignore[attr-defined]
)
PARAMETERS = {each.name: each for each in SIMULATE.params if each.opts[0].startswith("-") and each.name != "help"}
VALUES = {
    "device": "weaver-plus", "lanes": "2", "policy": "fifo", "workload": "w.toml", "bench": "bench.json",
    "late": "keep", "models": "resnet50", "profile": "p.json", "batch": "1", "seq_len": "16", "tables": "stream",
    "queries": "1", "cost": "roofline", "mix": "1:1", "max_lag": "0.5", "spill": None, "pieces": "4",
    "shape": "resnet50:image=1x3x224x224",
    "option": "a=1", "json_file": "out.json", "trace": "t.json", "html": "t.html", "perfetto": "t.json",
    "figure": "t.svg",
}  # fmt: skip
"""A value for every option of weft simulate that would do in a way that takes it."""
BEGINNINGS = {
    "models": ("--models", "resnet50"),
    "profiles": ("--profile", "p.json"),
    "workload": ("--workload", "w.toml"),
    "bench": ("--bench", "bench.json"),
}
REFUSED = [(way, name) for name, ways in OPTIONS.items() for way in CommandForms._fields if getattr(ways, way)]


def written(name: str) -> str:
    return max(PARAMETERS[name].opts, key=len)


def test_every_option_of_simulate_has_a_row_in_the_table_of_what_each_way_makes_of_it() -> None:
    assert set(OPTIONS) == set(PARAMETERS) == set(VALUES)


@pytest.mark.parametrize(("way", "name"), REFUSED)
def test_an_option_that_a_way_of_simulating_cannot_use_is_refused(
    capsys: pytest.CaptureFixture[str], way: str, name: str
) -> None:
    value = VALUES[name]
    said = refused(capsys, "simulate", *BEGINNINGS[way], written(name), *([value] if value else []))
    assert (
        said == f"weft: {written(name)} does not apply to {getattr(FORM_NAMES, way)}: {getattr(OPTIONS[name], way)}\n"
    )


def test_a_default_is_nobodys_wish(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(benchmark_report()))
    assert run(capsys, "simulate", "--bench", str(path))[0] == 0


def test_a_prediction_takes_options_of_the_policy_and_says_what_ran_under_which(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, out = tmp_path / "bench.json", tmp_path / "out.json"
    path.write_text(json.dumps(benchmark_report()))
    arguments = ("simulate", "--bench", str(path), "--policy", "priority", "--option", "patience=5", "--json", str(out))
    code, shown, _ = run(capsys, *arguments)
    assert code == 0
    assert shown.splitlines()[0].strip() == "measured and simulated on 1 lane"
    rows = [line.split("under ")[1].split("  ")[0] for line in shown.splitlines() if " under " in line]
    assert rows == ["punctual", "priority patience=5"] * 2
    found = json.loads(out.read_text())
    assert (found["measured_policy"], found["measured_options"]) == ("punctual", {})
    assert (found["policy"], found["policy_options"]) == ("priority", {"patience": 5})


def test_an_option_that_the_policy_of_a_prediction_does_not_have_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(benchmark_report()))
    assert "depth" in refused(capsys, "simulate", "--bench", str(path), "--option", "depth=3")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    (tmp_path / "chip.toml").write_text(DEVICE.format(bandwidth="10.0", extra=""))
    (tmp_path / "tiled.toml").write_text(EXITS.partition("exits =")[0].rpartition("[[stream]]")[0])
    profiled = WORKLOAD.replace("deadline_ms", 'profiles = ["p.json"]\nmax_batch = 1\ndeadline_ms')
    (tmp_path / "profiled.toml").write_text(profiled)
    for name in "ab":
        live.mlp(tmp_path / f"{name}.onnx")
    return tmp_path


STITCH = ("stitch", "a.onnx", "b.onnx", "-o", "ab.onnx")
MNIST = ("models", "export", "mnist-vit", "-o", "m.onnx")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("simulate", "-w", "tiled.toml", "--cost", "roofline"), "--cost does not apply to zc706-resnet50"),
        (("simulate", "-w", "profiled.toml", "--cost", "roofline"), "--cost does not apply to profiles"),
        (
            ("simulate", "-m", "resnet50", "--seq-len", "16"),
            "--seq-len does not apply to resnet50: it is for bert-base",
        ),
        (("simulate", "-m", "resnet50,bert-base", "--tables", "stream"), "--tables does not apply to resnet50, bert"),
        (("compare", "--profile", "p.json", "--batch", "2"), "--batch does not apply to profiles without --models"),
        (("compare", "-m", "vgg16", "--tables", "gather"), "--tables does not apply to vgg16: it is for ncf"),
        (("compare", "-m", "vgg16", "-p", "fifo", "--sweep"), "--sweep does not apply to --policies fifo"),
        (("profile", "a.onnx", "--seq-len", "32"), "--seq-len does not apply to a.onnx"),
        (("models", "show", "vgg16", "--seq-len", "32"), "--seq-len does not apply to vgg16"),
        (("models", "show", "vgg16", "--exit-head", "conv"), "--exit-head does not apply to exits that are not placed"),
        ((*MNIST, "--seed", "1"), "--seed does not apply to mnist-vit"),
        ((*MNIST, "--seq-len", "1"), "--seq-len does not apply to mnist-vit"),
        (("bench", "-s", "a:rate=1,deadline=9", "--save-latencies"), "name the file with --json"),
        (("map", "--seed", "1", "dynamic", "x.toml"), "--seed: weft map dynamic takes none of the options before"),
        (("map", "-s", "xavier", "-m", "p.json", "--shape", "x=1x3"), "p.json: a profile is for one size of input"),
        ((*STITCH, "--form", "split", "--slack", "0"), "--slack 0.0 does not apply to --form split"),
        ((*STITCH, "--memory-cap", "1g", "--slack", "0.1"), "--slack 0.1 does not apply to --memory-cap"),
        ((*STITCH, "--machine", "h200", "--slabs"), "--slabs does not apply to --machine h200"),
        ((*STITCH, "--no-measure", "--no-check", "--threads", "2"), "--threads 2 does not apply to --no-measure"),
        (
            ("tune", "lenet", "--scale", "1/255"),
            "--scale 0.00392157 multiplies samples of files; name them, as --data",
        ),
    ],
)
def test_an_option_that_would_come_to_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, *arguments)
    assert not (folder / "ab.onnx").exists()


def test_an_option_for_some_of_the_models_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "simulate", "-m", "resnet18,bert-base", "--seq-len", "8", "-n", "2")[0] == 0

"""The command line: what it writes, and that bad input is one line and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.inputs import DEVICE, EXITS, PROFILE, WORKLOAD
from tests.models.onnx_graphs import node, proto, tensor
from tests.support.commands import refused, run
from weft.devices import load_npu
from weft.devices.costs.layer_costs import read_profile
from weft.reports.trace import read_trace


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(PROFILE))
    return path


def device_file(folder: Path, bandwidth: str = "10.0", extra: str = "") -> Path:
    path = folder / "chip.toml"
    path.write_text(DEVICE.format(bandwidth=bandwidth, extra=extra))
    return path


# What the commands write


def test_simulate_writes_the_promised_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    code, shown, _ = run(capsys, "simulate", "-m", "resnet50,bert-base", "-n", "10", "--json", str(out))
    report = json.loads(out.read_text())
    assert code == 0
    assert "of the bound" in shown
    promised = {
        "format", "stp", "bound_stp", "fraction_of_bound", "antt", "max_slowdown",
        "pe_utilisation", "dram_utilisation", "makespan_s", "streams",
    }  # fmt: skip
    assert promised <= report.keys()
    assert {"model", "queries", "standalone_s", "mean_latency_s", "slowdown"} <= report["streams"][0].keys()
    assert [stream["model"] for stream in report["streams"]] == ["resnet50", "bert-base"]


def test_a_profile_of_ones_own_chip_needs_no_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, profile_file: Path
) -> None:
    chip, out = device_file(tmp_path), tmp_path / "t.json"
    arguments = ("--device", str(chip), "--profile", str(profile_file), "--profile", str(profile_file), "-n", "5")
    code, _, _ = run(capsys, "simulate", *arguments, "--policy", "layerweaver", "--trace", str(out))
    assert code == 0
    trace = read_trace(out)
    assert trace.streams == ("mine", "mine")
    assert {
        "model",
        "query",
        "layer",
        "fetch_start_s",
        "fetch_end_s",
        "compute_start_s",
        "compute_end_s",
    } <= json.loads(out.read_text())["spans"][0].keys()


def test_every_export_is_written_and_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, profile_file: Path
) -> None:
    chip = device_file(tmp_path)
    files = {kind: tmp_path / f"x.{suffix}" for kind, suffix in
             (("trace", "json"), ("html", "html"), ("perfetto", "perfetto.json"), ("figure", "svg"))}  # fmt: skip
    flags = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    _, shown, _ = run(capsys, "simulate", "-d", str(chip), "--profile", str(profile_file), "-n", "3", *flags)
    for path in files.values():
        assert path.stat().st_size > 500
        assert path.name in shown.replace("\n", "")
    again = tmp_path / "again.png"
    code, _, _ = run(capsys, "timeline", str(files["trace"]), "--figure", str(again))
    assert code == 0
    assert again.stat().st_size > 500


def test_compare_shows_every_policy_with_something_to_say_beside_the_bound(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, profile_file: Path
) -> None:
    chip, out = device_file(tmp_path), tmp_path / "c.json"
    arguments = ("-d", str(chip), "--profile", str(profile_file), "--profile", str(profile_file), "-n", "4")
    code, shown, _ = run(capsys, "compare", *arguments, "--sweep", "--json", str(out))
    assert code == 0
    runs = json.loads(out.read_text())["runs"]
    assert [run["policy"] for run in runs] == [
        "fifo", "fair", "round-robin", "double-buffer", "aimt", "layerweaver", "weft",
    ]  # fmt: skip
    said = " ".join(shown.split())
    assert "serial, adaptive (as fifo: no stream ever waits for a batch)" in said
    assert "lazy-batching, fluid (the first stream runs for ever, and the others starve)" in said
    assert all(run["stp"] <= run["bound_stp"] * (1 + 1e-9) for run in runs)


def test_shapes_that_stay_unknown_are_told_on_standard_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nodes = [node("NonZero", ["x"], [f"y{place}"], name=f"find{place}") for place in range(5)]
    path, out = tmp_path / "found.onnx", tmp_path / "m.json"
    onnx.save(proto(nodes, [tensor("x", 4, 5)], [f"y{place}" for place in range(5)]), path)
    code, _, err = run(capsys, "models", "show", str(path), "--json", str(out))
    lines = err.splitlines()
    assert code == 0
    assert [line.partition(" (")[0] for line in lines[:3]] == [f"weft: found: find{place}" for place in range(3)]
    assert lines[3:] == ["weft: found: 2 more shapes are not known; weft models show --json lists them"]
    assert len(json.loads(out.read_text())["guesses"]) == 5


def test_compare_gives_every_policy_the_pieces_that_weft_chose(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chip, out, profile = device_file(tmp_path), tmp_path / "c.json", tmp_path / "large.json"
    # three quarters of the buffer each, so whole layers can hardly be fetched while another computes
    layers = [{"name": f"l{i}", "compute_s": 1.2e-3, "weight_bytes": 12_000_000} for i in range(4)]
    profile.write_text(json.dumps({**PROFILE, "layers": layers}))
    arguments = ("-d", str(chip), "--profile", str(profile), "--profile", str(profile), "-n", "6", "-p", "fifo,weft")
    page = tmp_path / "c.html"
    code, shown, _ = run(capsys, "compare", *arguments, "--json", str(out), "--html", str(page))
    assert code == 0
    assert '"policies":["fifo","weft"]' in page.read_text("utf-8") and "STP in 1/" in page.read_text("utf-8")
    raw = json.loads(out.read_text())
    (fifo, weft), alike = raw["runs"], raw["in_pieces"]
    assert fifo["pieces"] == 1 < weft["pieces"] == alike[0]["pieces"] == alike[1]["pieces"]
    assert f"in 1/{weft['pieces']}" in shown
    code, shown, _ = run(capsys, "compare", *arguments, "--pieces", "1", "--json", str(out))
    raw = json.loads(out.read_text())
    assert [each["pieces"] for each in raw["runs"]] == [1, 1] and raw["in_pieces"] == []


def test_models_show_writes_counts_and_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "m.json"
    code, _, _ = run(capsys, "models", "show", "resnet50", "--layers", "--json", str(out))
    model = json.loads(out.read_text())
    assert code == 0
    assert model["macs"] == 4_089_184_256
    assert model["weight_bytes"] == 4 * 25_502_912
    assert model["parameters"] > model["weights"] == 25_502_912
    assert sum(layer["macs"] for layer in model["layers"]) == model["macs"]


def test_an_exported_model_counts_like_its_description(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    assert run(capsys, "models", "export", "mobilenet-v2", "-o", str(path))[0] == 0
    counted = []
    for name in ("mobilenet-v2", str(path)):
        run(capsys, "models", "show", name, "--json", str(tmp_path / "c.json"))
        counted.append(json.loads((tmp_path / "c.json").read_text()))
    assert counted[0]["macs"] == counted[1]["macs"]
    assert counted[0]["parameters"] == counted[1]["parameters"]


def test_profile_writes_what_simulate_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    assert run(capsys, "profile", "resnet50", "-d", "nnpi-like", "--batch", "4", "-o", str(path))[0] == 0
    profile = read_profile(path)
    assert (profile.model, profile.device, profile.batch, len(profile.layers)) == ("resnet50", "nnpi-like", 4, 54)


def test_devices_show_prints_a_file_that_loads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, shown, _ = run(capsys, "devices", "show", "tpuv3-like")
    path = tmp_path / "copy.toml"
    path.write_text(shown)
    assert load_npu(str(path)) == load_npu("tpuv3-like")


def test_lists_name_everything_a_user_may_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert "bert-large" in run(capsys, "models", "list")[1]
    assert "weaver-plus" in run(capsys, "devices", "list")[1]


# What they refuse


def test_unknown_names_are_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "resnet50" in refused(capsys, "simulate", "-m", "resnet5")
    assert "tpuv3-like" in refused(capsys, "simulate", "-m", "resnet50", "-d", "tpuv3")
    assert "layerweaver" in refused(capsys, "simulate", "-m", "resnet50", "-p", "layerweever")
    assert "maestro" in refused(capsys, "simulate", "-m", "resnet50", "--cost", "maestr")
    assert "layerweaver" in refused(capsys, "reproduce", "layerweav")


@pytest.mark.parametrize(
    ("bandwidth", "extra", "said"),
    [
        ("0.0", "", "bandwidth_gb_s"),
        ("-5.0", "", "bandwidth_gb_s"),
        ("nan", "", "bandwidth_gb_s"),
        ("10.0", "bandwith = 3", "bandwith"),
        ("'fast'", "", "bandwidth_gb_s"),
        ("10.0", "array_rows = 3", "TOML"),
    ],
)
def test_a_device_that_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, profile_file: Path, bandwidth: str, extra: str, said: str
) -> None:
    chip = device_file(tmp_path, bandwidth, extra)
    assert said in refused(capsys, "simulate", "-d", str(chip), "--profile", str(profile_file))


@pytest.mark.parametrize(
    ("key", "value"),
    [("compute_s", "NaN"), ("compute_s", "-1"), ("weight_bytes", "0"), ("weight_bytes", "-4"), ("weight_bytes", "1e3")],
)
def test_a_profile_that_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, key: str, value: str
) -> None:
    text = json.dumps(PROFILE).replace(f'"{key}": {PROFILE["layers"][0][key]}', f'"{key}": {value}')  # type: ignore[index]
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert "bad.json" in refused(capsys, "simulate", "-d", str(device_file(tmp_path)), "--profile", str(path))


def test_broken_onnx_files_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cut.onnx"
    run(capsys, "models", "export", "mobilenet-v2", "-o", str(path))
    path.write_bytes(path.read_bytes()[:100_000])
    assert "cut.onnx" in refused(capsys, "models", "show", str(path))
    assert "none.onnx" in refused(capsys, "models", "show", str(tmp_path / "none.onnx"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-m", "resnet50", "--batch", "0"), "--batch 0 must"),
        (("-m", "resnet50", "-n", "0"), "--queries 0 must"),
        (("-m", "resnet50,bert-base", "--mix", "1:2:3"), "mix"),
        (("-m", "resnet50,bert-base", "--mix", "1:x"), "mix"),
        (("-m", "resnet50,bert-base", "--mix", "1:-1"), "mix"),
        (("-m", "resnet50", "--max-lag", "-1"), "--max-lag -1.0 must"),
        (("-m", "resnet50", "--option", "horizon=0"), "horizon"),
        (("-m", "resnet50", "--option", "depth=3"), "depth"),
        (("-m", "resnet50", "--option", "horizon=many"), "horizon"),
        (("-m", "resnet50", "--shape", "input"), "--shape"),
        (("-m", "resnet50", "--shape", "nowhere=1x3"), "nowhere"),
        (("-m", "bert-base", "--seq-len", "0"), "--seq-len must be at least 1"),
        (("-m", "ncf", "--tables", "fold"), "fold"),
        ((), "nothing to run"),
        (("-m", "resnet50", "-n", "3", "--figure", "x.pdf"), "x.pdf"),
        (("-m", "resnet50", "-n", "3", "--json", "no/such/folder/x.json"), "no/such/folder"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, "simulate", *arguments)


def test_models_that_do_not_fit_together_are_refused_or_spill(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("simulate", "-d", "nnpi-like", "-b", "16", "-n", "3", "-m", "resnet50,inception-v3")
    assert "activation" in refused(capsys, *pair)
    code, shown, _ = run(capsys, *pair, "--spill")
    assert code == 0
    assert "STP" in shown


def test_the_installed_command_exits_with_two_and_one_line() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "weft", "simulate", "-m", "resnet5"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    *progress, error = done.stderr.splitlines()
    assert error.startswith("weft: ")
    assert all(line.startswith("reading, ") for line in progress)  # on a slow machine


# Names that look like markup, and other oddities


def test_names_that_look_like_markup_are_shown_as_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, profile_file: Path
) -> None:
    odd = {**PROFILE, "model": "[/bold]x", "layers": [{**PROFILE["layers"][0], "name": "[red]conv"}]}  # type: ignore[index]
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(odd))
    chip = str(device_file(tmp_path))
    for command in ("simulate", "compare"):
        code, shown, _ = run(capsys, command, "-d", chip, "--profile", str(path), "-n", "3")
        assert code == 0
        assert "[/bold]x" in shown


def test_a_profile_made_for_another_device_is_pointed_out(
    capsys: pytest.CaptureFixture[str], profile_file: Path
) -> None:
    _, _, said = run(capsys, "simulate", "-d", "tpuv3-like", "--profile", str(profile_file), "-n", "3")
    assert "was made for my-chip" in said


def test_profile_takes_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown model" in refused(capsys, "profile", "resnet50,bert-base")


def test_a_lag_nobody_can_mean_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-lag 1e+30 must" in refused(capsys, "simulate", "-m", "resnet50", "--max-lag", "1e30")


def test_a_trace_whose_times_run_backwards_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    span = {
        "model": "m", "query": 0, "layer": "a", "fetch_start_s": 1, "fetch_end_s": 0,
        "compute_start_s": 2, "compute_end_s": 1e300, "stream": 0, "weight_bytes": 1,
    }  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"format": 1, "streams": ["m"], "spans": [span]}))
    assert "do not follow each other" in refused(capsys, "timeline", str(path), "--html", str(tmp_path / "x.html"))


def test_an_error_inside_a_progress_bar_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert "activation" in refused(capsys, "compare", "-d", "nnpi-like", "-b", "16", "-m", "resnet50,inception-v3")


def test_an_exported_table_model_is_streamed_like_its_description(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    weights = []
    for tables in ("stream", "gather"):
        path, out = tmp_path / f"{tables}.onnx", tmp_path / "c.json"
        assert run(capsys, "models", "export", "ncf", "--tables", tables, "-o", str(path))[0] == 0
        run(capsys, "models", "show", str(path), "--json", str(out))
        weights.append(json.loads(out.read_text())["weights"])
    assert weights == [138_493 * 192 + 26_744 * 192 + 106_624, 106_624]


# Workloads


@pytest.fixture
def workload_file(tmp_path: Path) -> Path:
    path = tmp_path / "w.toml"
    path.write_text(WORKLOAD)
    return path


def test_a_workload_is_simulated_and_every_export_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, workload_file: Path
) -> None:
    out, page, trace = tmp_path / "r.json", tmp_path / "x.html", tmp_path / "t.json"
    flags = ("--json", str(out), "--html", str(page), "--trace", str(trace))
    code, shown, _ = run(capsys, "simulate", "-w", str(workload_file), *flags)
    report = json.loads(out.read_text())
    assert code == 0
    assert "weft+ on weaver-plus" in shown
    assert sum(stream["arrived"] for stream in report["streams"]) > 500
    assert report["streams"][0]["p99_s"] <= 0.015
    assert len(report["streams"][0]["cdf_s"]) == 100
    assert read_trace(trace).streams == ("resnet50", "bert-base")
    assert page.stat().st_size > 10_000


def test_a_simulation_says_where_samples_leave_and_what_a_record_makes_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    confidence = [[0.9, 0.9], [0.75, 0.1], [0.7, 0.9], [0.2, 0.3], [0.8, 0.8], [0.1, 0.9], [0.1, 0.9], [0.1, 0.9]]
    correct = [[True, True], [False, True], [False, True], [True, False], *[[True, True]] * 4]
    np.savez(tmp_path / "r.npz", confidence=np.array(confidence), correct=np.array(correct))
    path = tmp_path / "w.toml"
    path.write_text(EXITS)
    code, shown, _ = run(capsys, "simulate", "-w", str(path), "-p", "fluid")
    assert code == 0
    assert [line for line in shown.splitlines() if "leave" in line] == [
        "resnet50: 5.1% / 16.9% / 9.0% / 69.0% leave by its exits, the end last",
        "mobilenet-v2: 37.5% / 62.5% leave by its exits, the end last; 75.00% answered correctly "
        "at a threshold of 0.75",
    ]


def test_sustain_gives_a_table_and_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, workload_file: Path
) -> None:
    out, picture = tmp_path / "s.json", tmp_path / "s.png"
    flags = ("-p", "fifo,weft+", "--ratios", "4:1,1:1", "-j", "1", "--seeds", "1", "--tolerance", "0.1")
    code, shown, _ = run(capsys, "sustain", str(workload_file), *flags, "--json", str(out), "--figure", str(picture))
    answers = json.loads(out.read_text())["answers"]
    assert code == 0
    assert [answer["policy"] for answer in answers] == ["fifo", "weft+"] * 2
    assert all(answer["violation_rate"] <= 0.01 and answer["rate"] < answer["unsustained_rate"] for answer in answers)
    assert "4:1" in shown
    assert picture.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("simulate", "-w", "W", "-p", "weft"), "weft+"),
        (("simulate", "-w", "W", "--late", "dropp"), "drop"),
        (("simulate", "-w", "none.toml"), "none.toml"),
        (("sustain", "W", "--ratios", "a:b"), "--ratios"),
        (("sustain", "W", "--ratios", "1:2:3"), "ratio"),
        (("sustain", "W", "-p", "fifo,edff"), "edf"),
        (("sustain", "W", "--limit", "2"), "limit"),
    ],
)
def test_questions_about_workloads_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], workload_file: Path, arguments: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, *(str(workload_file) if part == "W" else part for part in arguments))


def test_a_deadline_no_load_can_keep_is_said_to_be_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text(WORKLOAD.replace("deadline_ms = 15.0", "deadline_ms = 0.1"))
    assert "no load is sustained" in refused(capsys, "sustain", str(path), "-p", "fifo", "--seeds", "1")

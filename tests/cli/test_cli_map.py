"""``weft map``: what it prints and writes, that its documentation is true, and how it refuses."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.support.commands import CommandResult, run
from weft.models.zoo import load
from weft.reports.trace import read_trace
from weft_map import Schedule, map_models, simulate
from weft_map.profiles import read_soc_profile
from weft_map.scenario import Scenario, parse_scenario, prepare, read_scenario

PAIR = "--soc", "xavier", "--models", "vgg19,resnet152"


@pytest.fixture
def weft(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., CommandResult]:
    """Runs a command in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return partial(run, capsys)


@pytest.fixture
def mapped(weft: Callable[..., CommandResult], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What ``weft map`` writes as JSON."""

    def run(*arguments: str) -> dict[str, Any]:
        answer = weft("map", *arguments, "--json", "mapping.json")
        assert answer.code == 0, answer.error
        written: dict[str, Any] = json.loads((tmp_path / "mapping.json").read_text())
        return written

    return run


def group(name: str, **costs: Any) -> dict[str, Any]:
    return {"name": name, "costs": costs}


def cost(time_s: float, **others: float) -> dict[str, float]:
    return {"time_s": time_s, "demand_gb_s": 30.0, **others}


def write_profile(path: Path, *groups: dict[str, Any], soc: str = "xavier-agx") -> None:
    profile = {"format": 1, "kind": "soc-profile", "model": path.stem, "soc": soc, "origin": "measured"}
    path.write_text(json.dumps(profile | {"groups": list(groups)}))


def schedule_of(case: Any, told: dict[str, Any]) -> Schedule:
    """A schedule read back from JSON."""
    names, units = [task.name for task in case.problem.tasks], case.problem.units
    return Schedule(
        tuple(tuple(units.index(unit) for unit in row) for row in told["units"]),
        tuple(map(tuple, told["starts_s"])) if told["starts_s"] else None,
        tuple(names.index(name) for name in told["order"]) if told["order"] else None,
    )


# What it prints and writes


@pytest.mark.parametrize(
    ("page", "heading"),
    [pytest.param("docs/mapping.md", "# Mapping models", marks=pytest.mark.long), ("docs/tutorial.md", "## Map\n")],
)
def test_the_example_of_the_page_is_true(weft: Callable[..., CommandResult], page: str, heading: str) -> None:
    text = (ROOT / page).read_text().partition(heading)[2]
    command, *shown = re.split(r"^```\w*$", text, flags=re.M)[1].strip().splitlines()
    answer = weft(*command.removeprefix("$ weft ").split())
    assert answer.code == 0, answer.error
    printed = [line.rstrip() for line in answer.out.splitlines()]
    for line in shown:
        if "proved (" in line:  # how long it took differs, and by rounding of the compiler the states
            assert any(other.startswith(line.partition("(")[0]) for other in printed), line
        elif line != "...":
            assert line.rstrip() in printed


def test_every_form_is_written(weft: Callable[..., CommandResult], tmp_path: Path) -> None:
    files = {
        "json": "m.json", "timeline": "m.html", "figure": "m.png", "perfetto": "p.json", "trace": "t.json",
        "devices": "d.csv",
    }  # fmt: skip
    options = ["--json", "--html", "--figure", "--perfetto", "--trace", "--devices"]
    answer = weft("map", *PAIR, *(part for pair in zip(options, files.values(), strict=True) for part in pair))
    assert answer.code == 0, answer.error
    for what, name in files.items():
        assert re.search(rf"^{what} +{name}$", answer.out, re.M)
    mapping = json.loads((tmp_path / "m.json").read_text())
    makespan_s = mapping["schedule"]["makespan_s"]
    trace = read_trace(tmp_path / "t.json")
    assert max(trace.compute_end_s) == pytest.approx(makespan_s)
    assert "vgg19" in (tmp_path / "m.html").read_text()
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "p.json").read_text())["otherData"]["soc"] == "xavier-agx"
    with (tmp_path / "d.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["unit"] for row in rows} == {"gpu", "dla"}
    assert [row["layer"] for row in rows if row["task"] == "vgg19"] == [str(n) for n in range(42)]


def test_progress_tells_compiling_from_searching(
    weft: Callable[..., CommandResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []

    @contextmanager
    def told(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
        stages.append(what)
        yield lambda *progress, **more: None

    monkeypatch.setattr("weft_map.cli.map_show.progress_bar", told)
    assert weft("map", *PAIR).code == 0
    assert stages == ["loading kernels (the first use compiles them)", "searching"]


def test_a_schedule_of_the_json_comes_to_what_it_says(mapped: Callable[..., dict[str, Any]]) -> None:
    told = mapped(*PAIR)
    case = prepare(parse_scenario({"soc": "xavier", "task": [{"model": "vgg19"}, {"model": "resnet152"}]}, "test"))
    for each in (told["schedule"], *told["baselines"].values()):
        outcome = simulate(case.problem, schedule_of(case, each))
        assert list(outcome.finish_s) == pytest.approx(each["finish_s"], rel=1e-6)
        assert outcome.throughput == pytest.approx(each["throughput"], rel=1e-6)
    best = min(told["baselines"], key=lambda name: told["baselines"][name]["makespan_s"])
    assert told["best_baseline"] == best
    assert told["gain"] == 1 - told["schedule"]["makespan_s"] / told["baselines"][best]["makespan_s"] > 0
    assert told["certificate"]["value"] == pytest.approx(told["schedule"]["makespan_s"])
    assert [task["origin"] for task in told["tasks"]] == ["derived", "derived"]


def test_segments_tell_the_units(mapped: Callable[..., dict[str, Any]]) -> None:
    told = mapped(*PAIR)["schedule"]
    spread = {"vgg19": [""] * 10, "resnet152": [""] * 13}
    for each in told["segments"]:
        spread[each["task"]][each["first"] : each["last"] + 1] = [each["unit"]] * (each["last"] + 1 - each["first"])
    assert list(spread.values()) == told["units"]


def test_optimal_is_only_said_with_a_proof(weft: Callable[..., CommandResult], tmp_path: Path) -> None:
    many = "--soc", "xavier", "--models", "vgg19,resnet152,inception-v4,resnet101"
    answer = weft("map", *many, "--time-limit", "1e-6", "--json", "m.json")
    assert answer.code == 0, answer.error
    certificate = json.loads((tmp_path / "m.json").read_text())["certificate"]
    assert not certificate["proved"] and certificate["ended"] == "time limit" and certificate["gap"] > 0
    assert "not proved optimal" in answer.out and "optimal among" not in answer.out
    better = 1 - certificate["bound"] / certificate["value"]
    assert f"at most {better:.1%} better" in answer.out and "time limit after" in answer.out


def test_a_model_may_come_twice_wait_and_repeat(mapped: Callable[..., dict[str, Any]]) -> None:
    told = mapped(
        "--soc", "orin", "--models", "resnet18,resnet18,googlenet",
        "--after", "resnet18-2=resnet18", "--repeat", "googlenet=2",
    )  # fmt: skip
    assert [(task["name"], task["model"], task["after"], task["repeats"]) for task in told["tasks"]] == [
        ("resnet18", "resnet18", [], 1),
        ("resnet18-2", "resnet18", ["resnet18"], 1),
        ("googlenet", "googlenet", [], 2),
    ]
    groups = [len(task["groups"]) * task["repeats"] for task in told["tasks"]]
    assert [len(row) for row in told["schedule"]["units"]] == groups
    finish_s = told["schedule"]["finish_s"]
    assert finish_s[1] > finish_s[0]
    assert {each["run"] for each in told["schedule"]["segments"] if each["task"] == "googlenet"} == {0, 1}


def test_the_objective_is_what_counts(mapped: Callable[..., dict[str, Any]]) -> None:
    soon = mapped(*PAIR)["schedule"]
    many = mapped(*PAIR, "--objective", "throughput")["schedule"]
    assert soon["makespan_s"] < many["makespan_s"] and soon["throughput"] < many["throughput"]


def test_limits_are_kept_and_baselines_that_break_them_are_marked(
    weft: Callable[..., CommandResult], tmp_path: Path
) -> None:
    answer = weft("map", *PAIR, "--max-switches", "0", "--json", "m.json")
    told = json.loads((tmp_path / "m.json").read_text())
    assert all(len(set(row)) == 1 for row in told["schedule"]["units"])
    broken = [name for name, each in told["baselines"].items() if not each["keeps_limits"]]
    assert "heft" in broken and told["best_baseline"] not in broken
    for name in told["baselines"]:
        assert (f"{name} (breaks the limits)" in answer.out) == (name in broken)


def test_an_energy_budget_is_kept(mapped: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    quick_or_frugal = {"gpu": cost(1e-3, energy_j=0.03), "dla": cost(2e-3, energy_j=0.01)}
    write_profile(tmp_path / "a.json", *(group(f"g{n}", **quick_or_frugal) for n in range(3)))
    told = mapped("--soc", "xavier", "--models", "a.json", "--energy-budget", "0.071")
    assert sorted(told["schedule"]["units"][0]) == ["dla", "gpu", "gpu"]
    assert told["schedule"]["energy_j"] == pytest.approx(0.07)


def test_estimates_are_made_of_any_zoo_model_and_said_to_be_such(
    weft: Callable[..., CommandResult], tmp_path: Path
) -> None:
    answer = weft("map", "--soc", "orin", "--models", "mobilenet-v2", "--max-groups", "5", "--json", "m.json")
    told = json.loads((tmp_path / "m.json").read_text())
    assert told["tasks"][0]["origin"] == "estimated" and len(told["tasks"][0]["groups"]) == 5
    assert "nothing was measured" in answer.out


# Scenarios


def test_a_scenario_says_the_same_as_options(mapped: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        'soc = "xavier"\nmax_switches = 1\n[[task]]\nmodel = "vgg19"\n[[task]]\nmodel = "resnet152"\n'
    )
    by_file, by_options = mapped("s.toml"), mapped(*PAIR, "--max-switches", "1")
    assert by_file["schedule"] == by_options["schedule"] and by_file["tasks"] == by_options["tasks"]
    assert mapped("--scenario", "s.toml")["schedule"] == by_file["schedule"]
    assert mapped("s.toml", "--max-switches", "0")["max_switches"] == 0


def test_a_scenario_finds_its_files_beside_itself(mapped: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    write_profile(tmp_path / "inner/mine.json", group("g", gpu=cost(1e-3)))
    (tmp_path / "inner/s.toml").write_text('soc = "xavier"\n[[task]]\nmodel = "mine.json"\n')
    assert mapped("inner/s.toml")["tasks"][0]["name"] == "mine"


def test_one_phase_of_the_example_is_mapped(mapped: Callable[..., dict[str, Any]]) -> None:
    example = str(ROOT / "examples/soc-scenario.toml")
    told = mapped(example, "--phase", "2")
    assert [task["name"] for task in told["tasks"]] == list(read_scenario(example).phase[1].tasks)


def test_phases_run_in_real_time(weft: Callable[..., CommandResult], tmp_path: Path) -> None:
    answer = weft(
        "map", "dynamic", str(ROOT / "examples/soc-scenario.toml"), "--duration", "0.3", "--json", "d.json",
        "--figure", "d.png",
    )  # fmt: skip
    assert answer.code == 0, answer.error
    log = json.loads((tmp_path / "d.json").read_text())
    assert [len(phase["tasks"]) for phase in log["phases"]] == [2, 3, 2]
    for phase in log["phases"]:
        oracle = phase["oracle_value"] * (1 - 2e-4)  # ties
        assert phase["oracle_proved"] and oracle <= phase["last_value"] <= phase["first_value"]
    frames = log["frames"]
    assert all(later >= sooner + took for sooner, later, took in _neighbours(frames["start_s"], frames["latency_s"]))
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")
    assert "vgg19 + resnet152" in answer.out


def _neighbours(starts_s: list[float], lengths_s: list[float]) -> Iterator[tuple[float, float, float]]:
    return zip(starts_s, starts_s[1:], (length_s - 1e-9 for length_s in lengths_s), strict=False)


# Device lists


def test_a_device_list_names_every_layer_once_a_run(weft: Callable[..., CommandResult], tmp_path: Path) -> None:
    models = "--soc", "xavier", "--models", "resnet18", "--profiles", "estimated", "--repeat", "resnet18=2"
    assert weft("map", *models, "--devices", "d.json").code == 0
    told = json.loads((tmp_path / "d.json").read_text())
    layers = [(row["run"], row["layer"]) for row in told["layers"]]
    assert len(set(layers)) == len(layers) == 2 * len({layer for _, layer in layers})
    assert told["soc"] == "xavier-agx" and {row["instance"] for row in told["layers"]} == {0}


def test_a_device_list_for_trtexec_is_read_by_its_rules(weft: Callable[..., CommandResult], tmp_path: Path) -> None:
    both = "--soc", "xavier", "--models", "resnet18,resnet18", "--profiles", "estimated"
    assert weft("map", *both, "--devices", "d.txt", "--json", "m.json").code == 0
    told = json.loads((tmp_path / "m.json").read_text())
    lines = (tmp_path / "d.txt").read_text().splitlines()
    assert lines[0] == "# add --fp16, or the precision that the profile was measured with"
    assert lines[1::2] == ["# resnet18", "# resnet18-2"]
    nodes = {node for layer in load("resnet18").layers for node in layer.nodes}
    for task, line in enumerate(lines[2::2]):
        pairs = dict(pair.rsplit(":", 1) for pair in shlex.split(line)[-1].split("=")[1].split(","))
        units = told["schedule"]["units"][task]
        assert pairs.pop("*") == ("GPU" if "gpu" in units else "DLA")
        assert pairs.keys() == nodes and len(nodes) == 69  # 21 convolutions or products, the rest follows them
        assert set(pairs.values()) == {unit.upper() for unit in units}
        assert pairs["conv1"] == pairs["conv1.bn"] == pairs["conv1.relu"] == units[0].upper()
        assert pairs["fc"] == units[-1].upper()
        assert line.startswith("--useDLACore=0 --allowGPUFallback ") == ("dla" in units)


def trtexec_file(path: Path, **times_ms: float) -> None:
    rows = [{"name": name.replace("_", " + "), "averageMs": time} for name, time in times_ms.items()]
    path.write_text(json.dumps([{"count": 10}, *rows]))


def test_a_profile_of_trtexec_goes_in_and_a_placement_comes_out(
    weft: Callable[..., CommandResult], tmp_path: Path
) -> None:
    trtexec_file(tmp_path / "gpu.json", conv1_relu1=1.0, conv2=2.0, fc=0.5)
    trtexec_file(tmp_path / "dla.json", conv1_relu1=1.5, conv2=2.2)
    demands = {"gpu": {"conv1": 60, "conv2": 50, "fc": 70}, "dla": {"conv1": 25, "conv2": 20}}
    (tmp_path / "demands.json").write_text(json.dumps(demands))
    answer = weft(
        "map", "import-trt", "--unit", "gpu=gpu.json", "--unit", "dla=dla.json", "--model", "net",
        "--demands", "demands.json", "-o", "net.json",
    )  # fmt: skip
    assert answer.code == 0, answer.error
    assert "3 groups; gpu 3.500 ms, dla in part" in answer.out
    profile = read_soc_profile(tmp_path / "net.json")
    assert profile.origin == "measured" and profile.groups[1].costs["dla"].demand_gb_s == 20
    assert weft("map", "--soc", "xavier", "--models", "net.json,net.json", "--devices", "d.txt").code == 0
    text = (tmp_path / "d.txt").read_text()
    assert text.count("conv1:") == text.count("relu1:") == text.count("fc:GPU") == 2


# Refusals


def test_what_trtexec_cannot_read_is_refused_before_the_search(
    weft: Callable[..., CommandResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_map.solver.solve", lambda *_: pytest.fail("it searches"))
    answer = weft("map", *PAIR, "--devices", "m.txt")
    assert answer.code == 2 and answer.error.count("\n") == 1
    for word in ("does not name the layers of group", "--profiles estimated", ".onnx", ".json or .csv"):
        assert word in answer.error


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--soc", "xavir", "--models", "googlenet"], "unknown SoC 'xavir'; did you mean xavier-agx?"),
        (["--soc", "tpuv3-like", "--models", "googlenet"], "an NPU, and models are mapped to a SoC"),
        (["--soc", "xavier", "--models", "googlenett"], "unknown model 'googlenett'; did you mean googlenet"),
        (["--soc", "xavier", "--models", "googlenet", "--objective", "speed"], "'latency' or 'throughput'"),
        (["--soc", "xavier", "--models", "googlenet", "--profiles", "guessed"], "'measured', 'derived' or 'estimated'"),
        (["--soc", "xavier", "--models", "bert-base", "--profiles", "measured"], "no measured profile of bert-base"),
        (["--soc", "xavier", "--models", ","], "--models names nothing"),
        (["--models", "googlenet"], "name a SoC and models"),
        (["--soc", "xavier"], "name a SoC and models"),
        (
            [*PAIR, "--after", "vgg19=resnet152", "--after", "resnet152=vgg19"],
            "resnet152 waits for vgg19 waits for resnet152: a circle",
        ),
        ([*PAIR, "--after", "vgg19=vgg19"], "vgg19 waits for vgg19: a circle"),
        ([*PAIR, "--after", "vgg19=resnet15"], "--after: unknown task 'resnet15'; did you mean resnet152"),
        ([*PAIR, "--after", "vgg19"], "--after 'vgg19' is not of the form B=A"),
        ([*PAIR, "--repeat", "vgg19=0"], "--repeat vgg19=0: give a whole number from 1"),
        ([*PAIR, "--repeat", "vgg19=x"], "--repeat vgg19=x: give a whole number from 1"),
        ([*PAIR, "--repeat", "vgg19=99999"], "repeats = 99999"),
        ([*PAIR, "--max-switches", "-1"], "--max-switches -1"),
        ([*PAIR, "--time-limit", "0"], "--time-limit 0.0"),
        ([*PAIR, "--max-groups", "0"], "--max-groups 0"),
        ([*PAIR, "--energy-budget", "1"], "an energy budget needs energy_j"),
        (["--soc", "xavier", "--models", "no.onnx"], "no.onnx does not exist"),
        (["--soc", "xavier", "--models", "no.json"], "no.json: cannot read"),
        (["--soc", "no.toml", "--models", "googlenet"], "no.toml: cannot read"),
        (["no.toml"], "no.toml: cannot read the scenario"),
        (["--json", "x.json", "no.toml"], "write no.toml before the options, or after --scenario"),
        ([*PAIR, "--figure", "m.gif"], "--figure m.gif: its name ends in .png or .svg"),
        ([*PAIR, "--devices", "m.xml"], "--devices m.xml: its name ends in .json, .csv or .txt"),
        ([*PAIR, "--devices", "no/such/folder.csv"], "cannot write"),
        ([*PAIR, "--html", "no/such/page.html"], "no/such/page.html: cannot write: there is no folder no/such"),
        (["--soc", "snapdragon", "--models", "vgg16", "--devices", "m.txt"], "may run on dsp, and trtexec knows only"),
        ([str(ROOT / "examples/soc-scenario.toml")], "has 3 phases; say which with --phase"),
        ([str(ROOT / "examples/soc-scenario.toml"), "--phase", "4"], "--phase 4: the scenario has 3 phases"),
        ([str(ROOT / "examples/soc-scenario.toml"), "--models", "vgg19"], "do not go together"),
        ([str(ROOT / "examples/soc-scenario.toml"), "--repeat", "vgg19=2"], "go with --models"),
        (["--soc", "xavier", "calibrate"], "weft map calibrate takes none of the options before its name"),
        (["dynamic", "no.toml"], "no.toml: cannot read the scenario"),
        (["dynamic", str(ROOT / "examples/soc-scenario.toml"), "--duration", "0"], "--duration 0.0"),
        (["import-trt", "--unit", "gpu", "--model", "m", "-o", "m.json"], "--unit 'gpu' is not of the form"),
        (["import-trt", "--unit", "npu=x.json", "--model", "m", "-o", "m.json"], "unknown unit 'npu'"),
    ],
)
def test_a_bad_request_is_one_line(weft: Callable[..., CommandResult], arguments: list[str], complaint: str) -> None:
    answer = weft("map", *arguments)
    assert answer.code == 2
    assert answer.error.startswith("weft: ") and answer.error.count("\n") == 1
    assert complaint in answer.error


def test_limits_that_no_schedule_keeps_say_by_how_much(weft: Callable[..., CommandResult], tmp_path: Path) -> None:
    write_profile(
        tmp_path / "a.json",
        group("g0", gpu=cost(1e-3, energy_j=0.5)),
        group("g1", dla=cost(1e-3, energy_j=0.25)),
        group("g2", gpu=cost(1e-3, energy_j=0.5)),
    )
    switches = weft("map", "--soc", "xavier", "--models", "a.json", "--max-switches", "1")
    assert switches.code == 2 and switches.error.count("\n") == 1
    assert "a needs at least 2 switches" in switches.error and "--max-switches is 1, 1 too few" in switches.error
    budget = weft("map", "--soc", "xavier", "--models", "a.json", "--energy-budget", "1")
    assert budget.code == 2
    assert "at least 1.25 J and the budget is 1 J, 0.25 J too few" in budget.error


def test_a_profile_for_another_soc_is_refused(weft: Callable[..., CommandResult], tmp_path: Path) -> None:
    write_profile(tmp_path / "a.json", group("g", gpu=cost(1e-3)))
    answer = weft("map", "--soc", "orin", "--models", "a.json")
    assert answer.code == 2
    assert "a profile for xavier-agx, and models are mapped to agx-orin" in answer.error


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('soc = "xavier"', "task is missing"),
        ('soc = "xavier"\n[[task]]\nmodl = "vgg19"', "task.0.model is missing"),
        (
            'soc = "xavier"\n[[task]]\nmodel = "vgg19"\nrepeat = 2',
            "unknown key 'task.0.repeat'; did you mean 'repeats'?",
        ),
        ('soc = "xavier"\nfolder = "/"\n[[task]]\nmodel = "vgg19"', "unknown key 'folder'"),
        ("soc = ", "not a TOML file"),
        (b"\xff", "cannot read the scenario"),
    ],
)
def test_a_bad_scenario_is_one_line(
    weft: Callable[..., CommandResult], tmp_path: Path, text: str | bytes, complaint: str
) -> None:
    (tmp_path / "s.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    answer = weft("map", "s.toml")
    assert answer.code == 2 and answer.error.count("\n") == 1
    assert answer.error.startswith("weft: s.toml: ") and complaint in answer.error


def test_a_device_without_numbers_for_estimates_is_named(weft: Callable[..., CommandResult], tmp_path: Path) -> None:
    (tmp_path / "bare.toml").write_text('kind = "soc"\nname = "bare"\nbandwidth_gb_s = 9.0\n[[units]]\nname = "cpu"\n')
    answer = weft("map", "--soc", "bare.toml", "--models", "resnet18")
    assert answer.code == 2 and "unit cpu has no peak_tflops" in answer.error


# Documentation


def test_the_help_leads_to_the_page(weft: Callable[..., CommandResult]) -> None:
    answer = weft("map", "--help")
    assert answer.code == 0
    for word in ("docs/mapping.md", "calibrate", "dynamic", "import-trt", "--max-switches"):
        assert word in answer.out
    assert "map" in weft("--help").out


def keys_of(value: Any) -> set[str]:
    """Every key, however deep; what is named after baselines or units is no key."""
    if isinstance(value, dict):
        inner = set().union(*map(keys_of, value.values())) if value else set()
        return inner | (set() if "gpu-only" in value else set(value))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_the_formats_page_names_every_key(mapped: Callable[..., dict[str, Any]]) -> None:
    from weft.devices.soc import Pccs, Soc, Unit
    from weft_map.dynamic import DynamicLog, Frame, LoopEvent, PhaseLog, Update
    from weft_map.export import LayerDevice
    from weft_map.profiles import ProfileCost, ProfileGroup, SocProfile
    from weft_map.scenario import ScenarioPhase, ScenarioTask

    page = (ROOT / "docs/formats.md").read_text()
    models = (Soc, Unit, Pccs, SocProfile, ProfileGroup, ProfileCost, Scenario, ScenarioTask, ScenarioPhase)
    keys = {key for model in models for key in model.model_fields} - {"folder", "units", "contention", "task", "phase"}
    keys |= {key for log in (DynamicLog, PhaseLog, Update) for key in log.__dataclass_fields__}
    keys |= {*Frame._fields, *LoopEvent._fields, *LayerDevice._fields}
    keys |= keys_of(mapped(*PAIR))
    assert sorted(key for key in keys if f"`{key}`" not in page) == []


def test_one_call_maps_models() -> None:
    found = map_models("xavier", ["vgg19", "resnet152"], max_switches=1)
    assert found.certificate.proved
    assert found.certificate.value <= found.baselines["per-unit"].makespan_s
    assert [task.name for task in found.outcome.problem.tasks] == ["vgg19", "resnet152"]


def test_z3_stands_beside_the_others_or_says_how_to_get_it(weft: Callable[..., CommandResult], tmp_path: Path) -> None:
    for name, time_s in (("a", 1e-3), ("b", 2e-3)):
        costs = {"gpu": cost(time_s), "dla": cost(1.5 * time_s)}
        write_profile(tmp_path / f"{name}.json", group("g", **costs))
    answer = weft("map", "--soc", "xavier", "--models", "a.json,b.json", "--z3")
    if find_spec("z3"):
        assert answer.code == 0 and "Z3, whose steps may wait for any time, proved its schedule best" in answer.out
    else:
        assert answer.code == 2 and "pip install 'weft[z3]'" in answer.error
    throughput = weft("map", "--soc", "xavier", "--models", "a.json,b.json", "--z3", "--objective", "throughput")
    assert throughput.code == 2 and "least latency only" in throughput.error

"""``weft stitch`` and ``weft models generate``: what they print and write, that it is true, and how they refuse."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from tests import ROOT
from tests.stitching.files import model, node, numbers
from tests.support.commands import CommandResult, run
from weft.base.errors import StitchError
from weft.cli.main import main
from weft.cli.printing import console
from weft.models.packaged import PACKAGED, packaged_models
from weft.runtime.stitched import tasks_in
from weft.runtime.timing import Turns
from weft_stitch import stitch
from weft_stitch.cli.stitch import print_stitching
from weft_stitch.cost import count
from weft_stitch.forms import FORMS
from weft_stitch.graph import Graph
from weft_stitch.making.architectures import ARCHITECTURES
from weft_stitch.making.generator import generate, save_nets
from weft_stitch.pages import percents, stitching_report
from weft_stitch.stitching_run import ROUNDS, Stitching

QUICK = "--no-measure"


Run = Callable[..., CommandResult]


@pytest.fixture
def weft(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return partial(run, capsys)


@pytest.mark.parametrize("name", ["mobilenet-v2", "light-squeezenet", "mtcnn-rnet"])
def test_models_of_the_list_are_stitched_by_name_in_their_usual_shapes(weft: Run, name: str) -> None:
    if name in PACKAGED and name not in packaged_models():
        pytest.skip(f"{name} is not installed")
    answer = weft("stitch", name, name, "--names", "a,b", "-o", "both.onnx", "--islands", "--form", "split", QUICK)
    assert answer.code == 0, answer.error
    assert "stitched  both.onnx  (a, b)" in answer.out
    assert tempfile.gettempdir() not in answer.out


def test_a_name_that_nobody_knows_is_told_with_those_that_there_are(weft: Run) -> None:
    answer = weft("stitch", "resnet-18", "resnet18", "-o", "both.onnx")
    assert answer.code == 2 and "unknown model 'resnet-18'; did you mean resnet18" in answer.error


@pytest.fixture
def alike(tmp_path: Path) -> list[str]:
    """Three models of equal sizes, so that groups of equal size cost the same."""
    made = generate("tiny-vgg", 3, sharing=0.7)
    return [str(path) for path in save_nets(made.nets, tmp_path / "models")]


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    """Three small models that share, with rows left open."""
    made = generate("tinynet", 3, pruning=0.4, sharing=0.7, classes=[3, 4, 5])
    return [str(path) for path in save_nets(made.nets, tmp_path / "models", dynamic=True)]


class Planned(NamedTuple):
    """One run of the command with everything it shows."""

    files: list[str]
    output: Path
    out: str
    report: dict[str, Any]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    folder = tmp_path_factory.mktemp("planned")
    made = generate("tinynet", 3, pruning=0.4, sharing=0.7, classes=[3, 4, 5])
    files = [str(path) for path in save_nets(made.nets, folder)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit, match="0"):
        main(["stitch", *files, "-o", f"{folder}/pets.onnx", QUICK, "--layers", "--json", f"{folder}/pets.json"])
    return Planned(files, folder / "pets.onnx", said.getvalue(), json.loads((folder / "pets.json").read_text()))


@pytest.fixture
def stitched(weft: Run, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What ``weft stitch`` writes as JSON."""

    def run(*arguments: str) -> dict[str, Any]:
        answer = weft("stitch", *arguments, "-o", "out.onnx", "--json", "out.json")
        assert answer.code == 0, answer.error
        written: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
        return written

    return run


def session(path: str | Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def assert_equal(path: Path, files: list[str], rows: list[int], close: float = 1e-5) -> None:
    """The file answers as the models do, by their names."""
    tasks = {task.name: task for task in tasks_in(path)}
    assert list(tasks) == [Path(file).stem for file in files]
    alone, feed = {}, {}
    for file, mine_rows in zip(files, rows, strict=True):
        task, mine = tasks[Path(file).stem], session(file)
        (image,) = mine.get_inputs()
        given = np.random.default_rng(mine_rows).standard_normal((mine_rows, *image.shape[1:]), np.float32)
        feed[task.inputs[image.name]] = given
        alone[task.outputs["logits"]] = mine.run(["logits"], {image.name: given})[0]
    found = session(path).run(list(alone), feed)
    for name, got in zip(alone, found, strict=True):
        np.testing.assert_allclose(got, alone[name], rtol=close, atol=close)


def group(report: dict[str, Any]) -> dict[str, Any]:
    (only,) = report["groups"]
    return only


def ways(report: dict[str, Any]) -> dict[str, Any]:
    return {way["name"]: way for way in group(report)["ways"]}


# --- what it writes ---


def test_three_files_become_one_that_answers_as_they_do(planned: Planned) -> None:
    assert "largest difference to the models" in planned.out
    assert "pets.onnx  (tinynet-0, tinynet-1, tinynet-2)" in planned.out
    rows = {line.split("  ")[0].removesuffix(" in slabs") for line in planned.out.splitlines()}
    assert {"one after another", "mts", "grouped", "split", "half", "separate"} <= rows
    assert_equal(planned.output, planned.files, [1, 1, 1])


def test_the_file_names_its_models_under_the_key_that_the_server_reads(weft: Run, three: list[str]) -> None:
    assert weft("stitch", *three, "-o", "pets.onnx", QUICK, "--form", "split", "-b", "2,1,3").code == 0
    tasks = tasks_in(Path("pets.onnx"))
    assert [task.batch for task in tasks] == [2, 1, 3]
    assert tasks[1].inputs == {"image": "tinynet-1.image"} and tasks[1].outputs == {"logits": "tinynet-1.logits"}
    assert_equal(Path("pets.onnx"), three, [2, 1, 3])


def test_dynamic_files_take_any_rows_of_each_model(weft: Run, three: list[str]) -> None:
    answer = weft("stitch", *three, "-o", "pets.onnx", QUICK, "--slack", "0", "--dynamic")
    assert answer.code == 0 and re.search(r"^no grouped: .*'grouped' cannot do it, [^;]*$", answer.out, re.M)
    assert all(isinstance(each.shape[0], str) for each in session("pets.onnx").get_inputs())
    for rows in ([1, 1, 1], [3, 1, 2]):
        assert_equal(Path("pets.onnx"), three, rows)


@pytest.mark.parametrize("form", ["mts", "grouped", "split", "half", "separate"])
def test_every_form_can_be_asked_for(form: str, three: list[str], stitched: Callable[..., Any]) -> None:
    report = stitched(*three, QUICK, "--form", form)
    assert group(report)["form"] == form and list(ways(report)) == ["sequential", "stitched"]
    assert {row["form"] for row in group(report)["layers"]} == {form}
    assert report["largest_difference"] < 1e-5
    assert_equal(Path("out.onnx"), three, [1, 1, 1])


def test_split_stores_every_different_weight_once(three: list[str], stitched: Callable[..., Any]) -> None:
    report = stitched(*three, QUICK, "--form", "split", "--no-slabs")
    kernels = group(report)["kernels"]
    unique = kernels["by_all"] + kernels["by_some"] + kernels["own"]
    assert ways(report)["stitched"]["weight_bytes"] == 4 * unique
    assert ways(report)["sequential"]["weight_bytes"] == 4 * kernels["separate"]
    assert unique < kernels["separate"]


def test_layers_and_spaces_are_told(planned: Planned) -> None:
    lines = planned.out.splitlines()
    assert any(line.startswith("layers, each with what follows it") for line in lines)
    assert any(line.startswith("layers alone, in us") for line in lines)
    assert any(line.split()[:2] == ["image", "3"] and "100%" in line for line in lines)


def test_numbers_of_the_report_add_up(planned: Planned) -> None:
    report = planned.report
    only, whole = group(report), report["total"]
    made = ways(report)["stitched"]
    assert whole["stitched"] == made and whole["sequential"] == ways(report)["sequential"]
    assert sum(row["macs"] for row in only["layers"]) == made["macs"]
    assert sum(row["weight_bytes"] for row in only["layers"]) == made["weight_bytes"]
    assert sum(row["predicted_s"] for row in only["layers"]) <= made["predicted_s"]
    for row in only["spaces"]:
        assert row["by_all"] + row["by_some"] + row["own"] == sum(row["widths"])
    assert [row["inner"] for row in only["spaces"]].count(False) == 2  # the picture and the classes
    assert report["settings"]["files"] == {Path(file).stem: file for file in planned.files}
    assert made["measured_s"] is None


def test_planning_by_the_clock_measures_every_way(alike: list[str], stitched: Callable[..., Any]) -> None:
    report = stitched(*alike)
    assert report["settings"]["measured"] and len(ways(report)) >= 6
    assert all(way["measured_s"] > 0 for way in ways(report).values())
    most = ways(report)["sequential"]["weight_bytes"]
    light = [way for form, way in ways(report).items() if form in FORMS and way["weight_bytes"] <= most]
    fastest_s = min(way["measured_s"] for way in light)
    assert ways(report)["stitched"]["measured_s"] <= 1.05 * fastest_s
    assert all(len(row["seconds"]) == 5 for row in group(report)["layers"])


def test_slack_buys_fewer_weights(alike: list[str], stitched: Callable[..., Any]) -> None:
    fastest, light = (stitched(*alike, QUICK, "--slack", slack)["total"]["stitched"] for slack in ("0", "9"))
    assert light["weight_bytes"] < fastest["weight_bytes"] and light["predicted_s"] > fastest["predicted_s"]


def test_what_is_shown_is_what_was_chosen_by(
    alike: list[str], stitched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock on which few weights are slow in all races but the last, which is the one that is shown."""

    def race(contenders: dict[str, list[Graph]], *, rounds: int, **_: Any) -> dict[str, Turns]:
        sizes = {name: sum(count(graph).weight_bytes for graph in graphs) for name, graphs in contenders.items()}
        made_up = {name: size if rounds == ROUNDS else 1 / (1 + size) for name, size in sizes.items()}
        return {name: Turns((seconds,), (seconds,)) for name, seconds in made_up.items()}

    monkeypatch.setattr("weft_stitch.running.sessions.race", race)
    found = ways(stitched(*alike))
    assert found["stitched"]["measured_s"] == found["stitched"]["weight_bytes"]
    assert found["stitched"]["weight_bytes"] == min(way["weight_bytes"] for way in found.values())


def test_the_command_and_the_function_make_the_same(weft: Run, tmp_path: Path) -> None:
    """In groups, with names and rows of their own, and by the described machine, on which every run is alike."""
    nets = generate("tinynet", 3, sharing=0.0, pruning=0.4).nets
    files = [str(path) for path in save_nets(nets, tmp_path / "models", dynamic=True)]
    arguments = ("--names", "a,b,c", "-b", "2", QUICK, "--form", "mts", "--memory-cap", "1g", "--no-slabs")
    answer = weft("stitch", *files, "-o", "typed.onnx", "--json", "typed.json", *arguments)
    assert answer.code == 0, answer.error
    settings = {"form": "mts", "measure": False, "memory_cap_bytes": 1 << 30, "slabs": False}
    made = stitch(files, names=["a", "b", "c"], batches=2, **settings)
    written = made.to_onnx("called.onnx")
    typed = [Path(f"typed.{number}.onnx") for number in range(len(made.groups))]
    assert len(written) > 1
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in typed]
    assert json.loads(Path("typed.json").read_text()) == json.loads(json.dumps(stitching_report(made, typed)))


def test_the_command_and_the_function_choose_alike_by_a_clock(
    weft: Run, alike: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is made up, the rest is as usual: measured, in slabs, compared with the models."""

    def race(contenders: dict[str, list[Graph]], **_: Any) -> dict[str, Turns]:
        sizes = {name: 1e-6 * sum(count(graph).launches for graph in graphs) for name, graphs in contenders.items()}
        return {name: Turns((seconds,), (seconds,)) for name, seconds in sizes.items()}

    monkeypatch.setattr("weft_stitch.running.sessions.race", race)
    assert weft("stitch", *alike, "-o", "typed.onnx", "--json", "typed.json").code == 0
    made = stitch(alike)
    made.to_onnx("called.onnx")
    assert Path("called.onnx").read_bytes() == Path("typed.onnx").read_bytes()
    report = json.loads(json.dumps(stitching_report(made, ["typed.onnx"])))
    assert json.loads(Path("typed.json").read_text()) == report and report["settings"]["measured"]


def test_a_model_is_not_written_over_by_the_function_either(three: list[str]) -> None:
    made = stitch(three, form="split", measure=False, check=False)
    with pytest.raises(StitchError, match="is one of the models"):
        made.to_onnx(three[1])


def test_json_goes_to_standard_output_alone(weft: Run, three: list[str]) -> None:
    answer = weft("stitch", *three, "-o", "pets.onnx", QUICK, "--form", "split", "--json", "-")
    assert json.loads(answer.out)["kind"] == "stitching" and "one after another" in answer.error


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"slack": -0.1}, "slack = -0.1: give 0"),
        ({"latency_target_s": 0}, "latency_target_s = 0: give seconds above 0"),
        ({"batches": [1, 0, 1]}, "batches = 1,0,1: give rows from 1"),
        ({"threads": 0}, "threads = 0: give 1 or more"),
        ({"form": "fused", "measure": True}, "form = fused in torch only"),
        ({"form": "split", "slack": 0.0}, "slack = 0.0 does not apply to form = split"),
        ({"machine": "h200", "slabs": True}, "slabs = True does not apply to machine = h200"),
    ],
)
def test_the_function_names_its_arguments(three: list[str], options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(StitchError, match=re.escape(complaint)):
        stitch(three, **options)


# --- what it says ---


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Stitching:
    made = generate("tinynet", 3, pruning=0.4, sharing=0.7, classes=[3, 4, 5])
    files = save_nets(made.nets, tmp_path_factory.mktemp("found"), dynamic=True)
    return stitch([str(file) for file in files], measure=False)


@pytest.mark.parametrize("width", [60, 80, 110])
def test_narrow_terminals_get_fewer_columns_and_whole_names(
    found: Stitching, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(console, "width", width)
    with console.capture() as printed:
        print_stitching(found, layers=True)
    out = printed.get()
    lines = [line for line in out.splitlines() if not line.startswith("stitched  ")]
    assert "…" not in out and max(map(len, lines)) <= width
    starts = ("one after another  ", "stitched: ", "grouped  ", "layer  ")
    assert all(any(line.startswith(start) for line in lines) for start in starts)
    (head,) = (line for line in lines if "weights MB" in line)
    assert "total MB" in head and "predicted ms" in head and "tables MB" not in head


def test_all_memory_is_told(planned: Planned) -> None:
    before, after = (planned.report["total"][name] for name in ("sequential", "stitched"))
    told = (
        f"in all with tables and activations {bytes_of(after) / 1e6:.2f} MB instead of {bytes_of(before) / 1e6:.2f} MB"
    )
    assert told in planned.out.replace("\n", " ").replace("  ", " ")
    (row,) = (line.split() for line in planned.out.splitlines() if line.startswith("one after another  "))
    assert f"{bytes_of(before) / 1e6:.3f}" in row


def test_what_slabs_do_alone_is_told(weft: Run, tmp_path: Path) -> None:
    nets = generate("tinynet", 2, resolution=32).nets
    files = [str(path) for path in save_nets(nets, tmp_path / "models")]
    out = weft("stitch", *files, "-o", "out.onnx", QUICK).out.replace("\n", " ")
    assert re.search(r"times as fast as one after another and \d\.\d\d times as fast as that in slabs", out)


def test_limits_that_leave_every_model_alone_say_so(weft: Run, tmp_path: Path, alike: list[str]) -> None:
    made = generate("tinynet", 3, sharing=0.0, pruning=0.4)
    files = [str(path) for path in save_nets(made.nets, tmp_path / "other")]
    said = "groups: the limits leave every model alone: nothing is shared"
    settings = ("-o", "pets.onnx", QUICK, "--form", "mts", "--memory-cap", "1g")
    assert said in weft("stitch", *files, *settings).out
    assert said not in weft("stitch", *alike, "-o", "pets.onnx", QUICK, "--memory-cap", "1g").out


def test_files_of_earlier_runs_are_named(weft: Run, tmp_path: Path) -> None:
    made = generate("tinynet", 3, sharing=0.0, pruning=0.4)
    files = [str(path) for path in save_nets(made.nets, tmp_path / "models")]
    for stale in ("pets.onnx", "pets.7.onnx", "pets.old.onnx"):
        Path(stale).write_text("")
    out = weft("stitch", *files, "-o", "pets.onnx", QUICK, "--form", "mts", "--memory-cap", "1g").out
    left = [line.split()[1] for line in out.splitlines() if line.startswith("left ")]
    assert left == ["pets.7.onnx", "pets.onnx"] and Path("pets.7.onnx").exists()
    out = weft("stitch", *files, "-o", "pets.onnx", QUICK, "--form", "split").out
    left = [line.split()[1] for line in out.splitlines() if line.startswith("left ")]
    assert left == ["pets.0.onnx", "pets.1.onnx", "pets.2.onnx", "pets.7.onnx"]


def test_shares_add_up() -> None:
    assert percents((915, 55, 30)) == [92, 5, 3] and percents((0, 0, 0)) == [0, 0, 0]
    assert all(sum(percents((a, b, 7))) == 100 for a in range(30) for b in range(30))


# --- what is shared ---


def test_a_sharing_map_is_written_and_taken_back(three: list[str], stitched: Callable[..., Any]) -> None:
    found = stitched(*three, QUICK, "--form", "split", "--write-sharing", "map.json")
    given = stitched(*three, QUICK, "--form", "split", "--sharing", "map.json")
    assert group(found)["spaces"] == group(given)["spaces"] and ways(found) == ways(given)
    Path("none.json").write_text('{"format": 1, "spaces": {}}')
    nothing = stitched(*three, QUICK, "--form", "split", "--sharing", "none.json")
    assert ways(nothing)["stitched"]["weight_bytes"] > ways(given)["stitched"]["weight_bytes"]


def test_a_map_that_is_not_true_is_refused(weft: Run, three: list[str]) -> None:
    spaces = {"image": [{"tinynet-0": [0], "tinynet-1": [0]}]}
    space = json.dumps({"format": 1, "spaces": {**spaces, "conv_2": [{"tinynet-0": [0, 1], "tinynet-1": [1, 0]}]}})
    Path("map.json").write_text(space)
    answer = weft("stitch", *three, "-o", "pets.onnx", QUICK, "--sharing", "map.json")
    assert answer.code == 2 and "conv_2" in answer.error and not Path("pets.onnx").exists()


def test_near_weights_are_shared_within_a_tolerance_and_the_difference_is_told(
    tmp_path: Path, stitched: Callable[..., Any]
) -> None:
    (net,) = generate("tinynet", 1, norm="folded").nets
    (first,) = save_nets([net], tmp_path)
    near = onnx.load(first)
    for tensor in near.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.ndim == 4:
            noise = np.random.default_rng(0).uniform(-1e-3, 1e-3, array.shape)
            tensor.CopyFrom(onnx.numpy_helper.from_array((array + noise).astype(np.float32), tensor.name))
    onnx.save(near, tmp_path / "near.onnx")
    files = [str(first), str(tmp_path / "near.onnx")]
    apart = stitched(*files, QUICK, "--form", "split")
    assert not any(row["by_all"] for row in group(apart)["spaces"] if row["inner"])
    assert apart["largest_difference"] < 1e-5
    joined = stitched(*files, QUICK, "--form", "split", "--tolerance", "0.002")
    assert (
        any(row["by_all"] for row in group(joined)["spaces"] if row["inner"])
        and 1e-5 < joined["largest_difference"] < 0.1
    )


# --- groups ---


def bytes_of(way: dict[str, Any]) -> int:
    return sum(way[f"{what}_bytes"] for what in ("weight", "table", "activation"))


def test_a_memory_cap_is_kept(alike: list[str], stitched: Callable[..., Any]) -> None:
    free = stitched(*alike, QUICK, "--slack", "0")["total"]["stitched"]
    least = stitched(*alike, QUICK, "--form", "split", "--no-slabs")["total"]["stitched"]
    cap = (bytes_of(free) + bytes_of(least)) // 2
    report = stitched(*alike, QUICK, "--memory-cap", str(cap))
    assert bytes_of(report["total"]["stitched"]) <= cap < bytes_of(free)
    assert report["settings"]["memory_cap_bytes"] == cap
    models = [name for each in report["groups"] for name in each["models"]]
    assert sorted(models) == [Path(file).stem for file in alike]


def test_groups_are_files_of_their_own(weft: Run, tmp_path: Path) -> None:
    """Models that share nothing: the paper's form does least in groups of one."""
    made = generate("tinynet", 3, sharing=0.0, pruning=0.4)
    files = [str(path) for path in save_nets(made.nets, tmp_path / "models")]
    settings = (QUICK, "--form", "mts", "--memory-cap", "1g", "--json", "out.json")
    answer = weft("stitch", *files, "-o", "pets.onnx", *settings)
    assert answer.code == 0 and "all groups" in answer.out, answer.error
    report = json.loads(Path("out.json").read_text())
    assert [each["file"] for each in report["groups"]] == ["pets.0.onnx", "pets.1.onnx", "pets.2.onnx"]
    for each in report["groups"]:
        assert_equal(Path(each["file"]), [file for file in files if Path(file).stem in each["models"]], [1])
    assert not Path("pets.onnx").exists()


def test_a_latency_target_takes_the_least_memory(alike: list[str], stitched: Callable[..., Any]) -> None:
    fastest = stitched(*alike, QUICK, "--slack", "0")["total"]["stitched"]
    least = stitched(*alike, QUICK, "--form", "split", "--no-slabs")["total"]["stitched"]
    slow = stitched(*alike, QUICK, "--latency-target", "1000")["total"]["stitched"]
    assert bytes_of(slow) <= bytes_of(least) < bytes_of(fastest)
    quick_ms = fastest["predicted_s"] * 1.001e3
    quick = stitched(*alike, QUICK, "--latency-target", f"{quick_ms}")["total"]["stitched"]
    assert quick["predicted_s"] <= quick_ms / 1e3 < slow["predicted_s"]


def test_limits_that_cannot_be_met_are_named(weft: Run, alike: list[str]) -> None:
    answer = weft("stitch", *alike, "-o", "pets.onnx", QUICK, "--memory-cap", "1k")
    assert answer.code == 2 and answer.error.startswith("weft: no grouping fits 1k; the smallest takes ")
    assert answer.error.endswith(": raise the memory cap\n") and answer.error.count("\n") == 1
    answer = weft("stitch", *alike, "-o", "pets.onnx", QUICK, "--latency-target", "0.00001")
    assert answer.code == 2 and "no grouping takes 1e-05 ms; the fastest takes " in answer.error


# --- one, the same, other shapes, islands ---


def test_one_model_is_rewritten_alone(weft: Run, three: list[str]) -> None:
    answer = weft("stitch", three[0], "-o", "one.onnx", QUICK, "--form", "separate")
    assert answer.code == 0 and "1 model, which shares with none; rows: 1; " in answer.out
    assert "as it is  " in answer.out and "after another" not in answer.out
    assert_equal(Path("one.onnx"), three[:1], [1])


def test_files_of_one_name_and_names_of_ones_own(weft: Run, three: list[str], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / Path(three[0]).name
    twin.write_bytes(Path(three[1]).read_bytes())
    settings = ("-o", "pets.onnx", QUICK, "--form", "split")
    assert weft("stitch", three[0], str(twin), *settings).code == 0
    assert [task.name for task in tasks_in(Path("pets.onnx"))] == ["tinynet-0", "tinynet-0-2"]
    assert weft("stitch", three[0], str(twin), "--names", "cats, dogs", *settings).code == 0
    assert [task.name for task in tasks_in(Path("pets.onnx"))] == ["cats", "dogs"]


def small(path: str, *, seed: int = 0, nodes: Any = None, image: tuple[int | str, ...] = (2, 4, 6, 5)) -> str:
    """A convolution, or *nodes*."""
    weights = {"w": numbers(5, 4, 3, 3, seed=seed)}
    onnx.save(model(nodes or [node("Conv", ["x", "w"], ["y"], name="conv")], weights, inputs={"x": image}), path)
    return path


def test_open_sizes_are_given_by_shape(weft: Run) -> None:
    files = [small(f"{name}.onnx", seed=seed, image=("n", 4, "h", "w")) for seed, name in enumerate("ab")]
    settings = ("-o", "out.onnx", QUICK, "--form", "split")
    answer = weft("stitch", *files, *settings)
    assert answer.code == 2 and "--shape x=" in answer.error
    assert weft("stitch", *files, *settings, "--shape", "x=1x4x6x5").code == 0
    assert [each.shape for each in session("out.onnx").get_inputs()] == [[1, 4, 6, 5]] * 2
    both = [f"--shape={name}.onnx:x=1x4x7x7" for name in "ab"]
    assert weft("stitch", *files, *settings, *both).code == 0
    assert [each.shape for each in session("out.onnx").get_inputs()] == [[1, 4, 7, 7]] * 2


def test_what_is_not_understood_is_named_or_becomes_an_island(weft: Run) -> None:
    nodes = [node("Conv", ["x", "w"], ["c"], name="conv"), node("Softsign", ["c"], ["y"], name="odd")]
    files = [small(f"{name}.onnx", seed=seed, nodes=nodes) for seed, name in enumerate("ab")]
    settings = ("-o", "out.onnx", QUICK, "--form", "split")
    answer = weft("stitch", *files, *settings)
    assert answer.code == 2 and "odd is the operator Softsign" in answer.error and "--islands" in answer.error
    answer = weft("stitch", *files, *settings, "--islands")
    assert answer.code == 0 and "largest difference" in answer.out, answer.error


def test_plans_for_another_machine_go_by_its_description(three: list[str], stitched: Callable[..., Any]) -> None:
    settings = stitched(*three, "--machine", "h200", "--slack", "0")["settings"]
    assert settings["machine"] == "h200" and not settings["measured"]


def test_models_that_part_run_the_rest_alone(weft: Run, three: list[str]) -> None:
    longer = onnx.load(three[1])
    longer.graph.node.append(node("Sigmoid", ["logits"], ["chance"], name="gate"))
    longer.graph.output[0].name = "chance"
    onnx.save(longer, "longer.onnx")
    settings = ("-o", "pets.onnx", QUICK, "--form", "split")
    answer = weft("stitch", three[0], "longer.onnx", *settings)
    assert answer.code == 2 and "--islands" in answer.error
    answer = weft("stitch", three[0], "longer.onnx", *settings, "--islands")
    assert answer.code == 0, answer.error
    assert [list(task.outputs) for task in tasks_in(Path("pets.onnx"))] == [["logits"], ["chance"]]


# --- refusals ---


def test_different_models_are_told_apart_by_their_first_difference(weft: Run, three: list[str]) -> None:
    small("other.onnx", image=(1, 3, 8, 8), nodes=[node("Relu", ["x"], ["y"], name="act")])
    answer = weft("stitch", three[0], "other.onnx", "-o", "out.onnx", QUICK)
    assert answer.code == 2 and answer.error.count("\n") == 1
    assert "conv_2 of tinynet-0" in answer.error and "act of other" in answer.error


def test_a_result_that_differs_is_not_written(weft: Run) -> None:
    """The files lose digits to a large term that they take away again; the reader adds both up to nothing."""
    large = node("Constant", [], ["large"], value_float=1e6)
    moved = [node("Add", ["c", "large"], ["a"]), node("Sub", ["a", "large"], ["y"])]
    nodes = [large, node("Conv", ["x", "w"], ["c"], name="conv"), *moved]
    files = [small(f"{name}.onnx", seed=seed, nodes=nodes) for seed, name in enumerate("ab")]
    settings = ("-o", "out.onnx", QUICK, "--form", "split")
    answer = weft("stitch", *files, *settings)
    assert answer.code == 2 and "1e-05 is allowed; nothing is made of it (--no-check" in answer.error
    assert not Path("out.onnx").exists()
    assert weft("stitch", *files, *settings, "--no-check").code == 0 and Path("out.onnx").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--form", "spilt"), "did you mean split"),
        (("--form", "fused"), "runs in torch on CUDA only"),
        (("--names", "a,b"), "--names a,b: 2 names for 3 models"),
        (("--names", "a,b,a"), "--names a,b,a: two models have one name"),
        (("--batch", "1,2"), "nor 3 of them"),
        (("--batch", "0"), "neither a number from 1"),
        (("--threads", "0"), "give 1 or more"),
        (("--machine", "abacus"), "unknown machine"),
        (("--machine", "h200", "--measure"), "not on h200"),
        (("--slack", "-0.1"), "slack -0.1"),
        (("--slack", "inf"), "slack inf"),
        (("--memory-cap", "much"), "is not a size like 512m"),
        (("--latency-target", "-1"), "give milliseconds above 0"),
        (("--latency-target", "inf"), "give milliseconds above 0"),
        (("--tolerance", "-1"), "tolerance -1"),
        (("--tolerance", "inf"), "tolerance inf"),
        (("--tolerance", "nan", "--sharing", "any.json"), "tolerance nan"),
        (("--sharing", "missing.json"), "cannot read the file"),
        (("--json", "nowhere/out.json"), "there is no folder nowhere"),
        (("--json", "."), "it is a folder"),
        (("--write-sharing", "out.onnx"), "--write-sharing out.onnx: --output is written there already"),
        (("-o", "nowhere/out.onnx"), "there is no folder nowhere"),
        (("-o", "out.bin"), "--output out.bin: its name ends in .onnx"),
        (("--shape", "x"), "is not of the form"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    weft: Run, three: list[str], options: tuple[str, ...], complaint: str
) -> None:
    answer = weft("stitch", *three, "-o", "out.onnx", QUICK, *options)
    assert answer.code == 2 and complaint in answer.error and answer.error.count("\n") == 1
    assert not Path("out.onnx").exists()


def test_files_that_are_no_models_and_models_that_would_be_overwritten(weft: Run, three: list[str]) -> None:
    answer = weft("stitch", *three, "missing.onnx", "-o", "out.onnx", QUICK)
    assert answer.code == 2 and "missing.onnx" in answer.error
    Path("torn.onnx").write_bytes(b"no model")
    answer = weft("stitch", *three, "torn.onnx", "-o", "out.onnx", QUICK)
    assert answer.code == 2 and "torn.onnx" in answer.error
    before = Path(three[0]).read_bytes()
    answer = weft("stitch", *three, "-o", three[0], QUICK)
    assert answer.code == 2 and "is one of the models" in answer.error
    for option in ("--json", "--write-sharing"):
        answer = weft("stitch", *three, "-o", "out.onnx", QUICK, option, three[0])
        assert answer.code == 2 and "is one of the models" in answer.error and not Path("out.onnx").exists()
    assert Path(three[0]).read_bytes() == before


# --- models to try it with ---


def test_generated_models_share_what_was_asked_for(weft: Run, stitched: Callable[..., Any]) -> None:
    arguments = ("tinynet", "--tasks", "2", "--sharing", "0.8", "--classes", "3,5", "-o", "made")
    answer = weft("models", "generate", *arguments)
    assert answer.code == 0 and answer.out.split() == ["model", "made/tinynet-0.onnx", "model", "made/tinynet-1.onnx"]
    assert session("made/tinynet-1.onnx").get_outputs()[0].shape[1] == 5
    report = stitched("made/tinynet-0.onnx", "made/tinynet-1.onnx", QUICK, "--form", "split")
    assert {row["by_all"] / sum(row["widths"]) for row in group(report)["spaces"] if row["inner"]} == {0.8}


def test_generated_models_can_be_fixed_to_rows_and_sizes(weft: Run) -> None:
    assert weft("models", "generate", "tiny-vgg", "-t", "1", "-b", "2", "--resolution", "16", "-o", "made").code == 0
    assert session("made/tiny-vgg-0.onnx").get_inputs()[0].shape == [2, 3, 16, 16]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("resnet81",), "did you mean resnet"),
        (("tinynet", "--widths", "1,x"), "are not numbers"),
        (("tinynet", "--widths", "1"), "1 widths for 4 tasks"),
        (("tinynet", "--pruning", "1"), "--pruning 1: give a part from 0 to below 1"),
        (("tinynet", "--tasks", "0"), "--tasks 0: give 1 or more"),
        (("nonsense",), "unknown architecture 'nonsense'; known: resnet18, resnet50, vgg16, mobilenet, tinynet,"),
        (("tinynet", "--norm", "none"), "norm is 'none'"),
        (("tinynet", "--sharing", "2"), "--sharing 2: give a part from 0 to 1"),
        (("tinynet", "--widths", "1,nan,1,1"), "a width of nan"),
        (("tinynet", "--classes", "0"), "classes are [0, 0, 0, 0]"),
        (("tinynet", "--batch", "0"), "batches are [0, 0, 0, 0]"),
        (("tinynet", "-o", "a-file"), "a-file: name a folder, it is a file"),
    ],
)
def test_models_that_cannot_be_generated(weft: Run, options: tuple[str, ...], complaint: str) -> None:
    Path("a-file").write_text("")
    answer = weft("models", "generate", "-o", "made", *options)
    assert answer.code == 2 and complaint in answer.error and answer.error.count("\n") == 1


def test_the_command_can_be_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "stitch" in capsys.readouterr().out


# --- its documentation ---


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def blocks(language: str = "", name: str = "stitching.md") -> list[str]:
    """What stands between fences of *language* on the page."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page(name), re.M | re.S)
    return [text for mark, text in fenced if mark == language]


def test_the_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, cuda = blocks("python")
    said: list[Any] = []
    exec(compile(first, "stitching.md", "exec"), {"print": said.append})
    assert said[0] < 1 and [task.name for task in tasks_in(Path("stitched.onnx"))] == [
        "tinynet-0",
        "tinynet-1",
        "tinynet-2",
    ]
    names: dict[str, Any] = {}
    exec(compile(cuda, "stitching.md", "exec"), names)
    assert [list(each.shape) for each in names["outputs"]] == [[1, 4]] * 3


def test_the_commands_of_the_page_run(weft: Run) -> None:
    """With smaller models, and by the model of the machine; serving is another test's."""
    lines = [line[2:] for block in blocks() for line in block.splitlines() if line.startswith("$ ")]
    told = ""
    for line in lines[:5]:
        words = re.sub("--tasks 8 --pruning [0-9.]+", "--tasks 3", line.replace("resnet18", "tiny-vgg")).split()
        given = [sorted(map(str, Path().glob(word))) if word.endswith("/*.onnx") else [word] for word in words[1:]]
        arguments = [each for some in given for each in some]
        answer = weft(*arguments, *([QUICK, "--slack", "0"] if words[1] == "stitch" else []))
        assert answer.code == 0, answer.error
        told += answer.out
    shown = blocks()[0]
    for line in ("one after another ", "sharing: ", "time: ", "memory: ", "largest difference to the models: "):
        assert line in shown and line in told
    columns = [line.split() for text in (shown, told) for line in text.splitlines() if "weights MB" in line]
    assert set(columns[0]) - {"measured"} <= set(columns[1]) and {"total", "predicted"} <= set(columns[0])
    serving = [line for line in lines if "serve" in line or "--dynamic" in line]
    pets = ["weft stitch cats.onnx dogs.onnx birds.onnx --dynamic -o pets.onnx", "weft serve pets.onnx"]
    assert serving == pets


def test_the_commands_for_encoders_run(weft: Run) -> None:
    """With smaller models; serving is another test's."""
    lines = [line[2:] for block in blocks(name="encoders.md") for line in block.splitlines() if "tuned" in line]
    assert [line.split()[1] for line in lines] == ["models", "stitch"]
    for line in lines:
        words = line.replace("encoder --tasks 8 --rank 16", "tiny-encoder --tasks 2 --rank 2").split()[1:]
        given = [sorted(map(str, Path().glob(word))) if word.endswith("/*.onnx") else [word] for word in words]
        answer = weft(*(each for some in given for each in some))
        assert answer.code == 0, answer.error
    assert "2 models as one body" in answer.out and Path("one.onnx").exists()


def test_the_page_names_every_form_and_every_setting(weft: Run) -> None:
    text = page("stitching.md")
    assert [form for form in FORMS if f"| `{form}` |" not in text] == []
    options = set(re.findall(r"--[a-z-]+", weft("stitch", "--help").out)) - {
        "--help",
        "--output",
        "--measure",
        "--check",
        "--slabs",
    }
    assert [option for option in sorted(options) if option not in text and option not in page("formats.md")] == []


def test_the_formats_page_names_every_key(planned: Planned) -> None:
    report = planned.report
    text = page("formats.md").split("## Stitched models")[1].split("## Model (")[0]
    only = group(report)
    keys = [*report, *report["settings"], *only, *only["kernels"]]
    keys += [*only["ways"][0], *only["layers"][0], *only["spaces"][0]]
    assert [key for key in keys if f"`{key}`" not in text] == []


def test_the_map_of_the_formats_page_is_one(weft: Run) -> None:
    """Its models are made from it: channels that it calls the same get the same filters."""
    text = page("formats.md").split("## Sharing map")[1]
    written = json.loads(re.findall(r"^```json\n(.*?)^```$", text, re.M | re.S)[0])
    filters = numbers(100, 4, 3, 3)
    taken = 0
    models = {name: numbers(8, 4, 3, 3, seed=seed) for seed, name in enumerate(("cats", "dogs", "birds"), start=1)}
    for block in written["spaces"]["conv1"]:
        width = len(next(iter(block.values())))
        for name, channels in block.items():
            models[name][channels] = filters[taken : taken + width]
        taken += width
    for name, weights in models.items():
        nodes = [node("Conv", ["x", "w"], ["conv1"], name="conv1"), node("Relu", ["conv1"], ["y"], name="act")]
        onnx.save(model(nodes, {"w": weights}), f"{name}.onnx")
    Path("map.json").write_text(json.dumps(written))
    files = [f"{name}.onnx" for name in models]
    assert (
        weft("stitch", *files, "-o", "out.onnx", QUICK, "--sharing", "map.json", "--write-sharing", "again.json").code
        == 0
    )
    assert json.loads(Path("again.json").read_text())["spaces"]["conv1"] == written["spaces"]["conv1"]
    assert weft("stitch", *files, "-o", "out.onnx", QUICK, "--write-sharing", "found.json").code == 0
    found = json.loads(Path("found.json").read_text())["spaces"]["conv1"]
    assert [sorted(map(len, block.values())) for block in found] == [[3, 3, 3], [2, 2]]


# What users try first


def attention(path: Path, seed: int) -> str:
    """A convolution, attention over its positions, and a head of the model's own; rows are open."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv"),
        node("Reshape", ["c", "rows"], ["t"]),
        node("Transpose", ["t"], ["q"], perm=[0, 2, 1]),
        node("MatMul", ["q", "t"], ["a"], name="scores"),
        node("Softmax", ["a"], ["p"], axis=-1),
        node("MatMul", ["p", "q"], ["o"], name="mixed"),
        node("ReduceMean", ["o"], ["m"], axes=[1], keepdims=0),
        node("Gemm", ["m", "h"], ["y"], name="head"),
    ]
    constants = {"w": numbers(6, 3, 3, 3), "rows": np.array([0, 6, 16]), "h": numbers(6, 4, seed=seed)}
    onnx.save(model(nodes, constants, inputs={"x": ("n", 3, 6, 6)}), path)
    return str(path)


@pytest.mark.parametrize("options", [(QUICK,), (QUICK, "--dynamic")])
def test_attention_is_an_island(weft: Run, options: tuple[str, ...]) -> None:
    files = [attention(Path(f"{name}.onnx"), seed) for seed, name in enumerate(("cats", "dogs"))]
    answer = weft("stitch", *files, "-o", "pets.onnx", "--islands", "--json", "report.json", *options)
    assert answer.code == 0, answer.error
    report = json.loads(Path("report.json").read_text())
    assert report["largest_difference"] < 1e-5 and group(report)["kernels"]["by_all"] == 6 * 27
    products = 2 * (6 * 27 * 16 + 2 * 16 * 16 * 6 + 6 * 4)
    assert report["total"]["sequential"]["macs"] == products


def half_precision(path: Path, seed: int) -> str:
    nodes = [node("Conv", ["x", "w"], ["c"]), node("GlobalAveragePool", ["c"], ["g"]), node("Flatten", ["g"], ["f"])]
    nodes.append(node("Gemm", ["f", "h"], ["y"]))
    constants = {"w": numbers(8, 3, 3, 3).astype(np.float16), "h": numbers(8, 5, seed=seed).astype(np.float16)}
    onnx.save(model(nodes, constants, inputs={"x": ("n", 3, 6, 6)}, dtype=TensorProto.FLOAT16), path)
    return str(path)


def test_half_precision_is_told_and_compared_with(weft: Run, planned: Planned) -> None:
    files = [half_precision(Path(f"{name}.onnx"), seed) for seed, name in enumerate(("cats", "dogs"))]
    answer = weft("stitch", *files, "-o", "pets.onnx", QUICK)
    said = " ".join(answer.out.split())
    assert answer.code == 0 and "cats is float16: it is read, computed and written in float32" in said
    apart = re.search(r"largest number, (\S+) to files in half precision", said)
    assert apart and 1e-5 < float(apart[1]) < 1e-2
    assert onnx.load("pets.onnx").graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT
    assert "float32" not in planned.out and "half precision" not in planned.out


def test_models_that_share_nothing_get_a_hint_at_folded_normalisations(weft: Run, planned: Planned) -> None:
    folded = [net for seed in (1, 2) for net in generate("tinynet", 1, seed=seed).nets]
    files = [str(save_nets([net], Path(f"{at}"))[0]) for at, net in enumerate(folded)]
    hint = "were normalisations folded into the filters?"
    assert hint in " ".join(weft("stitch", *files, "-o", "apart.onnx", QUICK).out.split())
    assert hint not in " ".join(planned.out.split())
    assert hint not in " ".join(weft("stitch", files[0], "-o", "one.onnx", QUICK).out.split())


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ((".", "-o", "out.onnx"), ".: is a folder; give its files, as in ./*.onnx"),
        (
            ("cats.onnx", "dogs.onnx", "-o", "out.onnx", "--names", "a/b,c d"),
            "--names a/b,c d: 'a/b' is no name for a model",
        ),
        (("cats.onnx", "a b.onnx", "-o", "out.onnx", "--dynamic"), "a b.onnx: its name is none that weft serve takes"),
        (("cats.onnx", "dogs.onnx", "-o", "out.onnx", "--write-sharing", "-"), "--write-sharing -: name a file"),
        (("cats.onnx", "dogs.onnx", "-o", "out.onnx", "--sharing", "cats.onnx"), "cats.onnx: not a JSON file"),
    ],
)
def test_what_users_try_first_is_refused_in_words(weft: Run, given: tuple[str, ...], complaint: str) -> None:
    for name in ("cats", "dogs", "a b"):
        half_precision(Path(f"{name}.onnx"), len(name))
    answer = weft("stitch", *given, QUICK)
    assert answer.code == 2 and complaint in answer.error and answer.error.count("\n") == 1
    assert not Path("out.onnx").exists() and not Path("-").exists()


def test_a_stitched_file_is_not_stitched_again(weft: Run) -> None:
    files = [half_precision(Path(f"{name}.onnx"), len(name)) for name in ("cats", "dogs")]
    assert weft("stitch", *files, "-o", "pets.onnx", QUICK).code == 0
    answer = weft("stitch", "pets.onnx", *files, "-o", "out.onnx", QUICK)
    assert answer.code == 2 and "pets.onnx: is a stitched file of cats, dogs; give the models" in answer.error


def test_the_help_lists_every_architecture(weft: Run) -> None:
    said = weft("models", "generate", "--help").out
    assert all(name in said for name in ARCHITECTURES)

"""What all commands share: groups, files that are asked for, progress, completion, Ctrl-C, and the words of errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cli.inputs import DEVICE, PROFILE, WORKLOAD
from tests.support.commands import COMMAND, LEAVES, refused, run
from weft.base.errors import InputError
from weft.base.files import replacing, write_text
from weft.cli import printing
from weft.cli.command import in_options, told_in_options
from weft.cli.main import INTERRUPTED


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    (tmp_path / "chip.toml").write_text(DEVICE.format(bandwidth="10.0", extra=""))
    (tmp_path / "w.toml").write_text(WORKLOAD)
    return tmp_path


PROFILED = ("--device", "chip.toml", "--profile", "p.json", "-n", "3")

# What a user sees first


def test_the_help_begins_with_what_to_type_and_groups_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, "--help")
    assert code == 0
    places = [shown.index(text) for text in ("Begin with weft plan", "─ Serve models", "─ What another", "─ Papers")]
    assert places == sorted(places)
    assert list(COMMAND.commands)[:2] == ["plan", "serve"]  # type: ignore[attr-defined]


def test_a_letter_means_one_thing() -> None:
    letters: dict[str, set[str]] = {}
    for leaf in LEAVES.values():
        for param in leaf.params:
            for short in (name for name in param.opts if len(name) == 2):
                letters.setdefault(short, set()).add(max(param.opts, key=len))
    assert letters["-o"] == {"--output"}


def test_pictures_have_one_name() -> None:
    options = {name for leaf in LEAVES.values() for param in leaf.params for name in param.opts}
    assert "--figure" in options
    assert not options & {"--png", "--svg", "--picture"}


def test_long_lists_of_options_are_in_panels() -> None:
    for name in ("simulate", "compare", "sustain", "map", "serve", "bench", "explore npu"):
        loose = [each.name for each in LEAVES[name].params if each.opts[0].startswith("--") and not _panel(each)]
        assert loose in ([], ["help"]), name


def _panel(param: Any) -> Any:
    return getattr(param, "rich_help_panel", None)


# Files


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", *PROFILED),
        ("compare", *PROFILED, "-p", "fifo,fair"),
        ("models", "show", "resnet18"),
        ("simulate", "-w", "w.toml", "-p", "edf"),
    ],
)
def test_json_to_standard_output_is_alone_there(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: tuple[str, ...]
) -> None:
    code, shown, error = run(capsys, *arguments, "--json", "-")
    assert code == 0
    assert json.loads(shown)["format"] == 1
    assert error
    assert run(capsys, *arguments)[1], "the next command writes to standard output again"
    assert not (folder / "-").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("sustain", "w.toml", "-p", "edf", "--tolerance", "0.5", "--seeds", "1"),
        ("compare", *PROFILED, "-p", "fifo"),
        ("map", "--soc", "xavier", "--models", "googlenet", "--max-groups", "3"),
    ],
)
def test_nothing_is_written_unasked(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: tuple[str, ...]
) -> None:
    before = sorted(folder.rglob("*"))
    assert run(capsys, *arguments)[0] == 0
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("output", [None, "figures"])
def test_a_reproduction_draws_where_it_is_told_to(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch, output: str | None
) -> None:
    import weft_papers
    from weft_papers.base import Figure, Reproduction

    def paper(out: Path, **settings: Any) -> Reproduction:
        out.mkdir(parents=True)
        (out / "a.png").write_bytes(b"")
        return Reproduction("x", (), (), (Figure("a", out / "a.png"),))

    monkeypatch.setitem(weft_papers.PAPERS, "x", paper)
    code, shown, _ = run(capsys, "reproduce", "x", *(["-o", output] if output else []))
    assert code == 0
    assert ("figures/x/a.png" in shown) == (folder / "figures/x/a.png").exists() == bool(output)


@pytest.mark.parametrize(
    ("option", "file", "why"),
    [
        ("--figure", "x.pdf", "its name ends in .png or .svg"),
        ("--figure", "-", "name a file; only --json goes to standard output"),
        ("--json", "none/x.json", "cannot write: there is no folder none"),
        ("--html", ".", "cannot write: it is a folder; name a file"),
        ("--html", "p.json/x.html", "cannot write: there is no folder p.json"),
        ("--html", "x" * 256, "cannot write: File name too long"),
    ],
)
def test_a_file_that_cannot_be_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], folder: Path, option: str, file: str, why: str
) -> None:
    # the model is not there either, which would be found out first if work had begun
    assert refused(capsys, "simulate", "-m", "nobody", option, file) == f"weft: {option} {file}: {why}\n"


def test_links_in_a_loop_are_no_place_for_a_file(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "loop.json").symlink_to("loop.json")
    said = refused(capsys, "simulate", *PROFILED, "--json", "loop.json")
    assert said == "weft: --json loop.json: cannot write: Too many levels of symbolic links\n"


def test_two_things_are_not_written_to_one_file(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    said = refused(capsys, "simulate", *PROFILED, "--json", "x.json", "--trace", "./x.json")
    assert said == "weft: --trace x.json: --json is written there already; name another file\n"


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), replacing(path) as beside:
        beside.write_text("half")
        assert beside.suffix == ".txt" and path.read_text() == "before"
        raise KeyboardInterrupt
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"] and path.read_text() == "before"
    path.chmod(0o640)
    write_text(path, "after")
    assert path.read_text() == "after" and path.stat().st_mode & 0o777 == 0o640


def test_what_is_linked_to_is_written_and_devices_stay_devices(tmp_path: Path) -> None:
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    link.symlink_to(real)
    write_text(link, "there")
    assert link.is_symlink() and real.read_text() == "there"
    write_text("/dev/null", "nowhere")
    assert Path("/dev/null").is_char_device()


# Progress


def test_off_a_terminal_progress_is_told_in_lines_even_if_nothing_advances(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said, heard = threading.Event(), []
    monkeypatch.setattr(printing, "QUIET_S", 0.0)
    monkeypatch.setattr(printing, "EVERY_S", 0.0)

    def echo(line: str, **settings: object) -> None:
        assert settings == {"err": True}
        heard.append(line)
        said.set()

    monkeypatch.setattr(printing.typer, "echo", echo)
    with printing.progress_bar("searching", 4) as advance:
        said.wait()
        advance()
        advance("looking closely", 3, 5)
        while "looking closely, 3 of 5, 0 s" not in heard:
            said.clear()
            said.wait()
    assert heard[0] == "searching, 0 of 4, 0 s"


def test_a_short_task_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with printing.progress_bar("searching", 4) as advance:
        advance()
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif("NUMBA_DISABLE_JIT" in os.environ, reason="nothing is compiled")
def test_what_is_asked_for_is_compiled_once_and_said(folder: Path) -> None:
    def compiled() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "weft.cli.main", "compare", *PROFILED, "-p", "fifo,fair"],
            env=os.environ | {"NUMBA_CACHE_DIR": str(folder / "kept")}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return [line for line in done.stderr.splitlines() if line.startswith("compiling")]

    assert compiled() == [f"compiling {loop} (once; it is kept)" for loop in ("in_order.order", "replay.replay")]
    assert compiled() == []


# Completion


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("weft sus", {"sustain"}),
        ("weft simulate --policy layerw", {"layerweaver", "layerweaver+"}),
        ("weft compare --models resnet50,bert-b", {"resnet50,bert-base"}),
        ("weft compare --device tpu", {"tpuv3-like"}),
        ("weft map --soc xav", {"xavier-agx"}),
    ],
)
def test_a_shell_completes_commands_and_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, found: set[str]
) -> None:
    for name, value in completing(words).items():
        monkeypatch.setenv(name, value)
    assert set(run(capsys).out.split()) == found


def test_a_shell_that_asks_the_command_itself_gets_the_same() -> None:
    asked = os.environ | completing("weft sus")
    done = subprocess.run(
        [sys.executable, "-m", "weft.cli.main"], env=asked, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["sustain"]


def completing(words: str) -> dict[str, str]:
    """What bash tells a program that is to complete the last of some words."""
    return {"_WEFT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}


# Ctrl-C


@pytest.mark.parametrize("module", ["typer", "weft.cli.common", "weft.cli.compare", "numpy", "numba", "pydantic"])
def test_ctrl_c_while_something_is_imported_is_one_line(module: str) -> None:
    code = f"""
import sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from weft.cli.main import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", "-m", "resnet18"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (INTERRUPTED, "weft: interrupted\n")


@pytest.mark.parametrize("gone", ["stdout", "stderr"])
def test_ctrl_c_with_nobody_reading_is_no_more_than_that_line(gone: str) -> None:
    code = """
import sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "weft.cli.compare":
            sys.stdout.write("half a table")
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from weft.cli.main import main
main()
"""
    reader, writer = os.pipe()
    os.close(reader)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {gone: writer}
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", "-m", "resnet18"],
        env=os.environ | {"PYTHONUNBUFFERED": ""}, **streams, text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    heard = (None, "weft: interrupted\n") if gone == "stdout" else ("half a table", None)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, *heard)


def test_importing_the_entry_point_imports_nothing_slow() -> None:
    code = "import sys; before = set(sys.modules); import weft.cli.main; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = {name.partition(".")[0] for name in done.stdout.split()}
    assert not rooms & {"typer", "rich", "numpy", "pydantic", "numba", "onnx"}
    assert {name for name in done.stdout.split() if name.startswith("weft")} == {
        "weft", "weft.cli", "weft.cli.main", "weft.base", "weft.base.moved", "weft.base.version",
    }  # fmt: skip


# The words of errors


@pytest.mark.parametrize("names", ["", ",", " , "])
@pytest.mark.parametrize(
    "arguments",
    [("compare", *PROFILED), ("compare", "-w", "w.toml", "--device", "host"), ("sustain", "w.toml")],
)
def test_a_list_that_names_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: tuple[str, ...], names: str
) -> None:
    assert f"--policies {names!r} names nothing; leave it out" in refused(capsys, *arguments, "-p", names)


@pytest.mark.parametrize(
    ("arguments", "text", "said"),
    [
        (["--max-lag", "3"], "max_lag = 3.0 is much", "--max-lag 3.0 is much"),
        (["--max-lag", "3"], "max lag = 3.0: no", "--max-lag 3.0: no"),
        (["--max-lag", "3"], "x.toml: max lag = 3.0: no", "x.toml: max lag = 3.0: no"),
        (["--batch", "3"], "p.json: batch is missing", "p.json: batch is missing"),
        (["--batch", "3"], "a.onnx: give data, or leave out batch = 3", "a.onnx: give data, or leave out --batch 3"),
        (["--spill"], "spill = True is for npus", "--spill is for npus"),
        (["--seq-len", "3"], "bert: seq_len must be less", "bert: --seq-len must be less"),
        (["--batch", "3"], "batch has 2 parts", "--batch has 2 parts"),
        (["--batch", "3"], "a batch is full", "a batch is full"),
        (["-n", "3"], "w.toml: stream.0.queries = 3: no", "w.toml: stream.0.queries = 3: no"),
        (["-n", "3"], "seq_len = 3: no", "seq_len = 3: no"),
        (["-n", "3"], "options: queries = 3: no", "--queries 3: no"),
        (["--cost", "x"], "unknown cost model 'x'; known: y", "--cost: unknown cost model 'x'; known: y"),
        (["--seq-len", "3"], "--batch is in the way of seq_len", "--batch is in the way of seq_len"),
    ],
)
def test_an_error_names_the_option_that_was_typed(arguments: list[str], text: str, said: str) -> None:
    with LEAVES["simulate"].make_context("simulate", arguments) as context:
        assert in_options(text, context) == said


@pytest.mark.parametrize(
    "text",
    [
        "/data/seq_len/model.onnx: no such file",
        "seq_len/model.onnx: no such file",
        r"C:\seq_len: no such file",
        "input 'seq_len' differs",
        'input "seq_len" differs',
        "`seq_len` differs",
        "stream.seq_len differs",
        "layer json_file differs",
    ],
)
def test_an_error_names_paths_and_keys_as_they_are(text: str) -> None:
    with LEAVES["simulate"].make_context("simulate", ["--seq-len", "3", "--json", "x.json"]) as context:
        assert in_options(text, context) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/d/memory_cap/a.onnx: no such file", "/d/memory_cap/a.onnx: no such file"),
        ("layer json_file differs", "layer json_file differs"),
        ("it goes with memory_cap_bytes", "it goes with --memory-cap"),
        ("a.onnx: it differs (check = False takes it)", "a.onnx: it differs (--no-check takes it)"),
        ("islands = True runs it", "--islands runs it"),
    ],
)
def test_a_plan_names_options_that_would_be_a_way_out_and_no_paths(text: str, said: str) -> None:
    context = LEAVES["stitch"].make_context("stitch", ["a.onnx", "-o", "b.onnx"])
    with pytest.raises(InputError) as told, told_in_options(context):
        raise InputError(text)
    assert str(told.value) == said


def test_what_a_file_says_is_not_told_as_an_option(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "w.toml").write_text(WORKLOAD.replace("duration_s = 0.3", "duration_s = 0"))
    assert "w.toml: duration_s = 0" in refused(capsys, "bench", "w.toml", "--duration", "5")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("map", "--soc", "xavier", "-m", "googlenet", "--energy-budget", "-1"), "--energy-budget -1.0: Input"),
        (("explore", "npu", "-m", "resnet18", "--bandwidth", "-1"), "--bandwidth -1.0: Input"),
        (("serve", "resnet50", "--http-port", "99999"), "--http-port 99999: Input"),
        (("bench", "-s", "m:rate=1", "--duration", "0"), "--duration 0.0: Input"),
        (("sustain", "w.toml", "--seeds", "0"), "--seeds 0 must be at least 1"),
        (("sustain", "w.toml", "-j", "-1"), "--processes -1 must be at least 1"),
        (("models", "show", "resnet18", "--exits", "0"), "--exits 0 must be at least 1"),
        (("profile", "resnet18", "-d", "host", "--lanes", "0"), "--lanes 0"),
    ],
)
def test_errors_of_every_part_name_the_option(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, *arguments)


NOWHERE = Path("/proc/weft")
"""A place in a folder that takes no files, not even those of root."""
WRITING = [
    ("plan", "-s", "nobody:rate=1,deadline=1", "-o"),
    ("plan", "-s", "nobody:rate=1,deadline=1", "--json"),
    ("place", "none.toml", "--machines", "none.toml", "-o"),
    ("tune", "nobody", "-o"),
    ("tune", "nobody", "--figure"),
    ("reproduce", "nobody", "-o"),
    ("reproduce", "nobody", "--json"),
    ("models", "generate", "nobody", "-o"),
    ("models", "export", "nobody", "-o"),
    ("stitch", "nobody", "-o"),
    ("profile", "nobody", "-o"),
    ("map", "-m", "nobody", "--html"),
    ("map", "-m", "nobody", "--devices"),
    ("compare", "-m", "nobody", "--json"),
    ("simulate", "-m", "nobody", "--trace"),
    ("sustain", "nobody", "--json"),
    ("bench", "nobody", "--json"),
]
"""Commands that would fail by the names that they are given, if they began."""
ENDINGS = {"--figure": ".png", "--devices": ".csv"}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no such folder here")
@pytest.mark.parametrize("words", WRITING, ids=" ".join)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], folder: Path, words: tuple[str, ...]
) -> None:
    *command, option = words
    suffix = {"stitch": ".onnx", "profile": ".json"}.get(command[0], ENDINGS.get(option, ""))
    place = NOWHERE.with_suffix(suffix)
    long = {"-o": "--output"}.get(option, option)
    assert refused(capsys, *command, option, str(place)).startswith(f"weft: {long} {place}: cannot write: ")


def test_a_comparison_that_is_cut_short_says_so(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "gpu.toml").write_text('[[stream]]\nmodel = "resnet50-b1"\nrate = 100\ndeadline_ms = 20\n')
    code, shown, _ = run(capsys, "compare", "-w", "gpu.toml", "-d", "h200", "-p", "fifo,edf", "--segments", "300")
    assert code == 0 and "the first 0.5 of 10 s" in " ".join(shown.split())
    assert "cut short at --segments 300; 6000 are all of the workload" in shown


@pytest.mark.parametrize(
    ("function", "arguments", "last_words"),
    [
        ("weft.planning.planning_run.make_plan", ("plan", "w.toml"), "weft: interrupted\n"),
        ("weft_tune.tuning_run.carry_out", ("tune", "lenet"), "weft: stopped before the search began\n"),
    ],
)
def test_a_job_manager_that_ends_long_work_is_obeyed_like_control_c(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    arguments: tuple[str, ...],
    last_words: str,
) -> None:
    monkeypatch.setattr(function, lambda *given, **named: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda *given: pytest.fail("SIGTERM reached somebody else"))
    try:
        assert run(capsys, *arguments) == (INTERRUPTED, "", last_words)
    finally:
        signal.signal(signal.SIGTERM, before)

"""Scores from commands: what is read, what is refused, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.base.errors import EvaluationError, TuneError
from weft_tune.command_evaluator import ERROR_CHARACTERS, TAIL_BYTES, CommandEvaluator
from weft_tune.evaluation import Score
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import EXP, FIXED

COARSE = Configuration({"conv1.weight": FIXED(4, -1), "conv1.input": EXP(3)})
FINE = Configuration({"conv1.weight": FIXED(8, -1)})
SCORE = "Accuracy: (.*)"
PATIENCE_S = 600
"""After that something that should have ended has not; nothing here is meant to come near it."""


def score(command: str, configuration: Configuration = COARSE, **options: object) -> float:
    return CommandEvaluator(command, SCORE, **options).evaluate(configuration, "full").value  # type: ignore[arg-type]


def failure(command: str, **options: object) -> EvaluationError:
    with pytest.raises(EvaluationError) as caught:
        score(command, **options)
    return caught.value


def gone(pid: int) -> bool:
    """Whether a process ends; one that waits to be reaped has ended."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


def written(path: Path) -> str:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text()
        time.sleep(0.01)
    raise AssertionError(f"nothing wrote {path}")


def test_the_command_finds_the_configuration_in_the_file_it_is_given(tmp_path: Path) -> None:
    assert score("cp {config} seen.txt; echo Accuracy: 0.5", cwd=tmp_path) == 0.5
    assert (tmp_path / "seen.txt").read_text() == "conv1.input EXP 3 1\nconv1.weight FIXED 4 -1\n"


def test_a_folder_with_a_blank_and_a_quote_in_its_name_is_no_obstacle(tmp_path: Path) -> None:
    odd = tmp_path / "a b's"
    odd.mkdir()
    code = f"import tempfile; tempfile.tempdir = {str(odd)!r}\n" + textwrap.dedent(
        f"""
        from weft_tune.numbers.configuration import Configuration
        from weft_tune.command_evaluator import CommandEvaluator
        command = 'test -f {{config}} && echo Accuracy: 1'
        print(CommandEvaluator(command, {SCORE!r}).evaluate(Configuration({{}}), 'full').value)
        """
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "1.0\n"
    assert list(odd.iterdir()) == []


def test_the_last_match_on_either_stream_counts() -> None:
    assert score("echo Accuracy: 0.1; echo Accuracy: 0.7 >&2; echo done; true {config}") == 0.7


def test_pipes_and_braces_of_the_shell_work() -> None:
    assert score("wc -l < {config} | awk '{print \"Accuracy: \" $1}'") == 2.0


def test_the_small_set_has_its_own_command_or_its_word() -> None:
    two = CommandEvaluator("echo Accuracy: 2 {config}", "Accuracy: (.) ", small_command="echo Accuracy: 1 {config}")
    assert [two.evaluate(COARSE, each).value for each in ("small", "full")] == [1.0, 2.0]
    words = CommandEvaluator("test {subset} = small && echo Accuracy: 3 || echo Accuracy: 4; true {config}", SCORE)
    assert [words.evaluate(COARSE, each).value for each in ("small", "full")] == [3.0, 4.0]


@pytest.mark.parametrize(
    ("full", "small", "known"),
    [("a {config}", None, False), ("a {config} {subset}", None, True), ("a {config}", "b {config}", True)],
)
def test_whether_a_command_knows_a_small_set_shows_in_it(full: str, small: str | None, known: bool) -> None:
    assert CommandEvaluator(full, SCORE, small_command=small).knows_small is known


def test_a_failing_command_is_named_with_its_status_and_its_last_words() -> None:
    error = failure("echo one; echo out of memory >&2; exit 3; true {config}")
    assert "ended with status 3; it last said: out of memory" in str(error)
    assert "exit 3" in str(error) and "\n" not in str(error)
    assert error.output == "one\nout of memory\n"


def test_a_command_that_was_killed_says_so() -> None:
    assert "was ended by signal 9; it said nothing" in str(failure("kill -9 $$; true {config}"))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("nothing", "printed nothing that matches 'Accuracy: (.*)'; it last said: nothing"),
        ("Accuracy: 97.1%", "printed the score '97.1%', which is no number; narrow the group"),
        ("Accuracy: nan", "printed the score 'nan'; a score is finite"),
        ("Accuracy: -inf", "printed the score '-inf'; a score is finite"),
    ],
)
def test_what_is_no_score_is_refused(said: str, why: str) -> None:
    assert why in str(failure(f"echo '{said}'; true {{config}}"))


@pytest.mark.parametrize(
    ("command", "pattern", "why"),
    [
        ("python eval.py", SCORE, r"does not say \{config\}"),
        ("eval {config}", "Accuracy: .*", "has no group; put what is the number in parentheses"),
        ("eval {config}", "Accuracy: (", "is no regular expression"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(command: str, pattern: str, why: str) -> None:
    with pytest.raises(TuneError, match=why):
        CommandEvaluator(command, pattern)


def test_a_small_command_without_the_file_is_refused_too() -> None:
    with pytest.raises(TuneError, match=r"'small\.sh' does not say"):
        CommandEvaluator("full.sh {config}", SCORE, small_command="small.sh")


@pytest.mark.parametrize(
    ("options", "why"),
    [({"workers": 0}, "workers = 0"), ({"timeout_s": 0.0}, "timeout_s = 0"), ({"cwd": "no/such"}, "no such folder")],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(TuneError, match=why):
        score("echo {config}", **options)


def test_after_its_time_a_command_is_stopped_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time stands still until the command has begun what must be stopped; then every look at the clock takes 0.2 s."""
    ticks = count(1)
    monkeypatch.setattr(
        "weft_tune.command_evaluator.time",
        SimpleNamespace(monotonic=lambda: 0.2 * next(ticks) if (tmp_path / "go").exists() else 0.0),
    )
    command = "echo loading; sleep 1000 & echo $! > child; echo $$ > self; touch go; wait; true {config}"
    error = failure(command, timeout_s=0.5, cwd=tmp_path)
    assert "was stopped after 0.5 s; it last said: loading" in str(error)
    assert error.output == "loading\n"
    assert all(gone(int((tmp_path / name).read_text())) for name in ("child", "self"))


def test_a_command_that_closed_its_output_is_stopped_after_its_time() -> None:
    assert "was stopped after 0.2 s" in str(failure("exec >&- 2>&-; sleep 1000; true {config}", timeout_s=0.2))


def test_what_a_command_leaves_running_is_stopped_and_not_waited_for(tmp_path: Path) -> None:
    command = "sleep 1000 & echo $! > child; echo Accuracy: 0.25; true {config}"
    assert score(command, cwd=tmp_path) == 0.25
    assert gone(int((tmp_path / "child").read_text()))


def test_endless_talk_fills_neither_the_pipe_nor_the_memory() -> None:
    assert score(f"head -c {8 * TAIL_BYTES} /dev/zero | tr '\\0' x; echo; echo Accuracy: 0.75; true {{config}}") == 0.75
    error = failure(f"head -c {8 * TAIL_BYTES} /dev/zero | tr '\\0' y; exit 1; true {{config}}")
    assert error.output == "y" * ERROR_CHARACTERS


def test_bytes_that_are_no_text_do_not_hide_the_score() -> None:
    assert score("printf '\\377\\376\\nAccuracy: 0.5\\n'; true {config}") == 0.5


def test_many_run_side_by_side_and_failures_keep_their_place(tmp_path: Path) -> None:
    """Each waits until the other has begun, so one after another they would never end."""
    command = (
        "n=$(wc -c < {config}); touch began$n; while [ $(ls | grep -c began) -lt 2 ]; do sleep 0.01; done; "
        "[ $n -gt 30 ] && echo Accuracy: $n"
    )
    evaluator = CommandEvaluator(command, SCORE, workers=2, timeout_s=PATIENCE_S, cwd=tmp_path)
    told: list[tuple[int, Score]] = []
    bad, good = evaluator.evaluate_many([FINE, COARSE], "full", lambda place, each: told.append((place, each)))
    assert isinstance(bad, EvaluationError) and "status 1" in str(bad)
    assert good == Score(float(len(COARSE.text)))
    assert told == [(1, good)]


def test_no_configuration_takes_no_command() -> None:
    assert CommandEvaluator("exit 1; {config}", SCORE).evaluate_many([], "full") == []


def test_closing_stops_what_runs_and_starts_nothing_more(tmp_path: Path) -> None:
    evaluator = CommandEvaluator("echo $$ > pid; exec sleep 1000; true {config}", SCORE, cwd=tmp_path)
    failed: list[EvaluationError] = []

    def run() -> None:
        with pytest.raises(EvaluationError) as caught:
            evaluator.evaluate(COARSE, "full")
        failed.append(caught.value)

    thread = threading.Thread(target=run)
    thread.start()
    pid = int(written(tmp_path / "pid"))
    evaluator.close()
    thread.join(PATIENCE_S)
    assert "was ended by signal 9" in str(failed[0])
    assert gone(pid)
    with pytest.raises(EvaluationError, match="closed"):
        evaluator.evaluate(COARSE, "full")


def interrupted(code: str, folder: Path) -> int:
    """Run a program, stop it with Ctrl-C once its command has begun, and see it say so; the command's process."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder / "temporary")},
    )
    try:
        pid = int(written(folder / "pid"))
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE_S)[0] == "stopped\n"
    finally:
        process.kill()
    return pid


@pytest.mark.parametrize("how", ["evaluate(COARSE, 'full')", "evaluate_many([COARSE] * 4, 'full')"])
def test_control_c_stops_the_commands_and_leaves_no_file(tmp_path: Path, how: str) -> None:
    (tmp_path / "temporary").mkdir()
    code = f"""
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background a shell has it ignored
        from weft_tune.numbers.configuration import Configuration
        from weft_tune.command_evaluator import CommandEvaluator
        COARSE = Configuration({{}})
        evaluator = CommandEvaluator("echo $$ > pid; exec sleep 1000; true {{config}}", {SCORE!r}, workers=1)
        try:
            evaluator.{how}
        except KeyboardInterrupt:
            print("stopped")
    """
    assert gone(interrupted(code, tmp_path))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_control_c_that_tears_a_lock_of_pythons_is_heard_all_the_same(tmp_path: Path) -> None:
    """The signal may come when a Condition's lock is taken and the ``with`` that gives it back is not yet entered."""
    code = f"""
        import signal, threading
        from weft_tune.numbers.configuration import Configuration
        from weft_tune.command_evaluator import CommandEvaluator
        enter = threading.Condition.__enter__

        def torn(condition):
            held = enter(condition)
            if threading.get_ident() == threading.main_thread().ident:
                raise KeyboardInterrupt
            return held

        def heard(number, frame):
            threading.Condition.__enter__ = torn
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, heard)
        try:
            CommandEvaluator("echo $$ > pid; exec sleep 1000; true {{config}}", {SCORE!r}).evaluate_many(
                [Configuration({{}})] * 4, "full"
            )
        except KeyboardInterrupt:
            print("stopped")
    """
    (tmp_path / "temporary").mkdir()
    assert gone(interrupted(code, tmp_path))


def test_control_c_that_comes_just_before_the_wait_is_heard_all_the_same(tmp_path: Path) -> None:
    """Such a signal is noted and wakes nobody, as ``interrupt_main`` does."""
    code = f"""
        import _thread, signal, threading, time
        from pathlib import Path
        from weft_tune.numbers.configuration import Configuration
        from weft_tune.command_evaluator import CommandEvaluator

        def interrupt():
            while not Path("pid").exists():
                time.sleep(0.01)
            _thread.interrupt_main()

        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupt).start()
        try:
            CommandEvaluator("echo $$ > pid; exec sleep 1000; true {{config}}", {SCORE!r}).evaluate_many(
                [Configuration({{}})] * 4, "full"
            )
        except KeyboardInterrupt:
            print("stopped")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S
    )
    assert done.stdout == "stopped\n", done.stderr
    assert gone(int((tmp_path / "pid").read_text()))


def test_control_c_while_a_command_is_being_started_leaves_none(tmp_path: Path) -> None:
    """The signal comes when the command exists and nobody has been told of it: nothing of it may stay behind."""
    code = f"""
        import os, signal, subprocess, time
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from weft_tune.numbers.configuration import Configuration
        from weft_tune.command_evaluator import CommandEvaluator

        class Popen(subprocess.Popen):
            def __init__(self, *args, **settings):
                super().__init__(*args, **settings)
                with open("pid", "w") as file:
                    file.write(str(self.pid))
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)  # the main thread may hear of it here, if this is the main thread

        subprocess.Popen = Popen
        try:
            CommandEvaluator("exec sleep 1000; true {{config}}", {SCORE!r}).evaluate(Configuration({{}}), "full")
        except KeyboardInterrupt:
            print("stopped")
    """
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert said.stdout == "stopped\n"
    assert gone(int((tmp_path / "pid").read_text()))


def test_the_fingerprint_tells_commands_expressions_and_folders_apart(tmp_path: Path) -> None:
    made = [
        CommandEvaluator("a {config}", SCORE),
        CommandEvaluator("b {config}", SCORE),
        CommandEvaluator("a {config}", SCORE, small_command="b {config}"),
        CommandEvaluator("a {config}", "(.*)"),
        CommandEvaluator("a {config}", SCORE, cwd=tmp_path),
    ]
    assert len({each.fingerprint for each in made}) == len(made)
    assert CommandEvaluator("a {config}", SCORE, workers=2, timeout_s=9).fingerprint == made[0].fingerprint

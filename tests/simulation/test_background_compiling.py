"""Compiling in a process that outlives the command that wanted it."""

import os
import time
from pathlib import Path

import pytest

from weft.base.child_processes import start_detached
from weft.kernels import request_loop
from weft.simulation.requests import compiled
from weft.simulation.requests.compiled import compile_in_background, compile_once


def test_a_detached_process_runs_the_function_in_a_session_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "detached_work.py").write_text(
        "import os\n\ndef write():\n    open(os.environ['WORK'] + '.draft', 'w').write(str(os.getsid(0)))\n"
        "    os.rename(os.environ['WORK'] + '.draft', os.environ['WORK'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WORK", str(tmp_path / "done"))
    import detached_work  # type: ignore[import-not-found]  # written above

    process_id = start_detached(detached_work.write)
    ends_s = time.monotonic() + 60
    while not (tmp_path / "done").exists() and time.monotonic() < ends_s:
        time.sleep(0.02)
    assert int((tmp_path / "done").read_text()) == process_id != os.getsid(0)


def test_nothing_is_started_for_a_loop_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(compiled, "start_detached", started.append)
    monkeypatch.setattr(request_loop, "is_compiled", lambda: True)
    assert not compile_in_background()
    monkeypatch.setattr(request_loop, "is_compiled", lambda: False)
    assert compile_in_background()
    assert started == [compile_once]


def test_only_one_process_compiles_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    def compile_and_try_again() -> None:
        runs.append(len(runs))
        if len(runs) == 1:
            compile_once()  # as another process would, which finds the lock taken

    monkeypatch.setattr(os, "nice", lambda more: 0)  # this process goes on after the test
    monkeypatch.setattr(compiled, "cache_folder", lambda loop: tmp_path / "new")
    monkeypatch.setattr(compiled, "compile_loop", compile_and_try_again)
    compile_once()
    assert runs == [0]
    compile_once()
    assert runs == [0, 1]

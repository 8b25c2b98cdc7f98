"""Several processes: the same scores, nothing left behind, and a clear word when one of them dies."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.tuning.onnx_nets import chain, nearly_right, samples, save
from weft.base.errors import EvaluationError, TuneError
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import FIXED
from weft_tune.quantised.evaluator import OnnxEvaluator
from weft_tune.quantised.opened import find_targets
from weft_tune.quantised.runner import SampleOrder

COUNT = 500
CONFIGURATIONS = [
    Configuration({"conv1.weight": FIXED(bits, 1), "conv2.input": FIXED(3), "fc.weight": FIXED(bits + 1, 2)})
    for bits in (2, 3, 4)
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    model = chain()
    path = save(model, tmp_path_factory.mktemp("net"))
    inputs = samples(model, COUNT)
    return path, inputs, nearly_right(model, inputs), find_targets(path, inputs)


FLOATS = Configuration({})
"""Nothing to round: a process that only runs this is ready sooner."""


@pytest.fixture(scope="module")
def side_by_side(made):
    with OnnxEvaluator(*made, workers=2) as found:
        yield found


def alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_scores_bounds_and_counts_do_not_depend_on_the_number_of_processes(made, side_by_side):
    with OnnxEvaluator(*made) as alone:
        for configuration in CONFIGURATIONS:
            for subset in ("small", "full"):
                for needed in (0.0, 0.5, 0.8, 0.95):
                    assert side_by_side.evaluate(configuration, subset, needed) == alone.evaluate(
                        configuration, subset, needed
                    )
        inputs, labels = {"x": made[1]["x"][:77]}, made[2][:77]
        assert side_by_side.measure(CONFIGURATIONS[0], inputs, labels) == alone.measure(
            CONFIGURATIONS[0], inputs, labels
        )


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_killed_process_is_reported_and_replaced(made, side_by_side):
    before = side_by_side.measure(FLOATS, *made[1:3])
    first, second = side_by_side.process_ids
    os.kill(second, signal.SIGKILL)
    with pytest.raises(EvaluationError, match="a worker process was ended by signal 9; if memory ran out, use fewer"):
        side_by_side.measure(FLOATS, *made[1:3])
    assert not alive(first) and not alive(second)
    assert side_by_side.measure(FLOATS, *made[1:3]) == before
    assert not {first, second} & set(side_by_side.process_ids)


SCRIPT = """
import sys, pickle, signal
from weft_tune.numbers.configuration import Configuration
from weft_tune.quantised.evaluator import OnnxEvaluator

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
# no guard around the script's own work, as people write it
made = pickle.load(open(sys.argv[1], "rb"))
evaluator = OnnxEvaluator(*made, workers=2)
evaluator.evaluate(Configuration({}), "full")
try:
    print(*evaluator.process_ids, flush=True)
    while True:
        evaluator.measure(Configuration({}), *made[1:3])
except KeyboardInterrupt:
    evaluator.close()
    print("interrupted", *evaluator.process_ids, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupted_search_leaves_no_process(made, tmp_path):
    (tmp_path / "made.pickle").write_bytes(pickle.dumps(made))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "made.pickle")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        ids = [int(word) for word in process.stdout.readline().split()]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of them get it
        assert process.stdout.read() == "interrupted\n"
        assert process.wait() == 0
    assert len(ids) == 2 and not any(map(alive, ids))


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_a_process_that_cannot_start_says_why(made, tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho Traceback >&2\necho 'ModuleNotFoundError: weft' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with (
        OnnxEvaluator(*made, workers=2) as evaluator,
        pytest.raises(
            EvaluationError, match="a worker process was ended with code 3; ModuleNotFoundError: weft"
        ) as caught,
    ):
        evaluator.evaluate(CONFIGURATIONS[0], "full")
    assert "Traceback" in caught.value.output and evaluator.process_ids == []


def test_too_little_room_is_told(made, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with (
        OnnxEvaluator(*made, workers=2) as evaluator,
        pytest.raises(TuneError, match=r"cannot start worker processes: .*No such file.*; set TMPDIR to a folder"),
    ):
        evaluator.evaluate(CONFIGURATIONS[0], "full")


def test_what_fails_inside_a_process_is_an_error_here(made, side_by_side):
    side_by_side.measure(FLOATS, *made[1:3])
    engine = side_by_side._runner
    engine.add("beyond", SampleOrder(made[1], np.full(COUNT, 10**6)))
    with pytest.raises(EvaluationError, match="IndexError") as caught:
        engine.run("beyond", side_by_side._formats(FLOATS), [0, 1])
    assert "Traceback" in caught.value.output
    engine.drop("beyond")
    assert side_by_side.measure(FLOATS, *made[1:3]) == 0.9


def test_processes_end_when_nobody_needs_them_and_their_files_go(made, side_by_side):
    side_by_side.measure(FLOATS, *made[1:3])
    ids, folder = side_by_side.process_ids, Path(side_by_side._runner._folder.name)
    assert len(ids) == 2 and all(map(alive, ids)) and folder.is_dir()
    worker = side_by_side._runner._workers[0]
    worker._input.close()  # as when this process is killed
    assert worker.wait() == 0
    side_by_side.close()
    side_by_side.close()
    assert not any(map(alive, ids)) and not folder.exists()

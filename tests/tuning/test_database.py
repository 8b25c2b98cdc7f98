"""Scores on disk."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.base.errors import EvaluationError, TuneError
from weft_tune import evaluation
from weft_tune.evaluation import Database, Score, open_database
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import FIXED

ONE, TWO = Configuration({"a.weight": FIXED(4)}), Configuration({"a.weight": FIXED(5)})


def test_what_is_kept_is_found_again_by_another_process(tmp_path: Path):
    path = tmp_path / "scores.db"
    with Database(path) as first:
        first.keep("net", "full", ONE, -math.inf, Score(0.1 + 0.2, True, 77))
        with Database(path) as second:
            assert second.find("net", "full", ONE) == Score(0.1 + 0.2, True, 77)
            assert second.find("net", "small", ONE) is None
            assert second.find("other", "full", ONE) is None
            assert second.find("net", "full", TWO) is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["scores.db"]


def test_the_same_question_has_the_same_answer_others_any_that_decides():
    with Database() as scores:
        scores.keep("net", "full", ONE, 0.9, Score(0.85, False, 10))
        scores.keep("net", "full", ONE, 0.7, Score(0.65, False, 50))
        assert scores.find("net", "full", ONE, 0.9) == Score(0.85, False, 10)
        assert scores.find("net", "full", ONE, 0.8) == Score(0.65, False, 50)
        assert scores.find("net", "full", ONE, 0.65) is None
        assert scores.find("net", "full", ONE) is None
        scores.keep("net", "full", ONE, 0.6, Score(0.61, True, 99))
        assert scores.find("net", "full", ONE) == Score(0.61, True, 99)
        assert scores.find("net", "full", ONE, 0.9) == Score(0.85, False, 10)
        assert len(scores) == 3


def test_failures_are_kept_with_their_output():
    with Database() as scores:
        scores.keep("net", "full", ONE, 0.5, EvaluationError("ended with 1", "Traceback ..."))
        found = scores.find("net", "full", ONE, 0.5)
        assert isinstance(found, EvaluationError)
        assert (str(found), found.output) == ("ended with 1", "Traceback ...")
        assert scores.find("net", "full", ONE, 0.4) is None


def test_an_open_database_stays_open():
    with Database() as scores:
        with open_database(scores) as same:
            assert same is scores
        assert len(scores) == 0


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to be mistaken for one\n" * 30, "utf-8")
    with pytest.raises(TuneError, match=r"notes.txt: cannot keep scores there: file is not a database"):
        Database(text)
    foreign = tmp_path / "other.db"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE books (title)")
    connection.commit()
    connection.close()
    before = foreign.read_bytes()
    with pytest.raises(TuneError, match="a database of another program"):
        Database(foreign)
    assert foreign.read_bytes() == before
    with pytest.raises(TuneError, match="unable to open"):
        Database(tmp_path / "missing" / "scores.db")


def test_a_newer_file_is_refused(tmp_path: Path):
    path = tmp_path / "scores.db"
    Database(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(TuneError, match=r"another version of weft \(9\)"):
        Database(path)


def test_a_damaged_file_is_named(tmp_path: Path):
    path = tmp_path / "scores.db"
    with Database(path) as scores:
        for number in range(200):
            scores.keep("net", "full", Configuration({f"layer{number}.weight": FIXED(4)}), 0.0, Score(0.5))
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(bytes(data))
    with pytest.raises(TuneError, match=r"scores.db: cannot keep scores there: .*malformed"), Database(path) as scores:
        scores.find("net", "full", ONE)


WRITER = """
import sys
from pathlib import Path
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import FIXED
from weft_tune.evaluation import Database
from weft_tune.evaluation import Score
with Database(Path(sys.argv[1])) as scores:
    for bits in range(2, 33):
        scores.keep(sys.argv[2], "full", Configuration({"a.weight": FIXED(bits)}), 0.0, Score(bits / 32))
"""


def test_processes_write_side_by_side(tmp_path: Path):
    path = tmp_path / "scores.db"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), f"net{number}"]) for number in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    with Database(path) as scores:
        assert len(scores) == 3 * 31


def test_a_process_that_is_opening_the_same_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The other one has begun when this one turns to its log, and is done as soon as this one waits."""
    other = sqlite3.connect(tmp_path / "scores.db", isolation_level=None)

    class Met(sqlite3.Connection):
        def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
            if "WAL" in statement and not waited:
                other.execute("BEGIN IMMEDIATE")
            return super().execute(statement, *values)

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        other.execute("COMMIT")

    waited: list[float] = []
    monkeypatch.setattr(evaluation.sqlite3, "connect", partial(sqlite3.connect, factory=Met))
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    with Database(tmp_path / "scores.db") as scores:
        scores.keep("net", "full", ONE, 0.0, Score(0.5))
    other.close()
    assert len(waited) == 1

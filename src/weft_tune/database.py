"""Scores that outlive the process: a search that was interrupted takes them from here and goes on.

One row per evaluation, committed at once. The key holds what the evaluation was asked for (``needed``), so that a
search that is repeated meets the same answers in the same order, bounds included.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from weft.base.errors import EvaluationError, TuneError
from weft_tune.evaluation import Score, Subset
from weft_tune.numbers.configuration import Configuration

APPLICATION = 0x77656674
"""Marks our files, in the header of SQLite's."""
VERSION = 1
WAIT_S = 60.0
"""How long to wait for another process that writes."""
_LOOK_S = 0.01
"""How often a file that another process is opening is tried again."""

_TABLE = """
CREATE TABLE IF NOT EXISTS scores (
    evaluator TEXT NOT NULL, subset TEXT NOT NULL, configuration TEXT NOT NULL, needed REAL NOT NULL,
    value REAL NOT NULL, exact INTEGER NOT NULL, samples INTEGER NOT NULL, failure TEXT, output TEXT,
    PRIMARY KEY (evaluator, subset, configuration, needed)
) WITHOUT ROWID
"""
_FIND = """
SELECT value, exact, samples, failure, output FROM scores
WHERE evaluator = ? AND subset = ? AND configuration = ?
  AND (needed = ? OR (failure IS NULL AND (exact OR value < ?)))
ORDER BY needed = ? DESC, exact DESC, needed LIMIT 1
"""


class Database:
    """Scores by evaluator, subset and configuration; on disk, or only in memory without a path."""

    def __init__(self, path: Path | None = None) -> None:
        self._where = str(path) if path else "the scores in memory"
        with self._told():
            self._connection = sqlite3.connect(path or ":memory:", timeout=WAIT_S, isolation_level=None)
        try:
            with self._told():
                self._open()
        except TuneError:
            self._connection.close()
            raise

    def find(
        self, evaluator: str, subset: Subset, configuration: Configuration, needed: float = -math.inf
    ) -> Score | EvaluationError | None:
        """What is known of a configuration: the answer to the same question, else any that decides it."""
        key = (evaluator, subset, configuration.text)
        with self._told():
            row = self._connection.execute(_FIND, (*key, needed, needed, needed)).fetchone()
        if row is None:
            return None
        value, exact, samples, failure, output = row
        return EvaluationError(failure, output or "") if failure is not None else Score(value, bool(exact), samples)

    def keep(
        self,
        evaluator: str,
        subset: Subset,
        configuration: Configuration,
        needed: float,
        found: Score | EvaluationError,
    ) -> None:
        """Remember an answer; it is on disk when this returns."""
        row: tuple[float, int, int, str | None, str | None]
        if isinstance(found, EvaluationError):
            row = (-math.inf, 1, 0, str(found), found.output)
        else:
            row = (float(found.value), int(found.exact), int(found.samples), None, None)
        with self._told():
            self._connection.execute(
                "INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (evaluator, subset, configuration.text, needed, *row),
            )

    def __len__(self) -> int:
        with self._told():
            return int(self._connection.execute("SELECT count(*) FROM scores").fetchone()[0])

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        ask = self._connection.execute
        ask("BEGIN IMMEDIATE")
        tables = int(ask("SELECT count(*) FROM sqlite_master").fetchone()[0])
        mark, version = (int(ask(f"PRAGMA {name}").fetchone()[0]) for name in ("application_id", "user_version"))
        if tables and mark != APPLICATION:
            raise TuneError(f"{self._where}: a database of another program; give the scores a file of their own")
        if tables and version != VERSION:
            raise TuneError(f"{self._where}: scores of another version of weft ({version}); give another file")
        ask(_TABLE)
        ask(f"PRAGMA application_id = {APPLICATION}")
        ask(f"PRAGMA user_version = {VERSION}")
        ask("COMMIT")
        self._log_ahead()
        ask("PRAGMA synchronous = NORMAL")

    def _log_ahead(self) -> None:
        """Have commits cost microseconds and survive the end of the process.

        This is the one statement for which SQLite itself does not wait while another process opens the file, too.
        """
        until_s = time.monotonic() + WAIT_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until_s:
                    raise
            time.sleep(_LOOK_S)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise TuneError(
                f"{self._where}: cannot keep scores there: {error}; remove the file or give another"
            ) from error


@contextmanager
def opened(given: Path | Database | None) -> Iterator[Database]:
    """A database for a while; one that was open before stays open."""
    if isinstance(given, Database):
        yield given
        return
    with Database(given) as made:
        yield made

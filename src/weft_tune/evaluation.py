"""Scoring configurations: the protocol between the search and the runtime of a network, and scores from a function.

Other evaluators are ``command_evaluator``, for any command line, and ``quantised.evaluator``, for ONNX models. Scores
outlive the process in a ``Database``: a search that was interrupted takes them from there and continues.
"""

from __future__ import annotations

import math
import sqlite3
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, Self

from weft.base.errors import EvaluationError, TuneError
from weft_tune.numbers.configuration import Configuration

Subset = Literal["small", "full"]
"""The labelled samples that are scored: the small set of the first pass, or all samples."""


class Score(NamedTuple):
    """The accuracy of a network under a configuration; higher is better."""

    value: float
    """The score; an upper bound of the score if *exact* is false."""
    exact: bool = True
    samples: int = 0
    """Number of samples that were evaluated; 0 if the evaluator does not count them."""


OnScore = Callable[[int, Score], None]
"""Called with the position of a configuration and its score as soon as that is known."""


class Evaluator(Protocol):
    """Scores a network under configurations; the same configuration and subset must always give the same score."""

    @property
    def fingerprint(self) -> str:
        """Text that changes with everything that scores depend on except the configuration: model, data, metric.

        A key of the database.
        """
        ...

    @property
    def stops_early(self) -> bool:
        """Whether ``needed`` saves work; if not, many configurations in one call are faster than single ones."""
        ...

    def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
        """Score a configuration; if the score is below *needed*, an upper bound below *needed* may be returned instead.

        Raises ``EvaluationError`` if the configuration cannot be scored.
        """
        ...

    def evaluate_many(
        self, configurations: Sequence[Configuration], subset: Subset, scored: OnScore | None = None
    ) -> list[Score | EvaluationError]:
        """Score all *configurations* exactly, in parallel if that is faster; return scores or failures in their order.

        *scored* is called with every score as soon as it is known.
        """
        ...

    def close(self) -> None:
        """Stop worker processes and running commands."""
        ...


ScoreFunction = Callable[[Configuration, Subset], float]
"""Scores a configuration on the ``"small"`` or ``"full"`` set: higher is better, and the same for the same call."""


class CallableEvaluator:
    """Scores from a Python function, called in up to *workers* threads at a time.

    The database identifies the function by *name*, by default its module and name; give another name when the function
    computes something else than before.
    """

    stops_early = False

    def __init__(self, function: ScoreFunction, *, name: str | None = None, workers: int = 1) -> None:
        if workers < 1:
            raise TuneError(f"workers = {workers}: call the function at least once at a time")
        function_name = getattr(function, "__qualname__", type(function).__qualname__)
        self._name = name if name is not None else f"{getattr(function, '__module__', '')}.{function_name}"
        self._function, self._workers = function, workers

    @property
    def fingerprint(self) -> str:
        return f"callable-{self._name}"

    def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
        """Call the function once; an exception of it becomes an ``EvaluationError`` that carries the traceback."""
        try:
            value = float(self._function(configuration, subset))
        except EvaluationError:
            raise
        except Exception as error:
            text = str(error).splitlines()
            why = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
            raise EvaluationError(f"{self._name} failed: {why}", traceback.format_exc()) from error
        if not math.isfinite(value):
            raise EvaluationError(f"{self._name} returned {value}; a score is finite")
        return Score(value)

    def evaluate_many(
        self, configurations: Sequence[Configuration], subset: Subset, scored: OnScore | None = None
    ) -> list[Score | EvaluationError]:
        """Score one after another, or in threads; *scored* as in ``Evaluator``."""

        def attempt(configuration: Configuration) -> Score | EvaluationError:
            try:
                return self.evaluate(configuration, subset)
            except EvaluationError as error:
                return error

        def publish(index: int, outcome: Score | EvaluationError) -> Score | EvaluationError:
            if isinstance(outcome, Score) and scored is not None:
                scored(index, outcome)
            return outcome

        if self._workers == 1:  # in this thread: some frameworks work in the main thread only
            return [publish(index, attempt(configuration)) for index, configuration in enumerate(configurations)]
        with ThreadPoolExecutor(self._workers, "weft-callable") as pool:
            jobs = {pool.submit(attempt, configuration): index for index, configuration in enumerate(configurations)}
            try:
                for job in as_completed(jobs):
                    publish(jobs[job], job.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [job.result() for job in jobs]

    def close(self) -> None:
        """Do nothing: no process was started."""


APPLICATION = 0x77656674
"""The ``application_id`` in the header of the SQLite file: "weft" in ASCII."""
VERSION = 1
"""Version of the table; a file of another version is refused."""
WAIT_S = 60.0
"""Timeout for the lock while another process writes."""
_RETRY_S = 0.01
"""Pause between two attempts to switch on the write-ahead log while another process opens the file."""

_TABLE = """
CREATE TABLE IF NOT EXISTS scores (
    evaluator TEXT NOT NULL, subset TEXT NOT NULL, configuration TEXT NOT NULL, needed REAL NOT NULL,
    value REAL NOT NULL, exact INTEGER NOT NULL, samples INTEGER NOT NULL, failure TEXT, output TEXT,
    PRIMARY KEY (evaluator, subset, configuration, needed)
) WITHOUT ROWID
"""
# First the row with the same *needed*; else an exact score, or an upper bound below *needed*, which decides it, too.
_FIND = """
SELECT value, exact, samples, failure, output FROM scores
WHERE evaluator = ? AND subset = ? AND configuration = ?
  AND (needed = ? OR (failure IS NULL AND (exact OR value < ?)))
ORDER BY needed = ? DESC, exact DESC, needed LIMIT 1
"""


class Database:
    """A store of scores by evaluator, subset and configuration, in an SQLite file; without a path, in memory.

    There is one row per evaluation, committed at once. The key contains the argument *needed* of the evaluation, so
    that a repeated search gets the same scores and bounds in the same order. Use it from one thread.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._where = str(path) if path else "the scores in memory"  # for messages
        with self._translate_errors():
            self._connection = sqlite3.connect(path or ":memory:", timeout=WAIT_S, isolation_level=None)
        try:
            with self._translate_errors():
                self._open()
        except TuneError:
            self._connection.close()
            raise

    def find(
        self, evaluator: str, subset: Subset, configuration: Configuration, needed: float = -math.inf
    ) -> Score | EvaluationError | None:
        """Look up an outcome: that with the same *needed*, else any that tells whether *needed* is reached, else None.

        evaluator: its fingerprint.
        """
        key = (evaluator, subset, configuration.text)
        with self._translate_errors():
            # the statement names *needed* three times
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
        outcome: Score | EvaluationError,
    ) -> None:
        """Store an outcome; it is on disk when this returns."""
        row: tuple[float, int, int, str | None, str | None]  # value, exact, samples, failure, output
        if isinstance(outcome, EvaluationError):
            row = (-math.inf, 1, 0, str(outcome), outcome.output)
        else:
            row = (float(outcome.value), int(outcome.exact), int(outcome.samples), None, None)
        with self._translate_errors():
            self._connection.execute(
                "INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (evaluator, subset, configuration.text, needed, *row),
            )

    def score(
        self, evaluator: Evaluator, subset: Subset, configuration: Configuration, needed: float = -math.inf
    ) -> Score:
        """Return the stored score, or evaluate and store it; a stored failure is evaluated again."""
        stored = self.find(evaluator.fingerprint, subset, configuration, needed)
        if isinstance(stored, Score):
            return stored
        score = evaluator.evaluate(configuration, subset, needed)
        self.keep(evaluator.fingerprint, subset, configuration, needed, score)
        return score

    def __len__(self) -> int:
        with self._translate_errors():
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
        """Check the file, or create the table, in one transaction, because another process may open the file, too."""
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        tables = int(execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        owner, version = (int(execute(f"PRAGMA {name}").fetchone()[0]) for name in ("application_id", "user_version"))
        if tables and owner != APPLICATION:
            raise TuneError(f"{self._where}: a database of another program; give the scores a file of their own")
        if tables and version != VERSION:
            raise TuneError(f"{self._where}: scores of another version of weft ({version}); give another file")
        execute(_TABLE)
        execute(f"PRAGMA application_id = {APPLICATION}")
        execute(f"PRAGMA user_version = {VERSION}")
        execute("COMMIT")
        self._enable_write_ahead_log()
        execute("PRAGMA synchronous = NORMAL")

    def _enable_write_ahead_log(self) -> None:
        """Switch SQLite to a write-ahead log: commits take microseconds and survive the end of the process."""
        until_s = time.monotonic() + WAIT_S
        # SQLite's own timeout does not apply to this statement while another process opens the file, hence the retry.
        # Repeating is safe: the statement sets the mode of the file, and changes nothing if the mode is set already.
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until_s:
                    raise
            time.sleep(_RETRY_S)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise SQLite's errors as TuneError with the path."""
        try:
            yield
        except sqlite3.Error as error:
            raise TuneError(
                f"{self._where}: cannot keep scores there: {error}; remove the file or give another"
            ) from error


@contextmanager
def open_database(database: Path | Database | None) -> Iterator[Database]:
    """Yield an open database: the given one, which stays open, or that of a path, which is closed at the end."""
    if isinstance(database, Database):
        yield database
        return
    with Database(database) as owned:
        yield owned

"""Scoring configurations: the protocol between the search and the runtime of a network, and scores from a function.

Other evaluators are ``command_evaluator``, for any command line, and ``quantised.evaluator``, for ONNX models. Scores
outlive the process in a ``Database``: a search that was interrupted takes them from there and goes on.
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
"""The labelled samples of the first pass, or all of them."""


class Score(NamedTuple):
    """How good a network is under a configuration; higher is better."""

    value: float
    """The score, or, where it is not exact, an upper bound of it."""
    exact: bool = True
    samples: int = 0
    """Samples evaluated for it; 0 where the evaluator does not count them."""


OnScore = Callable[[int, Score], None]
"""Called with the position of a configuration and its score as soon as that is known."""


class Evaluator(Protocol):
    """Runs a network under configurations. Same configuration, same subset: same score."""

    @property
    def fingerprint(self) -> str:
        """Identifies all that scores depend on but the configuration: model, data, measure. A key of the database."""
        ...

    @property
    def stops_early(self) -> bool:
        """Whether ``needed`` saves work; if not, many configurations in one call are faster than single ones."""
        ...

    def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
        """Score a configuration: exactly if the score is at least *needed*, else perhaps with a bound below *needed*.

        Raises ``EvaluationError`` where there is no score.
        """
        ...

    def evaluate_many(
        self, configurations: Sequence[Configuration], subset: Subset, scored: OnScore | None = None
    ) -> list[Score | EvaluationError]:
        """Exact scores in the given order, side by side where that is faster; failures in their place.

        *scored* is called with every score as soon as it is known.
        """
        ...

    def close(self) -> None:
        """Stop worker processes and running commands."""
        ...


ScoreFunction = Callable[[Configuration, Subset], float]
"""Scores a configuration on the ``"small"`` or ``"full"`` set: higher is better, and the same for the same call."""


class CallableEvaluator:
    """Scores from a Python function, so from any framework that can be called, in *workers* threads at a time.

    The database knows it by *name*, by default its module and name: give another one when its computation changes.
    """

    stops_early = False

    def __init__(self, function: ScoreFunction, *, name: str | None = None, workers: int = 1) -> None:
        if workers < 1:
            raise TuneError(f"workers = {workers}: call the function at least once at a time")
        plain = getattr(function, "__qualname__", type(function).__qualname__)
        self._name = name if name is not None else f"{getattr(function, '__module__', '')}.{plain}"
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
        """Score one after another, or in threads."""

        def attempt(configuration: Configuration) -> Score | EvaluationError:
            try:
                return self.evaluate(configuration, subset)
            except EvaluationError as error:
                return error

        def publish(place: int, outcome: Score | EvaluationError) -> Score | EvaluationError:
            if isinstance(outcome, Score) and scored is not None:
                scored(place, outcome)
            return outcome

        if self._workers == 1:  # in this thread: some frameworks work in the main thread only
            return [publish(place, attempt(configuration)) for place, configuration in enumerate(configurations)]
        with ThreadPoolExecutor(self._workers, "weft-callable") as pool:
            jobs = {pool.submit(attempt, configuration): place for place, configuration in enumerate(configurations)}
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
"""Identifies weft's files in the header of SQLite's: "weft" in ASCII."""
VERSION = 1
"""Of the table; a file of another version is refused."""
WAIT_S = 60.0
"""Timeout for the lock of another process that writes."""
_RETRY_S = 0.01
"""Pause before a file that another process is opening is tried again."""

_TABLE = """
CREATE TABLE IF NOT EXISTS scores (
    evaluator TEXT NOT NULL, subset TEXT NOT NULL, configuration TEXT NOT NULL, needed REAL NOT NULL,
    value REAL NOT NULL, exact INTEGER NOT NULL, samples INTEGER NOT NULL, failure TEXT, output TEXT,
    PRIMARY KEY (evaluator, subset, configuration, needed)
) WITHOUT ROWID
"""
# the answer to the same question first; else an exact score, or a bound that is too low for the question
_FIND = """
SELECT value, exact, samples, failure, output FROM scores
WHERE evaluator = ? AND subset = ? AND configuration = ?
  AND (needed = ? OR (failure IS NULL AND (exact OR value < ?)))
ORDER BY needed = ? DESC, exact DESC, needed LIMIT 1
"""


class Database:
    """Scores by evaluator, subset and configuration; on disk, or only in memory without a path.

    One row per evaluation, committed at once. The key contains the score that the evaluation needed to reach
    (``needed``), so that a search that is repeated gets the same answers in the same order, bounds included.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._where = str(path) if path else "the scores in memory"
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
        """Look up the answer to the same question, else any that decides it. *evaluator* is a fingerprint."""
        key = (evaluator, subset, configuration.text)
        with self._translate_errors():
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
        """Store an answer; it is on disk when this returns."""
        row: tuple[float, int, int, str | None, str | None]
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
        """The stored score, else that of the evaluator, which is stored; a stored failure is tried again."""
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
        """Check the file, or make the table; in one transaction, as another process may open the file, too."""
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        tables = int(execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        mark, version = (int(execute(f"PRAGMA {name}").fetchone()[0]) for name in ("application_id", "user_version"))
        if tables and mark != APPLICATION:
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
        """Have commits cost microseconds and survive the end of the process."""
        until_s = time.monotonic() + WAIT_S
        # This is the one statement for which SQLite itself does not wait while another process opens the file, too.
        # Repeating it is safe: it changes the mode of the file, and nothing where that is set already.
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
        try:
            yield
        except sqlite3.Error as error:
            raise TuneError(
                f"{self._where}: cannot keep scores there: {error}; remove the file or give another"
            ) from error


@contextmanager
def open_database(database: Path | Database | None) -> Iterator[Database]:
    """A database for a while; one that was open before stays open."""
    if isinstance(database, Database):
        yield database
        return
    with Database(database) as owned:
        yield owned

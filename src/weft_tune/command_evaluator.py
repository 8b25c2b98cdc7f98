"""Scores from any command line: it takes a configuration file and prints a number that a regular expression extracts.

The command goes to the shell, because people write pipes, ``cd`` and variables; weft puts only a quoted path into it,
of a file that it wrote. A pipe's status is that of its last command: write ``set -o pipefail`` if that matters.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import selectors
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from typing import IO, NamedTuple

from weft.base.errors import EvaluationError, TuneError, reason_of
from weft_tune.evaluation import OnScore, Score, Subset
from weft_tune.numbers.configuration import Configuration

CONFIG, SUBSET = "{config}", "{subset}"
"""Placeholders of the configuration file, and of the word small or full."""
TAIL_BYTES = 1 << 20
"""Bytes of a command's output that are kept, from its end: the score is searched in them."""
ERROR_CHARACTERS = 4000
"""Characters of the output that an error carries, from its end: what fits on a screen or two."""
_POLL_S = 0.05
"""Interval of the checks whether a command whose output stays open has ended, and of a caller's wake-ups."""


class CommandResult(NamedTuple):
    """The end of a command."""

    status: int | None
    """None: it was stopped after its timeout."""
    output: str


class CommandEvaluator:
    """Runs *full_command*, or *small_command* for the small set; ``{config}`` in it is the configuration file's path.

    Without a *small_command* the full one runs for both, with the word small or full in place of ``{subset}``. The
    score is the first group of the last match of *score_regex* in the command's output, standard error included.
    """

    stops_early = False

    def __init__(
        self,
        full_command: str,
        score_regex: str,
        *,
        small_command: str | None = None,
        workers: int = 1,
        timeout_s: float | None = None,
        cwd: str | Path | None = None,
    ) -> None:
        self._commands: dict[Subset, str] = {"full": full_command, "small": small_command or full_command}
        for command in self._commands.values():
            if CONFIG not in command:
                raise TuneError(f"command {command!r} does not say {CONFIG}, where the configuration file's path goes")
        if workers < 1:
            raise TuneError(f"workers = {workers}: run at least one command at a time")
        if timeout_s is not None and not timeout_s > 0:
            raise TuneError(f"timeout_s = {timeout_s}: give seconds above 0")
        self._pattern, self._workers, self._timeout_s = _compile_pattern(score_regex), workers, timeout_s
        self._cwd = Path(cwd or ".").absolute()
        if not self._cwd.is_dir():
            raise TuneError(f"{self._cwd}: there is no such folder to run the command in")
        self._running: set[subprocess.Popen[bytes]] = set()
        # Protects the set above, queues of waiting configurations, and the start of commands: none starts once
        # ``_closed`` is set and the lock was held, so all that ever run are in the set.
        self._lock, self._closed = Lock(), False

    @property
    def knows_small(self) -> bool:
        """Whether the small set differs from the full one; if not, one pass over all samples is enough."""
        return self._commands["small"] != self._commands["full"] or SUBSET in self._commands["full"]

    @property
    def fingerprint(self) -> str:
        """Identifies the commands, the expression and the folder; not the programs and files that commands name."""
        parts = [self._commands["full"], self._commands["small"], self._pattern.pattern, str(self._cwd)]
        return f"command-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}"

    def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
        """Run the command once, in another thread, so that Ctrl-C (in the main thread) cannot interrupt its start."""
        (result,) = self.evaluate_many([configuration], subset)
        if isinstance(result, EvaluationError):
            raise result
        return result

    def _evaluate(self, configuration: Configuration, subset: Subset) -> Score:
        """Write the configuration file, run the command, and read the score; called in a worker thread."""
        command = self._commands[subset]
        with _make_folder() as folder:
            path = Path(folder) / "formats.txt"
            _write_configuration(path, configuration.text)
            line = command.replace(CONFIG, shlex.quote(str(path))).replace(SUBSET, subset)
            return Score(self._extract_score(command, self._run(line)))

    def evaluate_many(
        self, configurations: Sequence[Configuration], subset: Subset, scored: OnScore | None = None
    ) -> list[Score | EvaluationError]:
        """Run up to *workers* commands at a time, in daemon threads; *scored* as in ``Evaluator``.

        The caller waits on a ``SimpleQueue``, which is written in C: Ctrl-C could interrupt a ``Condition`` or a
        ``Future`` between taking its lock and recording that, and then other threads would wait for the lock for ever.
        It waits with a timeout, because a signal just before the wait would not end the wait.
        """
        waiting = deque(enumerate(configurations))
        started: set[int] = set()  # positions of configurations whose commands run
        ended: SimpleQueue[tuple[int, Score | Exception]] = SimpleQueue()

        def work() -> None:
            """Run commands until no configuration waits; the body of a worker thread."""
            while (job := self._take(waiting, started)) is not None:
                position, configuration = job
                try:
                    ended.put((position, self._evaluate(configuration, subset)))
                except Exception as error:
                    ended.put((position, error))
                finally:
                    started.discard(position)

        results: dict[int, Score | EvaluationError] = {}
        try:
            for _ in range(min(self._workers, len(configurations))):
                Thread(target=work, name="weft-command", daemon=True).start()
            while len(results) < len(configurations):
                try:
                    position, result = ended.get(timeout=_POLL_S)
                except Empty:
                    continue
                if not isinstance(result, Score | EvaluationError):
                    raise result
                results[position] = result
                if scored is not None and isinstance(result, Score):
                    scored(position, result)
        except BaseException:
            self._abandon(waiting, started)
            raise
        return [results[position] for position in range(len(configurations))]

    def _take(self, waiting: deque[tuple[int, Configuration]], started: set[int]) -> tuple[int, Configuration] | None:
        """Take the next configuration and its position from *waiting*; None if none is left."""
        with self._lock:
            if not waiting:
                return None
            started.add(waiting[0][0])  # before it leaves the queue, so that ``_abandon`` waits for it
            return waiting.popleft()

    def _abandon(self, waiting: deque[tuple[int, Configuration]], started: set[int]) -> None:
        """After an interrupt: drop waiting configurations, kill commands, and wait until their files are removed."""
        was_closed, self._closed = self._closed, True  # so that no command starts meanwhile
        with self._lock:
            waiting.clear()
        self._stop_all()
        while started:
            time.sleep(_POLL_S)
        self._closed = was_closed

    def close(self) -> None:
        """Stop running commands, and start no more."""
        self._closed = True
        self._stop_all()

    def _stop_all(self) -> None:
        with self._lock:
            for process in self._running:
                _kill(process)

    def _run(self, line: str) -> CommandResult:
        """Run a shell command in its own process group, which can be killed as a whole and gets no Ctrl-C."""
        with self._lock:
            if self._closed:
                raise EvaluationError("the evaluator is closed")
            try:
                process = subprocess.Popen(
                    line,
                    shell=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=self._cwd,
                    start_new_session=True,
                )
            except OSError as error:
                raise EvaluationError(f"cannot start {line!r}: {reason_of(error)}") from error
            self._running.add(process)
        try:
            return _wait_for_end(process, self._timeout_s)
        finally:
            with self._lock:
                self._running.discard(process)

    def _extract_score(self, command: str, result: CommandResult) -> float:
        """Extract the score from the output of *command*; raises EvaluationError with the end of the output."""

        def failed(why: str) -> EvaluationError:
            last_line = next((line.strip() for line in reversed(result.output.splitlines()) if line.strip()), "")
            last_words = f"; it last said: {last_line[-200:]}" if last_line else "; it said nothing"
            return EvaluationError(f"command {command!r} {why}{last_words}", result.output[-ERROR_CHARACTERS:])

        if result.status is None:
            raise failed(f"was stopped after {self._timeout_s:g} s")
        if result.status < 0:
            raise failed(f"was ended by signal {-result.status}")
        if result.status:
            raise failed(f"ended with status {result.status}")
        last_match = deque(self._pattern.finditer(result.output), maxlen=1)
        if not last_match:
            raise failed(f"printed nothing that matches {self._pattern.pattern!r}")
        text = (last_match[0].group(1) or "").strip()
        try:
            value = float(text)
        except ValueError:
            raise failed(f"printed the score {text!r}, which is no number; narrow the group, as ([-+.e\\d]+)") from None
        if not math.isfinite(value):
            raise failed(f"printed the score {text!r}; a score is finite")
        return value


def _make_folder() -> TemporaryDirectory[str]:
    try:
        return TemporaryDirectory(prefix="weft-tune-")
    except OSError as error:
        raise EvaluationError(f"cannot make a folder for the configuration file: {reason_of(error)}") from error


def _write_configuration(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise EvaluationError(f"cannot write the configuration file {path}: {reason_of(error)}") from error


def _compile_pattern(text: str) -> re.Pattern[str]:
    """Compile the expression of the score; raises TuneError unless it has a group."""
    try:
        pattern = re.compile(text, re.MULTILINE)
    except re.error as error:
        raise TuneError(f"score {text!r} is no regular expression: {error}") from error
    if not pattern.groups:
        raise TuneError(f"score {text!r} has no group; put what is the number in parentheses, as 'Accuracy: (.*)'")
    return pattern


def _wait_for_end(process: subprocess.Popen[bytes], timeout_s: float | None) -> CommandResult:
    """Read a command's output until it ends or times out; kill processes that it left running."""
    deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    output = bytearray()
    assert process.stdout is not None
    try:
        with process.stdout, selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            _collect(process, process.stdout, selector, output, deadline_s)
        status: int | None = process.wait(None if deadline_s == math.inf else max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _kill(process)
        process.wait()
    return CommandResult(status, output.decode("utf-8", "replace"))


def _collect(
    process: subprocess.Popen[bytes],
    pipe: IO[bytes],
    selector: selectors.BaseSelector,
    output: bytearray,
    deadline_s: float,
) -> None:
    """Append output to *output* until the pipe is closed, or until the command has ended and no output is left.

    deadline_s: the time of ``time.monotonic`` at which TimeoutExpired is raised.
    """
    while True:
        ended = process.poll() is not None  # before the pipe is read, so that its last output is seen
        if selector.select(0 if ended else max(0.0, min(_POLL_S, deadline_s - time.monotonic()))):
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                return
            output += data
            if len(output) > 2 * TAIL_BYTES:  # rarely, as deleting moves the rest
                del output[:-TAIL_BYTES]
        elif ended:
            return
        if time.monotonic() >= deadline_s and process.poll() is None:
            raise subprocess.TimeoutExpired(process.args, 0)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole process group, which may be empty by now."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return

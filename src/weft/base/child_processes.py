"""Child processes: Python interpreters that exchange pickled messages with this one over pipes.

``ChildProcess`` runs a function of a module in a fresh interpreter: ``answer_calls``, which calls functions for the
parent and returns their errors, or a function with messages of its own. ``ChildPool`` shares children among calling
threads. A child ends when its standard input is closed, so none outlives its parent; only ``start_detached`` starts a
process that does.

A message is a pickle of protocol 5 whose buffers (arrays, ``PickleBuffer``) follow it, all parts after their lengths,
so that large arrays are neither copied into the pickle nor out of it. Unpickling runs code: both sides trust each
other. Workers that run untrusted models are in ``weft.runtime.isolated``, which unpickles nothing.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import numpy as np

from weft.base.errors import ChildDied, WeftError
from weft.base.registry import VARIABLE as TOOLS_VARIABLE

KEPT_VARIABLES = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "SYSTEMROOT", "PYTHONDONTWRITEBYTECODE",
    "ORT_DISABLE_TELEMETRY", TOOLS_VARIABLE,
)  # fmt: skip
"""Environment variables that ``bare_environment`` keeps; any other may hold a secret."""

_LENGTH = struct.Struct("<Q")

Result = TypeVar("Result")


# Environments


def inherited_environment() -> dict[str, str]:
    """Return the environment of this process, for a child that needs the same modules."""
    return {**os.environ, "PYTHONPATH": _join_paths(sys.path)}


def bare_environment(more: Sequence[str] = ()) -> dict[str, str]:
    """Return an environment without secrets: ``KEPT_VARIABLES``, the variables *more*, and the module path.

    The working directory is left out of the module path: any user with write access there could run code.
    """
    values = {name: os.environ[name] for name in (*KEPT_VARIABLES, *more) if name in os.environ}
    # numpy's BLAS would start a thread for every core in every child, and children do no linear algebra
    return {**values, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": _join_paths(filter(None, sys.path))}


def _join_paths(paths: Iterator[str] | Sequence[str]) -> str:
    return os.pathsep.join(dict.fromkeys(map(os.path.abspath, paths)))


# Messages


class _Failure(NamedTuple):
    """Reply to a call that raised."""

    error: Exception


def send(stream: BinaryIO, message: object) -> None:
    """Write a message."""
    _write(stream, _pack(message))


def receive(stream: BinaryIO) -> Any:
    """Read a message; EOFError if the stream ends before its last byte."""
    return _unpack(_read(stream))


def result_of(reply: Any) -> Any:
    """Return the result in a reply, or raise the error of the call, with the child's traceback as a note."""
    if isinstance(reply, _Failure):
        raise reply.error
    return reply


def _pack(message: object) -> list[memoryview]:
    """Return the parts of a message: the pickle, and the buffers that follow it without being copied."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    return [memoryview(head), *(buffer.raw() for buffer in buffers)]


def _unpack(parts: Sequence[memoryview]) -> Any:
    return pickle.loads(parts[0], buffers=parts[1:])


def _write(stream: BinaryIO, parts: Sequence[memoryview]) -> None:
    """Write the parts of a message, after their number and their lengths."""
    stream.write(b"".join(map(_LENGTH.pack, [len(parts), *(part.nbytes for part in parts)])))
    for part in parts:
        stream.write(part)
    stream.flush()


def _read(stream: BinaryIO) -> list[memoryview]:
    """Read the parts of a message; EOFError if the stream ends before its last byte."""
    (count,) = _LENGTH.unpack(_read_exactly(stream, _LENGTH.size))
    sizes = [_LENGTH.unpack(_read_exactly(stream, _LENGTH.size))[0] for _ in range(count)]
    return [_read_exactly(stream, size) for size in sizes]


def _read_exactly(stream: BinaryIO, size: int) -> memoryview:
    """Read *size* bytes; EOFError if the stream ends before."""
    # not a bytearray: that would be zeroed first, while holding the global lock
    view, position = np.empty(size, np.uint8).data, 0
    while position < size:
        count = stream.readinto(view[position:])  # type: ignore[attr-defined]  # BinaryIO does not declare it
        if not count:
            raise EOFError("the other process has closed its end")
        position += count
    return view


# The parent's side


class ChildProcess:
    """A Python process that runs a given function; one thread may send to it while another receives."""

    def __init__(
        self,
        main: Callable[..., None],
        *arguments: object,
        env: Mapping[str, str] | None = None,
        stderr: BinaryIO | int | None = None,
    ) -> None:
        """Start the process; OSError if the system refuses.

        main: a function of a module; arguments: literals. env: ``inherited_environment()`` if left out. stderr: as for
        ``subprocess``.
        """
        # -P: without it, a file in the working directory could be imported instead of any module
        # -c, not -m: the classes that the child pickles must not belong to a module called __main__
        code = f"from {main.__module__} import {main.__name__} as main; main(*{arguments!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=inherited_environment() if env is None else env,
            start_new_session=True,  # Ctrl-C must reach the parent only, which ends its children
        )
        self._input, self._output = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def send(self, message: object) -> None:
        """Send a message; raises the error of ``death`` if the process has ended."""
        parts = _pack(message)
        try:
            _write(self._input, parts)
        except (OSError, ValueError):  # ValueError: another thread has called close
            raise self.death() from None

    def receive(self) -> Any:
        """Wait for the next message; raises the error of ``death`` if the process has ended."""
        try:
            parts = _read(self._output)
        except (OSError, EOFError, ValueError):
            raise self.death() from None
        return _unpack(parts)

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Have a child that runs ``answer_calls`` call a function of a module; raises the function's error."""
        self.send((function, arguments))
        return cast(Result, result_of(self.receive()))

    def wait(self) -> int:
        """Wait for the end of the process; returns its exit code, or minus the signal that ended it."""
        return self._process.wait()

    def death(self) -> WeftError:
        """Wait for the end of the process; returns the error that says how it ended."""
        return ChildDied(self.wait())

    def close(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.wait()
        for stream in (self._input, self._output):
            with suppress(OSError):  # closing flushes bytes that the dead child cannot read
                stream.close()


def start_detached(main: Callable[[], object]) -> int:
    """Start a Python process that runs a function of a module and outlives this process; return its process id.

    For work of a bounded length whose result is kept on disk. OSError if the system refuses.
    """
    code = f"from {main.__module__} import {main.__name__} as main; main()"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=inherited_environment(),
        start_new_session=True,
    )
    process.returncode = 0  # this process does not wait for it, and Popen would warn of that
    return process.pid


class PoolClosed(Exception):
    """A ``ChildPool`` was called after it was closed."""


class ChildPool:
    """A pool of child processes, started on demand by *start*, for calls from any thread.

    There are as many children as threads ever called at once; each runs one call at a time. A child that dies is
    replaced at the next call.
    """

    def __init__(self, start: Callable[[], ChildProcess]) -> None:
        self._start = start
        self._lock = Lock()  # protects the children, the idle ones, and the closed flag
        self._children: set[ChildProcess] = set()
        self._idle: list[ChildProcess] = []
        self._closed = False

    @property
    def process_ids(self) -> list[int]:
        """Process ids of all children."""
        with self._lock:
            return [child.pid for child in self._children]

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function in a child that runs ``answer_calls``; raises the function's error, or the child's death."""
        child = self._take()
        try:
            child.send((function, arguments))
            reply = child.receive()
        except BaseException:  # an interrupt too: an unread reply would be taken for that of the next call
            self._drop(child)
            raise
        with self._lock:
            self._idle.append(child)
        return cast(Result, result_of(reply))

    def close(self) -> None:
        """Kill all children; threads that wait for a result get the error ``ChildDied``."""
        with self._lock:
            self._closed = True
            children = [*self._children]
        for child in children:
            child.close()

    def _take(self) -> ChildProcess:
        """Return an idle child, or start another one; PoolClosed after ``close``."""
        with self._lock:
            if self._closed:
                raise PoolClosed
            while self._idle:
                child = self._idle.pop()
                if child.alive:
                    return child
                self._children.discard(child)
                child.close()
            child = self._start()
            self._children.add(child)
            return child

    def _drop(self, child: ChildProcess) -> None:
        """Remove a child from the pool and kill it."""
        with self._lock:
            self._children.discard(child)
        child.close()


# The child's side


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Take standard input and output for messages; later prints of libraries go to standard error."""
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipes


def answer_calls(*state: object) -> None:
    """The main function of a child that calls functions for its parent, until the parent closes the pipe.

    state: arguments that go before those of every call. The reply to a call is its result or its error.
    """
    calls, replies = take_pipes()
    with suppress(EOFError, BrokenPipeError):
        while True:  # no variable may hold a call or a reply while waiting for the next one: they can be large
            _write(replies, _reply(state, _read(calls)))


def _reply(state: tuple[object, ...], parts: list[memoryview]) -> list[memoryview]:
    """Run the call in a message, and return the parts of the reply."""
    try:
        function, arguments = _unpack(parts)
        return _pack(function(*state, *arguments))
    except Exception as error:
        return _pack(_Failure(_picklable(error, f"In the child process:\n{traceback.format_exc()}")))


def _picklable(error: Exception, note: str) -> Exception:
    """Return the error with a note; if it cannot be pickled and unpickled, a RuntimeError with the same text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error

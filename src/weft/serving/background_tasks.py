"""Background tasks: calls on daemon threads that may outlive the caller, the event loop and even the interpreter.

A thread pool would not do: Python joins its threads at exit, and loading a model may hang for ever. A daemon thread is
abandoned then, and its caller can stop waiting at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from weft.runtime.urgency import give_way

T = TypeVar("T")


class BackgroundThread(threading.Thread):
    """A daemon thread that runs one call for an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, call: Callable[[], object]) -> None:
        super().__init__(target=call, name=name, daemon=True)
        self.loop = loop


def background_threads(loop: asyncio.AbstractEventLoop) -> list[BackgroundThread]:
    """List the threads that still run for a loop, even if the loop has ended."""
    return [thread for thread in threading.enumerate() if isinstance(thread, BackgroundThread) and thread.loop is loop]


def run_in_background(
    name: str, call: Callable[[], T], unwanted: Callable[[T], Any], *, gently: bool = False
) -> asyncio.Future[T]:
    """Run *call* on a daemon thread of this name, and return its result as a future of the running loop.

    unwanted: called with the result, on a background thread, if the future was cancelled or the loop has ended.
    gently: lower the priority of the thread, and of the threads it starts.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    future_box = [future]

    def run() -> None:
        if gently:
            give_way()
        try:
            result = call()
        except BaseException as error:  # emptying *future_box* breaks the cycle error -> frame -> future -> error
            _schedule(loop, _set_error, future_box.pop(), error)
        else:
            if not _schedule(loop, _set_result, future_box.pop(), result, unwanted):
                unwanted(result)

    BackgroundThread(loop, name, run).start()
    return future


def ignore_result(result: object) -> None:
    """Do nothing with an unwanted result: it needs no clean-up."""


def _schedule(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: Any) -> bool:
    """Schedule *callback* on the loop; return False if the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)
        return True
    return False


def _set_result(future: asyncio.Future[Any], result: Any, unwanted: Callable[[Any], None]) -> None:
    """Complete the future; if it was cancelled, call *unwanted* with the result, on a thread because it may block."""
    if future.cancelled():
        BackgroundThread(future.get_loop(), "unwanted", lambda: unwanted(result)).start()
    else:
        future.set_result(result)


def _set_error(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.cancelled():
        future.set_exception(error)

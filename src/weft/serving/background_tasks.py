"""Errands: calls on threads of their own that nobody has to wait for, not even the end of the process.

What a thread of a pool is in must end before Python does. A model that is being loaded may never be; its thread is a
daemon, and whoever waits for it may stop waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from weft.runtime.urgency import give_way

T = TypeVar("T")


class ErrandThread(threading.Thread):
    """A thread for a call of somebody's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, call: Callable[[], object]) -> None:
        super().__init__(target=call, name=name, daemon=True)
        self.loop = loop


def errands_of(loop: asyncio.AbstractEventLoop) -> list[ErrandThread]:
    """What still runs for a loop, also for one that has ended."""
    return [each for each in threading.enumerate() if isinstance(each, ErrandThread) and each.loop is loop]


def errand(
    name: str, call: Callable[[], T], unwanted: Callable[[T], Any], *, gently: bool = False
) -> asyncio.Future[T]:
    """Call on a thread of this name; *unwanted* gets the result there if nobody waits for it any more.

    gently: the thread, and those it starts, give way to all others.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    awaited = [future]

    def run() -> None:
        if gently:
            give_way()
        try:
            result = call()
        except BaseException as error:  # which knows this frame, and what the call had in its own
            _tell(loop, _failed, awaited.pop(), error)
        else:
            if not _tell(loop, _done, awaited.pop(), result, unwanted):
                unwanted(result)

    ErrandThread(loop, name, run).start()
    return future


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[..., None], *about: Any) -> bool:
    """Let the loop know, if it still runs."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what, *about)
        return True
    return False


def _done(future: asyncio.Future[Any], result: Any, unwanted: Callable[[Any], None]) -> None:
    if future.cancelled():
        ErrandThread(future.get_loop(), "unwanted", lambda: unwanted(result)).start()
    else:
        future.set_result(result)


def _failed(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.cancelled():
        future.set_exception(error)

"""Calls on threads of their own: what they raise is told, and keeps nothing of theirs alive."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from weft.serving.background_tasks import background_threads, run_in_background


class Session:
    """Something large."""


def test_what_a_call_had_is_freed_with_its_error() -> None:
    """Without a look through all objects, which would stop every thread."""
    had: list[weakref.ref[Session]] = []

    def call() -> None:
        session = Session()
        had.append(weakref.ref(session))
        raise ValueError("it cannot be opened")

    async def wait() -> asyncio.AbstractEventLoop:
        with pytest.raises(ValueError, match="it cannot be opened"):
            await run_in_background("loader of x", call, lambda _: None)
        return asyncio.get_running_loop()

    gc.disable()
    try:
        for thread in background_threads(asyncio.run(wait())):
            thread.join()
        assert had[0]() is None
    finally:
        gc.enable()

"""Calls on threads of their own: what they raise is told, and keeps nothing of theirs alive."""

from __future__ import annotations

import asyncio
import gc
import weakref

from weft.serving.errands import errand


class Session:
    """Something large."""


def test_what_a_call_had_is_freed_with_its_error() -> None:
    """Without a look through all objects, which would stop every thread."""
    had: list[weakref.ref[Session]] = []

    def call() -> None:
        session = Session()
        had.append(weakref.ref(session))
        raise ValueError("it cannot be opened")

    async def wait() -> str:
        try:
            await errand("loader of x", call, lambda _: None)
        except ValueError as error:
            return str(error)
        return "nothing was raised"

    gc.disable()
    try:
        assert asyncio.run(wait()) == "it cannot be opened"
        assert had[0]() is None
    finally:
        gc.enable()

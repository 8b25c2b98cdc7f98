"""Serve first, learn later: models that are served whole are cut, measured and warmed up, one at a time, beside them.

Nothing waits for that, and it takes no memory that a load wants: what was learned takes the place of the whole model if
there is room for it, as if it had been loaded again. What cannot be learned is said, and served whole as before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from weft.errors import ModelError, WeftError, first_line
from weft.serving.errands import errand
from weft.serving.repository import ModelEntry
from weft.serving.slots import ModelSlot, signature
from weft.serving.streams import ServedModel

log = logging.getLogger("weft.models")


class Lesson(NamedTuple):
    """A model that is to be learned."""

    slot: ModelSlot
    whole: ServedModel
    """What is served meanwhile."""
    file: tuple[int, int] | None
    """Time and size of the file it was opened from."""

    @property
    def wanted(self) -> bool:
        """Whether it is still served, and from the same file."""
        return self.slot.served is self.whole and self.file == signature(self.slot.entry.path)


class Learner:
    """Learns what it is given, in order, on a thread with no hurry."""

    def __init__(
        self,
        opened: Callable[[ModelEntry], ServedModel],
        fits: Callable[[int], bool],
        install: Callable[[list[ModelSlot], ServedModel], None],
        *,
        gently: bool,
    ) -> None:
        """opened: on any thread. fits: whether so many bytes have room. install: let requests meet it."""
        self._opened, self._fits, self._install, self._gently = opened, fits, install, gently
        self._lessons: list[Lesson] = []
        self._task: asyncio.Task[None] | None = None

    def want(self, slot: ModelSlot, whole: ServedModel, file: tuple[int, int] | None) -> None:
        """Learn a model when its turn comes."""
        self._lessons.append(Lesson(slot, whole, file))
        self.look()

    def look(self) -> None:
        """There may be room now for what there was none."""
        if self._task is None and any(self._fits(lesson.slot.guess_bytes()) for lesson in self._lessons):
            self._task = asyncio.create_task(self._work())

    async def settled(self) -> None:
        """Wait until nothing is being learned."""
        while self._task:
            await asyncio.wait([self._task])

    def close(self) -> None:
        """Learn nothing more; what is being learned is left to its thread."""
        self._lessons.clear()
        if self._task:
            self._task.cancel()

    async def _work(self) -> None:
        try:
            while lesson := self._next():
                await self._learn(lesson)
        finally:
            self._task = None

    def _next(self) -> Lesson | None:
        self._lessons = [lesson for lesson in self._lessons if lesson.wanted]
        found = next((lesson for lesson in self._lessons if self._fits(lesson.slot.guess_bytes())), None)
        if found:
            self._lessons.remove(found)
        return found

    async def _learn(self, lesson: Lesson) -> None:
        entry = lesson.slot.entry
        try:
            body = await errand("learner", partial(self._opened, entry), _close, gently=self._gently)
        except Exception as error:  # whatever is wrong with a model concerns this model alone
            self._tell(lesson, error)
            return
        try:
            if lesson.wanted and self._fits(body.loaded.memory_bytes):
                self._install([lesson.slot], body)
                return
        except WeftError as error:  # it was unloaded meanwhile
            log.info("%s", error)
            return
        errand("unwanted", body.loaded.close, _nothing)
        self._tell(lesson, ModelError("there is no room in the memory budget for what was learned of it"))

    def _tell(self, lesson: Lesson, error: Exception) -> None:
        """Say why a model stays as it is."""
        slot, entry = lesson.slot, lesson.slot.entry
        said = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {first_line(error)}"
        said = said.removeprefix(f"{entry.path}: ").replace(str(entry.path), entry.path.name)
        if slot.served is lesson.whole:
            log.warning("%s %s stays whole: %s", entry.name, entry.version, said)
            slot.message = f"stays whole: {said}"


def _close(body: ServedModel) -> None:
    body.loaded.close()


def _nothing(result: object) -> None:
    """Nobody waits for it."""

"""Serve first, learn later: models that are served whole are cut, measured and warmed up, one at a time, beside them.

Nothing waits for that, not even the next model for one that never ends: each has a short turn at first, and those that
need longer come again when all others have had theirs. It takes no memory that a load wants: what was learned takes the
place of the whole model if there is room for it, as if it had been loaded again. What cannot be learned is said, and
served whole as before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from weft.base.errors import ModelError, NotLearned, WeftError, first_line
from weft.serving.background_tasks import errand
from weft.serving.repository import ModelEntry
from weft.serving.slots import ModelSlot, signature
from weft.serving.streams import ServedModel

log = logging.getLogger("weft.models")

REMARK = "served whole until it is cut and measured"
FIRST_TURN_S = 10.0
"""How long a model may be learned before all others had a turn."""


class LearningJob(NamedTuple):
    """A model that is to be learned."""

    slot: ModelSlot
    whole: ServedModel
    """What is served meanwhile."""
    file: tuple[int, int] | None
    """Time and size of the file it was opened from."""
    turn_s: float
    """How long it may take."""

    @property
    def wanted(self) -> bool:
        """Whether it is still served, and from the same file."""
        return self.slot.served is self.whole and self.file == signature(self.slot.entry.path)


class Learner:
    """Learns what it is given, in order, on a thread with no hurry."""

    def __init__(
        self,
        opened: Callable[[ModelEntry, float], ServedModel],
        fits: Callable[[int], bool],
        install: Callable[[list[ModelSlot], ServedModel], None],
        *,
        learn_s: float,
        gently: bool,
    ) -> None:
        """opened: in so many seconds, on any thread. fits: whether so many bytes have room.

        install: let requests meet it. learn_s: how long a model may take.
        """
        self._opened, self._fits, self._install = opened, fits, install
        self._learn_s, self.gently = learn_s, gently
        self._lessons: list[LearningJob] = []
        self._task: asyncio.Task[None] | None = None

    def want(self, slot: ModelSlot, whole: ServedModel, file: tuple[int, int] | None) -> None:
        """Learn a model when its turn comes."""
        slot.message = REMARK
        self._lessons.append(LearningJob(slot, whole, file, min(FIRST_TURN_S, self._learn_s)))
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

    def _next(self) -> LearningJob | None:
        self._lessons = [lesson for lesson in self._lessons if lesson.wanted]
        fitting = [lesson for lesson in self._lessons if self._fits(lesson.slot.guess_bytes())]
        found = min(fitting, key=lambda lesson: lesson.turn_s, default=None)
        if found:
            self._lessons.remove(found)
        return found

    async def _learn(self, lesson: LearningJob) -> None:
        opening = partial(self._opened, lesson.slot.entry, lesson.turn_s)
        try:
            self._take(lesson, await errand("learner", opening, close_unwanted, gently=self.gently))
        except NotLearned as error:
            if lesson.turn_s < self._learn_s:
                self._lessons.append(lesson._replace(turn_s=self._learn_s))
            else:
                self._tell(lesson, error)
        except Exception as error:  # whatever is wrong with a model concerns this model alone
            self._tell(lesson, error)

    def _take(self, lesson: LearningJob, body: ServedModel) -> None:
        """Put what was learned in the place of the whole model, or say why not."""
        if lesson.wanted and self._fits(body.residency.memory_bytes):
            self._install([lesson.slot], body)
            return
        errand("unwanted", body.loaded.close, _nothing)
        if lesson.wanted:
            raise ModelError("there is no room in the memory budget for what was learned of it")
        raise ModelError("its file has changed since; load it again")

    def _tell(self, lesson: LearningJob, error: Exception) -> None:
        """Say why a model stays as it is."""
        slot, entry = lesson.slot, lesson.slot.entry
        said = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {first_line(error)}"
        said = said.removeprefix(f"{entry.path}: ").replace(str(entry.path), entry.path.name)
        if slot.served is lesson.whole:
            log.warning("%s %s stays whole: %s", entry.name, entry.version, said)
            slot.message = f"stays whole: {said}"


def close_unwanted(body: ServedModel) -> None:
    """Give back a model that nobody waited for."""
    body.loaded.close()


def _nothing(result: object) -> None:
    """Nobody waits for it."""

"""Learning: models are served whole at first, and cut, measured and warmed up in the background, one at a time.

Each model has a short time limit at first; those that need longer are tried again when all others had their turn, so
that one slow model does not delay the others. A model that is compiled is compiled for a few batch sizes in its first
turn, and for the others when all models had a turn. Learning does not take memory from loads: the learned model
replaces the whole one if it fits into the budget, as if it had been loaded again. If a model cannot be learned, the
reason is logged and it stays whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from weft.base.errors import ModelError, NotLearned, WeftError, first_line
from weft.runtime.engines import COMPILED
from weft.serving.background_tasks import ignore_result, run_in_background
from weft.serving.repository import ModelEntry
from weft.serving.slots import ModelSlot, signature
from weft.serving.streams import ServedModel

log = logging.getLogger("weft.models")

REMARK = "served whole until it is cut and measured"
COMPILED_REMARK = "more batch sizes are being compiled"
FIRST_TURN_S = 10.0
"""Time limit of a model's first turn: bounds how long the other models wait for theirs."""


class LearningJob(NamedTuple):
    """A model that waits to be learned."""

    slot: ModelSlot
    whole: ServedModel
    """The model that is served meanwhile."""
    file: tuple[int, int] | None
    """Time and size of the file it was opened from."""
    turn_s: float
    """Time limit of this turn."""
    is_first: bool = True
    """Whether the model is not learned at all so far; False: it was compiled for some batch sizes."""

    @property
    def still_served(self) -> bool:
        """Whether the model is still served, and its file has not changed."""
        return self.slot.served is self.whole and self.file == signature(self.slot.entry.path)


class Learner:
    """Learns models in order, on a background thread of low priority."""

    def __init__(
        self,
        open_learned: Callable[[ModelEntry, float, bool], ServedModel],
        fits: Callable[[int], bool],
        install: Callable[[list[ModelSlot], ServedModel], None],
        *,
        learn_s: float,
        gently: bool,
    ) -> None:
        """open_learned: opens and learns a model, on any thread, given a time limit and whether it is the first turn.

        fits: tells whether a number of bytes fits the memory budget. install: lets a learned model serve the requests
        for the slots. learn_s: time limit of a model. gently: learn at low priority; False if sessions start threads,
        which would inherit that priority and keep it while they serve requests.
        """
        self._open_learned, self._fits, self._install = open_learned, fits, install
        self._learn_s, self.gently = learn_s, gently
        self._jobs: list[LearningJob] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, slot: ModelSlot, whole: ServedModel, file: tuple[int, int] | None) -> None:
        """Queue a model to be learned.

        whole: the model that is served meanwhile, which may be compiled for some batch sizes. file: time and size of
        the file that it was opened from.
        """
        if whole.loaded.timing.engine == COMPILED:
            slot.message = COMPILED_REMARK
            self._jobs.append(LearningJob(slot, whole, file, self._learn_s, is_first=False))
        else:
            slot.message = REMARK
            self._jobs.append(LearningJob(slot, whole, file, min(FIRST_TURN_S, self._learn_s)))
        self.start_if_possible()

    def start_if_possible(self) -> None:
        """Start learning if a queued model fits into memory now."""
        if self._task is None and any(self._fits(job.slot.guess_bytes()) for job in self._jobs):
            self._task = asyncio.create_task(self._learn_all())

    async def wait_until_idle(self) -> None:
        """Wait until no model is being learned."""
        while self._task:
            await asyncio.wait([self._task])

    def close(self) -> None:
        """Stop learning; the thread of the model that is being learned is abandoned."""
        self._jobs.clear()
        if self._task:
            self._task.cancel()

    async def _learn_all(self) -> None:
        """Learn queued models, one after another, as long as one of them fits into memory."""
        try:
            while job := self._take_next():
                await self._learn_model(job)
        finally:
            self._task = None

    def _take_next(self) -> LearningJob | None:
        """Take the next job from the queue: of those that fit into memory, the first with the shortest time limit."""
        self._jobs = [job for job in self._jobs if job.still_served]
        fitting = [job for job in self._jobs if self._fits(job.slot.guess_bytes())]
        chosen = min(fitting, key=lambda job: job.turn_s, default=None)
        if chosen:
            self._jobs.remove(chosen)
        return chosen

    async def _learn_model(self, job: LearningJob) -> None:
        """Learn a model and serve it; if its time was too short, queue it again with the full time limit."""
        opening = partial(self._open_learned, job.slot.entry, job.turn_s, job.is_first)
        try:
            self._install_learned(job, await run_in_background("learner", opening, close_unwanted, gently=self.gently))
        except NotLearned as error:
            if job.turn_s < self._learn_s:
                self._jobs.append(job._replace(turn_s=self._learn_s))
            else:
                self._keep_whole(job, error)
        except Exception as error:  # a fault of one model must not end the learning of others
            self._keep_whole(job, error)

    def _install_learned(self, job: LearningJob, body: ServedModel) -> None:
        """Replace the whole model by the learned one; ModelError if that is not possible any more."""
        if job.still_served and self._fits(body.residency.memory_bytes):
            self._install([job.slot], body)
            if not body.timing.learned and job.slot.served is body:
                self.add(job.slot, body, job.file)
            return
        run_in_background("unwanted", body.loaded.close, ignore_result)
        if job.still_served:
            raise ModelError("there is no room in the memory budget for what was learned of it")
        raise ModelError("its file has changed since; load it again")

    def _keep_whole(self, job: LearningJob, error: Exception) -> None:
        """Log why a model stays as it is served, and show the reason as the model's message."""
        slot, entry = job.slot, job.slot.entry
        reason = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {first_line(error)}"
        reason = reason.removeprefix(f"{entry.path}: ").replace(str(entry.path), entry.path.name)
        if slot.served is job.whole:
            outcome = "stays whole" if job.is_first else "is not compiled for more batch sizes"
            log.warning("%s %s %s: %s", entry.name, entry.version, outcome, reason)
            slot.message = f"{outcome}: {reason}"


def close_unwanted(body: ServedModel) -> None:
    """Close a model whose load was cancelled."""
    body.loaded.close()

"""Steps of a loaded model, run on a lane until they end."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from tests.serving import live
from tests.support.references import session
from weft.runtime.backend import BatchPart, DeviceLane, LoadedModel, Step, StepEnd


class Heard:
    """A callback for ends of steps, which it queues together with the threads that called it."""

    def __init__(self) -> None:
        self._ends: SimpleQueue[StepEnd] = SimpleQueue()
        self.threads: list[int] = []

    def __call__(self, end: StepEnd) -> None:
        self.threads.append(threading.get_ident())
        self._ends.put(end)

    def end(self) -> StepEnd:
        return self._ends.get(timeout=live.PATIENCE_S)


def run_step(model: LoadedModel, lane: DeviceLane, segment: int, *parts: BatchPart, rows: int = 1) -> StepEnd:
    """Run a segment on a lane, and wait for its end."""
    heard = Heard()
    model.start(Step(segment, parts, rows), lane, heard)
    return heard.end()


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def first_output(path: Path, inputs: dict[str, Any]) -> Any:
    """The first output of a model by ONNX Runtime alone."""
    return session(path).run(None, inputs)[0]

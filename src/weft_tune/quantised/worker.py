"""A process that runs its share of the batches: reads jobs from its standard input, answers on its standard output."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weft.base.errors import EvaluationError
from weft.runtime.tensors import Array
from weft_tune.quantised.feeding import Ints
from weft_tune.quantised.plan import RoundingPlan
from weft_tune.quantised.runner import LayerFormats, PlanRunner, SampleOrder


@dataclass(frozen=True, slots=True)
class Open:
    """Get ready to run a plan, whose weights are in files."""

    plan: RoundingPlan
    weights: Mapping[str, Path]
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class Add:
    """Samples, whose inputs are in files."""

    name: str
    inputs: Mapping[str, Path]
    order: Ints


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget samples."""

    name: str


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """Batches of samples, under formats."""

    name: str
    formats: Mapping[str, LayerFormats]
    numbers: tuple[int, ...]


Job = Open | Add | Drop | WorkerJob


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """The answer to one job."""

    outputs: tuple[Array, ...] = ()
    failure: str = ""
    trace: str = ""


def send(stream: BinaryIO, message: Job | WorkerReply) -> None:
    pickle.dump(message, stream, pickle.HIGHEST_PROTOCOL)
    stream.flush()


def main() -> None:
    """Answer jobs until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of it and ends this process
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get among the answers
    jobs = sys.stdin.buffer
    runner: PlanRunner | None = None
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        try:
            if isinstance(job, Open):
                weights = {name: np.load(path, mmap_mode="r") for name, path in job.weights.items()}
                runner = PlanRunner(job.plan.with_weights(weights), job.cache_bytes)
                answer = WorkerReply()
            else:
                assert runner is not None
                answer = _answer(runner, job)
        except EvaluationError as error:
            answer = WorkerReply(failure=str(error))
        except Exception as error:
            answer = WorkerReply(failure=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        try:
            send(answers, answer)
        except BrokenPipeError:
            return


def _answer(runner: PlanRunner, job: Add | Drop | WorkerJob) -> WorkerReply:
    match job:
        case Add():
            inputs = {name: np.load(path, mmap_mode="r") for name, path in job.inputs.items()}
            runner.add(job.name, SampleOrder(inputs, job.order))
        case Drop():
            runner.drop(job.name)
        case WorkerJob():
            return WorkerReply(tuple(runner.run(job.name, job.formats, job.numbers)))
    return WorkerReply()

"""The planner's child process: receives problems, searches, and sends schedules as it finds them.

A thread receives: a new problem interrupts the search for the last one, and the end of the input ends the process, so
it does not outlive its parent.
"""

from __future__ import annotations

import _thread
import os
import signal
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO, NamedTuple

from weft.base.child_processes import receive, send, take_pipes
from weft.base.errors import WeftError
from weft_map.problem import Problem
from weft_map.schedule import Schedule
from weft_map.simulator import simulate
from weft_map.solver import Improvement, Options, solve


class PlanJob(NamedTuple):
    """A problem to be solved."""

    number: int
    problem: Problem
    options: Options


class PlanReport(NamedTuple):
    """A report of the worker about a job."""

    job: int
    kind: str
    """"ready" (for jobs), "better", "ended" or "failed"."""
    seconds: float = 0.0
    """Since the search began."""
    value: float = 0.0
    bound: float = 0.0
    makespan_s: float = 0.0
    schedule: Schedule | None = None
    proved: bool = False
    message: str = ""
    """Why it failed, or what ended it."""


class Superseded(BaseException):  # not an Exception: handlers of failures on the way must not catch it
    """Raised inside a search when a newer problem has come."""


class Worker:
    """Solves one job at a time, and drops it for a newer one."""

    def __init__(self, tell: Callable[[PlanReport], None]) -> None:
        self._tell = tell
        self._jobs: SimpleQueue[PlanJob] = SimpleQueue()
        self._newest = -1
        self._running: int | None = None
        """The job that may be interrupted just now."""

    def read(self, stream: BinaryIO) -> None:
        """Take jobs until the input ends, and the process with it."""
        while True:
            try:
                job = receive(stream)
            except (EOFError, OSError):
                os._exit(0)
            self._newest = job.number
            self._jobs.put(job)
            _thread.interrupt_main()

    def interrupted(self, *_: object) -> None:
        """Runs in the main thread, between two steps of whatever it does."""
        if self._running is not None and self._running != self._newest:
            self._running = None
            raise Superseded

    def work(self) -> None:
        while True:
            try:
                self._solve(self._jobs.get())
            except Superseded:
                continue

    def _solve(self, job: PlanJob) -> None:
        try:
            self._running = job.number
            self.interrupted()
            solution = solve(job.problem, job.options, lambda improvement: self._better(job, improvement))
            self._running = None
        except Exception as error:  # whatever is wrong with this job: the next one may be fine
            self._running = None
            self._tell(PlanReport(job.number, "failed", message=_in_a_line(error)))
            return
        known = solution.certificate
        numbers = known.seconds, known.value, known.bound, solution.outcome.makespan_s
        self._tell(PlanReport(job.number, "ended", *numbers, solution.schedule, known.proved, known.ended))

    def _better(self, job: PlanJob, improvement: Improvement) -> None:
        at_once = job.options.objective == "latency"
        makespan_s = improvement.value if at_once else simulate(job.problem, improvement.schedule).makespan_s
        numbers = improvement.seconds, improvement.value, improvement.bound, makespan_s
        self._running = None  # whole messages only: nothing interrupts while one is written
        self._tell(PlanReport(job.number, "better", *numbers, improvement.schedule))
        self._running = job.number
        self.interrupted()


def _in_a_line(error: Exception) -> str:
    said = " ".join(str(error).split())
    return said if isinstance(error, WeftError) else f"{type(error).__name__}: {said}"


def main(core: int | None) -> None:
    """Warm up, then serve standard input and output until the input ends."""
    jobs, reports = take_pipes()
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    worker = Worker(lambda report: send(reports, report))
    signal.signal(signal.SIGINT, worker.interrupted)
    Thread(target=worker.read, args=(jobs,), daemon=True).start()
    try:
        send(reports, PlanReport(-1, "ready"))
        worker.work()
    except BrokenPipeError:
        os._exit(0)

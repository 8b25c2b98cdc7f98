"""The background planner: a process on one core that searches for better schedules while others are in use.

``Planner.plan`` gives it a problem and returns at once; ``news`` says what it has found since. A new problem replaces
the last one. A process that dies is noticed, said so, and replaced a few times for each problem; it ends with the
planner. Threads write to it and read from it, so no caller waits for a process that is busy.

In the process a thread receives: a new problem interrupts the search for the last one, and the end of the input ends
the process, so it does not outlive its parent.
"""

from __future__ import annotations

import _thread
import os
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Condition, Thread
from time import perf_counter
from types import TracebackType
from typing import BinaryIO, NamedTuple

from weft.base.child_processes import ChildProcess, receive, send, take_pipes
from weft.base.errors import ChildDied, WeftError
from weft.devices import Soc, Unit
from weft_map.problem import Group, Problem, Task, UnitCost
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


def serve_jobs(core: int | None) -> None:
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


MOST_RESTARTS = 3
"""So often a planner's process is started again for one problem."""
LOST = "lost"
"""Kind of a message that the planner writes itself: its process has ended."""


class News(NamedTuple):
    """A report of the planner's process, and when it arrived."""

    at_s: float
    report: PlanReport


class Planner:
    """Plans one problem at a time, elsewhere."""

    def __init__(self, now: Callable[[], float] = perf_counter, *, core: int | None = None) -> None:
        """now: the clock that stamps news. core: where the process runs; the last one we may use if left out."""
        self._now = now
        self._core = _last_core() if core is None else core
        self._changed = Condition()  # protects the attributes below; notified when news arrive
        self._news: deque[News] = deque()
        self._job: PlanJob | None = None
        """The problem that is searched; None once the search has ended."""
        self._number = 0
        self._ready = False
        """Whether the process has started and reads jobs."""
        self.restarts = 0
        """How often the process was started again for the present problem."""
        self._start()

    def plan(self, problem: Problem, options: Options) -> int:
        """Search for this problem from now on; returns the number that its news carry."""
        with self._changed:
            self._number += 1
            self._job = PlanJob(self._number, problem, options)
            self._news = deque(item for item in self._news if item.report.kind == LOST)
            if self._given_up:
                self._start()
            self.restarts = 0
            self._hand_over()
        return self._number

    def news(self) -> list[News]:
        """Return the reports about the present problem since the last call, in order; restart a dead process."""
        with self._changed:
            said, self._news = list(self._news), deque()
            kinds = {item.report.kind for item in said}
            if kinds & {"ended", "failed"}:
                self._job = None
            if LOST in kinds:
                said += self._replace()
            return said

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until there is news; False where there was none in time."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._news), timeout_s)

    def warm_up(self) -> None:
        """Have the process load and, the first time, compile all it needs."""
        self.plan(_small_problem(), Options())
        while self.searching:
            self.wait()
            for _, report in self.news():
                if report.kind == "failed" or (report.kind == LOST and not self.searching):
                    raise WeftError(f"the planner cannot be started: {report.message}")

    @property
    def searching(self) -> bool:
        """Whether the search goes on, by the reports that ``news`` has returned."""
        return self._job is not None

    @property
    def _given_up(self) -> bool:
        return self.restarts > MOST_RESTARTS

    @property
    def process_id(self) -> int:
        return self._child.pid

    def close(self) -> None:
        """Kill the process, whatever it does."""
        self._child.close()
        self._reader.join()
        self._writer.join()

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        self._ready = False
        self._child = ChildProcess(serve_jobs, self._core)
        self._jobs: SimpleQueue[PlanJob | None] = SimpleQueue()
        self._reader = Thread(target=self._read, args=(self._child, self._jobs), daemon=True)
        self._writer = Thread(target=_write, args=(self._child, self._jobs), daemon=True)
        self._reader.start()
        self._writer.start()

    def _read(self, child: ChildProcess, jobs: SimpleQueue[PlanJob | None]) -> None:
        """Receive reports, in a thread, until the process has ended."""
        try:
            while True:
                self._hear(child.receive())
        except ChildDied as death:
            message = f"the planner's process ended {death.how}"
        child.close()
        jobs.put(None)
        with self._changed:
            self._ready = False
            self._put(PlanReport(self._number, LOST, message=message))

    def _hear(self, report: PlanReport) -> None:
        with self._changed:
            if report.kind == "ready":
                self._ready = True
                self._hand_over()
            elif report.job == self._number:
                self._put(report)

    def _put(self, report: PlanReport) -> None:
        self._news.append(News(self._now(), report))
        self._changed.notify_all()

    def _hand_over(self) -> None:
        """Send the job, if the process is there to read it; if not, it gets it as soon as it is."""
        if self._ready and self._job is not None:
            self._jobs.put(self._job)

    def _replace(self) -> list[News]:
        """Restart the process, up to a number of times per problem; return a report of it."""
        self.restarts += 1
        if not self._given_up:
            self._start()
            return []
        self._job = None
        why = f"the planner's process has died {self.restarts} times; no more is searched for these models now"
        return [News(self._now(), PlanReport(self._number, LOST, message=why))]


def _write(child: ChildProcess, jobs: SimpleQueue[PlanJob | None]) -> None:
    """Send jobs, in a thread, however long the process takes to read them, until it has ended."""
    with suppress(ChildDied):  # the reader reports it
        while (job := jobs.get()) is not None:
            child.send(job)


def _last_core() -> int | None:
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _small_problem() -> Problem:
    """Enough for all that is compiled or loaded to be needed once."""
    soc = Soc(name="small", bandwidth_gb_s=100.0, units=(Unit(name="gpu"), Unit(name="dla")))
    costs = {"gpu": UnitCost(1e-3, 60.0, out_s=1e-5), "dla": UnitCost(1.5e-3, 30.0, out_s=1e-5)}
    groups = tuple(Group(f"g{n}", costs) for n in range(3))
    return Problem(soc, (Task("a", groups), Task("b", groups)))

"""The background planner: a process on one core that searches for better schedules while others are in use.

``Planner.plan`` sends the process a problem and returns at once; ``news`` returns its reports since the last call. A
new problem replaces the last one. A process that dies is reported and restarted a few times per problem. Threads write
to the process and read from it, so no caller waits for a busy process.

In the process, a thread receives problems: a new problem interrupts the search for the last one, and the end of the
input ends the process, so that it does not outlive its parent.
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
    """Seconds since the search began."""
    value: float = 0.0
    """Makespan in seconds, or runs per second, as in ``Improvement``."""
    bound: float = 0.0
    makespan_s: float = 0.0
    schedule: Schedule | None = None
    proved: bool = False
    message: str = ""
    """Why the search failed or ended."""


class Superseded(BaseException):  # not an Exception: handlers of failures on the way must not catch it
    """Raised inside a search when a newer problem has come."""


class Worker:
    """The code of the process: solves one job at a time, and drops it for a newer one."""

    def __init__(self, send_report: Callable[[PlanReport], None]) -> None:
        self._send_report = send_report
        self._jobs: SimpleQueue[PlanJob] = SimpleQueue()
        self._newest = -1
        """Number of the job that was received last."""
        self._running: int | None = None
        """Number of the job that is searched and may be interrupted; None while it may not be."""

    def read(self, stream: BinaryIO) -> None:
        """Receive jobs, in a thread, and interrupt the main thread for each; exit at the end of *stream*."""
        while True:
            try:
                job = receive(stream)
            except (EOFError, OSError):
                os._exit(0)
            self._newest = job.number
            self._jobs.put(job)
            _thread.interrupt_main()

    def interrupted(self, *_: object) -> None:
        """Signal handler, run in the main thread at any point: raise ``Superseded`` if a newer job has come."""
        if self._running is not None and self._running != self._newest:
            self._running = None
            raise Superseded

    def work(self) -> None:
        """Solve jobs for ever."""
        while True:
            try:
                self._solve(self._jobs.get())
            except Superseded:
                continue

    def _solve(self, job: PlanJob) -> None:
        """Solve *job* and report its end or its failure; raises ``Superseded`` if a newer job has come."""
        try:
            self._running = job.number
            self.interrupted()  # a newer job may have come before ``_running`` was set
            solution = solve(job.problem, job.options, lambda improvement: self._report_better(job, improvement))
            self._running = None
        except Exception as error:  # an error of one job must not end the process: the next job may be fine
            self._running = None
            self._send_report(PlanReport(job.number, "failed", message=_one_line(error)))
            return
        certificate = solution.certificate
        report = PlanReport(
            job.number, "ended", seconds=certificate.seconds, value=certificate.value, bound=certificate.bound,
            makespan_s=solution.outcome.makespan_s, schedule=solution.schedule, proved=certificate.proved,
            message=certificate.ended,
        )  # fmt: skip
        self._send_report(report)

    def _report_better(self, job: PlanJob, improvement: Improvement) -> None:
        """Report a better schedule of *job*, with its makespan."""
        is_makespan = job.options.objective == "latency"
        makespan_s = improvement.value if is_makespan else simulate(job.problem, improvement.schedule).makespan_s
        seconds, value, bound, schedule = improvement
        self._running = None  # an interrupt while a message is written would leave half a message in the pipe
        self._send_report(PlanReport(job.number, "better", seconds, value, bound, makespan_s, schedule))
        self._running = job.number
        self.interrupted()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, WeftError) else f"{type(error).__name__}: {text}"


def serve_jobs(core: int | None) -> None:
    """Main function of the process: solve jobs from standard input, pinned to *core* if given, until the input ends."""
    jobs, reports = take_pipes()
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    worker = Worker(lambda report: send(reports, report))
    signal.signal(signal.SIGINT, worker.interrupted)
    Thread(target=worker.read, args=(jobs,), daemon=True).start()
    try:
        send(reports, PlanReport(job=-1, kind="ready"))
        worker.work()
    except BrokenPipeError:  # the parent has ended
        os._exit(0)


MOST_RESTARTS = 3
"""Cap on restarts of the process for one problem; after that the planner gives the problem up."""
LOST = "lost"
"""Kind of a report that the planner itself makes: its process has ended."""


class News(NamedTuple):
    """A report of the planner's process, and the time of its arrival."""

    at_s: float
    report: PlanReport


class Planner:
    """Plans one problem at a time in a process of its own; use it from one thread."""

    def __init__(self, now: Callable[[], float] = perf_counter, *, core: int | None = None) -> None:
        """now: the clock for ``News.at_s``. core: where the process runs; None: the last core that we may use."""
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
        """Number of restarts of the process for the present problem."""
        self._start()

    def plan(self, problem: Problem, options: Options) -> int:
        """Search for *problem* from now on, instead of the last one; return the number that its reports carry."""
        with self._changed:
            self._number += 1
            self._job = PlanJob(self._number, problem, options)
            # Reports about the last problem are dropped; that the process has died holds for the new one as well.
            self._news = deque(item for item in self._news if item.report.kind == LOST)
            if self._given_up:
                self._start()
            self.restarts = 0
            self._send_job()
        return self._number

    def news(self) -> list[News]:
        """Return the reports about the present problem since the last call, in order; restart a dead process."""
        with self._changed:
            news, self._news = list(self._news), deque()
            kinds = {item.report.kind for item in news}
            if kinds & {"ended", "failed"}:
                self._job = None
            if LOST in kinds:
                news += self._restart()
            return news

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until there is news; return False if none came within *timeout_s*."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._news), timeout_s)

    def warm_up(self) -> None:
        """Solve a small problem, so that the process has its kernels compiled. Raises WeftError if it cannot start."""
        self.plan(_small_problem(), Options())
        while self.searching:
            self.wait()
            for _, report in self.news():
                if report.kind == "failed" or (report.kind == LOST and not self.searching):
                    raise WeftError(f"the planner cannot be started: {report.message}")

    @property
    def searching(self) -> bool:
        """Whether the search is running, according to the reports that ``news`` has returned."""
        return self._job is not None

    @property
    def _given_up(self) -> bool:
        return self.restarts > MOST_RESTARTS

    @property
    def process_id(self) -> int:
        return self._child.pid

    def close(self) -> None:
        """Kill the process, and wait for the two threads to end."""
        self._child.close()
        self._reader.join()
        self._writer.join()

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        """Start the process, and the threads that read from it and write to it."""
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
                self._handle(child.receive())
        except ChildDied as death:
            message = f"the planner's process ended {death.how}"
        child.close()
        jobs.put(None)  # ends ``_write``
        with self._changed:
            self._ready = False
            self._add_news(PlanReport(self._number, LOST, message=message))

    def _handle(self, report: PlanReport) -> None:
        """Keep a report about the present problem as news; send the job to a process that has become ready."""
        with self._changed:
            if report.kind == "ready":
                self._ready = True
                self._send_job()
            elif report.job == self._number:
                self._add_news(report)

    def _add_news(self, report: PlanReport) -> None:
        self._news.append(News(self._now(), report))
        self._changed.notify_all()

    def _send_job(self) -> None:
        """Send the job if the process is ready; otherwise ``_handle`` calls this again when it is."""
        if self._ready and self._job is not None:
            self._jobs.put(self._job)

    def _restart(self) -> list[News]:
        """Restart the process; after ``MOST_RESTARTS`` restarts for one problem, give up and return news of that."""
        self.restarts += 1
        if not self._given_up:
            self._start()
            return []
        self._job = None
        why = f"the planner's process has died {self.restarts} times; the search for these models is given up"
        return [News(self._now(), PlanReport(self._number, LOST, message=why))]


def _write(child: ChildProcess, jobs: SimpleQueue[PlanJob | None]) -> None:
    """Send jobs to the process, in a thread, until it has ended (None in the queue)."""
    with suppress(ChildDied):  # the reader reports it
        while (job := jobs.get()) is not None:
            child.send(job)


def _last_core() -> int | None:
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _small_problem() -> Problem:
    """A problem whose solution uses every kernel and module once."""
    soc = Soc(name="small", bandwidth_gb_s=100.0, units=(Unit(name="gpu"), Unit(name="dla")))
    costs = {"gpu": UnitCost(1e-3, 60.0, out_s=1e-5), "dla": UnitCost(1.5e-3, 30.0, out_s=1e-5)}
    groups = tuple(Group(f"g{n}", costs) for n in range(3))
    return Problem(soc, (Task("a", groups), Task("b", groups)))

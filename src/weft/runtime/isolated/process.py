"""The server's side of one worker: the process, its lines, what runs there, and its death.

Steps are sent on the thread that starts them; the lanes' ``SocketReader`` reads their ends. A thread reads everything
else and sees the process to its end. A worker that sends what cannot be read, or takes no more work, is killed as if it
had died.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, Protocol

from weft.base.errors import WorkerDied, reason_of
from weft.engine.lane_queues import MOST_AHEAD
from weft.runtime.backend import Ended, Step, StepEnd, StepOutput
from weft.runtime.breaker import Breaker
from weft.runtime.client_memory import Lender, LentTensor
from weft.runtime.isolated import packets
from weft.runtime.isolated.confinement import Confinement
from weft.runtime.isolated.lane import IsolatingLane, LaneLine, StepReport
from weft.runtime.isolated.model_description import heard
from weft.runtime.isolated.packets import Garbled, Laid, Packet
from weft.runtime.isolated.residency import Residency
from weft.runtime.isolated.spawning import Child, ended_by

log = logging.getLogger("weft.workers")

PATIENCE_S = 2.0
"""How long a process that was told to end may take."""

SOON_S = 0.002
"""When a step that a worker did not have to do with its death may be tried again: another one is in charge then."""

CARRIED_BYTES = 1 << 20
"""Larger tensors are copied on a thread beside, or the event loop would wait for it."""

MOST_LENT = packets.MOST_FILES - 2
"""So many regions of clients that are files a worker can be given with one step."""

MOST_BORROWED = 200
"""So many regions of clients a worker has open; each takes two of its files, of which there are limits."""

UNBOUNDED_BYTES = 1 << 62
"""The memory of a device where nobody says how much of it may be used."""

PARTS_BITS = 20
"""A batch has fewer than two to the power of this parts."""

LOOK_S = 0.01
"""How often who waits for a step looks whether it has ended."""


class Charged(Protocol):
    """A model, as far as a worker looks at it."""

    number: int

    @property
    def breaker(self) -> Breaker | None:
        """Who hears that its worker died; None: nobody counts."""
        ...

    def onward(self, step: Step) -> int:
        """How many values a step leaves that the next one can be started with before it has ended; 0: none."""
        ...

    def check(self, segment: int, rows: int, outputs: Sequence[StepOutput]) -> None:
        """``Garbled`` if that cannot be what a segment gives."""
        ...

    def failed(self) -> None:
        """A step of it ended with an error."""
        ...


class HeldValues:
    """Values in the memory of a worker; they are freed with this."""

    __slots__ = ("model", "number", "worker")

    def __init__(self, worker: WorkerProcess, number: int, model: int) -> None:
        self.worker, self.number, self.model = worker, number, model
        worker.residency.begin(model)

    def __del__(self) -> None:
        self.worker.free(self.number)
        self.worker.residency.end(self.model)


_NO_STEP = Step(0, (), 0)


class WorkerRun:
    """A step that a worker was given."""

    __slots__ = (
        "_ended", "began", "keep", "lane", "leaving", "model", "moves", "number", "onward", "over", "step", "worker",
    )  # fmt: skip
    error: Exception | None = None  # only its end tells

    def __init__(
        self, worker: WorkerProcess, number: int, lane: IsolatingLane, model: Charged, step: Step, ended: Ended
    ) -> None:
        self.worker, self.number, self.lane, self.model, self.step = worker, number, lane, model, step
        self._ended: Ended | None = ended
        self.began = worker.now()
        self.over = False
        self.leaving: list[int] | None = None
        """Models that leave the device before it, where its own has to come back; None where it was there."""
        self.moves = model.number in worker.residency.movable
        """Whether its model is one of those that may leave a device."""
        if self.moves:
            worker.residency.begin(model.number)
        self.keep = number << PARTS_BITS
        """The first of the numbers under which the worker keeps what it leaves, one for each part."""
        self.onward: list[StepOutput] | None = None
        if lane.ahead:
            promised = range(self.keep, self.keep + model.onward(step))
            self.onward = [StepOutput(HeldValues(worker, number, model.number), {}) for number in promised] or None

    def stop(self) -> None:
        if not self.over:
            self.worker.halt(self)

    def give_way(self) -> None:
        if not self.over:
            self.worker.tell(["give_way", self.number])

    def urge(self) -> None:
        """Tell it to stop."""
        self.worker.tell(["halt", self.number])

    def kill(self, why: str) -> None:
        """End the worker because of it."""
        self.worker.kill(why, self)

    def end(self, end: StepEnd) -> None:
        """Tell of its end, once."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        self.step, self.onward = _NO_STEP, None  # whoever hears of the end may free its values
        if self.moves:
            self.worker.residency.end(self.model.number)
        try:
            ended(end)
        except Exception:
            log.exception("the end of a step could not be told")
        self.over = True

    def await_end(self, patience_s: float | None) -> bool:
        """Return when it has ended, or after so long: False. Whoever waits here listens, too."""
        return self.over or self.worker.listen_until(self, patience_s)

    def fail(self, error: Exception) -> None:
        self.end(StepEnd(self.began, max(self.began, self.worker.now()), error=error))


class WorkerProcess:
    """A worker: a process that was started and, once ``ready``, takes models and steps."""

    _numbers = itertools.count(1)

    def __init__(
        self,
        name: str,
        confinement: Confinement,
        scratch: str,
        device_memory_bytes: int | None = None,
        *,
        now: Callable[[], int],
        spawner: Executor,
        fork: Callable[[int, Confinement, str], Child],
        carrier: Executor,
        watch: Callable[[WorkerRun], None],
        died: Callable[[WorkerProcess, set[Charged]], None],
    ) -> None:
        """*fork*: starts the process, on the *spawner*'s one thread."""
        self.name, self.now, self.number = name, now, next(self._numbers)
        self.readable = frozenset(confinement.readable)
        self.opened: set[int] = set()
        """Numbers of the models it has."""
        self.death = ""
        """How it died."""
        self.residency = Residency(UNBOUNDED_BYTES if device_memory_bytes is None else device_memory_bytes)
        self._carrier, self._watch, self._died = carrier, watch, died
        self._lock = threading.Lock()
        self._keys = itertools.count(1)
        self._runs: dict[int, WorkerRun] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._lanes: dict[int, LaneLine] = {}
        self._freed: deque[int] = deque()
        self._lent: set[int] = set()
        """Numbers of the regions it knows."""
        self._hello: Future[None] = Future()
        self._closing, self._why = False, ""
        self._blamed: WorkerRun | None = None
        self._idle: threading.Event | None = None
        """Set when nothing runs any more, for who waits for that."""
        self._line, theirs = packets.pair()
        try:
            self.process = spawner.submit(fork, theirs.fileno(), confinement, scratch).result()
        finally:
            theirs.close()
        self._reader = threading.Thread(target=self._read, name=f"worker-{self.number}", daemon=True)
        try:
            spawner.submit(self._reader.start).result()  # threads are as gentle as who starts them
        except RuntimeError:  # there are too many threads; nobody would see it to its end
            self.process.kill()
            self.process.wait()
            self._line.close()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return not self.death

    def await_ready(self) -> None:
        """Return when it can be given work; ``WorkerDied`` if it never can."""
        self._hello.result()

    def await_idle(self, patience_s: float) -> None:
        """Return when nothing runs there, or after so long; for one that is given nothing more."""
        self._idle = threading.Event()
        if self._runs:
            self._idle.wait(patience_s)

    # Steps

    def begin(self, lane: IsolatingLane, model: Charged, step: Step, ended: Ended) -> WorkerRun:
        """Have a step computed."""
        run = WorkerRun(self, next(self._keys), lane, model, step, ended)
        lane.run = run
        with self._lock:
            if not self.death:
                self._runs[run.number] = run
        if self.death:
            run.fail(self.lost())
            return run
        try:
            laid, parts = _laid_out(step)
            if laid.lenders and self._read_what_is_too_much(step, laid.lenders):
                laid, parts = _laid_out(step)
        except Exception as error:  # an array of no known type, a region that was cut off
            self._take(run.number)
            run.fail(error)
            return run
        if laid.size > CARRIED_BYTES or lane.carried:
            lane.carried.add(run.number)
            self._carrier.submit(self._carry, run, parts, laid)
        else:
            self._send(run, parts, laid)
        return run

    def _carry(self, run: WorkerRun, parts: list[Any], laid: Laid) -> None:
        try:
            self._send(run, parts, laid)
        finally:
            run.lane.carried.discard(run.number)

    def _send(self, run: WorkerRun, parts: list[Any], laid: Laid) -> None:
        shared = laid.size > packets.INLINE_BYTES
        step, model = run.step, run.model.number
        lenders = self._unknown(laid.lenders) if laid.lenders else ()
        terms = [tuple(lender.terms) for lender in lenders] if lenders else ()
        files = [lender.file for lender in lenders if lender.file is not None] if lenders else ()
        freed: Sequence[int] = ()
        try:
            if run.moves:
                run.leaving = self.residency.bring(model, begins=step.segment == 0, lane=run.lane.index)
            freed = self._to_free() if self._freed else ()
            head = ["run", run.number, model, step.segment, parts, step.rows, shared, freed]
            head += (run.keep, run.onward is not None, terms, run.leaving)
            self._lane(run.lane).send(head, laid, files)
            if lenders:
                self.lend(lenders)
        except ConnectionError:
            self.process.kill()  # it is gone; how it ended is seen where it is buried
        except BlockingIOError as error:
            if not self.death:
                self.kill(f"it takes no more work: {error}")
        except Exception as error:  # nobody shall wait for what was not sent
            if run.leaving is not None:
                self.residency.unsent(run.model.number, run.leaving)
            self._freed.extend(freed)
            if self._take(run.number):
                run.fail(error)

    # Regions of clients

    def _unknown(self, lenders: Sequence[Lender]) -> list[Lender]:
        """The regions that it has not heard of, each once."""
        unknown = (lender for lender in lenders if lender.terms.number not in self._lent)
        return list({lender.terms.number: lender for lender in unknown}.values())

    def _read_what_is_too_much(self, step: Step, lenders: Sequence[Lender]) -> bool:
        """Read here what lies in more files than it can be given with one step, or have open; whether anything does."""
        new = sum(lender.file is not None for lender in self._unknown(lenders))
        if new <= MOST_LENT and new + len(self._lent) <= MOST_BORROWED:
            return False
        for values in (part.values for part in step.parts if isinstance(part.values, dict)):
            for name, value in values.items():
                if isinstance(value, LentTensor) and value.lender.file is not None:
                    values[name] = value.read()
        return True

    def lend(self, lenders: Sequence[Lender]) -> None:
        """It knows these regions now, until nobody else does."""
        for lender in lenders:
            if lender.terms.number in self._lent:
                continue
            self._lent.add(lender.terms.number)
            weakref.finalize(lender, _take_back, weakref.ref(self), lender.terms.number).atexit = False

    def take_back(self, number: int) -> None:
        """Have it let go of a region."""
        self._lent.discard(number)
        self.tell(["take_back", number])

    def _lane(self, lane: IsolatingLane) -> LaneLine:
        """The line to a lane, opened when it is first used."""
        connection = self._lanes.get(lane.index)
        if connection is None:
            line, theirs = packets.pair()
            try:
                with theirs:
                    self._line.send(["lane", lane.index, lane.core], files=[theirs.fileno()], wait=False)
            except BaseException:
                line.close()
                raise
            places = 1 + MOST_AHEAD if lane.ahead else 1
            connection = self._lanes[lane.index] = LaneLine(line, lane.ear, places, lane.kept_bytes)
            lane.ear.listen(line, partial(self._heard, connection))
            if self.death:  # it has been buried, and this line was not there yet
                lane.ear.part(line)
        return connection

    def _take(self, number: int) -> WorkerRun | None:
        with self._lock:
            return self._runs.pop(number, None)

    def halt(self, run: WorkerRun) -> None:
        """Tell a step to stop, and see that it does."""
        run.urge()
        self._watch(run)

    def free(self, number: int) -> None:
        """Nobody needs these values any more; it hears so with the next step, or now if there is none."""
        self._freed.append(number)
        if not self._runs:
            self._flush()

    def _to_free(self) -> Sequence[int]:
        numbers = []
        with contextlib.suppress(IndexError):
            while True:
                numbers.append(self._freed.popleft())
        return numbers

    def _flush(self) -> None:
        if self._freed:
            self.tell(["free", self._to_free()])

    def tell(self, head: list[Any]) -> None:
        """Send what needs no answer."""
        with contextlib.suppress(OSError):  # it is gone, or so busy that a step which it shall stop is killed soon
            self._line.send(head, wait=False)

    def lost(self, suspects: int = 0) -> WorkerDied:
        """What is said of a step that went with it."""
        again_s = 0.0 if suspects else SOON_S
        death = self.death or "another one has taken its place"
        return WorkerDied(f"the worker that computed it died: {death}", suspects=suspects, again_s=again_s)

    # Calls

    def call(self, method: str, *arguments: Any) -> Any:
        """Have something done that may take long, and wait for it."""
        future: Future[Any] = Future()
        with self._lock:
            key = next(self._keys)
            if not self.death:
                self._calls[key] = future
        if self.death:
            raise self.lost()
        try:
            self._line.send(["call", key, method, arguments], wait=True)
        except ConnectionError:
            self.process.kill()  # it is gone; how it ended is seen where it is buried
        except OSError as error:
            self.kill(f"it takes no more calls: {reason_of(error)}")
        return future.result()

    # Its end

    def kill(self, why: str, blamed: WorkerRun | None = None) -> None:
        """End it at once; *blamed*: the step that is why."""
        self._why, self._blamed = self._why or why, self._blamed or blamed
        self.process.kill()

    def close(self) -> None:
        """End it, whatever it does."""
        self._closing = True
        self.tell(["bye"])
        self._reader.join(PATIENCE_S)
        if self._reader.is_alive():
            self.process.kill()
            self._reader.join()

    def _read(self) -> None:
        try:
            while True:
                self._hear(self._line.receive())
        except (EOFError, OSError):
            pass  # it is gone, which is told below
        except Exception as error:  # whatever it sent, it cannot be trusted any more
            self._why = self._why or f"it sent what cannot be read ({error})"
        self.process.kill()
        self._bury(self.process.wait())

    def _bury(self, code: int) -> None:
        """Everything that ran there ends, after whoever keeps the worker has heard of it."""
        for lane in list(self._lanes.values()):  # what it finished is not lost
            while self._listen(lane, 0.0):
                pass
        with self._lock:
            self.death = "it was closed" if self._closing else self._why or ended_by(code)
            runs, self._runs = list(self._runs.values()), {}
            calls, self._calls = list(self._calls.values()), {}
        blamed = [self._blamed] if self._blamed in runs and self._blamed else runs
        if self._closing:
            blamed = []
        else:
            self._tell_of_death({run.model for run in blamed})
        for run in runs:
            run.fail(self.lost(len(blamed) if run in blamed else 0))
        for future in [self._hello, *calls]:
            if not future.done():
                future.set_exception(self.lost())
        if self._idle:
            self._idle.set()
        self._line.close()
        for lane in list(self._lanes.values()):
            lane.ear.part(lane.line)

    def _tell_of_death(self, models: set[Charged]) -> None:
        """Whatever becomes of that, everything that waits for this worker is answered."""
        try:
            self._died(self, models)
        except Exception:
            log.exception("the death of worker %d could not be told", self.pid)

    # What it says

    def _hear(self, packet: Packet) -> None:
        packets.close_all(packet.files)
        kind, *rest = packet.head
        if packet.files:
            raise Garbled(f"{len(packet.files)} files with {kind!r}")
        if kind == "reply":
            self._reply(*rest)
        elif kind == "hello":
            self._greet(*rest)
        else:
            raise Garbled(f"{kind!r} is nothing a worker says")

    def listen_until(self, run: WorkerRun, patience_s: float | None) -> bool:
        """Hear what is said of a step until it has ended; False if it has not in time."""
        end_s = None if patience_s is None else time.monotonic() + patience_s
        while not run.over:
            if end_s is not None and time.monotonic() > end_s:
                return False
            lane = self._lanes.get(run.lane.index)
            if lane is None or not self._listen(lane, LOOK_S):
                time.sleep(LOOK_S)  # its inputs are being copied, or the worker is seen to its end
        return True

    def _listen(self, lane: LaneLine, patience_s: float) -> bool:
        """Wait so long for what a lane says; False if it says nothing."""
        file, poll = lane.line.file, select.poll()
        if file < 0:
            return False
        poll.register(file, select.POLLIN)
        return bool(poll.poll(patience_s * 1e3)) and self._heard(lane)

    def _heard(self, lane: LaneLine) -> bool:
        """Hear what a lane says, if it says something; False if it never will again."""
        with lane.hearing:
            try:
                report = lane.hear()
                if report.weight > CARRIED_BYTES or lane.beside:
                    lane.beside.add(report.number)
                    self._carrier.submit(self._finish_beside, lane, report.lasting())
                else:
                    self._finish(report)
            except BlockingIOError:
                return True  # somebody else heard it
            except (EOFError, OSError):
                self.process.kill()  # it is gone, or as good as that
                return False
            except Exception as error:
                self._distrust(error)
                return False
            return True

    def _finish_beside(self, lane: LaneLine, report: StepReport) -> None:
        try:
            self._finish(report)
        except Exception as error:
            self._distrust(error)
        finally:
            lane.beside.discard(report.number)

    def _distrust(self, error: Exception) -> None:
        """Whatever it sent, it can be trusted no more."""
        self.kill(f"it sent what cannot be read ({error})")

    def _finish(self, report: StepReport) -> None:
        """A step has ended."""
        run = self._take(report.number)
        if run is None:
            if self.death:
                return  # it was said to have gone with the worker
            raise Garbled(f"step {report.number} does not run")
        try:
            end = self._read_end(run, report)
        except BaseException:
            with self._lock:
                self._runs[run.number] = run  # it ends with the worker
            raise
        run.end(end)
        if not self._runs:
            if self._idle:
                self._idle.set()
            if self._freed:
                self._flush()

    def _read_end(self, run: WorkerRun, report: StepReport) -> StepEnd:
        """The end of a step; its times are ours where the worker's cannot be."""
        began, ended, now = report.began, report.ended, self.now()
        if not (type(began) is type(ended) is int and run.began <= began <= ended <= now):
            ended = min(max(run.began, int(ended)), now)
            began = min(max(run.began, int(began)), ended)
        if report.problem is not None:
            error = heard(report.problem)
            if run.leaving is not None:
                self.residency.failed(run.model.number, run.leaving)
            run.model.failed()
            return StepEnd(began, ended, error=error)
        promised = {output.values.number: output.values for output in run.onward} if run.onward else {}
        outputs: list[StepOutput] = []
        for number, answers in report.outputs:
            kept = promised.get(number) or HeldValues(self, int(number), run.model.number) if number else {}
            outputs.append(StepOutput(kept, packets.restore(answers, report.source, copied=True)))
        run.model.check(run.step.segment, run.step.rows, outputs)
        if run.leaving is not None:
            self.residency.came(run.model.number, run.leaving)
        return StepEnd(began, ended, outputs)

    def _reply(self, key: int, result: Any, problem: Any) -> None:
        with self._lock:
            future = self._calls.pop(key, None)
        if future is None:
            raise Garbled(f"nobody called {key!r}")
        if problem is None:
            future.set_result(result)
        else:
            future.set_exception(heard(problem))

    def _greet(self, done: list[str], lacking: list[str]) -> None:
        log.info("worker %d of %s has %s", self.pid, self.name, ", ".join(map(str, done)))
        if lacking:
            log.warning("worker %d of %s could not have: %s", self.pid, self.name, ", ".join(map(str, lacking)))
        self._hello.set_result(None)


def _take_back(worker: weakref.ref[WorkerProcess], number: int) -> None:
    process = worker()
    if process is not None:
        process.take_back(number)


def _laid_out(step: Step) -> tuple[Laid, list[Any]]:
    """The parts of a batch as they travel: their tensors, or the number of what the worker holds."""
    laid, parts = Laid(), []
    for values, rows in step.parts:
        held = isinstance(values, HeldValues)
        described = None if held else packets.describe(values, laid)
        parts.append((values.number if held else 0, None if rows is None else list(rows), described))
    return laid, parts

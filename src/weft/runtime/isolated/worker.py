"""The process: models on ONNX Runtime, lanes, and what batches hold between segments.

Every lane has a line of its own, on which its thread waits for steps, and says how they ended; so a step wakes one
thread here and its end one thread there. Everything else is said on the first line. The process ends with that line.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

from weft.runtime.backend import BatchPart, LoadedModel, LoadOptions, Step, StepEnd
from weft.runtime.isolated import memory, packets
from weft.runtime.isolated.confinement import Confinement, call_yourself, confine
from weft.runtime.isolated.described import description, told
from weft.runtime.isolated.packets import Laid, Line, Packet
from weft.runtime.onnxruntime_cpu.allowance import Allowance
from weft.runtime.onnxruntime_cpu.lane import CpuLane
from weft.runtime.onnxruntime_cpu.preparing import prepare
from weft.runtime.onnxruntime_cpu.scratch import IDLE_S, Scratch

NAME = "weft worker"
"""What the system calls the process."""

SWITCH_S = 0.0005
"""How long a Python thread may hold the global lock while another waits."""


def work(file: int, confinement: Confinement) -> None:
    """Serve the process at the other end of a line, until it is gone."""
    call_yourself(NAME)
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever ends the server ends us
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    outcome = confine(confinement)
    line = Line(socket.socket(fileno=file))
    line.send(["hello", outcome.done, outcome.lacking], wait=True)
    ModelWorker(line).serve()


class ModelWorker:
    """Runs models for the process at the other end."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.models: dict[int, LoadedModel] = {}
        self.values: dict[int, dict[str, Any]] = {}
        self.scratch = Scratch(time.monotonic_ns)
        self._lanes: dict[int, _WorkerLane] = {}
        self._numbers = count(1)
        self._slow = ThreadPoolExecutor(1, "calls")

    def serve(self) -> None:
        try:
            while True:
                self._hear(self.line.receive())
        except (EOFError, OSError):
            os._exit(0)

    def _hear(self, packet: Packet) -> None:
        kind, *rest = packet.head
        if kind == "halt":
            for lane in list(self._lanes.values()):
                lane.halt(*rest)
        elif kind == "free":
            self.free(*rest)
        elif kind == "lane":
            self._open_lane(*rest, file=packet.files[0])
        elif kind == "call":
            self._slow.submit(self._answer, *rest)
        elif kind == "bye":
            os._exit(0)

    def _open_lane(self, index: int, core: int | None, *, file: int) -> None:
        lane = self._lanes[index] = _WorkerLane(self, index, Line(socket.socket(fileno=file)), core)
        threading.Thread(target=lane.serve, name=f"line-{index}", daemon=True).start()

    def free(self, numbers: list[int]) -> None:
        for number in numbers:
            self.values.pop(number, None)

    def keep(self, values: dict[str, Any]) -> int:
        """The number of values that stay here."""
        number = next(self._numbers)
        self.values[number] = values
        return number

    # Calls

    def _answer(self, key: int, method: str, arguments: list[Any]) -> None:
        methods: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "prepare": lambda model, rows: self.models[model].prepare(rows),
            "close": lambda model: self.models.pop(model).close(),
            "held": lambda: [len(self.models), len(self.values)],
        }
        try:
            self.line.send(["reply", key, methods[method](*arguments), None], wait=True)
        except OSError:
            os._exit(0)
        except Exception as error:
            self.line.send(["reply", key, None, told(error)], wait=True)

    def _open(self, number: int, path: str, options: dict[str, Any], cache: str, learn: bool) -> str:
        """Open a model, from the *cache* if one is named; ``NotLearned`` where it had to be learned and shall not."""
        shapes = {name: tuple(shape) for name, shape in options["shapes"].items()}
        chosen = LoadOptions(**{**options, "shapes": shapes, "exits": tuple(options["exits"])})
        allowance = Allowance(chosen.learn_s)
        if not learn:
            allowance.stop()
        model = prepare(Path(path), chosen, Path(cache) if cache else None, learn=learn, allowance=allowance)
        self.models[number] = model
        gc.collect()
        gc.freeze()  # what is loaded now stays; looking through it again and again would cost every step
        return description(model).model_dump_json()


class _WorkerLane:
    """A lane: computes the steps that come on its line, one at a time."""

    def __init__(self, worker: ModelWorker, index: int, line: Line, core: int | None) -> None:
        self._worker, self._line, self._core = worker, line, core
        self._cpu = CpuLane(index, time.monotonic_ns, scratch=worker.scratch)
        self._steps = 0
        self._current = self._halted = 0
        self._inward: memory.TensorMemory | None = None
        self._outward: memory.TensorMemory | None = None
        self._borrowed: frozenset[int] = frozenset()
        """The arrays of this step that lie in memory which the next one writes over."""

    def serve(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})
        try:
            while True:
                self._shrink_until_asked()
                packet = self._line.receive()
                self._run(packet)
                del packet
        except (EOFError, OSError):
            os._exit(0)

    def _shrink_until_asked(self) -> None:
        """Give back scratch memory that has not been needed for a while; return when a step comes, or nothing is."""
        scratch = self._worker.scratch
        if not scratch.is_large:
            return
        if scratch.is_due(idle=False):
            scratch.shrink()
        asked = select.poll()
        asked.register(self._line.file, select.POLLIN)
        while scratch.is_large and not asked.poll(IDLE_S * 1e3):
            if scratch.is_due(idle=True):
                scratch.shrink()

    def halt(self, run: int) -> None:
        """Stop a step between two of its nodes; one that has not come yet is not begun."""
        self._halted = run
        if run == self._current:
            self._cpu.stop(self._steps)

    def _run(self, packet: Packet) -> None:
        _, run, model, segment, parts, rows, shared, freed = packet.head
        if freed:
            self._worker.free(freed)
        self._current = run
        began = time.monotonic_ns()
        try:
            if packet.files:
                self._inward = memory.taken(packet.files[0])
            step = Step(segment, self._parts(parts, packet, shared), rows)
            if self._halted == run:
                raise InterruptedError("stopped before it began")
            self._steps += 1
            self._worker.models[model].start(step, self._cpu, lambda end: self._over(run, end), here=True)
        except Exception as error:
            self._over(run, StepEnd(began, time.monotonic_ns(), error=error))
        finally:
            self._current, self._borrowed = 0, frozenset()
            if self._inward and self._inward.size > memory.KEPT_BYTES:
                self._inward = None

    def _parts(self, parts: list[Any], packet: Packet, shared: bool) -> list[BatchPart]:
        """The parts of a batch: arrays that came, or what is kept here under a number."""
        source = self._inward.bytes if shared and self._inward else packet.tensors
        found = []
        for number, rows, tensors in parts:
            values = (
                self._worker.values[number] if tensors is None else packets.restore(tensors, source, copied=not shared)
            )
            found.append(BatchPart(values, rows))
        if shared:
            self._borrowed = frozenset(id(each) for part in found for each in part.values.values())
        return found

    def _over(self, run: int, end: StepEnd) -> None:
        """Tell that a step has ended, with what clients are told, and keep the rest."""
        laid, files, made = Laid(), list[int](), []
        for each in end.made:
            kept = self._worker.keep(self._owned(each.values)) if each.values else 0
            made.append((kept, packets.describe(each.answers, laid) if each.answers else ()))
        shared = laid.size > packets.INLINE_BYTES
        if shared:
            files = self._lay_out(laid)
        problem = told(end.error) if end.error else None
        head = ["over", run, end.began, end.ended, made, shared, problem]
        try:
            self._line.send(head, () if shared else laid.in_a_row(), files, wait=True)
        finally:
            packets.close_all(files)
            if self._outward and self._outward.size > memory.KEPT_BYTES:
                self._outward = None

    def _owned(self, values: dict[str, Any]) -> dict[str, Any]:
        """Values that outlive the step, in memory of their own."""
        borrowed = self._borrowed
        return {name: each.copy() if id(each) in borrowed else each for name, each in values.items()}

    def _lay_out(self, laid: Laid) -> list[int]:
        """Put tensors where the server sees them; what it has to be given for that, if the memory is new."""
        files: list[int] = []
        if self._outward is None or self._outward.size < laid.size:
            self._outward, file = memory.made(laid.size)
            files.append(file)
        self._outward.write(laid.pieces)
        return files

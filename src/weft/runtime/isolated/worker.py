"""The worker process: models on an engine, lanes, and the values of batches between segments.

Every lane has a connection of its own, on which its thread waits for steps and reports their ends; so a step wakes one
thread here and its end one thread of the server. All other messages use the first connection; the process exits when
that is closed.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from base64 import b64decode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from weft.base.errors import BadRequest
from weft.runtime.backend import LoadedModel, LoadOptions
from weft.runtime.client_memory import Borrowed, LendingTerms
from weft.runtime.device_kinds import engine_kind
from weft.runtime.isolated.confinement import Confinement, call_yourself, confine, end_with
from weft.runtime.isolated.engine import WorkerEngine
from weft.runtime.isolated.model_description import description, encode_error
from weft.runtime.isolated.packets import Line, Packet, close_all
from weft.runtime.isolated.stop_table import map_stops
from weft.runtime.isolated.worker_lane import WorkerLane
from weft.runtime.metadata import CPU

log = logging.getLogger("weft.workers")

NAME = "weft worker"
"""Name of the process in ``ps`` and ``top``."""

SWITCH_S = 0.0005
"""Seconds that a Python thread may hold the global lock while another waits; the default, 5 ms, would delay steps."""


def work(file: int, confinement: Confinement, engine: str = CPU) -> None:
    """Serve the server at the other end of the socket *file* until that is gone; *engine*: what models run with."""
    call_yourself(NAME)
    # The server ends its workers after draining; Ctrl-C, which reaches all processes of a terminal, must not.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    outcome = confine(confinement)
    line = Line(socket.socket(fileno=file))
    line.send(["hello", outcome.done, outcome.lacking], wait=True)
    ModelWorker(line, engine_kind(engine).make(engine)).serve()


class _FailedRegion:
    """A region that could not be opened: every step that needs it fails with the reason."""

    def __init__(self, error: BadRequest) -> None:
        self._error = error

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        raise self._error

    def target(self, offset: int, byte_size: int) -> Any:
        raise self._error

    def write(self, data: bytes, offset: int) -> None:
        raise self._error

    def close(self) -> None:
        """Do nothing: no region was opened."""


class ModelWorker:
    """Runs models for the server."""

    def __init__(self, line: Line, engine: WorkerEngine) -> None:
        self.line, self.engine = line, engine
        self.models: dict[int, LoadedModel] = {}
        self.values: dict[int, Any] = {}
        """Values of batches, by number; if the step that should produce them failed, its error."""
        self.regions: dict[int, Borrowed] = {}
        """Shared memory of clients (a file or memory of a GPU) that holds tensors, by the server's numbers for it."""
        self._lanes: dict[int, WorkerLane] = {}
        self._call_pool, self._write_pool = ThreadPoolExecutor(1, "calls"), ThreadPoolExecutor(1, "writes")
        # Guards the check and insertion in regions: several threads open them, and each must be opened once.
        self._borrowing = threading.Lock()

    def serve(self) -> None:
        """Handle packets until the server closes the connection; then exit the process."""
        try:
            while True:
                self._handle_packet(self.line.receive())
        except (EOFError, OSError):
            os._exit(0)

    def _handle_packet(self, packet: Packet) -> None:
        """Handle a message of the server; calls, which take long, are answered on other threads."""
        kind, *arguments = packet.head
        if kind == "halt":
            for lane in list(self._lanes.values()):  # only the lane that has the step reacts
                lane.halt(*arguments)
        elif kind == "give_way":
            for lane in list(self._lanes.values()):
                lane.give_way(*arguments)
        elif kind == "free":
            self.free(*arguments)
        elif kind == "take_back":
            self._close_region(*arguments)
        elif kind == "stops":
            self.engine.use_stops(map_stops(packet.files[0]))
        elif kind == "lane":
            self._accept_lane(*arguments, file=packet.files[0])
        elif kind == "call":
            _, method, _ = arguments  # as ``_answer_call`` takes them
            # Two thread pools: a client waits for writes, and they must not queue behind the opening of a model.
            pool = self._write_pool if method == "write" else self._call_pool
            pool.submit(self._answer_call, *arguments)
        elif kind == "bye":
            os._exit(0)

    def _accept_lane(self, index: int, core: int | None, *, file: int) -> None:
        """Serve lane number *index* on the connection *file*, on a thread that is pinned to *core*, if any."""
        self._lanes[index] = WorkerLane(self, index, Line(socket.socket(fileno=file)), core)
        self._lanes[index].begin()

    def free(self, numbers: list[int]) -> None:
        """Free the kept values of these numbers."""
        for number in numbers:
            self.values.pop(number, None)

    def kept(self, number: int) -> Any:
        """The kept values of this number; raises the error of the step that should have produced them."""
        values = self.values[number]
        if isinstance(values, Exception):
            raise values
        return values

    def borrow(self, terms: LendingTerms, file: int | None) -> None:
        """Open a region of shared memory, or keep the error for the steps that need it; takes over *file*."""
        with self._borrowing:
            if terms.number in self.regions:
                close_all(() if file is None else (file,))
                return
            try:
                self.regions[terms.number] = self.engine.borrow(terms, file)
            except BadRequest as error:
                self.regions[terms.number] = _FailedRegion(error)
            except Exception as error:  # device drivers raise several kinds
                self.regions[terms.number] = _FailedRegion(BadRequest(f"the region cannot be used there: {error}"))

    def _close_region(self, number: int) -> None:
        """Close the region of a client's shared memory with this number, if it was opened."""
        region = self.regions.pop(number, None)
        try:
            if region is not None:
                region.close()
        except Exception:
            log.exception("a region of a client could not be closed")

    # Calls

    def _answer_call(self, key: int, method: str, arguments: list[Any]) -> None:
        """Run a method that the server called, on a thread of a pool, and reply under *key* with result or error."""
        methods: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "prepare": lambda model, rows: self.models[model].prepare(rows),
            "close": lambda model: self.models.pop(model).close(),
            "held": lambda: [len(self.models), len(self.values)],
            "borrowed": lambda: len(self.regions),
            "metrics": self.engine.metrics,
            "write": self._write,
        }
        try:
            self.line.send(["reply", key, methods[method](*arguments), None], wait=True)
        except OSError:
            os._exit(0)
        except Exception as error:
            self.line.send(["reply", key, None, encode_error(error)], wait=True)

    def _write(self, terms: list[Any], offset: int, data: str) -> None:
        """Write Base64-encoded *data* at *offset* of a region of a GPU's memory; *terms*: its ``LendingTerms``."""
        region = LendingTerms(*terms)
        self.borrow(region, None)
        self.regions[region.number].write(b64decode(data), offset)

    def _open(self, number: int, path: str, options: dict[str, Any], cache: str, learn: bool) -> str:
        """Open a model under a *number* that the server chose; returns its description as JSON.

        cache: path of a folder; empty: none. learn: False: ``NotLearned`` if the cache does not have the model.
        """
        shapes = {name: tuple(shape) for name, shape in options["shapes"].items()}  # JSON has no tuples
        load_options = LoadOptions(**{**options, "shapes": shapes, "exits": tuple(options["exits"])})
        self.models[number] = model = self.engine.open(
            Path(path), load_options, Path(cache) if cache else None, learn=learn
        )
        gc.collect()
        gc.freeze()  # objects of a loaded model stay; without this, each collection would scan them and delay steps
        return description(model).model_dump_json()


_LOOK_S = 0.0002
"""Seconds between checks whether the server has become the parent: the longest delay of a start."""


def main() -> None:
    """Run the template process, which imports all modules once: fork a worker whenever the server asks for one."""
    server = os.getppid()
    end_with(server)
    line, engine = Line(socket.socket(fileno=int(sys.argv[1]))), sys.argv[2]
    engine_kind(engine).warm_up(engine)
    gc.collect()
    gc.freeze()  # a collection would write to, and so copy, every page that workers share with the template
    try:
        while True:
            packet = line.receive()
            line.send([_fork_worker(line, packet, engine)], wait=True)
            close_all(packet.files)
    except (EOFError, OSError):
        os._exit(0)


def _fork_worker(line: Line, packet: Packet, engine: str) -> int:
    """Fork a worker, by a process in between that exits at once so that the server inherits it; return its number."""
    read_end, write_end = os.pipe()
    between = os.fork()
    if not between:
        worker = os.fork()
        if worker:
            os.write(write_end, str(worker).encode())
            os._exit(0)
        os.close(read_end)
        os.close(write_end)
        line.close()
        _become_worker(packet.files[0], engine, *packet.head)  # never returns
    os.close(write_end)
    try:
        os.waitpid(between, 0)
        return int(os.read(read_end, 32))
    finally:
        os.close(read_end)


def _become_worker(file: int, engine: str, confinement_fields: dict[str, Any], scratch: str) -> None:
    """Serve as a worker in a new POSIX session, on the connection *file*; never returns.

    confinement_fields: of its ``Confinement``. scratch: path of its temporary folder.
    """
    code = 1
    try:
        os.setsid()
        os.environ.update(TMPDIR=scratch, HOME=scratch)
        confinement = Confinement(**confinement_fields)
        end_s = time.monotonic() + 10.0  # the process in between exits at once
        while os.getppid() != confinement.server and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        work(file, confinement, engine)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()

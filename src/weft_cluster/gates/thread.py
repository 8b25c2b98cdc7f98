"""A gate inside a Python program: it runs on a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import errno
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from weft.base.errors import InputError
from weft.serving.config import ServerConfig
from weft.serving.server import SWITCH_S, fastest_loop
from weft_cluster.gates.gate import USUAL_SETTINGS, Gate, GateSettings
from weft_cluster.placing.placement import PlacedMachine

T = TypeVar("T")
PORTS = 16
"""Ports that are tried, from the configured one on: several gates on one machine take the next free one each."""


class GateThread:
    """A gate on a thread: ``start`` and ``stop``; or ``begin``, ``set_servers``, and then ``listen`` for clients.

    The methods may be called from any thread; they block until the gate's loop has done the work.
    """

    def __init__(self, models: Iterable[str], face: ServerConfig, settings: GateSettings = USUAL_SETTINGS) -> None:
        """Prepare a gate; the parameters are those of ``Gate``."""
        self._settings = tuple(models), settings
        self._face = face
        self._loop = (fastest_loop() or asyncio.new_event_loop)()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weft gate", daemon=True)
        self.gate: Gate

    def start(self) -> int:
        """Listen on the configured port, or on the next free one; return it."""
        self.begin()
        return self.listen()

    def begin(self) -> None:
        """Start the thread, without listening."""
        sys.setswitchinterval(SWITCH_S)  # otherwise other threads of the program hold the GIL for 5 ms at a time
        self._thread.start()
        try:
            self.call(self._begin())
        except BaseException:
            self._end()
            raise

    def listen(self) -> int:
        """Listen for clients after ``begin``; return the port. The thread is ended if that fails."""
        try:
            return self.call(self._listen())
        except BaseException:
            self._end()
            raise

    def set_servers(self, servers: Mapping[str, PlacedMachine], models: Iterable[str] | None = None) -> None:
        """Replace the servers: URL -> machine; and, if given, the models of the placement."""
        if models is not None:
            self.ask(lambda: self.gate.board.expect(models))
        self.call(self.gate.set_servers(servers))

    def status(self) -> dict[str, Any]:
        """Return the state of the cluster as the gate sees it."""
        return self.ask(self.gate.status)

    def ask(self, question: Callable[[], T]) -> T:
        """Call *question* on the gate's thread and return its result."""

        async def answer() -> T:
            return question()

        return self.call(answer())

    def stop(self) -> None:
        """Drain and end the thread."""
        self.call(self.gate.stop())
        self._end()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the gate's loop, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begin(self) -> None:
        models, settings = self._settings
        self.gate = Gate(models, self._face, settings)

    async def _listen(self) -> int:
        """Listen on the first free port from the configured one on; return it. InputError if there is none."""
        network = self._face.network
        first_port = network.http_port
        # Retry with the next port if this one is taken: nothing was bound, so a retry leaves nothing behind.
        for offset in range(PORTS if first_port else 1):
            try:
                return await self.gate.start(offset)
            except RuntimeError as error:  # gRPC gives no reason
                await self.gate.stop()
                where = f"{network.host}:{(network.grpc_port or 0) + offset}"
                raise InputError(f"cannot listen on {where} for gRPC; choose another") from error
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    where = f"{network.host}:{first_port + offset}"
                    raise InputError(f"cannot listen on {where}: {error.strerror or error}") from error
        raise InputError(f"ports {first_port} to {first_port + PORTS - 1} of {network.host} are taken; choose another")

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

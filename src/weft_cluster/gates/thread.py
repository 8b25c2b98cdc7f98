"""A gate inside a Python program that has a loop of its own, or none: on a thread with another loop."""

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
"""How many ports are tried, from the one that is asked for on."""


class GateThread:
    """A gate that listens from ``start`` to ``stop``; or is there from ``begin``, to know servers, and listens from
    ``listen``."""

    def __init__(self, models: Iterable[str], face: ServerConfig, settings: GateSettings = USUAL_SETTINGS) -> None:
        self._made = tuple(models), settings
        self._face = face
        self._loop = (fastest_loop() or asyncio.new_event_loop)()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weft gate", daemon=True)
        self.gate: Gate

    def start(self) -> int:
        """Listen on the port that is asked for, or on the next that is free; returns it."""
        self.begin()
        return self.listen()

    def begin(self) -> None:
        """Be there, without clients."""
        sys.setswitchinterval(SWITCH_S)  # other threads of the program shall not keep requests waiting
        self._thread.start()
        try:
            self.call(self._begin())
        except BaseException:
            self._end()
            raise

    def listen(self) -> int:
        """The rest of ``start``."""
        try:
            return self.call(self._listen())
        except BaseException:
            self._end()
            raise

    def know(self, servers: Mapping[str, PlacedMachine], models: Iterable[str] | None = None) -> None:
        """From now on these are the servers: URL -> its machine. *models*: those that shall be there, if others."""
        if models is not None:
            self.asked(lambda: self.gate.board.expect(models))
        self.call(self.gate.know(servers))

    def told(self) -> dict[str, Any]:
        """How the cluster stands, as the gate sees it."""
        return self.asked(self.gate.told)

    def asked(self, question: Callable[[], T]) -> T:
        """What the gate says, on its own thread."""

        async def answer() -> T:
            return question()

        return self.call(answer())

    def stop(self) -> None:
        """Answer what is there, and end."""
        self.call(self.gate.stop())
        self._end()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Have something done on the gate's loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begin(self) -> None:
        models, settings = self._made
        self.gate = Gate(models, self._face, settings)

    async def _listen(self) -> int:
        network = self._face.network
        asked = network.http_port
        for more in range(PORTS if asked else 1):
            try:
                return await self.gate.start(more)
            except RuntimeError as error:  # gRPC does not tell why
                await self.gate.stop()
                where = f"{network.host}:{(network.grpc_port or 0) + more}"
                raise InputError(f"cannot listen on {where} for gRPC; choose another") from error
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    where = f"{network.host}:{asked + more}"
                    raise InputError(f"cannot listen on {where}: {error.strerror or error}") from error
        raise InputError(f"ports {asked} to {asked + PORTS - 1} of {network.host} are taken; choose another")

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

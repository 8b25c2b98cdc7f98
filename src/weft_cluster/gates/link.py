"""A server behind a gate: its address, the connection pool to it, and its health probe."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import quote

from weft.http.client import Answer, Pool, ServerAddress, call, request_bytes
from weft.serving.request_parameters import ModelTerms
from weft_cluster.placing.placement import PlacedMachine

LOOK_S = 0.25
"""Period of the health probe; a broken connection triggers one at once."""
PATIENCE_S = 1.0
"""Timeout of a health probe."""
SILENT_NS = 5_000_000_000
"""A server whose probes time out is down after this time without any answer: a busy one is slow to answer probes."""
SMOOTHING = 0.05
"""Weight of a round trip that is longer than the estimate; a shorter one replaces it, since queueing only lengthens
it."""


class Link:
    """One server and its health. *changed* is called when it begins or ceases to take requests."""

    def __init__(
        self,
        placed: PlacedMachine,
        target: ServerAddress,
        place: int,
        changed: Callable[[Link], None],
        *,
        key: str | None,
        connections: int,
    ) -> None:
        self.placed, self.target, self.place, self.key = placed, target, place, key
        self.machine = placed.name
        self.shown = quote(self.machine)
        """The machine's name, quoted for an HTTP header."""
        self.pool = Pool(target, connections)
        self.up = False
        self.way_ns = 0
        """Round trip of the network, as the health probe measures it."""
        self.terms: dict[str, ModelTerms] = {}
        """Model -> the default deadline of its requests."""
        self.counts: Counter[str] = Counter()
        """How requests ended here."""
        self.took_ns = 0
        self.heard_ns = 0
        """When a request was last answered here."""
        self._well_ns = 0
        self._changed, self._wanted = changed, True
        self._control = Pool(target, 1)
        self._sooner = asyncio.Event()
        self._probes = asyncio.create_task(self._probe_forever())

    def suspect(self) -> None:
        """Probe at once, because a connection broke."""
        self._sooner.set()

    def want(self, wanted: bool) -> None:
        """Set whether it gets new requests; those that it has are answered."""
        self._wanted = wanted
        self._set_up(up=self.up)

    async def close(self) -> None:
        """End the probes, and close all connections, broken requests included."""
        self._probes.cancel()
        await asyncio.gather(self._probes, return_exceptions=True)
        self.pool.lose()
        await self._control.close()
        await self.pool.close()

    async def _probe_forever(self) -> None:
        while True:
            self._sooner.clear()
            await self._probe()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._sooner.wait()

    async def _probe(self) -> None:
        """Probe readiness. A probe that times out does not take the server down while it still answers requests."""
        began = time.monotonic_ns()
        try:
            answer = await self._ask("v2/health/ready")
            up, self._well_ns = answer.status == 200, time.monotonic_ns()
            passed = self._well_ns - began
            if up and not self.up:
                await self._learn()
        except TimeoutError:
            if time.monotonic_ns() - max(self.heard_ns, self._well_ns) > SILENT_NS:
                self._set_up(up=False)
                self.pool.lose()
            return
        except OSError:
            self._set_up(up=False)
            self.pool.lose()
            return
        if up:
            longer = self.way_ns and passed > self.way_ns
            self.way_ns = self.way_ns + round(SMOOTHING * (passed - self.way_ns)) if longer else passed
        self._set_up(up=up)

    def _set_up(self, *, up: bool) -> None:
        up = up and self._wanted
        if up != self.up:
            self.up = up
            self._changed(self)

    async def _learn(self) -> None:
        """Read the default deadlines of its models."""
        for placed in self.placed.models:
            answer = await self._ask(f"v2/models/{quote(placed.model, safe='')}/config")
            if answer.status == 200:
                self.terms[placed.model] = _terms(answer.body)

    async def _ask(self, path: str) -> Answer:
        """GET *path*. TimeoutError without an answer within ``PATIENCE_S``, OSError without a connection."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await call(self._control, request_bytes(self.target, "GET", path, key=self.key))
        except OSError:
            self._control.lose()
            raise


def _terms(body: bytes) -> ModelTerms:
    """Parse the default deadlines from the configuration of a model; none if it has none."""
    try:
        parameters = json.loads(body)["parameters"]
        terms = {
            key: float(parameters[f"weft_{key}"]["string_value"]) for key in _STATED if f"weft_{key}" in parameters
        }
    except (ValueError, KeyError, TypeError):
        return ModelTerms()
    return ModelTerms(**terms)


_STATED = ("slo_ms", "timeout_ms")

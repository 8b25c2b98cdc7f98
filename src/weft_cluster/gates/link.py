"""A server behind a gate: where it is, the connections to it, and whether it is there."""

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
"""How often a server is asked whether it takes requests."""
PATIENCE_S = 1.0
"""How long it may take to say so."""
SILENT_NS = 5_000_000_000
"""A server that takes longer is down when it has answered nothing else for so long."""
SMOOTHING = 0.05
"""Weight of a way that was longer than before; a shorter one counts at once."""


class Link:
    """One server, asked now and then; *changed* hears when it begins or ceases to take requests."""

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
        """Its machine, as a header can carry it."""
        self.pool = Pool(target, connections)
        self.up = False
        self.way_ns = 0
        """There and back, where nothing is to be done."""
        self.terms: dict[str, ModelTerms] = {}
        """Model -> when requests for it are due that do not say so."""
        self.counts: Counter[str] = Counter()
        """How requests ended here."""
        self.took_ns = 0
        self.heard_ns = 0
        """When a request was last answered here."""
        self._well_ns = 0
        self._changed, self._wanted = changed, True
        self._control = Pool(target, 1)
        self._sooner = asyncio.Event()
        self._watch = asyncio.create_task(self._watching())

    def suspect(self) -> None:
        """Look at once: a connection broke."""
        self._sooner.set()

    def want(self, wanted: bool) -> None:
        """Whether it shall get requests at all; one that shall not answers those that it has."""
        self._wanted = wanted
        self._stands(up=self.up)

    async def close(self) -> None:
        """Ask no more, and break what is under way."""
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        self.pool.lose()
        await self._control.close()
        await self.pool.close()

    async def _watching(self) -> None:
        while True:
            self._sooner.clear()
            await self._look()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._sooner.wait()

    async def _look(self) -> None:
        """Ask whether it takes requests; one that is only slow to say so is left in peace while it answers others."""
        began = time.monotonic_ns()
        try:
            answer = await self._ask("v2/health/ready")
            up, self._well_ns = answer.status == 200, time.monotonic_ns()
            passed = self._well_ns - began
            if up and not self.up:
                await self._learn()
        except TimeoutError:
            if time.monotonic_ns() - max(self.heard_ns, self._well_ns) > SILENT_NS:
                self._stands(up=False)
                self.pool.lose()
            return
        except OSError:
            self._stands(up=False)
            self.pool.lose()
            return
        if up:
            longer = self.way_ns and passed > self.way_ns
            self.way_ns = self.way_ns + round(SMOOTHING * (passed - self.way_ns)) if longer else passed
        self._stands(up=up)

    def _stands(self, *, up: bool) -> None:
        up = up and self._wanted
        if up != self.up:
            self.up = up
            self._changed(self)

    async def _learn(self) -> None:
        """When requests are due here that do not say so."""
        for each in self.placed.models:
            answer = await self._ask(f"v2/models/{quote(each.model, safe='')}/config")
            if answer.status == 200:
                self.terms[each.model] = _terms(answer.body)

    async def _ask(self, path: str) -> Answer:
        """The answer to a question; TimeoutError where none comes in time, OSError where nobody is there."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await call(self._control, request_bytes(self.target, "GET", path, key=self.key))
        except OSError:
            self._control.lose()
            raise


def _terms(body: bytes) -> ModelTerms:
    """The deadlines among the settings of a model, as its configuration shows them."""
    try:
        parameters = json.loads(body)["parameters"]
        found = {
            key: float(parameters[f"weft_{key}"]["string_value"]) for key in _STATED if f"weft_{key}" in parameters
        }
    except (ValueError, KeyError, TypeError):
        return ModelTerms()
    return ModelTerms(**found)


_STATED = ("slo_ms", "timeout_ms")

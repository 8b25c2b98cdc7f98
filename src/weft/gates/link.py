"""A server behind a gate: where it is, the connections to it, and whether it is there."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from urllib.parse import quote

from weft.load.answers import Answer
from weft.load.client import Pool, ServerAddress, call, request_bytes
from weft.serving.request_parameters import ModelTerms

LOOK_S = 0.25
"""How often a server is asked whether it takes requests."""
PATIENCE_S = 1.0
"""How long it may take to say so."""
SMOOTHING = 0.05
"""Weight of a way that was longer than before; a shorter one counts at once."""


class Link:
    """One server, asked now and then; *changed* hears when it begins or ceases to take requests."""

    def __init__(
        self,
        machine: str,
        target: ServerAddress,
        place: int,
        models: Sequence[str],
        changed: Callable[[Link], None],
        *,
        key: str | None,
        connections: int,
    ) -> None:
        self.machine, self.target, self.place, self.key = machine, target, place, key
        self.shown = quote(machine)
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
        self._models, self._changed = models, changed
        self._control = Pool(target, 1)
        self._sooner = asyncio.Event()
        self._watch = asyncio.create_task(self._watching())

    def suspect(self) -> None:
        """Look at once: a connection broke."""
        self._sooner.set()

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
            up = await self._looks_well()
            if up and not self.up:
                await self._learn()
            if up != self.up:
                self.up = up
                self._changed(self)
            if not up:
                self.pool.lose()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._sooner.wait()
            except TimeoutError:
                continue

    async def _looks_well(self) -> bool:
        began = time.monotonic_ns()
        answer = await self._ask("v2/health/ready")
        passed = time.monotonic_ns() - began
        if answer is None or answer.status != 200:
            return False
        longer = self.way_ns and passed > self.way_ns
        self.way_ns = self.way_ns + round(SMOOTHING * (passed - self.way_ns)) if longer else passed
        return True

    async def _learn(self) -> None:
        """When requests are due here that do not say so."""
        for model in self._models:
            answer = await self._ask(f"v2/models/{quote(model, safe='')}/config")
            if answer is not None and answer.status == 200:
                self.terms[model] = _terms(answer.body)

    async def _ask(self, path: str) -> Answer | None:
        """The answer to a question; None where there is none in time."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await call(self._control, request_bytes(self.target, "GET", path, key=self.key))
        except OSError:
            self._control.lose()
            return None


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

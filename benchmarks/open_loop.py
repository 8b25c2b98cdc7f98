"""An open-loop client: requests are sent at scheduled times, whether or not earlier ones were answered.

A latency counts from the time at which the request was due, so a server that stalls is charged for all waiting
requests, and so is this client for its own delay (``Seen.lag_s``). Everything is sent from one thread. Requests share
connections that were opened before the first one is due, or open one of their own (``Ask.fresh``).
``weft.load`` does the same for servers of the Open Inference Protocol; here requests are bytes, for any protocol.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.http.client import Answer, Pool, parse_url
from weft.load.generator import precise_loop
from weft.load.report import BROKEN, LOST, OK, observed_quantiles

Floats = npt.NDArray[np.float64]
LEAD_S = 0.05
MOST_CONNECTIONS = 1000
"""More than any run needs, so that nobody waits for a connection that a slow answer holds."""


class Ask(NamedTuple):
    """A stream of equal requests."""

    name: str
    request: bytes
    per_s: float
    regular: bool = False
    """At equal distances; else at random, as independent clients are."""
    fresh: bool = False
    """Each on a connection of its own, which is part of its latency."""


@dataclass(eq=False)
class Seen:
    """What became of a stream's requests."""

    name: str
    due_s: Floats
    lag_s: Floats
    """From when it was due until it was handed to a connection; NaN where it never was."""
    latency_s: Floats
    """From when it was due until the whole answer was there; NaN where there was none."""
    status: npt.NDArray[np.int16]
    """An HTTP status, BROKEN or LOST."""
    said: dict[int, str] = field(default_factory=dict)
    """Status -> what the first answer with it said, for all but 200."""

    def after(self, warmup_s: float) -> Seen:
        """Without those that were due before."""
        kept = self.due_s >= warmup_s
        return Seen(self.name, self.due_s[kept], self.lag_s[kept], self.latency_s[kept], self.status[kept], self.said)

    @property
    def good_s(self) -> Floats:
        """Latencies of what was answered with 200."""
        return self.latency_s[self.status == OK]

    @property
    def failed(self) -> dict[int, int]:
        """Status -> how many, of all but 200."""
        codes, counts = np.unique(self.status[self.status != OK], return_counts=True)
        return {int(code): int(count) for code, count in zip(codes, counts, strict=True)}

    def quantile_s(self, share: float) -> float | None:
        """The latency that so many of the answers do not exceed; one that was seen."""
        return observed_quantiles(self.good_s, (share,))[0]


class _Stream:
    """A stream under way; hears of each of its requests."""

    def __init__(self, ask: Ask, due_s: Floats, left: _Left) -> None:
        self.ask, self.left, self.keep_bytes = ask, left, 0
        self.start_s = 0.0
        count = len(due_s)
        self.seen = Seen(
            ask.name, due_s, np.full(count, np.nan), np.full(count, np.nan), np.full(count, LOST, np.int16)
        )

    def request(self, number: int) -> bytes:
        return self.ask.request

    def sent(self, number: int, now_s: float) -> None:
        self.seen.lag_s[number] = now_s - self.start_s - self.seen.due_s[number]

    def answered(self, number: int, answer: Answer, now_s: float) -> None:
        self.seen.latency_s[number] = now_s - self.start_s - self.seen.due_s[number]
        self._over(number, answer.status, answer.body.decode("utf-8", "replace"))

    def broken(self, number: int, why: str, now_s: float) -> None:
        self._over(number, BROKEN, why)

    def _over(self, number: int, status: int, text: str) -> None:
        self.seen.status[number] = status
        if status != OK:
            self.seen.said.setdefault(status, " ".join(text.split())[:200])
        self.left.one_less()


class _Left:
    """How many requests have no end yet."""

    def __init__(self, count: int) -> None:
        self.count, self.none = count, asyncio.Event()

    def one_less(self) -> None:
        self.count -= 1
        if not self.count:
            self.none.set()


def due_times(ask: Ask, seconds: float, rng: np.random.Generator) -> Floats:
    """When a stream's requests are due."""
    if ask.regular:
        return np.arange(round(ask.per_s * seconds)) / ask.per_s
    times = np.cumsum(rng.exponential(1 / ask.per_s, size=round(ask.per_s * seconds * 2) + 50))
    return times[times < seconds]


def run_open_loop(
    asks: Sequence[Ask],
    url: str,
    seconds: float,
    *,
    seed: int = 0,
    connections: int = 32,
    grace_s: float = 30.0,
    then: Mapping[float, Callable[[], object]] | None = None,
) -> dict[str, Seen]:
    """Send all streams for so long and wait for the answers, *grace_s* at most after the last was due.

    connections: opened before; more are where all are busy. then: what else to do, at which second.
    """
    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=precise_loop) as runner:
            return runner.run(_drive(asks, url, seconds, seed, connections, grace_s, then or {}))
    finally:
        gc.enable()


async def _drive(
    asks: Sequence[Ask],
    url: str,
    seconds: float,
    seed: int,
    connections: int,
    grace_s: float,
    then: Mapping[float, Callable[[], object]],
) -> dict[str, Seen]:
    loop, target = asyncio.get_running_loop(), parse_url(url)
    times = [due_times(ask, seconds, np.random.default_rng([seed, index])) for index, ask in enumerate(asks)]
    left = _Left(sum(map(len, times)))
    streams = [_Stream(ask, due_s, left) for ask, due_s in zip(asks, times, strict=True)]
    pools = [Pool(target, MOST_CONNECTIONS)]
    await pools[0].open(connections)

    def send(stream: _Stream, number: int) -> None:
        if stream.ask.fresh:
            pools.append(Pool(target, 1))
        pools[-1 if stream.ask.fresh else 0].send(stream, number)

    start_s = loop.time() + LEAD_S
    for stream in streams:
        stream.start_s = start_s
        for number, due_s in enumerate(stream.seen.due_s.tolist()):
            loop.call_at(start_s + due_s, send, stream, number)
    for at_s, action in then.items():
        loop.call_at(start_s + at_s, action)
    with suppress(TimeoutError):  # who has no answer by then is counted as such
        async with asyncio.timeout_at(start_s + seconds + grace_s):
            await left.none.wait()
    for pool in pools:
        await pool.close()
    return {stream.seen.name: stream.seen for stream in streams}

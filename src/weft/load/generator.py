"""Sends a workload to a server at the times its arrival processes draw, and measures from those times.

The generator is an open loop: a request leaves when its time has come, whatever became of those before
it, and its latency counts from that time even where the generator, or a connection, was late. So a
server that stalls is charged for every request it kept waiting, not only for the one that hung.
Closed streams are the exception they are meant to be: a client's next request has its time when the
last one is answered and the client has thought.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import ssl
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from typing import Any, NamedTuple, ParamSpec

import numpy as np

from weft.base.errors import InputError, ShapeNeeded, WorkloadError, reason_of, unknown_name
from weft.http.answers import Answer
from weft.http.client import Pool, call, parse_url, request_bytes, unreachable
from weft.load.payload import (
    BINARY,
    DEADLINES,
    Payload,
    announced,
    build_payload,
    model_path,
    read_inputs,
    read_shapes,
    served_name,
    unshaped,
)
from weft.load.reading import MAX_ANSWER_BYTES, Readings, announces_exits
from weft.load.report import BROKEN, LOST, OK, LoadResult, StreamLoad, stream_load
from weft.load.timing import precise_loop
from weft.workloads.exits import MOST_EXITS
from weft.workloads.requests import Stream, Workload

Asked = ParamSpec("Asked")
Progress = Callable[[float, int, int], None]
"""Called now and then with the seconds gone, the answers that came, and the requests under way or waiting."""

MOST_REQUESTS = 5_000_000
SENT_AT_ONCE = 32
"""Requests sent in a row before the loop may look for answers."""
LEAD_S = 0.05
PAUSE_S = 0.05
"""How long a closed client waits at least after its connection failed."""
ROUND_TRIPS = 50
PROGRESS_S = 0.2
SHOWN_CHARACTERS = 200
SAMPLING = 2
"""Of a seed's independent sequences, the one that samples are drawn from; the others are the workload's."""

ANSWER_HEAD_BYTES = 64 << 10
"""How much of an answer is searched for its parameters."""


@dataclass(frozen=True, slots=True)
class _Preparation:
    """What the server was asked before the run."""

    server: dict[str, Any]
    payloads: tuple[Payload, ...]
    """What is sent for each stream."""
    tell_exits: tuple[bool, ...]
    """Whether the answers to each tell at which exit they left."""
    transport_s: float


async def drive(
    workload: Workload,
    url: str,
    *,
    deadlines: str = "strict",
    connections: int = 512,
    api_key: str | None = None,
    grace_s: float = 30.0,
    context: ssl.SSLContext | None = None,
    progress: Progress | None = None,
    alone: int = 0,
) -> LoadResult:
    """Send a workload to the server at *url* and wait for the answers.

    deadlines: strict tells the server to give up at the deadline, soft tells it the deadline, none
    nothing. connections: as many at most. grace_s: what has no answer so long after the last arrival
    is lost. context: for https, instead of the system's certificates. alone: so many requests of every
    stream are sent one after another before, to find out what they take besides being computed.
    """
    _check(deadlines, connections, grace_s)
    target = parse_url(url, context)
    clock = _Clock(asyncio.get_running_loop(), workload.duration_s, grace_s)
    control, pool = Pool(target, 1), Pool(target, connections)
    try:
        plan = await _prepare(workload, control, deadlines, api_key)
        overheads = [await _overhead_s(control, each.requests[0], alone) for each in plan.payloads]
        run = _LoadRun(workload, plan, pool, clock)
        await _reach(pool, max(4, *(s.clients for s in workload.stream if s.arrival == "closed"), 4))
        started, cpu_s = datetime.now(UTC), time.thread_time()
        await run.go(progress)
        cpu_s = time.thread_time() - cpu_s
        await pool.close()  # what comes now is too late
        profile = await _profile(control, api_key)
    finally:
        await pool.close()
        await control.close()
    return LoadResult(
        url=target.url,
        server=plan.server,
        workload=workload,
        deadlines=deadlines,
        streams=run.results(profile),
        started=started.isoformat(timespec="milliseconds"),
        elapsed_s=clock.ended_s,
        transport_s=plan.transport_s,
        cpu_s=cpu_s,
        connections=pool.opened,
        held_back=pool.held_back,
        profile=profile,
        overhead_s=tuple(overheads),
    )


def _waited_for(send: Callable[Asked, Coroutine[Any, Any, LoadResult]]) -> Callable[Asked, LoadResult]:
    """*send* for callers that have no event loop: it runs in one of its own, and nothing of ours disturbs it."""

    @wraps(send)
    def run(*what: Asked.args, **how: Asked.kwargs) -> LoadResult:
        with _undisturbed(), asyncio.Runner(loop_factory=precise_loop) as runner:
            return runner.run(send(*what, **how))

    return run


run_load = _waited_for(drive)
"""``drive`` for callers without an event loop."""


async def _overhead_s(pool: Pool, request: bytes, count: int) -> float | None:
    """What a request takes alone besides waiting and being computed, as a weft server tells those; the median."""
    found = []
    for _ in range(count):
        began_s = time.perf_counter()
        answer = await call(pool, request)
        took_s = time.perf_counter() - began_s
        told = _told_us(answer.body) if answer.status == OK else None
        if told is not None:
            found.append(took_s - told / 1e6)
    return max(0.0, statistics.median(found)) if found else None


def _told_us(body: bytes) -> int | None:
    """Queueing and computing as the answer's parameters say it; its tensors may follow in binary."""
    try:
        answer, _ = json.JSONDecoder().raw_decode(body[:ANSWER_HEAD_BYTES].decode("latin-1"))
        parameters = answer["parameters"]
        return int(parameters["weft_queue_us"]) + int(parameters["weft_compute_us"])
    except (ValueError, KeyError, TypeError):
        return None


def _check(deadlines: str, connections: int, grace_s: float) -> None:
    if deadlines not in DEADLINES:
        raise InputError(unknown_name("rule for deadlines", deadlines, DEADLINES))
    if connections < 1:
        raise InputError(f"--connections {connections} leaves nothing to send on; give at least 1")
    if not 0 <= grace_s < math.inf:
        raise InputError(f"--grace {grace_s} is no time to wait; give seconds from 0 on")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection, and other threads of ours give way soon."""
    interval_s, collecting = sys.getswitchinterval(), gc.isenabled()
    gc.collect()
    gc.disable()
    sys.setswitchinterval(min(interval_s, 2e-4))
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        if collecting:
            gc.enable()


class _Clock:
    """Time since the start of a run; the start may still lie ahead."""

    def __init__(self, loop: asyncio.AbstractEventLoop, duration_s: float, grace_s: float) -> None:
        self.loop = loop
        self.duration_s = duration_s
        self.grace_s = grace_s
        self.start_s = 0.0
        """When the run begins, on the loop's own clock."""
        self.ended_s = 0.0


class _Part(NamedTuple):
    """All that one stream needs of a run."""

    stream: Stream
    payload: Payload
    tell_exits: bool
    rng: np.random.Generator
    """Which samples are sent."""
    clock: _Clock
    pool: Pool
    leave: Callable[[], None]


class _Open:
    """An open stream's requests; it sends them when told to."""

    def __init__(self, part: _Part) -> None:
        self.stream, self.clock = part.stream, part.clock
        self._payload, self._rng, self._leave = part.payload, part.rng, part.leave
        self._readings = Readings(part.payload.labels, exits=part.tell_exits)
        self.keep_bytes = MAX_ANSWER_BYTES if self._readings.wanted else 0
        self._rows = array("q")
        self.answers = 0
        self.messages: dict[int, str] = {}
        self.scheduled, self.lag, self.latency, self.status = array("d"), array("d"), array("d"), array("h")

    def schedule(self, times_s: Sequence[float]) -> None:
        """Add requests that nothing has become of yet."""
        count = len(times_s)
        self.scheduled.extend(times_s)
        self.lag.extend([math.nan] * count)
        self.latency.extend([math.nan] * count)
        self.status.extend([LOST] * count)
        self._readings.expect(count)
        if self._payload.sampled:
            self._rows.extend(self._rng.integers(len(self._payload.requests), size=count).tolist())

    def request(self, number: int) -> bytes:
        return self._payload.requests[self._rows[number] if self._rows else 0]

    def sent(self, number: int, now_s: float) -> None:
        self.lag[number] = now_s - self.clock.start_s - self.scheduled[number]

    def answered(self, number: int, answer: Answer, now_s: float) -> None:
        self.latency[number] = now_s - self.clock.start_s - self.scheduled[number]
        self.status[number] = answer.status
        self.answers += 1
        if answer.status != OK and answer.status not in self.messages:
            self.messages[answer.status] = _told(answer.body)
        self.over(now_s)
        if self.keep_bytes and answer.status == OK:  # after the client's next request has left
            self._readings.read(number, answer)

    def broken(self, number: int, why: str, now_s: float) -> None:
        self.status[number] = BROKEN
        self.messages.setdefault(BROKEN, _one_line(why))
        self.over(now_s, at_least_s=PAUSE_S)

    def over(self, now_s: float, at_least_s: float = 0.0) -> None:
        """One request has ended."""
        self._leave()

    def result(self, workload: Workload, exit_count: int) -> StreamLoad:
        rows = np.array(self._rows, np.int64) if self._payload.sampled else None
        lag_s, scheduled_s = np.array(self.lag), np.array(self.scheduled)
        waited_s = np.maximum(0.0, self.clock.ended_s - scheduled_s)
        return stream_load(
            workload,
            self.stream,
            scheduled_s=scheduled_s,
            lag_s=np.where(np.isnan(lag_s), waited_s, lag_s),
            latency_s=np.array(self.latency),
            status=np.array(self.status, np.int16),
            messages=self.messages,
            said=self._readings.said(rows, exit_count),
        )


class _Closed(_Open):
    """A closed stream: as many clients, each of which sends again when it has its answer and has thought."""

    def __init__(self, part: _Part) -> None:
        super().__init__(part)
        self._pool = part.pool

    def begin(self) -> None:
        for number in range(self.stream.clients):
            self.schedule([0.0])
            self._pool.send(self, number)

    def over(self, now_s: float, at_least_s: float = 0.0) -> None:
        pause_s = max(self.stream.think_ms / 1e3, at_least_s)
        at_s = now_s - self.clock.start_s + pause_s
        if at_s >= self.clock.duration_s:
            self._leave()
            return
        number = len(self.scheduled)
        self.schedule([at_s])
        if pause_s:
            self.clock.loop.call_at(self.clock.start_s + at_s, self._pool.send, self, number)
        else:
            self._pool.send(self, number)


class _LoadRun:
    """The streams of a workload, and the order in which the open ones send."""

    def __init__(self, workload: Workload, plan: _Preparation, pool: Pool, clock: _Clock) -> None:
        self.workload = workload
        self.pool = pool
        self.clock = clock
        self._over = clock.loop.create_future()
        self._under_way = 0
        """Open requests without an end, and closed clients that are not through."""
        self.streams = [self._stream(index, plan) for index in range(len(workload.stream))]
        self._next = 0
        self._order()

    def _stream(self, index: int, plan: _Preparation) -> _Open:
        stream = self.workload.stream[index]
        # Numbers of their own: with samples or without, the arrivals are the same.
        rng = np.random.default_rng([self.workload.seed, index, SAMPLING])
        payload, tells = plan.payloads[index], plan.tell_exits[index]
        part = _Part(stream, payload, tells, rng, self.clock, self.pool, self._leave)
        return _Closed(part) if stream.arrival == "closed" else _Open(part)

    def _order(self) -> None:
        """All open requests of all streams by their times."""
        times, owners, numbers = [np.empty(0)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        total = 0
        for index, each in enumerate(self.streams):
            if isinstance(each, _Closed):
                continue
            for block in self.workload.arrivals(index):
                times.append(block)
                numbers.append(np.arange(len(each.scheduled), len(each.scheduled) + len(block)))
                owners.append(np.full(len(block), index))
                each.schedule(block.tolist())
                total += len(block)
                if total > MOST_REQUESTS:
                    raise WorkloadError(f"more than {MOST_REQUESTS} requests; lower the rates or duration_s")
        at_s = np.concatenate(times)
        order = np.argsort(at_s, kind="stable")
        self._times: list[float] = at_s[order].tolist()
        self._owners = [self.streams[index] for index in np.concatenate(owners)[order].tolist()]
        self._numbers: list[int] = np.concatenate(numbers)[order].tolist()

    async def go(self, progress: Progress | None) -> None:
        """Send everything; returns with the last answer or at the end of the grace."""
        loop, clock = self.clock.loop, self.clock
        clock.start_s = loop.time() + LEAD_S
        closed = [each for each in self.streams if isinstance(each, _Closed)]
        self._under_way = len(self._times) + sum(each.stream.clients for each in closed)
        if not self._under_way:
            raise WorkloadError(f"nothing arrives within {clock.duration_s:g} s; raise the rates or duration_s")
        for each in closed:
            loop.call_at(clock.start_s, each.begin)
        if self._times:
            loop.call_at(clock.start_s + self._times[0], self._send_due)
        cut = loop.call_at(clock.start_s + clock.duration_s + clock.grace_s, self._end)
        if progress:
            self._tell(progress)
        await self._over
        cut.cancel()
        clock.ended_s = loop.time() - clock.start_s

    def results(self, profile: Any) -> tuple[StreamLoad, ...]:
        """What became of each stream; *profile*: what the server says of its models."""
        return tuple(each.result(self.workload, _exit_count(profile, each.stream)) for each in self.streams)

    def _send_due(self) -> None:
        """Send what is due, and come back when the next one is."""
        if self._over.done():
            return
        loop, start_s, times, send = self.clock.loop, self.clock.start_s, self._times, self.pool.send
        first = self._next
        last = min(len(times), first + SENT_AT_ONCE)
        while self._next < last and start_s + times[self._next] <= loop.time():
            number = self._next
            self._next = number + 1
            send(self._owners[number], self._numbers[number])
        if self._next < len(times):
            loop.call_at(start_s + times[self._next], self._send_due)

    def _leave(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._end()

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _tell(self, progress: Progress) -> None:
        if self._over.done():
            return
        gone_s = max(0.0, self.clock.loop.time() - self.clock.start_s)
        answers = sum(each.answers for each in self.streams)
        progress(gone_s, answers, self.pool.outstanding)
        self.clock.loop.call_later(PROGRESS_S, self._tell, progress)


async def _prepare(workload: Workload, control: Pool, deadlines: str, key: str | None) -> _Preparation:
    """Ask the server what it is and what its models take; build every stream's request."""
    await _reach(control, 1)
    server = await _asked(control, "v2", key)
    if not isinstance(server, dict):
        raise InputError(f"{control.target.url}: GET v2 does not describe a server of the Open Inference Protocol")
    payloads, tell_exits = [], []
    for index, stream in enumerate(workload.stream):
        metadata = await _metadata(control, stream, key)
        inputs = read_inputs(stream.model, metadata)
        if unknown := unshaped(stream, inputs):
            known = read_shapes(await _config(control, stream, key))
            stated = {name: shape for name, shape in known.items() if name in unknown}
            stream = stream.model_copy(update={"shapes": {**stated, **stream.shapes}})
        tell_exits.append(announces_exits(metadata))
        try:
            payload = build_payload(
                stream,
                inputs,
                control.target,
                deadlines=deadlines,
                binary=announced(server, BINARY),
                key=key,
                seed=(workload.seed, index),
                folder=workload.folder,
            )
        except ShapeNeeded as error:
            raise workload.advised(stream, error) from error
        payloads.append(payload)
    return _Preparation(server, tuple(payloads), tuple(tell_exits), await _round_trip_s(control, key))


async def _reach(pool: Pool, count: int) -> None:
    try:
        await pool.open(count)
    except OSError as error:
        raise InputError(unreachable(pool.target.url, error, "weft serve")) from error


async def _call(control: Pool, request: bytes) -> Answer:
    try:
        return await call(control, request)
    except OSError as error:
        why = _one_line(reason_of(error)) or "no answer in time"
        raise InputError(f"{control.target.url}: the server does not answer: {why}") from error


async def _asked(control: Pool, path: str, key: str | None) -> Any:
    """The JSON under a path that every server of the protocol has."""
    answer = await _call(control, request_bytes(control.target, "GET", path, key=key))
    if answer.status == 401:
        raise InputError(f"{control.target.url}: the server wants another key than this one; give --api-key")
    if answer.status != OK:
        raise InputError(f"{control.target.url}: GET {path} has status {answer.status}: {_told(answer.body)}")
    return _parsed(answer.body)


async def _metadata(control: Pool, stream: Stream, key: str | None) -> Any:
    path, name = model_path(stream), served_name(stream.model)
    answer = await _call(control, request_bytes(control.target, "GET", path, key=key))
    if answer.status == OK:
        return _parsed(answer.body)
    if answer.status not in (400, 404):
        raise InputError(f"{control.target.url}: GET {path} has status {answer.status}: {_told(answer.body)}")
    index = await _call(control, request_bytes(control.target, "POST", "v2/repository/index", key=key, body=b"{}"))
    listed = _parsed(index.body) if index.status == OK else None
    known = [str(each["name"]) for each in listed if isinstance(each, dict) and "name" in each] if listed else []
    hint = unknown_name("model", name, known) if known else f"unknown model {name!r}; {_told(answer.body)}"
    raise InputError(f"{control.target.url}: {hint}")


async def _config(control: Pool, stream: Stream, key: str | None) -> Any:
    """What the server was told of a model; None where it does not say."""
    answer = await _call(control, request_bytes(control.target, "GET", f"{model_path(stream)}/config", key=key))
    return _parsed(answer.body) if answer.status == OK else None


async def _round_trip_s(control: Pool, key: str | None) -> float:
    request, loop, times = request_bytes(control.target, "GET", "v2/health/live", key=key), control.loop, []
    for _ in range(ROUND_TRIPS):
        before_s = loop.time()
        await _call(control, request)
        times.append(loop.time() - before_s)
    return statistics.median(times)


async def _profile(control: Pool, key: str | None) -> Any:
    """What a weft server measured; None where it is another server, or gone."""
    try:
        answer = await call(control, request_bytes(control.target, "GET", "weft/profile", key=key))
    except OSError:
        return None
    return _parsed(answer.body) if answer.status == OK else None


def _exit_count(profile: Any, stream: Stream) -> int:
    """How many exits a model has, its end among them, as a weft server tells; 0 where nobody does."""
    try:
        early = profile["models"][served_name(stream.model)]["exits"]
    except (KeyError, TypeError):
        return 0
    return len(early) + 1 if isinstance(early, list) and 0 < len(early) < MOST_EXITS else 0


def _parsed(body: bytes) -> Any:
    def refuse(token: str) -> Any:
        raise ValueError(f"{token} is no JSON")

    try:
        return json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None


def _told(body: bytes) -> str:
    """What an error's body says, on one line."""
    found = _parsed(body)
    if isinstance(found, dict):
        found = next((found[key] for key in ("error", "detail", "message") if key in found), None)
        if found is not None:
            return _one_line(found if isinstance(found, str) else json.dumps(found))
    return _one_line(body.decode("utf-8", "replace")) or "no text"


def _one_line(text: str) -> str:
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    line = " ".join(line.split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 3] + "..."

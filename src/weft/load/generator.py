"""The load generator: sends requests at the times that arrival processes draw, and measures from those times.

The load is open-loop: a request is sent at its scheduled time, whether or not earlier ones were answered, and its
latency counts from that time even if the generator, or a connection, was late. A server that stalls is thus charged for
every request that it kept waiting, not only for the one that hung. Closed streams are the exception: a client's next
request is scheduled when the last one is answered and the think time has passed.

Requests besides the load, such as those for metadata, have a connection of their own (*control*).
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import select
import selectors
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
from weft.http.client import Answer, Pool, call, parse_url, request_bytes, unreachable
from weft.load.payload import (
    BINARY,
    DEADLINES,
    Payload,
    build_payload,
    has_extension,
    inputs_without_shape,
    model_path,
    read_inputs,
    read_shapes,
    served_name,
)
from weft.load.report import (
    BROKEN,
    LOST,
    MAX_ANSWER_BYTES,
    OK,
    SHOWN_CHARACTERS,
    AnswerReader,
    LoadResult,
    StreamLoad,
    announces_exits,
    stream_load,
)
from weft.workloads.exits import MOST_EXITS
from weft.workloads.requests import Stream, Workload

Arguments = ParamSpec("Arguments")
Progress = Callable[[float, int, int], None]
"""Called every ``PROGRESS_S`` with the elapsed seconds, the answers received, and the unanswered requests."""

MOST_REQUESTS = 5_000_000
"""Most requests of open streams: their times and outcomes are kept in memory, about 100 bytes for each."""
SENT_AT_ONCE = 32
"""Requests sent in a row before the loop looks for answers; more would add to the latencies of those."""
LEAD_S = 0.05
"""Time before the first request, in which the loop settles after the setup."""
PAUSE_S = 0.05
"""Shortest pause of a closed client after its connection failed, so that a dead server is not hammered."""
OPENED_BEFORE = 4
"""Connections opened before the first request, at least; more are opened when requests need them."""
ROUND_TRIPS = 50
"""Probes whose median is the round trip: enough that a few slow ones do not count."""
PROGRESS_S = 0.2
"""Period of progress reports: five a second look smooth on a terminal."""
SAMPLING = 2
"""Number of the seed's independent random sequence for samples; the workload uses the others."""

ANSWER_HEAD_BYTES = 64 << 10
"""Bytes of an answer that are searched for its parameters; they come before the outputs."""


@dataclass(frozen=True, slots=True)
class _PreparedLoad:
    """What is known before a run: the server's metadata, the requests built from it, and the round trip time."""

    server: dict[str, Any]
    payloads: tuple[Payload, ...]
    """Requests of each stream."""
    have_exits: tuple[bool, ...]
    """For each stream, whether its answers have an output with the exits of the rows."""
    transport_s: float
    """Median round trip of a health probe."""


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

    deadlines: those that requests carry: strict (the server drops late requests), soft (it only orders by them), none.
    connections: limit on connections. grace_s: grace period for answers after the last arrival; requests without an
    answer by then are lost. context: for https, instead of the system's certificates. alone: requests of every stream
    that are sent one after another before the run, to measure the overhead besides queueing and computing.
    InputError if the server cannot be reached, WorkloadError if the workload does not fit its models.
    """
    _check_arguments(deadlines, connections, grace_s)
    target = parse_url(url, context)
    clock = _Clock(asyncio.get_running_loop(), workload.duration_s, grace_s)
    control, pool = Pool(target, 1), Pool(target, connections)
    try:
        preparation = await _prepare(workload, control, deadlines, api_key)
        overheads = [await _measure_overhead_s(control, payload.requests[0], alone) for payload in preparation.payloads]
        run = _LoadRun(workload, preparation, pool, clock)
        # some connections, or all that closed clients need, are open before the first request is timed
        closed_clients = [stream.clients for stream in workload.stream if stream.arrival == "closed"]
        await _open_connections(pool, max([OPENED_BEFORE, *closed_clients]))
        started, cpu_s = datetime.now(UTC), time.thread_time()
        await run.go(progress)
        cpu_s = time.thread_time() - cpu_s
        await pool.close()  # later answers are lost
        profile = await _get_profile(control, api_key)
    finally:
        await pool.close()
        await control.close()
    return LoadResult(
        url=target.url,
        server=preparation.server,
        workload=workload,
        deadlines=deadlines,
        streams=run.results(profile),
        started=started.isoformat(timespec="milliseconds"),
        elapsed_s=clock.ended_s,
        transport_s=preparation.transport_s,
        cpu_s=cpu_s,
        connections=pool.opened,
        held_back=pool.held_back,
        profile=profile,
        overhead_s=tuple(overheads),
    )


def _blocking(
    send: Callable[Arguments, Coroutine[Any, Any, LoadResult]],
) -> Callable[Arguments, LoadResult]:
    """Convert the coroutine function *send* to a blocking one, which runs it in an event loop of its own."""

    @wraps(send)
    def run(*arguments: Arguments.args, **options: Arguments.kwargs) -> LoadResult:
        with _quiet_interpreter(), asyncio.Runner(loop_factory=precise_loop) as runner:
            return runner.run(send(*arguments, **options))

    return run


run_load = _blocking(drive)
"""``drive`` for callers without an event loop."""


async def _measure_overhead_s(pool: Pool, request: bytes, count: int) -> float | None:
    """Return the median overhead of *count* requests, sent one after another: latency less queueing and computing.

    Weft servers report the latter two in their answers; None if no answer does, or if *count* is 0.
    """
    overheads_s = []
    for _ in range(count):
        began_s = time.perf_counter()
        answer = await call(pool, request)
        took_s = time.perf_counter() - began_s
        served_us = _server_time_us(answer.body) if answer.status == OK else None
        if served_us is not None:
            overheads_s.append(took_s - served_us / 1e6)
    return max(0.0, statistics.median(overheads_s)) if overheads_s else None


def _server_time_us(body: bytes) -> int | None:
    """Return the time of queueing and computing in an answer's parameters; None if they are missing."""
    try:
        # raw_decode ignores what follows the JSON: binary tensors
        answer, _ = json.JSONDecoder().raw_decode(body[:ANSWER_HEAD_BYTES].decode("latin-1"))
        parameters = answer["parameters"]
        return int(parameters["weft_queue_us"]) + int(parameters["weft_compute_us"])
    except (ValueError, KeyError, TypeError):
        return None


def _check_arguments(deadlines: str, connections: int, grace_s: float) -> None:
    """Raise InputError for arguments that are out of range."""
    if deadlines not in DEADLINES:
        raise InputError(unknown_name("rule for deadlines", deadlines, DEADLINES))
    if connections < 1:
        raise InputError(f"--connections {connections} leaves nothing to send on; give at least 1")
    if not 0 <= grace_s < math.inf:
        raise InputError(f"--grace {grace_s} is no time to wait; give seconds from 0 on")


@contextmanager
def _quiet_interpreter() -> Iterator[None]:
    """Keep garbage collection off and thread switches quick: both would delay the sending of requests."""
    interval_s, collecting = sys.getswitchinterval(), gc.isenabled()
    gc.collect(1)  # young objects only: a collection of all takes 80 ms, and surveys have dozens of short runs
    gc.disable()
    sys.setswitchinterval(min(interval_s, 2e-4))
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        if collecting:
            gc.enable()


class _Clock:
    """The times of a run, for all of its streams."""

    def __init__(self, loop: asyncio.AbstractEventLoop, duration_s: float, grace_s: float) -> None:
        self.loop = loop
        self.duration_s = duration_s
        self.grace_s = grace_s
        self.start_s = 0.0
        """Start of the run on the loop's clock; may be in the future."""
        self.ended_s = 0.0
        """End of the run, in seconds since its start."""


class _StreamContext(NamedTuple):
    """What a stream needs from its run."""

    stream: Stream
    payload: Payload
    has_exits: bool
    rng: np.random.Generator
    """Draws the samples."""
    clock: _Clock
    pool: Pool
    count_end: Callable[[], None]
    """Called when a request of an open stream, or a closed client, has ended."""


class _OpenStream:
    """The requests of an open stream and their outcomes; ``_LoadRun`` sends them. Implements ``client.Taker``."""

    def __init__(self, context: _StreamContext) -> None:
        self.stream, self.clock = context.stream, context.clock
        self._payload, self._rng, self._count_end = context.payload, context.rng, context.count_end
        self._reader = AnswerReader(context.payload.labels, exits=context.has_exits)
        self.keep_bytes = MAX_ANSWER_BYTES if self._reader.wanted else 0
        self._sample_rows = array("q")
        """The sample that each request sends; empty if all requests are the same."""
        self.answers = 0
        self.messages: dict[int, str] = {}
        """Status -> error text of the first answer with it."""
        # by request number: seconds since the start, send lag and latency in seconds, HTTP status, BROKEN or LOST
        self.scheduled, self.lag, self.latency, self.status = array("d"), array("d"), array("d"), array("h")

    def schedule(self, times_s: Sequence[float]) -> None:
        """Add requests at these times since the start; they count as lost until they have an outcome."""
        count = len(times_s)
        self.scheduled.extend(times_s)
        self.lag.extend([math.nan] * count)
        self.latency.extend([math.nan] * count)
        self.status.extend([LOST] * count)
        self._reader.expect(count)
        if self._payload.sampled:
            self._sample_rows.extend(self._rng.integers(len(self._payload.requests), size=count).tolist())

    def request(self, number: int) -> bytes:
        return self._payload.requests[self._sample_rows[number] if self._sample_rows else 0]

    def sent(self, number: int, now_s: float) -> None:
        """Record by how much a request is sent later than scheduled."""
        self.lag[number] = now_s - self.clock.start_s - self.scheduled[number]

    def answered(self, number: int, answer: Answer, now_s: float) -> None:
        """Record status and latency of an answer, and read its class and exit if they are wanted."""
        self.latency[number] = now_s - self.clock.start_s - self.scheduled[number]
        self.status[number] = answer.status
        self.answers += 1
        if answer.status != OK and answer.status not in self.messages:
            self.messages[answer.status] = _error_text(answer.body)
        self.ended(now_s)
        if self.keep_bytes and answer.status == OK:  # last: reading takes time, and a closed client must send first
            self._reader.read(number, answer)

    def broken(self, number: int, why: str, now_s: float) -> None:
        """Record a request whose connection failed."""
        self.status[number] = BROKEN
        self.messages.setdefault(BROKEN, _one_line(why))
        self.ended(now_s, at_least_s=PAUSE_S)

    def ended(self, now_s: float, at_least_s: float = 0.0) -> None:
        """Count a request as ended; *at_least_s*: shortest pause before a client of a closed stream sends again."""
        self._count_end()

    def result(self, workload: Workload, exit_count: int) -> StreamLoad:
        """Return the outcomes and figures of the stream; *exit_count*: number of the model's exits, 0 if unknown."""
        samples = np.array(self._sample_rows, np.int64) if self._payload.sampled else None
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
            contents=self._reader.contents(samples, exit_count),
        )


class _ClosedStream(_OpenStream):
    """A closed stream: clients that send again after their answer and a think time."""

    def __init__(self, context: _StreamContext) -> None:
        super().__init__(context)
        self._pool = context.pool

    def begin(self) -> None:
        """Send the first request of every client."""
        for number in range(self.stream.clients):
            self.schedule([0.0])
            self._pool.send(self, number)

    def ended(self, now_s: float, at_least_s: float = 0.0) -> None:
        """Schedule the client's next request after the think time, unless the run is over by then."""
        pause_s = max(self.stream.think_ms / 1e3, at_least_s)
        next_s = now_s - self.clock.start_s + pause_s
        if next_s >= self.clock.duration_s:
            self._count_end()
            return
        number = len(self.scheduled)
        self.schedule([next_s])
        if pause_s:
            self.clock.loop.call_at(self.clock.start_s + next_s, self._pool.send, self, number)
        else:
            self._pool.send(self, number)


class _LoadRun:
    """A run: the streams of a workload, and the order in which the requests of open streams are sent."""

    def __init__(self, workload: Workload, preparation: _PreparedLoad, pool: Pool, clock: _Clock) -> None:
        self.workload = workload
        self.pool = pool
        self.clock = clock
        self._finished = clock.loop.create_future()
        self._unfinished = 0
        """Requests of open streams without an outcome, and closed clients that send further requests."""
        self.streams = [self._make_stream(index, preparation) for index in range(len(workload.stream))]
        self._next = 0
        """Position of the next request to send in ``_times``, ``_owners`` and ``_numbers``."""
        self._order_requests()

    def _make_stream(self, index: int, preparation: _PreparedLoad) -> _OpenStream:
        """Create the open or closed stream with this number in the workload."""
        stream = self.workload.stream[index]
        # a random sequence of its own: with samples or without, the arrivals are the same
        rng = np.random.default_rng([self.workload.seed, index, SAMPLING])
        payload, has_exits = preparation.payloads[index], preparation.have_exits[index]
        context = _StreamContext(stream, payload, has_exits, rng, self.clock, self.pool, self._count_end)
        return _ClosedStream(context) if stream.arrival == "closed" else _OpenStream(context)

    def _order_requests(self) -> None:
        """Sort the requests of all open streams by their times; at equal times the first stream sends first.

        The result is three lists of one length: times, streams, and the requests' numbers in their streams.
        """
        # empty arrays, so that a workload without open streams has something to concatenate
        times, owners, numbers = [np.empty(0)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        total = 0
        for index, stream in enumerate(self.streams):
            if isinstance(stream, _ClosedStream):
                continue
            for block in self.workload.arrivals(index):
                times.append(block)
                numbers.append(np.arange(len(stream.scheduled), len(stream.scheduled) + len(block)))
                owners.append(np.full(len(block), index))
                stream.schedule(block.tolist())
                total += len(block)
                if total > MOST_REQUESTS:
                    raise WorkloadError(f"more than {MOST_REQUESTS} requests; lower the rates or duration_s")
        at_s = np.concatenate(times)
        order = np.argsort(at_s, kind="stable")
        self._times: list[float] = at_s[order].tolist()
        self._owners = [self.streams[index] for index in np.concatenate(owners)[order].tolist()]
        self._numbers: list[int] = np.concatenate(numbers)[order].tolist()

    async def go(self, progress: Progress | None) -> None:
        """Send all requests, and wait for the last answer or the end of the grace period."""
        loop, clock = self.clock.loop, self.clock
        clock.start_s = loop.time() + LEAD_S
        closed = [stream for stream in self.streams if isinstance(stream, _ClosedStream)]
        self._unfinished = len(self._times) + sum(stream.stream.clients for stream in closed)
        if not self._unfinished:
            raise WorkloadError(f"nothing arrives within {clock.duration_s:g} s; raise the rates or duration_s")
        for stream in closed:
            loop.call_at(clock.start_s, stream.begin)
        if self._times:
            loop.call_at(clock.start_s + self._times[0], self._send_due)
        grace_timer = loop.call_at(clock.start_s + clock.duration_s + clock.grace_s, self._finish)
        if progress:
            self._report(progress)
        await self._finished
        grace_timer.cancel()
        clock.ended_s = loop.time() - clock.start_s

    def results(self, profile: Any) -> tuple[StreamLoad, ...]:
        """Return the results of all streams; *profile*: the server's profile of its models."""
        return tuple(stream.result(self.workload, _exit_count(profile, stream.stream)) for stream in self.streams)

    def _send_due(self) -> None:
        """Send the requests that are due, and schedule the next call."""
        if self._finished.done():
            return
        loop, start_s, times, send = self.clock.loop, self.clock.start_s, self._times, self.pool.send
        end = min(len(times), self._next + SENT_AT_ONCE)
        while self._next < end and start_s + times[self._next] <= loop.time():
            position = self._next
            self._next = position + 1
            send(self._owners[position], self._numbers[position])
        if self._next < len(times):
            loop.call_at(start_s + times[self._next], self._send_due)

    def _count_end(self) -> None:
        """Count a request of an open stream, or a closed client, as ended; the last one finishes the run."""
        self._unfinished -= 1
        if not self._unfinished:
            self._finish()

    def _finish(self) -> None:
        """Finish the run, after the last answer or the grace period."""
        if not self._finished.done():
            self._finished.set_result(None)

    def _report(self, progress: Progress) -> None:
        """Report the progress, now and every ``PROGRESS_S`` until the run is finished."""
        if self._finished.done():
            return
        elapsed_s = max(0.0, self.clock.loop.time() - self.clock.start_s)
        answers = sum(stream.answers for stream in self.streams)
        progress(elapsed_s, answers, self.pool.outstanding)
        self.clock.loop.call_later(PROGRESS_S, self._report, progress)


async def _prepare(workload: Workload, control: Pool, deadlines: str, key: str | None) -> _PreparedLoad:
    """Read the metadata of the server and its models, and build the requests of every stream."""
    await _open_connections(control, 1)
    server = await _get_json(control, "v2", key)
    if not isinstance(server, dict):
        raise InputError(f"{control.target.url}: GET v2 does not describe a server of the Open Inference Protocol")
    payloads, have_exits = [], []
    for index, stream in enumerate(workload.stream):
        metadata = await _get_metadata(control, stream, key)
        inputs = read_inputs(stream.model, metadata)
        if shapeless := inputs_without_shape(stream, inputs):
            # a weft server tells the shapes at which it measures the model
            answer = await _call_server(control, "GET", f"{model_path(stream)}/config", key)
            known = read_shapes(_parse_json(answer.body) if answer.status == OK else None)
            server_shapes = {name: shape for name, shape in known.items() if name in shapeless}
            stream = stream.model_copy(update={"shapes": {**server_shapes, **stream.shapes}})
        have_exits.append(announces_exits(metadata))
        try:
            payload = build_payload(
                stream,
                inputs,
                control.target,
                deadlines=deadlines,
                binary=has_extension(server, BINARY),
                key=key,
                seed=(workload.seed, index),
                folder=workload.folder,
            )
        except ShapeNeeded as error:
            raise workload.advised(stream, error) from error
        payloads.append(payload)
    return _PreparedLoad(server, tuple(payloads), tuple(have_exits), await _measure_round_trip_s(control, key))


async def _open_connections(pool: Pool, count: int) -> None:
    """Open connections of a pool; InputError if the server cannot be reached."""
    try:
        await pool.open(count)
    except OSError as error:
        raise InputError(unreachable(pool.target.url, error, "weft serve")) from error


async def _call_server(control: Pool, method: str, path: str, key: str | None, body: bytes = b"") -> Answer:
    """Send a request besides the load, and return its answer; InputError if the server does not answer."""
    try:
        return await call(control, request_bytes(control.target, method, path, key=key, body=body))
    except OSError as error:
        why = _one_line(reason_of(error)) or "no answer in time"
        raise InputError(f"{control.target.url}: the server does not answer: {why}") from error


async def _get_json(control: Pool, path: str, key: str | None) -> Any:
    """GET a path that every server of the protocol serves, and return its JSON; InputError for an error status."""
    return _checked_json(control, path, await _call_server(control, "GET", path, key))


def _checked_json(control: Pool, path: str, answer: Answer) -> Any:
    """Return the JSON of an answer, None if it is no JSON; InputError for an error status."""
    if answer.status == 401:
        raise InputError(f"{control.target.url}: the server wants another key than this one; give --api-key")
    if answer.status != OK:
        raise InputError(f"{control.target.url}: GET {path} has status {answer.status}: {_error_text(answer.body)}")
    return _parse_json(answer.body)


async def _get_metadata(control: Pool, stream: Stream, key: str | None) -> Any:
    """Return the metadata of a stream's model; InputError with near names if the server does not have the model."""
    path, name = model_path(stream), served_name(stream.model)
    answer = await _call_server(control, "GET", path, key)
    if answer.status not in (400, 404):  # the statuses with which servers answer for an unknown model
        return _checked_json(control, path, answer)
    index = await _call_server(control, "POST", "v2/repository/index", key, b"{}")
    rows = _parse_json(index.body) if index.status == OK else None
    known = [str(row["name"]) for row in rows if isinstance(row, dict) and "name" in row] if rows else []
    hint = unknown_name("model", name, known) if known else f"unknown model {name!r}; {_error_text(answer.body)}"
    raise InputError(f"{control.target.url}: {hint}")


async def _measure_round_trip_s(control: Pool, key: str | None) -> float:
    """Return the median round trip of health probes."""
    loop, times = control.loop, []
    for _ in range(ROUND_TRIPS):
        before_s = loop.time()
        await _call_server(control, "GET", "v2/health/live", key)
        times.append(loop.time() - before_s)
    return statistics.median(times)


async def _get_profile(control: Pool, key: str | None) -> Any:
    """Return the profile of a weft server; None from any other server, or if the server does not answer any more."""
    try:
        answer = await call(control, request_bytes(control.target, "GET", "weft/profile", key=key))
    except OSError:
        return None
    return _parse_json(answer.body) if answer.status == OK else None


def _exit_count(profile: Any, stream: Stream) -> int:
    """Return the number of a model's exits, its end included, by a weft server's profile; 0 if unknown."""
    try:
        early_exits = profile["models"][served_name(stream.model)]["exits"]
    except (KeyError, TypeError):
        return 0
    return len(early_exits) + 1 if isinstance(early_exits, list) and 0 < len(early_exits) < MOST_EXITS else 0


def _parse_json(body: bytes) -> Any:
    """Parse JSON; None if it is invalid, NaN and Infinity included."""

    def refuse(token: str) -> Any:
        raise ValueError(f"{token} is no JSON")

    try:
        return json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None


def _error_text(body: bytes) -> str:
    """Return the error message in the body of an answer on one line; servers of the protocol use several keys."""
    content = _parse_json(body)
    if isinstance(content, dict):
        message = next((content[key] for key in ("error", "detail", "message") if key in content), None)
        if message is not None:
            return _one_line(message if isinstance(message, str) else json.dumps(message))
    return _one_line(body.decode("utf-8", "replace")) or "no text"


def _one_line(text: str) -> str:
    """Return text on one line, without control characters, cut to ``SHOWN_CHARACTERS``."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    line = " ".join(line.split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 3] + "..."


if sys.platform == "linux":
    _HIGHEST_DESCRIPTOR = 1023
    """The highest file descriptor that select() supports."""

    class PreciseSelector(selectors.EpollSelector):
        """Waits for epoll's own descriptor with select(), then asks epoll.

        select() has a timeout in microseconds, epoll one in milliseconds, by which requests would be late.
        """

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0 and self.fileno() <= _HIGHEST_DESCRIPTOR:
                if not select.select([self.fileno()], (), (), timeout)[0]:
                    return []
                timeout = 0
            return super().select(timeout)

    def precise_loop() -> asyncio.AbstractEventLoop:
        """Make an event loop with exact timers; the caller closes it."""
        return asyncio.SelectorEventLoop(PreciseSelector())

else:

    def precise_loop() -> asyncio.AbstractEventLoop:
        """Make an event loop; on this system the default one has exact timers."""
        return asyncio.new_event_loop()

"""The server as a whole: starts HTTP and gRPC, loads the models, and drains before shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from weft.base.errors import InputError, Overloaded, RequestError, reason_of
from weft.engine.policies import Setting, make_request_policy
from weft.engine.policies.base import NO_BUFFER
from weft.http.messages import HttpExchange, HttpResponse
from weft.http.server import ClientLimits, HttpServer
from weft.runtime.own_folder import make_folder, remove
from weft.serving.access import Keys
from weft.serving.background_tasks import ignore_result, run_in_background
from weft.serving.config import LimitSettings, NetworkSettings, ServerConfig
from weft.serving.dispatch import Dispatcher
from weft.serving.endpoints import VITAL
from weft.serving.gpu_sharing import sharing_for
from weft.serving.grpc_service import GrpcServer, credentials
from weft.serving.held_memory import IDLE_BYTES, give_freed_memory_back, keep_freed_memory
from weft.serving.history import STEP_S
from weft.serving.isolation import backend_of
from weft.serving.library import Library
from weft.serving.process import AT_ONCE_S, GRACE_S, ExitTimer
from weft.serving.readiness import why_nothing_is_served
from weft.serving.repository import Repository
from weft.serving.routes import Routes
from weft.serving.service import Service
from weft.serving.telemetry import make_telemetry

log = logging.getLogger("weft.server")
access = logging.getLogger("weft.access")

SWITCH_S = 0.0005
"""Switch interval of Python threads (GIL), so that lanes report to the event loop within this time."""

CLOSING_S = 0.5
"""Timeout for closing connections, lanes and models, each, after all requests were answered."""

HURRIED_S = 0.1
"""Shorter timeout than ``CLOSING_S``, if requests were lost, or after a second signal."""

STOPPING_S = 0.4
"""Timeout for stopping running segments: an operator that has started cannot be interrupted."""


class Server:
    """One server on the running event loop."""

    def __init__(self, config: ServerConfig, read_settings: Callable[[], ServerConfig] | None = None) -> None:
        """Open the backend and scan the models; nothing is loaded yet. InputError if a setting cannot be used.

        read_settings: reads them from their source again; None: the server does not take over changed settings.
        """
        self.config, self._read_settings = config, read_settings
        self.keys = Keys(config.network.api_key, config.network.keys_file)
        scheduling, execution, loading = config.scheduling, config.execution, config.loading
        sharing = sharing_for(scheduling.policy, execution.device)
        # a policy without programs, only to check the settings
        setting = Setting([], NO_BUFFER, 1, lanes=execution.lanes, shares=sharing.shares if sharing else None)
        make_request_policy(scheduling.policy, setting, scheduling.policy_options)
        self.backend = backend_of(config)
        self._hurry = asyncio.Event()
        self._scratch = make_folder() if loading.cache is None else None  # a temporary folder in place of the cache
        cache = self._scratch or loading.cache
        assert cache is not None
        try:
            self._repository = Repository(
                loading.models, cache / "models", programs=loading.allow_programs, shapes=loading.shapes
            )
        except BaseException:
            self.backend.close()
            if self._scratch:
                remove(self._scratch)
            raise
        self._cache = cache / "segments"
        with suppress(OSError):  # without a cache models are loaded all the same
            self._cache.mkdir(parents=True, exist_ok=True)
        self._sample_timer: asyncio.TimerHandle | None = None
        self.http_port: int | None = None
        self.grpc_port: int | None = None
        self.answered = False
        """Whether the server has stopped after answering all requests."""
        self._started = asyncio.Event()
        self._renewals: set[asyncio.Task[None]] = set()

    async def start(self, on_load: Callable[[str], None] | None = None) -> None:
        """Listen, then load the models. They may have failed: ``service.why_not_ready()`` says which are missing.

        on_load: called with the name of each model that begins to load. InputError if a port is taken.
        """
        self._create_service()
        routes, limits = Routes(self.service), limits_of(self.config.limits)
        self._http = HttpServer(
            routes.handle,
            limits,
            _log_access if self.config.telemetry.access_log else None,
            self.service.http_answers,
            gate=routes.gate,
            budget=self.service.budget,
            vital=VITAL,
        )
        self._grpc = GrpcServer(self.service) if self.config.network.grpc_port is not None else None
        try:
            await self._listen()
            self._set_sample_timer()
            await self.service.preload(on_load)
            self._started.set()
        except BaseException:
            await self.stop()
            raise

    async def check(self, on_load: Callable[[str], None] | None, report: Callable[[Service], None]) -> None:
        """Load and learn the models without listening, call *report*, and stop: ``weft serve --check``."""
        self._create_service(learn_first=True)
        try:
            tls_of(self.config.network)  # both: checks the certificate
            grpc_tls_of(self.config.network)
            await self.service.preload(on_load)
            report(self.service)
        finally:
            await self._close_models(CLOSING_S)

    def _create_service(self, *, learn_first: bool = False) -> None:
        """Create the dispatcher, the library and the service; *learn_first*: learn models before serving them."""
        config = self.config
        scheduling, execution, loading = config.scheduling, config.execution, config.loading
        sys.setswitchinterval(SWITCH_S)
        telemetry = make_telemetry(config.telemetry.otlp)
        self._dispatcher = Dispatcher(
            asyncio.get_running_loop(),
            scheduling.policy,
            scheduling.policy_options,
            backend=self.backend,
            late=scheduling.late,
            lanes=execution.lanes,
            pin=execution.pin,
            most_waiting=config.limits.total_queue,
        )
        library = Library(
            self._repository,
            self._dispatcher,
            self.backend,
            threads=execution.threads,
            budget_bytes=loading.memory_budget_bytes,
            cache=self._cache,
            learn_s=loading.learn_s,
            learn_first=learn_first or loading.learn_first,
            max_compute_s=scheduling.max_compute_s or None,  # 0: no limit
            isolation=config.workers.isolation,
            precision=execution.precision,
            compile_s=loading.compile_s,
        )
        self.service = Service(config, library, self._dispatcher, telemetry, self.keys)
        if self._read_settings:
            self.service.reread_settings = self._read_settings

    def reread(self) -> None:
        """Read keys, settings and models again, and take over changes (SIGHUP)."""
        if self.config.network.keys_file is not None:
            self.keys.reload(force=True)
        task = asyncio.create_task(self._renew())
        self._renewals.add(task)
        task.add_done_callback(self._renewals.discard)

    async def _renew(self) -> None:
        """Take over changed settings and models once the server has started; errors are logged."""
        await self._started.wait()
        if self.service.draining:
            return
        try:
            await self.service.renew()
        except RequestError as error:
            log.warning("everything stays as it is: %s", error)

    def _set_sample_timer(self) -> None:
        """Call ``_sample`` after the history's interval."""
        self._sample_timer = asyncio.get_running_loop().call_later(STEP_S, self._sample)

    def _sample(self) -> None:
        """Add a sample to the history, trim memory, and set the timer for the next time."""
        self.service.sample_history()
        self._trim_when_idle()
        self._set_sample_timer()

    def _trim_when_idle(self) -> None:
        """Return freed memory of large requests to the system when none is in flight."""
        budget = self.service.budget
        if budget.held_bytes == 0 and budget.peak_bytes > IDLE_BYTES:
            budget.peak_bytes = 0
            asyncio.get_running_loop().run_in_executor(None, give_freed_memory_back)

    async def _listen(self) -> None:
        """Listen for HTTP, and for gRPC if it is on; InputError if that is not possible."""
        network = self.config.network
        try:
            self.http_port = await self._http.start(network.host, network.http_port, tls_of(network))
        except OSError as error:
            where = f"{network.host}:{network.http_port}"
            raise InputError(f"cannot listen on {where}: {error.strerror or error}") from error
        if self._grpc and network.grpc_port is not None:
            try:
                self.grpc_port = await self._grpc.start(network.host, network.grpc_port, grpc_tls_of(network))
            except RuntimeError as error:  # gRPC does not give the reason
                where = f"{network.host}:{network.grpc_port}"
                raise InputError(f"cannot listen on {where} for gRPC; is the port taken? choose another") from error

    @property
    def unfinished(self) -> int:
        """Requests that are not answered, and answers that are not read to their end."""
        calls = self._grpc.in_flight if self._grpc else 0
        return self._http.in_flight + calls + self._http.unread

    def hurry(self) -> None:
        """Make ``stop`` end at once, without answering pending requests."""
        self._hurry.set()

    async def stop(self) -> bool:
        """Drain and stop: refuse new requests, answer the accepted ones, and close everything.

        Returns False if ``drain_s`` was too short: the requests that are pending then get an error.
        """
        self.service.draining = True
        for renewal in self._renewals:
            renewal.cancel()
        drain_s = self.config.network.drain_s
        end_s = time.monotonic() + drain_s
        await self._wait_until(end_s, self.service.wait_until_drained())
        await self._wait_until(end_s, self._wait_for_http(), *([self._grpc.finish()] if self._grpc else []))
        lost = self.unfinished
        if lost:
            log.warning("%d requests were not answered, or not to the end (drain_s = %g)", lost, drain_s)
            self._dispatcher.give_up(Overloaded("the server went down before it was done", reason="draining"))
        self.answered = not lost
        await self._close(HURRIED_S if lost else CLOSING_S)
        return not lost

    async def _wait_until(self, end_s: float, *awaitables: Awaitable[None]) -> None:
        """Wait until all *awaitables* are done, at most until *end_s* (monotonic clock) or a call of ``hurry``."""
        tasks: asyncio.Future[Any] = asyncio.gather(*awaitables)
        hurry: asyncio.Future[Any] = asyncio.create_task(self._hurry.wait())
        left_s = max(0.0, end_s - time.monotonic())
        await asyncio.wait([tasks, hurry], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for pending in (tasks, hurry):
            pending.cancel()
        await asyncio.gather(tasks, hurry, return_exceptions=True)

    async def _wait_for_http(self) -> None:
        """Wait until all answers are sent: closing a TLS connection would cut off slow readers."""
        while self._http.in_flight or self._http.unread:
            await asyncio.sleep(0.005)

    async def _close(self, patience_s: float) -> None:
        """Close connections, then lanes, models and helpers; *patience_s*: timeout of each."""
        await self._http.drain(self._timeout_s(patience_s))
        if self._grpc:
            await self._grpc.stop(self._timeout_s(patience_s))
        self._http.close()
        if self._sample_timer:
            self._sample_timer.cancel()
        await self._close_models(patience_s)

    async def _close_models(self, patience_s: float) -> None:
        """Close lanes, models and helpers; threads that do not end within *patience_s* are abandoned (``process``)."""
        self._dispatcher.close(min(STOPPING_S, self._timeout_s(patience_s)))
        self.service.close_regions()
        await self._end_in_background("end of large JSON", self.service.json.close, patience_s)
        await self.service.library.close(self._timeout_s(patience_s))
        await self._end_in_background("end of the backend", self.backend.close, patience_s)
        await self._end_in_background("end of the spans", self.service.telemetry.close, patience_s)
        self.service.log_settings.restore()
        await self._end_in_background("end of the scratch", self.remove_scratch)

    def _timeout_s(self, patience_s: float) -> float:
        """Return *patience_s*, or the shorter ``HURRIED_S`` after ``hurry``."""
        return HURRIED_S if self._hurry.is_set() else patience_s

    def remove_scratch(self) -> None:
        """Remove the temporary folder; may be called again, because abandoned threads may have written into it."""
        if self._scratch:
            remove(self._scratch)

    async def _end_in_background(self, name: str, close: Callable[[], None], patience_s: float | None = None) -> None:
        """Call *close* on a background thread, and wait at most *patience_s*; None: until ``hurry`` is called."""
        ending: asyncio.Future[Any] = run_in_background(name, close, ignore_result)
        hurry: asyncio.Future[Any] = asyncio.create_task(self._hurry.wait())
        await asyncio.wait([ending, hurry], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if self._hurry.is_set():
            await asyncio.wait([ending], timeout=HURRIED_S)
        if ending.done() and (error := ending.exception()):
            log.error("%s: %s", name, error, exc_info=error)


class _Signals:
    """SIGTERM and SIGINT: the first drains, the second ends at once, a third has the system's default action.

    A timer ends the process after the first (``drain_s`` plus ``GRACE_S``) and the second, even if threads hang.
    """

    def __init__(self, drain_s: float) -> None:
        """Install the handlers; *drain_s*: time that the first signal leaves to answer requests."""
        self._drain_s = drain_s
        self.exit_timer = ExitTimer(lambda: 0 if self.server and self.server.answered else 1)  # the exit code
        self.stop_requested = asyncio.Event()
        self.server: Server | None = None
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)

    def reread_keys(self, server: Server) -> None:
        """Read the keys file again on SIGHUP."""
        if server.config.network.keys_file is not None and hasattr(signal, "SIGHUP"):
            self._loop.add_signal_handler(signal.SIGHUP, lambda: server.keys.reload(force=True))

    def reread_settings(self, server: Server) -> None:
        """Read keys, settings and models again on SIGHUP."""
        if hasattr(signal, "SIGHUP"):
            self._loop.add_signal_handler(signal.SIGHUP, server.reread)

    def _on_signal(self) -> None:
        """Drain at the first signal; at the second, end at once and restore the default actions."""
        if not self.stop_requested.is_set():
            self.exit_timer.within(self._drain_s + GRACE_S)
            self.stop_requested.set()
            return
        self.exit_timer.within(AT_ONCE_S)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
        if self.server:
            self.server.hurry()


async def serve(
    config: ServerConfig,
    on_load: Callable[[str], None] | None,
    on_start: Callable[[Server], None],
    on_drain: Callable[[int], None] | None = None,
    read_settings: Callable[[], ServerConfig] | None = None,
    *,
    to_the_end: bool = False,
) -> bool:
    """Serve until SIGTERM or SIGINT; return whether every accepted request was answered.

    ``InputError`` if none of the models can be served, unless the settings say to wait for them.

    *on_load* is called with the name of each model that begins to load, *on_start* after loading, *on_drain* with the
    number of pending requests. *read_settings* reads the settings again, on SIGHUP. *to_the_end*: the process ends
    after this call, so the timer that enforces its end stays active.
    """
    keep_freed_memory()
    signals = _Signals(config.network.drain_s)
    server = signals.server = Server(config, read_settings)
    signals.reread_keys(server)
    if read_settings:
        signals.reread_settings(server)
    try:
        return await _serve_until_stopped(server, signals, on_load, on_start, on_drain)
    finally:
        if not to_the_end:
            signals.exit_timer.disarm()


async def _serve_until_stopped(
    server: Server,
    signals: _Signals,
    on_load: Callable[[str], None] | None,
    on_start: Callable[[Server], None],
    on_drain: Callable[[int], None] | None,
) -> bool:
    """Start a server, wait for a signal, and stop the server; parameters and result as for ``serve``."""
    starting = asyncio.create_task(server.start(on_load))
    waiting = asyncio.create_task(signals.stop_requested.wait())
    await asyncio.wait([starting, waiting], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        return True  # no request was accepted yet
    try:
        starting.result()
    finally:
        if starting.exception():
            waiting.cancel()
    if problem := why_nothing_is_served(server.service.library, server.config):
        waiting.cancel()
        await server.stop()
        raise InputError(problem)
    gc.collect()
    gc.freeze()  # loaded objects stay; traversing them in every garbage collection would delay requests
    on_start(server)
    await waiting
    if on_drain and server.unfinished:
        on_drain(server.unfinished)
    return await server.stop()


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the loop factory of uvloop if it is installed; None stands for asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def limits_of(limits: LimitSettings) -> ClientLimits:
    """Convert the settings of limits to the limits of the HTTP server."""
    return ClientLimits(
        body_bytes=limits.max_body_bytes,
        connections=limits.max_connections,
        reserve=limits.reserved_connections,
        read_s=limits.read_s,
        bytes_per_s=limits.min_bytes_per_s,
    )


def tls_of(network: NetworkSettings) -> ssl.SSLContext | None:
    """Create the TLS context for HTTP; None without a certificate, InputError if it cannot be used."""
    if network.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(network.tls_cert, network.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            f"{network.tls_cert}: cannot be used as a certificate with its key: {reason_of(error)}"
        ) from error
    return context


def grpc_tls_of(network: NetworkSettings) -> Any:
    """Create the TLS credentials for gRPC; None without a certificate."""
    if network.tls_cert is None or network.tls_key is None:
        return None
    return credentials(network.tls_cert, network.tls_key)


def _log_access(exchange: HttpExchange, response: HttpResponse, sent_bytes: int) -> None:
    """Write a line of the access log: peer, method, path, status, bytes, time since the request was received."""
    took_ms = (time.monotonic_ns() - exchange.received_ns) / 1e6
    line = exchange.peer, exchange.method or "-", exchange.target.raw_path or "-", response.status, sent_bytes, took_ms
    access.info("%s %s %s %d %d bytes %.3f ms", *line)

"""A server inside a Python program: ``weft.Server``.

The server of ``server.py`` needs an event loop. Here it gets a thread with a loop of its own, so that a script, a
notebook or a program with another loop can start, use and stop it. ``infer`` passes arrays to the service directly;
everything else is the same as for other clients: queues, deadlines, batches, metrics and errors.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy.typing as npt

from weft.base.errors import BadRequest, InputError, Overloaded, RequestError, unknown_name
from weft.runtime.tensors import Array
from weft.serving import metrics
from weft.serving.array_requests import answer_of, request_of
from weft.serving.background_tasks import background_threads
from weft.serving.config import GROUP_OF, ServerConfig, read_server_config
from weft.serving.inference import InferCall
from weft.serving.pages import state
from weft.serving.server import Server, fastest_loop
from weft.serving.service import Service
from weft.serving.wire import InferResponse, Parameter

T = TypeVar("T")
Answer = Future[dict[str, Array]]

PORTS: Mapping[str, Any] = {"http_port": 0, "grpc_port": None}
"""Defaults of a server in a program: a free port for HTTP, and no gRPC."""

PLAN_FILE, SETTINGS_FILE = "plan.json", "weft.toml"
"""Files in the folder of a plan, next to the models."""

JOIN_TIMEOUT_S = 10.0
"""Timeout for joining background threads after the server has ended; a thread that hangs longer is abandoned."""


class InProcessServer:
    """Models served from within this process, to ``infer`` and over HTTP on loopback.

    *models* are what ``weft serve`` takes: repositories, .onnx files, names of models, or the folder of a plan.
    *config* is a TOML file or a ``ServerConfig``; *settings* are keys of such a file, which override it.
    The system chooses the port, and there is no gRPC, unless ``http_port`` and ``grpc_port`` say otherwise::

        with weft.Server("camera.onnx", lanes=2) as server:
            answer = server.infer("camera", {"image": image}, deadline_ms=20)
            print(server.url, answer["logits"])

    and among coroutines, where nothing blocks the loop::

        async with weft.Server("camera.onnx") as server:
            answer = await server.infer_async("camera", {"image": image})

    A block ends when every request was answered; nothing of the server is left then: no thread, no socket, no folder.
    ``start`` and ``stop`` do the same without a block, and may be called again. ``infer`` may be called from any
    thread. Several servers may run in one process.
    """

    def __init__(self, *models: str | Path, config: ServerConfig | str | Path | None = None, **settings: Any) -> None:
        self.config = _make_config(models, config, settings)
        self._thread: _ServerThread | None = None

    def __repr__(self) -> str:
        where = self.url if self._thread and self._thread.started.done() else "not running"
        return f"Server({', '.join(Path(source).stem for source in self.config.loading.models)}: {where})"

    # Life

    def start(self) -> Self:
        """Serve; returns when the server is ready, and raises ``InputError`` if it cannot be."""
        thread = self._start_thread()
        try:
            thread.started.result()
        except BaseException:
            self._thread = None
            thread.end(at_once=True)
            raise
        return self

    def stop(self) -> None:
        """Take no new requests, answer those that are there, and end; Ctrl-C ends it at once."""
        thread, self._thread = self._thread, None
        if thread:
            thread.end()

    async def start_async(self) -> Self:
        """``start`` without blocking the event loop."""
        thread = self._start_thread()
        try:
            await asyncio.wrap_future(thread.started)
        except BaseException:
            self._thread = None
            await thread.end_async(at_once=True)
            raise
        return self

    async def stop_async(self) -> None:
        """``stop`` without blocking the event loop; if cancelled, ends at once, without answering pending requests."""
        thread, self._thread = self._thread, None
        if thread:
            await thread.end_async()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await self.start_async()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop_async()

    # Inference

    def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        deadline_ms: float | None = None,
        outputs: Iterable[str] = (),
        version: str = "",
        parameters: Mapping[str, Parameter] | None = None,
    ) -> dict[str, Array]:
        """Compute *inputs* and return the outputs by name; all of them, unless *outputs* names some.

        deadline_ms: strict; a request that cannot meet it is not computed, and raises ``Expired``. By default the
        model's own deadline holds. parameters: those of the protocol (docs/serving.md), as ``{"weft_slo_ms": 50}``.
        Whatever the server would refuse raises the same kind of ``RequestError``.
        """
        answer = self._start_inference(model, inputs, deadline_ms, outputs, version, parameters)
        try:
            return answer.result()
        except BaseException:
            answer.cancel()  # Ctrl-C: the result is not needed any more
            raise

    async def infer_async(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        deadline_ms: float | None = None,
        outputs: Iterable[str] = (),
        version: str = "",
        parameters: Mapping[str, Parameter] | None = None,
    ) -> dict[str, Array]:
        """``infer`` without blocking the event loop; the arrays must not change until it returns.

        A request whose coroutine is cancelled is withdrawn.
        """
        answer = self._start_inference(model, inputs, deadline_ms, outputs, version, parameters)
        return await asyncio.wrap_future(answer)

    # State

    @property
    def url(self) -> str:
        """The base URL for clients on this machine."""
        scheme = "https" if self.config.network.tls_cert else "http"
        return f"{scheme}://{self.config.network.host}:{self._running.server.http_port}"

    @property
    def grpc_address(self) -> str | None:
        """The address for gRPC clients; None without gRPC."""
        port = self._running.server.grpc_port
        return None if port is None else f"{self.config.network.host}:{port}"

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        try:
            return self._running.query(Service.is_ready)
        except Overloaded:
            return False

    def metrics(self) -> dict[str, float]:
        """``/metrics`` by name and labels: ``nv_inference_request_success{model="camera",version="1"}``."""
        return self._running.query(metrics.values)

    def state(self) -> dict[str, Any]:
        """What the dashboard shows: models with their rates and percentiles, lanes, memory."""
        return self._running.query(state)

    # The thread

    @property
    def _running(self) -> _ServerThread:
        """The thread of the started server; Overloaded if the server is not running."""
        if self._thread is None or not self._thread.started.done():
            raise _not_running()
        return self._thread

    def _start_thread(self) -> _ServerThread:
        """Start the server's thread, without waiting until the server is ready; InputError if it runs already."""
        if self._thread:
            raise InputError("this server runs already; make another one")
        self._thread = thread = _ServerThread(self.config)
        thread.start()
        # stops a server that is garbage-collected while it runs; at exit ``_end_all`` does
        weakref.finalize(self, thread.request_stop, at_once=True).atexit = False
        return thread

    def _start_inference(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        deadline_ms: float | None,
        outputs: Iterable[str],
        version: str,
        parameters: Mapping[str, Parameter] | None,
    ) -> Answer:
        """Start a request on the server's thread, and return the future of its outputs; parameters as for ``infer``."""
        if deadline_ms is not None and not 0 < deadline_ms < math.inf:
            raise BadRequest(f"deadline_ms = {deadline_ms!r} must be a number of milliseconds above 0")
        thread, deadline_ns = self._running, None if deadline_ms is None else round(deadline_ms * 1e6)

        def begin(answer: Answer) -> None:
            """Start the request, on the server's loop, and let its outcome complete *answer*."""
            service = thread.server.service
            try:
                slot = service.slot_for(model, version)
            except RequestError as error:
                service.trace_refusal(model, error)
                raise

            def done(outcome: InferResponse | RequestError) -> None:
                if isinstance(outcome, RequestError):
                    _fail(answer, outcome)
                else:
                    _deliver(answer, outcome, call)

            call = service.infer(
                slot,
                decode=lambda spec: request_of(spec, inputs, outputs, parameters),
                done=done,
                peek=lambda: parameters or {},
                deadline=None if deadline_ns is None else service.now() + deadline_ns,
            )
            # a future that is cancelled by its caller withdraws the request
            answer.add_done_callback(lambda _: thread.schedule(call.cancel) if answer.cancelled() else None)

        return thread.start_call(begin)


class _ServerThread(threading.Thread):
    """A thread that runs one server on a loop of its own, from start to end."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(name="weft server", daemon=True)
        self.server: Server
        self._config = config
        self._loop = (fastest_loop() or asyncio.new_event_loop)()
        self._ending = asyncio.Event()
        self.started: Future[None] = _uncancellable_future()
        """Done when the server is ready, with an exception if it cannot be."""
        self.ended: Future[None] = _uncancellable_future()
        """Done when the server has ended, with an exception if it failed."""
        self._calls: set[Future[Any]] = set()  # calls of ``start_call`` that are not complete
        # protects _closed and additions to _calls: no request may be added after _fail_remaining took the list
        self._lock = threading.Lock()
        self._closed = False

    def run(self) -> None:
        """Run the server to its end; complete ``started`` and ``ended``, also after a failure."""
        _running_threads.add(self)
        failure: BaseException | None = None
        try:
            with _switch_interval, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            failure = error
        self._fail_remaining()
        _join_background_threads(self._loop)
        if hasattr(self, "server"):
            self.server.remove_scratch()
        if not self.started.done():
            self.started.set_exception(failure or _not_running())
            failure = None  # reported by ``started``
        _running_threads.discard(self)
        if failure:
            self.ended.set_exception(failure)
        else:
            self.ended.set_result(None)

    async def _serve(self) -> None:
        """Start the server, wait for ``request_stop``, and stop it; InputError if it is not ready after its start."""
        server = self.server = Server(self._config)
        if not await self._start_server(server):
            return
        missing = server.service.why_not_ready()
        if not missing:
            self.started.set_result(None)
            await self._ending.wait()
        await server.stop()
        if missing:
            raise InputError(f"not ready: {missing}")

    async def _start_server(self, server: Server) -> bool:
        """Start the server; return False if it was stopped before it had started."""
        starting, ending = asyncio.create_task(server.start()), asyncio.create_task(self._ending.wait())
        await asyncio.wait([starting, ending], return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
        if starting.cancelled():
            return False
        starting.result()
        return True

    # From other threads

    def schedule(self, call: Callable[[], object]) -> None:
        """Schedule a call on the loop; no effect after the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def start_call(self, begin: Callable[[Future[T]], None]) -> Future[T]:
        """Call *begin* on the loop with a new future, and return that future.

        *begin* completes the future, now or later; if it raises, the future gets the exception.
        """
        answer: Future[T] = Future()

        def run() -> None:
            if answer.cancelled():
                return
            try:
                begin(answer)
            except Exception as error:
                _fail(answer, error)

        with self._lock:
            if self._closed:
                raise _not_running()
            self._calls.add(answer)
            self.schedule(run)
        answer.add_done_callback(self._calls.discard)
        return answer

    def query(self, function: Callable[[Service], T]) -> T:
        """Call *function* with the service, on the loop, and wait for its result."""
        return self.start_call(lambda answer: _complete(answer, function(self.server.service))).result()

    def end(self, *, at_once: bool = False) -> None:
        """Stop the server and wait for its thread; *at_once*: without answering pending requests."""
        self.request_stop(at_once=at_once)
        try:
            self.ended.result()
        except KeyboardInterrupt:
            self.request_stop(at_once=True)
            self.ended.result()
            raise
        finally:
            self.join()

    async def end_async(self, *, at_once: bool = False) -> None:
        """``end`` without blocking the caller's event loop."""
        self.request_stop(at_once=at_once)
        try:
            await asyncio.wrap_future(self.ended)
        except asyncio.CancelledError:
            self.request_stop(at_once=True)
            await asyncio.wrap_future(self.ended)
            raise
        finally:
            self.join()

    def request_stop(self, *, at_once: bool = False) -> None:
        """Ask the server to stop, and return immediately; *at_once*: without answering pending requests."""

        def stop() -> None:
            self._ending.set()
            if at_once and hasattr(self, "server"):
                self.server.hurry()

        self.schedule(stop)

    def _fail_remaining(self) -> None:
        """Fail the calls that the loop did not complete before it ended."""
        with self._lock:
            self._closed = True
            remaining = list(self._calls)
        for answer in remaining:
            _fail(answer, _not_running())


_running_threads: set[_ServerThread] = set()
"""Server threads of this process that have not ended."""


def _end_all() -> None:
    """Stop all servers of this process at its exit."""
    for thread in list(_running_threads):
        with contextlib.suppress(Exception):
            thread.end(at_once=True)


# Not by ``atexit``: from Python 3.12 on no thread can be started then, and a server needs threads to close.
getattr(threading, "_register_atexit", atexit.register)(_end_all)


class _SwitchInterval:
    """Restores Python's thread switch interval, which servers shorten, when the last server of this process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the count of servers, which start and end on threads of their own
        self._servers, self._usual_s = 0, sys.getswitchinterval()

    def __enter__(self) -> None:
        with self._lock:
            if not self._servers:
                self._usual_s = sys.getswitchinterval()
            self._servers += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._servers -= 1
            if not self._servers:
                sys.setswitchinterval(self._usual_s)


_switch_interval = _SwitchInterval()


def _make_config(
    models: tuple[str | Path, ...], base: ServerConfig | str | Path | None, settings: Mapping[str, Any]
) -> ServerConfig:
    """Merge the arguments of ``InProcessServer``: *base*, its *config*, is overridden by *models* and *settings*."""
    for key in settings:
        if key not in GROUP_OF:
            raise InputError(unknown_name("setting", key, GROUP_OF))
    if base is None and len(models) == 1 and (Path(models[0]) / PLAN_FILE).is_file():
        base, models = Path(models[0]) / SETTINGS_FILE, ()
    if not isinstance(base, ServerConfig):
        file_config = ServerConfig() if base is None else read_server_config(Path(base), environment={})
        base = replace(file_config, **PORTS)
    models_setting: dict[str, Any] = {"models": tuple(map(str, models))} if models else {}
    merged = replace(base, **models_setting, **settings)
    if not merged.loading.models:
        raise InputError("nothing to serve: name a model repository, an .onnx file or a model (weft models list)")
    return merged


def _deliver(answer: Answer, response: InferResponse, call: InferCall) -> None:
    """Complete the future of a request with its result, unless its deadline passed or it was cancelled."""
    try:
        outputs = answer_of(response)
    except Exception as error:
        _fail(answer, call.fail(error))
        return
    if not answer.set_running_or_notify_cancel():
        return  # cancelled, which cancels the call, too
    if late := call.settle():
        answer.set_exception(late)
    else:
        answer.set_result(outputs)


def _complete(answer: Future[T], value: T) -> None:
    """Set the result of a future unless it was cancelled."""
    if answer.set_running_or_notify_cancel():
        answer.set_result(value)


def _fail(answer: Future[Any], error: BaseException) -> None:
    """Set the exception of a future unless it is done or was cancelled."""
    if not answer.done() and answer.set_running_or_notify_cancel():
        answer.set_exception(error)


def _uncancellable_future() -> Future[None]:
    """Create a future that callers waiting for it cannot cancel."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def _not_running() -> Overloaded:
    return Overloaded("the server is not running: start() it, or use it in a with block", reason="draining")


def _join_background_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Wait for the threads that load or learn models for this loop; they end soon, as their result is not needed."""
    end_s = time.monotonic() + JOIN_TIMEOUT_S
    for thread in background_threads(loop):
        thread.join(max(0.0, end_s - time.monotonic()))

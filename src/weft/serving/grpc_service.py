"""The gRPC server: every call of ``GRPCInferenceService`` that the service can answer.

A call's key is checked by its metadata, before its message is taken from the connection. The size of the message is
unknown then: gRPC gathers it, up to ``max_body_bytes``, and only then it counts towards what the server holds.

Two functions of gRPC's Python server create reference cycles, which hold a call and its message until the garbage
collector runs: ``context.abort`` (the call holds the exception, whose frames hold the call) and
``context.add_done_callback``. A refusal is therefore a status that is set, and the end of a call is the end of its
handler object (``grpc_calls``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # otherwise its core writes to stderr, too

import grpc

from weft.base.errors import InputError, NotFound, RequestError, Unauthorised, Unsupported
from weft.http.limits import UNCOUNTED_BYTES
from weft.serving import grpc_messages, grpc_wire, proto
from weft.serving.access import Caller
from weft.serving.endpoints import POST, RPCS, Call, Endpoint
from weft.serving.grpc_calls import NOT_RECEIVED, LostAnswers, RefusedCall, UnaryCall, listen, refuse, serialized
from weft.serving.grpc_health import SERVICE as HEALTH
from weft.serving.grpc_health import Health, HealthCheckRequest
from weft.serving.grpc_messages import InferMessage
from weft.serving.inference import InferCall, internal_error
from weft.serving.openapi import HEALTH as PROBE
from weft.serving.service import Service
from weft.serving.telemetry import PARENT
from weft.serving.wire import MAX_ID_CHARS, InferResponse, ModelSpec, is_large

log = logging.getLogger("weft.grpc")
access = logging.getLogger("weft.access")
_GRPC_LOG = logging.getLogger("grpc._cython.cygrpc")

STREAM_AHEAD = 16
"""Backpressure: requests of one stream that are processed at a time; the next ones are not read before."""

LAST_BYTES_S = 0.25
"""Time for clients of the last calls to read from the kernel's buffers, which gRPC discards when it closes."""

IDLE_MS = 300_000
"""Idle timeout of connections without calls; shorter costs clients reconnects, longer holds connections."""

OPEN = frozenset(name for name, endpoint in RPCS.items() if endpoint.open)
"""Calls that need no key and whose messages are empty: they are answered without reading them."""
COUNTED = frozenset(name for name, endpoint in RPCS.items() if endpoint.methods == POST)
"""Calls that count towards the quota of their key; so does every request of a stream."""
INFER, STREAM = "ModelInfer", "ModelStreamInfer"
CHECK, WATCH = "Check", "Watch"
"""Calls of the health service."""
FINAL = "triton_final_response"
"""Parameter of the last answer to a request of a stream; here every request has one answer."""


class _PendingInfer:
    """An inference request until its answer is sent: its future answer, and the bytes it holds."""

    __slots__ = ("_caller", "_release_bytes", "answer", "began_ns", "call", "held_bytes", "identity")

    def __init__(self, release_bytes: Callable[[int], None], caller: Caller | None = None) -> None:
        """release_bytes: releases a number of held bytes.

        caller: the user whose request in flight ends with this one (in a stream); None: it ends with the gRPC call.
        """
        self._caller, self._release_bytes = caller, release_bytes
        self.answer: asyncio.Future[InferResponse | RequestError] = asyncio.get_running_loop().create_future()
        self.call: InferCall | None = None
        """None before it has begun, and after its end."""
        self.held_bytes = 0
        self.began_ns = time.monotonic_ns()
        self.identity: dict[str, str] = {}
        """The id of the request and the name and version of its model, for answers in a stream."""

    def done(self, outcome: InferResponse | RequestError) -> None:
        """Complete the answer, unless the call was cancelled."""
        if isinstance(outcome, RequestError):
            outcome.__traceback__ = None  # its frames refer to this request
        if not self.answer.done():
            self.answer.set_result(outcome)

    def cancel(self) -> None:
        """Cancel the request: the client disconnected."""
        if self.call:
            self.call.cancel()

    def end(self) -> None:
        """Release the held bytes, and break the cycle with the call (through ``done``), which holds the tensors."""
        self.call = None
        self._release_bytes(self.held_bytes)
        if self._caller:
            self._caller.end()


class GrpcServer:
    """The gRPC server of a service, on the running event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._logged = service.config.telemetry.access_log
        self.in_flight = 0
        """Requests whose answers are not sent to their last byte."""
        self._lost_answers = LostAnswers()
        self._readers: set[asyncio.Task[None]] = set()  # of open streams
        max_bytes = service.config.limits.max_body_bytes
        options = [
            ("grpc.max_receive_message_length", min(max_bytes, 2**31 - 1)),  # an int32
            ("grpc.max_send_message_length", -1),  # no limit
            ("grpc.so_reuseport", 0),  # otherwise a second server could listen on the same port
            ("grpc.max_concurrent_streams", service.config.limits.max_connections),
            ("grpc.max_metadata_size", 16 * 1024),
            ("grpc.max_connection_idle_ms", IDLE_MS),
        ]
        # 256 more than requests may wait, so that health and metadata are answered even under load
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=service.config.limits.total_queue + 256)
        self._health = Health(service)
        # (service, method) -> function that returns the response
        self._open_answers: dict[tuple[str, str], Callable[[], Any]] = {
            (proto.SERVICE, name): partial(self._answer_open, name) for name in OPEN
        } | {(HEALTH, CHECK): self._health.check_server}
        self._server.add_generic_rpc_handlers((_CallRouter(service, self),))

    async def start(self, host: str, port: int, credentials: Any = None) -> int:
        """Listen, and return the port; *credentials*: for TLS."""
        bound = await listen(self._server, host, port, credentials)
        _GRPC_LOG.addFilter(self._lost_answers)
        return bound

    async def finish(self) -> None:
        """End streams and watches, and wait until the last byte of every answer is sent."""
        for reader in self._readers:
            reader.cancel()
        self._health.end()
        if self.in_flight or self._health.watchers:
            while self.in_flight or self._health.watchers:
                await asyncio.sleep(0.005)
            await asyncio.sleep(LAST_BYTES_S)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and give running calls *grace_s* seconds to end."""
        await self._server.stop(grace_s)
        _GRPC_LOG.removeFilter(self._lost_answers)

    # Handlers

    def handler(self, name: str, caller: Caller) -> Any:
        """Return gRPC's handler for a call whose key was checked; *caller*: the user of the key."""
        if name == STREAM:
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, caller), None, serialized)
        began_ns = time.monotonic_ns()

        def ended(received: bool) -> None:
            if received:
                self.in_flight -= 1
            else:
                self._record(None, name, NOT_RECEIVED, began_ns)

        return UnaryCall(partial(self._answer, name, caller), ended)

    def open_handler(self, package: str, name: str) -> Any:
        """Return gRPC's handler for a call that needs no key, which does not read the message; None for other calls."""
        answer = self._open_answers.get((package, name))
        if answer is None:
            return None

        async def respond(messages: Any, context: Any) -> None:
            began_ns = time.monotonic_ns()
            await context.write(answer())
            self._record(context, name, "OK", began_ns)

        return grpc.stream_stream_rpc_method_handler(respond, None, serialized)

    def watch_handler(self) -> Any:
        """Return the handler of ``Watch`` of the health service."""
        return grpc.unary_stream_rpc_method_handler(self._watch, None, serialized)

    def refusing_handler(self, name: str, error: RequestError) -> Any:
        """Return a handler for gRPC that refuses a call without reading its messages."""

        def record(context: Any) -> None:
            self._record(context, name, error.code, time.monotonic_ns())
            # requests without a key are not traced: they must not flood the collector
            if name == INFER and not isinstance(error, Unauthorised):
                self._service.trace_refusal("", error, _parent(context))

        return RefusedCall(error, record)

    async def _answer(self, name: str, caller: Caller, data: bytes, context: Any) -> Any:
        """Answer a unary call; a RequestError becomes its status."""
        began_ns, code = time.monotonic_ns(), "OK"
        self.in_flight += 1
        try:
            with _in_flight(caller) if name in COUNTED else nullcontext():
                if name == INFER:
                    return await self._model_infer(data, context, caller)
                if name == CHECK:
                    return self._health.check(grpc_messages.parse_small(HealthCheckRequest, data))
                return await self._call_endpoint(
                    RPCS[name], grpc_messages.parse_small(proto.METHODS[name][0], data), caller
                )
        except RequestError as error:
            code = error.code
            refuse(context, error)
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except Exception as error:
            log.exception("%s", name)
            code = "INTERNAL"
            refuse(context, internal_error(error))
        finally:
            self._record(context, name, code, began_ns)
        return b""  # not sent, because the call has the status of an error

    async def _call_endpoint(self, endpoint: Endpoint, message: Any, caller: Caller) -> Any:
        """Call an endpoint's handler and build the response message; a model that does not exist is not ready."""
        assert endpoint.rpc and endpoint.handle
        try:
            answer = endpoint.handle(self._service, endpoint.rpc.call(message, caller))
            if isinstance(answer, Awaitable):
                answer = await answer
        except NotFound:
            if endpoint.schema != PROBE:
                raise
            answer = {"ready": False}
        return grpc_wire.filled(f"{endpoint.rpc.method}Response", endpoint.rpc.write(answer))

    def _answer_open(self, name: str) -> Any:
        """Return the response to a call that needs no key and no message."""
        handle = RPCS[name].handle
        assert handle
        return grpc_wire.filled(f"{name}Response", handle(self._service, Call()))

    async def _watch(self, data: bytes, context: Any) -> AsyncIterator[Any]:
        """Answer ``Watch``: yield the status now and after every change."""
        began_ns, code = time.monotonic_ns(), "OK"
        try:
            async with aclosing(self._health.watch(grpc_messages.parse_small(HealthCheckRequest, data))) as statuses:
                async for status in statuses:
                    yield status
        except RequestError as error:
            code = error.code
            refuse(context, error)
        finally:
            self._record(context, WATCH, code, began_ns)

    def _record(self, context: Any, name: str, code: str, began_ns: int) -> None:
        """Count an answer and write it to the access log; *context* is None if the message was not received."""
        self._service.grpc_answers[name, code] += 1
        if self._logged:
            peer = context.peer() if context else "-"
            access.info("%s gRPC %s %s %.3f ms", peer, name, code, (time.monotonic_ns() - began_ns) / 1e6)

    # Inference

    async def _model_infer(self, data: bytes, context: Any, caller: Caller) -> Any:
        """Answer ``ModelInfer``; its deadline is that of the gRPC call."""
        remaining_s = context.time_remaining()
        deadline = self._service.now() + round(remaining_s * 1e9) if remaining_s is not None else None
        pending = _PendingInfer(self._service.budget.release)
        try:
            self._begin(pending, data, deadline, caller, _parent(context))
            return await self._encode(pending, await pending.answer, serialized)
        except asyncio.CancelledError:
            pending.cancel()
            raise
        finally:
            pending.end()

    def _begin(self, pending: _PendingInfer, data: bytes, deadline: int | None, caller: Caller, parent: str) -> None:
        """Start the request in *data*; a RequestError before it is started is traced, too.

        deadline: on the clock of the lanes, None without one. parent: the parent span.
        """
        try:
            message = self._read_message(pending, data)
            slot = self._service.slot_for(message.model_name, message.model_version)
        except RequestError as error:
            self._service.trace_refusal(pending.identity.get("model_name", ""), error, parent)
            raise

        def read(model: ModelSpec) -> Any:
            if message.head is None:
                return self._service.json.decode_message(data, model)
            return grpc_wire.decode_infer(message.head, model, message.raws)

        def peek() -> Any:
            return grpc_wire.parameters_of(message.head) if message.head is not None else {}

        pending.call = self._service.infer(slot, read, pending.done, peek, deadline, caller, parent=parent)

    def _read_message(self, pending: _PendingInfer, data: bytes) -> InferMessage:
        """Read a request, and count its bytes as held from now on."""
        if len(data) > UNCOUNTED_BYTES:
            self._service.budget.take(len(data))
            pending.held_bytes = len(data)
        message = grpc_messages.read_infer(data, self._service.config.limits.max_json_bytes)
        pending.identity = _identity(message)
        return message

    async def _encode(
        self, pending: _PendingInfer, outcome: InferResponse | RequestError, serialize: Callable[[Any], bytes]
    ) -> bytes:
        """Encode a result for gRPC; its deadline is checked after encoding. Raises the error that is sent instead.

        serialize: converts the message to the bytes of the call's response.
        """
        if isinstance(outcome, RequestError):
            raise outcome
        assert pending.call
        try:
            large = is_large(outcome)
            message = await self._service.json.encode_message(outcome) if large else grpc_wire.encode_infer(outcome)
            answer = serialize(message)
        except Exception as error:
            failure = pending.call.fail(error)
            raise failure from (None if failure is error else error)
        if late := pending.call.settle():
            raise late
        return answer

    async def _stream(self, caller: Caller, messages: Any, context: Any) -> AsyncIterator[Any]:
        """Yield answers in the order of the requests; errors are answers, too, and do not end the stream."""
        queue: asyncio.Queue[_PendingInfer | None] = asyncio.Queue()
        permits = asyncio.Semaphore(STREAM_AHEAD)  # backpressure: bounds unanswered requests of this stream
        reader = asyncio.create_task(self._read(context, queue, permits, caller, _parent(context)))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        opened_ns, unanswered = time.monotonic_ns(), list[_PendingInfer]()
        try:
            while (pending := await queue.get()) is not None:
                unanswered = [pending]
                answer, code = await self._answer_streamed(pending)
                self._record(context, STREAM, code, pending.began_ns)
                yield answer
                self.in_flight -= 1
                unanswered = []
                pending.end()
                permits.release()
                del pending, answer  # a stream that waits for its next request holds nothing of the last
        except asyncio.CancelledError:
            self._record(context, STREAM, "CANCELLED", opened_ns)
            raise
        finally:
            reader.cancel()
            while not queue.empty():
                if (waiting := queue.get_nowait()) is not None:
                    unanswered.append(waiting)
            self.in_flight -= len(unanswered)
            for pending in unanswered:
                pending.cancel()
                pending.end()

    async def _answer_streamed(self, pending: _PendingInfer) -> tuple[Any, str]:
        """Wait for the answer to one request of a stream; return the response message and its status code."""
        stream_response = proto.CLASSES["ModelStreamInferResponse"]
        try:
            outcome = await pending.answer
            if isinstance(outcome, InferResponse):
                outcome = replace(outcome, parameters={**outcome.parameters, FINAL: True})
            return await self._encode(pending, outcome, _stream_message), "OK"
        except RequestError as error:
            refusal = stream_response(error_message=str(error), infer_response=pending.identity)
            refusal.infer_response.parameters[FINAL].bool_param = True
            error.__traceback__ = None  # its frames refer to the future that holds it
            return refusal, error.code

    async def _read(
        self,
        context: Any,
        queue: asyncio.Queue[_PendingInfer | None],
        permits: asyncio.Semaphore,
        caller: Caller,
        parent: str,
    ) -> None:
        """Start the requests of a stream and put them into *queue*, then None at the end of the stream.

        permits: one for each unanswered request, at most ``STREAM_AHEAD``; the consumer of the queue releases them.
        """
        try:
            # not from gRPC's iterator, which holds a message until the next one comes
            while (data := await context.read()) is not grpc.aio.EOF:
                await permits.acquire()
                queue.put_nowait(self._begin_streamed(data, caller, parent))
                self.in_flight += 1
                del data  # otherwise held until the next message arrives
        finally:
            queue.put_nowait(None)

    def _begin_streamed(self, data: bytes, caller: Caller, parent: str) -> _PendingInfer:
        """Start a request of a stream; if that fails, the error is its answer."""
        refusal: RequestError | None = None
        try:
            caller.begin()
        except RequestError as error:
            refusal = error
        pending = _PendingInfer(self._service.budget.release, None if refusal else caller)
        try:
            if refusal:
                self._service.trace_refusal("", refusal, parent)
                raise refusal
            self._begin(pending, data, None, caller, parent)
        except RequestError as error:
            pending.done(error)
        except Exception as error:  # the other requests of the stream go on
            log.exception("%s", STREAM)
            pending.done(internal_error(error))
        return pending


class _CallRouter(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a call; a call without a valid key or quota is refused before gRPC reads its message."""

    def __init__(self, service: Service, server: GrpcServer) -> None:
        self._service, self._server = service, server

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a call; gRPC calls this when the call's metadata has arrived."""
        method = handler_call_details.method
        package, _, name = method.removeprefix("/").partition("/")
        if package == HEALTH and name in (CHECK, WATCH):
            return self._health(name, handler_call_details)
        if package != proto.SERVICE or name not in proto.METHODS:
            return self._server.refusing_handler("unknown", Unsupported(f"there is no method {method[:128]!r}"))
        if name in OPEN:
            return self._server.open_handler(package, name)
        try:
            caller = self._service.check_key(self._headers(handler_call_details))
            if name in COUNTED:
                caller.admit()
        except RequestError as error:
            return self._server.refusing_handler(name, error)
        return self._server.handler(name, caller)

    def _health(self, name: str, call: Any) -> Any:
        """Return the handler of a health call; without a key it reports on the server as a whole only."""
        try:
            caller = self._service.check_key(self._headers(call))
        except Unauthorised as error:
            return self._server.open_handler(HEALTH, name) or self._server.refusing_handler(name, error)
        return self._server.watch_handler() if name == WATCH else self._server.handler(name, caller)

    def _headers(self, call: Any) -> dict[str, str]:
        """Return the metadata of a call as headers; empty if the server requires no key."""
        if not self._service.keys.required:
            return {}
        return {key: str(value) for key, value in call.invocation_metadata or ()}


@contextmanager
def _in_flight(caller: Caller) -> Iterator[None]:
    """Count a call as in flight while the block runs.

    The call was admitted before its message arrived; OverQuota if other calls have reached the limit since.
    """
    caller.enter()
    try:
        yield
    finally:
        caller.end()


def _parent(context: Any) -> str:
    """Return the parent span of a call, from its metadata."""
    return next((str(value) for key, value in context.invocation_metadata() or () if key == PARENT), "")


def _identity(message: InferMessage) -> dict[str, str]:
    """Return the request's id and model, which its answer in a stream repeats, without values that are too long."""
    names = {"id": message.id, "model_name": message.model_name, "model_version": message.model_version}
    return {key: value for key, value in names.items() if len(value) <= MAX_ID_CHARS}


def _stream_message(message: Any) -> bytes:
    """Serialize a result as the response message of a stream."""
    if isinstance(message, bytes):
        message = proto.CLASSES["ModelInferResponse"].FromString(message)
    return serialized(proto.CLASSES["ModelStreamInferResponse"](infer_response=message))


def credentials(certificate: Path, key: Path) -> Any:
    """Read the TLS certificate and key of a server; InputError if they cannot be read."""
    try:
        pair = key.read_bytes(), certificate.read_bytes()
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror or error}") from error
    return grpc.ssl_server_credentials([pair])

"""The protocol's gRPC face: every call of ``GRPCInferenceService`` that the service can answer.

A call's key is checked by its metadata, before its message is taken from the connection. The size of the message is
unknown then: gRPC gathers it, up to ``max_body_bytes``, and only then it counts towards what the server holds.

gRPC's Python server keeps two reference cycles for us to avoid, each of which holds a call, and its message, until the
garbage collector runs: ``context.abort`` (the call holds the exception, whose frames hold the call) and
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

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # or its core writes lines of its own beside our errors

import grpc

from weft.base.errors import InputError, NotFound, RequestError, Unauthorised, Unsupported
from weft.http.limits import UNCOUNTED_BYTES
from weft.serving import grpc_messages, grpc_wire, proto
from weft.serving.endpoints import POST, RPCS, Call, Endpoint
from weft.serving.grpc_calls import NOT_RECEIVED, LostAnswers, RefusedCall, UnaryCall, listen, refuse, serialized
from weft.serving.grpc_health import SERVICE as HEALTH
from weft.serving.grpc_health import Health, HealthCheckRequest
from weft.serving.grpc_messages import InferMessage
from weft.serving.inference import InferCall, internal
from weft.serving.keys import Caller
from weft.serving.openapi import HEALTH as PROBE
from weft.serving.service import Service
from weft.serving.telemetry import PARENT
from weft.serving.wire import MAX_ID_CHARS, InferResponse, ModelSpec, is_large

log = logging.getLogger("weft.grpc")
access = logging.getLogger("weft.access")
_GRPC_LOG = logging.getLogger("grpc._cython.cygrpc")

STREAM_AHEAD = 16
"""Requests of one stream that are worked on at a time."""

LAST_BYTES_S = 0.25
"""How long clients of the last calls have to read what the kernel holds: gRPC's close may take it from them."""

IDLE_MS = 300_000
"""How long a connection without calls is kept."""

OPEN = frozenset(name for name, endpoint in RPCS.items() if endpoint.open)
"""Calls that need no key, and whose messages say nothing: they are answered without being read."""
COUNTED = frozenset(name for name, endpoint in RPCS.items() if endpoint.methods == POST)
"""Calls that want something done, and count towards what their key may; so does every request of a stream."""
INFER, STREAM = "ModelInfer", "ModelStreamInfer"
CHECK, WATCH = "Check", "Watch"
"""Calls of the health service."""
FINAL = "triton_final_response"
"""A parameter of every answer in a stream: each is the last one to its request."""


class _PendingInfer:
    """A request for a result until its answer is sent: the answer that is awaited, and the bytes that it holds."""

    __slots__ = ("_caller", "_give", "answer", "began_ns", "call", "held_bytes", "identity")

    def __init__(self, give: Callable[[int], None], caller: Caller | None = None) -> None:
        """*caller*: whose requests in flight it counts among until its end; None where its call is counted."""
        self._caller, self._give = caller, give
        self.answer: asyncio.Future[InferResponse | RequestError] = asyncio.get_running_loop().create_future()
        self.call: InferCall | None = None
        """None before it has begun, and after its end."""
        self.held_bytes = 0
        self.began_ns = time.monotonic_ns()
        self.identity: dict[str, str] = {}
        """What names this request among those of a stream: its id, and the name and version of its model."""

    def done(self, outcome: InferResponse | RequestError) -> None:
        if isinstance(outcome, RequestError):
            outcome.__traceback__ = None  # its frames refer to this request
        if not self.answer.done():
            self.answer.set_result(outcome)

    def cancel(self) -> None:
        """Withdraw it: the client has gone."""
        if self.call:
            self.call.cancel()

    def end(self) -> None:
        """Give back what it holds. The call refers to ``done``: that cycle would keep the tensors of the request."""
        self.call = None
        self._give(self.held_bytes)
        if self._caller:
            self._caller.end()


class GrpcFace:
    """A gRPC server over a service, on the running event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._logged = service.config.telemetry.access_log
        self.in_flight = 0
        """Requests whose answers are not sent to their last byte."""
        self._lost = LostAnswers()
        self._readers: set[asyncio.Task[None]] = set()
        most = service.config.limits.max_body_bytes
        options = [
            ("grpc.max_receive_message_length", min(most, 2**31 - 1)),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", service.config.limits.max_connections),
            ("grpc.max_metadata_size", 16 * 1024),
            ("grpc.max_connection_idle_ms", IDLE_MS),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=service.config.limits.total_queue + 256)
        self._health = Health(service)
        self._open: dict[tuple[str, str], Callable[[], Any]] = {
            (proto.SERVICE, name): partial(self._tell, name) for name in OPEN
        } | {(HEALTH, CHECK): self._health.whole}
        self._server.add_generic_rpc_handlers((_Door(service, self),))

    async def start(self, host: str, port: int, credentials: Any = None) -> int:
        """Listen; returns the port."""
        bound = await listen(self._server, host, port, credentials)
        _GRPC_LOG.addFilter(self._lost)
        return bound

    async def finish(self) -> None:
        """End streams and watches, which ask for no more, and wait until the last byte of every answer is sent."""
        for reader in self._readers:
            reader.cancel()
        self._health.end()
        if self.in_flight or self._health.watchers:
            while self.in_flight or self._health.watchers:
                await asyncio.sleep(0.005)
            await asyncio.sleep(LAST_BYTES_S)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, and let those that run end."""
        await self._server.stop(grace_s)
        _GRPC_LOG.removeFilter(self._lost)

    # Handlers

    def handler(self, name: str, caller: Caller) -> Any:
        """What answers a call that is made with a key."""
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
        """What answers a call that needs no key, without waiting for its message; None if there is no such call."""
        answer = self._open.get((package, name))
        if answer is None:
            return None

        async def respond(messages: Any, context: Any) -> None:
            began_ns = time.monotonic_ns()
            await context.write(answer())
            self._record(context, name, "OK", began_ns)

        return grpc.stream_stream_rpc_method_handler(respond, None, serialized)

    def watch_handler(self) -> Any:
        """What answers ``Watch`` of the health service."""
        return grpc.unary_stream_rpc_method_handler(self._watch, None, serialized)

    def refused(self, name: str, error: RequestError) -> Any:
        """What refuses a call without reading its messages."""

        def record(context: Any) -> None:
            self._record(context, name, error.code, time.monotonic_ns())
            if name == INFER and not isinstance(error, Unauthorised):  # nobody floods a collector without a key
                self._service.trace_refusal("", error, _parent(context))

        return RefusedCall(error, record)

    async def _answer(self, name: str, caller: Caller, data: bytes, context: Any) -> Any:
        """The answer to a unary call; an error of ours becomes its status."""
        began_ns, code = time.monotonic_ns(), "OK"
        self.in_flight += 1
        try:
            with _entered(caller) if name in COUNTED else nullcontext():
                if name == INFER:
                    return await self._model_infer(data, context, caller)
                if name == CHECK:
                    return self._health.check(grpc_messages.parse_small(HealthCheckRequest, data))
                return await self._told(RPCS[name], grpc_messages.parse_small(proto.METHODS[name][0], data), caller)
        except RequestError as error:
            code = error.code
            refuse(context, error)
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except Exception as error:
            log.exception("%s", name)
            code = "INTERNAL"
            refuse(context, internal(error))
        finally:
            self._record(context, name, code, began_ns)
        return b""

    async def _told(self, endpoint: Endpoint, message: Any, caller: Caller) -> Any:
        """The response that an endpoint gives to a message; a model that does not exist is not ready."""
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

    def _tell(self, name: str) -> Any:
        """The response of an open call."""
        handle = RPCS[name].handle
        assert handle
        return grpc_wire.filled(f"{name}Response", handle(self._service, Call()))

    async def _watch(self, data: bytes, context: Any) -> AsyncIterator[Any]:
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
        """Count an answer, and write it to the access log; *context* is None where gRPC ended the call itself."""
        self._service.grpc_answers[name, code] += 1
        if self._logged:
            peer = context.peer() if context else "-"
            access.info("%s gRPC %s %s %.3f ms", peer, name, code, (time.monotonic_ns() - began_ns) / 1e6)

    # Inference

    async def _model_infer(self, data: bytes, context: Any, caller: Caller) -> Any:
        remaining_s = context.time_remaining()
        deadline = self._service.now() + round(remaining_s * 1e9) if remaining_s is not None else None
        pending = _PendingInfer(self._service.budget.give)
        try:
            self._begin(pending, data, deadline, caller, _parent(context))
            return await self._encoded(pending, await pending.answer, serialized)
        except asyncio.CancelledError:
            pending.cancel()
            raise
        finally:
            pending.end()

    def _begin(self, pending: _PendingInfer, data: bytes, deadline: int | None, caller: Caller, parent: str) -> None:
        """Have a request computed; RequestError if it is not even begun, of which a span tells."""
        try:
            message = self._read_message(pending, data)
            slot = self._service.meant(message.model_name, message.model_version)
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
        """Read a request, which holds its bytes from now on."""
        if len(data) > UNCOUNTED_BYTES:
            self._service.budget.take(len(data))
            pending.held_bytes = len(data)
        message = grpc_messages.read_infer(data, self._service.config.limits.max_json_bytes)
        pending.identity = _identity(message)
        return message

    async def _encoded(
        self, pending: _PendingInfer, outcome: InferResponse | RequestError, serialize: Callable[[Any], bytes]
    ) -> bytes:
        """A result as bytes for gRPC to send; the deadline is judged last, when they are there."""
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
        """Answers in the order of the requests; an error is an answer too, and the stream goes on."""
        queue: asyncio.Queue[_PendingInfer | None] = asyncio.Queue()
        room = asyncio.Semaphore(STREAM_AHEAD)
        reader = asyncio.create_task(self._read(context, queue, room, caller, _parent(context)))
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
                room.release()
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
        """The answer of a stream to one request, and its code."""
        reply = proto.CLASSES["ModelStreamInferResponse"]
        try:
            outcome = await pending.answer
            if isinstance(outcome, InferResponse):
                outcome = replace(outcome, parameters={**outcome.parameters, FINAL: True})
            return await self._encoded(pending, outcome, _streamed), "OK"
        except RequestError as error:
            refusal = reply(error_message=str(error), infer_response=pending.identity)
            refusal.infer_response.parameters[FINAL].bool_param = True
            error.__traceback__ = None  # its frames refer to the future that holds it
            return refusal, error.code

    async def _read(
        self,
        context: Any,
        queue: asyncio.Queue[_PendingInfer | None],
        room: asyncio.Semaphore,
        caller: Caller,
        parent: str,
    ) -> None:
        """Begin what a stream asks for, a few requests ahead of their answers, until it ends or is ended."""
        try:
            # not from gRPC's iterator, which holds a message until the next one comes
            while (data := await context.read()) is not grpc.aio.EOF:
                await room.acquire()
                queue.put_nowait(self._begin_streamed(data, caller, parent))
                self.in_flight += 1
                del data  # or it is held until the next one comes
        finally:
            queue.put_nowait(None)

    def _begin_streamed(self, data: bytes, caller: Caller, parent: str) -> _PendingInfer:
        """Begin a request of a stream; where it cannot begin, its answer says why."""
        refused: RequestError | None = None
        try:
            caller.begin()
        except RequestError as error:
            refused = error
        pending = _PendingInfer(self._service.budget.give, None if refused else caller)
        try:
            if refused:
                self._service.trace_refusal("", refused, parent)
                raise refused
            self._begin(pending, data, None, caller, parent)
        except RequestError as error:
            pending.done(error)
        except Exception as error:  # the other requests of the stream go on
            log.exception("%s", STREAM)
            pending.done(internal(error))
        return pending


class _Door(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a call; one that may not be made is refused before gRPC takes its message."""

    def __init__(self, service: Service, face: GrpcFace) -> None:
        self._service, self._face = service, face

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a call."""
        method = handler_call_details.method
        package, _, name = method.removeprefix("/").partition("/")
        if package == HEALTH and name in (CHECK, WATCH):
            return self._health(name, handler_call_details)
        if package != proto.SERVICE or name not in proto.METHODS:
            return self._face.refused("unknown", Unsupported(f"there is no method {method[:128]!r}"))
        if name in OPEN:
            return self._face.open_handler(package, name)
        try:
            caller = self._service.check_key(self._headers(handler_call_details))
            if name in COUNTED:
                caller.admit()
        except RequestError as error:
            return self._face.refused(name, error)
        return self._face.handler(name, caller)

    def _health(self, name: str, call: Any) -> Any:
        """The handler of a health call: orchestrators have no key, and are told of the server as a whole."""
        try:
            caller = self._service.check_key(self._headers(call))
        except Unauthorised as error:
            return self._face.open_handler(HEALTH, name) or self._face.refused(name, error)
        return self._face.watch_handler() if name == WATCH else self._face.handler(name, caller)

    def _headers(self, call: Any) -> dict[str, str]:
        if not self._service.keys.required:
            return {}
        return {key: str(value) for key, value in call.invocation_metadata or ()}


@contextmanager
def _entered(caller: Caller) -> Iterator[None]:
    """One of its calls is being answered: its message came after it was admitted, and others may have been faster."""
    caller.enter()
    try:
        yield
    finally:
        caller.end()


def _parent(context: Any) -> str:
    """The span that a call is a part of."""
    return next((str(value) for key, value in context.invocation_metadata() or () if key == PARENT), "")


def _identity(message: InferMessage) -> dict[str, str]:
    """What names a request of a stream in its answer; without values that are too long to be repeated."""
    names = {"id": message.id, "model_name": message.model_name, "model_version": message.model_version}
    return {key: value for key, value in names.items() if len(value) <= MAX_ID_CHARS}


def _streamed(message: Any) -> bytes:
    """A result as a stream sends it."""
    if isinstance(message, bytes):
        message = proto.CLASSES["ModelInferResponse"].FromString(message)
    return serialized(proto.CLASSES["ModelStreamInferResponse"](infer_response=message))


def credentials(certificate: Path, key: Path) -> Any:
    """What a server shows its clients; InputError if it cannot be read."""
    try:
        pair = key.read_bytes(), certificate.read_bytes()
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror or error}") from error
    return grpc.ssl_server_credentials([pair])

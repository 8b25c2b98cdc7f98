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
from weft.http.budget import UNCOUNTED_BYTES
from weft.serving import grpc_messages, grpc_wire, proto
from weft.serving.grpc_calls import NOT_RECEIVED, LostAnswers, RefusedCall, UnaryCall, refuse, serialized
from weft.serving.grpc_health import SERVICE as HEALTH
from weft.serving.grpc_health import Health, HealthCheckRequest
from weft.serving.grpc_messages import InferMessage
from weft.serving.json_helpers import is_large
from weft.serving.keys import Caller
from weft.serving.service import InferCall, Service, internal
from weft.serving.telemetry import PARENT
from weft.serving.wire import MAX_ID_CHARS, InferResponse, ModelSpec

log = logging.getLogger("weft.grpc")
access = logging.getLogger("weft.access")
_GRPC_LOG = logging.getLogger("grpc._cython.cygrpc")

STREAM_AHEAD = 16
"""Requests of one stream that are worked on at a time."""

LAST_BYTES_S = 0.25
"""How long clients of the last calls have to read what the kernel holds: gRPC's close may take it from them."""

IDLE_MS = 300_000
"""How long a connection without calls is kept."""

SMALL_MESSAGE_BYTES = 1 << 20
"""The largest message of a call that is not for a model to compute."""

OPEN = frozenset({"ServerLive", "ServerReady"})
"""Calls that need no key, and whose messages say nothing: they are answered without being read."""
COUNTED = frozenset(
    {"ModelInfer", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"}
    | {f"{kind}SharedMemory{what}" for kind in ("System", "Cuda") for what in ("Register", "Unregister")}
)
"""Calls that want something done, and count towards what their key may; so does every request of a stream."""
INFER, STREAM = "ModelInfer", "ModelStreamInfer"
HEALTH_CALLS = frozenset({"Check", "Watch"})
FINAL = "triton_final_response"
"""A parameter of every answer in a stream: each is the last one to its request."""

Answer = Callable[[Any, Any, Caller], Awaitable[Any]]


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
        self._logged = service.config.access_log
        self.in_flight = 0
        """Requests whose answers are not sent to their last byte."""
        self._lost = LostAnswers()
        self._readers: set[asyncio.Task[None]] = set()
        most = service.config.max_body_bytes
        options = [
            ("grpc.max_receive_message_length", min(most, 2**31 - 1)),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", service.config.max_connections),
            ("grpc.max_metadata_size", 16 * 1024),
            ("grpc.max_connection_idle_ms", IDLE_MS),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=service.config.total_queue + 256)
        self._health = Health(service)
        self._calls = self._make_calls()
        self._open: dict[tuple[str, str], Callable[[], Any]] = {
            (proto.SERVICE, "ServerLive"): self._live,
            (proto.SERVICE, "ServerReady"): self._ready,
            (HEALTH, "Check"): self._health.whole,
        }
        self._server.add_generic_rpc_handlers((_Door(service, self),))

    def _make_calls(self) -> dict[str, tuple[Any, Answer]]:
        """The unary calls but for inference: the class of their message, and what answers it."""
        answers: dict[str, Answer] = {
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "TraceSetting": self._trace_setting,
            "LogSettings": self._log_settings,
            **self._of_regions("system"),
            **self._of_regions("cuda"),
        }
        calls = {name: (proto.METHODS[name][0], answer) for name, answer in answers.items()}
        return calls | {"Check": (HealthCheckRequest, self._check)}

    async def start(self, host: str, port: int, credentials: Any = None) -> int:
        """Listen; returns the port."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if credentials is None:
            bound = self._server.add_insecure_port(address)
        else:
            bound = self._server.add_secure_port(address, credentials)
        await self._server.start()
        _GRPC_LOG.addFilter(self._lost)
        return int(bound)

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
                kind, answer = self._calls[name]
                return await answer(grpc_messages.parse_small(kind, data, SMALL_MESSAGE_BYTES), context, caller)
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

    async def _check(self, message: Any, context: Any, caller: Caller) -> Any:
        return self._health.check(message)

    async def _watch(self, data: bytes, context: Any) -> AsyncIterator[Any]:
        began_ns, code = time.monotonic_ns(), "OK"
        try:
            message = grpc_messages.parse_small(HealthCheckRequest, data, SMALL_MESSAGE_BYTES)
            async with aclosing(self._health.watch(message)) as statuses:
                async for status in statuses:
                    yield status
        except RequestError as error:
            code = error.code
            refuse(context, error)
        finally:
            self._record(context, "Watch", code, began_ns)

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
            self._service.meant(message.model_name, message.model_version)
        except RequestError as error:
            self._service.trace_refusal(pending.identity.get("model_name", ""), error, parent)
            raise

        def read(model: ModelSpec) -> Any:
            if message.head is None:
                return self._service.json.decode_message(data, model)
            return grpc_wire.decode_infer(message.head, model, message.raws)

        def peek() -> Any:
            return grpc_wire.parameters_of(message.head) if message.head is not None else {}

        pending.call = self._service.infer(
            message.model_name, message.model_version, read, pending.done, peek, deadline, caller, parent=parent
        )

    def _read_message(self, pending: _PendingInfer, data: bytes) -> InferMessage:
        """Read a request, which holds its bytes from now on."""
        if len(data) > UNCOUNTED_BYTES:
            self._service.budget.take(len(data))
            pending.held_bytes = len(data)
        message = grpc_messages.read_infer(data, self._service.config.max_json_bytes)
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

    # All else

    def _live(self) -> Any:
        return proto.CLASSES["ServerLiveResponse"](live=True)

    def _ready(self) -> Any:
        return proto.CLASSES["ServerReadyResponse"](ready=self._service.is_ready())

    async def _model_ready(self, message: Any, context: Any, caller: Caller) -> Any:
        try:
            ready = self._service.model_ready(message.name, message.version)
        except NotFound:
            ready = False
        return proto.CLASSES["ModelReadyResponse"](ready=ready)

    async def _server_metadata(self, message: Any, context: Any, caller: Caller) -> Any:
        return grpc_wire.filled("ServerMetadataResponse", self._service.metadata())

    async def _model_metadata(self, message: Any, context: Any, caller: Caller) -> Any:
        answer = await self._service.model_metadata(message.name, message.version)
        return grpc_wire.filled("ModelMetadataResponse", answer)

    async def _model_config(self, message: Any, context: Any, caller: Caller) -> Any:
        answer = await self._service.model_config(message.name, message.version)
        return grpc_wire.filled("ModelConfigResponse", {"config": answer})

    async def _model_statistics(self, message: Any, context: Any, caller: Caller) -> Any:
        answer = self._service.statistics(message.name, message.version)
        return grpc_wire.filled("ModelStatisticsResponse", answer)

    async def _index(self, message: Any, context: Any, caller: Caller) -> Any:
        return grpc_wire.filled("RepositoryIndexResponse", {"models": await self._service.index(message.ready)})

    async def _load(self, message: Any, context: Any, caller: Caller) -> Any:
        await self._service.load(message.model_name, grpc_wire.parameters_of(message))
        return proto.CLASSES["RepositoryModelLoadResponse"]()

    async def _unload(self, message: Any, context: Any, caller: Caller) -> Any:
        await self._service.unload(message.model_name)
        return proto.CLASSES["RepositoryModelUnloadResponse"]()

    async def _trace_setting(self, message: Any, context: Any, caller: Caller) -> Any:
        wanted = {key: list(each.value) for key, each in message.settings.items()}
        told = self._service.trace_told(message.model_name, wanted)
        settings = {key: {"value": each if isinstance(each, list) else [each]} for key, each in told.items()}
        return grpc_wire.filled("TraceSettingResponse", {"settings": settings})

    async def _log_settings(self, message: Any, context: Any, caller: Caller) -> Any:
        told = self._service.log_told({key: _log_value(each) for key, each in message.settings.items()})
        settings = {key: {_log_field(each): each} for key, each in told.items()}
        return grpc_wire.filled("LogSettingsResponse", {"settings": settings})

    def _of_regions(self, kind: str) -> dict[str, Answer]:
        """The calls about shared memory of one kind."""
        regions, prefix = self._service.regions[kind], f"{kind.capitalize()}SharedMemory"

        async def status(message: Any, context: Any, caller: Caller) -> Any:
            found = {str(each["name"]): each for each in regions.status(caller, message.name)}
            return grpc_wire.filled(f"{prefix}StatusResponse", {"regions": found})

        async def register(message: Any, context: Any, caller: Caller) -> Any:
            about = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
            regions.register(caller, message.name, about)
            return proto.CLASSES[f"{prefix}RegisterResponse"]()

        async def unregister(message: Any, context: Any, caller: Caller) -> Any:
            regions.unregister(caller, message.name)
            return proto.CLASSES[f"{prefix}UnregisterResponse"]()

        return {f"{prefix}Status": status, f"{prefix}Register": register, f"{prefix}Unregister": unregister}


class _Door(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a call; one that may not be made is refused before gRPC takes its message."""

    def __init__(self, service: Service, face: GrpcFace) -> None:
        self._service, self._face = service, face

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a call."""
        method = handler_call_details.method
        package, _, name = method.removeprefix("/").partition("/")
        if package == HEALTH and name in HEALTH_CALLS:
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
        return self._face.watch_handler() if name == "Watch" else self._face.handler(name, caller)

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


def _log_value(setting: Any) -> Any:
    """The value of a log setting; None where it has none, and stays as it is."""
    field = setting.WhichOneof("parameter_choice")
    return getattr(setting, field) if field else None


def _log_field(value: bool | int | str) -> str:
    return "bool_param" if isinstance(value, bool) else "uint32_param" if isinstance(value, int) else "string_param"


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

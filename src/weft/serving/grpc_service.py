"""The protocol's gRPC face: every call of ``GRPCInferenceService`` that the service can answer.

Who may call is judged by a call's metadata, before its message is taken from the connection. How large the message is
nobody knows then: gRPC gathers it, up to ``max_body_bytes``, and only then it counts towards what the server holds.
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
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # or its core writes lines of its own beside our errors

import grpc
from google.protobuf.message import DecodeError

from weft.errors import BadRequest, InputError, NotFound, RequestError, TooLarge, Unauthorised
from weft.serving import grpc_wire, proto
from weft.serving.budget import UNCOUNTED_BYTES
from weft.serving.grpc_health import SERVICE as HEALTH
from weft.serving.grpc_health import Health, HealthCheckRequest
from weft.serving.json_helpers import LARGE_BYTES, is_large
from weft.serving.keys import Caller
from weft.serving.service import InferCall, Service, internal
from weft.serving.telemetry import PARENT
from weft.serving.wire import MAX_ID_CHARS, InferResponse, ModelSpec

log = logging.getLogger("weft.grpc")
access = logging.getLogger("weft.access")

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
FINAL = "triton_final_response"
"""A parameter of every answer in a stream: each is the last one to its request."""

Answer = Callable[[Any, Any, Caller], Awaitable[Any]]


class _Large(NamedTuple):
    """A message large enough to count towards what the server holds."""

    message: Any
    size: int
    slow: bytes | None
    """Its bytes, where it has typed contents or strings: many objects, which take long to read."""


class _Begun:
    """A request for a result: who waits for it, and what it holds until it is over."""

    __slots__ = ("_caller", "_give", "answer", "began_ns", "call", "held_bytes", "meant")

    def __init__(self, give: Callable[[int], None], caller: Caller | None = None) -> None:
        """*caller* is whoever it counts for until it is over, None where its call counts."""
        self._caller, self._give = caller, give
        self.answer: asyncio.Future[InferResponse | RequestError] = asyncio.get_running_loop().create_future()
        self.call: InferCall | None = None
        """None: it could not even be read."""
        self.held_bytes = 0
        self.began_ns = time.monotonic_ns()
        self.meant: dict[str, str] = {}
        """What tells in a stream which request this is: its id, and the name and version of its model."""

    def done(self, outcome: InferResponse | RequestError) -> None:
        if not self.answer.done():
            self.answer.set_result(outcome)

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if self.call:
            self.call.cancel()

    def end(self) -> None:
        """It is over."""
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
        self._server.add_generic_rpc_handlers((_Door(service, self.handlers, self.health_handlers, self.refusing),))

    async def start(self, host: str, port: int, credentials: Any = None) -> int:
        """Listen; returns the port."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if credentials is None:
            bound = self._server.add_insecure_port(address)
        else:
            bound = self._server.add_secure_port(address, credentials)
        await self._server.start()
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

    def handlers(self, caller: Caller) -> dict[str, Any]:
        """Who answers the calls that are made with a key."""
        calls: dict[str, Answer] = {
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "ModelInfer": self._model_infer,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "TraceSetting": self._trace_setting,
            "LogSettings": self._log_settings,
            **self._of_regions("system"),
            **self._of_regions("cuda"),
        }
        table = {
            "ServerLive": self._probe("ServerLive", self._live),
            "ServerReady": self._probe("ServerReady", self._ready),
        }
        for name, (request, _, streaming) in proto.METHODS.items():
            if name in OPEN:
                continue
            read = _reader(request)
            if streaming:
                table[name] = grpc.stream_stream_rpc_method_handler(partial(self._stream, caller), read, _written)
            else:
                guarded = self._guarded(name, calls[name], caller)
                table[name] = grpc.unary_unary_rpc_method_handler(guarded, read, _written)
        return table

    def health_handlers(self, caller: Caller | None) -> dict[str, Any]:
        """Who answers gRPC's health calls; without a key the server as a whole is told of, whatever is asked."""
        if caller is None:
            return {"Check": self._probe("Check", self._health.whole)}
        read = _reader(HealthCheckRequest)
        check = self._guarded("Check", self._check, caller)
        return {
            "Check": grpc.unary_unary_rpc_method_handler(check, read, _written),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, read, _written),
        }

    async def _check(self, message: Any, context: Any, caller: Caller) -> Any:
        return self._health.check(message)

    async def _watch(self, message: Any, context: Any) -> AsyncIterator[Any]:
        began_ns, code = time.monotonic_ns(), "OK"
        try:
            if isinstance(message, RequestError):
                raise message
            async with aclosing(self._health.watch(message)) as statuses:
                async for status in statuses:
                    yield status
        except RequestError as error:
            code = error.code
            await context.abort(grpc.StatusCode[code], str(error))
        finally:
            self._log(context, "Watch", code, began_ns)

    def refusing(self, name: str, error: RequestError) -> Any:
        """Answers a call without reading what it says, whether it streams or not."""

        async def refuse(messages: Any, context: Any) -> None:
            self._log(context, name, error.code, time.monotonic_ns())
            if name == INFER and not isinstance(error, Unauthorised):
                self._service.trace_refusal("", error, _parent(context))
            await context.abort(grpc.StatusCode[error.code], str(error))

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _probe(self, name: str, answer: Callable[[], Any]) -> Any:
        """Answers a call of whoever it is, without waiting for what it says."""

        async def told(messages: Any, context: Any) -> AsyncIterator[Any]:
            began_ns = time.monotonic_ns()
            yield answer()
            self._log(context, name, "OK", began_ns)

        return grpc.stream_stream_rpc_method_handler(told, None, _written)

    def _guarded(self, name: str, answer: Answer, caller: Caller) -> Callable[[Any, Any], Awaitable[Any]]:
        """Turn our errors into status codes, and keep the books."""

        async def guarded(message: Any, context: Any) -> Any:
            began_ns, code = time.monotonic_ns(), "OK"
            self.in_flight += 1
            context.add_done_callback(self._sent)
            try:
                if isinstance(message, RequestError) and name != INFER:  # of that one, a span tells
                    raise message
                with _entered(caller) if name in COUNTED else nullcontext():
                    return await answer(message, context, caller)
            except RequestError as error:
                code = error.code
                await context.abort(grpc.StatusCode[code], str(error))
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
            except Exception as error:
                log.exception("%s", name)
                code = "INTERNAL"
                await context.abort(grpc.StatusCode.INTERNAL, str(internal(error)))
            finally:
                self._log(context, name, code, began_ns)

        return guarded

    def _sent(self, context: Any) -> None:
        self.in_flight -= 1

    def _log(self, context: Any, name: str, code: str, began_ns: int) -> None:
        if self._logged:
            access.info("%s gRPC %s %s %.3f ms", context.peer(), name, code, (time.monotonic_ns() - began_ns) / 1e6)

    # Inference

    async def _model_infer(self, message: Any, context: Any, caller: Caller) -> Any:
        remaining_s = context.time_remaining()
        deadline = self._service.now() + round(remaining_s * 1e9) if remaining_s is not None else None
        begun = _Begun(self._service.budget.give)
        try:
            self._begin_traced(begun, message, deadline, caller, _parent(context))
            return await self._computed(begun, await begun.answer, _written)
        except asyncio.CancelledError:
            begun.cancel()
            raise
        finally:
            begun.end()

    def _begin_traced(self, begun: _Begun, message: Any, deadline: int | None, caller: Caller, parent: str) -> None:
        """Have a request computed; RequestError if it is not even begun, and a span that says so."""
        try:
            self._begin(begun, message, deadline, caller, parent)
        except RequestError as error:
            self._service.trace_refusal(_meant(message).get("model_name", ""), error, parent)
            raise

    def _begin(self, begun: _Begun, message: Any, deadline: int | None, caller: Caller, parent: str) -> None:
        slow: bytes | None = None
        if isinstance(message, _Large):
            message, size, slow = message
            self._service.budget.take(size)
            begun.held_bytes = size
        if isinstance(message, RequestError):
            raise message
        self._service.meant(message.model_name, message.model_version)

        def read(model: ModelSpec) -> Any:
            if slow is None:
                return grpc_wire.decode_infer(message, model)
            if not message.raw_input_contents:
                self._check_typed(len(slow))
            return self._service.json.decode_message(slow, model)

        def peek() -> Any:
            return grpc_wire.parameters_of(message)

        begun.call = self._service.infer(
            message.model_name, message.model_version, read, begun.done, peek, deadline, caller, parent=parent
        )

    def _check_typed(self, count: int) -> None:
        """Typed contents cost what JSON does, and have the same limit."""
        limit = self._service.config.max_json_bytes
        if count > limit:
            raise TooLarge(f"{count} bytes of typed contents exceed the limit of {limit} bytes; send raw contents")

    async def _computed(
        self, begun: _Begun, outcome: InferResponse | RequestError, serialise: Callable[[Any], bytes]
    ) -> bytes:
        """A result as bytes for gRPC to send; the deadline is judged last, when they are there."""
        if isinstance(outcome, RequestError):
            raise outcome
        assert begun.call
        try:
            large = is_large(outcome)
            message = await self._service.json.encode_message(outcome) if large else grpc_wire.encode_infer(outcome)
            answer = serialise(message)
        except Exception as error:
            raise begun.call.fail(error) from error
        if late := begun.call.settle():
            raise late
        return answer

    async def _stream(self, caller: Caller, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answers in the order of the requests; an error is an answer too, and the stream goes on."""
        begun: asyncio.Queue[_Begun | None] = asyncio.Queue()
        room = asyncio.Semaphore(STREAM_AHEAD)
        reader = asyncio.create_task(self._read(messages, begun, room, caller, _parent(context)))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        left: list[_Begun] = []
        try:
            while (next_one := await begun.get()) is not None:
                left = [next_one]
                answer, code = await self._told(next_one)
                self._log(context, STREAM, code, next_one.began_ns)
                yield answer
                self.in_flight -= 1
                left = []
                next_one.end()
                room.release()
        finally:
            reader.cancel()
            while not begun.empty():
                if (waiting := begun.get_nowait()) is not None:
                    left.append(waiting)
            self.in_flight -= len(left)
            for each in left:
                each.cancel()
                each.end()

    async def _told(self, begun: _Begun) -> tuple[Any, str]:
        """What a stream answers to a request, and its code."""
        reply = proto.CLASSES["ModelStreamInferResponse"]
        try:
            outcome = await begun.answer
            if isinstance(outcome, InferResponse):
                outcome = replace(outcome, parameters={**outcome.parameters, FINAL: True})
            return await self._computed(begun, outcome, _streamed), "OK"
        except RequestError as error:
            told = reply(error_message=str(error), infer_response=begun.meant)
            told.infer_response.parameters[FINAL].bool_param = True
            return told, error.code

    async def _read(
        self, messages: AsyncIterator[Any], begun: asyncio.Queue[_Begun | None], room: Any, caller: Caller, parent: str
    ) -> None:
        """Begin what a stream asks for, a few requests ahead of their answers, until it ends or is ended."""
        try:
            async for message in messages:
                await room.acquire()
                begun.put_nowait(self._begun(message, caller, parent))
                self.in_flight += 1
        finally:
            begun.put_nowait(None)

    def _begun(self, message: Any, caller: Caller, parent: str) -> _Begun:
        """A request of a stream; where it could not begin, its answer says why."""
        refused: RequestError | None = None
        try:
            caller.begin()
        except RequestError as error:
            refused = error
        found = _Begun(self._service.budget.give, None if refused else caller)
        found.meant = _meant(message)
        try:
            self._begin_traced(found, refused or message, None, caller, parent)
        except RequestError as error:
            found.done(error)
        return found

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
    """Finds who answers a call; whoever may not make it is refused before gRPC takes the message."""

    def __init__(
        self,
        service: Service,
        handlers: Callable[[Caller], dict[str, Any]],
        health_handlers: Callable[[Caller | None], dict[str, Any]],
        refusing: Callable[[str, RequestError], Any],
    ) -> None:
        self._service, self._handlers, self._refusing = service, handlers, refusing
        self._health, self._health_unread = health_handlers(Caller("")), health_handlers(None)
        self._nobody = handlers(Caller(""))
        self._tables: dict[Caller, dict[str, Any]] = {}

    def service(self, handler_call_details: Any) -> Any:
        """Who answers; None if there is no such call."""
        package, _, name = handler_call_details.method.removeprefix("/").partition("/")
        if package == HEALTH:
            return self._health_of(name, handler_call_details)
        if package != proto.SERVICE or name not in self._nobody:
            return None
        if name in OPEN:
            return self._nobody[name]
        try:
            caller = self._service.check_key(self._headers(handler_call_details))
            if name in COUNTED:
                caller.admit()
        except RequestError as error:
            return self._refusing(name, error)
        table = self._tables.get(caller)
        if table is None:
            table = self._tables[caller] = self._handlers(caller)
        return table[name]

    def _health_of(self, name: str, call: Any) -> Any:
        """Who answers a health call: orchestrators have no key, and shall be answered."""
        try:
            self._service.check_key(self._headers(call))
        except Unauthorised as error:
            return self._health_unread.get(name) or (self._refusing(name, error) if name in self._health else None)
        return self._health.get(name)

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


def _meant(message: Any) -> dict[str, str]:
    """What tells which request of a stream a message is; nothing where it cannot be read, and no id without end."""
    if isinstance(message, _Large):
        message = message.message
    if isinstance(message, RequestError):
        return {}
    found = {"id": message.id, "model_name": message.model_name, "model_version": message.model_version}
    return {key: each for key, each in found.items() if len(each) <= MAX_ID_CHARS}


def _log_value(setting: Any) -> Any:
    """The value of a log setting; None where it has none, and stays as it is."""
    field = setting.WhichOneof("parameter_choice")
    return getattr(setting, field) if field else None


def _log_field(value: bool | int | str) -> str:
    return "bool_param" if isinstance(value, bool) else "uint32_param" if isinstance(value, int) else "string_param"


def _reader(kind: Any) -> Callable[[bytes], Any]:
    """Reads a message; one that cannot be read becomes the error to answer with, as gRPC itself would say UNKNOWN."""
    infer = kind is proto.CLASSES["ModelInferRequest"]

    def read(data: bytes) -> Any:
        if not infer and len(data) > SMALL_MESSAGE_BYTES:
            return TooLarge(f"message has {len(data)} bytes, more than the limit of {SMALL_MESSAGE_BYTES} bytes")
        try:
            message = kind.FromString(data)
        except DecodeError:
            return BadRequest(f"the message is no {kind.DESCRIPTOR.name}: its {len(data)} bytes cannot be parsed")
        if not infer or len(data) <= UNCOUNTED_BYTES:
            return message
        slow = len(data) > LARGE_BYTES and (not message.raw_input_contents or _says_strings(message))
        return _Large(message, len(data), data if slow else None)

    return read


def _says_strings(message: Any) -> bool:
    """Whether one of the inputs is said to be strings; no model has more inputs than are looked at."""
    return any(tensor.datatype == "BYTES" for tensor in islice(message.inputs, 1024))


def _written(message: Any) -> bytes:
    """A message as bytes, which it may be already."""
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def _streamed(message: Any) -> bytes:
    """A result as a stream sends it."""
    if isinstance(message, bytes):
        message = proto.CLASSES["ModelInferResponse"].FromString(message)
    return _written(proto.CLASSES["ModelStreamInferResponse"](infer_response=message))


def credentials(certificate: Path, key: Path) -> Any:
    """What a server shows its clients; InputError if it cannot be read."""
    try:
        pair = key.read_bytes(), certificate.read_bytes()
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror or error}") from error
    return grpc.ssl_server_credentials([pair])

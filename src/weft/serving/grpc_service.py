"""The protocol's gRPC face: every call of ``GRPCInferenceService`` that the service can answer."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # or its core writes lines of its own beside our errors

import grpc
from google.protobuf.message import DecodeError

from weft.errors import BadRequest, InputError, RequestError
from weft.serving import grpc_wire, proto
from weft.serving.service import InferCall, Service, internal
from weft.serving.wire import InferResponse

log = logging.getLogger("weft.grpc")
access = logging.getLogger("weft.access")

STREAM_AHEAD = 16
"""Requests of one stream that are worked on at a time."""

LAST_BYTES_S = 0.25
"""How long clients of the last calls have to read what the kernel holds: gRPC's close may take it from them."""

Answer = Callable[[Any, Any], Awaitable[Any]]


class _Begun(NamedTuple):
    """A request of a stream."""

    call: InferCall | None
    """None: it could not even be read."""
    answer: asyncio.Future[InferResponse | RequestError]
    began_ns: int


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
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=service.config.total_queue + 256)
        self._server.add_generic_rpc_handlers((self._handlers(),))

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
        """End the streams, which ask for no more, and wait until the last byte of every answer is sent."""
        for reader in self._readers:
            reader.cancel()
        if self.in_flight:
            while self.in_flight:
                await asyncio.sleep(0.005)
            await asyncio.sleep(LAST_BYTES_S)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, and let those that run end."""
        await self._server.stop(grace_s)

    def _handlers(self) -> Any:
        calls: dict[str, Answer] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "ModelInfer": self._model_infer,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }
        table = {}
        for name, (request, response, streaming) in proto.METHODS.items():
            read, write = _reader(request), response.SerializeToString
            if streaming:
                table[name] = grpc.stream_stream_rpc_method_handler(self._stream, read, write)
            else:
                table[name] = grpc.unary_unary_rpc_method_handler(self._guarded(name, calls[name]), read, write)
        return grpc.method_handlers_generic_handler(proto.SERVICE, table)

    def _guarded(self, name: str, answer: Answer) -> Answer:
        """Check the key, turn our errors into status codes, and keep the books."""

        async def guarded(message: Any, context: Any) -> Any:
            began_ns, code = time.monotonic_ns(), "OK"
            self.in_flight += 1
            context.add_done_callback(self._sent)
            try:
                if answer not in (self._server_live, self._server_ready):
                    self._check_key(context)
                if isinstance(message, RequestError):
                    raise message
                return await answer(message, context)
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

    def _check_key(self, context: Any) -> None:
        self._service.check_key({key: str(value) for key, value in context.invocation_metadata() or ()})

    # Inference

    async def _model_infer(self, message: Any, context: Any) -> Any:
        remaining_s = context.time_remaining()
        deadline = self._service.now() + round(remaining_s * 1e9) if remaining_s is not None else None
        call, answer = self._begin(message, deadline)
        try:
            return _computed(await answer)
        except asyncio.CancelledError:
            if call:
                call.cancel()
            raise

    def _begin(
        self, message: Any, deadline: int | None
    ) -> tuple[InferCall | None, asyncio.Future[InferResponse | RequestError]]:
        answer: asyncio.Future[InferResponse | RequestError] = asyncio.get_running_loop().create_future()
        if isinstance(message, RequestError):
            answer.set_result(message)
            return None, answer

        def done(outcome: InferResponse | RequestError) -> None:
            if not answer.done():
                answer.set_result(outcome)

        call = self._service.infer(
            message.model_name,
            message.model_version,
            lambda model: grpc_wire.decode_infer(message, model),
            done,
            lambda: grpc_wire.parameters_of(message),
            deadline,
        )
        return call, answer

    async def _stream(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answers in the order of the requests; an error is an answer too, and the stream goes on."""
        try:
            self._check_key(context)
        except RequestError as error:
            self._log(context, "ModelStreamInfer", error.code, time.monotonic_ns())
            await context.abort(grpc.StatusCode[error.code], str(error))
        begun: asyncio.Queue[_Begun | None] = asyncio.Queue()
        room = asyncio.Semaphore(STREAM_AHEAD)
        reader = asyncio.create_task(self._read(messages, begun, room))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        reply = proto.CLASSES["ModelStreamInferResponse"]
        calls: list[InferCall | None] = []
        try:
            while (next_one := await begun.get()) is not None:
                calls = [next_one.call]
                code = "OK"
                try:
                    answer = reply(infer_response=_computed(await next_one.answer))
                except RequestError as error:
                    answer, code = reply(error_message=str(error)), error.code
                self._log(context, "ModelStreamInfer", code, next_one.began_ns)
                yield answer
                self.in_flight -= 1
                calls = []
                room.release()
        finally:
            reader.cancel()
            while not begun.empty():
                if (left := begun.get_nowait()) is not None:
                    calls.append(left.call)
            self.in_flight -= len(calls)
            for call in calls:
                if call:
                    call.cancel()

    async def _read(self, messages: AsyncIterator[Any], begun: asyncio.Queue[_Begun | None], room: Any) -> None:
        """Begin what a stream asks for, a few requests ahead of their answers, until it ends or is ended."""
        try:
            async for message in messages:
                await room.acquire()
                began_ns = time.monotonic_ns()
                begun.put_nowait(_Begun(*self._begin(message, None), began_ns))
                self.in_flight += 1
        finally:
            begun.put_nowait(None)

    # All else

    async def _server_live(self, message: Any, context: Any) -> Any:
        return proto.CLASSES["ServerLiveResponse"](live=True)

    async def _server_ready(self, message: Any, context: Any) -> Any:
        return proto.CLASSES["ServerReadyResponse"](ready=self._service.is_ready())

    async def _model_ready(self, message: Any, context: Any) -> Any:
        ready = self._service.model_ready(message.name, message.version)
        return proto.CLASSES["ModelReadyResponse"](ready=ready)

    async def _server_metadata(self, message: Any, context: Any) -> Any:
        return grpc_wire.filled("ServerMetadataResponse", self._service.metadata())

    async def _model_metadata(self, message: Any, context: Any) -> Any:
        answer = await self._service.model_metadata(message.name, message.version)
        return grpc_wire.filled("ModelMetadataResponse", answer)

    async def _model_config(self, message: Any, context: Any) -> Any:
        answer = await self._service.model_config(message.name, message.version)
        return grpc_wire.filled("ModelConfigResponse", {"config": answer})

    async def _model_statistics(self, message: Any, context: Any) -> Any:
        answer = self._service.statistics(message.name, message.version)
        return grpc_wire.filled("ModelStatisticsResponse", answer)

    async def _index(self, message: Any, context: Any) -> Any:
        return grpc_wire.filled("RepositoryIndexResponse", {"models": await self._service.index(message.ready)})

    async def _load(self, message: Any, context: Any) -> Any:
        if grpc_wire.parameters_of(message):
            raise BadRequest("load takes no parameters here: models come from the repository as they are")
        await self._service.load(message.model_name)
        return proto.CLASSES["RepositoryModelLoadResponse"]()

    async def _unload(self, message: Any, context: Any) -> Any:
        await self._service.unload(message.model_name)
        return proto.CLASSES["RepositoryModelUnloadResponse"]()


def _computed(outcome: InferResponse | RequestError) -> Any:
    if isinstance(outcome, RequestError):
        raise outcome
    return grpc_wire.encode_infer(outcome)


def _reader(kind: Any) -> Callable[[bytes], Any]:
    """Reads a message; one that cannot be read becomes the error to answer with, as gRPC itself would say UNKNOWN."""

    def read(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError:
            return BadRequest(f"the message is no {kind.DESCRIPTOR.name}: its {len(data)} bytes cannot be parsed")

    return read


def credentials(certificate: Path, key: Path) -> Any:
    """What a server shows its clients; InputError if it cannot be read."""
    try:
        pair = key.read_bytes(), certificate.read_bytes()
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror or error}") from error
    return grpc.ssl_server_credentials([pair])

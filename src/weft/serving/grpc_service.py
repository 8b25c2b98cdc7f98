"""The protocol's gRPC face: every call of ``GRPCInferenceService`` that the service can answer."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from weft.errors import BadRequest, RequestError, Unauthorised
from weft.serving import grpc_wire, proto
from weft.serving.service import Call, Result, Service, internal

log = logging.getLogger("weft.grpc")

STREAM_AHEAD = 16
"""Requests of one stream that are worked on at a time."""

Answer = Callable[[Any, Any], Awaitable[Any]]


class GrpcFace:
    """A gRPC server over a service, on the running event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._key = service.config.api_key
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
            read, write = request.FromString, response.SerializeToString
            if streaming:
                table[name] = grpc.stream_stream_rpc_method_handler(self._stream, read, write)
            else:
                table[name] = grpc.unary_unary_rpc_method_handler(self._guarded(calls[name]), read, write)
        return grpc.method_handlers_generic_handler(proto.SERVICE, table)

    def _guarded(self, answer: Answer) -> Answer:
        """Check the key, and turn our errors into status codes."""

        async def guarded(message: Any, context: Any) -> Any:
            try:
                if answer not in (self._server_live, self._server_ready):
                    self._check_key(context)
                return await answer(message, context)
            except RequestError as error:
                await context.abort(grpc.StatusCode[error.code], str(error))
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if isinstance(error, grpc.aio.AbortError):
                    raise
                log.exception("%s", answer.__name__)
                await context.abort(grpc.StatusCode.INTERNAL, str(internal(error)))

        return guarded

    def _check_key(self, context: Any) -> None:
        if self._key is None:
            return
        given = ""
        for key, value in context.invocation_metadata() or ():
            if key == "x-api-key":
                given = value
            elif key == "authorization" and value[:7].lower() == "bearer ":
                given = value[7:].strip()
        if not hmac.compare_digest(str(given).encode(), self._key.encode()):
            raise Unauthorised("this server wants an API key: metadata authorization: Bearer KEY")

    # Inference

    async def _model_infer(self, message: Any, context: Any) -> Any:
        remaining_s = context.time_remaining()
        deadline = time.monotonic_ns() + round(remaining_s * 1e9) if remaining_s is not None else None
        call, answer = self._begin(message, deadline)
        try:
            return _computed(await answer)
        except asyncio.CancelledError:
            call.cancel()
            raise

    def _begin(self, message: Any, deadline: int | None) -> tuple[Call, asyncio.Future[Result | RequestError]]:
        answer: asyncio.Future[Result | RequestError] = asyncio.get_running_loop().create_future()

        def done(outcome: Result | RequestError) -> None:
            if not answer.done():
                answer.set_result(outcome)

        call = self._service.infer(
            message.model_name,
            message.model_version,
            lambda model: grpc_wire.decode_infer(message, model),
            done,
            deadline,
        )
        return call, answer

    async def _stream(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answers in the order of the requests; an error is an answer too, and the stream goes on."""
        try:
            self._check_key(context)
        except RequestError as error:
            await context.abort(grpc.StatusCode[error.code], str(error))
        begun: asyncio.Queue[tuple[Call, asyncio.Future[Result | RequestError]] | None] = asyncio.Queue(STREAM_AHEAD)
        calls: set[Call] = set()

        async def read() -> None:
            async for message in messages:
                call, answer = self._begin(message, None)
                calls.add(call)
                await begun.put((call, answer))
            await begun.put(None)

        reader = asyncio.create_task(read())
        reply = proto.CLASSES["ModelStreamInferResponse"]
        try:
            while (next_one := await begun.get()) is not None:
                call, answer = next_one
                try:
                    yield reply(infer_response=_computed(await answer))
                except RequestError as error:
                    yield reply(error_message=str(error))
                calls.discard(call)
        finally:
            reader.cancel()
            for call in calls:
                call.cancel()

    # All else

    async def _server_live(self, message: Any, context: Any) -> Any:
        return proto.CLASSES["ServerLiveResponse"](live=True)

    async def _server_ready(self, message: Any, context: Any) -> Any:
        return proto.CLASSES["ServerReadyResponse"](ready=self._service.is_ready())

    async def _model_ready(self, message: Any, context: Any) -> Any:
        ready = self._service.model_ready(message.name, message.version)
        return proto.CLASSES["ModelReadyResponse"](ready=ready)

    async def _server_metadata(self, message: Any, context: Any) -> Any:
        return grpc_wire.server_metadata(self._service.metadata())

    async def _model_metadata(self, message: Any, context: Any) -> Any:
        answer = await self._service.model_metadata(message.name, message.version)
        slot = await self._service.loaded(message.name, message.version)
        assert slot.spec
        return grpc_wire.model_metadata(slot.spec, answer["versions"], answer["platform"])

    async def _model_config(self, message: Any, context: Any) -> Any:
        return grpc_wire.model_config(await self._service.model_config(message.name, message.version))

    async def _model_statistics(self, message: Any, context: Any) -> Any:
        return grpc_wire.model_statistics(self._service.statistics(message.name, message.version))

    async def _index(self, message: Any, context: Any) -> Any:
        return grpc_wire.repository_index(await self._service.index(message.ready))

    async def _load(self, message: Any, context: Any) -> Any:
        if grpc_wire.repository_parameters(message):
            raise BadRequest("load takes no parameters here: models come from the repository as they are")
        await self._service.load(message.model_name)
        return proto.CLASSES["RepositoryModelLoadResponse"]()

    async def _unload(self, message: Any, context: Any) -> Any:
        await self._service.unload(message.model_name)
        return proto.CLASSES["RepositoryModelUnloadResponse"]()


def _computed(outcome: Result | RequestError) -> Any:
    if isinstance(outcome, RequestError):
        raise outcome
    return grpc_wire.encode_infer(outcome.request, outcome.model, outcome.outputs, outcome.parameters)

"""The server as a whole: starts its faces, loads its models, and goes down without losing a request."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import ssl
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from weft.errors import InputError
from weft.serving.config import ServerConfig
from weft.serving.dispatch import Dispatcher
from weft.serving.grpc_service import GrpcFace
from weft.serving.http import Exchange, HttpServer, Limits, Response
from weft.serving.library import Library
from weft.serving.repository import Repository
from weft.serving.routes import Routes
from weft.serving.service import Service
from weft.serving.telemetry import make_telemetry

log = logging.getLogger("weft.server")
access = logging.getLogger("weft.access")

SWITCH_S = 0.0005
"""How long a Python thread may hold the global lock while another waits: lanes report within this."""


class Server:
    """One server on the running event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._scratch = tempfile.TemporaryDirectory(prefix="weft-") if config.cache is None else None
        cache = Path(self._scratch.name) if self._scratch else config.cache
        assert cache is not None
        self._repository = Repository(config.models, cache / "models")
        self._cache = cache / "segments"
        self.http_port: int | None = None
        self.grpc_port: int | None = None

    async def start(self, say: Callable[[str], None] | None = None) -> None:
        """Listen, then load; ready when every model that shall be there is warm."""
        config = self.config
        sys.setswitchinterval(SWITCH_S)
        telemetry = make_telemetry(config.otlp)
        self._dispatcher = Dispatcher(
            asyncio.get_running_loop(),
            config.policy,
            config.policy_options,
            lanes=config.lanes,
            pin=config.pin,
            most_waiting=config.total_queue,
        )
        library = Library(
            self._repository,
            self._dispatcher,
            threads=config.threads,
            budget_bytes=config.memory_budget_bytes,
            cache=self._cache,
        )
        self.service = Service(config, library, self._dispatcher, telemetry)
        limits = Limits(body_bytes=config.max_body_bytes, connections=config.max_connections)
        self._http = HttpServer(Routes(self.service).handle, limits, _log_access if config.access_log else None)
        self._grpc = GrpcFace(self.service) if config.grpc_port is not None else None
        try:
            await self._listen()
            await self.service.preload(say)
            gc.collect()
            gc.freeze()  # what is loaded now stays; looking through it again and again would cost every request
        except BaseException:
            await self.stop()
            raise

    async def _listen(self) -> None:
        config = self.config
        try:
            self.http_port = await self._http.start(config.host, config.http_port, _tls(config))
        except OSError as error:
            raise InputError(f"cannot listen on {config.host}:{config.http_port}: {error.strerror or error}") from error
        if self._grpc and config.grpc_port is not None:
            try:
                self.grpc_port = await self._grpc.start(config.host, config.grpc_port, _grpc_tls(config))
            except RuntimeError as error:
                raise InputError(f"cannot listen on {config.host}:{config.grpc_port} for gRPC: {error}") from error

    async def stop(self) -> bool:
        """Take no new requests, answer those that are there, and end; False if time ran out first."""
        service = self.service
        service.draining = True
        done = True
        try:
            async with asyncio.timeout(self.config.drain_s):
                await service.drained()
        except TimeoutError:
            done = False
            log.warning("%d requests were not answered within %g s", self._dispatcher.pending, self.config.drain_s)
        await self._http.drain(1.0 if done else 0.1)
        if self._grpc:
            await self._grpc.stop(1.0 if done else 0.1)
        self._http.close()
        self._dispatcher.close()
        await service.library.close()
        await asyncio.to_thread(service.telemetry.close)
        if self._scratch:
            self._scratch.cleanup()
        return done


async def serve(config: ServerConfig, say: Callable[[str], None] | None, ready: Callable[[Server], None]) -> bool:
    """Serve until told to stop by SIGTERM or SIGINT; whether every accepted request was answered."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server = Server(config)
    starting = asyncio.create_task(server.start(say))
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait([starting, waiting], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        return True
    starting.result()
    ready(server)
    await waiting
    return await server.stop()


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one; None is asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _tls(config: ServerConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"{config.tls_cert}: cannot be used as a certificate with its key: {error}") from error
    return context


def _grpc_tls(config: ServerConfig) -> Any:
    if config.tls_cert is None or config.tls_key is None:
        return None
    pair = (config.tls_key.read_bytes(), config.tls_cert.read_bytes())
    return grpc.ssl_server_credentials([pair])


def _log_access(exchange: Exchange, response: Response, sent_bytes: int) -> None:
    access.info("%s %s %s %d %d", exchange.peer, exchange.method, exchange.raw_path, response.status, sent_bytes)

"""The application that Ray Serve runs: servers, gates (routers) in front of them, and a service registry.

There is a server for each machine of a placement. This module connects the parts and decides nothing: servers are
``weft.Server``, gates ``gates.gate``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray import get_runtime_context, serve, util
from weft.base.errors import InputError
from weft.serving.config import ServerConfig
from weft.serving.in_process import InProcessServer
from weft_cluster.gates.gate import GateSettings
from weft_cluster.gates.thread import GateThread
from weft_cluster.placing.placement import PlacedMachine, read_placement
from weft_cluster.ray.service_registry import HEARTBEAT_EVERY_S, RegistrySnapshot, ServiceRegistry
from weft_cluster.ray.settings import (
    BANDWIDTH,
    COMPUTE,
    KEY_VARIABLE,
    RaySettings,
    UtilisationPolicy,
    parse_settings,
    predicted,
    sources_of,
)

log = logging.getLogger("weft.ray")

LOOKUP_EVERY_S = 0.25
"""Period at which a gate reads the registry, and at which a server repeats its request to leave. Four times per
heartbeat, so that gates know that a server has left before its ``LEAVING_S`` ends."""
UPSCALE_S = 10.0
"""Time for which the load must exceed the servers' cap before Ray adds one; as long as the window of the rates."""
LEAVING_S = 1.0
"""Time between leaving the registry and shutdown, so that all gates have stopped sending requests."""
HANDOVER_S = 120.0
"""Timeout of leaving: how long a server waits until others have its models. Loading takes seconds to a minute."""
REGISTRY_TIMEOUT_S = 3.0
"""Timeout of a call to the registry; then it is retried, for the registry may be replaced as well."""
READY_S = 30.0
"""Timeout for a new gate's wait for servers before it listens; the gate that it replaces listens meanwhile."""
ENDING_S = 180.0
"""Timeout of Ray for a whole shutdown: ``HANDOVER_S``, ``LEAVING_S``, and the server's own drain."""


class _Heartbeats:
    """Heartbeats of a server or a gate to the registry, the actor ``ServiceRegistry``.

    url: of the server or gate. machine: that of a server; None for a gate. refused: returns the count of refused
    requests by model, which a gate sends with them.
    """

    def __init__(
        self,
        registry: Any,
        url: str,
        machine: PlacedMachine | None = None,
        refused: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        self._registry, self._url, self._machine, self._refused = registry, url, machine, refused
        self.missed: dict[str, float] = {}
        """Model -> requests per second that a server did not get because gates refused them."""
        self._task = asyncio.create_task(_repeat(self._send, HEARTBEAT_EVERY_S))

    async def _send(self) -> None:
        refused = self._refused() if self._refused else None
        self.missed = await self._registry.heartbeat.remote(self._url, self._machine, refused)

    async def leave(self) -> None:
        """Wait for permission to shut down, and end the heartbeats.

        Permission comes when other servers have the models, or when the whole application ends. Retried until
        ``HANDOVER_S`` have passed: leaving twice is the same as leaving once.
        """
        end_s = time.monotonic() + HANDOVER_S
        while time.monotonic() < end_s:
            with suppress(Exception):  # no answer: Ray's controller or the registry is gone or being replaced
                async with asyncio.timeout(REGISTRY_TIMEOUT_S):
                    if await asyncio.to_thread(_application_ends) or await self._registry.leave.remote(self._url):
                        break
            await asyncio.sleep(LOOKUP_EVERY_S)
        self._task.cancel()


class MachineServer:
    """A Ray actor: a whole weft server with the models of a machine, on a port of its own."""

    async def __init__(  # type: ignore[misc]
        self, machine: PlacedMachine, sources: list[str], config: dict[str, Any], registry: Any
    ) -> None:
        """sources: its plan or its models (``sources_of``). config: its settings. registry: the ``ServiceRegistry``."""
        self._machine = machine
        self._heartbeats: _Heartbeats | None = None
        host = config.pop("host", "") or util.get_node_ip_address()
        self._server = InProcessServer(*sources, host=host, **config)
        await self._server.start_async()
        self._heartbeats = _Heartbeats(registry, self._server.url, machine)

    def check_health(self) -> None:
        """Called by Ray every second."""
        if not self._server.ready:
            raise RuntimeError(f"{self._machine.name} takes no requests")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load of compute and bandwidth, from the rates of the last seconds, refused requests included."""
        rates = {model["name"]: model["rate"] for model in self._server.state()["models"]}
        load = predicted(self._machine, rates, self._heartbeats.missed if self._heartbeats else {})
        return {COMPUTE: load.compute, BANDWIDTH: load.bandwidth}

    def where(self) -> tuple[int, str]:
        """Return its process and its node, for tests that kill servers."""
        return _process_and_node()

    async def __del__(self) -> None:
        if self._heartbeats:  # it was ready
            await self._heartbeats.leave()
            await asyncio.sleep(LEAVING_S)
            await self._server.stop_async()


class GateServer:
    """A Ray actor: a gate on a thread of its own; Serve's proxy, if used, gets the gate's status."""

    async def __init__(  # type: ignore[misc]
        self, face: ServerConfig, settings: GateSettings, ca_file: str, registry: Any, machines: list[Any]
    ) -> None:
        """face: settings towards clients. machines: not used; Ray starts deployments that are arguments of others."""
        self._registry = registry
        self._heartbeats: _Heartbeats | None = None
        network = face.network
        host = network.host if network.host != ANY_ADDRESS else util.get_node_ip_address()
        if ca_file:
            settings = replace(settings, context=ssl.create_default_context(cafile=ca_file))
        snapshot: RegistrySnapshot = await registry.snapshot.remote()
        self._thread = GateThread(snapshot.models, replace(face, network=replace(network, host=host)), settings)
        self._thread.begin()
        self._lookups = asyncio.create_task(_repeat(self._look_up, LOOKUP_EVERY_S))
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                while self._thread.status()["missing"]:
                    await asyncio.sleep(LOOKUP_EVERY_S)
        try:
            port = await asyncio.to_thread(self._thread.listen)
        except BaseException:
            self._lookups.cancel()
            raise
        scheme = "https" if network.tls_cert else "http"
        self._heartbeats = _Heartbeats(registry, f"{scheme}://{host}:{port}", refused=lambda: self._thread.gate.refused)

    async def _look_up(self) -> None:
        """Read the registry and give the servers to the gate.

        A server that answers and has not left stays known even if it is not listed, so that a restarted registry does
        not empty the gate.
        """
        snapshot: RegistrySnapshot = await self._registry.snapshot.remote()
        answering = {link.target.url: link.placed for link in list(self._thread.gate.links.values()) if link.up}
        servers = {url: machine for url, machine in (answering | snapshot.servers).items() if url not in snapshot.left}
        # A registry that was just started knows no models yet.
        await asyncio.to_thread(self._thread.set_servers, servers, snapshot.models or None)

    def where(self) -> tuple[int, str]:
        """Return its process and its node."""
        return _process_and_node()

    async def status(self) -> dict[str, Any]:
        """Return the state of the cluster as this gate sees it, and the URLs of all gates."""
        snapshot: RegistrySnapshot = await self._registry.snapshot.remote()
        return self._thread.status() | {"gates": snapshot.gates}

    async def __call__(self, request: Any) -> dict[str, Any]:
        return await self.status()

    async def __del__(self) -> None:
        if self._heartbeats:  # it listens
            self._lookups.cancel()
            await asyncio.gather(asyncio.to_thread(self._thread.stop), self._heartbeats.leave())


ANY_ADDRESS = "0.0.0.0"


def app(args: dict[str, Any]) -> Any:
    """Return the application for arguments of ``serve run`` or of a file, the fields of ``RaySettings``."""
    settings = parse_settings(args)
    placement = read_placement(settings.placement)
    key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
    config = {"models": list(placement.models)}  # Ray applies a change of user_config without a restart
    registry = _deployment(ServiceRegistry, "weft-directory", {"num_cpus": 0}, user_config=config).bind()
    machines = [_machine_deployment(machine, settings).bind(
        machine, sources_of(machine, settings), _server_config(settings, key), registry
    ) for machine in placement.machines]  # fmt: skip
    ports = {"http_port": settings.port, "grpc_port": settings.grpc_port}
    face = ServerConfig(**{"host": settings.host or ANY_ADDRESS, **ports, **settings.gate})
    gate_options = {"num_replicas": settings.gates, "max_replicas_per_node": 1}
    gates = _deployment(GateServer, "weft-gate", settings.gate_actor, **gate_options)
    router = GateSettings(router=settings.router, key=key)
    return gates.bind(face, router, settings.ca_file, registry, machines)


def _server_config(settings: RaySettings, key: str) -> dict[str, Any]:
    """Return the settings of a server: a free port, and the key that gates send."""
    if "api_key" in settings.server or "keys_file" in settings.server:
        raise InputError(
            f"weft_cluster.ray: servers know gates by {KEY_VARIABLE}; keys of clients belong to gate, not to server"
        )
    config = {"http_port": 0, "grpc_port": None, **settings.server, "api_key": key}
    ServerConfig(**config)  # a wrong setting is reported here, once, rather than by every server
    return {"host": settings.host, **config}


def _machine_deployment(machine: PlacedMachine, settings: RaySettings) -> Any:
    """The deployment of a machine's server; it scales up to ``settings.copies`` servers if that is above 1."""
    options = settings.actors.get(machine.kind, {"num_cpus": 1})
    scaling: dict[str, Any] = {"num_replicas": 1}
    if settings.copies > 1:
        policy = {"policy_function": UtilisationPolicy, "policy_kwargs": {"busy_cap": settings.busy_cap}}
        bounds = {"min_replicas": 1, "max_replicas": settings.copies, "upscale_delay_s": UPSCALE_S}
        scaling = {"autoscaling_config": {**bounds, "policy": policy}}
    return _deployment(MachineServer, f"weft-{re.sub('[^A-Za-z0-9._-]', '-', machine.name)}", options, **scaling)


def _deployment(kind: type, name: str, options: dict[str, Any], **deployment_options: Any) -> Any:
    """Return a Ray deployment of actor class *kind*.

    options: of the actor; deployment_options: further options of the deployment.
    """
    return serve.deployment(kind).options(
        name=name,
        ray_actor_options=options,
        max_ongoing_requests=1000,
        health_check_period_s=1,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=ENDING_S,
        logging_config={"enable_access_log": False},  # the registry is called some twenty times a second
        **deployment_options,
    )


def _process_and_node() -> tuple[int, str]:
    """The ids of the current process and of its Ray node."""
    return os.getpid(), get_runtime_context().get_node_id()


def _application_ends() -> bool:
    """Return whether the whole application is being deleted, rather than one of its parts."""
    status = serve.status().applications.get(serve.get_replica_context().app_name)
    return status is None or status.status == "DELETING"


async def _repeat(work: Any, every_s: float) -> None:
    """Call *work* periodically. A failure is logged; the next call retries, and sends the whole state again."""
    while True:
        try:
            work_now: Coroutine[Any, Any, None] = work()
            await work_now
        except Exception as error:
            log.warning("%s: %s", type(error).__name__, error)
        await asyncio.sleep(every_s)

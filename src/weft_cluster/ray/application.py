"""The application that Ray Serve runs: a server for each machine of a placement, gates before them, and who is where.

What is here holds the parts together and decides nothing: servers are ``weft.Server``, gates ``gates.gate``.
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
from weft_cluster.ray.scaling import BANDWIDTH, COMPUTE, UtilisationPolicy, predicted
from weft_cluster.ray.service_registry import SAID_EVERY_S, Directory, RegistryEntry
from weft_cluster.ray.settings import KEY_VARIABLE, RaySettings, parse_settings, sources_of

log = logging.getLogger("weft.ray")

ASKED_EVERY_S = 0.25
"""How often a gate asks who is where."""
UPSCALE_S = 10.0
"""How long more must be asked than servers carry before there are more of them."""
LEAVING_S = 1.0
"""How long a server goes on after it has said that it leaves, so that gates hear of it first."""
HANDOVER_S = 120.0
"""How long a server that shall end waits for others to have its models."""
ANSWERS_S = 3.0
"""How long the directory may take for an answer; then it is asked again, for it may be replaced as well."""
READY_S = 30.0
"""How long a gate waits for servers before it listens: the one that it replaces goes on as long."""
ENDING_S = 180.0
"""How long all of a server's end may take."""


class _Announced:
    """Somebody who says where it is; *refused* is what a gate has to say besides."""

    def __init__(
        self,
        directory: Any,
        url: str,
        machine: PlacedMachine | None = None,
        refused: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        self._directory, self._url, self._machine, self._refused = directory, url, machine, refused
        self.missed: dict[str, float] = {}
        """Model -> requests per second that a server did not get because gates refused them."""
        self._saying = asyncio.create_task(_again_and_again(self._say, SAID_EVERY_S))

    async def _say(self) -> None:
        refused = self._refused() if self._refused else None
        self.missed = await self._directory.say.remote(self._url, self._machine, refused)

    async def leave(self) -> None:
        """Return when it may end: others have its models, or all of the application ends."""
        end_s = time.monotonic() + HANDOVER_S
        while time.monotonic() < end_s:
            with suppress(Exception):  # nobody answers: Ray's own parts may be gone, or about to be others
                async with asyncio.timeout(ANSWERS_S):
                    if await asyncio.to_thread(_all_ends) or await self._directory.leave.remote(self._url):
                        break
            await asyncio.sleep(ASKED_EVERY_S)
        self._saying.cancel()


class MachineServer:
    """A whole server with the models of a machine, on a port of its own."""

    async def __init__(  # type: ignore[misc]
        self, machine: PlacedMachine, sources: list[str], config: dict[str, Any], directory: Any
    ) -> None:
        self._machine = machine
        self._announced: _Announced | None = None
        host = config.pop("host", "") or util.get_node_ip_address()
        self._server = InProcessServer(*sources, host=host, **config)
        await self._server.start_async()
        self._announced = _Announced(directory, self._server.url, machine)

    def check_health(self) -> None:
        """Called by Ray every second."""
        if not self._server.ready:
            raise RuntimeError(f"{self._machine.name} takes no requests")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What is asked of both resources, by the rates of the last seconds, refused requests included."""
        rates = {each["name"]: each["rate"] for each in self._server.state()["models"]}
        load = predicted(self._machine, rates, self._announced.missed if self._announced else {})
        return {COMPUTE: load.compute, BANDWIDTH: load.bandwidth}

    def where(self) -> tuple[int, str]:
        """Its process and its node, for who wants to see what becomes of those that are killed."""
        return _here()

    async def __del__(self) -> None:
        if self._announced:  # it was ready
            await self._announced.leave()
            await asyncio.sleep(LEAVING_S)
            await self._server.stop_async()


class GateServer:
    """A gate, and what Serve's own proxy shows of it."""

    async def __init__(  # type: ignore[misc]
        self, face: ServerConfig, settings: GateSettings, ca_file: str, directory: Any, machines: list[Any]
    ) -> None:
        """*machines* are named so that Ray starts them."""
        self._directory = directory
        self._announced: _Announced | None = None
        network = face.network
        host = network.host if network.host != ANY_ADDRESS else util.get_node_ip_address()
        if ca_file:
            settings = replace(settings, context=ssl.create_default_context(cafile=ca_file))
        listed: RegistryEntry = await directory.known.remote()
        self._thread = GateThread(listed.models, replace(face, network=replace(network, host=host)), settings)
        self._thread.begin()
        self._asking = asyncio.create_task(_again_and_again(self._ask, ASKED_EVERY_S))
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                while self._thread.told()["missing"]:
                    await asyncio.sleep(ASKED_EVERY_S)
        try:
            port = await asyncio.to_thread(self._thread.listen)
        except BaseException:
            self._asking.cancel()
            raise
        scheme = "https" if network.tls_cert else "http"
        self._announced = _Announced(directory, f"{scheme}://{host}:{port}", refused=lambda: self._thread.gate.refused)

    async def _ask(self) -> None:
        """Hear who is where; whoever answers and does not leave stays known, listed or not."""
        listed: RegistryEntry = await self._directory.known.remote()
        answer = {link.target.url: link.placed for link in list(self._thread.gate.links.values()) if link.up}
        there = {url: machine for url, machine in (answer | listed.servers).items() if url not in listed.left}
        await asyncio.to_thread(self._thread.know, there, listed.models or None)

    def where(self) -> tuple[int, str]:
        """Its process and its node."""
        return _here()

    async def told(self) -> dict[str, Any]:
        """How the cluster stands, as this gate sees it, and where all gates are."""
        listed: RegistryEntry = await self._directory.known.remote()
        return self._thread.told() | {"gates": listed.gates}

    async def __call__(self, request: Any) -> dict[str, Any]:
        return await self.told()

    async def __del__(self) -> None:
        if self._announced:  # it listens
            self._asking.cancel()
            await asyncio.gather(asyncio.to_thread(self._thread.stop), self._announced.leave())


ANY_ADDRESS = "0.0.0.0"


def app(args: dict[str, Any]) -> Any:
    """The application for arguments of ``serve run``, or of a file: those of ``RaySettings``."""
    settings = parse_settings(args)
    placement = read_placement(settings.placement)
    key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
    shall = {"models": list(placement.models)}  # what changes here is told to the one that runs, and ends nothing
    directory = _deployed(Directory, "weft-directory", {"num_cpus": 0}, user_config=shall).bind()
    machines = [_machine(machine, settings, key).bind(
        machine, sources_of(machine, settings), _config(settings, key), directory
    ) for machine in placement.machines]  # fmt: skip
    ports = {"http_port": settings.port, "grpc_port": settings.grpc_port}
    face = ServerConfig(**{"host": settings.host or ANY_ADDRESS, **ports, **settings.gate})
    how = {"num_replicas": settings.gates, "max_replicas_per_node": 1}
    gates = _deployed(GateServer, "weft-gate", settings.gate_actor, **how)
    router = GateSettings(router=settings.router, key=key)
    return gates.bind(face, router, settings.ca_file, directory, machines)


def _config(settings: RaySettings, key: str) -> dict[str, Any]:
    """The settings of a server: a port that is free, and the key that gates have."""
    if "api_key" in settings.server or "keys_file" in settings.server:
        raise InputError(
            f"weft_cluster.ray: servers know gates by {KEY_VARIABLE}; keys of clients belong to gate, not to server"
        )
    config = {"http_port": 0, "grpc_port": None, **settings.server, "api_key": key}
    ServerConfig(**config)  # what cannot be is said here rather than by every server
    return {"host": settings.host, **config}


def _machine(machine: PlacedMachine, settings: RaySettings, key: str) -> Any:
    options = settings.actors.get(machine.kind, {"num_cpus": 1})
    scaled: dict[str, Any] = {"num_replicas": 1}
    if settings.copies > 1:
        policy = {"policy_function": UtilisationPolicy, "policy_kwargs": {"busy_cap": settings.busy_cap}}
        bounds = {"min_replicas": 1, "max_replicas": settings.copies, "upscale_delay_s": UPSCALE_S}
        scaled = {"autoscaling_config": {**bounds, "policy": policy}}
    return _deployed(MachineServer, f"weft-{re.sub('[^A-Za-z0-9._-]', '-', machine.name)}", options, **scaled)


def _deployed(kind: type, name: str, options: dict[str, Any], **more: Any) -> Any:
    return serve.deployment(kind).options(
        name=name,
        ray_actor_options=options,
        max_ongoing_requests=1000,
        health_check_period_s=1,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=ENDING_S,
        logging_config={"enable_access_log": False},  # the directory is asked some twenty times a second
        **more,
    )


def _here() -> tuple[int, str]:
    return os.getpid(), get_runtime_context().get_node_id()


def _all_ends() -> bool:
    """Whether the whole application is about to end, rather than one of its parts."""
    status = serve.status().applications.get(serve.get_replica_context().app_name)
    return status is None or status.status == "DELETING"


async def _again_and_again(work: Any, every_s: float) -> None:
    """Do something now and then; what fails is done again."""
    while True:
        try:
            work_now: Coroutine[Any, Any, None] = work()
            await work_now
        except Exception as error:
            log.warning("%s: %s", type(error).__name__, error)
        await asyncio.sleep(every_s)

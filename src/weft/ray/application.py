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
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray import get_runtime_context, serve, util
from weft.errors import InputError
from weft.gates.gate import GateSettings
from weft.gates.thread import GateThread
from weft.placing.placement import PlacedMachine, Placement, read_placement
from weft.ray.directory import GATES, SAID_EVERY_S, Directory
from weft.ray.scaling import BANDWIDTH, COMPUTE, UtilisationPolicy, predicted
from weft.ray.settings import KEY_VARIABLE, RaySettings, parse_settings, sources_of
from weft.serving.config import ServerConfig
from weft.serving.in_process import InProcessServer

log = logging.getLogger("weft.ray")

ASKED_EVERY_S = 0.25
"""How often a gate asks who is where."""
UPSCALE_S = 10.0
"""How long more must be asked than servers carry before there are more of them."""
LEAVING_S = 1.0
"""How long a server goes on after it has said that it leaves, so that gates hear of it first."""


class _Announced:
    """Somebody who says where it is."""

    def __init__(self, directory: Any, machine: str, url: str) -> None:
        self._directory, self._who = directory, (machine, url)
        self._saying = asyncio.create_task(_again_and_again(self._say, SAID_EVERY_S))

    async def _say(self) -> None:
        await self._directory.say.remote(*self._who)

    async def leave(self) -> None:
        self._saying.cancel()
        with suppress(Exception):  # whoever is not listed any more need not leave
            await self._directory.leave.remote(*self._who)


class MachineServer:
    """A whole server with the models of a machine, on a port of its own."""

    async def __init__(  # type: ignore[misc]
        self, machine: PlacedMachine, sources: list[str], config: dict[str, Any], directory: Any
    ) -> None:
        self._machine = machine
        host = config.pop("host", "") or util.get_node_ip_address()
        self._server = InProcessServer(*sources, host=host, **config)
        await self._server.start_async()
        self._announced = _Announced(directory, machine.name, self._server.url)

    def check_health(self) -> None:
        """Called by Ray every second."""
        if not self._server.ready:
            raise RuntimeError(f"{self._machine.name} takes no requests")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What is asked of both resources, by the rates of the last seconds."""
        rates = {each["name"]: each["rate"] for each in self._server.state()["models"]}
        load = predicted(self._machine, rates)
        return {COMPUTE: load.compute, BANDWIDTH: load.bandwidth}

    def where(self) -> tuple[int, str]:
        """Its process and its node, for who wants to see what becomes of those that are killed."""
        return _here()

    async def __del__(self) -> None:
        await self._announced.leave()
        await asyncio.sleep(LEAVING_S)
        await self._server.stop_async()


class GateServer:
    """A gate, and what Serve's own proxy shows of it."""

    async def __init__(  # type: ignore[misc]
        self,
        placement: Placement,
        face: ServerConfig,
        settings: GateSettings,
        ca_file: str,
        directory: Any,
        machines: list[Any],
    ) -> None:
        """*machines* are named so that Ray starts them."""
        self._directory, self._machines = directory, {machine.name for machine in placement.machines}
        host = face.host if face.host != ANY_ADDRESS else util.get_node_ip_address()
        if ca_file:
            settings = replace(settings, context=ssl.create_default_context(cafile=ca_file))
        self._thread = GateThread(placement, replace(face, host=host), settings)
        port = await asyncio.to_thread(self._thread.start)
        scheme = "https" if face.tls_cert else "http"
        self._announced = _Announced(directory, GATES, f"{scheme}://{host}:{port}")
        self._asking = asyncio.create_task(_again_and_again(self._ask, ASKED_EVERY_S))

    async def _ask(self) -> None:
        """Hear who is where; whoever answers stays known, listed or not."""
        told: dict[str, list[str]] = await self._directory.known.remote()
        listed = {machine: urls for machine, urls in told.items() if machine in self._machines}
        for server in self._thread.told()["servers"]:
            if server["up"] and server["url"] not in listed.setdefault(server["machine"], []):
                listed[server["machine"]].append(server["url"])
        await asyncio.to_thread(self._thread.know, listed)

    def where(self) -> tuple[int, str]:
        """Its process and its node."""
        return _here()

    async def told(self) -> dict[str, Any]:
        """How the cluster stands, as this gate sees it, and where all gates are."""
        listed = await self._directory.known.remote()
        return self._thread.told() | {"gates": listed.get(GATES, [])}

    async def __call__(self, request: Any) -> dict[str, Any]:
        return await self.told()

    async def __del__(self) -> None:
        self._asking.cancel()
        await self._announced.leave()
        await asyncio.to_thread(self._thread.stop)


ANY_ADDRESS = "0.0.0.0"


def app(args: dict[str, Any]) -> Any:
    """The application for arguments of ``serve run``, or of a file: those of ``RaySettings``."""
    settings = parse_settings(args)
    placement = read_placement(settings.placement)
    key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
    directory = _deployed(Directory, "weft-directory", {"num_cpus": 0}).bind()
    machines = [_machine(machine, settings, key).bind(
        machine, sources_of(machine, settings), _config(settings, key), directory
    ) for machine in placement.machines]  # fmt: skip
    ports = {"http_port": settings.port, "grpc_port": settings.grpc_port}
    face = ServerConfig(**{"host": settings.host or ANY_ADDRESS, **ports, **settings.gate})
    how = {"num_replicas": settings.gates, "max_replicas_per_node": 1}
    gates = _deployed(GateServer, "weft-gate", settings.gate_actor, **how)
    router = GateSettings(router=settings.router, key=key)
    return gates.bind(placement, face, router, settings.ca_file, directory, machines)


def _config(settings: RaySettings, key: str) -> dict[str, Any]:
    """The settings of a server: a port that is free, and the key that gates have."""
    if "api_key" in settings.server or "keys_file" in settings.server:
        raise InputError(
            f"weft.ray: servers know gates by {KEY_VARIABLE}; keys of clients belong to gate, not to server"
        )
    return {"host": settings.host, "http_port": 0, "grpc_port": None, **settings.server, "api_key": key}


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
        **more,
    )


def _here() -> tuple[int, str]:
    return os.getpid(), get_runtime_context().get_node_id()


async def _again_and_again(work: Any, every_s: float) -> None:
    """Do something now and then; what fails is done again."""
    while True:
        try:
            work_now: Coroutine[Any, Any, None] = work()
            await work_now
        except Exception as error:
            log.warning("%s: %s", type(error).__name__, error)
        await asyncio.sleep(every_s)

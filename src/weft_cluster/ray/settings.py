"""Settings of weft on Ray: the arguments of ``serve run weft_cluster.ray:app`` and of its YAML (docs/ray.md).

Autoscaling uses the predicted load of both resources of a machine, not queue lengths, which grow only after the load is
too high. The array time and channel time of a request are known beforehand (``placing``), so request rates predict the
load. ``needed`` is a pure function; Ray calls ``UtilisationPolicy``, which calls it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from weft.base.errors import InputError, PlacingError, unknown_name
from weft.base.jsonfile import first_problem
from weft.serving.config import GROUP_OF
from weft.serving.in_process import PLAN_FILE
from weft_cluster.placing.placement import PlacedMachine
from weft_cluster.routing.router import ROUTERS, check_router

KEY_VARIABLE = "WEFT_CLUSTER_KEY"
"""The environment variable with the key that gates send to servers."""


def _check_known(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a server or a gate. Raises ValueError, as pydantic requires, for an unknown one."""
    for key in settings:
        if key not in GROUP_OF:
            raise ValueError(unknown_name("setting", key, GROUP_OF))
    return settings


def _validate_router(name: str) -> str:
    """Return the name of a router. Raises ValueError, as pydantic requires, if there is none of this name."""
    try:
        check_router(name)
    except InputError as error:
        raise ValueError(str(error)) from error
    return name


ServerKeys = Annotated[dict[str, Any], AfterValidator(_check_known)]


class RaySettings(BaseModel, extra="forbid", frozen=True):
    """The arguments of the Ray application; only *placement* is required."""

    placement: str
    """The folder of a placement (``weft place -o``, ``weft plan --machines -o``), or its file."""
    models: str = ""
    """A folder that every machine has, with NAME.onnx for each model; empty: the placement's folder."""
    gates: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of gates, at most one per node."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8100
    """HTTP port of the gates; the next ones are tried if it is taken. Serve's own proxy has 8000."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] | None = 9100
    """gRPC port of the gates; null: no gRPC."""
    host: str = ""
    """The address that gates and servers listen on; empty: the node's address."""
    router: Annotated[str, AfterValidator(_validate_router)] = next(iter(ROUTERS))
    copies: Annotated[int, Field(ge=1, le=1000)] = 1
    """Most servers for each machine of the placement under load."""
    busy_cap: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Load of a server above which another one is added."""
    actors: dict[str, dict[str, Any]] = {}
    """Kind of machine -> the resources that Ray reserves for each: ``{"num_gpus": 1}``."""
    gate_actor: dict[str, Any] = {"num_cpus": 0}
    """Resources that Ray reserves for each gate."""
    server: ServerKeys = {}
    """Settings of every server, as in the file of ``weft serve --config``."""
    gate: ServerKeys = {}
    """Settings of every gate towards its clients: api_key, keys_file, tls_cert, ..."""
    ca_file: str = ""
    """CA file that signed the servers' certificates, if they have any (``server.tls_cert``)."""


def parse_settings(raw: Mapping[str, Any]) -> RaySettings:
    """Parse the arguments of the application. InputError if one is unknown or invalid."""
    try:
        return RaySettings.model_validate(dict(raw))
    except ValidationError as error:
        raise InputError(f"weft_cluster.ray: {first_problem(error, RaySettings)}") from error


def sources_of(machine: PlacedMachine, settings: RaySettings) -> list[str]:
    """Return the sources that a machine's server serves: its plan, or files of its models, or models by name."""
    folder = Path(settings.placement)
    folder = folder if folder.is_dir() else folder.parent
    if not settings.models and (folder / machine.name / PLAN_FILE).is_file():
        return [os.path.abspath(folder / machine.name)]
    files = Path(settings.models) if settings.models else folder
    sources = []
    for placed in machine.models:
        if "/" in placed.model or placed.model.startswith("."):
            raise PlacingError(f"{machine.name}: {placed.model!r} is not a name for a model")
        file = files / f"{placed.model}.onnx"
        sources.append(os.path.abspath(file) if settings.models or file.is_file() else placed.model)
    return sources


COMPUTE, BANDWIDTH = "weft_compute", "weft_bandwidth"
"""Names of a server's two predicted loads among its metrics."""
LOWER = 0.1
"""Margin below the cap that the remaining servers must keep before a server is removed, so that small changes of the
rates do not add and remove servers in turn."""


class ServerLoad(NamedTuple):
    """Load of a server's resources, as shares of its time, with the time that does not overlap; above 1: overload."""

    compute: float
    bandwidth: float


def predicted(machine: PlacedMachine, rates: Mapping[str, float], refused: Mapping[str, float]) -> ServerLoad:
    """The loads of a machine at the *rates* that it serves plus those that gates *refused*, in requests per second."""
    compute = bandwidth = other = 0.0
    for placed in machine.models:
        rate = rates.get(placed.model, 0.0) + refused.get(placed.model, 0.0)
        # The placement's loads hold at its own rate.
        multiple = rate / placed.rate if placed.rate else 0.0
        compute, bandwidth, other = (
            compute + multiple * placed.compute,
            bandwidth + multiple * placed.bandwidth,
            other + multiple * placed.other,
        )
    unhidden = 1 - machine.overlap
    return ServerLoad(compute + unhidden * bandwidth + other, bandwidth + unhidden * compute + other)


def needed(loads: Sequence[ServerLoad], cap: float) -> int:
    """Return the number of servers, at least one, that keeps the total of *loads* below the cap of each."""
    if not loads:
        return 1
    total = max(sum(load.compute for load in loads), sum(load.bandwidth for load in loads))
    count = max(1, math.ceil(total / cap - 1e-9))  # rounding must not add a server
    if count >= len(loads):
        return count
    # Fewer servers only if the rest stays below the cap by a margin.
    return min(len(loads), max(1, math.ceil(total / max(cap - LOWER, cap / 2) - 1e-9)))


class UtilisationPolicy:
    """The autoscaling policy that Ray calls: the number of servers by their predicted loads.

    busy_cap: load of a server above which another one is added.
    """

    def __init__(self, busy_cap: float = 0.8) -> None:
        self._cap = busy_cap

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of servers, and the state that Ray keeps for the policy: none."""
        compute, bandwidth = (_latest_values(context.raw_metrics or {}, name) for name in (COMPUTE, BANDWIDTH))
        loads = [ServerLoad(compute[replica], bandwidth.get(replica, 0.0)) for replica in compute]
        if len(loads) < context.current_num_replicas:  # a server that just started has not reported yet
            return context.target_num_replicas, {}
        min_replicas, max_replicas = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max_replicas, max(min_replicas, needed(loads, self._cap))), {}


def _latest_values(metrics: Mapping[str, Any], name: str) -> dict[Any, float]:
    """The latest value of a metric by server, not averaged: rates are averages over ten seconds already."""
    return {replica: series[-1].value for replica, series in metrics.get(name, {}).items() if series}

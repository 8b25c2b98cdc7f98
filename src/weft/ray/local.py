"""A cluster of several nodes on this machine, for trying out: Ray's own, with weft on it."""

from __future__ import annotations

import logging
import os
import secrets
import time
from types import TracebackType
from typing import Any, Self

from ray.cluster_utils import Cluster

import ray
from ray import serve
from weft.errors import InputError
from weft.placing.placement import read_placement
from weft.ray.application import app

STARTING_S = 300.0
"""How long servers may take to be ready."""
HEAD_CPUS, NODE_CPUS = 0, 2


class LocalCluster:
    """Nodes on loopback, a server on each, and gates; ``with`` starts and ends it.

    A node has room for a second server, so that one that is killed finds a place elsewhere.
    """

    def __init__(self, nodes: int, **settings: Any) -> None:
        """settings: those of ``RaySettings``."""
        self._nodes, self._settings = nodes, {"host": "127.0.0.1", **settings}
        machines = len(read_placement(settings["placement"]).machines)
        if nodes * NODE_CPUS < machines:
            raise InputError(
                f"{nodes} nodes have room for {nodes * NODE_CPUS} machines, and the placement has {machines}"
            )
        self._cluster: Any = None
        self._handle: Any = None
        self._killed: list[Any] = []

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if os.environ["RAY_AUTH_MODE"] == "token":
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": HEAD_CPUS})
            for _ in range(self._nodes):
                self._cluster.add_node(num_cpus=NODE_CPUS)
            ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.WARNING)
            serve.start(proxy_location="Disabled")
            self._handle = serve.run(app(self._settings), name="weft", route_prefix=None)
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """End all of it."""
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()

    def _wait(self) -> None:
        """Until every model is served."""
        end_s = time.monotonic() + STARTING_S
        while (missing := self.told()["missing"]) or not self.urls:
            if time.monotonic() > end_s:
                raise InputError(f"not ready after {STARTING_S:g} s: nobody serves {', '.join(missing)}")
            time.sleep(0.2)

    def told(self) -> dict[str, Any]:
        """How it stands, as a gate sees it."""
        found: dict[str, Any] = self._handle.told.remote().result()
        return found

    @property
    def urls(self) -> list[str]:
        """Where gates are."""
        gates: list[str] = self.told()["gates"]
        return gates

    def pid(self, machine: str) -> int:
        """The process of a machine's server."""
        found: int = serve.get_deployment_handle(f"weft-{machine}", "weft").pid.remote().result()
        return found

    def kill_node(self) -> list[str]:
        """End a node with all that runs on it, without a word; the machines that were there."""
        raise NotImplementedError

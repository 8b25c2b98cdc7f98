"""A cluster of several nodes on this machine, for trying out: Ray's own, with weft on it."""

from __future__ import annotations

import logging
import os
import secrets
import time
from types import TracebackType
from typing import Any, Self

from weft.errors import InputError
from weft.placing.placement import read_placement

STARTING_S = 300.0
"""How long servers may take to be ready."""
HEAD_CPUS, NODE_CPUS = 0, 2
APPLICATION = "weft"


class LocalCluster:
    """Nodes on loopback, a server on each, and gates; ``with`` starts and ends it.

    A node has room for a second server, so that one that is lost finds a place elsewhere.
    """

    def __init__(self, nodes: int, **settings: Any) -> None:
        """settings: those of ``RaySettings``."""
        self._nodes, self._settings = nodes, {"host": "127.0.0.1", **settings}
        self.machines = [machine.name for machine in read_placement(settings["placement"]).machines]
        if nodes * NODE_CPUS < len(self.machines):
            room = f"{nodes} nodes have room for {nodes * NODE_CPUS} machines"
            raise InputError(f"{room}, and the placement has {len(self.machines)}; start more nodes")
        self._cluster: Any = None
        self._handle: Any = None

    def __enter__(self) -> Self:
        _set_environment()  # Ray reads it once, when it is imported
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        from weft.ray.application import app

        try:
            self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": HEAD_CPUS})
            for _ in range(self._nodes):
                self._cluster.add_node(num_cpus=NODE_CPUS)
            ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            serve.start(proxy_location="Disabled")
            self._handle = serve.run(app(self._settings), name=APPLICATION, route_prefix=None)
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """End all of it."""
        import ray
        from ray import serve

        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()

    def _wait(self) -> None:
        """Until every model is served."""
        end_s = time.monotonic() + STARTING_S
        while not (told := self.told())["gates"] or told["missing"] or len(told["servers"]) < len(self.machines):
            if time.monotonic() > end_s:
                raise InputError(f"not ready after {STARTING_S:g} s: nobody serves {', '.join(told['missing'])}")
            time.sleep(0.2)

    def told(self) -> dict[str, Any]:
        """How it stands, as a gate sees it, and where all gates are."""
        found: dict[str, Any] = self._handle.told.remote().result()
        return found

    @property
    def urls(self) -> list[str]:
        """Where gates are."""
        gates: list[str] = self.told()["gates"]
        return gates

    def where(self, machine: str) -> tuple[int, str]:
        """The process of a machine's server, and its node."""
        from ray import serve

        found: tuple[int, str] = serve.get_deployment_handle(f"weft-{machine}", APPLICATION).where.remote().result()
        return found

    def kill_node(self, machine: str) -> None:
        """End the node that a machine's server is on, with all that runs there, without a word."""
        _, node_id = self.where(machine)
        for node in list(self._cluster.worker_nodes):
            if node.node_id == node_id:
                self._cluster.remove_node(node, allow_graceful=False)


def _set_environment() -> None:
    """A token for all nodes, unless there is one; nothing is reported to anybody."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

"""A cluster of several nodes on this machine, for trying out: Ray's own, with weft on it."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

from weft.base.errors import InputError, WeftError, first_line
from weft_cluster.placing.placement import read_placement

STARTING_S = 300.0
"""Seconds within which all servers must be ready."""
NODE_CPUS = 2  # CPUs that each local node offers to Ray: enough for the actors of a server, which ask for 1 each
QUICK = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 2}
"""Ray settings with which a lost node is noticed after about three seconds; with the defaults it takes 30 s."""
GATE = "weft-gate"
"""A Ray resource that only the head node has: it keeps the first gate off the nodes that a test kills."""
GATE_ACTOR = {"num_cpus": 0, "resources": {GATE: 0.001}}
APPLICATION = "weft"


@dataclass
class LostNode:
    """A machine whose node was killed, and the times at which that was noticed and the machine served again."""

    machine: str
    after_s: float
    """Time of the kill, since the run began."""
    noticed_s: float | None = None
    """Seconds after the kill until gates stopped sending requests to its server; None: not yet."""
    back_s: float | None = None
    """Seconds after the kill until another server of the machine took requests; None: not yet."""

    watch: threading.Thread | None = None
    """The thread that fills in the times; it ends when a new server takes requests, or after STARTING_S."""

    def wait(self, seconds: float) -> None:
        """Wait until a new server takes requests, for at most *seconds*."""
        if self.watch is not None:
            self.watch.join(seconds)

    def report(self) -> str:
        noticed = "not noticed" if self.noticed_s is None else f"noticed after {self.noticed_s * 1e3:.0f} ms"
        back = "not back yet" if self.back_s is None else f"served again after {self.back_s:.1f} s"
        return f"that of {self.machine} was killed at {self.after_s:.1f} s: {noticed}, {back}"

    def as_dict(self) -> dict[str, Any]:
        return {"machine": self.machine, "after_s": self.after_s, "noticed_s": self.noticed_s, "back_s": self.back_s}


class LocalCluster:
    """Nodes on loopback, a server on each, and gates; ``with`` starts and ends it.

    A node has room for a second server, so that one that is lost finds a place elsewhere.
    """

    def __init__(self, nodes: int, **settings: Any) -> None:
        """settings: the fields of ``RaySettings``."""
        if find_spec("ray") is None:
            raise InputError("Ray is not installed; pip install 'weft[ray]'")
        self._nodes, self.settings = nodes, {"host": "127.0.0.1", "gate_actor": GATE_ACTOR, **settings}
        self.machines = [machine.name for machine in read_placement(settings["placement"]).machines]
        if nodes * NODE_CPUS < len(self.machines):
            room = f"{nodes} nodes have room for {nodes * NODE_CPUS} machines"
            raise InputError(f"{room}, and the placement has {len(self.machines)}; start more nodes")
        self._ended = threading.Event()
        self._cluster: Any = None
        self._handle: Any = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except WeftError:
            self.stop()
            raise
        except Exception as error:  # Ray raises kinds of its own
            self.stop()
            raise InputError(f"Ray did not start: {type(error).__name__}: {first_line(error)}") from error
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        """Start the nodes, Ray and the application, and wait until all models are served."""
        _set_environment()  # Ray reads it once, when it is imported
        from ray.cluster_utils import Cluster

        import ray
        from ray import serve
        from weft_cluster.ray.application import app

        head = {"num_cpus": 0, "resources": {GATE: 1}, "_system_config": QUICK}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(self._nodes):
            gate_resource = {"resources": {GATE: 1}} if self.settings.get("gates", 1) > 1 else {}
            self._cluster.add_node(num_cpus=NODE_CPUS, **gate_resource)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        serve.start(proxy_location="Disabled")
        self._handle = serve.run(app(self.settings), name=APPLICATION, route_prefix=None)
        self._wait_until_served()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """End Serve, Ray and all nodes."""
        self._ended.set()
        if self._cluster is None:
            return
        import ray
        from ray import serve

        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        self._cluster.shutdown()

    def _wait_until_served(self) -> None:
        """Wait until there is a gate and every machine and model has a server. InputError after STARTING_S."""
        end_s = time.monotonic() + STARTING_S
        while (
            not (status := self.status())["gates"] or status["missing"] or len(status["servers"]) < len(self.machines)
        ):
            if time.monotonic() > end_s:
                raise InputError(f"not ready after {STARTING_S:g} s: no server has {', '.join(status['missing'])}")
            time.sleep(0.2)

    def status(self) -> dict[str, Any]:
        """Return the state of the cluster as a gate sees it, and the URLs of all gates."""
        answer: dict[str, Any] = self._handle.status.remote().result()
        return answer

    @property
    def urls(self) -> list[str]:
        """The URLs of the gates."""
        gates: list[str] = self.status()["gates"]
        return gates

    def where(self, machine: str) -> tuple[int, str]:
        """The process id of a machine's server, and the id of its node."""
        from ray import serve

        answer: tuple[int, str] = serve.get_deployment_handle(f"weft-{machine}", APPLICATION).where.remote().result()
        return answer

    def gate_pid(self) -> int:
        """The process id of a gate."""
        answer: tuple[int, str] = self._handle.where.remote().result()
        return answer[0]

    def kill_node_later(self, machine: str, after_s: float) -> LostNode:
        """Kill a machine's node after *after_s* seconds, on a new thread, which then waits until its server is back.

        The thread fills in the returned record: the seconds after which the loss was noticed and the server was back.
        """
        lost = LostNode(machine, after_s)

        def kill_and_watch() -> None:
            time.sleep(after_s)
            urls_before = {server["url"] for server in self.status()["servers"] if server["machine"] == machine}
            self.kill_node(machine)
            began_s = time.monotonic()
            while None in (lost.noticed_s, lost.back_s) and not self._ended.is_set():
                urls_up = {
                    server["url"]
                    for server in self.status()["servers"]
                    if server["machine"] == machine and server["up"]
                }
                elapsed_s = time.monotonic() - began_s
                if lost.noticed_s is None and not urls_up & urls_before:
                    lost.noticed_s = elapsed_s
                if lost.back_s is None and urls_up - urls_before:
                    lost.back_s = elapsed_s
                if elapsed_s > STARTING_S:
                    return
                time.sleep(0.05)

        lost.watch = threading.Thread(target=kill_and_watch, name="a node is lost", daemon=True)
        lost.watch.start()
        return lost

    def kill_node(self, machine: str) -> None:
        """Kill the node of a machine's server, and everything on it, without a graceful shutdown."""
        _, node_id = self.where(machine)
        for node in list(self._cluster.worker_nodes):
            if node.node_id == node_id:
                self._cluster.remove_node(node, allow_graceful=False)


def _set_environment() -> None:
    """Set Ray's environment: a token for all nodes unless there is one, and no usage reports."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

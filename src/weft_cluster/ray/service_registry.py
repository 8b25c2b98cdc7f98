"""Service registry. Servers and gates send a heartbeat every second; gates look servers up here.

A server asks for permission before it shuts down, so that servers that are replaced leave one after another. The
registry stores nothing that heartbeats do not repeat: a restarted one is complete within a second.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft_cluster.placing.placement import PlacedMachine

HEARTBEAT_EVERY_S = 1.0
"""Period of heartbeats: a restarted registry and a new server are unknown for at most this time."""
HEARTBEAT_TIMEOUT_S = 5.0
"""Time without a heartbeat after which a server or gate is not listed: several lost heartbeats, not one slow one."""
SETTLED_S = 2.0
"""Age from which all gates know a server, since they read the registry every quarter of a second. A server may leave
only if servers of this age have its models."""
REFUSED_S = 10.0
"""Window of the rates of refused requests, as long as that of the rates that servers report."""


class RegistrySnapshot(NamedTuple):
    """The content of the registry, as a gate reads it."""

    models: tuple[str, ...]
    """The models of the placement."""
    servers: dict[str, PlacedMachine]
    """URL -> the machine whose models are there."""
    gates: list[str]
    left: list[str]
    """URLs of servers that have permission to shut down; they get no new requests."""


@dataclass
class _Entry:
    """A server or a gate; *machine* is None for a gate."""

    machine: PlacedMachine | None
    since_s: float
    """When its first heartbeat came."""
    heartbeat_s: float
    """When its last heartbeat came."""
    refused: deque[tuple[float, Counter[str]]] = field(default_factory=deque)
    """For a gate: time of each recent heartbeat, and the total number of requests refused until then, by model."""


class ServiceRegistry:
    """Addresses of servers and gates, and the models of each server. Ray calls one method at a time: no locks."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._models: tuple[str, ...] = ()
        self._entries: dict[str, _Entry] = {}
        """By URL."""
        self._left: dict[str, float] = {}
        """URL -> when it left."""

    def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Take the models of a new placement; Ray calls this when the application is deployed again."""
        self._models = tuple(config["models"])

    def heartbeat(
        self, url: str, machine: PlacedMachine | None, refused: Mapping[str, int] | None = None
    ) -> dict[str, float]:
        """List a server (with its *machine*) or a gate (with the number of requests it has *refused*, by model).

        Returns to a server, by model, its part of the requests per second that gates refused.
        """
        now = self._now()
        if url in self._left:  # this heartbeat was sent before the server left
            return {}
        entry = self._entries.setdefault(url, _Entry(machine, now, now))
        entry.machine, entry.heartbeat_s = machine, now
        if refused is not None:
            entry.refused.append((now, Counter(refused)))
            while entry.refused[0][0] < now - REFUSED_S:  # [0][0]: the oldest time
                entry.refused.popleft()
        return {} if machine is None else self._refused_rates(model.model for model in machine.models)

    def leave(self, url: str) -> bool:
        """Remove a server or gate if it may shut down now; return whether it may.

        A gate always may; a server if other servers, older than SETTLED_S, have all its models that are still in the
        placement.
        """
        now, entry = self._now(), self._entries.get(url)
        if entry is None:  # it has left, or has sent no heartbeat yet
            return url in self._left
        if entry.machine is not None:
            other_models = {
                placed.model
                for other_url, other in self._alive().items()
                if other_url != url and other.machine is not None and other.since_s <= now - SETTLED_S
                for placed in other.machine.models
            }
            if any(
                placed.model in self._models and placed.model not in other_models for placed in entry.machine.models
            ):
                return False
        del self._entries[url]
        self._left[url] = now
        return True

    def snapshot(self) -> RegistrySnapshot:
        """Return the servers and gates that are alive, and the servers that have left lately."""
        oldest, alive = self._now() - HEARTBEAT_TIMEOUT_S, self._alive()
        self._left = {url: left for url, left in self._left.items() if left >= oldest}
        servers = {url: entry.machine for url, entry in alive.items() if entry.machine is not None}
        return RegistrySnapshot(self._models, servers, [url for url in alive if url not in servers], list(self._left))

    def _alive(self) -> dict[str, _Entry]:
        """Drop entries without a recent heartbeat; return the rest, by URL."""
        oldest = self._now() - HEARTBEAT_TIMEOUT_S
        self._entries = {url: entry for url, entry in sorted(self._entries.items()) if entry.heartbeat_s >= oldest}
        return self._entries

    def _refused_rates(self, models: Iterable[str]) -> dict[str, float]:
        """Requests per second that gates refused, divided among the servers of each model."""
        alive, total = list(self._alive().values()), Counter[str]()
        for gate in alive:
            if gate.refused:  # refused between the oldest and the latest heartbeat of the window
                total += gate.refused[-1][1] - gate.refused[0][1]
        copies = Counter(placed.model for entry in alive if entry.machine for placed in entry.machine.models)
        return {model: total[model] / REFUSED_S / max(1, copies[model]) for model in models if total[model]}

"""Who is where: every server and gate says so each second, and gates ask. Who shall end asks whether it may."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft_cluster.placing.placement import PlacedMachine

SAID_EVERY_S = 1.0
FORGOTTEN_S = 5.0
"""Who has said nothing for so long is not listed."""
SETTLED_S = 2.0
"""Gates know of a server that has been there for so long."""
REFUSED_S = 10.0
"""Refusals of the last seconds are what counts."""


class RegistryEntry(NamedTuple):
    """What a gate is told."""

    models: tuple[str, ...]
    """Those that shall be there."""
    servers: dict[str, PlacedMachine]
    """URL -> the machine whose models are there."""
    gates: list[str]
    left: list[str]
    """Servers that are about to end."""


@dataclass
class _Entry:
    """Somebody who is there; *machine* is None for a gate."""

    machine: PlacedMachine | None
    since_s: float
    said_s: float
    refused: deque[tuple[float, Counter[str]]] = field(default_factory=deque)
    """Of a gate: when it said how many requests it had refused in all, by model."""


class Directory:
    """Addresses, and what is there. It holds nothing that is not said again: one that is started anew knows all in a
    second."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._models: tuple[str, ...] = ()
        self._entries: dict[str, _Entry] = {}
        self._left: dict[str, float] = {}

    def reconfigure(self, config: Mapping[str, Any]) -> None:
        """What Ray calls when the placement is another: *models* are those that shall be there."""
        self._models = tuple(config["models"])

    def say(
        self, url: str, machine: PlacedMachine | None, refused: Mapping[str, int] | None = None
    ) -> dict[str, float]:
        """Somebody is there; a gate says how many requests it has refused. A server hears how many of those would
        have been its own, by model and per second."""
        now = self._now()
        if url in self._left:  # it was on its way when that one left
            return {}
        entry = self._entries.setdefault(url, _Entry(machine, now, now))
        entry.machine, entry.said_s = machine, now
        if refused is not None:
            entry.refused.append((now, Counter(refused)))
            while entry.refused[0][0] < now - REFUSED_S:
                entry.refused.popleft()
        return {} if machine is None else self._missed(model.model for model in machine.models)

    def leave(self, url: str) -> bool:
        """Whether somebody may end now. A server may when others that gates know have all its models, as far as those
        shall be there; so servers that are all to be replaced leave one after another."""
        now, entry = self._now(), self._entries.get(url)
        if entry is None:  # it has left, or was not heard of yet
            return url in self._left
        if entry.machine is not None:
            others = {
                placed.model
                for other, each in self._there().items()
                if other != url and each.machine is not None and each.since_s <= now - SETTLED_S
                for placed in each.machine.models
            }
            if any(each.model in self._models and each.model not in others for each in entry.machine.models):
                return False
        del self._entries[url]
        self._left[url] = now
        return True

    def known(self) -> RegistryEntry:
        """Who is there, and who leaves."""
        oldest, there = self._now() - FORGOTTEN_S, self._there()
        self._left = {url: left for url, left in self._left.items() if left >= oldest}
        servers = {url: each.machine for url, each in there.items() if each.machine is not None}
        return RegistryEntry(self._models, servers, [url for url in there if url not in servers], list(self._left))

    def _there(self) -> dict[str, _Entry]:
        oldest = self._now() - FORGOTTEN_S
        self._entries = {url: each for url, each in sorted(self._entries.items()) if each.said_s >= oldest}
        return self._entries

    def _missed(self, models: Iterable[str]) -> dict[str, float]:
        """Requests per second that gates refused, divided among the servers of each model."""
        there, total = list(self._there().values()), Counter[str]()
        for gate in there:
            if gate.refused:
                total += gate.refused[-1][1] - gate.refused[0][1]
        copies = Counter(placed.model for each in there if each.machine for placed in each.machine.models)
        return {model: total[model] / REFUSED_S / max(1, copies[model]) for model in models if total[model]}

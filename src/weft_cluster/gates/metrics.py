"""Prometheus metrics of a gate: requests, how they ended, and estimates, by machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from weft.serving.metrics import CONTENT_TYPE, labelled

__all__ = ["CONTENT_TYPE", "FAMILIES", "text"]

ENDS = ("ok", "refused", "failed", "lost", "left")
"""How a request ends at a server: with a result; with 503 or 504; with another error; because the server was lost;
because the client left."""
OWN = ("unmeetable", "nowhere", "expired", "tried_again", "lost")
"""Decisions of the gate itself: refused as unmeetable, no server, timeout, retried, lost with its server."""


class GateFamily(NamedTuple):
    """One metric family, and its samples: one per server, or one per decision of the gate."""

    name: str
    kind: str
    help: str
    samples: Callable[[Mapping[str, Any]], Iterator[tuple[str, float]]]


def text(status: Mapping[str, Any]) -> str:
    """Return the text of ``/metrics`` for the state that ``Gate.status`` returns."""
    lines = []
    for family in FAMILIES:
        lines.append(f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n")
        lines += [f"{family.name}{{{labels}}} {value:.10g}\n" for labels, value in family.samples(status)]
    return "".join(lines)


def _per_server(
    value: Callable[[Mapping[str, Any]], float],
) -> Callable[[Mapping[str, Any]], Iterator[tuple[str, float]]]:
    return lambda status: ((_labels(server), value(server)) for server in status["servers"])


def _ends(status: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for server in status["servers"]:
        for end in ENDS:
            yield f"{_labels(server)},{labelled('end', end)}", server["ended"].get(end, 0)


def _own(status: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for what in OWN:
        yield f"{labelled('gate', status['gate'])},{labelled('what', what)}", status["counts"].get(what, 0)


def _labels(server: Mapping[str, Any]) -> str:
    return f"{labelled('machine', server['machine'])},{labelled('url', server['url'])}"


FAMILIES = (
    GateFamily("weft_gate_up", "gauge", "Whether a server takes requests.", _per_server(lambda server: server["up"])),
    GateFamily("weft_gate_requests_total", "counter", "Requests sent to a server, by how they ended.", _ends),
    GateFamily(
        "weft_gate_in_flight", "gauge", "Requests at a server.", _per_server(lambda server: server["in_flight"])
    ),
    GateFamily(
        "weft_gate_ahead_seconds",
        "gauge",
        "Work before another request.",
        _per_server(lambda server: server["ahead_ms"] / 1e3),
    ),
    GateFamily("weft_gate_decisions_total", "counter", "What the gate decided itself.", _own),
)

"""What a gate's ``/metrics`` prints: requests, their ends and estimates, by machine, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from weft.serving.metrics import CONTENT_TYPE, labelled

__all__ = ["CONTENT_TYPE", "FAMILIES", "text"]

ENDS = ("ok", "refused", "failed", "lost", "left")
"""How a request ends at a server: with a result, with 503 or 504, with another error, with the server, or alone."""
OWN = ("unmeetable", "nowhere", "expired", "tried_again", "lost")
"""What a gate decides itself."""


class GateFamily(NamedTuple):
    """One metric: a sample for each server, or for what the gate itself decides."""

    name: str
    kind: str
    help: str
    samples: Callable[[Mapping[str, Any]], Iterator[tuple[str, float]]]


def text(told: Mapping[str, Any]) -> str:
    """Every metric of a gate that tells so much of itself."""
    lines = []
    for family in FAMILIES:
        lines.append(f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n")
        lines += [f"{family.name}{{{labels}}} {value:.10g}\n" for labels, value in family.samples(told)]
    return "".join(lines)


def _each(value: Callable[[Mapping[str, Any]], float]) -> Callable[[Mapping[str, Any]], Iterator[tuple[str, float]]]:
    return lambda told: ((_labels(server), value(server)) for server in told["servers"])


def _ends(told: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for server in told["servers"]:
        for end in ENDS:
            yield f"{_labels(server)},{labelled('end', end)}", server["ended"].get(end, 0)


def _own(told: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for what in OWN:
        yield f"{labelled('gate', told['gate'])},{labelled('what', what)}", told["counts"].get(what, 0)


def _labels(server: Mapping[str, Any]) -> str:
    return f"{labelled('machine', server['machine'])},{labelled('url', server['url'])}"


FAMILIES = (
    GateFamily("weft_gate_up", "gauge", "Whether a server takes requests.", _each(lambda server: server["up"])),
    GateFamily("weft_gate_requests_total", "counter", "Requests sent to a server, by how they ended.", _ends),
    GateFamily("weft_gate_in_flight", "gauge", "Requests at a server.", _each(lambda server: server["in_flight"])),
    GateFamily(
        "weft_gate_ahead_seconds", "gauge", "Work before another request.", _each(lambda each: each["ahead_ms"] / 1e3)
    ),
    GateFamily("weft_gate_decisions_total", "counter", "What the gate decided itself.", _own),
)

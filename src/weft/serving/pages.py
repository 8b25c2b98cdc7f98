"""The pages of the server, and the data that they and the load generator request.

The pages are the dashboard at ``/``, and the OpenAPI document with forms at ``/docs``. ``dashboard.html`` and
``docs.html`` beside this module hold markup, style and script; ``history.js`` draws the dashboard's last ten minutes.
Style, colours and keys are those of all pages (``reports.page``). No resources are loaded from other hosts. The data:
the current state, the timeline of the lanes, and the measured segments of the models.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from functools import cache
from typing import Any

from weft.base.version import __version__
from weft.http.messages import HttpResponse
from weft.reports.page import whole_page
from weft.runtime.backend import LoadedModel
from weft.serving.gpu_sharing import UNCUT
from weft.serving.segment_observer import LaneSpan
from weft.serving.service import Service
from weft.serving.slots import ModelSlot
from weft.serving.statistics import WINDOW_NS, RecentWindow, Statistics

_HTML = "text/html; charset=utf-8"
_ANY_INLINE = "style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_OTHER_SOURCES = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_PAGE_HEADERS = (("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-cache"))


@cache
def dashboard() -> HttpResponse:
    """Return the page of the dashboard, which is the same for every server."""
    policy = ("Content-Security-Policy", f"default-src 'none'; {_ANY_INLINE}; {_OTHER_SOURCES}")
    return HttpResponse(200, whole_page("dashboard.html", "weft.serving").encode(), _HTML, (policy, *_PAGE_HEADERS))


@cache
def docs() -> HttpResponse:
    """Return the page that shows the OpenAPI document, with forms.

    Its content security policy names script and style by their hashes, so that browsers run no other script.
    """
    text = whole_page("docs.html", "weft.serving")
    policy = (
        f"default-src 'none'; script-src {_hash('script', text)}; style-src {_hash('style', text)}; {_OTHER_SOURCES}; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    headers = (("Content-Security-Policy", policy), *_PAGE_HEADERS, ("Referrer-Policy", "same-origin"))
    return HttpResponse(200, text.encode(), _HTML, headers)


def _hash(tag: str, text: str) -> str:
    """Return the hash of the page's only *tag* element, in the form of a content security policy."""
    (element,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.S)
    return f"'sha256-{base64.b64encode(hashlib.sha256(element.encode()).digest()).decode()}'"


# Data

LONGEST_NS = 60_000_000_000
"""Limit on the length of a timeline, and so on the size of an answer."""


def state(service: Service) -> dict[str, Any]:
    """Return the data of the dashboard, except the timeline."""
    now = service.now()
    slots = list(service.library.slots())
    all_statistics = [slot.statistics for slot in slots]
    windows = {id(statistics): statistics.window(now) for statistics in all_statistics}
    dispatcher = service.dispatcher
    return {
        "server": "weft",
        "version": __version__,
        "policy": service.config.scheduling.policy,
        "ready": service.is_ready(),
        "reason": service.why_not_ready(),
        "draining": service.draining,
        "uptime_s": (now - service.started_ns) / 1e9,
        "now_s": now / 1e9,
        "lanes": _describe_lanes(service, now),
        "in_flight": dispatcher.pending,
        "window_s": WINDOW_NS / 1e9,
        "totals": _sum_totals([*all_statistics, service.refused], list(windows.values())),
        "memory": {
            "held_bytes": service.held_memory.now(),
            "used_bytes": service.library.used_bytes,
            "budget_bytes": service.library.budget_bytes,
        },
        "models": [_describe_model(service, slot, windows) for slot in slots],
    }


def timeline(service: Service, since_s: float) -> dict[str, Any]:
    """Return the segments that ended after *since_s*."""
    now = service.now()
    start_s = min(max(since_s, (now - LONGEST_NS) / 1e9), now / 1e9)
    spans = service.dispatcher.recorder.since(round(start_s * 1e9))
    return {
        "now_s": now / 1e9,
        "models": sorted(  # also bodies, whose names the spans of stitched models have
            {name for slot in service.library.slots() for name in (slot.entry.name, slot.entry.body) if name}
        ),
        "spans": [_describe_span(span) for span in spans],
    }


def profile(service: Service) -> dict[str, Any]:
    """Return what a simulation of this server needs: policy, lanes and measured segments of the models."""
    scheduling, execution = service.config.scheduling, service.config.execution
    return {
        "format": 1,
        "policy": scheduling.policy,
        "policy_options": dict(scheduling.policy_options),
        "late": scheduling.late,
        "device": execution.device,
        "lanes": execution.lanes,
        "total_queue": service.config.limits.total_queue,
        "threads": execution.threads,
        "default_slo_ms": scheduling.default_slo_ms,
        "hand_over_s": service.dispatcher.observer.hand_over_s,
        "gpu": _describe_gpu(service),
        "models": {
            slot.entry.name: {
                "segments": list(slot.served.loaded.segments),
                "times_s": {
                    str(batch): list(slot.served.timing.times_at(batch))
                    for batch in range(1, slot.served.loaded.batching.max_batch + 1)
                },
                # means, where all segments were computed, replace the expected times
                "seen_s": service.dispatcher.streams.expected_s(slot.served)
                | service.dispatcher.streams.mean_s(slot.served),
                "max_batch": slot.served.loaded.batching.max_batch,
                **_describe_engines(slot.served.loaded),
                "gated": slot.served.timing.gated,
                "gates": gates.model_dump(mode="json") if (gates := slot.served.timing.gates) else None,
                "queue_size": slot.config.queue_size,
                "batch_timeout_ms": slot.config.batch_timeout_ms,
                "like": _sensitivities_by_rows(slot.served.loaded),
                "exits": list(slot.served.exit_rules.layers) if slot.served.exit_rules else [],
                "body": slot.entry.body,
                "exit_rates": list(slot.served.exit_rules.shares.published)
                if slot.served.exit_rules and slot.served.exit_rules.layers
                else [],
            }
            for slot in service.library.slots()
            if slot.served and slot.served.timing.warm_shapes is not None
        },
    }


def _describe_gpu(service: Service) -> dict[str, Any] | None:
    """Return how the GPU can be divided; None if models do not share one, or before it is known."""
    sharing = service.dispatcher.sharing
    return sharing.cuts.model_dump(mode="json") if sharing and sharing.cuts is not UNCUT else None


def _sensitivities_by_rows(loaded: LoadedModel) -> dict[str, Any]:
    """Return a model's sensitivity to shares of a GPU, by the number of rows.

    Of successive sizes with equal sensitivities only the largest is listed.
    """
    sensitivities = loaded.shares.like if loaded.shares else {}
    descending = sorted(sensitivities.items(), reverse=True)
    largest_rows = [
        rows for index, (rows, like) in enumerate(descending) if index == 0 or like != descending[index - 1][1]
    ]
    return {str(rows): sensitivities[rows].model_dump(mode="json") for rows in reversed(largest_rows)}


def _describe_lanes(service: Service, now: int) -> list[dict[str, Any]]:
    """Return for every lane whether it computes now, its utilisation in the last seconds, and its share of a GPU."""
    busy: Counter[int] = Counter()
    for span in service.dispatcher.recorder.since(now - WINDOW_NS):
        busy[span.lane] += span.end_ns - max(span.start_ns, now - WINDOW_NS)
    sharing = service.dispatcher.sharing
    window_ns = max(1, min(WINDOW_NS, now - service.started_ns))
    return [
        {
            "busy": lane.task is not None,
            "utilisation": min(1.0, busy[lane.index] / window_ns),
            "share": sharing.name(lane.index) if sharing else None,
        }
        for lane in service.dispatcher.lanes.lanes
    ]


def _sum_totals(all_statistics: list[Statistics], windows: list[RecentWindow]) -> dict[str, Any]:
    """Return the sums over all models of their counters and of their last seconds."""
    failures: Counter[str] = Counter()
    for statistics in all_statistics:
        failures += statistics.failures
    success = sum(statistics.success for statistics in all_statistics)
    return {
        "requests": success + failures.total(),
        "rate": sum(window.rate for window in windows),
        "success": success,
        "failures": dict(failures),
        "deadline_met": sum(statistics.met for statistics in all_statistics),
        "deadline_missed": sum(statistics.missed for statistics in all_statistics),
        "window_met": sum(window.met for window in windows),
        "window_missed": sum(window.missed for window in windows),
        "preemptions": sum(statistics.preemptions for statistics in all_statistics),
        "aborts": sum(statistics.aborts for statistics in all_statistics),
    }


def _describe_model(service: Service, slot: ModelSlot, windows: dict[int, RecentWindow]) -> dict[str, Any]:
    """Return a model's data for the dashboard; *windows*: the last seconds, by the ``id()`` of the statistics."""
    statistics = slot.statistics
    window = windows[id(statistics)]
    return {
        "name": slot.entry.name,
        "version": slot.entry.version,
        "state": slot.state,
        "message": slot.message,
        "rate": window.rate,
        "requests": statistics.success + statistics.failures.total(),
        "p50_ms": window.p50_ms,
        "p90_ms": window.p90_ms,
        "p99_ms": window.p99_ms,
        "window_met": window.met,
        "window_missed": window.missed,
        "queued": slot.served.line.waiting if slot.served else slot.waiters,
        "queue_size": slot.config.queue_size,
        "mean_batch": statistics.mean_batch,
        "segments": len(slot.served.loaded.segments) if slot.served else 0,
        "memory_bytes": slot.served.memory_bytes if slot.served else 0,
        "failures": dict(statistics.failures),
        **(_describe_engines(slot.served.loaded) if slot.served else {}),
        "exits": _describe_exits(service, slot),
        "shares": statistics.shares.lately(service.now()),
    }


def _describe_engines(loaded: LoadedModel) -> dict[str, Any]:
    """Return the engine that runs a model, and the seconds of all by batch size; empty if only one was timed."""
    timing = loaded.timing
    if not timing.engines_s:
        return {}
    engines_s = {engine: {str(rows): s for rows, s in times.items()} for engine, times in timing.engines_s.items()}
    return {"engine": timing.engine, "engines_s": engines_s}


def _describe_exits(service: Service, slot: ModelSlot) -> dict[str, Any] | None:
    """Return the state of a model's early exits; None if it has none."""
    served, statistics = slot.served, slot.statistics
    if served is None or served.exit_rules is None:
        return None
    exit_rules = served.exit_rules
    return {
        "names": list(exit_rules.names),
        "taken": [statistics.exits[number] for number in range(1, len(exit_rules.names) + 1)],
        "threshold": service.dispatcher.exit_threshold(served),
        "accuracy": exit_rules.accuracy,
        "merges": statistics.merges,
    }


def _describe_span(span: LaneSpan) -> dict[str, Any]:
    """Return a segment as the timeline has it, with times in seconds."""
    return {
        "lane": span.lane,
        "model": span.model,
        "segment": span.segment,
        "start_s": span.start_ns / 1e9,
        "end_s": span.end_ns / 1e9,
        "predicted_s": span.predicted_ns / 1e9,
        "batch": span.rows,
        "id": span.query,
        "outcome": span.outcome,
    }

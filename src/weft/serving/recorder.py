"""The last seconds of the lanes, for the dashboard and as a Perfetto trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

SPANS = 12_000
"""Spans that are kept, a few megabytes: some seconds of short segments, minutes of long ones."""
OUT_OF_ORDER_NS = 1_000_000_000
"""Limit on how much later a lane may report a span than the others; ``since`` stops searching there."""


class LaneSpan(NamedTuple):
    """A segment on a lane; times in nanoseconds on the clock of the lanes."""

    lane: int
    model: str
    segment: str
    """Number of the segment, and of all segments of the model: 3/8."""
    start_ns: int
    end_ns: int
    predicted_ns: int
    rows: int
    query: int
    """Which batch of its shapes."""
    outcome: str
    traced: bool = True
    """Whether one of its requests is traced (``trace_settings``); the dashboard shows it all the same."""


class Recorder:
    """The last spans; the observer of the lanes appends to ``spans``."""

    def __init__(self, name: Callable[[int], str] = "lane {}".format) -> None:
        """name: returns the name of a lane by its number."""
        self._name = name
        self.spans: deque[LaneSpan] = deque(maxlen=SPANS)

    def since(self, start_ns: int) -> list[LaneSpan]:
        """Return the spans that ended after *start_ns*, oldest first."""
        spans = []
        for span in reversed(self.spans):  # lanes report a little out of order
            if span.end_ns > start_ns:
                spans.append(span)
            elif span.end_ns < start_ns - OUT_OF_ORDER_NS:
                break
        return spans[::-1]

    def as_perfetto(self) -> dict[str, Any]:
        """Return the traced spans in Chrome's trace event format, with a track per lane."""
        spans = [span for span in self.spans if span.traced]
        lanes = sorted({span.lane for span in spans})
        names: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": self._name(lane)}}
            for lane in lanes
        ]
        return {"displayTimeUnit": "ms", "traceEvents": names + [_event(span) for span in spans]}


def _event(span: LaneSpan) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 1,
        "tid": span.lane,
        "name": span.model,
        "cat": span.outcome,
        "ts": span.start_ns / 1e3,
        "dur": (span.end_ns - span.start_ns) / 1e3,
        "args": {
            "segment": span.segment,
            "rows": span.rows,
            "query": span.query,
            "predicted_us": span.predicted_ns / 1e3,
            "outcome": span.outcome,
        },
    }

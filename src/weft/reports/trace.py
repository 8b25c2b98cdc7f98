"""What happened, as spans: when each layer's weights were fetched and when it was computed.

A trace is kept as columns, because a run of a second has a hundred thousand spans; ``spans`` turns
them into values to read. Files are ``write_trace`` and ``read_trace``; the format is docs/formats.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError
from weft.base.jsonfile import read_json, write_json

FORMAT = 1
LAST_S = 1e9
"""No trace ends later."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Span(NamedTuple):
    """One layer of one query: when its weights were fetched and when it was computed, in seconds."""

    model: str
    query: int
    """Which query of its stream, counted from 0."""
    layer: str
    fetch_start_s: float
    fetch_end_s: float
    compute_start_s: float
    compute_end_s: float
    stream: int
    """Index of the stream; two streams may run the same model."""
    weight_bytes: int
    """Bytes that arrive in the weight buffer during the fetch and leave it at the end of the compute."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Spans in the order they were issued, as columns, and what produced them."""

    streams: tuple[str, ...]
    """The model of each stream."""
    layers: tuple[tuple[str, ...], ...]
    """Layer names of each stream, in execution order."""
    stream: Ints
    query: Ints
    layer: Ints
    """Index into the stream's layer names."""
    fetch_start_s: Floats
    fetch_end_s: Floats
    compute_start_s: Floats
    compute_end_s: Floats
    weight_bytes: Ints
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What produced it: device, policy and its options, models, batch, mix, version."""

    def __repr__(self) -> str:
        return f"Trace({' + '.join(self.streams)}: {len(self)} layers in {self.makespan_s * 1e3:.3f} ms)"

    def __len__(self) -> int:
        return len(self.stream)

    @property
    def makespan_s(self) -> float:
        return float(self.compute_end_s.max()) if len(self) else 0.0

    @property
    def spans(self) -> Iterator[Span]:
        times_s = (self.fetch_start_s, self.fetch_end_s, self.compute_start_s, self.compute_end_s)
        columns = (self.stream, self.query, self.layer, *times_s, self.weight_bytes)
        for s, q, n, f0, f1, c0, c1, size in zip(*(column.tolist() for column in columns), strict=True):
            yield Span(self.streams[s], q, self.layers[s][n], f0, f1, c0, c1, s, size)

    @classmethod
    def from_spans(
        cls, spans: Iterable[Span], streams: Iterable[str], settings: Mapping[str, Any] | None = None
    ) -> Trace:
        """A trace from its spans; layers are numbered in order of first appearance in their stream."""
        rows, models = list(spans), tuple(streams)
        names: list[dict[str, int]] = [{} for _ in models]
        for span in rows:
            if not 0 <= span.stream < len(models):
                raise InputError(f"span of {span.model!r} names stream {span.stream}, but there are {len(models)}")
            names[span.stream].setdefault(span.layer, len(names[span.stream]))

        def ints(values: Iterable[int]) -> Ints:
            return np.fromiter(values, dtype=np.int64, count=len(rows))

        def floats(values: Iterable[float]) -> Floats:
            return np.fromiter(values, dtype=np.float64, count=len(rows))

        return cls(
            models,
            tuple(tuple(table) for table in names),
            ints(s.stream for s in rows),
            ints(s.query for s in rows),
            ints(names[s.stream][s.layer] for s in rows),
            floats(s.fetch_start_s for s in rows),
            floats(s.fetch_end_s for s in rows),
            floats(s.compute_start_s for s in rows),
            floats(s.compute_end_s for s in rows),
            ints(s.weight_bytes for s in rows),
            dict(settings or {}),
        )


def _checked(span: Span) -> Span:
    times = (span.fetch_start_s, span.fetch_end_s, span.compute_start_s, span.compute_end_s)
    if not (0 <= times[0] <= times[1] <= times[2] <= times[3] <= LAST_S):
        raise ValueError(f"the times of layer {span.layer!r} of query {span.query} do not follow each other")
    return span


def trace_as_dict(trace: Trace) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "settings": dict(trace.settings),
        "streams": list(trace.streams),
        "spans": [span._asdict() for span in trace.spans],
    }


def write_trace(trace: Trace, path: str | Path) -> None:
    write_json(path, trace_as_dict(trace))


def read_trace(path: str | Path) -> Trace:
    """The trace a JSON file holds."""
    raw = read_json(path, InputError)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise InputError(f"{path}: not a weft trace of format {FORMAT}")
    try:
        spans = [_checked(Span(**entry)) for entry in raw["spans"]]
        return Trace.from_spans(spans, raw["streams"], raw.get("settings"))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: a span does not have the fields of the format: {error}") from error

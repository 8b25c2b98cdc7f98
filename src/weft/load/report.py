"""What a load test found: every request's fate, the figures that follow from them, and the remarks they deserve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.load.payload import sent_threshold
from weft.load.reading import NO_CLASS, NO_EXIT, Said
from weft.reports.tables import largest_of
from weft.workloads.requests import Stream, Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int16]

OK = 200
BROKEN = 0
"""In place of a status: the connection failed before the answer was complete."""
LOST = -1
"""In place of a status: no answer by the end of the run."""

MOST_LAG_S = 1e-3
MOST_LAG_SHARE = 0.05
"""The part of the median latency that requests may leave too late."""


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """The figures of a stream, over its requests after the warm-up."""

    scheduled: int
    answered: int
    """How many came back with status 200."""
    statuses: Mapping[int, int]
    """Status -> answers that had it, 200 included."""
    broken: int
    lost: int
    offered_per_s: float
    answered_per_s: float
    met: int
    """Answered with 200 within the deadline."""
    met_share: float | None
    """The share of all that were scheduled; None where none was, or where there is no deadline."""
    mean_s: float | None
    """These are of the answers with status 200, from the scheduled time on."""
    p50_s: float | None
    p90_s: float | None
    p95_s: float | None
    p99_s: float | None
    p999_s: float | None
    max_s: float | None
    lag_p99_s: float | None
    """From the scheduled time until the request was handed to a connection; part of every latency."""
    lag_max_s: float | None
    accuracy: float | None = None
    """Share of the answers with status 200 that give the label of the sample sent; None without labels."""
    exit_shares: tuple[float, ...] | None = None
    """Share of the answers that left at each exit, the end last; None where they do not tell."""
    p99_max_of: int | None = None
    """How many requests p99 is the largest of, where they are fewer than 100; else None."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamLoad:
    """The requests of one stream in the order of their scheduled times, and what became of each."""

    stream: Stream
    scheduled_s: Floats
    """From the start of the run."""
    lag_s: Floats
    """How late each was sent; one that was never sent, until the end of the run."""
    latency_s: Floats
    """NaN where there was no answer."""
    status: Ints
    """An HTTP status, BROKEN or LOST."""
    messages: Mapping[int, str]
    """Status -> what the first answer with it said, for all but 200."""
    figures: StreamFigures
    said: Said = field(default_factory=Said)
    """What the answers say, where that is read."""

    def __repr__(self) -> str:
        return f"StreamLoad({self.stream.model}: {self.figures.answered} of {self.figures.scheduled} answered)"

    def as_dict(self, *, latencies: bool) -> dict[str, object]:
        found: dict[str, object] = {
            "model": self.stream.model,
            "deadline_s": None if self.stream.deadline_ms is None else self.stream.deadline_ms / 1e3,
            "exit_threshold": sent_threshold(self.stream),
            **asdict(self.figures),
            "statuses": {str(status): count for status, count in self.figures.statuses.items()},
            "messages": {str(status): text for status, text in self.messages.items()},
        }
        if latencies:
            found["scheduled_s"] = self.scheduled_s.tolist()
            found["lag_s"] = self.lag_s.tolist()
            found["latency_s"] = [None if np.isnan(each) else each for each in self.latency_s.tolist()]
            found["status"] = self.status.tolist()
            found |= self._said()
        return found

    def _said(self) -> dict[str, object]:
        """The lists of what was sent and said, those there are."""
        said = self.said
        lists = (("sample", said.sample, None), ("exit", said.exit, NO_EXIT), ("prediction", said.prediction, NO_CLASS))
        return {
            key: [None if each == nothing else each for each in values.tolist()]
            for key, values, nothing in lists
            if values is not None
        }


@dataclass(frozen=True, slots=True, eq=False)
class LoadResult:
    """A whole run."""

    url: str
    server: Mapping[str, Any]
    """What the server says about itself."""
    workload: Workload
    deadlines: str
    streams: tuple[StreamLoad, ...]
    started: str
    """Date and time, UTC."""
    elapsed_s: float
    """Until the last answer, or the end of the grace."""
    transport_s: float
    """Median round trip of a call that costs the server next to nothing."""
    cpu_s: float
    """Processor time of the generator while it sent and received."""
    connections: int
    """How many connections were opened in all."""
    held_back: int
    """Requests that had to wait because no more connections were allowed."""
    overhead_s: tuple[float | None, ...] = ()
    """Of each stream: what a request takes alone besides its segments, where that was measured."""
    profile: Any = None
    """What the server has measured of its models, if it is a weft server."""
    remarks: tuple[str, ...] = field(init=False)

    def __repr__(self) -> str:
        return f"LoadResult({self.url}: {self.requests} requests in {self.elapsed_s:.1f} s)"

    def __post_init__(self) -> None:
        object.__setattr__(self, "remarks", tuple(_remarks(self)))

    @property
    def requests(self) -> int:
        """All that were scheduled, the warm-up's included."""
        return sum(len(each.status) for each in self.streams)

    def as_dict(self, *, latencies: bool = True) -> dict[str, object]:
        """The JSON of docs/formats.md; *latencies*: with lists per stream, one value per request."""
        return {
            "format": 1,
            "url": self.url,
            "server": dict(self.server),
            "workload": self.workload.model_dump(mode="json", exclude={"folder"}),
            "deadlines": self.deadlines,
            "started": self.started,
            "elapsed_s": self.elapsed_s,
            "transport_s": self.transport_s,
            "cpu_s": self.cpu_s,
            "connections": self.connections,
            "held_back": self.held_back,
            "remarks": list(self.remarks),
            "streams": [
                {**each.as_dict(latencies=latencies), "overhead_s": overhead_s}
                for each, overhead_s in zip(self.streams, self.overhead_s or (None,) * len(self.streams), strict=True)
            ],
            "profile": self.profile,
        }


def stream_load(
    workload: Workload,
    stream: Stream,
    *,
    scheduled_s: Floats,
    lag_s: Floats,
    latency_s: Floats,
    status: Ints,
    messages: Mapping[int, str],
    said: Said | None = None,
) -> StreamLoad:
    """Sort a stream's requests by their scheduled times and work out its figures."""
    order = np.argsort(scheduled_s, kind="stable")
    scheduled_s, lag_s, latency_s, status = scheduled_s[order], lag_s[order], latency_s[order], status[order]
    said = said.at(order) if said else Said()
    figures = _figures(workload, stream, scheduled_s, lag_s, latency_s, status, said)
    return StreamLoad(stream, scheduled_s, lag_s, latency_s, status, dict(messages), figures, said)


def _figures(
    workload: Workload, stream: Stream, scheduled_s: Floats, lag_s: Floats, latency_s: Floats, status: Ints, said: Said
) -> StreamFigures:
    counted = scheduled_s >= workload.warmup_s
    said = said.at(counted & (status == OK))
    lag_s, latency_s, status = lag_s[counted], latency_s[counted], status[counted]
    span_s = workload.duration_s - workload.warmup_s
    codes, counts = np.unique(status, return_counts=True)
    bins = {int(code): int(count) for code, count in zip(codes, counts, strict=True)}
    good = latency_s[status == OK]
    due_s = np.inf if stream.deadline_ms is None else stream.deadline_ms / 1e3
    met = int(np.count_nonzero(good <= due_s))
    times_s = ranks(good, (0.5, 0.9, 0.95, 0.99, 0.999, 1.0))
    return StreamFigures(
        scheduled=len(status),
        answered=len(good),
        statuses={code: count for code, count in bins.items() if code not in (BROKEN, LOST)},
        broken=bins.get(BROKEN, 0),
        lost=bins.get(LOST, 0),
        offered_per_s=len(status) / span_s,
        answered_per_s=len(good) / span_s,
        met=met,
        met_share=met / len(status) if len(status) and stream.deadline_ms is not None else None,
        mean_s=float(good.mean()) if len(good) else None,
        **dict(zip(("p50_s", "p90_s", "p95_s", "p99_s", "p999_s", "max_s"), times_s, strict=True)),
        **dict(zip(("lag_p99_s", "lag_max_s"), ranks(lag_s, (0.99, 1.0)), strict=True)),
        accuracy=_accuracy(said),
        exit_shares=_exit_shares(said),
        p99_max_of=largest_of(len(good)),
    )


def _accuracy(said: Said) -> float | None:
    """What could not be read is not right."""
    if said.prediction is None or not len(said.prediction):
        return None
    return float((said.prediction == said.labels).mean())


def _exit_shares(said: Said) -> tuple[float, ...] | None:
    taken = np.empty(0, np.int64) if said.exit is None else said.exit[said.exit != NO_EXIT]
    if not len(taken):
        return None
    counts = np.bincount(taken, minlength=said.exit_count + 1)[1:]
    return tuple((counts / len(taken)).tolist())


def ranks(values: Floats, shares: Sequence[float]) -> list[float | None]:
    """The smallest values that so many of all do not exceed; every one of them was observed."""
    if not len(values):
        return [None] * len(shares)
    found: list[float | None] = np.quantile(values, shares, method="inverted_cdf").tolist()
    return found


def _remarks(result: LoadResult) -> list[str]:
    remarks = []
    for each in result.streams:
        if each.stream.deadline_ms is None:
            remarks.append(f"{each.stream.model}: no deadline was given, so none of its answers is late")
        for status, text in each.messages.items():
            what = {BROKEN: "connection failed"}.get(status, f"status {status}")
            remarks.append(f"{each.stream.model}: {what}: {text}")
        if each.said.unreadable:
            remarks.append(
                f"{each.stream.model}: {each.said.unreadable} answers could not be read, the first because "
                f"{each.said.problem}"
            )
        if remark := _lag_remark(each):
            remarks.append(remark)
    if result.held_back:
        remarks.append(
            f"{result.held_back} requests waited because all connections were busy; more of them: --connections"
        )
    return remarks


def _lag_remark(load: StreamLoad) -> str | None:
    lag_s, median_s = load.figures.lag_p99_s, load.figures.p50_s
    if lag_s is None or (lag_s <= MOST_LAG_S and (median_s is None or lag_s <= MOST_LAG_SHARE * median_s)):
        return None
    share = f", {lag_s / median_s:.0%} of p50," if median_s else ""
    return (
        f"{load.stream.model}: the generator was a bottleneck: send lag p99 {lag_s * 1e3:.2f} ms{share} "
        "is part of its latencies"
    )

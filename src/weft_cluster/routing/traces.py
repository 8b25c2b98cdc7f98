"""Recorded arrivals of many callers, as single times or counts per minute, and readers of the files of Azure.

A caller is the origin of requests in a file, such as a function or a service. ``read_trace`` reads traces of
github.com/Azure/AzurePublicDataset (CC-BY 4.0) and recognizes them by their headers:

- Functions 2019: ``HashOwner,HashApp,HashFunction,Trigger,1,...,1440``, invocations in each minute of a day;
- Functions 2021: ``app,func,end_timestamp,duration``, every invocation, in seconds;
- LLM inference 2023: ``TIMESTAMP,ContextTokens,GeneratedTokens``, every request of one service.

``traffic.fit`` fits generated traffic to a trace.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.base.errors import WorkloadError, reason_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Rng = np.random.Generator


@dataclass(frozen=True, slots=True, eq=False)
class TimedTrace:
    """The arrival time and the caller of each request."""

    callers: tuple[str, ...]
    times_s: Floats
    """Ascending, from 0 on."""
    caller: Ints
    """Index of the caller of each request."""
    span_s: float

    def __repr__(self) -> str:
        return f"TimedTrace({len(self.times_s)} requests of {len(self.callers)} callers in {self.span_s:g} s)"

    def requests(self) -> Ints:
        """Number of requests of each caller."""
        return np.bincount(self.caller, minlength=len(self.callers)).astype(np.int64)

    def flow(self, window_s: float) -> Ints:
        """Requests of all callers in each window of *window_s*; an incomplete last window is left out."""
        windows = whole_windows(self.span_s, window_s)
        return np.bincount((self.times_s / window_s).astype(np.int64), minlength=windows)[:windows].astype(np.int64)

    def dealt(self, models: int) -> TimedTrace:
        """The same requests for *models* models: callers are assigned to them in turn, the most frequent first.

        AlpaServe (section 6.2) assigns the functions of a trace to its models in the same way.
        """
        order = np.argsort(-self.requests(), kind="stable")
        model = np.empty(len(self.callers), np.int64)
        model[order] = np.arange(len(self.callers)) % models
        return TimedTrace(tuple(map(str, range(models))), self.times_s, model[self.caller], self.span_s)


@dataclass(frozen=True, slots=True, eq=False)
class CountedTrace:
    """Number of requests of each caller in each window of time."""

    callers: tuple[str, ...]
    counts: Ints
    """(callers, windows)."""
    window_s: float

    def __repr__(self) -> str:
        windows = f"{self.counts.shape[1]} windows of {self.window_s:g} s"
        return f"CountedTrace({self.counts.sum()} requests of {len(self.callers)} callers in {windows})"

    @property
    def span_s(self) -> float:
        return float(self.counts.shape[1] * self.window_s)

    def requests(self) -> Ints:
        """Number of requests of each caller."""
        return np.asarray(self.counts.sum(axis=1))

    def flow(self, window_s: float) -> Ints:
        """Requests of all callers in each window; *window_s* is rounded to a multiple of the recorded window."""
        return grouped(self.counts.sum(axis=0), max(1, round(window_s / self.window_s)))

    def timed(self, rng: Rng) -> TimedTrace:
        """A trace with times drawn uniformly from the window in which each request was counted."""
        caller, window = np.nonzero(self.counts)
        count = self.counts[caller, window]
        times = (np.repeat(window, count) + rng.random(int(count.sum()))) * self.window_s
        order = np.argsort(times, kind="stable")
        return TimedTrace(self.callers, times[order], np.repeat(caller, count)[order].astype(np.int64), self.span_s)


CallerTrace = TimedTrace | CountedTrace


def whole_windows(span_s: float, window_s: float) -> int:
    """Number of windows that lie wholly within a span."""
    return int(span_s / window_s + 1e-9)  # a span of exactly n windows may divide to just below n


def grouped(counts: Ints, size: int) -> Ints:
    """Sums of groups of *size* neighbours along the last axis; an incomplete group at the end is left out."""
    groups = counts.shape[-1] // size
    sums: Ints = counts[..., : groups * size].reshape(*counts.shape[:-1], groups, size).sum(axis=-1)
    return sums


MINUTE_S = 60.0
"""Length of a window in Functions 2019."""

Row = tuple[int, list[str]]
"""Number of a line, and its cells."""
Reader = Callable[[str, list[str], Iterator[Row]], CallerTrace]


def read_trace(*paths: str | Path) -> CallerTrace:
    """Read a trace of one of the three kinds; several files are days of Functions 2019, joined to one trace.

    WorkloadError if a file cannot be read or is of no known kind.
    """
    if not paths:
        raise WorkloadError("no trace to read; name a file")
    traces = [_read(Path(path)) for path in paths]
    if len(traces) == 1:
        return traces[0]
    days = [trace for trace in traces if isinstance(trace, CountedTrace)]
    if len(days) < len(traces):
        raise WorkloadError(f"{paths[0]}: only files of counts by the minute follow each other; name one file")
    return _join_days(days)


def _read(path: Path) -> CallerTrace:
    """Read one file. WorkloadError if that fails."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file)
            header = [name.strip() for name in next(rows, [])]
            numbered = ((number, row) for number, row in enumerate(rows, start=2) if any(row))
            return _reader_of(str(path), header)(str(path), header, numbered)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path}: cannot read the trace: {reason_of(error)}") from error


def _reader_of(where: str, header: Sequence[str]) -> Reader:
    """The reader for a file with this header. WorkloadError if there is none."""
    for columns, reader in SCHEMAS.items():
        if list(header[: len(columns)]) == list(columns):
            return reader
    known = "; ".join(",".join(columns) for columns in SCHEMAS)
    raise WorkloadError(f"{where}: its header is none of {known}")


def _functions_2019(where: str, header: list[str], rows: Iterator[Row]) -> CountedTrace:
    """Read invocations per minute of a day."""
    if header[4:] != [str(minute + 1) for minute in range(len(header) - 4)] or len(header) == 4:
        raise WorkloadError(f"{where}: after Trigger come the minutes 1, 2, ..., and nothing else")
    names, counts = [], []
    for number, row in rows:
        if len(row) != len(header):
            raise WorkloadError(f"{where}, line {number}: {len(row)} columns where the header has {len(header)}")
        names.append("/".join(row[:3]))
        try:
            counts.append(np.array(row[4:], np.int64))
        except (ValueError, OverflowError):
            raise WorkloadError(f"{where}, line {number}: a count is no whole number") from None
        if counts[-1].min() < 0:
            raise WorkloadError(f"{where}, line {number}: a count is below 0")
    if not names:
        raise WorkloadError(f"{where}: the trace is empty")
    return CountedTrace(tuple(names), np.array(counts), MINUTE_S)


def _functions_2021(where: str, header: list[str], rows: Iterator[Row]) -> TimedTrace:
    """Read single invocations; the file has ends and durations, so an arrival is the end minus the duration."""
    names: dict[str, int] = {}
    callers, times = [], []
    for number, row in rows:
        try:
            app, function, end, duration = row[:4]
            times.append(float(end) - float(duration))
        except ValueError:
            raise WorkloadError(f"{where}, line {number}: not an app, a function, an end and a duration") from None
        callers.append(names.setdefault(f"{app}/{function}", len(names)))
    return _timed_trace(where, tuple(names), times, callers)


def _llm_2023(where: str, header: list[str], rows: Iterator[Row]) -> TimedTrace:
    """Read the requests of one service, which is the only caller."""
    times = []
    for number, row in rows:
        try:
            times.append(datetime.fromisoformat(row[0].strip()).timestamp())
        except ValueError:
            raise WorkloadError(f"{where}, line {number}: {row[0]!r} is no date and time") from None
    return _timed_trace(where, (Path(where).stem,), times, [0] * len(times))


SCHEMAS: dict[tuple[str, ...], Reader] = {
    ("HashOwner", "HashApp", "HashFunction", "Trigger"): _functions_2019,
    ("app", "func", "end_timestamp", "duration"): _functions_2021,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _llm_2023,
}
"""First columns of a header -> the reader of such a file."""


def _timed_trace(where: str, names: tuple[str, ...], times: list[float], callers: list[int]) -> TimedTrace:
    """Sort requests by time, counted from the first. WorkloadError for less than two requests or invalid times."""
    if len(times) < 2:
        raise WorkloadError(f"{where}: a trace needs at least two requests, this one has {len(times)}")
    times_s = np.array(times)
    if not np.isfinite(times_s).all():
        raise WorkloadError(f"{where}: a time is not finite")
    order = np.argsort(times_s, kind="stable")
    times_s = times_s[order] - times_s[order[0]]
    return TimedTrace(names, times_s, np.array(callers, np.int64)[order], float(times_s[-1]))


def _join_days(days: Sequence[CountedTrace]) -> CountedTrace:
    """Join days one after another; a caller that a day does not list sent nothing on it."""
    names = tuple(dict.fromkeys(chain.from_iterable(day.callers for day in days)))
    row_of = {name: index for index, name in enumerate(names)}
    day_counts = []
    for day in days:
        counts = np.zeros((len(names), day.counts.shape[1]), np.int64)
        np.add.at(counts, [row_of[name] for name in day.callers], day.counts)
        day_counts.append(counts)
    return CountedTrace(names, np.concatenate(day_counts, axis=1), days[0].window_s)

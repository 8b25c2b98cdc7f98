"""Traces that Azure published (github.com/Azure/AzurePublicDataset, CC-BY 4.0), told apart by their headers.

- Functions 2019: ``HashOwner,HashApp,HashFunction,Trigger,1,...,1440``, invocations in each minute of a day;
- Functions 2021: ``app,func,end_timestamp,duration``, every invocation, in seconds;
- LLM inference 2023: ``TIMESTAMP,ContextTokens,GeneratedTokens``, every request of one service.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path

import numpy as np

from weft.base.errors import WorkloadError, reason_of
from weft.workloads.traces import CallerTrace, CountedTrace, TimedTrace

MINUTE_S = 60.0

Row = tuple[int, list[str]]
"""The number of a line, and what it holds."""
Reader = Callable[[str, list[str], Iterator[Row]], CallerTrace]


def read_trace(*paths: str | Path) -> CallerTrace:
    """The trace in a file, of any of the three kinds; the days of Functions 2019, one after another, are one trace."""
    if not paths:
        raise WorkloadError("no trace to read; name a file")
    traces = [_read(Path(path)) for path in paths]
    if len(traces) == 1:
        return traces[0]
    days = [trace for trace in traces if isinstance(trace, CountedTrace)]
    if len(days) < len(traces):
        raise WorkloadError(f"{paths[0]}: only files of counts by the minute follow each other; name one file")
    return _joined(days)


def _read(path: Path) -> CallerTrace:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file)
            header = [name.strip() for name in next(rows, [])]
            numbered = ((number, row) for number, row in enumerate(rows, start=2) if any(row))
            return _reader(str(path), header)(str(path), header, numbered)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path}: cannot read the trace: {reason_of(error)}") from error


def _reader(where: str, header: Sequence[str]) -> Reader:
    for columns, reader in SCHEMAS.items():
        if list(header[: len(columns)]) == list(columns):
            return reader
    known = "; ".join(",".join(columns) for columns in SCHEMAS)
    raise WorkloadError(f"{where}: its header is none of {known}")


def _functions_2019(where: str, header: list[str], rows: Iterator[Row]) -> CountedTrace:
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
    """An invocation came its duration before its end."""
    names: dict[str, int] = {}
    callers, times = [], []
    for number, row in rows:
        try:
            app, function, end, duration = row[:4]
            times.append(float(end) - float(duration))
        except ValueError:
            raise WorkloadError(f"{where}, line {number}: not an app, a function, an end and a duration") from None
        callers.append(names.setdefault(f"{app}/{function}", len(names)))
    return _timed(where, tuple(names), times, callers)


def _llm_2023(where: str, header: list[str], rows: Iterator[Row]) -> TimedTrace:
    """One caller: the service that the file is of."""
    times = []
    for number, row in rows:
        try:
            times.append(datetime.fromisoformat(row[0].strip()).timestamp())
        except ValueError:
            raise WorkloadError(f"{where}, line {number}: {row[0]!r} is no date and time") from None
    return _timed(where, (Path(where).stem,), times, [0] * len(times))


SCHEMAS: dict[tuple[str, ...], Reader] = {
    ("HashOwner", "HashApp", "HashFunction", "Trigger"): _functions_2019,
    ("app", "func", "end_timestamp", "duration"): _functions_2021,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _llm_2023,
}
"""How each file's header begins."""


def _timed(where: str, names: tuple[str, ...], times: list[float], callers: list[int]) -> TimedTrace:
    if len(times) < 2:
        raise WorkloadError(f"{where}: a trace needs at least two requests, this one has {len(times)}")
    found = np.array(times)
    if not np.isfinite(found).all():
        raise WorkloadError(f"{where}: a time is not finite")
    order = np.argsort(found, kind="stable")
    found = found[order] - found[order[0]]
    return TimedTrace(names, found, np.array(callers, np.int64)[order], float(found[-1]))


def _joined(days: Sequence[CountedTrace]) -> CountedTrace:
    """Days one after another; who is missing on a day sent nothing."""
    names = tuple(dict.fromkeys(chain.from_iterable(day.callers for day in days)))
    place = {name: index for index, name in enumerate(names)}
    parts = []
    for day in days:
        part = np.zeros((len(names), day.counts.shape[1]), np.int64)
        np.add.at(part, [place[name] for name in day.callers], day.counts)
        parts.append(part)
    return CountedTrace(names, np.concatenate(parts, axis=1), days[0].window_s)

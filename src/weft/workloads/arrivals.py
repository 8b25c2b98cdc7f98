"""Arrival processes: generators that yield arrival times in blocks, so that memory does not grow with the run.

A generator yields sorted blocks of seconds and is endless, except a trace, which ends with its file. Random numbers
come from the numpy generator *rng* that is passed in.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.base.errors import WorkloadError, reason_of

Floats = npt.NDArray[np.float64]
Rng = np.random.Generator

BLOCK = 4096
"""Arrivals drawn at a time: enough that numpy's cost per call vanishes, 32 KiB of memory. The size is part of the
definition of every workload: with another size, the same seed gives other arrivals."""


def poisson(rate: float, rng: Rng) -> Iterator[Floats]:
    """Yield independent arrivals: exponential gaps of mean 1/rate."""
    return _from_gaps(lambda: rng.exponential(1 / rate, BLOCK))


def gamma(rate: float, rng: Rng, *, cv: float) -> Iterator[Floats]:
    """Yield arrivals with gamma-distributed gaps of mean 1/rate; *cv*: their coefficient of variation.

    Above 1 arrivals come in clusters, below 1 more regularly than a Poisson process.
    """
    return _from_gaps(lambda: rng.gamma(cv**-2, cv**2 / rate, BLOCK))


def uniform(rate: float, rng: Rng) -> Iterator[Floats]:
    """Yield evenly spaced arrivals, the first at a random time within the first gap."""
    # The random offset keeps streams of equal rates from arriving in lockstep.
    offset = rng.uniform(0, 1 / rate)
    first = 0  # number of the block's first arrival; times are computed from it, so that errors do not add up
    while True:
        yield offset + np.arange(first, first + BLOCK) / rate
        first += BLOCK


def bursty(rate: float, rng: Rng, *, factor: float, share: float, length_s: float) -> Iterator[Floats]:
    """Yield arrivals of a two-state process: bursts of *factor* times the mean rate, and calm spells.

    Arrivals within a state are a Poisson process, and lengths of states are exponentially distributed. share: share of
    the time that bursts take. length_s: mean length of a burst; that of calm spells follows from the share.
    """
    calm_rate = rate * (1 - factor * share) / (1 - share)
    state = {"now": 0.0, "until": 0.0, "burst": True}  # last arrival and end of the state in seconds, and which state

    def gaps() -> Floats:
        """Return the next block of gaps."""
        lengths = np.empty(BLOCK)
        last = state["now"]
        for i in range(BLOCK):
            time = last
            # A gap that crosses the end of a state is drawn anew from there: exponential gaps have no memory.
            while True:
                state_rate = factor * rate if state["burst"] else calm_rate
                gap = rng.exponential(1 / state_rate) if state_rate > 0 else math.inf
                if time + gap <= state["until"]:
                    time += gap
                    break
                time = state["until"]
                state["burst"] = not state["burst"]
                mean_s = length_s if state["burst"] else length_s * (1 - share) / share
                state["until"] = time + rng.exponential(mean_s)
            lengths[i] = time - last
            last = time
        state["now"] = last
        return lengths

    return _from_gaps(gaps)


def trace(times_s: Floats, speedup: float) -> Iterator[Floats]:
    """Yield the times of a trace, from 0 on and divided by *speedup*; end after the last of them."""
    scaled = (times_s - times_s[0]) / speedup
    for start in range(0, len(scaled), BLOCK):
        yield scaled[start : start + BLOCK]


def _from_gaps(gaps: Callable[[], Floats]) -> Iterator[Floats]:
    """Yield endless blocks of arrival times; *gaps*: returns the next block of gaps."""
    last = 0.0
    while True:
        block = last + np.cumsum(gaps())
        last = float(block[-1])
        yield block


def read_times(path: Path, column: str | None = None) -> Floats:
    """Read the times of a CSV file in seconds: numbers, or dates and times, from the named column or the first."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path}: cannot read the trace: {reason_of(error)}") from error
    while rows and not any(rows[-1]):
        rows.pop()  # a file may end in blank lines
    if not rows:
        raise WorkloadError(f"{path}: the trace is empty")
    index, numbered_rows = _column(path, rows, column)
    times = np.array([_time(path, number, row, index) for number, row in numbered_rows])
    if len(times) < 2:
        raise WorkloadError(f"{path}: a trace needs at least two times, this one has {len(times)}")
    for (number, _), (before, after) in zip(numbered_rows[1:], pairwise(times), strict=True):
        if after < before:
            raise WorkloadError(f"{path}, line {number}: {after} comes after {before}; sort the trace by time")
    return times


def _column(path: Path, rows: list[list[str]], column: str | None) -> tuple[int, list[tuple[int, list[str]]]]:
    """Return the index of the column with the times, and the rows below a header with their line numbers."""
    numbered = list(enumerate(rows, start=1))
    if column is None:  # a first cell that is no time is a header
        return 0, numbered if _parse_time(rows[0][0] if rows[0] else "") is not None else numbered[1:]
    if column not in rows[0]:
        raise WorkloadError(f"{path}: no column {column!r} in the header {', '.join(rows[0])}")
    return rows[0].index(column), numbered[1:]


def _time(path: Path, number: int, row: list[str], index: int) -> float:
    """Return the time in column *index* of a row, in seconds; WorkloadError with the line *number* if it has none."""
    text = row[index].strip() if index < len(row) else ""
    if not text:
        raise WorkloadError(f"{path}, line {number}: no time here; a trace has no gaps")
    value = _parse_time(text)
    if value is None:
        raise WorkloadError(f"{path}, line {number}: {text!r} is neither a number of seconds nor a date and time")
    return value


def _parse_time(text: str) -> float | None:
    """Return the seconds of a number, or of an ISO date and time; None for any other text."""
    try:
        value = float(text)
    except ValueError:
        try:
            return datetime.fromisoformat(text.strip()).timestamp()
        except ValueError:
            return None
    return value if math.isfinite(value) else None

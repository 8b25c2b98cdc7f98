"""The result of a load test: the outcome of every request, the figures of each stream, and remarks.

``AnswerReader`` reads answers as they arrive and keeps only their class and their exit.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.shapes import written
from weft.http.client import Answer
from weft.load.payload import sent_threshold
from weft.reports.tables import largest_of
from weft.runtime.samples import Ints
from weft.runtime.tensors import DATATYPES, Array
from weft.workloads.exits import MOST_EXITS
from weft.workloads.requests import Stream, Workload

Floats = npt.NDArray[np.float64]
Statuses = npt.NDArray[np.int16]

OK = 200  # HTTP status of an answer that counts
BROKEN = 0
"""In place of a status: the connection failed before the answer was complete."""
LOST = -1
"""In place of a status: no answer by the end of the run."""

EXIT = "weft_exit"
"""The output with the exit of each row, counted from 1."""
WEFT_PREFIX = "weft_"
"""Prefix of the outputs that weft adds to a model's own."""

SHOWN_CHARACTERS = 200
"""Longest text of an error that is kept: one line in a report."""
MAX_ANSWER_BYTES = 1 << 24
"""Longest answer that is read for its class and exit; scores of classes take far less."""
NO_CLASS, NO_EXIT = -1, 0
"""What stands in columns of integers for an answer without a class, or without exits; exits count from 1."""

# a remark is made if the p99 of the send lag is above both: seconds, and share of the median latency
MOST_LAG_S = 1e-3
MOST_LAG_SHARE = 0.05


# Contents of answers


class Unreadable(ValueError):
    """An answer without the class or the exit that it should have."""


class _Output(NamedTuple):
    """A tensor of an answer, before decoding."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any
    """A list, or bytes."""

    def values(self) -> Array:
        """Decode the tensor; Unreadable if it holds no numbers, or too few for its shape."""
        dtype = DATATYPES.get(self.datatype)
        if dtype is None or dtype == np.object_:
            raise Unreadable(f"its output {self.name!r} is of the type {self.datatype!r}, which holds no numbers")
        try:
            return self._flat(dtype).reshape(self.shape)
        except (ValueError, TypeError, OverflowError):
            raise Unreadable(f"its output {self.name!r} does not hold {written(self.shape)} {self.datatype}") from None

    def _flat(self, dtype: np.dtype[Any]) -> Array:
        """Return the elements as a flat array; values beyond the range of a float become infinite."""
        if isinstance(self.data, bytes):
            return np.frombuffer(self.data, dtype.newbyteorder("<"))
        with np.errstate(over="ignore"):
            return np.asarray(self.data, dtype).ravel()


def announces_exits(metadata: Any) -> bool:
    """Tell whether the answers of a model have the output ``EXIT``, by its metadata."""
    outputs = metadata.get("outputs") if isinstance(metadata, dict) else None
    return isinstance(outputs, list) and any(isinstance(item, dict) and item.get("name") == EXIT for item in outputs)


def class_of(answer: Mapping[str, _Output]) -> int:
    """Return the index of the largest score in the model's first output; Unreadable if that has no scores."""
    output = next((output for name, output in answer.items() if not name.startswith(WEFT_PREFIX)), None)
    if output is None:
        raise Unreadable("it has no outputs")
    if not output.shape or output.shape[-1] < 2 or math.prod(output.shape[:-1]) != 1:
        raise Unreadable(
            f"its output {output.name!r} has the shape {written(output.shape)}, which is no score for each class"
        )
    return int(output.values().argmax())


def exit_of(answer: Mapping[str, _Output]) -> int:
    """Return the deepest exit that a row of the request took, from 1; Unreadable without the output ``EXIT``."""
    if EXIT not in answer:
        raise Unreadable(f"it has no output {EXIT!r}")
    rows: list[Any] = answer[EXIT].values().ravel().tolist()
    if not rows or not all(isinstance(row, int) and 1 <= row <= MOST_EXITS for row in rows):
        raise Unreadable(f"its output {EXIT!r} holds no exits, which are whole numbers from 1 to {MOST_EXITS}")
    return int(max(rows))


def outputs_of(answer: Answer) -> dict[str, _Output]:
    """Return the outputs of an answer by name, in order; Unreadable if it is no answer of the protocol."""
    if len(answer.body) >= MAX_ANSWER_BYTES:
        raise Unreadable(f"it has {MAX_ANSWER_BYTES} bytes or more")
    length = len(answer.body) if answer.json_bytes is None else answer.json_bytes
    if not 0 <= length <= len(answer.body):
        raise Unreadable("it does not say where its tensors begin")
    try:
        entries = json.loads(answer.body[:length])["outputs"]
        return {output.name: output for output in _parse_outputs(entries, answer.body, length)}
    except Unreadable:
        raise
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Unreadable(f"it is no answer of the protocol ({type(error).__name__}: {error})") from None


def _parse_outputs(entries: Any, body: bytes, position: int) -> Iterator[_Output]:
    """Yield the outputs of an answer; *entries*: the JSON list; *position*: where binary tensors start in *body*."""
    for entry in entries:
        name, shape = str(entry["name"]), tuple(int(size) for size in entry["shape"])
        if min(shape, default=0) < 0:
            raise Unreadable(f"its output {name!r} has the shape {list(shape)}")
        if "data" in entry:
            data = entry["data"]
        else:
            size = int(entry["parameters"]["binary_data_size"])
            if not 0 <= size <= len(body) - position:
                raise Unreadable(f"its output {name!r} of {size} bytes is not in it")
            data, position = body[position : position + size], position + size
        yield _Output(name, str(entry["datatype"]), shape, data)


@dataclass(frozen=True, slots=True, eq=False)
class AnswerContents:
    """Samples, exits and classes of a stream, request by request; None for what was not read."""

    sample: Ints | None = None
    """Number of the sample that was sent."""
    exit: Ints | None = None
    """The exit that the sample took, counted from 1; NO_EXIT without a readable answer."""
    prediction: Ints | None = None
    """The class in the answer; NO_CLASS without a readable answer."""
    labels: Ints | None = None
    """The right class of the sample."""
    exit_count: int = 0
    """Number of exits of the model, its end included; 0: unknown."""
    unreadable: int = 0
    """Answers with status 200 that could not be read."""
    problem: str = ""
    """Why the first of them could not be read."""

    def take(self, rows: Any) -> AnswerContents:
        """Return the contents of the requests *rows* (indices or a mask), in that order."""
        columns = {"sample": self.sample, "exit": self.exit, "prediction": self.prediction, "labels": self.labels}
        selected: Any = {key: None if values is None else values[rows] for key, values in columns.items()}
        return replace(self, **selected)


class AnswerReader:
    """Reads class and exit of the answers of one stream."""

    def __init__(self, labels: Ints | None, *, exits: bool) -> None:
        """labels: the right class of each sample, None: classes are not read. exits: whether exits are read."""
        self._labels, self._exits = labels, exits
        self.wanted = labels is not None or exits
        self._exit, self._class = array("h"), array("q")
        self._unreadable = 0
        self._problem = ""

    def expect(self, count: int) -> None:
        """Make room for the answers of *count* more requests."""
        if self._exits:
            self._exit.extend([NO_EXIT] * count)
        if self._labels is not None:
            self._class.extend([NO_CLASS] * count)

    def read(self, number: int, answer: Answer) -> None:
        """Read the answer with status 200 to the request *number*; count it if it cannot be read."""
        try:
            outputs = outputs_of(answer)
            if self._labels is not None:
                self._class[number] = class_of(outputs)
            if self._exits:
                self._exit[number] = exit_of(outputs)
        except Unreadable as problem:
            self._unreadable += 1
            self._problem = self._problem or str(problem)[:SHOWN_CHARACTERS]

    def contents(self, samples: Ints | None, exit_count: int) -> AnswerContents:
        """Return the contents of all answers.

        samples: the number of the sample that each request sent. exit_count: exits of the model, 0 if unknown.
        """
        return AnswerContents(
            sample=samples,
            exit=np.array(self._exit, np.int64) if self._exits else None,
            prediction=None if self._labels is None else np.array(self._class, np.int64),
            labels=None if self._labels is None or samples is None else self._labels[samples],
            exit_count=exit_count,
            unreadable=self._unreadable,
            problem=self._problem,
        )


# The result


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """The figures of a stream, over its requests after the warm-up."""

    scheduled: int
    answered: int
    """Answers with status 200."""
    statuses: Mapping[int, int]
    """Status -> number of answers, 200 included."""
    broken: int
    lost: int
    offered_per_s: float
    answered_per_s: float
    met: int
    """Answered with 200 within the deadline."""
    met_share: float | None
    """Share of all scheduled requests; None without requests or without a deadline."""
    mean_s: float | None
    """Latency of answers with status 200, from the scheduled time; so are the percentiles."""
    p50_s: float | None
    p90_s: float | None
    p95_s: float | None
    p99_s: float | None
    p999_s: float | None
    max_s: float | None
    lag_p99_s: float | None
    """Send lag: from the scheduled time until the request was handed to a connection; part of every latency."""
    lag_max_s: float | None
    accuracy: float | None = None
    """Share of the answers with status 200 whose class is the label of the sample; None without labels."""
    exit_shares: tuple[float, ...] | None = None
    """Share of the answers that took each exit, the end last; None if answers have no exits."""
    p99_max_of: int | None = None
    """Number of answers if they are fewer than 100, so that p99 is their maximum; else None."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamLoad:
    """The requests of one stream in the order of their scheduled times, with their outcomes."""

    stream: Stream
    scheduled_s: Floats
    """From the start of the run."""
    lag_s: Floats
    """Send lag; of a request that was never sent, the time until the end of the run."""
    latency_s: Floats
    """NaN without an answer."""
    status: Statuses
    """An HTTP status, BROKEN or LOST."""
    messages: Mapping[int, str]
    """Status -> error text of the first answer with it, for all but 200."""
    figures: StreamFigures
    contents: AnswerContents = field(default_factory=AnswerContents)
    """Contents of the answers, if they were read."""

    def __repr__(self) -> str:
        return f"StreamLoad({self.stream.model}: {self.figures.answered} of {self.figures.scheduled} answered)"

    def as_dict(self, *, latencies: bool) -> dict[str, object]:
        """Return the JSON of docs/formats.md; *latencies*: with lists, one value per request."""
        members: dict[str, object] = {
            "model": self.stream.model,
            "deadline_s": None if self.stream.deadline_ms is None else self.stream.deadline_ms / 1e3,
            "exit_threshold": sent_threshold(self.stream),
            **asdict(self.figures),
            "statuses": {str(status): count for status, count in self.figures.statuses.items()},
            "messages": {str(status): text for status, text in self.messages.items()},
        }
        if latencies:
            members["scheduled_s"] = self.scheduled_s.tolist()
            members["lag_s"] = self.lag_s.tolist()
            members["latency_s"] = [None if np.isnan(value) else value for value in self.latency_s.tolist()]
            members["status"] = self.status.tolist()
            contents = self.contents
            for key, values, absent in (
                ("sample", contents.sample, None),
                ("exit", contents.exit, NO_EXIT),
                ("prediction", contents.prediction, NO_CLASS),
            ):
                if values is not None:
                    members[key] = [None if value == absent else value for value in values.tolist()]
        return members


@dataclass(frozen=True, slots=True, eq=False)
class LoadResult:
    """A whole run."""

    url: str
    server: Mapping[str, Any]
    """The server's metadata."""
    workload: Workload
    deadlines: str
    streams: tuple[StreamLoad, ...]
    started: str
    """Date and time, UTC."""
    elapsed_s: float
    """Until the last answer, or the end of the grace period."""
    transport_s: float
    """Median round trip of a health probe, which costs the server almost no time."""
    cpu_s: float
    """Processor time of the generator while it sent and received."""
    connections: int
    """Connections opened."""
    held_back: int
    """Requests that had to wait because the limit of connections was reached."""
    overhead_s: tuple[float | None, ...] = ()
    """Of each stream: time of a request besides queueing and computing, if it was measured."""
    profile: Any = None
    """Measured segments of the server's models, if it is a weft server."""
    remarks: tuple[str, ...] = field(init=False)

    def __repr__(self) -> str:
        return f"LoadResult({self.url}: {self.requests} requests in {self.elapsed_s:.1f} s)"

    def __post_init__(self) -> None:
        object.__setattr__(self, "remarks", tuple(_remarks(self)))

    @property
    def requests(self) -> int:
        """Number of scheduled requests, the warm-up's included."""
        return sum(len(stream.status) for stream in self.streams)

    def as_dict(self, *, latencies: bool = True) -> dict[str, object]:
        """Return the JSON of docs/formats.md; *latencies*: with lists per stream, one value per request."""
        overheads_s = self.overhead_s or (None,) * len(self.streams)
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
                {**stream.as_dict(latencies=latencies), "overhead_s": overhead_s}
                for stream, overhead_s in zip(self.streams, overheads_s, strict=True)
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
    status: Statuses,
    messages: Mapping[int, str],
    contents: AnswerContents | None = None,
) -> StreamLoad:
    """Sort a stream's requests by their scheduled times, and compute the figures of those after the warm-up.

    Arguments are as in ``StreamLoad``, in any order of the requests.
    """
    order = np.argsort(scheduled_s, kind="stable")
    after_warmup = order[scheduled_s[order] >= workload.warmup_s]
    contents = contents or AnswerContents()
    figures = _figures(
        stream.deadline_ms,
        workload.duration_s - workload.warmup_s,
        lag_s[after_warmup],
        latency_s[after_warmup],
        status[after_warmup],
        contents.take(after_warmup[status[after_warmup] == OK]),
    )
    requests = scheduled_s[order], lag_s[order], latency_s[order], status[order]
    return StreamLoad(stream, *requests, dict(messages), figures, contents.take(order))


def _figures(
    deadline_ms: float | None,
    span_s: float,
    lag_s: Floats,
    latency_s: Floats,
    status: Statuses,
    contents: AnswerContents,
) -> StreamFigures:
    """Compute the figures of the requests after the warm-up.

    span_s: length of the run after the warm-up. contents: those of the answers with status 200.
    """
    statuses, counts = np.unique(status, return_counts=True)
    count_of = {int(code): int(count) for code, count in zip(statuses, counts, strict=True)}
    answered_s = latency_s[status == OK]
    limit_s = np.inf if deadline_ms is None else deadline_ms / 1e3
    met = int(np.count_nonzero(answered_s <= limit_s))
    percentiles_s = observed_quantiles(answered_s, (0.5, 0.9, 0.95, 0.99, 0.999, 1.0))
    return StreamFigures(
        scheduled=len(status),
        answered=len(answered_s),
        statuses={code: count for code, count in count_of.items() if code not in (BROKEN, LOST)},
        broken=count_of.get(BROKEN, 0),
        lost=count_of.get(LOST, 0),
        offered_per_s=len(status) / span_s,
        answered_per_s=len(answered_s) / span_s,
        met=met,
        met_share=met / len(status) if len(status) and deadline_ms is not None else None,
        mean_s=float(answered_s.mean()) if len(answered_s) else None,
        **dict(zip(("p50_s", "p90_s", "p95_s", "p99_s", "p999_s", "max_s"), percentiles_s, strict=True)),
        **dict(zip(("lag_p99_s", "lag_max_s"), observed_quantiles(lag_s, (0.99, 1.0)), strict=True)),
        accuracy=_accuracy(contents),
        exit_shares=_exit_shares(contents),
        p99_max_of=largest_of(len(answered_s)),
    )


def _accuracy(contents: AnswerContents) -> float | None:
    """Return the share of answers with the right class; an unreadable answer counts as wrong. None without classes."""
    if contents.prediction is None or not len(contents.prediction):
        return None
    return float((contents.prediction == contents.labels).mean())


def _exit_shares(contents: AnswerContents) -> tuple[float, ...] | None:
    """Return the share of readable answers that took each exit, the end last; None if there are none."""
    taken = np.empty(0, np.int64) if contents.exit is None else contents.exit[contents.exit != NO_EXIT]
    if not len(taken):
        return None
    counts = np.bincount(taken, minlength=contents.exit_count + 1)[1:]  # exits count from 1
    return tuple((counts / len(taken)).tolist())


def observed_quantiles(values: Floats, shares: Sequence[float]) -> list[float | None]:
    """Return the quantiles of *values* at *shares* (0 to 1): observed values, not interpolated; None without values."""
    if not len(values):
        return [None] * len(shares)
    quantiles: list[float | None] = np.quantile(values, shares, method="inverted_cdf").tolist()
    return quantiles


def _remarks(result: LoadResult) -> list[str]:
    """Return sentences about what limits the meaning of a result: errors, unreadable answers, a slow generator."""
    remarks = []
    for load in result.streams:
        model = load.stream.model
        if load.stream.deadline_ms is None:
            remarks.append(f"{model}: no deadline was given, so none of its answers is late")
        for status, text in load.messages.items():
            outcome = {BROKEN: "connection failed"}.get(status, f"status {status}")
            remarks.append(f"{model}: {outcome}: {text}")
        if load.contents.unreadable:
            remarks.append(
                f"{model}: {load.contents.unreadable} answers could not be read, the first because "
                f"{load.contents.problem}"
            )
        if remark := _lag_remark(load):
            remarks.append(remark)
    if result.held_back:
        remarks.append(
            f"{result.held_back} requests waited because all connections were busy; more of them: --connections"
        )
    return remarks


def _lag_remark(load: StreamLoad) -> str | None:
    """Return the remark that requests were sent too late; None if the send lag is negligible."""
    lag_s, median_s = load.figures.lag_p99_s, load.figures.p50_s
    if lag_s is None or (lag_s <= MOST_LAG_S and (median_s is None or lag_s <= MOST_LAG_SHARE * median_s)):
        return None
    share = f", {lag_s / median_s:.0%} of p50," if median_s else ""
    return (
        f"{load.stream.model}: the generator was a bottleneck: send lag p99 {lag_s * 1e3:.2f} ms{share} "
        "is part of its latencies"
    )

"""Early exits of a workload's streams: the share of requests per exit, checked against the exits of the model.

While serving, thresholds and answers decide where a request leaves. A plan assumes the shares that the workload states
(``exit_rates``) or that a record of the model's answers shows (``exit_record``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.base.errors import WorkloadError, unknown_name
from weft.runtime.model_signature import read_exits, read_outputs
from weft.serving.config import ModelConfig
from weft.workloads.requests import Stream, Workload, parse_workload

SETTINGS = ("exit_threshold", "exit_floor")
"""Keys of a stream that are also settings of its model."""


class ServedFile(NamedTuple):
    """A model file and its settings in the server."""

    path: Path
    config: ModelConfig


def exit_settings(stream: Stream, path: Path, config: ModelConfig) -> dict[str, Any]:
    """Return the model settings that a stream states; raises WorkloadError if the file has no such exits."""
    if isinstance(stream.exits, int):
        raise WorkloadError(
            f"{stream.model}: exits = {stream.exits} places exits in a simulated model, and a plan serves the file as "
            "it is; name its outputs that are exits, the end last, as exits=early+end"
        )
    settings: dict[str, Any] = {"exits": list(stream.exits)} if stream.exits else {}
    settings |= {key: getattr(stream, key) for key in SETTINGS if key in stream.model_fields_set}
    if stream.exit_threshold <= 0:
        raise WorkloadError(f"{stream.model}: exit_threshold = {stream.exit_threshold:g} must be above 0")
    stated = [
        *settings,
        *(["exit_rates"] if stream.exit_rates else []),
        *(["exit_record"] if stream.exit_record else []),
    ]
    if stated and len(exit_names(path, config.model_copy(update=settings))) < 2:
        raise WorkloadError(
            f"{stream.model}: {stated[0]} is given, and the model names no exits; name its outputs that are, the end "
            "last, as exits=early+end, or leave it out"
        )
    return settings


def exit_names(path: Path, config: ModelConfig) -> tuple[str, ...]:
    """Return the outputs at which requests may leave a model, the end last; fewer than two if it has no exits."""
    if not config.exits:
        return read_exits(path)
    for name in config.exits:
        if name not in (known := read_outputs(path)):
            raise WorkloadError(f"{path.name}: exits: {unknown_name('output', name, known)}")
    return tuple(config.exits)


def with_exit_settings(workload: Workload, served: Mapping[str, ServedFile]) -> Workload:
    """Return the workload with the exit settings of its models; WorkloadError if ``exit_rates`` do not fit them.

    served: model -> its file.
    """
    exit_keys = [_exit_keys(stream, served[stream.served_name]) for stream in workload.stream]
    if any(exit_keys):
        raw = workload.model_dump(exclude_unset=True)
        streams = [{**row, **keys} for row, keys in zip(raw["stream"], exit_keys, strict=True)]
        workload = parse_workload({**raw, "stream": streams}, where="the settings of its models")
    for index, stream in enumerate(workload.stream):
        if stream.leaves:
            # raises WorkloadError if the number of shares differs
            workload.exit_rates(index, len(exit_names(*served[stream.served_name])) - 1)
    return workload


def _exit_keys(stream: Stream, file: ServedFile) -> dict[str, Any]:
    """Return the keys of a stream that follow from its model's settings: the exit record and the thresholds."""
    config = file.config
    path = file.path.parent.absolute() / str(config.exit_record)
    # what the stream states itself takes precedence over the record of its model
    record = {} if stream.leaves or config.exit_record is None else {"exit_record": str(path)}
    if not record and stream.exit_record is None:
        return {}
    floor = {} if config.exit_floor is None else {"exit_floor": config.exit_floor}
    is_set = "exit_threshold" in config.model_fields_set
    threshold = {"exit_threshold": min(1.0, config.exit_threshold)} if is_set else {}  # streams allow at most 1
    return {**record, **threshold, **floor}


def soonest_rates(workload: Workload) -> tuple[tuple[float, ...], ...]:
    """Return, per stream, the share that leaves at each exit at the lowest threshold; empty if all run to the end."""
    return tuple(_soonest_rates(workload, index, stream) for index, stream in enumerate(workload.stream))


def _soonest_rates(workload: Workload, index: int, stream: Stream) -> tuple[float, ...]:
    """Return ``soonest_rates`` of a stream; only with a record and an exit floor, its threshold can sink."""
    record = workload.record(index) if stream.exit_floor is not None else None
    if record is None or stream.exit_floor is None:
        return workload.exit_rates(index)
    return record.rates(stream.exit_floor)


def reaching(rates: Sequence[float], exits: Sequence[int], segments: int) -> list[float]:
    """Return, per segment, the share of the requests that reach it.

    rates: share that leaves at each exit, the end last. exits: number of segments before each exit, without the end.
    """
    ends = [*exits, segments]
    return [
        sum(rate for rate, end in zip(rates, ends, strict=True) if end > segment) if rates else 1.0
        for segment in range(segments)
    ]

"""Early exits: what a stream says of who leaves its model before the end, fitted to the exits that the model has.

A request takes the exits that its server's settings and its own answer lead it to; a plan only counts on the shares
that somebody states (``exit_rates``) or that a record of the model shows (``exit_record``).
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
"""Keys of a stream that are settings of its model, too."""


class ServedFile(NamedTuple):
    """A model file and the settings it is served with."""

    path: Path
    config: ModelConfig


def exit_settings(stream: Stream, path: Path, config: ModelConfig) -> dict[str, Any]:
    """The settings of a model that a stream states; refused where the file has no exits that they could be of."""
    if isinstance(stream.exits, int):
        raise WorkloadError(
            f"{stream.model}: exits = {stream.exits} places exits in a simulated model, and a plan serves the file as "
            "it is; name its outputs that are exits, the end last, as exits=early+end"
        )
    found: dict[str, Any] = {"exits": list(stream.exits)} if stream.exits else {}
    found |= {key: getattr(stream, key) for key in SETTINGS if key in stream.model_fields_set}
    if stream.exit_threshold <= 0:
        raise WorkloadError(f"{stream.model}: exit_threshold = {stream.exit_threshold:g} must be above 0")
    stated = [*found, *(["exit_rates"] if stream.exit_rates else []), *(["exit_record"] if stream.exit_record else [])]
    if stated and len(exit_names(path, config.model_copy(update=found))) < 2:
        raise WorkloadError(
            f"{stream.model}: {stated[0]} is given, and the model names no exits; name its outputs that are, the end "
            "last, as exits=early+end, or leave it out"
        )
    return found


def exit_names(path: Path, config: ModelConfig) -> tuple[str, ...]:
    """The outputs at which requests may leave a model, the end last; none, or the end alone, where it has no exits."""
    if not config.exits:
        return read_exits(path)
    for name in config.exits:
        if name not in (known := read_outputs(path)):
            raise WorkloadError(f"{path.name}: exits: {unknown_name('output', name, known)}")
    return tuple(config.exits)


def with_leaving(workload: Workload, served: Mapping[str, ServedFile]) -> Workload:
    """The workload with what its models' own settings say of who leaves; refused where shares do not fit the exits."""
    said = [_leaving(stream, served[stream.served_name]) for stream in workload.stream]
    found = _updated(workload, said) if any(said) else workload
    for index, stream in enumerate(found.stream):
        if stream.leaves:
            found.exit_rates(index, len(exit_names(*served[stream.served_name])) - 1)
    return found


def _updated(workload: Workload, said: Sequence[Mapping[str, Any]]) -> Workload:
    """The workload with more keys of its streams, all of them checked."""
    raw = workload.model_dump(exclude_unset=True)
    streams = [{**row, **more} for row, more in zip(raw["stream"], said, strict=True)]
    return parse_workload({**raw, "stream": streams}, "the settings of its models")


def _leaving(stream: Stream, file: ServedFile) -> dict[str, Any]:
    """Keys of a stream that its model's settings state: the record beside it, and how sure answers must be by it."""
    config = file.config
    own = {} if stream.leaves or config.exit_record is None else {"exit_record": str(_beside(file))}
    if not own and stream.exit_record is None:
        return {}
    floor = {} if config.exit_floor is None else {"exit_floor": config.exit_floor}
    sure = {"exit_threshold": min(1.0, config.exit_threshold)} if "exit_threshold" in config.model_fields_set else {}
    return {**own, **sure, **floor}


def _beside(file: ServedFile) -> Path:
    return file.path.parent.absolute() / str(file.config.exit_record)


def soonest_rates(workload: Workload) -> tuple[tuple[float, ...], ...]:
    """Of each stream, the share that leaves by each exit, as soon as that may be; none where all go to the end."""
    return tuple(_soonest(workload, index, stream) for index, stream in enumerate(workload.stream))


def _soonest(workload: Workload, index: int, stream: Stream) -> tuple[float, ...]:
    record = workload.record(index) if stream.exit_floor is not None else None
    if record is None or stream.exit_floor is None:
        return workload.exit_rates(index)
    return record.rates(stream.exit_floor)


def reaching(rates: Sequence[float], exits: Sequence[int], segments: int) -> list[float]:
    """The share of the requests that computes each segment."""
    ends = [*exits, segments]
    return [
        sum(rate for rate, end in zip(rates, ends, strict=True) if end > place) if rates else 1.0
        for place in range(segments)
    ]

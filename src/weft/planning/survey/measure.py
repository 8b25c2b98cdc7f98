"""Measure this machine through a server: clients keep its lanes busy, with one model at a time and with all of them.

*alone*: with nothing else running. *together*: all models on all lanes. *in turns*: all models alternate on one lane.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import hypot, inf
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError, ShapeNeeded
from weft.base.shapes import Shapes, example, written
from weft.base.version import __version__, runtime_version
from weft.devices import Host, HostModel
from weft.devices.conditions import Conditions
from weft.devices.host import HOST, Gates, lane_cores, usable_cores
from weft.load import LoadResult, run_load
from weft.models.stitched_files import file_and_task
from weft.planning.survey.first_numbers import FirstNumbers, Surveyed
from weft.planning.survey.processor_time import ConditionsWatch
from weft.planning.survey.spans import (
    SeenSpan,
    hand_overs,
    losses,
    mean_times,
    overlaps_of,
    read_spans,
    runs,
)
from weft.runtime.device_kinds import device_called, device_kind
from weft.runtime.lanes import ABORT_FROM_TICKS
from weft.runtime.stitched import tasks_in
from weft.serving.dispatch import QUEUE_FULL
from weft.serving.held_memory import held_bytes
from weft.serving.isolation import THREADS
from weft.serving.process import ServerProcess
from weft.workloads.requests import Workload, parse_workload, served_name

Progress = Callable[[str, int, int], None]
"""Called with the subject of the present measurement, the measurements done, and their number."""

IsLeftOut = Callable[[FirstNumbers], bool]
"""Decides by the first numbers of a division of the cores whether its remaining measurements are skipped."""

TOGETHER_S = 5.0
"""Least seconds of the measurement of all models together; a single model is measured a third of this per batch size.
"""
ROUNDS = 3
"""Largest number of rounds. A round measures every model alone and then all lanes together, so that drifts of the
processor's clock cancel out."""
KNOWN_TO = 0.05
"""Relative standard error of a model's slow-down, averaged over two agreeing rounds, at which no third is needed. A
plan treats loads that differ by less as equal (``planning.deciding``)."""
WARM_RUNS, WARM_S, RAN_BEFORE_S = 10, 0.3, 0.1
"""What is left out at the beginning of a measurement, while connections and caches are cold: 10 runs of each model that
the server has not run before, at most the first and at least the second number of seconds."""
LEAST_RUNS, LONGEST_S = 12, 60.0
"""A measurement lasts until it has this number of runs of each model, at most this number of seconds."""
MOST_RUNS, MOST_GAPS = 400, 800
"""Largest numbers of runs and gaps in a ``Host``: enough for percentiles, and its file stays small."""
BUSY, LEAST_RATE = 0.75, 0.2
"""Load of the lanes, as a share of their capacity, when all models are measured together; least rate of a model, in
requests per second."""
OVERHEADS, PAUSE_S = 15, 0.02
"""Number of single requests that measure the overhead besides segments, and the pause before each. A request that
arrives by itself meets a sleeping server and cold caches: for a 5.3 ms model on two busy cores of aarch64 the overhead
was 1.6 to 1.7 ms after such pauses, 1.6 to 3.9 ms at 12 to 40 requests/s, 1.2 to 1.4 ms back to back (10th
percentiles)."""
NO_DEADLINE_MS = 1e7
"""A deadline of almost three hours, so that no request is dropped, ordered or refused because of its deadline."""
UNREACHABLE_CONFIDENCE = 2.0
"""Threshold of exits during a measurement; confidences are at most 1, so all requests run to the end."""


def failures(result: LoadResult) -> list[str]:
    """Return the server's error messages, except for full queues.

    Queues are full if the machine has become slower since its capacity was measured; its lanes are then as busy as
    they should be.
    """
    errors = (f"{status}: {text}" for stream in result.streams for status, text in stream.messages.items())
    return [error for error in errors if QUEUE_FULL not in error]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure."""

    source: str
    """An argument of ``weft serve``: a file or a known name."""
    shapes: Shapes = field(default_factory=dict)
    """Input -> shape of a request with one sample, for inputs with free dimensions."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Input -> the value that this input must have in all requests, such as a sampling rate."""

    @property
    def name(self) -> str:
        return served_name(self.source)

    @property
    def file(self) -> str:
        """The argument of ``weft serve``; for a model in a stitched file, the whole file."""
        return file_and_task(self.source)[0]


def survey(
    subjects: Sequence[Subject],
    *,
    lanes: int,
    device: str = HOST,
    threads: int = 1,
    seconds: float = TOGETHER_S,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Host:
    """Measure models on this machine under ``weft serve`` with a number of lanes.

    seconds: duration of the measurement of all models together; a third of it for each model alone and batch size.
    """
    measured = survey_lanes(
        subjects, lanes=(lanes,), device=device, threads=threads, seconds=seconds, cache=cache, progress=progress
    )
    (host,) = (surveyed.host for surveyed in measured)
    assert host is not None, "only lanes that may be left out have no host"
    return host


def survey_lanes(
    subjects: Sequence[Subject],
    *,
    lanes: Sequence[int],
    device: str = HOST,
    threads: int = 1,
    seconds: float = TOGETHER_S,
    cache: Path | None = None,
    repository: Path | None = None,
    isolation: str = THREADS,
    progress: Progress | None = None,
    left_out: IsLeftOut | None = None,
) -> Iterator[Surveyed]:
    """Measure models with each number of lanes in *lanes*; quantities that do not depend on lanes are measured once.

    Numbers of lanes are yielded in ascending order as soon as each is measured.

    device: the server's device. threads: per lane. seconds: as in ``survey``. cache: the server's.
    repository: the server's repository, instead of the sources of the models.
    isolation: where models run, as in the server's setting of that name.
    left_out: decides by the first numbers whether the rest is not measured; by default all is.
    """
    names = [subject.name for subject in subjects]
    if not names:
        raise InputError("nothing to measure: name models or .onnx files")
    if len(set(names)) < len(names):
        raise InputError(f"two models have one name: {', '.join(names)}; rename a file")
    if not lanes or min(lanes) < 1 or threads < 1 or not 0 < seconds <= LONGEST_S:
        shown = ", ".join(map(str, lanes))
        raise InputError(f"lanes = {shown}, threads = {threads}, seconds = {seconds:g} (at most {LONGEST_S:g})")
    # Of each stitched file one model is measured, since all its models have the same times.
    measured: dict[str, Subject] = {}
    for subject in subjects:
        _require_task(subject)
        measured.setdefault(subject.file, subject)
    measured_names = {subject.name: measured[subject.file].name for subject in subjects}
    lane_counts, one_per_file = sorted({*lanes}), tuple(measured.values())
    with _open_cache(cache) as folder:
        lane_survey = _Survey(
            one_per_file, lane_counts, threads, seconds, folder, repository, progress, isolation, device
        )
        if left_out is not None:
            lane_survey.left_out = lambda numbers: left_out(numbers.with_stitched(measured_names))
        for first_numbers, host in lane_survey.results():
            yield Surveyed(first_numbers.with_stitched(measured_names), host and with_stitched(host, measured_names))


def time_models(
    subjects: Sequence[Subject],
    *,
    device: str = HOST,
    threads: int = 1,
    isolation: str = THREADS,
    seconds: float = 2.0,
    cache: Path | None = None,
    repository: Path | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, float], Conditions]:
    """Return the median seconds of whole runs of each model on one lane, and the conditions of the measurement.

    The models alternate, each with one request at a time, as in a survey for ``HostModel.times_s`` at batch 1. Of each
    stitched file one model is timed.
    """
    with _open_cache(cache) as folder:
        return _Survey(
            subjects, (1,), threads, seconds, folder, repository, progress, isolation, device
        ).times_in_turns()


def _require_task(subject: Subject) -> None:
    """Raise InputError if the subject is a stitched file instead of one of the models (tasks) in it."""
    path = Path(subject.source)
    tasks = [task.name for task in tasks_in(path)] if path.suffix == ".onnx" and path.is_file() else []
    if tasks:
        names = ", ".join(tasks)
        raise InputError(f"{path} holds {names}; say which of them is asked for, as {path}/{tasks[0]}")


def with_stitched(host: Host, measured: Mapping[str, str]) -> Host:
    """Return *host* with all models of stitched files; *measured*: model -> the measured model of the same file."""
    models = {}
    for name, source in measured.items():
        loses = host.models[source].loses  # other model -> share of speed lost to it
        all_loses = {other: loses[others_source] for other, others_source in measured.items() if loses}
        models[name] = host.models[source].model_copy(update={"loses": all_loses})
    return host.model_copy(update={"models": models})


@contextmanager
def _open_cache(cache: Path | None) -> Iterator[Path]:
    """Yield the folder in which servers cache cut models: *cache*, or a temporary folder."""
    if cache is not None:
        yield cache
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@dataclass
class _LoadMeasurement:
    """The result of sending a load: the spans on the lanes, the interval without the warm-up, and the answers."""

    all_spans: list[SeenSpan]
    """Including the warm-up."""
    since_s: float
    until_s: float
    result: LoadResult

    @property
    def spans(self) -> list[SeenSpan]:
        """The spans between the warm-up and the end of the load; all spans if these are too few."""
        inside = [span for span in self.all_spans if span.start_s >= self.since_s and span.end_s <= self.until_s]
        return inside if len(inside) >= LEAST_RUNS else self.all_spans


@dataclass(frozen=True)
class _OneLane:
    """Measurements on a single lane, which the hosts of all numbers of lanes are built from. Mappings are by model."""

    alone: Mapping[str, HostModel]
    """Times at all batch sizes, with nothing else running."""
    in_turns: Mapping[str, HostModel]
    """The same models with their times where models alternate."""
    overheads: Mapping[str, Sequence[float]]
    """Seconds of single requests besides their segments."""
    together: _Together


@dataclass(frozen=True)
class _Together:
    """Measurements of all models on all lanes; with several lanes, also of each model alone, once per round."""

    rounds: Sequence[_LoadMeasurement]
    single: Mapping[str, Sequence[_LoadMeasurement]]
    """Model -> its measurements alone; empty for a single lane."""
    gaps_s: Sequence[float]
    """Seconds between successive segments on a lane."""
    memory_bytes: int | None


@dataclass
class _Survey:
    """The measurements of a survey; servers are started and stopped as needed."""

    subjects: Sequence[Subject]
    lanes: Sequence[int]
    """Numbers of lanes, ascending; there is a host for each."""
    threads: int
    seconds: float
    cache: Path
    repository: Path | None
    progress: Progress | None
    isolation: str = THREADS
    device: str = HOST
    left_out: IsLeftOut = field(default=lambda first_numbers: False)
    done: int = 0
    """Finished measurements."""
    skipped: int = 0
    """Measurements that turned out not to be needed; the progress counts them as done."""
    warm: set[tuple[str, str]] = field(default_factory=set)
    """URL of a server, and a model that it has run."""
    served: dict[str, Any] = field(default_factory=dict)
    """Model -> the server's profile of it."""
    full_gaps_s: list[float] = field(default_factory=list)
    """Gaps between segments on full lanes."""
    bodies: dict[str, str] = field(default_factory=dict)
    """Name of a backbone in the trace -> name of its subject."""
    conditions_watch: ConditionsWatch = field(default_factory=ConditionsWatch)
    """Observes the load of other processes during the measurements."""
    repeats_s: dict[str, list[float]] = field(default_factory=dict)
    """Model -> median times of single requests, one for each measurement of the model alone."""

    def results(self) -> Iterator[Surveyed]:
        """Yield the first numbers for each number of lanes, with the host unless this number of lanes is left out."""
        one_lane = None
        with ExitStack() as single:
            server = single.enter_context(self._server(1))
            self._read_profiles(server)
            alone = {subject.name: self._single(server, subject) for subject in self.subjects}
            first_numbers, one_lane_streams = self._first_numbers(server, 1, alone)
            gaps_s = self.full_gaps_s  # those of one lane, which other numbers of lanes replace
            if 1 not in self.lanes or not self.left_out(first_numbers):
                one_lane = self._one_lane(server, alone, one_lane_streams)
            # On cores, the idle server costs nothing, and may be needed again; a device may lack memory for two.
            stays = one_lane is None and self.device == HOST
            if not stays:
                single.close()
            for lanes in self.lanes:
                together = one_lane.together if one_lane and lanes == 1 else None
                if lanes > 1:
                    with self._server(lanes) as wide_server:
                        first_numbers, streams = self._first_numbers(wide_server, lanes, alone)
                        together = None if self.left_out(first_numbers) else self._rounds(wide_server, lanes, streams)
                if together is None:
                    self.skipped += self._round_steps if lanes > 1 else 0
                    yield Surveyed(first_numbers, None)
                    continue
                if one_lane is None:  # a single lane was left out, but the hosts of more lanes need its measurements
                    self.full_gaps_s = gaps_s
                    server = server if stays else single.enter_context(self._server(1))
                    one_lane = self._one_lane(server, alone, one_lane_streams)
                    single.close()
                yield Surveyed(first_numbers, self._host(lanes, together, one_lane))
        self.skipped = self._steps - self.done
        self._report_progress("done")

    def times_in_turns(self) -> tuple[dict[str, float], Conditions]:
        """Return each model's median seconds of a whole run while models alternate on one lane, and the conditions."""
        with self._server(1) as server:
            self._read_profiles(server)
            # models of a stitched file share one backbone, and only one of them is timed
            timed = [subject for subject in self.subjects if subject.name in self.bodies.values()]
            streams = [self._closed_stream(subject, 1) for subject in timed]
            measurement = self._measure_load(server, streams, "all models in turns")
        for subject in timed:
            self._record_single_runs(subject, measurement)
        return {name: median(times) for name, times in self.repeats_s.items()}, self.conditions_watch.conditions()

    def _host(self, lanes: int, together: _Together, one_lane: _OneLane) -> Host:
        """Return the host that the measurements of *lanes* lanes describe."""
        models = self._with_round_times(together, one_lane)
        spans = [span for measurement in together.rounds for span in measurement.spans]
        lost = losses(spans, models, self._cores) if lanes > 1 else {}
        spreads = self._spreads(spans, models, lost)
        return Host(
            name=self.device,
            source=_source(self.device),
            conditions=self.conditions_watch.conditions(self.repeats_s),
            cores=usable_cores(),
            lanes=lanes,
            threads=self.threads,
            isolation=self.isolation,
            ahead=self._queued_segments,
            memory_bytes=together.memory_bytes,
            hand_over_s=_round_times(together.gaps_s[:MOST_GAPS]),
            gates=self._gates(),
            abort_from_s=ABORT_FROM_TICKS / 1e9,
            models={
                name: model.model_copy(
                    update={
                        "spread": spreads[name],
                        "overhead_s": _round_times(one_lane.overheads[name]),
                        "loses": {other: round(share, 4) for other, share in lost.get(name, {}).items()},
                    }
                )
                for name, model in models.items()
            },
        )

    def _gates(self) -> Gates | None:
        """Return the costs of gates if the server has them (WEFT_GATES=true): the medians over its models."""
        gates = [Gates(**(profile["gates"] or {})) for profile in self.served.values() if profile.get("gated")]
        if not gates:
            return None
        leave_us, launch_us = median(one.leave_us for one in gates), median(one.launch_us for one in gates)
        return Gates(gate_us=0, leave_us=leave_us, launch_us=launch_us)  # the times of segments contain their gates

    @property
    def _cores(self) -> int:
        return lane_cores(usable_cores(), self.threads)

    # Measurements

    def _single(self, server: ServerProcess, subject: Subject) -> HostModel:
        """Measure the times of a model's segments for single requests, with nothing else running."""
        profile = self.served[subject.name]
        return HostModel(
            segments=tuple(profile["segments"]),
            max_batch=profile["max_batch"],
            times_s={1: self._batch_times(server, subject, 1)},
            exits=tuple(profile["exits"]),
            engine=profile.get("engine", ""),
            engines_s=profile.get("engines_s", {}),
        )

    def _by_batch(self, server: ServerProcess, subject: Subject, model: HostModel) -> HostModel:
        """Add the times of the other batch sizes."""
        sizes = [batch for batch in _batch_sizes(model.max_batch) if batch > 1]
        times_s = {batch: self._batch_times(server, subject, batch) for batch in sizes}
        return model.model_copy(update={"times_s": model.times_s | times_s})

    def _batch_times(self, server: ServerProcess, subject: Subject, batch: int) -> tuple[float, ...]:
        """Measure the mean seconds of each segment of a model at a batch size, with nothing else running."""
        profile = self.served[subject.name]
        what = f"{subject.name}, batch {batch}" if profile["max_batch"] > 1 else subject.name
        measurement = self._measure_load(server, [self._closed_stream(subject, 1, batch)], what, self.seconds / 3)
        if batch == 1:
            self._record_single_runs(subject, measurement)
        whole_runs = [run for run in self._runs(measurement, subject.name) if run[0].rows == batch]
        if not whole_runs:
            raise InputError(f"{subject.name}: no run of batch {batch} was seen to its end; measure for longer")
        return mean_times(whole_runs)

    def _runs(self, measurement: _LoadMeasurement, name: str) -> list[list[SeenSpan]]:
        return runs(measurement.spans, name, len(self.served[name]["segments"]))

    def _first_numbers(
        self, server: ServerProcess, lanes: int, alone: Mapping[str, HostModel]
    ) -> tuple[FirstNumbers, list[dict[str, Any]]]:
        """Measure the throughput of saturated lanes; the second result are streams that load the lanes to ``BUSY``.

        In these streams all models have the same share of the lanes. The lanes are not loaded fully, since a server
        with always busy lanes misses deadlines.
        """
        # enough that requests of every model wait at all times
        clients = [lanes + model.max_batch + (index == 0) for index, model in enumerate(alone.values())]
        streams = [self._closed_stream(subject, count) for subject, count in zip(self.subjects, clients, strict=True)]
        full = self._measure_load(server, streams, f"capacity of {lanes} lane{'s' * (lanes > 1)}", self.seconds / 3)
        self.full_gaps_s = hand_overs(full.spans)
        answered = {
            name: stream.figures.answered_per_s for name, stream in zip(alone, full.result.streams, strict=True)
        }
        # in seconds of single runs per second, so more than the number of lanes if batches help
        model_load = BUSY * sum(rate * alone[name].total_s(1) for name, rate in answered.items()) / len(alone)
        busy_streams = [
            self._stream(subject) | {"rate": max(LEAST_RATE, model_load / alone[subject.name].total_s(1))}
            for subject in self.subjects
        ]
        took_s = {name: sum(span.took_s for span in full.spans if span.model == name) for name in alone}
        first_numbers = FirstNumbers(
            lanes=lanes,
            threads=self.threads,
            alone_s={name: model.total_s(1) for name, model in alone.items()},
            longest_s={name: max(model.times_s[1]) for name, model in alone.items()},
            max_batch={name: model.max_batch for name, model in alone.items()},
            per_s={
                # a model that was not answered in this short time may have any throughput, so the most is assumed
                name: rate * sum(took_s.values()) / took_s[name] if rate and took_s[name] else lanes / model.total_s(1)
                for (name, model), rate in zip(alone.items(), answered.values(), strict=True)
            },
            answered_per_s=max(sum(answered.values()), LEAST_RATE),
            too_long=self.conditions_watch.conditions().too_long,
        )
        return first_numbers, busy_streams

    def _one_lane(
        self, server: ServerProcess, alone: Mapping[str, HostModel], busy_streams: Sequence[dict[str, Any]]
    ) -> _OneLane:
        """Measure the remaining quantities on a single lane; *busy_streams*: as ``_first_numbers`` returns them."""
        by_batch = {subject.name: self._by_batch(server, subject, alone[subject.name]) for subject in self.subjects}
        rounds = [self._measure_load(server, busy_streams, "all models on one lane")]
        gaps_s = self._gaps(rounds)
        overheads = {subject.name: self._overhead(server, subject, gaps_s) for subject in self.subjects}
        in_turns = {name: self._scaled_to_runs(model, name, rounds) for name, model in by_batch.items()}
        return _OneLane(by_batch, in_turns, overheads, _Together(rounds, {}, gaps_s, self._held_bytes(server)))

    @property
    def _queued_segments(self) -> int:
        """Number of segments that a lane queues behind its running segment."""
        return 0 if self.device == HOST else device_kind(self.device).ahead

    def _gaps(self, measurements: Sequence[_LoadMeasurement]) -> list[float]:
        """Return the seconds between segments of a batch; if these are too few, the gaps between batches on full lanes.

        Gaps between batches are not used if lanes queue segments ahead: such a gap is the wait for requests, which is
        not an overhead of the lane.
        """
        gaps_s = [gap for measurement in measurements for gap in hand_overs(measurement.spans, within=True)]
        return gaps_s if len(gaps_s) >= LEAST_RUNS or self._queued_segments else self.full_gaps_s

    def _overhead(self, server: ServerProcess, subject: Subject, gaps_s: Sequence[float]) -> list[float]:
        """Return latencies of single requests minus the times of segments and gaps; the first fifth is warm-up.

        gaps_s: the gaps between segments, of which the mean is also expected before the first segment.
        """
        # 5 ms: more than a server takes for anything but segments
        expected_s = sum(self.served[subject.name]["times_s"]["1"]) + 0.005 + PAUSE_S
        stream = self._closed_stream(subject, 1) | {"think_ms": PAUSE_S * 1e3}
        # not among the repeats: after pauses a model takes 1.5 times as long on a quiet machine (cold caches)
        measurement = self._measure_load(server, [stream], f"overhead of {subject.name}", OVERHEADS * expected_s)
        segments = len(self.served[subject.name]["segments"])
        extents_s = [run[-1].end_s - run[0].start_s for run in runs(measurement.all_spans, subject.name, segments)]
        latencies_s = measurement.result.streams[0].latency_s.tolist()
        if len(extents_s) != len(latencies_s):
            raise InputError(f"{subject.name}: {len(latencies_s)} requests made {len(extents_s)} runs; measure again")
        first_gap_s = fmean(gaps_s) if gaps_s else 0.0
        pairs = zip(latencies_s, extents_s, strict=True)
        overheads_s = [max(0.0, latency_s - extent_s - first_gap_s) for latency_s, extent_s in pairs]
        return overheads_s[len(extents_s) // 5 :]

    def _record_single_runs(self, subject: Subject, measurement: _LoadMeasurement) -> None:
        """Record the median time of a model's single requests, to compare repeated measurements with each other."""
        whole_runs = self._runs(measurement, subject.name)
        if whole_runs:
            run_s = median(sum(span.took_s for span in run) for run in whole_runs)
            self.repeats_s.setdefault(subject.name, []).append(run_s)

    def _scaled_to_runs(self, model: HostModel, name: str, measurements: Sequence[_LoadMeasurement]) -> HostModel:
        """Scale the times of the model's segments by the mean ratio of measured to known times in *measurements*.

        Where models alternate, they find cold caches and take longer.
        """
        whole_runs = [run for measurement in measurements for run in self._runs(measurement, name)]
        ratios = [np.array([span.took_s for span in run]) / np.array(model.times_at(run[0].rows)) for run in whole_runs]
        return _scaled(model, np.mean(ratios, axis=0) if ratios else np.ones(len(model.segments)))

    def _rounds(self, server: ServerProcess, lanes: int, busy_streams: Sequence[dict[str, Any]]) -> _Together:
        """Measure all lanes together in turns with each model alone, so that the machine's speed affects both alike.

        Two rounds that agree are enough.
        """
        single: dict[str, list[_LoadMeasurement]] = {subject.name: [] for subject in self.subjects}
        together: list[_LoadMeasurement] = []
        slow_downs: list[dict[str, SlowDown]] = []
        while len(together) < ROUNDS and not (len(together) > 1 and agree(*slow_downs[-2:])):
            for subject in self.subjects:
                streams, seconds = [self._closed_stream(subject, 1)], self.seconds / 3 / ROUNDS
                measurement = self._measure_load(server, streams, f"{subject.name} alone", seconds)
                self._record_single_runs(subject, measurement)
                single[subject.name].append(measurement)
            together.append(self._measure_load(server, busy_streams, f"{lanes} lanes", self.seconds / ROUNDS))
            slow_downs.append(
                {
                    name: slow_down(self._row_times(together[-1], name), self._row_times(measurements[-1], name))
                    for name, measurements in single.items()
                }
            )
        self.skipped += (ROUNDS - len(together)) * (1 + len(self.subjects))
        return _Together(together, single, self._gaps(together), self._held_bytes(server))

    def _row_times(self, measurement: _LoadMeasurement, name: str) -> list[float]:
        """Return the seconds per row of a model's batches on a lane, for each run."""
        return [sum(span.took_s for span in run) / run[0].rows for run in self._runs(measurement, name)]

    def _with_round_times(self, together: _Together, one_lane: _OneLane) -> dict[str, HostModel]:
        """Return the models with times scaled to the machine's speed during the rounds; unchanged without rounds."""
        models = dict(one_lane.in_turns)
        for name, measurements in together.single.items():
            alone = one_lane.alone[name]
            in_rounds = self._scaled_to_runs(alone, name, measurements)
            models[name] = _scaled(models[name], np.array(in_rounds.times_s[1]) / np.array(alone.times_s[1]))
        return models

    def _spreads(
        self, spans: list[SeenSpan], models: Mapping[str, HostModel], lost: Mapping[str, Mapping[str, float]]
    ) -> dict[str, tuple[tuple[float, ...], ...]]:
        """Return, per model and run, the ratio of each segment's time to its mean, without the losses to other lanes.

        lost: model -> other model -> share of speed lost to it (``losses``); empty on a single lane.
        """
        overlaps = dict(zip(spans, overlaps_of(spans, list(models), self._cores), strict=True))
        spreads = {}
        for name, model in models.items():
            shares = np.array([lost[name][other] if lost else 0.0 for other in models])
            rows = []
            for run in runs(spans, name, len(model.segments))[:MOST_RUNS]:
                undisturbed_s = []
                for span in run:
                    core_s, others_s = overlaps[span]
                    undisturbed_s.append(core_s - float(shares @ others_s))
                means_s = model.times_at(run[0].rows)
                factors = (time_s / mean_s for time_s, mean_s in zip(undisturbed_s, means_s, strict=True))
                rows.append(tuple(round(max(0.05, factor), 4) for factor in factors))  # losses may exceed a short span
            spreads[name] = tuple(rows)
        return spreads

    def _measure_load(
        self, server: ServerProcess, streams: Sequence[dict[str, Any]], what: str, seconds: float | None = None
    ) -> _LoadMeasurement:
        """Send these streams for at least *seconds*; return the spans on the lanes. *what*: name for the progress."""
        self._report_progress(what)
        duration_s = min(LONGEST_S, max(self.seconds if seconds is None else seconds, self._least_s(streams)))
        cold = {(server.url, served_name(stream["model"])) for stream in streams} - self.warm
        self.warm |= cold
        cold_s = WARM_RUNS * sum(sum(self.served[name]["times_s"]["1"]) for _, name in cold)
        warm_s = min(WARM_S, max(RAN_BEFORE_S, cold_s))
        raw = {"duration_s": warm_s + duration_s, "warmup_s": warm_s, "seed": self.done, "stream": list(streams)}
        began_s = time.monotonic()
        with self.conditions_watch.part():
            result = run_load(self._without_exits(parse_workload(raw, "survey")), server.url, deadlines="none")
        if failed := failures(result):
            raise InputError(f"the server did not answer: {failed[0]}")
        trace_spans = read_spans(_get_json(server.url, "weft/trace"), began_s)
        spans = [span._replace(model=self.bodies.get(span.model, span.model)) for span in trace_spans]
        self.done += 1
        since_s = warm_s + min((span.start_s for span in spans), default=began_s)
        return _LoadMeasurement(spans, since_s, since_s + duration_s, result)

    def _without_exits(self, workload: Workload) -> Workload:
        """Return the workload with thresholds at which no request leaves early."""
        streams = [
            stream.model_copy(update={"exit_threshold": UNREACHABLE_CONFIDENCE})
            if self.served[stream.served_name]["exits"]
            else stream
            for stream in workload.stream
        ]
        return workload.model_copy(update={"stream": tuple(streams)})

    def _least_s(self, streams: Sequence[dict[str, Any]]) -> float:
        """Return the seconds after which ``LEAST_RUNS`` runs of each stream are expected."""
        # rows of a request; the second 1 is there because max needs two arguments
        rows = [max(1, *(shape[0] for shape in stream["shapes"].values()), 1) for stream in streams]
        # one request of every client, one after another: closed streams wait for each other
        turn_s = sum(
            stream.get("clients", 0) * sum(self.served[served_name(stream["model"])]["times_s"]["1"]) * count
            for stream, count in zip(streams, rows, strict=True)
        )
        slowest_s = max((1.0 / float(stream["rate"]) for stream in streams if "rate" in stream), default=0.0)
        return LEAST_RUNS * max(float(turn_s), slowest_s)

    def _closed_stream(self, subject: Subject, clients: int, batch: int = 1) -> dict[str, Any]:
        """Return a closed stream: *clients* clients that each send the next request after the last answer."""
        return self._stream(subject, batch) | {"arrival": "closed", "clients": clients}

    def _stream(self, subject: Subject, batch: int = 1) -> dict[str, Any]:
        """Return a workload's stream for the model, with *batch* samples per request and without rate and arrival."""
        shapes = {name: (shape[0] * batch, *shape[1:]) for name, shape in self._shapes(subject).items()}
        return {
            "model": subject.source,
            "deadline_ms": NO_DEADLINE_MS,
            "shapes": shapes,
            "values": dict(subject.values),
        }

    def _shapes(self, subject: Subject) -> Shapes:
        """Return input -> shape of a request; the first dimension is the batch."""
        return {**self.served[subject.name]["shapes"], **subject.shapes}

    # The server

    @contextmanager
    def _server(self, lanes: int) -> Iterator[ServerProcess]:
        """Run a server with this number of lanes during the block."""
        self._report_progress("starting the server; cutting models may take minutes the first time")
        arguments = ["--policy", "fifo", "--lanes", str(lanes), "--threads", str(self.threads), "--grpc-port=-1"]
        arguments += [] if self.isolation == THREADS else ["--isolation", self.isolation]
        arguments += ["--device", self.device] if self.device != HOST else []
        sources = [str(self.repository)] if self.repository else [subject.file for subject in self.subjects]
        arguments += [] if self.repository else self._shape_options()
        with ServerProcess(*sources, *arguments, "--cache", str(self.cache)) as server:
            yield server

    def _shape_options(self) -> list[str]:
        """The ``--shape`` options, since the server cannot cut a model with free shapes; none for stitched files."""
        return [
            f"--shape={subject.name}:{name}={written(shape)}"
            for subject in self.subjects
            if subject.file == subject.source
            for name, shape in subject.shapes.items()
        ]

    def _held_bytes(self, server: ServerProcess) -> int | None:
        """Return the memory of the server and its workers; None where the system does not report it."""
        return held_bytes(server.pid, workers=self.isolation != THREADS or self.device != HOST)

    def _read_profiles(self, server: ServerProcess) -> None:
        """Read the server's profile of each model into ``served``; raise InputError if a model has none."""
        models = _get_json(server.url, "weft/profile")["models"]
        for subject in self.subjects:
            profile = models.get(subject.name)
            if profile is None:
                self._sample_shapes(server, subject)  # raises ShapeNeeded if a missing shape is the reason
                raise InputError(f"{subject.source}: the server could not cut and measure it; weft serve tells why")
            self.bodies[profile["body"] or subject.name] = subject.name
            self.served[subject.name] = {**profile, "shapes": self._sample_shapes(server, subject)}

    def _sample_shapes(self, server: ServerProcess, subject: Subject) -> Shapes:
        """Return input -> shape of one sample, batch axis first; ShapeNeeded if another dimension is free."""
        metadata = _get_json(server.url, f"v2/models/{subject.name}")
        shapes = {tensor["name"]: [int(size) for size in tensor["shape"]] for tensor in metadata["inputs"]}
        for name, shape in shapes.items():
            if name not in subject.shapes and any(size < 0 for size in shape[1:]):
                problem = f"{subject.source}: its input {name!r} has the free shape {written(shape)}"
                raise ShapeNeeded(problem, name, example(shape), model=subject.name)
        return {name: (max(1, shape[0]), *shape[1:]) for name, shape in shapes.items() if shape}

    @property
    def _steps(self) -> int:
        """The number of measurements if none is left out, for the progress."""
        batches = sum(len(_batch_sizes(profile["max_batch"])) for profile in self.served.values()) or len(self.subjects)
        together = sum(1 + self._round_steps for lanes in self.lanes if lanes > 1)
        return batches + len(self.subjects) + 2 + together

    @property
    def _round_steps(self) -> int:
        """The number of measurements of all rounds of one number of lanes."""
        return ROUNDS * (1 + len(self.subjects))

    def _report_progress(self, what: str) -> None:
        if self.progress:
            self.progress(what, min(self._steps, self.done + self.skipped), self._steps)


class SlowDown(NamedTuple):
    """The factor by which a model runs longer beside others, and its standard error."""

    factor: float
    error: float


def slow_down(together_s: Sequence[float], alone_s: Sequence[float]) -> SlowDown:
    """Return the ratio of the mean times of runs beside others and alone; its error is infinite for too few runs."""
    if min(len(together_s), len(alone_s)) < 2:
        return SlowDown(1.0, inf)
    factor = fmean(together_s) / fmean(alone_s)
    relative = [stdev(times_s) / fmean(times_s) / len(times_s) ** 0.5 for times_s in (together_s, alone_s)]
    return SlowDown(factor, factor * hypot(*relative))


def agree(earlier: Mapping[str, SlowDown], later: Mapping[str, SlowDown]) -> bool:
    """Return whether the slow-downs that two rounds measured, by model, are exact enough to need no third round.

    For every model they must differ by at most twice the standard error of their difference, and the relative standard
    error of their mean must be at most ``KNOWN_TO``.
    """
    return all(
        (error := hypot(first.error, second.error)) / (first.factor + second.factor) <= KNOWN_TO
        and abs(first.factor - second.factor) <= 2 * error
        for first, second in ((first, later[name]) for name, first in earlier.items())
    )


def _scaled(model: HostModel, factors: npt.NDArray[np.float64]) -> HostModel:
    """Return the model with the times of its segments multiplied by these factors."""
    times = {batch: _round_times((np.array(times) * factors).tolist()) for batch, times in model.times_s.items()}
    return model.model_copy(update={"times_s": times})


def _batch_sizes(max_batch: int) -> list[int]:
    """Return the batch sizes to measure, powers of 2 and *max_batch*; times of other sizes are interpolated."""
    return sorted({*(2**power for power in range(8) if 2**power <= max_batch), max_batch})


def _get_json(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}/{path}", timeout=30) as answer:
        return json.load(answer)


def _round_times(values: Sequence[float]) -> tuple[float, ...]:
    """Round seconds to a tenth of a microsecond."""
    return tuple(round(value, 7) for value in values)


def _source(device: str) -> str:
    """Return ``Host.source``: the processor, versions and the time."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text("utf-8", "replace").splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    now = datetime.now(UTC).isoformat(timespec="minutes")
    machine = f"{processor}, {usable_cores()} cores"
    where = f"{device_called(device)} ({device}), {machine}" if device != HOST else machine
    return f"{where}; weft {__version__}, onnxruntime {runtime_version()}; {now}"

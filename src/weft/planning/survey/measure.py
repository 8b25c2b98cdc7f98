"""Driving a server to measure this machine: clients that keep its lanes busy, model by model and all together."""

from __future__ import annotations

import json
import platform
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from weft.base.errors import InputError, ShapeNeeded
from weft.base.shapes import Shapes, example, written
from weft.base.version import __version__, runtime_version
from weft.devices import Host, HostModel
from weft.devices.conditions import Conditions
from weft.devices.host import HOST, lane_cores, usable_cores
from weft.load import LoadResult, run_load
from weft.models.stitched_files import file_and_task
from weft.planning.survey.processor_time import ConditionsWatch
from weft.planning.survey.spans import (
    SeenSpan,
    beside_each,
    hand_overs,
    losses,
    mean_times,
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
"""Called with what is being measured, how many measurements are done, and of how many."""

TOGETHER_S = 5.0
"""How long to watch all models together, at least; one at a time, a third of it for each batch size."""
ROUNDS = 3
"""How often the lanes are watched together, with each model alone in between."""
WARM_S = 0.3
LEAST_RUNS, LONGEST_S = 12, 60.0
"""Runs to see of a model, however long that takes, up to a limit."""
MOST_RUNS, MOST_GAPS = 400, 800
"""How many runs and gaps are kept."""
BUSY, LEAST_RATE = 0.75, 0.2
"""The part of what lanes can do, when they are watched together; requests per second of a model, at least."""
OVERHEADS, PAUSE_S = 25, 0.02
"""Single requests, to see what they take besides their segments, and the pause before each. Requests that arrive by
themselves find a server that sleeps, and cold caches: of a 5.3 ms model on two busy cores of aarch64 they took 1.6 to
1.7 ms besides after such pauses, 1.6 to 3.9 ms at 12 to 40 requests/s, 1.2 to 1.4 back to back (10th percentiles)."""
NO_HURRY_MS = 1e7
NOBODY_SURE = 2.0
"""How sure answers at exits must be while they are measured: no answer is, so that all requests go to the end."""


def failures(result: LoadResult) -> list[str]:
    """What the server said where it did not answer; not that a queue is full, for then its lanes are as busy as wanted:
    it is so where the machine has become slower since it was asked what it can do."""
    said = [f"{status}: {text}" for each in result.streams for status, text in each.messages.items()]
    return [each for each in said if QUEUE_FULL not in each]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure."""

    source: str
    """What ``weft serve`` takes: a file or a known name."""
    shapes: Shapes = field(default_factory=dict)
    """Input -> shape of one sample's request, where the model has free dimensions."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Input -> number that requests must hold there, such as a sampling rate."""

    @property
    def name(self) -> str:
        return served_name(self.source)

    @property
    def file(self) -> str:
        """What the server is given: of a model in a stitched file, the file."""
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
    """Measure models on this machine under ``weft serve`` with so many lanes.

    seconds: how long to watch all models together; one at a time, a third of that for each batch size.
    """
    found = survey_lanes(
        subjects, lanes=(lanes,), device=device, threads=threads, seconds=seconds, cache=cache, progress=progress
    )
    return found[lanes]


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
) -> dict[int, Host]:
    """Measure models with each of these numbers of lanes; what they have in common is measured once.

    device: what the server runs them on.
    repository: where the server finds the models, instead of in their sources.
    isolation: where they run, as the server's setting of that name says.
    """
    names = [subject.name for subject in subjects]
    if not names:
        raise InputError("nothing to measure: name models or .onnx files")
    if len(set(names)) < len(names):
        raise InputError(f"two models have one name: {', '.join(names)}; rename a file")
    if not lanes or min(lanes) < 1 or threads < 1 or not 0 < seconds <= LONGEST_S:
        shown = ", ".join(map(str, lanes))
        raise InputError(f"lanes = {shown}, threads = {threads}, seconds = {seconds:g} (at most {LONGEST_S:g})")
    firsts: dict[str, Subject] = {}
    for subject in subjects:
        _require_one(subject)
        firsts.setdefault(subject.file, subject)
    measured = {subject.name: firsts[subject.file].name for subject in subjects}
    with _kept(cache) as folder:
        found = _Survey(
            tuple(firsts.values()), sorted({*lanes}), threads, seconds, folder, repository, progress, isolation, device
        ).hosts()
    return {count: with_stitched(host, measured) for count, host in found.items()}


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
    """The median seconds of whole runs of each model, one request at a time and all models in turns on one lane.

    That is how a survey measures ``HostModel.times_s`` at batch 1. Of models in one stitched file one is timed.
    """
    with _kept(cache) as folder:
        return _Survey(
            subjects, (1,), threads, seconds, folder, repository, progress, isolation, device
        ).times_in_turns()


def _require_one(subject: Subject) -> None:
    """Refuse a stitched file that is asked for as if it were one model."""
    path = Path(subject.source)
    tasks = [task.name for task in tasks_in(path)] if path.suffix == ".onnx" and path.is_file() else []
    if tasks:
        names = ", ".join(tasks)
        raise InputError(f"{path} holds {names}; say which of them is asked for, as {path}/{tasks[0]}")


def with_stitched(host: Host, measured: Mapping[str, str]) -> Host:
    """*host* with the models that were stitched to one that was measured: they have its body, and so its times."""
    models = {}
    for name, first in measured.items():
        loses = {other: host.models[first].loses[same] for other, same in measured.items() if host.models[first].loses}
        models[name] = host.models[first].model_copy(update={"loses": loses})
    return host.model_copy(update={"models": models})


@contextmanager
def _kept(cache: Path | None) -> Iterator[Path]:
    """A folder for cut models: two servers shall not cut them twice."""
    if cache is not None:
        yield cache
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@dataclass
class _Watched:
    """What the lanes did while clients kept them busy."""

    all_spans: list[SeenSpan]
    since_s: float
    until_s: float
    result: LoadResult

    @property
    def spans(self) -> list[SeenSpan]:
        """The spans after the warm-up and before the clients went away; all there are where these are too few."""
        found = [each for each in self.all_spans if each.start_s >= self.since_s and each.end_s <= self.until_s]
        return found if len(found) >= LEAST_RUNS else self.all_spans


@dataclass(frozen=True)
class _Together:
    """What some lanes did with all models."""

    models: Mapping[str, HostModel]
    """What their segments take by themselves, at that time."""
    watched: Sequence[_Watched]
    memory_bytes: int | None


@dataclass
class _Survey:
    subjects: Sequence[Subject]
    lanes: Sequence[int]
    """How many, each of which gives a host; the fewest first."""
    threads: int
    seconds: float
    cache: Path
    repository: Path | None
    progress: Progress | None
    isolation: str = THREADS
    device: str = HOST
    done: int = 0
    served: dict[str, Any] = field(default_factory=dict)
    """Model -> what the server says of it."""
    full_gaps_s: list[float] = field(default_factory=list)
    """What passed between segments when the lanes were full."""
    bodies: dict[str, str] = field(default_factory=dict)
    """What lanes run, by their name for it -> the subject that it is."""
    others: ConditionsWatch = field(default_factory=ConditionsWatch)
    """What else the machine does while the lanes are watched."""
    repeats_s: dict[str, list[float]] = field(default_factory=dict)
    """Model -> median times of single requests, each of another time that it was watched alone."""

    def hosts(self) -> dict[int, Host]:
        with self._server(1) as server:
            self._learn(server)
            alone = {each.name: self._by_batch(server, each) for each in self.subjects}
            watched = [self._watch(server, self._busy(server, 1, alone), "all models on one lane")]
            gaps_s = self._gaps(watched)
            overheads = {each.name: self._overhead(server, each, gaps_s) for each in self.subjects}
            memory_bytes = self._held_bytes(server)
        models = {name: self._in_turns(each, name, watched) for name, each in alone.items()}
        found = {}
        for lanes in self.lanes:
            seen = _Together(models, watched, memory_bytes) if lanes == 1 else self._together(lanes, alone, models)
            found[lanes] = self._host(lanes, seen, overheads)
        return found

    def times_in_turns(self) -> tuple[dict[str, float], Conditions]:
        """The median time of whole runs of each model, and what else the machine did."""
        with self._server(1) as server:
            self._learn(server)
            timed = [subject for subject in self.subjects if subject.name in self.bodies.values()]
            watched = self._watch(server, [self._closed(subject, 1) for subject in timed], "all models in turns")
        for subject in timed:
            self._note_alone(subject, watched)
        return {name: median(times) for name, times in self.repeats_s.items()}, self.others.conditions()

    def _host(self, lanes: int, seen: _Together, overheads: Mapping[str, Sequence[float]]) -> Host:
        """What was seen of so many lanes."""
        spans = [span for each in seen.watched for span in each.spans]
        lost = losses(spans, seen.models, self._cores) if lanes > 1 else {}
        spreads = self._spreads(spans, seen.models, lost)
        return Host(
            name=self.device,
            source=_source(self.device),
            conditions=self.others.conditions(self.repeats_s),
            cores=usable_cores(),
            lanes=lanes,
            threads=self.threads,
            isolation=self.isolation,
            ahead=self._ahead,
            memory_bytes=seen.memory_bytes,
            hand_over_s=_rounded(self._gaps(seen.watched)[:MOST_GAPS]),
            abort_from_s=ABORT_FROM_TICKS / 1e9,
            models={
                name: model.model_copy(
                    update={
                        "spread": spreads[name],
                        "overhead_s": _rounded(overheads[name]),
                        "loses": {other: round(share, 4) for other, share in lost.get(name, {}).items()},
                    }
                )
                for name, model in seen.models.items()
            },
        )

    @property
    def _cores(self) -> int:
        return lane_cores(usable_cores(), self.threads)

    # Measurements

    def _by_batch(self, server: ServerProcess, subject: Subject) -> HostModel:
        """The times of a model's segments by batch size, on a lane that has nothing else to do."""
        said = self.served[subject.name]
        times = {}
        for batch in _sizes(said["max_batch"]):
            what = f"{subject.name}, batch {batch}" if said["max_batch"] > 1 else subject.name
            watched = self._watch(server, [self._closed(subject, 1, batch)], what, self.seconds / 3)
            if batch == 1:
                self._note_alone(subject, watched)
            found = [each for each in runs(watched.spans, subject.name, len(said["segments"])) if each[0].rows == batch]
            if not found:
                raise InputError(f"{subject.name}: no run of batch {batch} was seen to its end; measure for longer")
            times[batch] = mean_times(found)
        return HostModel(
            segments=tuple(said["segments"]), max_batch=said["max_batch"], times_s=times, exits=tuple(said["exits"])
        )

    def _busy(self, server: ServerProcess, lanes: int, alone: Mapping[str, HostModel]) -> list[dict[str, Any]]:
        """Streams that take most of what the lanes can do, every model the same part of it.

        Not all of it: lanes that never rest leave the server no time, and deadlines are missed long before.
        """
        clients = [lanes + model.max_batch + (place == 0) for place, model in enumerate(alone.values())]
        streams = [self._closed(each, count) for each, count in zip(self.subjects, clients, strict=True)]
        full = self._watch(server, streams, f"what {lanes} lane{'s' * (lanes > 1)} can do", self.seconds / 3)
        self.full_gaps_s = hand_overs(full.spans)
        answered = [stream.figures.answered_per_s for stream in full.result.streams]
        can = sum(rate * model.total_s(1) for rate, model in zip(answered, alone.values(), strict=True))
        return [
            self._stream(each) | {"rate": max(LEAST_RATE, BUSY * can / len(alone) / alone[each.name].total_s(1))}
            for each in self.subjects
        ]

    @property
    def _ahead(self) -> int:
        """How many segments a lane takes besides the one that it computes."""
        return 0 if self.device == HOST else device_kind(self.device).ahead

    def _gaps(self, watched: Sequence[_Watched]) -> list[float]:
        """What passes between segments of a batch; where models are in one piece, between batches on full lanes.

        A lane that takes segments ahead has its next batch before that, and what passes there is the wait for more:
        requests have it besides.
        """
        found = [gap for each in watched for gap in hand_overs(each.spans, within=True)]
        return found if len(found) >= LEAST_RUNS or self._ahead else self.full_gaps_s

    def _overhead(self, server: ServerProcess, subject: Subject, gaps_s: Sequence[float]) -> list[float]:
        """What single requests take besides their segments and what passes before each of these, each after a pause."""
        expected_s = sum(self.served[subject.name]["times_s"]["1"]) + 0.005 + PAUSE_S
        stream = self._closed(subject, 1) | {"think_ms": PAUSE_S * 1e3}
        # not among the repeats: after pauses a model takes 1.5 times as long on a quiet machine (cold caches)
        watched = self._watch(server, [stream], f"the way of {subject.name}", OVERHEADS * expected_s)
        count = len(self.served[subject.name]["segments"])
        extents_s = [each[-1].end_s - each[0].start_s for each in runs(watched.all_spans, subject.name, count)]
        latencies_s = watched.result.streams[0].latency_s.tolist()
        if len(extents_s) != len(latencies_s):
            raise InputError(f"{subject.name}: {len(latencies_s)} requests made {len(extents_s)} runs; measure again")
        first_s = fmean(gaps_s) if gaps_s else 0.0
        return [max(0.0, a - b - first_s) for a, b in zip(latencies_s, extents_s, strict=True)][len(extents_s) // 5 :]

    def _note_alone(self, subject: Subject, watched: _Watched) -> None:
        """Keep what a single request of a model usually took alone, to compare it with other times that it was."""
        whole = runs(watched.spans, subject.name, len(self.served[subject.name]["segments"]))
        if whole:
            took_s = median(sum(span.took_s for span in run) for run in whole)
            self.repeats_s.setdefault(subject.name, []).append(took_s)

    def _in_turns(self, model: HostModel, name: str, watched: Sequence[_Watched]) -> HostModel:
        """The model with segments as long as in these runs: where models alternate, their caches are cold."""
        found = [run for each in watched for run in runs(each.spans, name, len(model.segments))]
        ratios = [np.array([span.took_s for span in run]) / np.array(model.times_at(run[0].rows)) for run in found]
        slower = np.mean(ratios, axis=0) if ratios else np.ones(len(model.segments))
        times = {batch: _rounded((np.array(each) * slower).tolist()) for batch, each in model.times_s.items()}
        return model.model_copy(update={"times_s": times})

    def _together(self, lanes: int, alone: Mapping[str, HostModel], in_turns: Mapping[str, HostModel]) -> _Together:
        """All lanes at once, in turns with each model alone: what both take moves with the speed of the machine."""
        single: dict[str, list[_Watched]] = {name: [] for name in alone}
        together = []
        with self._server(lanes) as server:
            busy = self._busy(server, lanes, alone)
            for _ in range(ROUNDS):
                for each in self.subjects:
                    streams, seconds = [self._closed(each, 1)], self.seconds / 3 / ROUNDS
                    watched = self._watch(server, streams, f"{each.name} alone", seconds)
                    self._note_alone(each, watched)
                    single[each.name].append(watched)
                together.append(self._watch(server, busy, f"{lanes} lanes", self.seconds / ROUNDS))
            memory_bytes = self._held_bytes(server)
        models = {}
        for name, model in in_turns.items():
            now = self._in_turns(alone[name], name, single[name])
            moved = np.array(now.times_s[1]) / np.array(alone[name].times_s[1])
            times = {batch: _rounded((np.array(each) * moved).tolist()) for batch, each in model.times_s.items()}
            models[name] = model.model_copy(update={"times_s": times})
        return _Together(models, together, memory_bytes)

    def _spreads(
        self, spans: list[SeenSpan], models: Mapping[str, HostModel], lost: Mapping[str, Mapping[str, float]]
    ) -> dict[str, tuple[tuple[float, ...], ...]]:
        """The runs of every model as factors of the mean times, what it lost to other lanes taken off."""
        beside = dict(zip(spans, beside_each(spans, list(models), self._cores), strict=True))
        found = {}
        for name, model in models.items():
            shares = np.array([lost[name][other] if lost else 0.0 for other in models])
            rows = []
            for run in runs(spans, name, len(model.segments))[:MOST_RUNS]:
                works_s = [beside[span][0] - float(shares @ beside[span][1]) for span in run]
                means_s = model.times_at(run[0].rows)
                rows.append(tuple(round(max(0.05, a / b), 4) for a, b in zip(works_s, means_s, strict=True)))
            found[name] = tuple(rows)
        return found

    def _watch(
        self, server: ServerProcess, streams: Sequence[dict[str, Any]], what: str, seconds: float | None = None
    ) -> _Watched:
        """See what the lanes do under these streams."""
        self._tell(what)
        duration_s = min(LONGEST_S, max(self.seconds if seconds is None else seconds, self._least_s(streams)))
        raw = {"duration_s": WARM_S + duration_s, "warmup_s": WARM_S, "seed": self.done, "stream": list(streams)}
        began_s = time.monotonic()
        with self.others.part():
            result = run_load(self._to_the_end(parse_workload(raw, "survey")), server.url, deadlines="none")
        if failed := failures(result):
            raise InputError(f"the server did not answer: {failed[0]}")
        seen = read_spans(_get(server.url, "weft/trace"), began_s)
        spans = [span._replace(model=self.bodies.get(span.model, span.model)) for span in seen]
        self.done += 1
        since_s = WARM_S + min((span.start_s for span in spans), default=began_s)
        return _Watched(spans, since_s, since_s + duration_s, result)

    def _to_the_end(self, workload: Workload) -> Workload:
        """The workload with requests that leave at no exit."""
        streams = [
            each.model_copy(update={"exit_threshold": NOBODY_SURE}) if self.served[each.served_name]["exits"] else each
            for each in workload.stream
        ]
        return workload.model_copy(update={"stream": tuple(streams)})

    def _least_s(self, streams: Sequence[dict[str, Any]]) -> float:
        """How long it takes to see enough of each."""
        clients = sum(each.get("clients", 0) for each in streams)
        rows = [max(1, *(shape[0] for shape in each["shapes"].values()), 1) for each in streams]
        longest_s = max(
            sum(self.served[served_name(each["model"])]["times_s"]["1"]) * count
            for each, count in zip(streams, rows, strict=True)
        )
        slowest_s = max((1.0 / float(each["rate"]) for each in streams if "rate" in each), default=0.0)
        return LEAST_RUNS * max(float(clients * longest_s), slowest_s)

    def _closed(self, subject: Subject, clients: int, batch: int = 1) -> dict[str, Any]:
        """So many clients, each of whom sends again when it has its answer."""
        return self._stream(subject, batch) | {"arrival": "closed", "clients": clients}

    def _stream(self, subject: Subject, batch: int = 1) -> dict[str, Any]:
        shapes = {name: (shape[0] * batch, *shape[1:]) for name, shape in self._shapes(subject).items()}
        return {"model": subject.source, "deadline_ms": NO_HURRY_MS, "shapes": shapes, "values": dict(subject.values)}

    def _shapes(self, subject: Subject) -> Shapes:
        """What is sent to each input; the first dimension is the batch."""
        known = self.served[subject.name]["shapes"]
        return {**known, **subject.shapes}

    # The server

    @contextmanager
    def _server(self, lanes: int) -> Iterator[ServerProcess]:
        self._tell("starting the server; cutting models may take minutes the first time")
        arguments = ["--policy", "fifo", "--lanes", str(lanes), "--threads", str(self.threads), "--grpc-port=-1"]
        arguments += [] if self.isolation == THREADS else ["--isolation", self.isolation]
        arguments += ["--device", self.device] if self.device != HOST else []
        sources = [str(self.repository)] if self.repository else [subject.file for subject in self.subjects]
        arguments += [] if self.repository else self._stated_shapes()
        with ServerProcess(*sources, *arguments, "--cache", str(self.cache)) as server:
            yield server

    def _stated_shapes(self) -> list[str]:
        """Options that give the server the shapes to measure with; it cannot cut a model with free ones."""
        return [
            f"--shape={subject.name}:{name}={written(shape)}"
            for subject in self.subjects
            if subject.file == subject.source
            for name, shape in subject.shapes.items()
        ]

    def _held_bytes(self, server: ServerProcess) -> int | None:
        """Memory of the server, and of its workers where it has some; None where the system does not tell."""
        return held_bytes(server.pid, workers=self.isolation != THREADS or self.device != HOST)

    def _learn(self, server: ServerProcess) -> None:
        """What the server says of its models."""
        models = _get(server.url, "weft/profile")["models"]
        for subject in self.subjects:
            found = models.get(subject.name)
            if found is None:
                self._free(server, subject)  # a shape that nobody gave is the usual reason
                raise InputError(f"{subject.source}: the server could not cut and measure it; weft serve tells why")
            self.bodies[found["body"] or subject.name] = subject.name
            self.served[subject.name] = {**found, "shapes": self._free(server, subject)}

    def _free(self, server: ServerProcess, subject: Subject) -> Shapes:
        """Shapes of a single sample, where nothing but the batch is free."""
        metadata = _get(server.url, f"v2/models/{subject.name}")
        shapes = {each["name"]: [int(size) for size in each["shape"]] for each in metadata["inputs"]}
        for name, shape in shapes.items():
            if name not in subject.shapes and any(size < 0 for size in shape[1:]):
                problem = f"{subject.source}: its input {name!r} has the free shape {written(shape)}"
                raise ShapeNeeded(problem, name, example(shape), model=subject.name)
        return {name: (max(1, shape[0]), *shape[1:]) for name, shape in shapes.items() if shape}

    def _tell(self, what: str) -> None:
        if self.progress:
            batches = sum(len(_sizes(each["max_batch"])) for each in self.served.values()) or len(self.subjects)
            rounds = sum(1 + ROUNDS * (1 + len(self.subjects)) for lanes in self.lanes if lanes > 1)
            self.progress(what, self.done, batches + len(self.subjects) + 2 + rounds)


def _sizes(most: int) -> list[int]:
    """Batch sizes to measure; those between are interpolated."""
    return sorted({*(2**power for power in range(8) if 2**power <= most), most})


def _get(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}/{path}", timeout=30) as answer:
        return json.load(answer)


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    """The values, rounded to a tenth of a microsecond."""
    return tuple(round(each, 7) for each in values)


def _source(device: str) -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text("utf-8", "replace").splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    now = datetime.now(UTC).isoformat(timespec="minutes")
    machine = f"{processor}, {usable_cores()} cores"
    where = f"{device_called(device)} ({device}), {machine}" if device != HOST else machine
    return f"{where}; weft {__version__}, onnxruntime {runtime_version()}; {now}"

"""The request for a plan: models, their streams, the cores and memory that may be used, and the objective.

Everything that can be checked before a measurement is checked here; each error message says what to add. *scratch* is
the folder to which models that have no file yet, such as those of the zoo, are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from weft.base.errors import InputError, ModelError, WorkloadError, unknown_name
from weft.base.shapes import Dimension, Shapes, describe_dimensions, example, settle
from weft.devices.host import usable_cores
from weft.load.payload import read_samples
from weft.models.packaged import PACKAGED
from weft.models.stitched_files import file_and_task
from weft.models.zoo import ZOO
from weft.planning.early_exits import ServedFile, exit_settings, soonest_rates, with_exit_settings
from weft.runtime.cutting import DEVICE_GRAIN_S
from weft.runtime.external import external_files
from weft.runtime.model_signature import read_dimensions, read_inputs, read_operators
from weft.runtime.stitched import tasks_in
from weft.runtime.tensors import TensorSpec
from weft.serving.config import ModelConfig, ServerConfig
from weft.serving.isolation import THREADS
from weft.serving.repository import ModelEntry, Repository
from weft.workloads.requests import Stream, Workload

OBJECTIVES = {
    "deadlines": "deadlines met, then load that could still be carried, then memory",
    "load": "the largest load that keeps the deadlines, then memory",
    "memory": "deadlines met, then memory, then load",
    "latency": "deadlines met, then the smallest p99 for its deadline",
}
"""Objective -> the criteria that rank options, the most important first."""
DEADLINES = ("strict", "soft")
"""strict: the server gives up late requests, as clients of ``weft bench`` ask for; soft: it answers them late."""
IN_8_BITS = ("QuantizeLinear", "DequantizeLinear")
"""Operators by which a file in 8 bits is recognised."""
LIMIT = 0.01
"""Largest share of missed deadlines, in every stream, with which deadlines count as kept."""


@dataclass(frozen=True, slots=True)
class PreparedModelFile:
    """A change of a model's file before it is measured and served, such as quantization."""

    original: Path
    change: str
    """A description of the change."""
    same_answers: float | None
    """The share of samples with the same answer as before; None where that is not known."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestedModel:
    """A model to plan for."""

    name: str
    """The name in requests."""
    source: str
    """The user's name for it: a file, or a name that weft knows."""
    path: Path
    config: ModelConfig
    """The model's settings, with the shapes of its measurement."""
    body: str = ""
    """The name of its stitched file; empty for a model with a file of its own."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Input -> shape of a request's tensor, for inputs with open shapes in the file."""
    stream_settings: Mapping[str, Any] = field(default_factory=dict)
    """Setting -> value: the settings of segments and exits that the model's streams state."""
    preparation: PreparedModelFile | None = None
    """How its file was changed; None: it is served as given."""

    @property
    def home(self) -> str:
        """The name of the model's folder in a repository."""
        return self.body or self.name

    @property
    def bytes(self) -> int:
        """The size of all files of the model."""
        return sum(file.stat().st_size for file in (self.path, *external_files(self.path)))


class SentStream(NamedTuple):
    """A stream with the rate of its requests and the use of exits."""

    stream: Stream
    rate: float
    """Requests per second; 0 for closed streams and traces."""
    exit_shares: tuple[float, ...]
    """The share of requests that leaves at each exit at the lowest threshold; empty if all requests run to the end."""

    @property
    def name(self) -> str:
        """The name of the stream's model."""
        return self.stream.served_name


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlanRequest:
    """A checked request for a plan."""

    workload: Workload
    models: tuple[RequestedModel, ...]
    cores: int
    """Number of lane threads that may run at the same time."""
    memory_bytes: int | None = None
    """The server's memory limit; None: no limit."""
    objective: str = "deadlines"
    deadlines: str = "strict"
    limit: float = LIMIT
    isolation: str = THREADS
    """Where models run, as in the server's setting of that name."""
    device: str | None = None
    """The GPU that runs the models; None: the cores."""
    soonest: tuple[tuple[float, ...], ...] = ()
    """Per stream, the share that leaves at each exit at the lowest threshold; empty if all requests run to the end."""
    remarks: tuple[str, ...] = ()
    """Sentences for the user about the models and about options that are not tried with them."""

    @property
    def bytes(self) -> int:
        """The size of the files of all models."""
        return sum({model.path: model.bytes for model in self.models}.values())

    @property
    def per_s(self) -> float:
        """Requests per second of all streams with a rate, in total."""
        return sum(rate or 0.0 for rate in self.workload.rates)

    @property
    def sent_streams(self) -> tuple[SentStream, ...]:
        """The streams with their rates and early exits."""
        exit_shares = self.soonest or ((),) * len(self.workload.stream)
        return tuple(map(SentStream, self.workload.stream, (rate or 0.0 for rate in self.workload.rates), exit_shares))

    @property
    def has_rates(self) -> bool:
        """Whether the load can be raised, which is not possible for closed streams."""
        return self.per_s > 0


def ask(
    workload: Workload,
    scratch: Path,
    *,
    cores: int | None = None,
    memory_bytes: int | None = None,
    objective: str = "deadlines",
    deadlines: str = "strict",
    limit: float = LIMIT,
    isolation: str = THREADS,
    device: str | None = None,
) -> PlanRequest:
    """Check a request and find its models; the other arguments: as the fields of ``PlanRequest``."""
    machine_cores = usable_cores()
    _check_known("objective", objective, OBJECTIVES)
    _check_known("kind of deadlines", deadlines, DEADLINES)
    ServerConfig(isolation=isolation, device=device)  # raises an error for unknown values
    if device is not None and cores is not None:
        raise InputError(f"cores = {cores}: {device} has one lane, for which no cores are divided; leave it out")
    if cores is not None and not 1 <= cores <= machine_cores:
        raise InputError(f"cores = {cores}: this machine has {machine_cores} for weft; ask for 1 to {machine_cores}")
    if not 0 < limit < 1:
        raise InputError(f"limit = {limit:g} must lie between 0 and 1, as 0.01 for one deadline in a hundred")
    for stream in workload.stream:
        _check_stream(stream, workload)
    models = _models(workload, scratch)
    if device is not None:
        models = tuple(map(_with_gpu_grain, models))
    _check_memory(models, memory_bytes)
    sent_workload = with_exit_settings(
        _with_inputs(workload, models), {model.name: ServedFile(model.path, model.config) for model in models}
    )
    return PlanRequest(
        workload=sent_workload,
        models=models,
        cores=cores or machine_cores,
        memory_bytes=memory_bytes,
        objective=objective,
        deadlines=deadlines,
        limit=limit,
        isolation=isolation,
        device=device,
        soonest=soonest_rates(sent_workload),
        remarks=() if device is None else tuple(_gpu_remarks(device, models)),
    )


def _with_gpu_grain(model: RequestedModel) -> RequestedModel:
    """Return the model with the default segment length on a GPU as ``grain_ms``, unless its settings have one."""
    if "grain_ms" in model.config.model_fields_set:
        return model
    return replace(model, config=model.config.model_copy(update={"grain_ms": DEVICE_GRAIN_S * 1e3}))


def _gpu_remarks(device: str, models: Sequence[RequestedModel]) -> Iterator[str]:
    """Yield remarks on the options that a plan for a GPU leaves out, and on models that gain nothing there."""
    yield f"Lanes, threads, pinning and isolation are left out: {device} has one lane, for all models."
    for home, model in {model.home: model for model in models}.items():
        if not read_operators(model.path).isdisjoint(IN_8_BITS):
            yield f"{home} is in 8 bits, which {device} computes in floating point, with conversions between."


def _check_known(kind: str, name: str, known: Sequence[str] | dict[str, str]) -> None:
    if name not in known:
        raise InputError(unknown_name(kind, name, known))


def _check_stream(stream: Stream, workload: Workload) -> None:
    """Raise WorkloadError for a stream without a deadline, or with profiles of simulated devices."""
    if stream.deadline_ms is None:
        shown = workload.advice(stream, option="deadline=100", key="deadline_ms = 100")
        raise WorkloadError(f"{stream.model}: no deadline; add one in milliseconds, as {shown}")
    if stream.profiles:
        raise WorkloadError(f"{stream.model}: profiles describe simulated devices; name the model's .onnx file")


def _models(workload: Workload, scratch: Path) -> tuple[RequestedModel, ...]:
    """Return the distinct models of all streams, in order of their first stream."""
    models: dict[str, RequestedModel] = {}
    for stream in workload.stream:
        model = _model(stream, workload, scratch)
        earlier = models.setdefault(model.name, model)
        if earlier.path != model.path:
            raise ModelError(f"{earlier.source} and {model.source} are both called {model.name}; rename one file")
        if earlier.shapes != model.shapes:
            raise WorkloadError(f"{model.source}: its streams send different shapes; plan for one of them")
        if earlier.stream_settings != model.stream_settings:
            raise WorkloadError(
                f"{model.source}: its streams state different exits, thresholds or grain; state the same in each"
            )
    return tuple(models.values())


def _model(stream: Stream, workload: Workload, scratch: Path) -> RequestedModel:
    """Return the model of a stream, with settings and shapes from its file, its settings and the stream."""
    entry = _entry(stream, workload, scratch)
    names = _request_names(entry)  # by the names in the graph
    inputs = [spec._replace(name=names[spec.name]) for spec in read_inputs(entry.path) if spec.name in names]
    dimensions = {names[inner]: sizes for inner, sizes in read_dimensions(entry.path).items() if inner in names}
    shapes = _shapes(stream, workload, inputs, dimensions, _configured_shapes(entry, names))
    for name in stream.values:
        if name not in dimensions:
            raise WorkloadError(f"{stream.model}: {unknown_name('input', name, dimensions)}")
    graph_shapes = {inner: list(shapes[name]) for inner, name in names.items() if name in shapes}
    # Sizes of axes are resolved in *shapes*, so only inputs are kept; a stitched file has other models' inputs, too.
    other_shapes = {name: shape for name, shape in entry.config.shapes.items() if entry.body or name in names}
    inputs_config = {"shapes": {**other_shapes, **graph_shapes}, "values": {**entry.config.values, **stream.values}}
    stated = exit_settings(stream, entry.path, entry.config)
    stated |= {} if stream.grain_ms is None else {"grain_ms": stream.grain_ms}
    changes = {key: value for key, value in {**inputs_config, **stated}.items() if value}
    config = entry.config.model_copy(update=changes)
    return RequestedModel(entry.name, stream.model, entry.path, config, entry.body, shapes, stated)


def _request_names(entry: ModelEntry) -> dict[str, str]:
    """Return name of an input in the graph -> its name in requests; of a stitched file, only the entry's model."""
    if not entry.body:
        return {spec.name: spec.name for spec in read_inputs(entry.path)}
    (task,) = (task for task in tasks_in(entry.path) if task.name == entry.name)
    return {inner: name for name, inner in task.inputs.items()}


def _with_inputs(workload: Workload, models: Sequence[RequestedModel]) -> Workload:
    """Return the workload with the shapes and values of its models' inputs, so that clients can send it as it is."""
    inputs = {model.name: _inputs(model) for model in models}
    streams = [
        stream if stream.samples else stream.model_copy(update=inputs[stream.served_name]) for stream in workload.stream
    ]
    return workload.model_copy(update={"stream": tuple(streams)})


def _inputs(model: RequestedModel) -> dict[str, Any]:
    """Return the shapes and values of a model's inputs, as keys of a stream."""
    keys = {"shapes": dict(model.shapes), "values": dict(model.config.values)}
    return {key: value for key, value in keys.items() if value}


def _entry(stream: Stream, workload: Workload, scratch: Path) -> ModelEntry:
    """Return the repository's entry for a stream's model; relative file names start at the workload's folder."""
    file, task = file_and_task(stream.model)
    if file.endswith(".onnx") and file not in PACKAGED and not Path(file).is_absolute():
        source = str(Path(workload.folder) / file)
    elif Path(workload.folder, file).is_dir() and file not in ZOO:
        raise ModelError(f"{file} is a folder; name a model file in it, as -s {file.rstrip('/')}/model.onnx:rate=10")
    else:
        source = file
    repository = Repository([source], scratch)
    for name, problem in repository.problems.items():
        raise ModelError(f"{source}: {name}: {problem}")
    names = repository.names()
    if task and task not in names:
        raise ModelError(f"{file}: {unknown_name('model in it', task, names)}")
    if not task and len(names) > 1:
        raise ModelError(
            f"{file} holds {', '.join(names)}; say which a stream asks for, as "
            f"-s {file}/{names[0]}:rate=10,deadline=100"
        )
    return repository.entry(task or names[0])


def _sample_shapes(stream: Stream, workload: Workload, inputs: Sequence[TensorSpec]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a stream's samples, if it has any; raise if they do not fit the model."""
    if stream.samples is None:
        return {}
    samples = read_samples(Path(workload.folder) / stream.samples, inputs)
    return {name: tensors.shape[1:] for name, tensors in samples.inputs.items()}


def _configured_shapes(entry: ModelEntry, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a model's settings, by the names of inputs in requests (*names*) and by names of axes."""
    shapes = {name: tuple(shape) for name, shape in entry.config.shapes.items()}
    return {names.get(name, name): shape for name, shape in shapes.items() if name in names or not entry.body}


def _shapes(
    stream: Stream,
    workload: Workload,
    inputs: Sequence[TensorSpec],
    dimensions: Mapping[str, Sequence[Dimension] | None],
    known: Shapes,
) -> dict[str, tuple[int, ...]]:
    """Return input -> shape of a request's tensor, for shapes that are stated or follow from other inputs.

    known: the shapes in the model's settings. Samples and the stream's own shapes take precedence. WorkloadError if a
    dimension besides the batch stays open.
    """
    sampled = _sample_shapes(stream, workload, inputs)
    try:
        stated = settle({**sampled, **stream.shapes}, dimensions)
        shapes = {**settle(known, dimensions), **stated}
    except ModelError as error:
        raise WorkloadError(f"{stream.model}: {error}") from error
    for name, sizes in dimensions.items():
        if name not in shapes and any(not isinstance(size, int) for size in (sizes or ())[1:]):
            advice = workload.shape_advice(stream, name, example(sizes or ()))
            raise WorkloadError(
                f"{stream.model}: its input {name!r} has the free shape {describe_dimensions(sizes)}; say what is "
                f"sent, as {advice}, or give samples"
            )
    return shapes


def _check_memory(models: Sequence[RequestedModel], memory_bytes: int | None) -> None:
    """Raise InputError if the models' files alone are larger than the memory limit."""
    if memory_bytes is None:
        return
    sizes = {file_and_task(model.source)[0]: model.bytes for model in models}
    if (total := sum(sizes.values())) > memory_bytes:
        largest = max(sizes, key=lambda source: sizes[source])
        raise InputError(
            f"memory_bytes = {memory_bytes} is less than the {total} that the models take; allow "
            f"{ceil(1.5 * total / 2**20)}m or more, or leave out {largest} ({sizes[largest] / 2**20:.0f} MiB)"
        )

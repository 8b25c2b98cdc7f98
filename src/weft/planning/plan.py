"""A plan: the models as they are served, the server's settings, and the predicted latencies.

``plan.json`` of a plan folder stores a plan; the names of the folder's other files are here, too (docs/formats.md).
Nothing here reads models or this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictInt,
    ValidationError,
    model_serializer,
    model_validator,
)

from weft.base.errors import PlanError
from weft.base.jsonfile import first_problem, printable, read_json, write_json
from weft.devices.conditions import Conditions
from weft.reports.pictures import Shown
from weft.workloads.requests import Workload, read_workload

Text = Annotated[str, AfterValidator(printable)]
Name = Annotated[str, Field(min_length=1), AfterValidator(printable)]
Count = Annotated[int, Field(ge=1, le=1024)]
Bytes = Annotated[int, Field(ge=0, le=2**62)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
PolicyOption = StrictBool | StrictInt | Annotated[float, Field(allow_inf_nan=False, strict=True)]


AS_GIVEN = "as given"
"""Value of ``PlannedModel.done`` for a model whose file was not changed."""

PLAN_FILE, SETTINGS_FILE, WORKLOAD_FILE = "plan.json", "weft.toml", "workload.toml"
HOST_FILE, REPORT_FILE = "host.json", "report.html"
MODELS, DATA = "models", "data"
OF_A_PLAN = frozenset({PLAN_FILE, SETTINGS_FILE, WORKLOAD_FILE, HOST_FILE, REPORT_FILE, MODELS, DATA})
"""Names of all files and folders in the folder of a plan."""


def _inside(text: str) -> str:
    """Validate a path relative to the plan's folder; ValueError if it leads out of the folder."""
    path = PurePosixPath(text)
    if not text.isprintable() or "\\" in text or path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError("must be a path inside the plan's folder, such as models/camera/1/model.onnx")
    return path.as_posix()


Inside = Annotated[str, AfterValidator(_inside)]


class PlanMachine(BaseModel, extra="forbid", frozen=True):
    """The whole machine on which the plan was made."""

    cores: Count
    memory_bytes: Bytes
    processor: Text = ""
    gpu: Text = ""
    """Name of the GPU of the plan; empty if the plan is for the cores, or if its GPU is in another machine."""


class PlanBudget(BaseModel, extra="forbid", frozen=True):
    """The part of its machine that a plan may use; None: all of it."""

    cores: Count | None = None
    memory_bytes: Bytes | None = None


class PlannedModel(BaseModel, extra="forbid", frozen=True):
    """A model file as it is served; a stitched file holds several models with their own names."""

    name: Name
    """Its folder below ``models/``."""
    file: Inside
    sha256: Digest
    others: dict[Inside, Digest] = {}
    """The model's other files, such as external weights -> their digests."""
    bytes: Bytes
    """Size of all files of the model."""
    sources: dict[Text, Digest] = {}
    """The files from which the model was made, as absolute paths or known names -> their digests at that time."""
    done: Name = AS_GIVEN
    """How the file was made: "as given", "stitched from a and b", "int8 by calibration: ..."."""
    max_batch: Annotated[int, Field(ge=1, le=256)] = 1
    batch_timeout_ms: NotNegative = 0.0
    grain_ms: Positive = 5.0
    segments: Annotated[int, Field(ge=1)] | None = None
    """Number of segments in the prediction: as measured, or with neighbours merged; None: not measured here."""
    accuracy: NotNegative | None = None
    """Share of samples with the same answer as before the file was changed; None if it was not changed or compared."""
    accuracy_as_given: NotNegative | None = None
    """The same share for the model as given: 1, or None."""

    @property
    def source(self) -> str:
        """The source files, separated by commas."""
        return ", ".join(self.sources)

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each file of the model."""
        return {self.file: self.sha256, **self.others}


OF_CORES = ("lanes", "threads", "isolation")
"""Settings that a plan for a GPU does not have, as a GPU has one lane and one worker process with all models."""


class PlanSettings(BaseModel, extra="forbid", frozen=True):
    """How the server runs: keys of its own settings (``serving.config.ServerConfig``)."""

    device: Name | None = None
    """The GPU that runs the models; None: the cores."""
    lanes: Count = 1
    threads: Count = 1
    policy: Name = "punctual"
    policy_options: dict[str, PolicyOption] = {}
    late: Literal["weave", "keep", "demote"] = "weave"
    isolation: Name = "threads"

    @model_validator(mode="after")
    def _check_device(self) -> PlanSettings:
        """Raise ValueError unless a plan for cores has lanes, and a plan for a GPU has no ``OF_CORES``."""
        if self.device is None and "lanes" not in self.model_fields_set:
            raise ValueError("lanes is missing")
        for key in OF_CORES:
            if self.device is not None and key in self.model_fields_set:
                raise ValueError(f"{key} does not go with device = {self.device}; leave it out")
        return self

    @model_serializer(mode="wrap")
    def _serialize(self, default: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out ``OF_CORES`` if the plan is for a GPU."""
        keys: dict[str, Any] = default(self)
        return keys if self.device is None else {key: keys[key] for key in keys if key not in OF_CORES}


class StreamPrediction(BaseModel, extra="forbid", frozen=True):
    """The predicted latencies and misses of one stream."""

    model: Name
    """The name that requests ask for."""
    rate: Positive | None
    """Requests per second; None: closed streams and traces."""
    deadline_ms: Positive | None
    p50_ms: NotNegative | None
    """None: no request is answered."""
    p99_ms: NotNegative | None
    p99_max_of: Annotated[int, Field(ge=1)] | None = None
    """The number of requests, if it is below 100, so that p99 is their largest latency; else None."""
    missed: Share
    """Share of the requests that miss their deadline, are dropped or are refused."""
    exit_rates: tuple[Share, ...] = ()
    """Share that is assumed to leave at each exit of the model, the end last; empty: all run to the end."""


class Prediction(BaseModel, extra="forbid", frozen=True):
    """The result of simulating a choice with the server's own scheduler."""

    streams: Annotated[tuple[StreamPrediction, ...], Field(min_length=1)]
    load: NotNegative
    """Share of the lanes' time in which they compute."""
    sustainable_factor: NotNegative | None = None
    """The largest multiple of the planned rates that keeps the deadlines; None: not determined."""
    sustainable_per_s: NotNegative | None = None
    """The same in requests per second of all streams together."""
    memory_bytes: Bytes = 0
    """Measured memory of the server and its workers; without a measurement, the size of the models' files."""

    @property
    def worst_missed(self) -> float:
        """The largest share of misses among the streams."""
        return max(stream.missed for stream in self.streams)


class ModelChoice(BaseModel, extra="forbid", frozen=True):
    """The settings of one model in a candidate."""

    max_batch: Annotated[int, Field(ge=1, le=256)] = 1
    batch_timeout_ms: NotNegative = 0.0
    grain_ms: Positive = 5.0
    done: Name = AS_GIVEN


class PlanOption(BaseModel, extra="forbid", frozen=True):
    """A candidate with its prediction, or the reason why it was left out."""

    label: Name
    settings: PlanSettings
    models: dict[Name, ModelChoice] = {}
    predicted: Prediction | None = None
    left_out: Text = ""

    @model_validator(mode="after")
    def _check_prediction(self) -> PlanOption:
        if (self.predicted is None) != bool(self.left_out):
            raise ValueError(f"option {self.label}: either predicted or left_out, the reason, must be given")
        return self


class PlanReasons(BaseModel, extra="forbid", frozen=True):
    """Sentences that explain a plan."""

    won: tuple[Name, ...] = ()
    """Why this candidate was chosen."""
    limits: tuple[Name, ...] = ()
    """What limits its load."""
    next: tuple[Name, ...] = ()
    """What would raise that limit."""


class Plan(Shown, BaseModel, extra="forbid", frozen=True):
    """A plan. The field names are the keys of ``plan.json``."""

    format: Literal[1] = 1
    made: Text
    """A text with the time, the machine and the versions."""
    versions: dict[str, Text] = {}
    """Versions of weft, python and onnxruntime, which ``weft plan --check`` compares."""
    objective: Name
    deadlines: Literal["strict", "soft"] = "strict"
    """strict: requests are given up at their deadlines; soft: they are answered late."""
    machine: PlanMachine
    measured: Conditions | None = None
    """The machine's other load while the models were measured; None: not known, as in plans of older versions."""
    budget: PlanBudget = PlanBudget()
    models: Annotated[tuple[PlannedModel, ...], Field(min_length=1)]
    settings: PlanSettings
    predicted: Prediction
    options: tuple[PlanOption, ...] = ()
    """All candidates that were judged, the best first."""
    reasons: PlanReasons = PlanReasons()

    def __repr__(self) -> str:
        names, settings = ", ".join(model.name for model in self.models), self.settings
        where = settings.device or f"{settings.lanes} lanes"
        return f"Plan({names}: {settings.policy}, {where}, {self.predicted.worst_missed:.2%} late)"

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        """Raise ValueError if two models have the same name or file."""
        for kind, values in (
            ("name", [model.name for model in self.models]),
            ("file", [file for model in self.models for file in model.digests]),
        ):
            if repeated := _first_repeated(values):
                raise ValueError(f"two models have the {kind} {repeated!r}")
        return self


def _first_repeated(values: Iterable[str]) -> str | None:
    """Return the first value that occurred before; None if all differ."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a file, or from the ``plan.json`` of a folder; raises PlanError if it is not valid."""
    file = Path(path) / PLAN_FILE if Path(path).is_dir() else Path(path)
    return parse_plan(read_json(file, PlanError), str(file))


def parse_plan(raw: Any, where: str) -> Plan:
    """Parse the content of ``plan.json``; *where* names the file in error messages."""
    # other files of weft have a format 1, too, but no "predicted"
    if not isinstance(raw, dict) or raw.get("format") != 1 or "predicted" not in raw:
        raise PlanError(f"{where}: not a plan of format 1; weft plan -o FOLDER writes one")
    try:
        return Plan.model_validate(raw)
    except ValidationError as error:
        raise PlanError(f"{where}: {first_problem(error, *_PARTS)}") from error


_PARTS = (  # the types in plan.json, in whose terms an error message names a key
    Plan, PlanMachine, Conditions, PlanBudget, PlannedModel, PlanSettings, Prediction, StreamPrediction, PlanOption,
    ModelChoice, PlanReasons,
)  # fmt: skip


def write_plan_file(plan: Plan, path: str | Path) -> None:
    """Write the plan alone, as the ``plan.json`` of a folder has it."""
    write_json(path, plan.model_dump(mode="json"))


def is_plan(path: str | Path) -> bool:
    """Return whether this is the folder of a plan."""
    return os.path.isfile(os.path.join(path, PLAN_FILE))


def planned_workload(folder: str | Path) -> Workload:
    """Read the workload that a plan was made for, as ``weft bench`` sends it."""
    file = Path(folder) / WORKLOAD_FILE
    if not file.is_file():
        raise PlanError(f"{folder}: the plan has no {WORKLOAD_FILE}; plan again")
    return read_workload(file)

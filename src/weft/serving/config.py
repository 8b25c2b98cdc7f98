"""Settings: of each model (``weft.toml`` beside it) and of the server as a whole (``weft serve --config``).

The field names are the keys of the files; unknown keys are refused, and every error message is one line.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints
from warnings import warn

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    create_model,
)

from weft.base.errors import InputError
from weft.base.files import kind_of
from weft.base.jsonfile import first_problem, printable
from weft.base.settings import OptionPanel, how, what
from weft.base.shapes import sizes_of
from weft.runtime.backends import DEFAULT as DEFAULT_BACKEND
from weft.runtime.engines import Engine
from weft.runtime.metadata import suffixes

LARGEST_FILE_BYTES = 1 << 20
"""Limit on a settings file, which is read whole; a longer file is taken for something else and refused."""

API_KEY_VARIABLE = "WEFT_API_KEY"

DEFAULT_INFLIGHT_BYTES = 1 << 30
"""Backpressure: bodies and unread answers that are held at most, over all connections; beyond, clients get 503."""

Milliseconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
Bytes = Annotated[int, Field(ge=1, le=2**62, strict=True)]
Port = Annotated[int, Field(ge=0, le=65535, strict=True)]
Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False, strict=True)]
Option = StrictBool | StrictInt | Annotated[float, Field(allow_inf_nan=False, strict=True)]
Name = Annotated[str, Field(min_length=1, strict=True), AfterValidator(printable)]
Threshold = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
FileName = Annotated[str, Field(pattern=r"^[^/\\]+$", strict=True), AfterValidator(printable)]


Isolation = Annotated[str, Field(pattern=r"^(threads|process|group:[A-Za-z0-9._-]{1,64})$", strict=True)]
"""Where a model runs: in threads of the server, in a worker process of its own, or in that of a group."""


def _check_devices(names: str) -> str:
    """Check the names of devices, separated by commas; ValueError if one is unknown."""
    from weft.devices.host import example_devices, is_device  # numpy is slow to import, and help texts need none of it

    if not all(map(is_device, names.split(","))):
        raise ValueError(f"must be a device, as {example_devices()}, or several of a kind with commas between them")
    return names


DeviceNames = Annotated[str, Field(strict=True), AfterValidator(_check_devices)]
"""Devices of this machine, such as GPUs, with commas between them."""
Precision = Literal["fp32", "fp16", "bf16"]

LARGEST_BATCH = 256
"""Rows; the engine keeps the times of every size up to a model's largest."""


class TaskConfig(BaseModel):
    """The settings of one of the models of a stitched file; each has the meaning as in ``ModelConfig``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    slo_ms: Milliseconds | None = None
    timeout_ms: Milliseconds | None = None
    priority: Annotated[int, Field(ge=0, le=3)] = 0
    queue_size: Count = 256


class ModelConfig(BaseModel):
    """The settings of one model; all may be left out."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    slo_ms: Milliseconds | None = None
    """Deadline of requests that bring none; soft: late answers are still delivered."""
    timeout_ms: Milliseconds | None = None
    """Strict deadline of requests that bring none: late work is dropped."""
    priority: Annotated[int, Field(ge=0, le=3)] = 0
    """1 is the highest, 3 the lowest; 0 is the default."""
    max_batch: Annotated[int, Field(ge=1, le=LARGEST_BATCH)] | None = None
    """Largest batch, in rows; by default chosen for the model."""
    rows: Literal["independent"] | None = None
    """"independent": batched although an operator looks across rows."""
    batch_timeout_ms: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    """How long the first request of a batch waits for others."""
    queue_size: Count = 256
    """Requests that may wait; more are refused."""
    grain_ms: Milliseconds = 5.0
    """Target length of a segment, after which another model may run."""
    max_pieces: Annotated[int, Field(ge=1, le=65536)] = 64
    """Limit on the number of segments."""
    shapes: dict[Name, Annotated[list[Count], BeforeValidator(sizes_of)]] = {}
    """Input -> shape to warm up at, or axis -> its size, for inputs with free dimensions."""
    values: dict[Name, Annotated[float, Field(allow_inf_nan=False)]] = {}
    """Input -> number it must hold when warming up, such as a sampling rate."""
    exits: list[Name] = []
    """Outputs at which samples may leave, shallow to deep, the end last; by default those that the file names."""
    exit_threshold: Threshold = 0.8
    """Confidence at which a row leaves early, from 0 to 1; above 1 no row does."""
    exit_floor: Threshold | None = None
    """Lowest threshold under load; by default it is not lowered."""
    exit_confidence: Literal["logits", "probabilities"] = "logits"
    """Whether the outputs of the exits are logits or probabilities."""
    exit_record: Annotated[str, Field(pattern=r"^[^/\\]+\.npz$"), AfterValidator(printable)] | None = None
    """A file in the model's folder with its accuracy at each threshold."""
    preload: bool = True
    """Loaded at start; on demand otherwise."""
    tasks: dict[Name, TaskConfig] = {}
    """In a stitched file: model -> its own settings."""
    max_compute_s: Seconds | None = None
    """Limit on the computation of a request without a strict deadline, 0: none; by default the server's."""
    isolation: Isolation | None = None
    """Where it runs; by default as set for the server."""
    precision: Precision | None = None
    """Number format on a device; by default as set for the server."""
    engine: Engine | None = None
    """What runs an ONNX file on a device; auto: the faster one."""
    labels: dict[Name, FileName] = {}
    """Output -> a text file beside the model with the labels of its classes, one to a line."""

    def for_task(self, name: str) -> ModelConfig:
        """Return the settings of one model of a stitched file: its own in ``tasks``, else those of the file."""
        return self.overridden_by(self.tasks.get(name, TaskConfig()))

    def overridden_by(self, other: ModelConfig | TaskConfig) -> ModelConfig:
        """Return these settings, with the values of *other* for all settings that were set there."""
        return self.model_copy(update={key: getattr(other, key) for key in other.model_fields_set})


def read_model_config(path: Path, *, where: str | None = None) -> ModelConfig:
    """Read a model's settings from a TOML file; *where* begins the messages of errors, by default with the path."""
    shown = where or str(path)
    try:
        return ModelConfig.model_validate(read_toml(path, shown))
    except ValidationError as error:
        raise InputError(one_line(f"{shown}: {_validation_message(error, ModelConfig, TaskConfig)}")) from error


def _check_host(text: str) -> str:
    """Check an address or a host name, without a port and without brackets; ValueError for other text."""
    # digits and dots alone are no name, but may be an address
    is_name = re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text) and not re.fullmatch(r"[0-9.]+", text)
    if not is_name and (_address(text) is None or not re.fullmatch(r"[A-Za-z0-9._:%-]+", text)):
        raise ValueError("must be an address or a host name, without a port or brackets")
    return text


def _check_endpoint(value: bool | str) -> bool | str:
    """Check an HTTP address; booleans are not checked. ValueError for other text."""
    if isinstance(value, str) and not re.fullmatch(r"https?://[!-~]+", value):
        raise ValueError("must be an address such as http://localhost:4318")
    return value


Endpoint = Annotated[StrictBool | Annotated[str, Field(strict=True)], AfterValidator(_check_endpoint)]
"""An address, or True for the one that the environment names."""


def valid_key(text: str) -> str:
    """Check that an API key can be sent in a header; the message of the ValueError does not show the key."""
    if not re.fullmatch(r"[!-~]{1,4096}", text):
        raise ValueError("must be 1 to 4096 letters, digits and signs of ASCII, without spaces")
    return text


def _default_lanes() -> int:
    """Return the number of usable cores, less one for the event loop."""
    from weft.devices.host import usable_cores

    return max(1, usable_cores() - 1)


machine, network = map(OptionPanel, ("Machine", "Network"))
"""Panels for the resources of this machine that the server uses, and for the access of clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingSettings:
    """Which models are served, and how they are loaded and learned."""

    models: tuple[Name, ...] = ()
    """Repositories, .onnx files and names of models; one at least."""
    shapes: Annotated[tuple[Name, ...], what("--shape")] = ()
    """[MODEL:]INPUT=1x3x224x224, or [MODEL:]AXIS=128 for a free dimension; repeatable.

    In a file a list, as ``["camera:x=1x3x640x640"]``. They override the shapes in the models' own settings
    ([shapes](formats.md#shapes)).
    """
    ready_when: Annotated[Literal["all", "any"], how()] = "all"
    """Ready when all preloaded models can be used, or any of them."""
    preload: Annotated[StrictBool, how()] = True
    """Load models at the start, or on demand.

    false: on demand, whatever the models' own settings say.
    """
    wait_for_models: Annotated[StrictBool, how("--wait-for-models/--no-wait")] = False
    """Keep running without a usable model; models come later."""
    allow_programs: Annotated[StrictBool, machine("--allow-programs/--no-programs")] = False
    """Load programs of torch (.pt2). Such a file may run any code.

    See [programs of torch](gpu.md#programs-of-torch).
    """
    memory_budget_bytes: Annotated[Bytes | None, machine(shown="no limit")] = None
    """Memory limit of all loaded models together, as 2g."""
    repository: Annotated[Literal["open", "read-only"], network()] = "open"
    """read-only: no client may load or unload models."""
    cache: Annotated[Path | None, machine(shown="nowhere")] = None
    """Folder that keeps cut models between starts.

    It also keeps exported models and profiles.
    """
    learn_s: Annotated[Seconds, machine()] = 60.0
    """Time to learn a model (cut and measure it); 0: serve it whole."""
    compile_s: Annotated[Seconds, machine()] = 600.0
    """Limit on the time to compile a model for a device, if the device compiles models (a GPU)."""
    learn_first: Annotated[StrictBool, machine("--learn-first/--learn-later")] = False
    """Cut models before they are served.

    false: cut them in the background, while their first requests are served.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionSettings:
    """What runs the models: lanes and threads on the cores, or devices."""

    lanes: Annotated[int, Field(ge=1, le=1024, strict=True), machine(shown="cores less one")] = field(
        default_factory=_default_lanes
    )
    """Number of segments (pieces of models) computed at a time."""
    threads: Annotated[int, Field(ge=1, le=1024, strict=True), machine()] = 1
    """Threads that compute one segment."""
    backend: Annotated[Name, machine()] = DEFAULT_BACKEND
    """What runs the models: onnxruntime, or one installed.

    Other packages add theirs ([how](serving.md#backends-and-devices-of-your-own)).
    """
    pin: Annotated[StrictBool, machine("--pin/--no-pin")] = False
    """Keep every lane on a core of its own."""
    device: Annotated[DeviceNames | None, machine(shown="the cores")] = None
    """GPUs that run the models, as cuda:0 (docs/gpu.md).

    ``cuda:0,cuda:1``: a worker process for each ([a GPU](gpu.md)). Or devices that
    [another package](serving.md#backends-and-devices-of-your-own) adds.
    """
    precision: Annotated[Precision, machine()] = "fp32"
    """Number format on the device: fp32, fp16 or bf16.

    Models are converted to it unless their own settings say otherwise.
    """
    device_memory_bytes: Annotated[Bytes | None, machine(shown="no limit")] = None
    """Limit on the device memory of all loaded models together, as 20g."""
    gates: Annotated[StrictBool, machine("--gates/--no-gates")] = False
    """Experimental: let a GPU stop batches between segments; not always better.

    Batches are started as a whole ([gates](gpu.md#gates)).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingSettings:
    """The policy, the deadlines of requests that bring none, and how long they may be computed."""

    policy: Annotated[Name, how("-p", completion="policies")] = "punctual"
    """Scheduling policy: punctual, edf, fifo..."""
    policy_options: Annotated[Mapping[str, Option], how("--option")] = field(default_factory=dict)
    """NAME=VALUE of the policy; repeatable.

    In a file a table.
    """
    late: Annotated[Literal["weave", "keep", "demote"], how()] = "weave"
    """weave, keep or demote soft requests that are late.

    See [policies](policies.md#requests-with-deadlines).
    """
    default_slo_ms: Annotated[Milliseconds, how()] = 1000.0
    """Deadline of requests without one.

    It applies if their model has none either.
    """
    best_effort_ms: Milliseconds = 60000.0
    """Deadline by which requests with ``weft_best_effort`` are ordered."""
    max_compute_s: Annotated[Seconds, how()] = 60.0
    """How long a request without a strict deadline may be computed.

    0: without end.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """Limits on connections, requests and the memory that they hold."""

    max_connections: Count = 1024
    """Connections of HTTP and gRPC."""
    reserved_connections: Count = 16
    """Connections beyond ``max_connections`` that may ask for health and metrics only."""
    max_body_bytes: Annotated[Bytes, network()] = 256 << 20
    """Largest request, as 64m."""
    max_json_bytes: Annotated[Bytes, network()] = 64 << 20
    """Largest JSON of a request, as 16m.

    The typed contents of gRPC, too; what is larger must come as binary tensors.
    """
    max_inflight_bytes: Annotated[Bytes | None, network(shown="1g")] = None
    """Bodies and unread answers held together, as 512m.

    Over all connections; at least ``max_body_bytes``.
    """
    read_s: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False, strict=True), network()] = 30.0
    """Timeout for the head of a request, and for a body that stalls.

    Also the window over which ``min_bytes_per_s`` is measured.
    """
    min_bytes_per_s: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False, strict=True)] = 1024.0
    """Least rate at which a client sends a body and reads an answer, on average over ``read_s``."""
    total_queue: Count = 4096
    """Requests that may wait for all models together."""
    max_shared_memory_regions: Count = 256
    """Regions of shared memory that one key may register; each takes a file descriptor."""
    max_shared_memory_bytes: Bytes = 4 << 30
    """Bytes of shared memory that one key may register."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """Where the server listens, how clients reach it, and how they authenticate."""

    host: Annotated[str, Field(strict=True), AfterValidator(_check_host), network()] = "127.0.0.1"
    """Address to listen on."""
    http_port: Annotated[Port, network()] = 8000
    """0 lets the system choose."""
    grpc_port: Annotated[Port | None, network()] = 8001
    """0 lets the system choose, -1 is no gRPC.

    In a file ``false`` is no gRPC, in Python None.
    """
    allowed_hosts: Annotated[
        tuple[Name, ...] | None, network("--allowed-host", shown="this machine's, on loopback")
    ] = None
    """A host name of the server; may be repeated.

    Requests that name another host are refused: in ``Host``, or in the target if that is absolute. In a file a list;
    ``["*"]`` allows any name, which is the default if the server listens beyond loopback.
    """
    api_key: Annotated[str, Field(strict=True), AfterValidator(valid_key)] | None = field(default=None, repr=False)
    """The API key that requests need; ``api_key_file`` names a file that holds it.

    ``--api-key-file`` overrides it; ``WEFT_API_KEY`` is used if there is neither.
    """
    keys_file: Annotated[Path | None, network()] = None
    """Keys with names and quotas (TOML), read when it changes.

    They are valid in addition to ``api_key``.
    """
    shared_memory: Annotated[StrictBool | None, network(shown="on loopback only")] = None
    """Let clients put tensors in shared memory."""
    tls_cert: Annotated[Path | None, network()] = None
    """Certificate chain (PEM); with --tls-key."""
    tls_key: Annotated[Path | None, network()] = None
    """Its private key."""
    drain_s: Annotated[Seconds, how()] = 30.0
    """Grace period to answer requests after SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """The access log and traces, and whether clients may change them."""

    access_log: Annotated[StrictBool, network("--access-log/--no-access-log")] = False
    """A line per request."""
    otlp: Annotated[Endpoint | None, network()] = None
    """Send OpenTelemetry spans here, as http://localhost:4318.

    true: to the endpoint that the environment names.
    """
    live_settings: Annotated[Literal["open", "read-only"], network()] = "open"
    """read-only: no client may change log and trace settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Isolation of models in worker processes, and limits on those."""

    isolation: Annotated[Isolation, machine()] = "threads"
    """Where models run: threads, process (a worker each) or group:NAME (one)."""
    worker_memory_bytes: Annotated[Bytes | None, machine(shown="no limit")] = None
    """Memory limit of each worker process, as 2g."""
    worker_kill_s: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False, strict=True)] = 0.5
    """Grace period of a segment in a worker that was asked to stop; after it the worker is killed."""
    worker_spare: StrictBool = True
    """Keep a second worker with the same models, which takes over at once."""
    worker_deaths: Count = 5
    """Circuit breaker: a model whose worker dies more often in ``worker_deaths_s`` takes no requests for a while."""
    worker_deaths_s: Seconds = 8.0
    """The window in which ``worker_deaths`` are counted."""


@dataclass(frozen=True, slots=True, init=False)
class ServerConfig:
    """All settings of ``weft serve``, in groups.

    Arguments are keys of a settings file, whatever their group: ``ServerConfig(host="::1", lanes=2)``. Groups may be
    given, too, as ``dataclasses.replace`` does; keys override them. A value of a wrong type or range raises InputError.
    """

    loading: LoadingSettings
    execution: ExecutionSettings
    scheduling: SchedulingSettings
    limits: LimitSettings
    network: NetworkSettings
    telemetry: TelemetrySettings
    workers: WorkerSettings

    def __init__(self, **settings: Any) -> None:
        groups = [settings.pop(name, None) or kind() for name, kind in GROUPS.items()]
        group_values = {key.name: getattr(group, key.name) for group in groups for key in fields(group)}
        values = _validate(group_values | settings)
        if values["device"] is not None:  # each device has one lane
            values["lanes"] = len(values["device"].split(","))
        for name, kind in GROUPS.items():
            object.__setattr__(self, name, kind(**{key.name: values[key.name] for key in fields(kind)}))
        _check_combinations(self)

    if not TYPE_CHECKING:  # type checkers must reject the old names

        def __getattr__(self, name: str) -> Any:
            """Return a setting by its name before 0.3, which had no groups, with a DeprecationWarning until 0.4."""
            if name not in GROUP_OF:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            new_name = f"ServerConfig.{GROUP_OF[name]}.{name}"
            warn(f"ServerConfig.{name} is {new_name} now; the old name ends with 0.4", DeprecationWarning, stacklevel=2)
            return self.value_of(name)

    def value_of(self, key: str) -> Any:
        """Return the value of a setting by its key in a file."""
        return getattr(getattr(self, GROUP_OF[key]), key)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the log about settings that are allowed but risky."""
        if is_loopback(self.network.host) or self.network.api_key is not None or self.network.keys_file is not None:
            return ()
        lacking = "neither an API key nor TLS is set" if self.network.tls_cert is None else "no API key is set"
        return (
            f"host {self.network.host} can be reached from other machines and {lacking}; "
            "anyone who can reach it may send requests",
        )

    @property
    def inflight_bytes(self) -> int:
        """The limit on the bytes that all requests hold together, as set or by default."""
        return self.limits.max_inflight_bytes or max(DEFAULT_INFLIGHT_BYTES, self.limits.max_body_bytes)

    @property
    def shares_memory(self) -> bool:
        """Whether clients may register shared memory; by default only clients on this machine may.

        The server opens the objects that clients name with its own rights. If ``allowed_hosts`` is set, requests may
        come through a proxy from other machines, so that listening on loopback alone proves nothing.
        """
        default = is_loopback(self.network.host) and self.network.allowed_hosts is None
        return default if self.network.shared_memory is None else self.network.shared_memory


GROUPS: dict[str, type[Any]] = get_type_hints(ServerConfig)
"""Group of ``ServerConfig`` -> its class."""
GROUP_OF = {key.name: name for name, kind in GROUPS.items() for key in fields(kind)}
"""Key of a file of settings -> the group that holds it."""


def read_server_config(path: Path, *, environment: Mapping[str, str] | None = None) -> ServerConfig:
    """Read a server's settings from a TOML file; relative paths are relative to the file's folder.

    Without an API key in the file, the variable WEFT_API_KEY of *environment* (by default that of the process) is used.
    """
    shown = str(path)
    raw = read_toml(path, shown)
    _check_keys(raw, shown)
    for key in ("tls_cert", "tls_key", "cache", "api_key_file", "keys_file"):
        if isinstance(raw.get(key), str):
            raw[key] = _relative_to(path, raw[key])
    if isinstance(raw.get("models"), list):
        raw["models"] = tuple(_resolve_source(path, source) for source in raw["models"])
    for key in ("allowed_hosts", "shapes"):
        if isinstance(raw.get(key), list):
            raw[key] = tuple(raw[key])
    if raw.get("grpc_port") is False:
        raw["grpc_port"] = None
    raw["api_key"] = _take_api_key(raw, shown, os.environ if environment is None else environment)
    try:
        return ServerConfig(**raw)
    except InputError as error:
        raise InputError(one_line(f"{shown}: {error}")) from error


def read_api_key(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """Return the API key in *file*, or without a file the one in WEFT_API_KEY; None if neither is given."""
    if file is not None:
        key, where = _read_text(file, str(file)).strip(), one_line(str(file))
    else:
        key, where = environment.get(API_KEY_VARIABLE, ""), API_KEY_VARIABLE
        if not key:
            return None
    try:
        return valid_key(key)
    except ValueError as error:
        raise InputError(f"{where}: an API key {error}") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to *host*."""
    address = _address(host)
    if address is None:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def read_toml(path: Path, where: str) -> dict[str, Any]:
    """Parse a TOML file; InputError, whose message begins with *where*, if it cannot be read or parsed."""
    try:
        return tomllib.loads(_read_text(path, where))
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4300 digits
        raise InputError(one_line(f"{where}: not a TOML file: {error}")) from error


def one_line(text: str) -> str:
    """Return *text* with escapes for line breaks, control characters and characters that cannot be encoded."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def _read_text(path: Path, where: str) -> str:
    """Read a small UTF-8 file; InputError, whose message begins with *where*, if that is not possible."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # reading a pipe would wait for ever
            raise InputError(one_line(f"{where}: is {kind_of(mode)}, not a file"))
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
        if len(data) > LARGEST_FILE_BYTES:
            raise InputError(one_line(f"{where}: larger than {LARGEST_FILE_BYTES} bytes, so not a file of settings"))
        return data.decode("utf-8")
    except OSError as error:
        raise InputError(one_line(f"{where}: cannot read it: {error.strerror or error}")) from error
    except ValueError as error:  # not UTF-8, or a path with a zero in it
        raise InputError(one_line(f"{where}: cannot read it: {error}")) from error


def _address(host: str) -> Any:
    """Parse an IP address; None for other text."""
    try:
        return ip_address(host)
    except ValueError:
        return None


@cache
def setting_types() -> dict[str, Any]:
    """Return the type of each setting, with its limits, by key."""
    return {key: hint for kind in GROUPS.values() for key, hint in get_type_hints(kind, include_extras=True).items()}


@cache
def _schema() -> type[BaseModel]:
    """Create the pydantic model that checks the settings of a server; it requires all of them."""
    model_fields: dict[str, Any] = {key: (hint, ...) for key, hint in setting_types().items()}
    return create_model("ServerConfig", __config__=ConfigDict(extra="forbid"), **model_fields)


def check_setting(name: str, value: Any) -> Any:
    """Convert *value* to the type of the setting *name*; InputError if it does not fit."""
    defaults = ServerConfig()
    return _validate({key: defaults.value_of(key) for key in GROUP_OF} | {name: value})[name]


def _validate(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert all settings to their types, by key; InputError for a value that does not fit."""
    try:
        checked = _schema().model_validate(values)
    except ValidationError as error:
        raise InputError(one_line(_validation_message(error, _schema()))) from error
    return {key: getattr(checked, key) for key in GROUP_OF}


def _check_combinations(config: ServerConfig) -> None:
    """Refuse settings that are each possible, but not together."""
    network, limits, loading, execution = config.network, config.limits, config.loading, config.execution
    if network.http_port and network.http_port == network.grpc_port:
        raise InputError(f"http_port and grpc_port are both {network.http_port}; choose another for one of them")
    if (network.tls_cert is None) != (network.tls_key is None):
        given_one, missing = ("tls_key", "tls_cert") if network.tls_cert is None else ("tls_cert", "tls_key")
        raise InputError(f"{given_one} is set and {missing} is not; TLS needs both")
    if loading.learn_first and not loading.learn_s:
        raise InputError("learn_first cannot go with learn_s = 0: nothing is learned; leave one of them out")
    if limits.max_inflight_bytes is not None and limits.max_inflight_bytes < limits.max_body_bytes:
        raise InputError(
            f"max_inflight_bytes = {limits.max_inflight_bytes} is less than max_body_bytes = {limits.max_body_bytes}: "
            "such a body could never come; raise the one or lower the other"
        )
    _check_device(execution, config.workers.isolation)
    if execution.pin and execution.threads > 1:
        raise InputError(
            f"pin cannot go with threads = {execution.threads}: only lanes are kept on cores, not the threads that "
            "help them; use more lanes instead, or leave out pin"
        )


def _check_device(execution: ExecutionSettings, isolation: str) -> None:
    """Refuse settings that need a device if none is set, and isolation if a device is set; InputError."""
    if execution.device is None:
        for name, default in (("precision", "fp32"), ("device_memory_bytes", None), ("gates", False)):
            if getattr(execution, name) != default:
                raise InputError(f"{name} = {getattr(execution, name)} needs a device; set device, or leave it out")
    elif isolation != "threads":
        raise InputError(
            f"isolation = {isolation} cannot go with device = {execution.device}, whose worker has all models; "
            "leave one of them out"
        )


def _validation_message(error: ValidationError, *schemas: type[BaseModel]) -> str:
    """Describe the first problem of a validation error; *schemas*: the checked models, whose keys are suggested."""
    problem = error.errors(include_url=False, include_input=False)[0]
    if problem["loc"][:1] == ("api_key",):  # a message must not show the key
        return f"api_key: {problem['msg']}"
    try:
        return first_problem(error, *schemas)
    except ValueError:  # a whole number too long to be written out
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def _check_keys(raw: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a key of a settings file that is no setting, with a similar setting as a suggestion."""
    known = {"api_key_file", *GROUP_OF}
    for key in sorted(raw.keys() - known):
        similar = get_close_matches(key, known, n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise InputError(one_line(f"{where}: unknown key {key!r}{hint}"))


def _take_api_key(raw: dict[str, Any], where: str, environment: Mapping[str, str]) -> Any:
    """Return the API key of a settings file, else that of the environment; remove ``api_key_file`` from *raw*.

    raw: the parsed settings file, which holds the key or the path of a file with it. where: begins messages.
    """
    file, key = raw.pop("api_key_file", None), raw.get("api_key")
    if file is not None and key is not None:
        raise InputError(one_line(f"{where}: api_key and api_key_file are both set; keep one"))
    if file is not None and not isinstance(file, Path):
        raise InputError(one_line(f"{where}: api_key_file must be the path of a file"))
    return key if key is not None else read_api_key(file, environment)


def _relative_to(path: Path, given: str) -> Path:
    """Return the path *given* in the settings file *path*: absolute, or relative to the folder of that file."""
    return path.parent / given


def _resolve_source(path: Path, entry: Any) -> Any:
    """Return an entry of ``models`` in the settings file *path*, with paths relative to the folder of that file.

    Names of models that weft knows stay as they are; pydantic refuses entries that are not text later.
    """
    from weft.models.packaged import PACKAGED
    from weft.models.trained import TRAINED
    from weft.models.zoo import ZOO

    if not isinstance(entry, str) or entry in (*ZOO, *TRAINED, *PACKAGED, ""):
        return entry
    is_path = "/" in entry or entry.endswith(suffixes()) or os.path.exists(path.parent / entry)
    return str(_relative_to(path, entry)) if is_path else entry

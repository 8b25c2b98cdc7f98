"""What a user sets: per model (``weft.toml`` beside it) and for the server as a whole (``weft serve --config``).

The field names are the keys of the files; unknown keys are refused, and every complaint is one line.
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
from typing import Annotated, Any, Literal, get_type_hints

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
from weft.base.shapes import sizes_of
from weft.devices.host import example_devices, is_device, usable_cores
from weft.runtime.backends import DEFAULT as DEFAULT_BACKEND
from weft.runtime.model_kinds import suffixes

LARGEST_FILE_BYTES = 1 << 20
"""Settings are short; more than this is some other file."""

API_KEY_VARIABLE = "WEFT_API_KEY"

DEFAULT_INFLIGHT_BYTES = 1 << 30

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


def _devices(names: str) -> str:
    if not all(map(is_device, names.split(","))):
        raise ValueError(f"must be a device, as {example_devices()}, or several of a kind with commas between them")
    return names


DeviceNames = Annotated[str, Field(strict=True), AfterValidator(_devices)]
"""Devices of this machine, such as GPUs, with commas between them."""
Precision = Literal["fp32", "fp16", "bf16"]

LARGEST_BATCH = 256
"""Rows; the engine keeps the times of every size up to a model's largest."""


class TaskConfig(BaseModel):
    """What may be set for one of the models of a stitched file."""

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
    """Most rows computed together; chosen from the model where left out."""
    rows: Literal["independent"] | None = None
    """"independent": batched although an operator looks across rows."""
    batch_timeout_ms: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    """How long the first request of a batch waits for others."""
    queue_size: Count = 256
    """Requests that may wait; more are refused."""
    grain_ms: Milliseconds = 5.0
    """How long a piece of the model should run before another may go between."""
    max_pieces: Annotated[int, Field(ge=1, le=65536)] = 64
    """Most pieces the model is cut into."""
    shapes: dict[Name, Annotated[list[Count], BeforeValidator(sizes_of)]] = {}
    """Input -> shape to warm up at, or axis -> its size, for inputs with free dimensions."""
    values: dict[Name, Annotated[float, Field(allow_inf_nan=False)]] = {}
    """Input -> number it must hold when warming up, such as a sampling rate."""
    exits: list[Name] = []
    """Outputs at which samples may leave, shallow to deep, the end last; those the file names where left out."""
    exit_threshold: Threshold = 0.8
    """How sure an early answer must be, from 0 to 1; above 1 nobody leaves early."""
    exit_floor: Threshold | None = None
    """How far the threshold may sink under load; not at all where left out."""
    exit_confidence: Literal["logits", "probabilities"] = "logits"
    """What the exits give."""
    exit_record: Annotated[str, Field(pattern=r"^[^/\\]+\.npz$"), AfterValidator(printable)] | None = None
    """A file beside the model that tells how accurate it is at each threshold."""
    preload: bool = True
    """Loaded at start; on demand otherwise."""
    tasks: dict[Name, TaskConfig] = {}
    """In a stitched file: model -> what is set for it alone."""
    max_compute_s: Seconds | None = None
    """How long a request without a strict deadline may be computed, 0 without end; the server's where left out."""
    isolation: Isolation | None = None
    """Where it runs; as the server says where left out."""
    precision: Precision | None = None
    """What a device computes it with; as the server says where left out."""
    labels: dict[Name, FileName] = {}
    """Output -> a text file beside the model with the labels of its classes, one to a line."""

    def for_task(self, name: str) -> ModelConfig:
        """The settings of one of the models of a stitched file."""
        return self.overridden_by(self.tasks.get(name, TaskConfig()))

    def overridden_by(self, other: ModelConfig | TaskConfig) -> ModelConfig:
        """These settings, with those that *other* names in their place."""
        return self.model_copy(update={key: getattr(other, key) for key in other.model_fields_set})


def read_model_config(path: Path, *, where: str | None = None) -> ModelConfig:
    """The settings a model's TOML file holds; *where* opens the message, the path by default."""
    shown = where or str(path)
    try:
        return ModelConfig.model_validate(read_toml(path, shown))
    except ValidationError as error:
        raise InputError(one_line(f"{shown}: {_complaint(error, ModelConfig, TaskConfig)}")) from error


def _host(text: str) -> str:
    """An address or a host name, without a port and without brackets."""
    is_name = re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text) and not re.fullmatch(r"[0-9.]+", text)
    if not is_name and (_address(text) is None or not re.fullmatch(r"[A-Za-z0-9._:%-]+", text)):
        raise ValueError("must be an address or a host name, without a port or brackets")
    return text


def _endpoint(value: bool | str) -> bool | str:
    if isinstance(value, str) and not re.fullmatch(r"https?://[!-~]+", value):
        raise ValueError("must be an address such as http://localhost:4318")
    return value


def valid_key(text: str) -> str:
    """A key as a header can carry it; ValueError, which does not show it, for any other."""
    if not re.fullmatch(r"[!-~]{1,4096}", text):
        raise ValueError("must be 1 to 4096 letters, digits and signs of ASCII, without spaces")
    return text


def _default_lanes() -> int:
    """One core is left to the network side."""
    return max(1, usable_cores() - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All that ``weft serve`` takes. A value of the wrong kind or range raises InputError."""

    models: tuple[Name, ...] = ()
    """Repositories, .onnx files and names of models."""
    shapes: tuple[Name, ...] = ()
    """``[MODEL:]NAME=1x3x640x640``: over the shapes in the models' own settings."""
    preload: StrictBool = True
    """False: nothing is loaded at the start, whatever the models' own settings say; models come when asked for."""
    ready_when: Literal["all", "any"] = "all"
    """Which of the preloaded models must be usable for the server to be ready."""
    wait_for_models: StrictBool = False
    """Whether a server that was started with no model that can be served stays, for models that come later."""
    host: Annotated[str, Field(strict=True), AfterValidator(_host)] = "127.0.0.1"
    http_port: Port = 8000
    """0 lets the system choose."""
    grpc_port: Port | None = 8001
    """None, or ``false`` in a file: no gRPC."""
    lanes: Annotated[int, Field(ge=1, le=1024, strict=True)] = field(default_factory=_default_lanes)
    """Pieces of models that run at the same time; the usable cores less one where left out."""
    threads: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    """Threads that work on one piece."""
    backend: Name = DEFAULT_BACKEND
    """What runs the models (``runtime.backends``)."""
    pin: StrictBool = False
    """Keep every lane on cores of its own."""
    device: DeviceNames | None = None
    """GPUs that run the models, in a worker process each; the cores where left out."""
    precision: Precision = "fp32"
    """What a device computes with where the model does not say."""
    device_memory_bytes: Bytes | None = None
    """What models may hold of each device's memory together; no limit where left out."""
    allow_programs: StrictBool = False
    """Whether programs of torch are loaded, which may run code that lies in them."""
    policy: Name = "punctual"
    policy_options: Mapping[str, Option] = field(default_factory=dict)
    late: Literal["weave", "keep", "demote"] = "weave"
    """What becomes of requests that missed a deadline which is not strict (``engine.lateness``)."""
    memory_budget_bytes: Bytes | None = None
    """What loaded models may hold together; no limit where left out."""
    default_slo_ms: Milliseconds = 1000.0
    """Deadline where neither the request nor its model has one."""
    best_effort_ms: Milliseconds = 60000.0
    """Deadline of requests that ask for none in particular."""
    max_body_bytes: Bytes = 256 << 20
    max_connections: Count = 1024
    total_queue: Count = 4096
    """Requests that may wait for all models together."""
    api_key: Annotated[str, Field(strict=True), AfterValidator(valid_key)] | None = field(default=None, repr=False)
    """What requests must carry; in a file also as ``api_key_file``."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    cache: Path | None = None
    """Where profiles and exported models are kept between starts."""
    drain_s: Seconds = 30.0
    """How long running requests may take to finish once the server is told to stop."""
    access_log: StrictBool = False
    otlp: Annotated[StrictBool | Annotated[str, Field(strict=True)], AfterValidator(_endpoint)] | None = None
    """Where traces go: an endpoint, or True for the one the environment names."""
    learn_s: Seconds = 60.0
    """How long a model may be tried out to be cut, measured and warmed up; 0: models are served whole."""
    learn_first: StrictBool = False
    """Whether that is done before a model is served, or beside it."""
    max_compute_s: Seconds = 60.0
    """How long a request without a strict deadline may be computed; 0: without end."""
    isolation: Isolation = "threads"
    """"threads" of the server, a worker "process" for each model, or one for all of them: "group:NAME"."""
    worker_memory_bytes: Bytes | None = None
    """What a worker may have; no limit where left out."""
    worker_kill_s: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False, strict=True)] = 0.5
    """How long a segment in a worker may take to end that was told to stop; its worker is killed then."""
    worker_spare: StrictBool = True
    """Keep a second worker with the same models, which takes over at once."""
    worker_deaths: Count = 5
    """A model whose worker dies more often than that within ``worker_deaths_s`` takes no requests for a while."""
    worker_deaths_s: Seconds = 8.0
    max_inflight_bytes: Bytes | None = None
    """Bytes of bodies and unread answers held at a time, over all connections; 1 GiB where left out, or a body."""
    max_json_bytes: Bytes = 64 << 20
    """The largest JSON in a request; what is larger must come as binary tensors."""
    read_s: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False, strict=True)] = 30.0
    """How long the head of a request may take; also the window over which ``min_bytes_per_s`` is asked."""
    min_bytes_per_s: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False, strict=True)] = 1024.0
    """How fast a body must come, and an answer be taken, at least; then they may take any time."""
    reserved_connections: Count = 16
    """Connections beyond ``max_connections`` that may ask for health and metrics only."""
    keys_file: Path | None = None
    """Keys with names, priorities and quotas (``serving.keys``), read again when it changes."""
    repository: Literal["open", "read-only"] = "open"
    """"read-only": no client may load or unload models."""
    allowed_hosts: tuple[Name, ...] | None = None
    """Names under which it may be asked, or ``*``; where left out those of this machine, on loopback, else any."""
    live_settings: Literal["open", "read-only"] = "open"
    """"read-only": no client may change the settings of the log and of the trace."""
    shared_memory: StrictBool | None = None
    """Whether clients may put tensors in shared memory; where left out on loopback only (``shares_memory``)."""
    max_shared_memory_regions: Count = 256
    """Regions of shared memory that one key may register; each takes a file descriptor."""
    max_shared_memory_bytes: Bytes = 4 << 30
    """Bytes of shared memory that one key may register."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed and still worth a line in the log."""
        if is_loopback(self.host) or self.api_key is not None or self.keys_file is not None:
            return ()
        lacking = "neither an API key nor TLS is set" if self.tls_cert is None else "no API key is set"
        return (
            f"host {self.host} can be reached from other machines and {lacking}; "
            "anyone who can reach it may send requests",
        )

    @property
    def inflight_bytes(self) -> int:
        """Bytes that requests may hold together, whether that is set or not."""
        return self.max_inflight_bytes or max(DEFAULT_INFLIGHT_BYTES, self.max_body_bytes)

    @property
    def shares_memory(self) -> bool:
        """Whether clients may register shared memory, whether that is set or not.

        The server opens what they name with its own rights, so only who is on its machine may unless it is set; under
        other names than this machine's somebody else may ask, through a proxy.
        """
        alone = is_loopback(self.host) and self.allowed_hosts is None
        return alone if self.shared_memory is None else self.shared_memory


def read_server_config(path: Path, *, environment: Mapping[str, str] | None = None) -> ServerConfig:
    """The settings a TOML file holds, its paths taken from the file's folder.

    A key that the file does not give is taken from the variable WEFT_API_KEY of *environment*, by
    default that of the process.
    """
    shown = str(path)
    raw = read_toml(path, shown)
    _check_keys(raw, shown)
    for key in ("tls_cert", "tls_key", "cache", "api_key_file", "keys_file"):
        if isinstance(raw.get(key), str):
            raw[key] = _below(path, raw[key])
    if isinstance(raw.get("models"), list):
        raw["models"] = tuple(_source(path, each) for each in raw["models"])
    for key in ("allowed_hosts", "shapes"):
        if isinstance(raw.get(key), list):
            raw[key] = tuple(raw[key])
    if raw.get("grpc_port") is False:
        raw["grpc_port"] = None
    raw["api_key"] = _key_in(raw, shown, os.environ if environment is None else environment)
    try:
        return ServerConfig(**raw)
    except InputError as error:
        raise InputError(one_line(f"{shown}: {error}")) from error


def read_api_key(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The key in *file*, or else in WEFT_API_KEY; None where there is neither."""
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
    """The parsed file; whatever is wrong with it is an InputError."""
    try:
        return tomllib.loads(_read_text(path, where))
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4300 digits
        raise InputError(one_line(f"{where}: not a TOML file: {error}")) from error


def one_line(text: str) -> str:
    """*text* with line breaks, control characters and what no encoding can hold written as escapes."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _read_text(path: Path, where: str) -> str:
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
    try:
        return ip_address(host)
    except ValueError:
        return None


@cache
def _schema() -> type[BaseModel]:
    """The fields of ServerConfig, as pydantic checks them."""
    hints = get_type_hints(ServerConfig, include_extras=True)
    wanted: dict[str, Any] = {each.name: (hints[each.name], ...) for each in fields(ServerConfig)}
    return create_model("ServerConfig", __config__=ConfigDict(extra="forbid"), **wanted)


def check_setting(name: str, value: Any) -> Any:
    """*value* as the setting *name* holds it; InputError, whatever the others are, if it cannot be."""
    usual = ServerConfig()
    given = {each.name: getattr(usual, each.name) for each in fields(usual)} | {name: value}
    try:
        return getattr(_schema().model_validate(given), name)
    except ValidationError as error:
        raise InputError(one_line(_complaint(error, _schema()))) from error


def _check(config: ServerConfig) -> None:
    """Refuse values that cannot be; numbers, paths and lists get the type their field has."""
    given = {each.name: getattr(config, each.name) for each in fields(config)}
    try:
        checked = _schema().model_validate(given)
    except ValidationError as error:
        raise InputError(one_line(_complaint(error, _schema()))) from error
    for name in given:
        object.__setattr__(config, name, getattr(checked, name))
    if config.http_port and config.http_port == config.grpc_port:
        raise InputError(f"http_port and grpc_port are both {config.http_port}; choose another for one of them")
    if (config.tls_cert is None) != (config.tls_key is None):
        given_one, missing = ("tls_key", "tls_cert") if config.tls_cert is None else ("tls_cert", "tls_key")
        raise InputError(f"{given_one} is set and {missing} is not; TLS needs both")
    if config.learn_first and not config.learn_s:
        raise InputError("learn_first cannot go with learn_s = 0: nothing is learned; leave one of them out")
    if config.max_inflight_bytes is not None and config.max_inflight_bytes < config.max_body_bytes:
        raise InputError(
            f"max_inflight_bytes = {config.max_inflight_bytes} is less than max_body_bytes = {config.max_body_bytes}: "
            "such a body could never come; raise the one or lower the other"
        )
    _check_device(config)
    if config.pin and config.threads > 1:
        raise InputError(
            f"pin cannot go with threads = {config.threads}: only lanes are kept on cores, not the threads that help "
            "them; use more lanes instead, or leave out pin"
        )


def _check_device(config: ServerConfig) -> None:
    """Each device has one lane; what only they can do needs one."""
    if config.device is None:
        for name, usual in (("precision", "fp32"), ("device_memory_bytes", None)):
            if getattr(config, name) != usual:
                raise InputError(f"{name} = {getattr(config, name)} needs a device; set device, or leave it out")
        return
    if config.isolation != "threads":
        raise InputError(
            f"isolation = {config.isolation} cannot go with device = {config.device}, whose worker has all models; "
            "leave one of them out"
        )
    object.__setattr__(config, "lanes", len(config.device.split(",")))


def _complaint(error: ValidationError, *schemas: type[BaseModel]) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    if problem["loc"][:1] == ("api_key",):  # a message must not show the key
        return f"api_key: {problem['msg']}"
    try:
        return first_problem(error, *schemas)
    except ValueError:  # a whole number too long to be written out
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def _check_keys(raw: Mapping[str, Any], where: str) -> None:
    """Refuse keys that are no settings, before any value is looked at."""
    known = {"api_key_file", *(each.name for each in fields(ServerConfig))}
    for key in sorted(raw.keys() - known):
        near = get_close_matches(key, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(one_line(f"{where}: unknown key {key!r}{hint}"))


def _key_in(raw: dict[str, Any], where: str, environment: Mapping[str, str]) -> Any:
    """The key the file gives or names, or else the one of the environment."""
    file, key = raw.pop("api_key_file", None), raw.get("api_key")
    if file is not None and key is not None:
        raise InputError(one_line(f"{where}: api_key and api_key_file are both set; keep one"))
    if file is not None and not isinstance(file, Path):
        raise InputError(one_line(f"{where}: api_key_file must be the path of a file"))
    return key if key is not None else read_api_key(file, environment)


def _below(path: Path, given: str) -> Path:
    """*given*, as seen from the folder of the file *path*."""
    return path.parent / given


def _source(path: Path, given: Any) -> Any:
    """A name that weft knows stays one; all else is a path."""
    from weft.models.packaged import PACKAGED
    from weft.models.trained import TRAINED
    from weft.models.zoo import ZOO

    if not isinstance(given, str) or given in (*ZOO, *TRAINED, *PACKAGED, ""):
        return given
    known_by_path = "/" in given or given.endswith(suffixes()) or os.path.exists(path.parent / given)
    return str(_below(path, given)) if known_by_path else given

"""Settings that clients may change: log and trace, as in the protocol's extensions, and a model's when they load it.

Logging: the destination of the log is up to the operator, and only the loggers of ``weft`` are affected. Trace, for the
server and for single models: a traced request has its segments in ``/weft/trace``, and an OpenTelemetry span if spans
are sent. By default all requests are traced: the trace is in memory, bounded, and costs next to nothing.

A load request may contain Triton's ``ModelConfig`` as JSON, read as far as it has a meaning here. Values that the model
already has are accepted, so that a client can edit the configuration it was shown and send it back. Everything else is
refused by name: files, labels and isolation are set by the owner of the repository.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import ValidationError

from weft.base.errors import BadRequest, Unsupported
from weft.base.jsonfile import first_problem
from weft.serving.config import ModelConfig, TaskConfig, one_line

FORMAT = "%(asctime)s %(name)s %(message)s"
LOGGER = "weft"

_LOG_DEFAULTS: dict[str, Any] = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
FORMATS = ("default", "ISO8601")
MOST_VERBOSE = 2**31 - 1
"""The largest ``log_verbose_level``, which gRPC sends as an int32 in Triton; here all levels above 0 are the same."""

OFF, TIMESTAMPS, TENSORS = "OFF", "TIMESTAMPS", "TENSORS"
ENDLESS = -1
"""The ``trace_count`` that means no limit."""

_LARGEST = 2**31 - 1
"""Limit on rates and counts: Triton keeps them in 32 bits."""
_TRACE_KEYS = ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file", "trace_mode")

PARAMETER_PREFIX = "weft_"
"""Prefix of weft's settings among a configuration's parameters."""

LATEST_VERSION = {"latest": {"num_versions": 1}}
"""Triton's default ``version_policy``, which its clients send even if it was not shown."""

SETTABLE = frozenset({
    "slo_ms", "timeout_ms", "priority", "max_batch", "batch_timeout_ms", "queue_size", "grain_ms", "max_pieces",
    "shapes", "values", "exit_threshold", "exit_floor",
})  # fmt: skip
"""Settings of weft that a client may change."""


class LogSettings(logging.Filter):
    """The log settings of one server, and the filter that applies them to log handlers after the first change."""

    def __init__(self) -> None:
        super().__init__()
        self._settings = dict(_LOG_DEFAULTS)
        self._old_formatters: dict[logging.Handler, logging.Formatter | None] = {}
        """Handler with the filter -> its original formatter."""
        self._level: int | None = None
        """The logger's original level; None while it is unchanged."""

    def as_dict(self) -> dict[str, Any]:
        """Return all settings, by the protocol's names."""
        return dict(self._settings)

    def change(self, wanted: Mapping[str, Any]) -> None:
        """Change the settings in *wanted*, or none of them if one is invalid; None leaves a setting as it is."""
        changes = {key: value for key, value in wanted.items() if value is not None}
        for key, value in changes.items():
            _check_log(key, value)
        if changes:
            self._settings |= changes
            self._apply()

    def restore(self) -> None:
        """Undo all changes to handlers and to the logger's level."""
        for handler, formatter in self._old_formatters.items():
            handler.removeFilter(self)
            handler.setFormatter(formatter)
        self._old_formatters.clear()
        if self._level is not None:
            logging.getLogger(LOGGER).setLevel(self._level)
            self._level = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a line of the log is written, as the settings say; lines of other packages always are.

        ``log_info``, ``log_warning`` and ``log_error`` switch lines by level. Lines below INFO need a verbose level.
        """
        if record.name.partition(".")[0] != LOGGER:
            return True
        if record.levelno < logging.INFO:
            return bool(self._settings["log_verbose_level"])
        kind = "info" if record.levelno < logging.WARNING else "warning" if record.levelno < logging.ERROR else "error"
        return bool(self._settings[f"log_{kind}"])

    def _apply(self) -> None:
        """Install filter and format on all handlers, and lower the logger's level if lines below INFO are on."""
        self.restore()
        logger = logging.getLogger(LOGGER)
        if self._settings["log_verbose_level"]:
            self._level = logger.level
            logger.setLevel(logging.DEBUG)
        dated = self._settings["log_format"] != "default"
        for handler in {*logger.handlers, *logging.getLogger().handlers}:
            self._old_formatters[handler] = handler.formatter
            handler.addFilter(self)
            if dated:
                handler.setFormatter(_utc_formatter())


def _check_log(key: str, value: Any) -> None:
    """Raise BadRequest or Unsupported unless *value* is a value of the log setting *key*."""
    match key:
        case "log_file":
            raise Unsupported("log_file cannot be set by clients; the log goes where the server's errors go")
        case "log_info" | "log_warning" | "log_error":
            if not isinstance(value, bool):
                raise BadRequest(f"{key} must be true or false")
        case "log_verbose_level":
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_VERBOSE:
                raise BadRequest(f"{key} must be a whole number from 0 to {MOST_VERBOSE}; above 0 all is written")
        case "log_format":
            if value not in FORMATS:
                raise BadRequest(f"{key} must be {' or '.join(FORMATS)}")
        case _:
            raise BadRequest(f"there is no log setting {key[:64]!r}; there are {', '.join(_LOG_DEFAULTS)}")


def _utc_formatter() -> logging.Formatter:
    formatter = logging.Formatter(FORMAT, "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    return formatter


@dataclass(slots=True)
class _Scope:
    """The trace settings of the server, or of one model, for which None means the server's value."""

    level: str | None = None
    rate: int | None = None
    """One of *rate* requests is traced."""
    count: int | None = None
    """Requests that are still to be traced."""
    seen: int = 0
    """Requests since the last change."""

    @property
    def empty(self) -> bool:
        return self.level is None and self.rate is None and self.count is None


class TraceSettings:
    """The trace settings of one server; decides for every request whether it is traced."""

    def __init__(self) -> None:
        self._server = _default_trace()
        self._models: dict[str, _Scope] = {}  # only models with settings of their own
        self.everything = True
        """Whether every request is traced, because no setting differs from the default."""

    def as_dict(self, model: str = "") -> dict[str, Any]:
        """Return the effective settings of the server or of a model, by the protocol's names."""
        level_scope, rate_scope, count_scope = self._effective(self._models.get(model))
        return {
            "trace_level": [level_scope.level],
            "trace_rate": str(rate_scope.rate),
            "trace_count": str(count_scope.count),
            "log_frequency": "0",
            "trace_file": "",
            "trace_mode": "triton",
        }

    def change(self, wanted: Mapping[str, Any], model: str = "") -> None:
        """Change the named settings, all or none; null, or no value, resets to the server's setting or the default."""
        changes = {key: _read_trace(key, _as_strings(key, value)) for key, value in wanted.items()}
        scope = self._models.get(model, _Scope()) if model else self._server
        defaults = _Scope() if model else _default_trace()
        for name in ("level", "rate", "count"):
            if (key := f"trace_{name}") in changes:
                value = changes[key]
                setattr(scope, name, getattr(defaults, name) if value is None else value)
        scope.seen = 0
        if model and scope.empty:
            self._models.pop(model, None)
        elif model:
            self._models[model] = scope
        self.everything = not self._models and self._server == _default_trace()

    def sample(self, model: str) -> bool:
        """Decide whether a new request for a model is traced, and count the request."""
        if self.everything:
            return True
        model_scope = self._models.get(model)
        level_scope, rate_scope, count_scope = self._effective(model_scope)
        counter = model_scope or self._server  # a model with any setting of its own has its own counter
        counter.seen += 1
        if level_scope.level == OFF or not count_scope.count or counter.seen % (rate_scope.rate or 1):
            return False
        if count_scope.count > 0:  # not ENDLESS
            count_scope.count -= 1
        return True

    def _effective(self, model_scope: _Scope | None) -> tuple[_Scope, _Scope, _Scope]:
        """Return three scopes: whose level, whose rate and whose count is effective for a model.

        model_scope: the model's scope; None if it has no settings of its own.
        """
        server = self._server
        if model_scope is None:
            return server, server, server
        return (
            server if model_scope.level is None else model_scope,
            server if model_scope.rate is None else model_scope,
            server if model_scope.count is None else model_scope,
        )


def _default_trace() -> _Scope:
    return _Scope(TIMESTAMPS, 1, ENDLESS)


def _as_strings(key: str, value: Any) -> list[str]:
    """Convert a setting to a list of strings, as in gRPC; empty if it is reset."""
    if value is None:
        return []
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int) and not isinstance(item, bool) for item in items):
        raise BadRequest(f"trace setting {key[:64]!r} must be a string or a list of strings")
    return [str(item) for item in items[:8]]  # valid settings have one item; the limit bounds the work for others


def _read_trace(key: str, values: list[str]) -> str | int | None:
    """Parse the value of a setting, None if it is reset; Unsupported for settings that clients cannot change."""
    match key:
        case "trace_level":
            return _parse_level(values)
        case "trace_rate":
            return _parse_number(key, values, 1)
        case "trace_count":
            return _parse_number(key, values, ENDLESS)
        case "log_frequency":
            if _parse_number(key, values, 0):
                raise Unsupported("log_frequency must be 0: the trace is in memory, see /weft/trace, and in no file")
            return None
        case "trace_file":
            raise Unsupported("trace_file cannot be set by clients: the trace is in memory, see /weft/trace")
        case "trace_mode":
            if values not in ([], ["triton"]):
                raise Unsupported("trace_mode cannot be changed; OpenTelemetry is chosen when the server is started")
            return None
    raise BadRequest(f"there is no trace setting {key[:64]!r}; there are {', '.join(_TRACE_KEYS)}")


def _parse_level(values: list[str]) -> str | None:
    """Parse ``trace_level``; None if *values* is empty (reset)."""
    if TENSORS in values:
        raise Unsupported(f"trace_level {TENSORS} is not supported: what requests hold is not traced")
    if not values:
        return None
    if values not in ([OFF], [TIMESTAMPS]):
        raise BadRequest(f"trace_level must be {OFF} or {TIMESTAMPS}")
    return values[0]


def _parse_number(key: str, values: list[str], least: int) -> int | None:
    """Parse the single whole number, of at least *least*, in *values*; None if *values* is empty (reset)."""
    if not values:
        return None
    text = values[0]
    if len(values) == 1 and len(text) <= 11 and text.removeprefix("-").isdecimal() and text.isascii():
        number = int(text)
        if least <= number <= _LARGEST:
            return number
    raise BadRequest(f"{key} must be one whole number from {least} to {_LARGEST}")


def parameters_of(settings: ModelConfig) -> dict[str, dict[str, str]]:
    """Convert the settings of a model to parameters of its configuration: text as it is, others as JSON."""
    members = settings.model_dump(mode="json").items()
    return {
        f"{PARAMETER_PREFIX}{key}": {"string_value": _to_text(value)} for key, value in members if value is not None
    }


def requested_settings(parameters: Mapping[str, Any], shown: Mapping[str, Any]) -> ModelConfig | None:
    """Return the settings in the parameters of a load request, None if it has none.

    shown: the model's configuration as clients see it; values equal to it are accepted anywhere.
    """
    for key in parameters:
        if key.startswith("file:"):
            raise Unsupported(f"load parameter {key[:64]!r} is not supported: models come from the repository")
        if key != "config":
            raise BadRequest(f"load takes the parameter config, not {key[:64]!r}")
    if "config" not in parameters:
        return None
    return _validate_settings(dict(_read_changes(_parse_object(parameters["config"]), shown)))


def _parse_object(text: Any) -> dict[str, Any]:
    """Parse the JSON object of a model configuration."""
    try:
        config = orjson.loads(text)
    except (orjson.JSONDecodeError, TypeError) as error:
        raise BadRequest(f"config is not the JSON of a model configuration: {str(error)[:200]}") from error
    if not isinstance(config, dict):
        raise BadRequest("config must be a JSON object")
    return config


def _validate_settings(settings: dict[str, Any]) -> ModelConfig:
    """Make a ModelConfig of settings by name; BadRequest if one is invalid."""
    try:
        return ModelConfig.model_validate(settings)
    except ValidationError as error:
        raise BadRequest(one_line(f"config: {first_problem(error, ModelConfig, TaskConfig)}")) from error


def _read_changes(config: Mapping[str, Any], shown: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each setting of weft in *config*, a Triton ModelConfig.

    Other members of *config* must be empty or as in *shown*, the model's configuration as clients see it.
    """
    for key, value in config.items():
        if key == "max_batch_size":
            yield "max_batch", value or 1  # 0 is Triton's value for models that are not batched
        elif key == "dynamic_batching":
            yield from _read_batching(value)
        elif key == "parameters":
            yield from _read_parameters(value, shown.get("parameters", {}))
        elif value and value != shown.get(key) and (key, value) != ("version_policy", LATEST_VERSION):
            raise Unsupported(f"config: {key[:64]!r} cannot be set when a model is loaded; leave it out")


def _read_batching(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each setting of weft in Triton's ``dynamic_batching``."""
    for key, setting in _nonempty_members("dynamic_batching", value):
        match key:
            case "max_queue_delay_microseconds":
                yield "batch_timeout_ms", _to_milliseconds(key, setting)
            case "default_priority_level":
                yield "priority", setting
            case "default_queue_policy":
                yield from _read_queue_policy(setting)
            case _:
                raise Unsupported(f"config: dynamic_batching.{key[:64]} means nothing here; leave it out")


def _read_queue_policy(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each setting of weft in Triton's ``default_queue_policy``."""
    for key, setting in _nonempty_members("default_queue_policy", value):
        match key:
            case "max_queue_size":
                yield "queue_size", setting
            case "default_timeout_microseconds":
                yield "timeout_ms", _to_milliseconds(key, setting)
            case _:
                raise Unsupported(f"config: default_queue_policy.{key[:64]} means nothing here; leave it out")


def _read_parameters(value: Any, shown: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each setting of weft in Triton's ``parameters``; others must be as in *shown*."""
    for key, parameter in _nonempty_members("parameters", value):
        name = key.removeprefix(PARAMETER_PREFIX)
        text = parameter.get("string_value") if isinstance(parameter, dict) else None
        if not isinstance(text, str):
            raise BadRequest(f'config: parameter {key[:64]!r} must be {{"string_value": "..."}}')
        if name != key and name in SETTABLE:
            yield name, _from_text(text)
        elif parameter != shown.get(key):
            raise Unsupported(f"config: parameter {key[:64]!r} cannot be set when a model is loaded; leave it out")


def _nonempty_members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Return key and value of the members of a JSON object, without empty or zero values: they mean the default.

    name: what the object is called in the message of the BadRequest for a *value* that is no object.
    """
    if not isinstance(value, dict):
        raise BadRequest(f"config: {name} must be a JSON object")
    return ((key, member) for key, member in value.items() if member)


def _to_milliseconds(key: str, value: Any) -> float:
    """Convert microseconds to milliseconds; protobuf writes numbers of 64 bits as text in JSON."""
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 19 else value
    if isinstance(number, bool) or not isinstance(number, int):
        raise BadRequest(f"config: {key} must be a whole number of microseconds")
    return number / 1000


def _to_text(value: Any) -> str:
    """Write a setting as the text of a parameter: strings as they are, other values as JSON."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _from_text(text: str) -> Any:
    """Read a setting that ``_to_text`` wrote."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text

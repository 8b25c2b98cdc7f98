"""Settings in a client's load request: Triton's ``ModelConfig`` as JSON, as far as it has a meaning here.

Values that the model already has are accepted, so that a client can edit the configuration it was shown and send it
back. Everything else is refused by name: files, labels and isolation are set by the owner of the repository.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from pydantic import ValidationError

from weft.base.errors import BadRequest, Unsupported
from weft.base.jsonfile import first_problem
from weft.serving.config import ModelConfig, TaskConfig, one_line

PREFIX = "weft_"
"""Prefix of weft's settings among a configuration's parameters."""

SETTABLE = frozenset({
    "slo_ms", "timeout_ms", "priority", "max_batch", "batch_timeout_ms", "queue_size", "grain_ms", "max_pieces",
    "shapes", "values", "exit_threshold", "exit_floor",
})  # fmt: skip
"""Settings of weft that a client may change."""


def parameters_of(settings: ModelConfig) -> dict[str, dict[str, str]]:
    """Convert the settings of a model to parameters of its configuration: text as it is, others as JSON."""
    given = settings.model_dump(mode="json").items()
    return {f"{PREFIX}{key}": {"string_value": _text(value)} for key, value in given if value is not None}


def requested_settings(parameters: Mapping[str, Any], shown: Mapping[str, Any]) -> ModelConfig | None:
    """Return the settings in the parameters of a load request, None if there are none.

    *shown* is the model's configuration as clients see it.
    """
    for key in parameters:
        if key.startswith("file:"):
            raise Unsupported(f"load parameter {key[:64]!r} is not supported: models come from the repository")
        if key != "config":
            raise BadRequest(f"load takes the parameter config, not {key[:64]!r}")
    if "config" not in parameters:
        return None
    return _settings(dict(_changes(_object(parameters["config"]), shown)))


def _object(text: Any) -> dict[str, Any]:
    try:
        config = orjson.loads(text)
    except (orjson.JSONDecodeError, TypeError) as error:
        raise BadRequest(f"config is not the JSON of a model configuration: {str(error)[:200]}") from error
    if not isinstance(config, dict):
        raise BadRequest("config must be a JSON object")
    return config


def _settings(given: dict[str, Any]) -> ModelConfig:
    try:
        return ModelConfig.model_validate(given)
    except ValidationError as error:
        raise BadRequest(one_line(f"config: {first_problem(error, ModelConfig, TaskConfig)}")) from error


def _changes(config: Mapping[str, Any], shown: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of weft, by name, that a configuration contains."""
    for key, value in config.items():
        if key == "max_batch_size":
            yield "max_batch", value or 1
        elif key == "dynamic_batching":
            yield from _batching(value)
        elif key == "parameters":
            yield from _parameters(value, shown.get("parameters", {}))
        elif value and value != shown.get(key) and (key, value) != ("version_policy", {"latest": {"num_versions": 1}}):
            raise Unsupported(f"config: {key[:64]!r} cannot be set when a model is loaded; leave it out")


def _batching(value: Any) -> Iterator[tuple[str, Any]]:
    for key, setting in _members("dynamic_batching", value):
        match key:
            case "max_queue_delay_microseconds":
                yield "batch_timeout_ms", _milliseconds(key, setting)
            case "default_priority_level":
                yield "priority", setting
            case "default_queue_policy":
                yield from _queue_policy(setting)
            case _:
                raise Unsupported(f"config: dynamic_batching.{key[:64]} means nothing here; leave it out")


def _queue_policy(value: Any) -> Iterator[tuple[str, Any]]:
    for key, setting in _members("default_queue_policy", value):
        match key:
            case "max_queue_size":
                yield "queue_size", setting
            case "default_timeout_microseconds":
                yield "timeout_ms", _milliseconds(key, setting)
            case _:
                raise Unsupported(f"config: default_queue_policy.{key[:64]} means nothing here; leave it out")


def _parameters(value: Any, shown: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, parameter in _members("parameters", value):
        name = key.removeprefix(PREFIX)
        text = parameter.get("string_value") if isinstance(parameter, dict) else None
        if not isinstance(text, str):
            raise BadRequest(f'config: parameter {key[:64]!r} must be {{"string_value": "..."}}')
        if name != key and name in SETTABLE:
            yield name, _value(text)
        elif parameter != shown.get(key):
            raise Unsupported(f"config: parameter {key[:64]!r} cannot be set when a model is loaded; leave it out")


def _members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Return the members of an object that are not empty or zero, which stand for the default."""
    if not isinstance(value, dict):
        raise BadRequest(f"config: {name} must be a JSON object")
    return ((key, member) for key, member in value.items() if member)


def _milliseconds(key: str, value: Any) -> float:
    """Convert microseconds, which are text in the JSON of protobuf messages because they have 64 bits."""
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 19 else value
    if isinstance(number, bool) or not isinstance(number, int):
        raise BadRequest(f"config: {key} must be a whole number of microseconds")
    return number / 1000


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text

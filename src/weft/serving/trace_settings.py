"""Trace settings that clients may change, for the server and for single models: the protocol's trace extension.

A traced request has its segments in ``/weft/trace``, and an OpenTelemetry span if spans are sent. By default all
requests are traced: the trace is in memory, bounded, and costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.base.errors import BadRequest, Unsupported

OFF, TIMESTAMPS, TENSORS = "OFF", "TIMESTAMPS", "TENSORS"
ENDLESS = -1
"""The count without a limit."""

_LARGEST = 2**31 - 1
"""Limit on rates and counts: Triton keeps them in 32 bits."""
_KNOWN = ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file", "trace_mode")


@dataclass(slots=True)
class _Scope:
    """The settings of the server, or of one model, for which None stands for the server's."""

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
    """The settings of one server; decides for every request whether it is traced."""

    def __init__(self) -> None:
        self._server = _default()
        self._models: dict[str, _Scope] = {}
        self.everything = True

    def as_dict(self, model: str = "") -> dict[str, Any]:
        """Return the effective settings of the server or of a model, by the protocol's names."""
        level, rate, count = self._effective(self._models.get(model))
        return {
            "trace_level": [level.level],
            "trace_rate": str(rate.rate),
            "trace_count": str(count.count),
            "log_frequency": "0",
            "trace_file": "",
            "trace_mode": "triton",
        }

    def change(self, wanted: Mapping[str, Any], model: str = "") -> None:
        """Change the named settings, all or none; null, or no value, resets to the server's setting or the default."""
        changes = {key: _read(key, _values(key, value)) for key, value in wanted.items()}
        scope = self._models.get(model, _Scope()) if model else self._server
        base = _Scope() if model else _default()
        for name in ("level", "rate", "count"):
            if (key := f"trace_{name}") in changes:
                value = changes[key]
                setattr(scope, name, getattr(base, name) if value is None else value)
        scope.seen = 0
        if model and scope.empty:
            self._models.pop(model, None)
        elif model:
            self._models[model] = scope
        self.everything = not self._models and self._server == _default()

    def takes(self, model: str) -> bool:
        """Decide whether a new request is traced, and count it."""
        if self.everything:
            return True
        own = self._models.get(model)
        level, rate, count = self._effective(own)
        counter = own or self._server
        counter.seen += 1
        if level.level == OFF or not count.count or counter.seen % (rate.rate or 1):
            return False
        if count.count > 0:
            count.count -= 1
        return True

    def _effective(self, own: _Scope | None) -> tuple[_Scope, _Scope, _Scope]:
        """Return the scopes whose level, rate and count are effective."""
        server = self._server
        if own is None:
            return server, server, server
        return (
            server if own.level is None else own,
            server if own.rate is None else own,
            server if own.count is None else own,
        )


def _default() -> _Scope:
    return _Scope(TIMESTAMPS, 1, ENDLESS)


def _values(key: str, value: Any) -> list[str]:
    """Convert a setting to a list of strings, as in gRPC; empty if it is reset."""
    if value is None:
        return []
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int) and not isinstance(item, bool) for item in listed):
        raise BadRequest(f"trace setting {key[:64]!r} must be a string or a list of strings")
    return [str(item) for item in listed[:8]]


def _read(key: str, values: list[str]) -> str | int | None:
    """Parse the value of a setting, None if it is reset; Unsupported for settings that clients cannot change."""
    match key:
        case "trace_level":
            return _level(values)
        case "trace_rate":
            return _number(key, values, 1)
        case "trace_count":
            return _number(key, values, ENDLESS)
        case "log_frequency":
            if _number(key, values, 0):
                raise Unsupported("log_frequency must be 0: the trace is in memory, see /weft/trace, and in no file")
            return None
        case "trace_file":
            raise Unsupported("trace_file cannot be set by clients: the trace is in memory, see /weft/trace")
        case "trace_mode":
            if values not in ([], ["triton"]):
                raise Unsupported("trace_mode cannot be changed; OpenTelemetry is chosen when the server is started")
            return None
    raise BadRequest(f"there is no trace setting {key[:64]!r}; there are {', '.join(_KNOWN)}")


def _level(values: list[str]) -> str | None:
    if TENSORS in values:
        raise Unsupported(f"trace_level {TENSORS} is not supported: what requests hold is not traced")
    if not values:
        return None
    if values not in ([OFF], [TIMESTAMPS]):
        raise BadRequest(f"trace_level must be {OFF} or {TIMESTAMPS}")
    return values[0]


def _number(key: str, values: list[str], least: int) -> int | None:
    if not values:
        return None
    text = values[0]
    if len(values) == 1 and len(text) <= 11 and text.removeprefix("-").isdecimal() and text.isascii():
        number = int(text)
        if least <= number <= _LARGEST:
            return number
    raise BadRequest(f"{key} must be one whole number from {least} to {_LARGEST}")

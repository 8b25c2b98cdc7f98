"""Which requests are traced, as clients may set it for the server and for single models: the trace extension.

What a traced request leaves behind is its segments in ``/weft/trace`` and its OpenTelemetry span, where spans are sent.
All requests are traced unless somebody says otherwise: the trace is in memory, bounded, and costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.base.errors import BadRequest, Unsupported

OFF, TIMESTAMPS, TENSORS = "OFF", "TIMESTAMPS", "TENSORS"
ENDLESS = -1
"""As a count: for ever."""

_LARGEST = 2**31 - 1
_KNOWN = ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file", "trace_mode")


@dataclass(slots=True)
class _Scope:
    """What is set for the server, or for one model, where None is what the server has."""

    level: str | None = None
    rate: int | None = None
    """Of so many requests one is traced."""
    count: int | None = None
    """How many are still to be traced."""
    seen: int = 0
    """Requests since something was set."""

    @property
    def empty(self) -> bool:
        return self.level is None and self.rate is None and self.count is None


class TraceSettings:
    """The settings of one server, and its word on every request."""

    def __init__(self) -> None:
        self._server = _default()
        self._models: dict[str, _Scope] = {}
        self.everything = True

    def told(self, model: str = "") -> dict[str, Any]:
        """What holds for the server, or for a model, by the protocol's names."""
        level, rate, count = self._holding(self._models.get(model))
        return {
            "trace_level": [level.level],
            "trace_rate": str(rate.rate),
            "trace_count": str(count.count),
            "log_frequency": "0",
            "trace_file": "",
            "trace_mode": "triton",
        }

    def change(self, wanted: Mapping[str, Any], model: str = "") -> None:
        """Take over the settings that are named, all or none; null, or no value, is the server's, or the default."""
        found = {key: _read(key, _values(key, value)) for key, value in wanted.items()}
        scope = self._models.get(model, _Scope()) if model else self._server
        base = _Scope() if model else _default()
        for name in ("level", "rate", "count"):
            if (key := f"trace_{name}") in found:
                value = found[key]
                setattr(scope, name, getattr(base, name) if value is None else value)
        scope.seen = 0
        if model and scope.empty:
            self._models.pop(model, None)
        elif model:
            self._models[model] = scope
        self.everything = not self._models and self._server == _default()

    def takes(self, model: str) -> bool:
        """Whether a request that was just taken is traced; it is counted."""
        if self.everything:
            return True
        own = self._models.get(model)
        level, rate, count = self._holding(own)
        counter = own or self._server
        counter.seen += 1
        if level.level == OFF or not count.count or counter.seen % (rate.rate or 1):
            return False
        if count.count > 0:
            count.count -= 1
        return True

    def _holding(self, own: _Scope | None) -> tuple[_Scope, _Scope, _Scope]:
        """Whose level, rate and count hold."""
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
    """A setting as gRPC has it: as strings, none where it is cleared."""
    if value is None:
        return []
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str | int) and not isinstance(each, bool) for each in listed):
        raise BadRequest(f"trace setting {key[:64]!r} must be a string or a list of strings")
    return [str(each) for each in listed[:8]]


def _read(key: str, values: list[str]) -> str | int | None:
    """The value of a setting, None where it is cleared; whatever cannot be set here says so."""
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

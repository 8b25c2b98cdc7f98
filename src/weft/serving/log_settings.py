"""Log settings that clients may change: the protocol's logging extension.

The destination of the log is up to the operator. Only the loggers of ``weft`` are affected.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from weft.base.errors import BadRequest, Unsupported

FORMAT = "%(asctime)s %(name)s %(message)s"
LOGGER = "weft"

_DEFAULTS: dict[str, Any] = {
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


class LogSettings(logging.Filter):
    """The settings of one server, and the filter that keeps the handlers to them from the first change on."""

    def __init__(self) -> None:
        super().__init__()
        self._settings = dict(_DEFAULTS)
        self._steered: dict[logging.Handler, logging.Formatter | None] = {}
        """Handlers that have the filter -> how they wrote before."""
        self._level: int | None = None
        """The logger's own level, where that was changed."""

    def as_dict(self) -> dict[str, Any]:
        """Return all settings, by the protocol's names."""
        return dict(self._settings)

    def change(self, wanted: Mapping[str, Any]) -> None:
        """Take over the settings that are named, all or none; null leaves a setting as it is."""
        named = {key: value for key, value in wanted.items() if value is not None}
        for key, value in named.items():
            _check(key, value)
        if named:
            self._settings |= named
            self._steer()

    def restore(self) -> None:
        """Leave the log as it was found."""
        for handler, formatter in self._steered.items():
            handler.removeFilter(self)
            handler.setFormatter(formatter)
        self._steered.clear()
        if self._level is not None:
            logging.getLogger(LOGGER).setLevel(self._level)
            self._level = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        if record.name.partition(".")[0] != LOGGER:
            return True
        if record.levelno < logging.INFO:
            return bool(self._settings["log_verbose_level"])
        kind = "info" if record.levelno < logging.WARNING else "warning" if record.levelno < logging.ERROR else "error"
        return bool(self._settings[f"log_{kind}"])

    def _steer(self) -> None:
        self.restore()
        logger = logging.getLogger(LOGGER)
        if self._settings["log_verbose_level"]:
            self._level = logger.level
            logger.setLevel(logging.DEBUG)
        dated = self._settings["log_format"] != "default"
        for handler in {*logger.handlers, *logging.getLogger().handlers}:
            self._steered[handler] = handler.formatter
            handler.addFilter(self)
            if dated:
                handler.setFormatter(_in_utc())


def _check(key: str, value: Any) -> None:
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
            raise BadRequest(f"there is no log setting {key[:64]!r}; there are {', '.join(_DEFAULTS)}")


def _in_utc() -> logging.Formatter:
    formatter = logging.Formatter(FORMAT, "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    return formatter

"""What clients may set of the log and of the trace while the server runs."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from weft.base.errors import BadRequest, RequestError, Unsupported
from weft.serving.client_settings import FORMAT, LogSettings, TraceSettings
from weft.serving.segment_observer import LaneSpan, Recorder

# The log


class Log:
    """A log of its own, as ``weft serve`` writes it."""

    def __init__(self) -> None:
        self.settings = LogSettings()
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(logging.Formatter(FORMAT))
        self.logger = logging.getLogger("weft")

    def written(self) -> list[str]:
        """Which of four lines, one of each kind, are written."""
        before = len(self.stream.getvalue())
        for level in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger("weft.test"), level)(level)
        return [line.split()[-1] for line in self.stream.getvalue()[before:].splitlines()]


@pytest.fixture
def log() -> Iterator[Log]:
    found = Log()
    level = found.logger.level
    found.logger.setLevel(logging.INFO)
    found.logger.addHandler(found.handler)
    yield found
    found.settings.restore()
    found.logger.removeHandler(found.handler)
    assert found.logger.level == logging.INFO
    found.logger.setLevel(level)


def test_settings_begin_as_tritons_do(log: Log) -> None:
    assert log.settings.as_dict() == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    assert log.written() == ["info", "warning", "error"]


@pytest.mark.parametrize("kind", ["info", "warning", "error"])
def test_each_kind_of_line_can_be_left_out(log: Log, kind: str) -> None:
    log.settings.change({f"log_{kind}": False})
    assert log.written() == [each for each in ("info", "warning", "error") if each != kind]
    log.settings.change({f"log_{kind}": True})
    assert log.written() == ["info", "warning", "error"]


def test_verbose_writes_all(log: Log) -> None:
    log.settings.change({"log_verbose_level": 1, "log_info": None})
    assert log.written() == ["debug", "info", "warning", "error"]
    log.settings.change({"log_verbose_level": 0})
    assert log.written() == ["info", "warning", "error"]


def test_times_can_be_written_in_utc(log: Log) -> None:
    log.settings.change({"log_format": "ISO8601"})
    log.logger.error("dated")
    date, name, message = log.stream.getvalue().split()
    assert (name, message) == ("weft", "dated")
    assert len(date) == len("2026-01-01T00:00:00Z") and date[10] == "T" and date[-1] == "Z"
    log.settings.change({"log_format": "default"})
    log.logger.error("plain")
    assert "T" not in log.stream.getvalue().splitlines()[-1].split()[0]


def test_others_write_what_they_like(log: Log) -> None:
    log.settings.change({"log_error": False})
    other = logging.getLogger("elsewhere")
    other.addHandler(log.handler)
    try:
        other.error("heard")
    finally:
        other.removeHandler(log.handler)
    assert "heard" in log.stream.getvalue()


def test_restored_the_log_is_as_it_was_found(log: Log) -> None:
    log.settings.change({"log_error": False, "log_verbose_level": 2, "log_format": "ISO8601"})
    log.settings.restore()
    assert log.written() == ["info", "warning", "error"] and not log.handler.filters


@pytest.mark.parametrize(
    ("wanted", "error", "why"),
    [
        ({"log_file": "/tmp/elsewhere"}, Unsupported, "log_file cannot be set"),
        ({"log_info": 1}, BadRequest, "log_info must be true or false"),
        ({"log_verbose_level": True}, BadRequest, "log_verbose_level must be a whole number"),
        ({"log_verbose_level": -1}, BadRequest, "log_verbose_level must be a whole number"),
        ({"log_format": "json"}, BadRequest, "log_format must be default or ISO8601"),
        ({"log_colour": True}, BadRequest, "there is no log setting 'log_colour'"),
    ],
)
def test_what_cannot_be_set_changes_nothing(log: Log, wanted: Any, error: type[RequestError], why: str) -> None:
    with pytest.raises(error, match=why):
        log.settings.change({"log_warning": False} | wanted)
    assert log.settings.as_dict() == LogSettings().as_dict()


# The trace


def taken(settings: TraceSettings, count: int, model: str = "net") -> list[int]:
    """Which of so many requests are traced."""
    return [number for number in range(1, count + 1) if settings.sample(model)]


def test_everything_is_traced_until_somebody_says_otherwise() -> None:
    settings = TraceSettings()
    assert (
        settings.as_dict()
        == settings.as_dict("net")
        == {
            "trace_level": ["TIMESTAMPS"],
            "trace_rate": "1",
            "trace_count": "-1",
            "log_frequency": "0",
            "trace_file": "",
            "trace_mode": "triton",
        }
    )
    assert taken(settings, 3) == [1, 2, 3]


def test_off_is_off_and_null_is_the_default() -> None:
    settings = TraceSettings()
    settings.change({"trace_level": ["OFF"]})
    assert taken(settings, 3) == [] and settings.as_dict()["trace_level"] == ["OFF"]
    settings.change({"trace_level": None})
    assert taken(settings, 3) == [1, 2, 3]


def test_one_of_so_many_is_traced_and_no_more_than_so_many() -> None:
    settings = TraceSettings()
    settings.change({"trace_rate": "3", "trace_count": 2})
    assert taken(settings, 12) == [3, 6]
    assert settings.as_dict()["trace_count"] == "0"
    settings.change({"trace_count": "1"})
    assert taken(settings, 12) == [3]


def test_a_model_has_what_is_set_for_it_and_else_what_the_server_has() -> None:
    settings = TraceSettings()
    settings.change({"trace_rate": "2"})
    settings.change({"trace_level": ["OFF"]}, "net")
    assert settings.as_dict("net") == settings.as_dict() | {"trace_level": ["OFF"]}
    assert taken(settings, 4) == [] and taken(settings, 4, "other") == [2, 4]
    settings.change({"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "3"}, "net")
    assert taken(settings, 5) == [1, 2, 3]
    settings.change({"trace_level": None, "trace_rate": None, "trace_count": []}, "net")
    assert settings.as_dict("net") == settings.as_dict() and taken(settings, 4) == [2, 4]


@pytest.mark.parametrize(
    ("wanted", "error", "why"),
    [
        ({"trace_level": ["TENSORS"]}, Unsupported, "TENSORS is not supported"),
        ({"trace_level": ["OFF", "TIMESTAMPS"]}, BadRequest, "trace_level must be OFF or TIMESTAMPS"),
        ({"trace_level": "ON"}, BadRequest, "trace_level must be OFF or TIMESTAMPS"),
        ({"trace_level": [{}]}, BadRequest, "'trace_level' must be a string or a list of strings"),
        ({"trace_rate": "0"}, BadRequest, "trace_rate must be one whole number from 1"),
        ({"trace_rate": ["1", "2"]}, BadRequest, "trace_rate must be one whole number"),
        ({"trace_rate": 1.5}, BadRequest, "must be a string"),
        ({"trace_count": "-2"}, BadRequest, "trace_count must be one whole number from -1"),
        ({"trace_count": "9" * 30}, BadRequest, "trace_count must be one whole number"),
        ({"log_frequency": "10"}, Unsupported, "log_frequency must be 0"),
        ({"trace_file": "/tmp/trace.json"}, Unsupported, "trace_file cannot be set"),
        ({"trace_mode": "opentelemetry"}, Unsupported, "trace_mode cannot be changed"),
        ({"trace_colour": "red"}, BadRequest, "there is no trace setting 'trace_colour'"),
    ],
)
def test_what_cannot_be_traced_so_changes_nothing(wanted: Any, error: type[RequestError], why: str) -> None:
    settings = TraceSettings()
    with pytest.raises(error, match=why):
        settings.change({"trace_level": ["OFF"]} | wanted)
    assert settings.as_dict() == TraceSettings().as_dict()


def test_what_is_not_traced_is_for_the_dashboard_alone() -> None:
    recorder = Recorder()
    for model, traced in (("seen", True), ("unseen", False)):
        recorder.spans.append(LaneSpan(0, model, "1/1", 0, 10, 10, 1, 0, "done", traced))
    assert [each["name"] for each in recorder.as_perfetto()["traceEvents"] if each["ph"] == "X"] == ["seen"]
    assert [span.model for span in recorder.since(0)] == ["seen", "unseen"]

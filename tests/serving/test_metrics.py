"""The metrics page: read by Prometheus' own parser, and compared with what was asked of a real server."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.live import Live, heavy, mlp, running
from weft.base.errors import RequestError
from weft.serving import metrics
from weft.serving.statistics import LATENCY_BOUNDS_NS, Statistics
from weft.serving.wire import decode

NET = {"model": "net", "version": "1"}
ROW = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [0.5] * 64}


class Page:
    """A metrics page, parsed."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def named(self, name: str) -> list[Any]:
        """The parser adds the suffix that counters have nowadays."""
        return [each for each in self.samples if each.name in (name, f"{name}_total")]

    def value(self, name: str, **labels: str) -> float:
        (value,) = [each.value for each in self.named(name) if each.labels == labels]
        return float(value)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Values by one label."""
        return {each.labels[label]: each.value for each in self.named(name) if labels.items() <= each.labels.items()}


def page(live: Live) -> Page:
    with urllib.request.urlopen(f"{live.url}/metrics") as answer:
        assert answer.headers["Content-Type"] == metrics.CONTENT_TYPE
        return Page(answer.read().decode())


def infer(live: Live, model: str = "net", **request: Any) -> int:
    body = json.dumps({"inputs": [ROW]} | request).encode()
    try:
        with urllib.request.urlopen(f"{live.url}/v2/models/{model}/infer", body) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with running(mlp(tmp_path / "net.onnx"), grpc_port=None, lanes=2) as server:
        yield server


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that nobody sends requests to."""
    with running(mlp(tmp_path_factory.mktemp("models") / "net.onnx"), grpc_port=None) as server:
        yield server


def page_of(live: Live, seen: Statistics) -> Page:
    """The page of a server that counted this."""
    live.server.service.library.find("net").statistics = seen
    return page(live)


def test_everything_is_there_from_the_start_as_zero(live: Live) -> None:
    found = page(live)
    for family in metrics.FAMILIES:
        if family.name.startswith("weft_exit"):  # of models with exits, and none is here
            continue
        assert found.named(f"{family.name}_bucket" if family.kind == "histogram" else family.name), family.name
    moving = ("weft_uptime_seconds", "weft_ready", "process_", "weft_memory", "weft_model_memory", "weft_model_engine")
    assert not [each for each in found.samples if each.value and not each.name.startswith(moving)]
    assert set(found.by("weft_drops_total", "reason", **NET)) == set(metrics.DROPS)
    assert set(found.by("weft_requests_refused_total", "reason")) == set(metrics.REFUSALS)
    assert set(found.by("nv_inference_request_failure", "reason", **NET)) == {
        "REJECTED",
        "CANCELED",
        "BACKEND",
        "OTHER",
    }


def test_every_family_has_help_and_a_type(live: Live) -> None:
    lines = page(live).text.splitlines()
    for family in metrics.FAMILIES:
        at = lines.index(f"# HELP {family.name} {family.help}")
        assert lines[at + 1] == f"# TYPE {family.name} {family.kind}"
        assert lines[at + 2].startswith(family.name) or family.name.startswith("weft_exit")
    names = [family.name for family in metrics.FAMILIES]
    assert len(names) == len(set(names))
    assert all(family.kind == "counter" for family in metrics.FAMILIES if family.name.endswith("_total"))


def test_requests_are_counted(live: Live) -> None:
    assert [infer(live), infer(live, parameters={"weft_slo_ms": 60_000})] == [200, 200]
    assert infer(live, inputs=[ROW | {"shape": [3, 64], "data": [0.0] * 192}]) == 200
    assert infer(live, inputs=[]) == 400
    assert infer(live, parameters={"timeout": 1}) == 504
    assert infer(live, "nobody") == 404
    found = page(live)
    assert found.value("nv_inference_request_success", **NET) == 3
    assert found.by("nv_inference_request_failure", "reason", **NET) == {
        "REJECTED": 1, "CANCELED": 0, "BACKEND": 0, "OTHER": 0,
    }  # fmt: skip
    assert found.by("weft_client_errors_total", "reason", **NET)["bad_request"] == 1
    assert found.value("nv_inference_count", **NET) == 5
    assert found.value("nv_inference_exec_count", **NET) == 3
    assert found.value("weft_deadline_met_total", **NET) == 1
    assert found.value("weft_deadline_missed_total", **NET) == 1
    drops = found.by("weft_drops_total", "reason", **NET)
    assert drops["expired"] + drops["unmeetable"] == sum(drops.values()) == 1
    assert found.by("weft_requests_refused_total", "reason")["not_found"] == 1
    assert found.value("weft_segments_total", **NET) == 3
    assert found.by("weft_batch_rows_bucket", "le", **NET) == {
        "1": 2, "2": 2, "4": 3, "8": 3, "16": 3, "32": 3, "+Inf": 3,
    }  # fmt: skip
    assert found.value("weft_batch_rows_sum", **NET) == 5


def test_times_agree_with_each_other(live: Live) -> None:
    for _ in range(5):
        assert infer(live) == 200
    found = page(live)
    total_us = found.value("nv_inference_request_duration_us", **NET)
    parts = [found.value(f"nv_inference_{part}_duration_us", **NET) for part in ("queue", "compute_infer")]
    assert 0 < sum(parts) <= total_us
    assert found.value("weft_request_seconds_sum", **NET) * 1e6 == pytest.approx(total_us, abs=1)
    assert found.value("weft_request_seconds_count", **NET) == 5
    busy_s = sum(found.by("weft_lane_busy_seconds_total", "lane").values())
    assert busy_s == pytest.approx(found.value("weft_segment_seconds_total", **NET))
    assert parts[1] == pytest.approx(busy_s * 1e6, abs=5)


def test_the_server_as_a_whole(live: Live) -> None:
    def clocks() -> tuple[float, float]:
        service = live.server.service
        return (service.now() - service.started_ns) / 1e9, time.process_time()

    before, found, after = clocks(), page(live), clocks()
    told = found.value("weft_uptime_seconds"), found.value("process_cpu_seconds_total")
    assert all(0 < low <= value <= high for low, value, high in zip(before, told, after, strict=True))
    assert found.value("weft_ready") == 1
    assert found.value("weft_memory_budget_bytes") == math.inf
    assert found.value("weft_memory_used_bytes") == found.value("weft_model_memory_bytes", **NET) > 0
    assert found.value("weft_scratch_bytes") >= 0
    assert found.value("weft_model_engine", engine="onnxruntime", **NET) == 1
    assert set(found.by("weft_lane_busy_seconds_total", "lane")) == {"0", "1"}
    if Path("/proc/self/statm").exists():
        assert found.value("process_resident_memory_bytes") > 1 << 20


def test_evictions_and_the_budget_are_shown(tmp_path: Path) -> None:
    one, two = heavy(tmp_path / "one.onnx", layers=4), heavy(tmp_path / "two.onnx", layers=4)
    budget = round(1.5 * one.stat().st_size)
    with running(one, two, grpc_port=None, memory_budget_bytes=budget) as live:
        for model in ("one", "two"):
            with urllib.request.urlopen(f"{live.url}/v2/models/{model}"):
                pass
        found = page(live)
        assert found.value("weft_memory_budget_bytes") == budget
        assert found.value("weft_evictions_total") >= 1
        assert found.value("weft_model_memory_bytes", model="one", version="1") == 0
        assert 0 < found.value("weft_model_memory_bytes", model="two", version="1") <= budget


def test_requests_that_wait_are_seen(tmp_path: Path) -> None:
    mlp(tmp_path / "net" / "1" / "model.onnx")
    (tmp_path / "net" / "weft.toml").write_text("batch_timeout_ms = 1e8\nmax_batch = 4\n")
    with running(tmp_path, grpc_port=None) as live:

        async def send(count: int) -> None:
            body, service = json.dumps({"inputs": [ROW]}).encode(), live.server.service
            for _ in range(count):
                service.infer(
                    service.slot_for("net", ""), lambda model: decode(body, None, model), answers.append, dict
                )

        answers: list[Any] = []
        live.call(send(3))
        found = page(live)
        assert found.value("weft_in_flight") == 3
        assert found.value("weft_queue_length", **NET) == 3
        assert found.value("nv_inference_pending_request_count", **NET) == 3
        live.call(send(1))  # the batch is full
        assert infer(live, inputs=[ROW | {"shape": [4, 64], "data": [0.0] * 256}]) == 200  # ends after it
        assert len(answers) == 4 and not any(isinstance(each, RequestError) for each in answers)
        found = page(live)
        assert found.value("weft_in_flight") == found.value("weft_queue_length", **NET) == 0
        assert found.by("weft_batch_rows_bucket", "le", **NET)["2"] == 0
        assert found.by("weft_batch_rows_bucket", "le", **NET)["4"] == 2


def test_a_latency_is_counted_up_to_the_bound_it_does_not_exceed(quiet: Live) -> None:
    seen = Statistics()
    for latency_ns in (1, 100_000, 100_001, 10**10, 10**10 + 1):
        seen.answered(0, latency_ns, None)
    buckets = page_of(quiet, seen).by("weft_request_seconds_bucket", "le", model="net")
    assert buckets["0.0001"] == 2 and buckets["0.00025"] == 3
    assert buckets["5"] == 3 and buckets["10"] == 4 and buckets["+Inf"] == 5
    assert [float(bound) for bound in buckets] == [*(bound / 1e9 for bound in LATENCY_BOUNDS_NS), math.inf]
    assert list(buckets.values()) == sorted(buckets.values())


def test_reasons_are_told_to_triton_users_in_tritons_words(quiet: Live) -> None:
    seen = Statistics()
    for reason in ("queue_full", "expired", "cancelled", "internal", "bad_request", "never seen before"):
        seen.failed(0, 0, reason, had_deadline=False)
    found = page_of(quiet, seen).by("nv_inference_request_failure", "reason", model="net")
    assert found == {"REJECTED": 2, "CANCELED": 1, "BACKEND": 1, "OTHER": 1}


def test_numbers_of_the_scheduler_are_shown(quiet: Live) -> None:
    seen = Statistics(preemptions=1, aborts=2, segments=3, segment_ns=4_000_000_000, segment_error_ns=1_000_000_000)
    found = page_of(quiet, seen)
    assert found.value("weft_preemptions_total", **NET) == 1
    assert found.value("weft_aborts_total", **NET) == 2
    assert found.value("weft_segments_total", **NET) == 3
    assert found.value("weft_segment_seconds_total", **NET) == 4
    assert found.value("weft_segment_prediction_error_ratio", **NET) == 0.25


@settings(deadline=None)
@given(name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1) | st.text('\\n"\n{},=', min_size=1))
def test_any_name_survives_the_format(name: str) -> None:
    found = Page(f"# TYPE it gauge\nit{{{metrics.labelled('model', name)},{metrics.labelled('version', '1')}}} 7\n")
    assert found.value("it", model=name, version="1") == 7


@settings(deadline=None)
@given(value=st.integers(0, 2**63) | st.floats(min_value=0, allow_nan=False) | st.booleans())
def test_any_number_survives_the_format(value: float) -> None:
    written = metrics._number(value)
    assert float(written) == float(value)
    assert written == "+Inf" or written[0].isdigit()

"""A request without a strict deadline is computed for so long, and no longer; what waits for others does not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serving import live
from tests.support.concurrency import until
from tests.support.endless import ENDLESS, busy_lanes, loop_input, loop_model
from tests.support.inference import Refused, failures, infer
from weft.serving.config import ModelConfig, ServerConfig

Make = Any


def test_it_is_answered_when_its_time_is_over_and_its_lane_is_free(machine: Make) -> None:
    one = machine()
    long, other = one.model([1000] * 3, max_compute_s=2.5), one.model([10])
    sent = one.send(long, 10_000)
    one.run(2100)
    assert not sent.replies
    after = one.send(other, 60_000)
    one.run()
    assert sent.fate == "too_long" and sent.end_ms == 2500 and sent.outcome.status == 504
    assert "computed for more than 2.5 s (max_compute_s)" in str(sent.outcome)
    assert after.fate == "served" and after.end_ms == 2510
    assert long.statistics.failures == {"too_long": 1} and long.leases == 0


def test_strict_requests_have_their_deadlines_instead(machine: Make) -> None:
    one = machine()
    sent = one.send(one.model([1000] * 3, max_compute_s=2.5), 5000, strict=True)
    one.run()
    assert sent.fate == "served" and sent.end_ms == 3000


def test_time_in_which_others_are_computed_does_not_count(machine: Make) -> None:
    one = machine()
    long, urgent = one.model([1000] * 3, max_compute_s=3.5), one.model([2000])
    sent = one.send(long, 100_000)
    one.at(900, lambda: one.send(urgent, 3500, strict=True, priority=9))
    one.run()
    assert sent.fate == "served" and sent.end_ms == 5000


def test_a_batch_goes_on_for_those_who_have_a_deadline(machine: Make) -> None:
    one = machine()
    pair = one.model([100] * 30, [100] * 30, max_compute_s=2)
    soft, strict = one.send(pair, 7000), one.send(pair, 7000, strict=True)
    one.run()
    assert soft.fate == "too_long" and soft.end_ms == 2000
    assert strict.fate == "served" and strict.end_ms == 3000


def test_each_of_two_lanes_has_its_own(machine: Make) -> None:
    one = machine(lanes=2)
    short, long = one.model([9000], max_compute_s=1), one.model([9000], max_compute_s=3)
    sent = [one.send(long, 20_000), one.send(short, 20_000)]
    one.run()
    assert [(each.fate, each.end_ms) for each in sent] == [("too_long", 3000), ("too_long", 1000)]


def test_without_a_limit_it_takes_as_long_as_it_takes(machine: Make) -> None:
    one = machine()
    sent = one.send(one.model([1000] * 90), 10)
    one.run()
    assert sent.fate == "served"


def test_a_loop_that_never_ends_is_stopped_in_a_real_server(tmp_path: Path) -> None:
    loop_model(tmp_path / "turning.onnx")
    (tmp_path / "turning.toml").write_text("max_compute_s = 0.1\n")
    with live.running(tmp_path, grpc_port=None) as server:
        with pytest.raises(Refused, match="max_compute_s") as refused:
            infer(server, "turning", loop_input(ENDLESS))
        assert refused.value.status == 504
        until(lambda: busy_lanes(server) == 0, "the lane is free")
        assert infer(server, "turning", loop_input(3))
        assert failures(server, "too_long") == 1


def test_it_is_a_minute_unless_somebody_says_otherwise() -> None:
    assert ServerConfig(models=("m",)).scheduling.max_compute_s == 60 and ModelConfig().max_compute_s is None

"""Fixtures of the planner's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planning.plans import scaling
from weft.planning.plan_request import PlanRequest, RequestedModel
from weft.serving.config import ModelConfig
from weft.workloads.requests import parse_workload


@pytest.fixture
def question(tmp_path: Path) -> PlanRequest:
    """One model that is asked for once a second, on two cores."""
    config = ModelConfig(shapes={"x": [1, 2]})
    model = RequestedModel("camera", "camera.onnx", scaling(tmp_path / "camera.onnx", 2.0), config)
    streams = [{"model": "camera", "rate": 1.0, "deadline_ms": 50.0}]
    return PlanRequest(workload=parse_workload({"stream": streams}, "the test"), models=(model,), cores=2)

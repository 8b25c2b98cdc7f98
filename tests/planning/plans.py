"""Plans made by hand over models of a few nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.serving.live import save
from weft.planning.folder import ModelToServe, planned_model, source_digests, write_plan
from weft.planning.machine import these_versions, this_machine
from weft.planning.plan import Plan, PlanSettings, Prediction, StreamPrediction
from weft.runtime.metadata import STITCHED_KEY
from weft.serving.config import ModelConfig
from weft.workloads.requests import Workload, parse_workload


def scaling(path: Path, factor: float) -> Path:
    """A model that multiplies what it is given: x -> y."""
    weight = numpy_helper.from_array(np.array([factor], np.float32), "factor")
    inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2])] for name in ("x", "y"))
    node = helper.make_node("Mul", ["x", "factor"], ["y"])
    return save(helper.make_graph([node], "scaling", inputs, outputs, [weight]), path)


def scaling_together(path: Path, factors: dict[str, float]) -> Path:
    """A file that holds several such models, under their names."""
    weights, nodes, inputs, outputs, tasks = [], [], [], [], []
    for name, factor in factors.items():
        weights.append(numpy_helper.from_array(np.array([factor], np.float32), f"{name}.factor"))
        nodes.append(helper.make_node("Mul", [f"{name}.x", f"{name}.factor"], [f"{name}.y"]))
        inputs.append(helper.make_tensor_value_info(f"{name}.x", TensorProto.FLOAT, [f"{name}_n", 2]))
        outputs.append(helper.make_tensor_value_info(f"{name}.y", TensorProto.FLOAT, [f"{name}_n", 2]))
        tasks.append({"name": name, "inputs": {"x": f"{name}.x"}, "outputs": {"y": f"{name}.y"}})
    model = onnx.load(save(helper.make_graph(nodes, "together", inputs, outputs, weights), path))
    helper.set_model_props(model, {STITCHED_KEY: json.dumps({"version": 1, "tasks": tasks})})
    onnx.save(model, path)
    return path


def workload(*names: str, **keys: Any) -> Workload:
    streams = [{"model": name, "rate": 20.0, "deadline_ms": 50.0} for name in names]
    return parse_workload({"stream": streams, "duration_s": 1.0, "warmup_s": 0.0, **keys}, "the test")


def predicted(name: str, **figures: Any) -> StreamPrediction:
    usual = {"rate": 20.0, "deadline_ms": 50.0, "p50_ms": 2.0, "p99_ms": 4.0, "missed": 0.01}
    return StreamPrediction(model=name, **usual | figures)


def plan_of(models: dict[str, ModelToServe], **fields: Any) -> Plan:
    usual: dict[str, Any] = {
        "made": "by hand",
        "versions": these_versions(),
        "objective": "deadlines",
        "machine": this_machine(),
        "settings": PlanSettings(lanes=1),
        "predicted": Prediction(streams=tuple(predicted(name) for name in models), load=0.25),
    }
    planned = tuple(planned_model(name, each, sources=source_digests(each.path)) for name, each in models.items())
    return Plan(models=planned, **usual | fields)


def written(folder: Path, factors: dict[str, float], config: ModelConfig | None = None, **fields: Any) -> Plan:
    """A plan of models that scale, in its folder; their own files lie beside it, in ``given``."""
    models = {
        name: ModelToServe(scaling(folder.parent / "given" / f"{name}.onnx", factor), config or ModelConfig())
        for name, factor in factors.items()
    }
    plan = plan_of(models, **fields)
    write_plan(plan, folder, models=models, workload=workload(*(f"given/{name}.onnx" for name in models)))
    return plan

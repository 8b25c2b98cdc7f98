"""Files of small models that share weights, and what each model gives alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.engine.hosts import Machine, Staged
from tests.stitching.nets import run, tiny
from weft.runtime.metadata import STITCHED_KEY
from weft.runtime.onnxruntime_cpu.model import CpuModel
from weft.runtime.stitched import TaskSpec
from weft.serving.streams import ServedModel
from weft_stitch.file_description import metadata
from weft_stitch.lowering import lower
from weft_stitch.net import Net
from weft_stitch.onnx_writer import write_onnx
from weft_stitch.reading.alignment import align

NETS = tiny().nets
"""The models of ``stitched_file`` as they are alone."""

NAMES = [net.name for net in NETS]


def stitched_file(path: Path, tasks: int = 3, form: str = "split", *, dynamic: bool = True, **settings: Any) -> Path:
    """A file of small models that share weights."""
    made = tiny(tasks=tasks, **settings)
    family = align(made.nets)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_onnx(lower(family, made.planted, form, dynamic=dynamic), path, metadata(family, family.batches))
    return path


def task_metadata(tasks: Sequence[TaskSpec]) -> dict[str, str]:
    """The metadata of a file with these tasks."""
    return {STITCHED_KEY: json.dumps({"version": 1, "tasks": [task.model_dump() for task in tasks]})}


def pictures(rows: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, *NETS[0].inputs[0].shape), np.float32)


def net_output(net: Net, rows: np.ndarray) -> np.ndarray:
    return run(net, rows)[0]


def check_output(outputs: Any, net: Net, given: np.ndarray) -> None:
    """An answer is what the model gives alone."""
    assert list(outputs) == [port.name for port in net.outputs]
    (port,) = net.outputs
    assert outputs[port.name].shape == (len(given), *port.shape)
    np.testing.assert_allclose(outputs[port.name], net_output(net, given), atol=1e-5)


def needs_rows(path: Path) -> Path:
    """Two tasks of which neither can be left out: no rows cannot be reshaped to no rows of -1."""
    rng = np.random.default_rng(3)
    nodes, inputs, outputs, tasks = [], [], [], []
    weights = {"shape": np.array([0, -1]), "w": rng.standard_normal((4, 4), np.float32)}
    for name in ("a", "b"):
        weights[f"h{name}"] = rng.standard_normal((4, 3), np.float32)
        nodes += [
            helper.make_node("Reshape", [f"{name}.x", "shape"], [f"flat.{name}"]),
            helper.make_node("MatMul", [f"flat.{name}", "w"], [f"body.{name}"]),
            helper.make_node("MatMul", [f"body.{name}", f"h{name}"], [f"{name}.y"]),
        ]
        inputs.append(helper.make_tensor_value_info(f"{name}.x", TensorProto.FLOAT, [f"{name}_rows", 2, 2]))
        outputs.append(helper.make_tensor_value_info(f"{name}.y", TensorProto.FLOAT, [f"{name}_out", 3]))
        tasks.append(TaskSpec(name=name, inputs={"x": f"{name}.x"}, outputs={"y": f"{name}.y"}))
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "both", inputs, outputs, constants)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(proto, task_metadata(tasks))
    onnx.save(proto, path)
    return path


def head_output(path: Path, name: str, given: np.ndarray) -> np.ndarray:
    """The output of a task of ``needs_rows`` by its formula."""
    weights = {weight.name: numpy_helper.to_array(weight) for weight in onnx.load(path).graph.initializer}
    return given.reshape(-1, 4) @ weights["w"] @ weights[f"h{name}"]


def served_tasks(
    machine: Machine, body: CpuModel, *, ms: float = 1, each_ms: float = 1, **terms: Any
) -> list[ServedModel]:
    """The models that have a body, on a machine."""
    first = {name for task in body.tasks.specs for name in task.inputs.values()}

    def rows_of(index: int, values: dict[str, Any]) -> int:
        """Of all tasks together, where it is the first segment."""
        return sum(len(each) for name, each in values.items() if name in first) if index == 0 else 0

    staged: Any = Staged(machine, body, ms, each_ms, rows_of)
    whole = ServedModel("body", staged, **terms)
    return [whole.for_task(task, queue_size=4) for task in body.tasks.specs]

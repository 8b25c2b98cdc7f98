"""The models in a stitched file, each as it is asked for alone: ``tasks_of``, ``file_and_task``, ``only``.

A stitched file computes what has come. Who asks for one of its models gives it rows and the others none, and that is
what the request costs; ``pets.onnx/cats`` names the model ``cats`` in ``pets.onnx``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from weft.base.errors import ModelError, unknown_name

if TYPE_CHECKING:
    from weft.models.onnx_graph import OnnxModel

STITCHED_KEY = "weft.stitched"
"""Model metadata: JSON, the models in a file and what the graph calls their inputs and outputs; the key is also in
``weft.runtime.metadata``, which may be had without onnx."""

_BETWEEN = ".onnx/"

Tasks = Mapping[str, tuple[str, ...]]
"""Model -> its inputs in the graph."""
Shapes = Mapping[str, tuple[int, ...]]


def file_and_task(name: str) -> tuple[str, str]:
    """``pets.onnx/cats`` -> the file and the model in it; the model is empty where the name says none."""
    file, between, task = name.rpartition(_BETWEEN)
    return (f"{file}.onnx", task) if between else (name, "")


def tasks_of(model: OnnxModel) -> Tasks:
    """The models that were stitched into a file; none for a file that is one model."""
    text = next((entry.value for entry in model.metadata_props if entry.key == STITCHED_KEY), "")
    if not text:
        return {}
    try:
        return {str(task["name"]): tuple(map(str, task["inputs"].values())) for task in json.loads(text)["tasks"]}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"its {STITCHED_KEY} cannot be read; stitch it again") from error


def only(model: OnnxModel, task: str, given: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes of all inputs when *task* alone is asked for: the others get no rows. *given* wins."""
    tasks = tasks_of(model)
    if task not in tasks:
        raise ModelError(unknown_name("model in it", task, tasks) if tasks else f"is not stitched, and holds no {task}")
    absent = {name for other, inputs in tasks.items() if other != task for name in inputs}
    declared = {each.name: [dim.dim_value for dim in each.type.tensor_type.shape.dim] for each in model.graph.input}
    return {name: (0, *sizes[1:]) for name, sizes in declared.items() if name in absent} | dict(given)

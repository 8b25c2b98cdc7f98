"""The models in a stitched file (its *tasks*), each as if it were requested alone.

A stitched file computes only the inputs that have rows. A request for one of its models gives no rows to the other
models, so that only this model is computed. ``pets.onnx/cats`` names the model ``cats`` in ``pets.onnx``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from weft.base.errors import ModelError, unknown_name

if TYPE_CHECKING:
    from weft.models.onnx_graph import OnnxModel

STITCHED_KEY = "weft.stitched"
"""Model metadata: JSON, the models in a file and the names of their inputs and outputs in the graph. The key is also in
``weft.runtime.metadata``, which can be imported without onnx."""

_SEPARATOR = ".onnx/"

Tasks = Mapping[str, tuple[str, ...]]
"""Model -> its inputs in the graph."""
Shapes = Mapping[str, tuple[int, ...]]


def file_and_task(name: str) -> tuple[str, str]:
    """Split ``pets.onnx/cats`` into the file and the model in it; the model is '' if the name has none."""
    file, separator, task = name.rpartition(_SEPARATOR)
    return (f"{file}.onnx", task) if separator else (name, "")


def tasks_of(model: OnnxModel) -> Tasks:
    """The models in a stitched file with their inputs; empty for an ordinary file. Raises ModelError if unreadable."""
    text = next((entry.value for entry in model.metadata_props if entry.key == STITCHED_KEY), "")
    if not text:
        return {}
    try:
        return {str(task["name"]): tuple(map(str, task["inputs"].values())) for task in json.loads(text)["tasks"]}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"its {STITCHED_KEY} cannot be read; stitch it again") from error


def shapes_for_task(model: OnnxModel, task: str, given: Shapes) -> dict[str, tuple[int, ...]]:
    """Return input shapes for a request of the model *task* alone: inputs of other models have 0 rows.

    *given*: shapes that replace these. Raises ModelError if the file has no such model.
    """
    tasks = tasks_of(model)
    if task not in tasks:
        raise ModelError(unknown_name("model in it", task, tasks) if tasks else f"is not stitched, and holds no {task}")
    other_inputs = {name for other, inputs in tasks.items() if other != task for name in inputs}
    declared = {
        graph_input.name: [dim.dim_value for dim in graph_input.type.tensor_type.shape.dim]
        for graph_input in model.graph.input
    }
    return {name: (0, *sizes[1:]) for name, sizes in declared.items() if name in other_inputs} | dict(given)

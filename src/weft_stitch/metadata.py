"""What a stitched ONNX file says of the models in it: ``metadata``, read by the server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.runtime.metadata import STITCHED_KEY, STITCHED_VERSION
from weft_stitch.family import Family
from weft_stitch.lowering import port_name


def metadata(family: Family, batches: Sequence[int]) -> dict[str, str]:
    """The models, what the graph calls their inputs and outputs, and the rows of each that it was made for."""
    tasks = [
        {
            "name": net.name,
            "inputs": {port.name: port_name(family, task, port) for port in net.inputs},
            "outputs": {port.name: port_name(family, task, port) for port in net.outputs},
            "batch": batch,
        }
        for task, (net, batch) in enumerate(zip(family.nets, batches, strict=True))
    ]
    return of_tasks(tasks)


def of_tasks(tasks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What is said of each model, as it is written."""
    return {STITCHED_KEY: json.dumps({"version": STITCHED_VERSION, "tasks": tasks}, ensure_ascii=False)}

"""What a stitched ONNX file says of the models in it: ``metadata``, read by the server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from weft.runtime.metadata import STITCHED_KEY, STITCHED_VERSION
from weft.stitching.family import Family
from weft.stitching.lowering import port_name

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def servable(name: str) -> bool:
    """Whether a model of that name can be asked for at a server: it is part of an address."""
    return _NAME.fullmatch(name) is not None and ".." not in name


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

"""What single layers of a variant take, by ONNX Runtime's own profiler, in the graph that it really runs.

Nodes there are called after nodes and tensors of the file, with something before or behind. So in a copy all nodes of
a layer, and what they make, get a name with the layer's number in it, which is found again in the trace.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from weft.runtime.onnxruntime_cpu.sessions import open_session
from weft.runtime.tensors import Array
from weft_tune.runtime_target.qdq import WrittenVariant

BUDGET_S, FEWEST, MOST = 3.0, 8, 100
"""How long profiled runs may take, and how many there are at least and at most."""
MARK = re.compile(r"weft@(\d+)@")
FOLLOWERS = ("Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish")
"""What is joined with the layer before it; the whole is called after what the last of them makes."""


def layer_times(
    variants: Sequence[WrittenVariant], layers: Sequence[str], given: Mapping[str, Array]
) -> list[dict[str, float]]:
    """Layer -> seconds of its own nodes and of those that turn its numbers into others, in a run on *given*.

    One for each of the variants, which take turns.
    """
    numbers = {name: number for number, name in enumerate(layers)}
    with TemporaryDirectory() as folder:
        sessions = [
            open_session(
                _marked(variant, numbers).SerializeToString(), 1, optimise=True, profile=Path(folder, f"{place}-")
            )
            for place, variant in enumerate(variants)
        ]
        began_s, runs = time.perf_counter(), 0
        while runs < FEWEST or (runs < MOST and time.perf_counter() - began_s < BUDGET_S):
            for session in sessions:
                session.run(None, dict(given))
            runs += 1
        return [_by_layer(Path(session.end_profiling()), layers) for session in sessions]


def _by_layer(trace: Path, layers: Sequence[str]) -> dict[str, float]:
    nodes: dict[str, list[float]] = {}
    for event in _events(trace):
        nodes.setdefault(event["name"], []).append(event["dur"])
    found: dict[str, float] = {}
    for name, times_us in nodes.items():
        layer = layers[int(MARK.search(name)[1])]  # type: ignore[index]  # all of them have the mark
        found[layer] = found.get(layer, 0.0) + middle(times_us) / 1e6
    return found


def middle(values: Sequence[float]) -> float:
    """The mean of the middle half: a profiler counts whole microseconds, and some runs are disturbed."""
    ordered = np.sort(np.asarray(values, float))
    quarter = len(ordered) // 4
    return float(ordered[quarter : len(ordered) - quarter].mean())


def _events(trace: Path) -> Iterator[dict[str, Any]]:
    for event in json.loads(trace.read_text("utf-8")):
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith("_kernel_time") and MARK.search(name):
            yield event


def _marked(variant: WrittenVariant, numbers: Mapping[str, int]) -> ModelProto:
    """A copy in which the nodes of layers, and the tensors that they make, have a mark."""
    model = ModelProto()
    model.CopyFrom(variant.model)
    owners = {made: numbers[name] for made, name in variant.owners.items() if name in numbers}
    renamed: dict[str, str] = {}
    for node in model.graph.node:
        number = owners.get(node.output[0], _followed(node, owners))
        if number is not None:
            owners[node.output[0]] = number
            renamed[node.output[0]] = f"weft@{number}@{len(renamed)}"
            node.name = renamed[node.output[0]]
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    for each in model.graph.output:
        each.name = renamed.get(each.name, each.name)
    return model


def _followed(node: NodeProto, owners: Mapping[str, int]) -> int | None:
    """The layer that a node is joined with."""
    return owners.get(node.input[0]) if node.op_type in FOLLOWERS else None

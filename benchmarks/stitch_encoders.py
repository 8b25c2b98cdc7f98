"""The speed-up and size of fine-tuned encoders as one stitched body on a CPU, in ONNX Runtime.

One request of each model, all of one length. The baseline is the models one after another, each in its own session. In
the same rounds: the body; all models as batched products over stacked weights (as in NetFuse); where models have
adapters, the base's products for all rows with two small ones per model (as in LoRA servers); and the same number of
rows through one of the models. The body computes its last layer only for the token that is read; those four do not.

    python benchmarks/stitch_encoders.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from machine import machine
from onnx import helper, numpy_helper

from weft.base.jsonfile import write_json
from weft.runtime.timing import clock_for, least_seconds
from weft_stitch.bodies.body_stitching import BodyStitching, stitch_body
from weft_stitch.making.encoders import ENCODERS, EncoderRecipe
from weft_stitch.onnx_writer import to_onnx
from weft_stitch.running.sessions import load_session

RESULTS = Path(__file__).parent / "results" / "stitch_encoders.json"
TUNED: dict[str, tuple[dict[str, Any], float]] = {
    "own heads": ({}, 0.0),
    "last third own": ({"frozen": 2 / 3}, 0.0),
    "rank 16, exact": ({"rank": 16}, 0.0),
    "rank 16, low-rank parts": ({"rank": 16}, 1e-6),
}
"""How models were made, and what of a weight may be lost."""


def measured(
    architecture: str, tasks: int, threads: list[int], lengths: list[int], rounds: int, only: list[str]
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in only:
        tuned, tolerance = TUNED[name]
        with tempfile.TemporaryDirectory() as folder:
            files = list(EncoderRecipe(architecture, tasks, **tuned).save(Path(folder)))
            (base,) = EncoderRecipe(architecture, 1).save(Path(folder) / "base")
            made = stitch_body(files, tolerance=tolerance, base=base if tolerance else None, measure=False)
            assert made.difference is not None
            results[name] = {
                "weights": made.weight_bytes / made.apart_bytes,
                "largest_difference": made.difference.relative,
                "ms": {str(thread): _raced(made, files, thread, lengths, rounds) for thread in threads},
            }
        for count, by_length in results[name]["ms"].items():
            for length, times in by_length.items():
                gain = times["one after another"] / times["body"]
                said = ", ".join(f"{way} {time_ms:.1f} ms" for way, time_ms in times.items())
                print(f"{name}, {count} threads, {length} tokens: {said}; {gain:.2f} times")
    return results


def _raced(
    made: BodyStitching, files: list[Path], threads: int, lengths: list[int], rounds: int
) -> dict[str, dict[str, float]]:
    alone = [load_session(file, threads, file.name, optimise=True) for file in files]
    whole = load_session(to_onnx(made.graph).SerializeToString(), threads, "body", optimise=True)
    rivals = {"batched products": batched(files)}
    if any(step.parts for step in made.body.steps):
        rivals["LoRA server"] = beside_the_base(files, made)
    apart = {
        name: load_session(rival.SerializeToString(), threads, name, optimise=True) for name, rival in rivals.items()
    }
    return {str(length): _times(alone, whole, apart, made.names, length, threads, rounds) for length in lengths}


def _times(
    alone: list[Any], whole: Any, rivals: dict[str, Any], names: Sequence[str], length: int, threads: int, rounds: int
) -> dict[str, float]:
    ids = np.random.default_rng(0).integers(0, 1000, (len(names), length))
    every = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    feeds = [{name: array[at : at + 1] for name, array in every.items()} for at in range(len(names))]
    joined = {f"{name}.{port}": array for name, feed in zip(names, feeds, strict=True) for port, array in feed.items()}
    wanted = [session.run(None, feed)[0] for session, feed in zip(alone, feeds, strict=True)]
    for rival in rivals.values():
        result = rival.run(None, every)[0].reshape(len(names), -1)
        np.testing.assert_allclose(result, np.concatenate(wanted), atol=1e-4)
    contenders = {
        "one after another": [lambda at=at: alone[at].run(None, feeds[at]) for at in range(len(names))],
        "body": [lambda: whole.run(None, joined)],
        **{name: [lambda each=each: each.run(None, every)] for name, each in rivals.items()},
        "rows of one model": [lambda: alone[0].run(None, every)],
    }
    seconds = least_seconds(contenders, clock=clock_for(threads), rounds=rounds)
    return {name: 1e3 * time_s for name, time_s in seconds.items()}


def batched(files: list[Path]) -> onnx.ModelProto:
    """Encoders that ``EncoderRecipe`` made, for a row of each: every weight is a stack of all models' weights."""
    protos = [onnx.load(file) for file in files]
    held = [{tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer} for proto in protos]
    constants: dict[str, Any] = {}
    nodes = []
    for place, many in enumerate(zip(*(proto.graph.node for proto in protos), strict=True)):
        node = onnx.NodeProto()
        node.CopyFrom(many[0])
        for at, name in enumerate(node.input):
            if name in held[0]:
                mine = [one[node.input[at]] for one, node in zip(held, many, strict=True)]
                node.input[at] = f"{place} {at}"
                constants[node.input[at]] = _stack(node.op_type, at, mine)
        nodes += _spelled(node, constants, len(files), f"{place}")
    graph = helper.make_graph(
        nodes, "batched", list(protos[0].graph.input), [onnx.ValueInfoProto(name=protos[0].graph.output[0].name)],
        [numpy_helper.from_array(np.ascontiguousarray(constant), name) for name, constant in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=list(protos[0].opset_import), ir_version=protos[0].ir_version)


def beside_the_base(files: list[Path], made: BodyStitching) -> onnx.ModelProto:
    """Encoders that ``EncoderRecipe`` made, for a row of each: what they share once, else one model after another.

    Adapters are what *made* found: all rows are multiplied by the base's weight, and each by two narrow ones of its
    model.
    """
    adapted = {step.names[0]: step for step in made.body.steps if step.parts}
    protos = [onnx.load(file) for file in files]
    held = [{tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer} for proto in protos]
    rows = _Rows(len(files))
    for many in zip(*(proto.graph.node for proto in protos), strict=True):
        node, out = many[0], many[0].output[0]
        read = [
            {name: one[each.input[at]] for at, name in enumerate(node.input) if name in held[0]}
            for one, each in zip(held, many, strict=True)
        ]
        if node.name in adapted:
            step = adapted[node.name]
            parts = [step.parts[task] for task in range(len(files))]
            base = {"held": made.body.constants.arrays[step.contents[0][1]]}
            rows.add(helper.make_node("MatMul", [node.input[0], "held"], [f"{out} base"]), base)
            narrow = helper.make_node("MatMul", [node.input[0], "held"], [f"{out} down"])
            rows.apart(narrow, [{"held": part.down} for part in parts])
            wide = helper.make_node("MatMul", [f"{out} down", "held"], [f"{out} up"])
            rows.apart(wide, [{"held": part.up} for part in parts])
            rows.add(helper.make_node("Add", [f"{out} base", f"{out} up"], [out]), {})
        elif all(np.array_equal(one[name], array) for one in read for name, array in read[0].items()):
            rows.add(node, read[0])
        else:
            rows.apart(node, read)
    return rows.model(protos[0])


class _Rows:
    """Nodes that compute a row of each model, together or apart."""

    def __init__(self, tasks: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._tasks = tasks
        self._constants: dict[str, Any] = {}
        self._split: dict[str, list[str]] = {}

    def add(self, node: onnx.NodeProto, held: dict[str, Any], task: int | None = None) -> str:
        """A node for all rows, or for that of one model; *held*: the constants that it reads."""
        made = onnx.NodeProto()
        made.CopyFrom(node)
        for at, name in enumerate(node.input):
            if name in held:
                made.input[at] = f"held {len(self._constants)}"
                self._constants[made.input[at]] = held[name]
            elif task is not None:
                made.input[at] = self._row(name, task)
        if task is not None:
            made.output[0] = made.name = f"{node.output[0]} of {task}"
        self.nodes.append(made)
        return str(made.output[0])

    def apart(self, node: onnx.NodeProto, held: list[dict[str, Any]]) -> None:
        """A node for each row."""
        parts = self._split[node.output[0]] = [self.add(node, array, task) for task, array in enumerate(held)]
        self.nodes.append(helper.make_node("Concat", parts, node.output, axis=0))

    def model(self, like: onnx.ModelProto) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, "beside", list(like.graph.input), [onnx.ValueInfoProto(name=like.graph.output[0].name)],
            [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in self._constants.items()],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=list(like.opset_import), ir_version=like.ir_version)

    def _row(self, tensor: str, task: int) -> str:
        if tensor not in self._split:
            names = self._split[tensor] = [f"{tensor} at {index}" for index in range(self._tasks)]
            self.nodes.append(helper.make_node("Split", [tensor], names, axis=0, num_outputs=self._tasks))
        return self._split[tensor][task]


def _stack(op: str, at: int, arrays: list[Any]) -> Any:
    """The constants of all models as one, which a batch of their rows can be computed with."""
    if arrays[0].dtype != np.float32 or not arrays[0].ndim:
        return arrays[0].reshape(1) if op == "Gather" and at == 1 else arrays[0]  # one position, as an axis
    if op == "Gather" or arrays[0].ndim == 3:
        return np.concatenate(arrays)
    return np.stack(arrays).reshape(len(arrays), -1, arrays[0].shape[-1])


def _spelled(node: onnx.NodeProto, constants: dict[str, Any], tasks: int, place: str) -> list[onnx.NodeProto]:
    """A node as it is, but for words, whose tables follow each other, and norms, whose scales are stacks."""
    if node.op_type == "Gather" and node.input[0] in constants:
        lines = len(constants[node.input[0]]) // tasks
        constants[f"{place} first"] = lines * np.arange(tasks)[:, None]
        ids = node.input[1]
        node.input[1] = f"{place} ids"
        return [helper.make_node("Add", [ids, f"{place} first"], [f"{place} ids"]), node]
    if node.op_type != "LayerNormalization":
        return [node]
    width = constants[node.input[1]].shape[-1]
    scale, shift, made = node.input[1], node.input[2], node.output[0]
    constants[f"{place} one"], constants[f"{place} none"] = np.ones(width, np.float32), np.zeros(width, np.float32)
    node.input[1], node.input[2], node.output[0] = f"{place} one", f"{place} none", f"{place} plain"
    return [
        node,
        helper.make_node("Mul", [f"{place} plain", scale], [f"{place} scaled"]),
        helper.make_node("Add", [f"{place} scaled", shift], [made]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", choices=list(ENCODERS), default="encoder")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=list(TUNED), nargs="+", default=list(TUNED))
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    result = measured(
        arguments.architecture, arguments.tasks, arguments.threads, [16, 64], arguments.rounds, arguments.only
    )
    settings = {name: getattr(arguments, name) for name in ("architecture", "tasks", "threads", "rounds")}
    write_json(arguments.output, {"machine": machine(), "settings": settings, "tuned": result})


if __name__ == "__main__":
    main()

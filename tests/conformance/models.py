"""The models that the table asks for, as ONNX files in a repository that weft, Triton and others can read.

``identity_*`` give back what they get, one of each datatype. ``simple`` and ``simple_string`` add and subtract, as the
models of these names that come with Triton. ``classifier`` scores four animals, ``slow`` counts as far as it is told,
``versions`` has two versions that add one and two, and ``spare`` may be unloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

KINDS = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}
"""Datatype -> what ONNX calls it."""

LABELS = ("cat", "dog", "bird", "fish")
SIMPLE = 16
"""Columns of ``simple``."""


@dataclass(frozen=True)
class Side:
    """An input or an output; its first dimension is free."""

    name: str
    datatype: str
    columns: int

    def info(self) -> Any:
        return helper.make_tensor_value_info(self.name, KINDS[self.datatype], ["n", self.columns])

    def pbtxt(self, labels: bool) -> str:
        kind = "TYPE_STRING" if self.datatype == "BYTES" else f"TYPE_{self.datatype}"
        named = ' label_filename: "labels.txt"' if labels else ""
        return f'{{ name: "{self.name}" data_type: {kind} dims: [{self.columns}]{named} }}'


@dataclass(frozen=True)
class TableModel:
    """A version of a model of the table."""

    name: str
    inputs: tuple[Side, ...]
    outputs: tuple[Side, ...]
    nodes: tuple[Any, ...]
    constants: tuple[Any, ...] = ()
    version: int = 1

    def save(self, path: Path) -> None:
        sides = [[each.info() for each in side] for side in (self.inputs, self.outputs)]
        graph = helper.make_graph(list(self.nodes), self.name, *sides, list(self.constants))
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.checker.check_model(made)
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(made, str(path))

    def pbtxt(self, backend: str) -> str:
        """Its settings for Triton."""
        inputs = ", ".join(each.pbtxt(labels=False) for each in self.inputs)
        outputs = ", ".join(each.pbtxt(labels=self.name == "classifier") for each in self.outputs)
        versions = "version_policy { all {} }\n" if self.version > 1 else ""
        head = f'name: "{self.name}"\nbackend: "{backend}"\nmax_batch_size: 4096\n'
        return f"{head}{versions}input [{inputs}]\noutput [{outputs}]\n"


def table_models() -> Iterator[TableModel]:
    """Every model, and every version of it."""
    for datatype in KINDS:
        yield _identity(f"identity_{datatype.lower()}", datatype)
    yield _identity("spare", "FP32")
    yield _identity("classifier", "FP32", len(LABELS))
    yield _simple()
    yield _simple_string()
    yield _slow()
    for version in (1, 2):
        yield _adding(version)


def write_repository(folder: Path, backend: str = "onnxruntime") -> Path:
    """All of them as ``NAME/VERSION/model.onnx``, with labels, and settings for weft and for Triton."""
    for model in table_models():
        place = folder / model.name
        model.save(place / str(model.version) / "model.onnx")
        (place / "config.pbtxt").write_text(model.pbtxt(backend))
        if model.name == "classifier":
            (place / "labels.txt").write_text("\n".join(LABELS) + "\n")
            (place / "weft.toml").write_text('labels = {OUTPUT0 = "labels.txt"}\n')
    return folder


def _identity(name: str, datatype: str, columns: int = 2) -> TableModel:
    node = helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])
    sides = (Side("INPUT0", datatype, columns),), (Side("OUTPUT0", datatype, columns),)
    return TableModel(name, *sides, (node,))


def _simple() -> TableModel:
    nodes = (
        helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    )
    return TableModel("simple", _pair("INPUT", "INT32"), _pair("OUTPUT", "INT32"), nodes)


def _simple_string() -> TableModel:
    """Numbers come and go as texts."""
    nodes = [helper.make_node("Cast", [f"INPUT{k}"], [f"number{k}"], to=TensorProto.INT32) for k in (0, 1)]
    for k, operator in enumerate(("Add", "Sub")):
        nodes.append(helper.make_node(operator, ["number0", "number1"], [f"made{k}"]))
        nodes.append(helper.make_node("Cast", [f"made{k}"], [f"OUTPUT{k}"], to=TensorProto.STRING))
    return TableModel("simple_string", _pair("INPUT", "BYTES"), _pair("OUTPUT", "BYTES"), tuple(nodes))


def _pair(name: str, datatype: str) -> tuple[Side, Side]:
    return Side(f"{name}0", datatype, SIMPLE), Side(f"{name}1", datatype, SIMPLE)


def _adding(version: int) -> TableModel:
    constant = helper.make_tensor("more", TensorProto.FLOAT, [1], [float(version)])
    sides = (Side("INPUT0", "FP32", 1),), (Side("OUTPUT0", "FP32", 1),)
    node = helper.make_node("Add", ["INPUT0", "more"], ["OUTPUT0"])
    return TableModel("versions", *sides, (node,), (constant,), version)


def _slow() -> TableModel:
    """Counts to INPUT0 one by one: a number that a request chooses is how long it takes."""
    value, truth = helper.make_tensor_value_info, TensorProto.BOOL
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["still"]),
            helper.make_node("Add", ["count", "step"], ["counted"]),
        ],
        "turn",
        [value("turn", TensorProto.INT64, []), value("go_on", truth, []), value("count", TensorProto.INT64, [1, 1])],
        [value("still", truth, []), value("counted", TensorProto.INT64, [1, 1])],
        [helper.make_tensor("step", TensorProto.INT64, [1, 1], [1])],
    )
    constants = (
        helper.make_tensor("scalar", TensorProto.INT64, [0], []),
        helper.make_tensor("always", TensorProto.BOOL, [], [True]),
        helper.make_tensor("zero", TensorProto.INT64, [1, 1], [0]),
    )
    nodes = (
        helper.make_node("Reshape", ["INPUT0", "scalar"], ["turns"]),
        helper.make_node("Loop", ["turns", "always", "zero"], ["OUTPUT0"], body=body),
    )
    return TableModel("slow", (Side("INPUT0", "INT64", 1),), (Side("OUTPUT0", "INT64", 1),), nodes, constants)

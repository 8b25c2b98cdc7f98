"""A user's model file opened for tuning: its graph for one output, its layers, and what it takes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto, TensorProto, numpy_helper

from weft.base.errors import ModelError, TuneError, unknown_name
from weft.models.onnx_import.widths import FORMATS
from weft.models.weighted_layers import WeightedLayer, find_layers, load_flat
from weft.runtime.cutting import prune, whole_because
from weft.runtime.onnxruntime_cpu.samples import check_ranks, specs
from weft.runtime.onnxruntime_cpu.sessions import open_model
from weft.runtime.stitched import tasks_in
from weft.runtime.tensors import TensorSpec

_SAME_VALUES = ("Identity", "Squeeze", "Unsqueeze", "Reshape", "Flatten")


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A model and what is known of it before anything ran."""

    path: Path
    model: ModelProto
    """Only what the output needs."""
    layers: tuple[WeightedLayer, ...]
    inputs: tuple[TensorSpec, ...]
    output: str

    @property
    def fixed_batch(self) -> int | None:
        """Samples that every run must have; None where any number will do."""
        sizes = {spec.shape[0] for spec in self.inputs}
        return max(sizes) if max(sizes) > 0 else None

    @property
    def gives_probability(self) -> bool:
        """Whether the output is a probability for sure."""
        makers = {name: node for node in self.model.graph.node for name in node.output}
        node = makers.get(self.output)
        while node is not None and node.op_type in _SAME_VALUES:
            node = makers.get(node.input[0])
        return node is not None and node.op_type == "Sigmoid"

    @property
    def digest(self) -> bytes:
        """Of the graph and all its weights, wherever they are stored."""
        digest = hashlib.sha256()
        bare = ModelProto()
        bare.CopyFrom(self.model)
        for each in bare.graph.initializer:
            digest.update(f"{each.name} {list(each.dims)}".encode())
            text = each.data_type == TensorProto.STRING
            digest.update(b"\0".join(each.string_data) if text else numpy_helper.to_array(each).tobytes())
        del bare.graph.initializer[:]
        digest.update(bare.SerializeToString(deterministic=True))
        return digest.digest()


def open_for_tuning(path: str | Path, output: str | None = None) -> Opened:
    """Read a file; *output* is the one that is scored, the first if not said."""
    path = Path(path)
    try:
        session = open_model(path, 1)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    _refuse_stitched(path)
    model = load_flat(path)
    if any(entry.key == FORMATS for entry in model.metadata_props):
        raise TuneError(f"{path} was tuned already; tune the model that it was made of")
    known = [each.name for each in model.graph.output]
    if output is not None and output not in known:
        raise TuneError(f"{path}: {unknown_name('output', output, known)}")
    why = whole_because(model.graph) if len(model.graph.node) > 1 else None
    if why is not None:
        raise TuneError(f"{path}: {why}, so it cannot be cut between its layers; simplify it, or score it by a command")
    chosen = known[0] if output is None else output
    try:
        layers = _layers_for(model, chosen)
    except TuneError as error:
        raise TuneError(f"{path}: {error}") from error
    return Opened(path, model, layers, _inputs(path, model, specs(session.get_inputs())), chosen)


def _refuse_stitched(path: Path) -> None:
    """Of a file of several models one score cannot speak for all."""
    if tasks := [task.name for task in tasks_in(path)]:
        raise TuneError(
            f"{path} is stitched of {', '.join(tasks)}, and one score cannot speak for all of them; tune the models "
            "that it was made of, and stitch those"
        )


def _layers_for(model: ModelProto, output: str) -> tuple[WeightedLayer, ...]:
    """The layers that an output needs, once all else is taken out; called as they are in the whole model."""
    layers = find_layers(model)
    made = {layer.name: model.graph.node[layer.position].output[0] for layer in layers}
    _keep_for(model, output)
    positions = {node.output[0]: position for position, node in enumerate(model.graph.node)}
    kept = [layer._replace(position=positions[made[layer.name]]) for layer in layers if made[layer.name] in positions]
    if not kept:
        raise TuneError(
            f"no layer to tune: output {output!r} needs none that has weights; name another output (--scored-output)"
        )
    return tuple(kept)


def _keep_for(model: ModelProto, output: str) -> None:
    graph = model.graph
    for at in range(len(graph.output) - 1, -1, -1):
        if graph.output[at].name != output:
            del graph.output[at]
    prune(graph)
    used = {name for node in graph.node for name in node.input}
    for at in range(len(graph.input) - 1, -1, -1):
        if graph.input[at].name not in used:
            del graph.input[at]


def _inputs(path: Path, model: ModelProto, declared: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Those that the output needs; each with a first dimension for the batch."""
    needed = {each.name for each in model.graph.input}
    try:
        check_ranks(model.graph.input)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    found = tuple(spec for spec in declared if spec.name in needed)
    for spec in found:
        if spec.datatype == "BYTES":
            raise TuneError(f"{path}: input {spec.name!r} is text; tune the part of the model behind the tokeniser")
        if not spec.shape:
            raise TuneError(f"{path}: input {spec.name!r} is a single number, not one row per sample")
    if len({spec.shape[0] for spec in found if spec.shape[0] > 0}) > 1:
        raise TuneError(f"{path}: inputs have different fixed batches; export the model with one free batch dimension")
    return found

"""A user's model file opened for tuning: its graph for one output, run whole, or cut before each of its layers.

Between two sessions of a cut model, the input of a layer can be rounded (``runner.PlanRunner``). A tensor that enters
several layers is rounded for each layer separately; all other readers get it unrounded.

``find_targets`` gives the layers that are tuned: their numbers of weights, inputs and products, their ranges of values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import ModelError, TuneError, unknown_name
from weft.models.element_types import ElementType, element_type
from weft.models.onnx_graph import (
    Attributes,
    OnnxModel,
    OnnxNode,
    copied,
    declared,
    fill,
    makers,
    metadata,
    prune,
    to_array,
)
from weft.models.onnx_import.widths import FORMATS
from weft.runtime.cutting import ModelPiece, SeenTensor, split, whole_because
from weft.runtime.onnxruntime_cpu.sessions import check_ranks, first_line, open_model, open_session, specs
from weft.runtime.samples import batches, feed
from weft.runtime.stitched import tasks_in
from weft.runtime.tensors import Array, TensorSpec
from weft_tune.network import Network, Target, join_targets
from weft_tune.quantised.data import check_inputs
from weft_tune.quantised.runner import RoundingPlan, Stage, rounded_input, weight_input
from weft_tune.weighted_layers import KINDS, WeightedLayer, find_layers, load_flat

BATCH_BYTES = 8 << 20
"""Limit of the largest tensor of a batch, so that it stays in the processor's caches."""
MOST_SAMPLES = 32
"""Limit of the samples in a batch."""
_SAME_VALUES = ("Identity", "Squeeze", "Unsqueeze", "Reshape", "Flatten")  # operators that change no value


@dataclass(frozen=True, slots=True, eq=False)
class OpenedModel:
    """A model that was read and checked, and has not run yet."""

    path: Path
    model: OnnxModel
    """The part of the graph that the output needs."""
    layers: tuple[WeightedLayer, ...]
    inputs: tuple[TensorSpec, ...]
    output: str

    @property
    def fixed_batch(self) -> int | None:
        """The number of samples that every run must have; None where any number is allowed."""
        sizes = {spec.shape[0] for spec in self.inputs}
        return max(sizes) if max(sizes) > 0 else None

    @property
    def gives_probability(self) -> bool:
        """Whether the output is a probability: a Sigmoid, perhaps reshaped."""
        producers = makers(self.model.graph.node)
        node = producers.get(self.output)
        while node is not None and node.op_type in _SAME_VALUES:
            node = producers.get(node.input[0])
        return node is not None and node.op_type == "Sigmoid"

    @property
    def digest(self) -> bytes:
        """A digest of the graph and all its weights, wherever they are stored."""
        digest = hashlib.sha256()
        bare = copied(self.model)
        for tensor in bare.graph.initializer:
            digest.update(f"{tensor.name} {list(tensor.dims)}".encode())
            text = tensor.data_type == ElementType.STRING
            digest.update(b"\0".join(tensor.string_data) if text else to_array(tensor).tobytes())
        del bare.graph.initializer[:]
        digest.update(bare.SerializeToString(deterministic=True))
        return digest.digest()


def open_for_tuning(path: str | Path, output: str | None = None) -> OpenedModel:
    """Read and check a file; *output*: the output that is scored, by default the first.

    Raises ModelError or TuneError if the file is unreadable, stitched or tuned already, or cannot be cut.
    """
    path = Path(path)
    try:
        session = open_model(path, threads=1)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    if tasks := [task.name for task in tasks_in(path)]:
        raise TuneError(
            f"{path} is stitched of {', '.join(tasks)}, and one score cannot speak for all of them; tune the models "
            "that it was made of, and stitch those"
        )
    model = load_flat(path)
    if FORMATS in metadata(model):
        raise TuneError(f"{path} was tuned already; tune the model that it was made of")
    outputs = [value.name for value in model.graph.output]
    if output is not None and output not in outputs:
        raise TuneError(f"{path}: {unknown_name('output', output, outputs)}")
    why = whole_because(model.graph) if len(model.graph.node) > 1 else None
    if why is not None:
        raise TuneError(f"{path}: {why}, so it cannot be cut between its layers; simplify it, or score it by a command")
    scored = outputs[0] if output is None else output
    try:
        layers = _layers_for(model, scored)
    except TuneError as error:
        raise TuneError(f"{path}: {error}") from error
    return OpenedModel(path, model, layers, _inputs(path, model, specs(session.get_inputs())), scored)


def _layers_for(model: OnnxModel, output: str) -> tuple[WeightedLayer, ...]:
    """Remove all nodes that *output* does not need; returns the layers that are left, under their former names."""
    layers = find_layers(model)
    output_of_layer = {layer.name: model.graph.node[layer.position].output[0] for layer in layers}
    graph = model.graph
    fill(graph.output, [value for value in graph.output if value.name == output])
    prune(graph)
    used = {name for node in graph.node for name in node.input}
    fill(graph.input, [value for value in graph.input if value.name in used])
    positions = {node.output[0]: position for position, node in enumerate(graph.node)}
    # positions have changed; the tensor that a layer produces has not
    needed_layers = [
        layer._replace(position=positions[output_of_layer[layer.name]])
        for layer in layers
        if output_of_layer[layer.name] in positions
    ]
    if not needed_layers:
        raise TuneError(
            f"no layer to tune: output {output!r} needs none that has weights; name another output (--scored-output)"
        )
    return tuple(needed_layers)


def _inputs(path: Path, model: OnnxModel, session_inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The inputs that the output needs, checked to have a first dimension for the batch."""
    needed = {value.name for value in model.graph.input}
    try:
        check_ranks(model.graph.input)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    inputs = tuple(spec for spec in session_inputs if spec.name in needed)
    for spec in inputs:
        if spec.datatype == "BYTES":
            raise TuneError(f"{path}: input {spec.name!r} is text; tune the part of the model behind the tokeniser")
        if not spec.shape:
            raise TuneError(f"{path}: input {spec.name!r} is a single number, not one row per sample")
    if len({spec.shape[0] for spec in inputs if spec.shape[0] > 0}) > 1:
        raise TuneError(f"{path}: inputs have different fixed batches; export the model with one free batch dimension")
    return inputs


# Running the whole model


def choose_batch(opened: OpenedModel, inputs: Mapping[str, Array]) -> int:
    """The number of samples to run at a time; 1 if a model declares a free batch dimension and then rejects batches."""
    if opened.fixed_batch is not None:
        return opened.fixed_batch
    tensors = observe_tensors(opened, feed(inputs, np.arange(1)))
    largest = max(tensor.size_bytes for tensor in tensors.values())
    batch = min(MOST_SAMPLES, max(1, BATCH_BYTES // max(largest, 1)), len(next(iter(inputs.values()))))
    try:
        (outputs,) = run_on(opened, session_for(opened, []), [opened.output], feed(inputs, np.arange(batch)))
    except TuneError:
        return 1
    return batch if outputs.ndim and len(outputs) == batch else 1


def observe_tensors(opened: OpenedModel, sample: Mapping[str, Array]) -> dict[str, SeenTensor]:
    """Run *sample*, and return types and sizes of the inputs and of the outputs of all nodes."""
    names = [name for node in opened.model.graph.node for name in node.output if name]
    outputs = run_on(opened, session_for(opened, names), names, sample)
    tensors = dict(sample) | dict(zip(names, outputs, strict=True))
    return {
        name: SeenTensor(element_type(value.dtype), value.nbytes)
        for name, value in tensors.items()
        if isinstance(value, np.ndarray) and value.dtype != np.object_
    }


def tensors_by_batch(
    opened: OpenedModel, names: Collection[str], inputs: Mapping[str, Array], batch: int
) -> Iterator[dict[str, Array]]:
    """Run the model on all samples, *batch* at a time; yields its inputs and the tensors called *names*."""
    outputs = [name for name in names if name not in inputs]
    session = session_for(opened, outputs)
    for batch_inputs in batches(inputs, batch, opened.fixed_batch):
        values = run_on(opened, session, outputs, batch_inputs) if outputs else []
        yield dict(zip(outputs, values, strict=True)) | batch_inputs


def session_for(opened: OpenedModel, names: Sequence[str]) -> Any:
    """Open a session over the whole model that also outputs the inner tensors called *names*."""
    model = copied(opened.model)
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(declared(name) for name in dict.fromkeys(names) if name not in known)
    try:
        return open_session(model.SerializeToString(), threads=1, optimise=True)
    except Exception as error:  # the C++ side raises a dozen unrelated kinds, and protobuf its own above 2 GiB
        raise ModelError(f"{opened.path}: cannot be loaded: {first_line(error)}") from error


def run_on(opened: OpenedModel, session: Any, names: Sequence[str], inputs: Mapping[str, Array]) -> list[Array]:
    """Run a session over the whole model; return the outputs *names*. Raises TuneError if it fails."""
    try:
        return list(session.run(list(names), dict(inputs)))
    except Exception as error:  # the C++ side raises a dozen unrelated kinds
        raise TuneError(f"{opened.path}: the model fails on the samples: {first_line(error)}") from error


# Cutting it before its layers


def make_plan(opened: OpenedModel, layers: Sequence[WeightedLayer], inputs: Mapping[str, Array]) -> RoundingPlan:
    """Cut a model before *layers*; a run on one of the samples gives the types of the tensors at the cuts."""
    sample = feed(inputs, np.arange(1), opened.fixed_batch)
    types = {name: tensor.element_type for name, tensor in observe_tensors(opened, sample).items()}
    stages = tuple(_stages(opened, layers, _pieces(opened, layers, types)))
    weights = {layer.name: layer.weight for layer in layers}
    return RoundingPlan(stages, opened.output, weights, choose_batch(opened, inputs), opened.fixed_batch is not None)


def _pieces(opened: OpenedModel, layers: Sequence[WeightedLayer], types: Mapping[str, int]) -> list[ModelPiece]:
    """Cut the model before each of *layers*; a layer's two operands become inputs of its piece.

    types: element types of the tensors at the cuts.
    """
    cut = copied(opened.model)
    graph = cut.graph
    produced = {name for node in graph.node for name in node.output}
    piece_outputs = dict.fromkeys([opened.output, *(graph.node[layer.position].input[0] for layer in layers)])
    for layer in layers:
        for index, name in enumerate((rounded_input(layer.name), weight_input(layer.name))):
            graph.node[layer.position].input[index] = name
            graph.input.append(declared(name, ElementType.FLOAT))
    fill(graph.output, [declared(name, types[name]) for name in piece_outputs if name in produced])
    prune(graph)
    starts = {rounded_input(layer.name) for layer in layers}
    cuts = [index for index, node in enumerate(graph.node) if index and not starts.isdisjoint(node.input)]
    try:
        return split(cut, cuts, types)
    except KeyError as error:
        raise TuneError(f"{opened.path}: {error} is no plain tensor, and in use where a layer begins") from error


def _stages(opened: OpenedModel, layers: Sequence[WeightedLayer], pieces: Sequence[ModelPiece]) -> Iterator[Stage]:
    """The pieces with the layers that they begin with, and the tensors that are live at each cut."""
    starts = {rounded_input(layer.name): layer for layer in layers}
    # for each piece: the layer that it begins with, the unrounded input of that layer, and all its other inputs
    first_layers = [next((starts[name] for name in piece.inputs if name in starts), None) for piece in pieces]
    model_inputs = {value.name for value in opened.model.graph.input}
    sources = [opened.model.graph.node[layer.position].input[0] if layer else "" for layer in first_layers]
    operands = [
        {rounded_input(layer.name), weight_input(layer.name)} if layer else set[str]() for layer in first_layers
    ]
    others = [
        tuple(name for name in piece.inputs if name not in layer_inputs)
        for piece, layer_inputs in zip(pieces, operands, strict=True)
    ]
    # Backwards: a tensor that a later piece needs and no later piece produces must be kept at the cut.
    needed = dict.fromkeys([opened.output])
    live: list[tuple[str, ...]] = []
    for i in range(len(pieces) - 1, -1, -1):
        needed |= dict.fromkeys(filter(None, (*others[i], sources[i])))
        produced_later = {name for piece in pieces[i:] for name in piece.outputs}
        live.insert(0, tuple(name for name in needed if name not in produced_later and name not in model_inputs))
    for i, piece in enumerate(pieces):
        layer = first_layers[i]
        yield Stage(
            layer.name if layer else None, sources[i], piece.model.SerializeToString(), others[i], piece.outputs,
            live[i],
        )  # fmt: skip


def find_targets(
    model: str | Path | OpenedModel,
    calibration: Mapping[str, Array],
    *,
    layers: str | Sequence[str] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> Network:
    """The layers that may be tuned, in the order in which they run.

    *layers*: names, patterns such as ``block1.*``, ``conv`` for all convolutions or ``fc`` for all matrix products;
    all by default. *groups*: name -> layers that share one format. Samples of *calibration* show the range of inputs.
    """
    opened = model if isinstance(model, OpenedModel) else open_for_tuning(model)
    targets = _measure_targets(opened, select(opened.layers, layers), check_inputs(calibration, opened.inputs))
    return Network(opened.path.stem, tuple(_group_targets(targets, groups or {})))


def select(layers: Sequence[WeightedLayer], wanted: str | Sequence[str] | None) -> tuple[WeightedLayer, ...]:
    """Select layers by name, pattern or kind."""
    if wanted is None:
        return tuple(layers)
    chosen: set[str] = set()
    for selector in [wanted] if isinstance(wanted, str) else wanted:
        matches = {layer.name for layer in layers if layer.name == selector or fnmatchcase(layer.name, selector)}
        if not matches and selector in KINDS.values():
            matches = {layer.name for layer in layers if layer.kind == selector}
        if not matches:
            raise TuneError(unknown_name("layer", selector, [layer.name for layer in layers]))
        chosen |= matches
    if not chosen:
        raise TuneError("no layer is named; leave the choice out to tune all of them")
    return tuple(layer for layer in layers if layer.name in chosen)


def _measure_targets(
    opened: OpenedModel, layers: Sequence[WeightedLayer], inputs: Mapping[str, Array]
) -> dict[str, Target]:
    """Run the float model and measure the tensors that enter and leave the layers."""
    nodes = {layer.name: opened.model.graph.node[layer.position] for layer in layers}
    names = list(dict.fromkeys(name for node in nodes.values() for name in (node.input[0], node.output[0])))
    # One sample alone for the sizes, because those of a batch need not be multiples of them.
    (single_sample,) = tensors_by_batch(opened, names, {name: values[:1] for name, values in inputs.items()}, 1)
    rows = opened.fixed_batch or 1  # of that run
    largest_magnitudes = dict.fromkeys(nodes, 0.0)
    for tensors in tensors_by_batch(opened, names, inputs, choose_batch(opened, inputs)):
        for name, node in nodes.items():
            magnitude = float(np.abs(tensors[node.input[0]]).max(initial=0.0))
            if not math.isfinite(magnitude):
                raise TuneError(
                    f"{opened.path}: NaN or infinity enters layer {name!r}; take the samples out that do it"
                )
            largest_magnitudes[name] = max(largest_magnitudes[name], magnitude)
    targets = {}
    for layer in layers:
        node = nodes[layer.name]
        entering, leaving = single_sample[node.input[0]], single_sample[node.output[0]]
        targets[layer.name] = Target(
            layer.name,
            weights=layer.weight.size,
            inputs=entering.size // rows,
            weight_max=float(np.abs(layer.weight).max(initial=0.0)),
            input_max=largest_magnitudes[layer.name],
            macs=_count_macs(layer, entering, leaving, node) // rows,
        )
    return targets


def _count_macs(layer: WeightedLayer, entering: Array, leaving: Array, node: OnnxNode) -> int:
    """Multiply-accumulate operations of a layer, from the arrays that enter and leave it."""
    shape = layer.weight.shape  # of Conv: [out, in, kernel...]; of ConvTranspose: [in, out, kernel...]
    if layer.op == "ConvTranspose":
        return int(entering.size) * math.prod(shape[1:])
    if layer.op == "Conv":
        return int(leaving.size) * math.prod(shape[1:])
    transposed = Attributes(node).integer("transB", 0)  # the weight is [out, in] then, else [..., in, out]
    depth: int = shape[-1] if transposed or len(shape) == 1 else shape[-2]
    return int(leaving.size) * depth


def _group_targets(targets: Mapping[str, Target], groups: Mapping[str, Sequence[str]]) -> Iterator[Target]:
    """Yield the targets, those of a group joined into one in the place of the group's first layer."""
    owner: dict[str, str] = {}
    for group, members in groups.items():
        if not members:
            raise TuneError(f"group {group!r} has no layer")
        for name in members:
            if name not in targets:
                raise TuneError(f"group {group!r}: {unknown_name('layer', name, targets)}")
            if name in owner:
                raise TuneError(f"layer {name!r} is in the groups {owner[name]!r} and {group!r}; leave it in one")
            owner[name] = group
    for name, target in targets.items():
        if name not in owner:
            yield target
        else:
            group = owner[name]
            members = [member for member in targets if owner.get(member) == group]
            if name == members[0]:
                yield join_targets(group, [targets[member] for member in members])

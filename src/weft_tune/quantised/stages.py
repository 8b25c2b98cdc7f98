"""A graph cut before each of its layers, so that what enters a layer can be rounded between two sessions.

A tensor that enters several layers is rounded for each of them on its own; whoever else reads it sees it unrounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from weft.base.errors import ModelError, TuneError
from weft.models.weighted_layers import WeightedLayer
from weft.runtime.cutting import ModelPiece, SeenTensor, prune, split
from weft.runtime.onnxruntime_cpu.sessions import first_line, open_session
from weft.runtime.tensors import Array
from weft_tune.quantised.feeding import feed
from weft_tune.quantised.opened import Opened
from weft_tune.quantised.plan import RoundingPlan, Stage, rounded_input, weight_input

BATCH_BYTES = 8 << 20
"""What the largest tensor of a batch may take: more would not stay in the processor's caches."""
MOST_SAMPLES = 32
"""In a batch."""


def make_plan(opened: Opened, layers: Sequence[WeightedLayer], inputs: Mapping[str, Array]) -> RoundingPlan:
    """Cut a model before *layers*; some of the samples are run to see what it makes of them."""
    sample = feed(inputs, np.arange(1), opened.fixed_batch)
    types = {name: each.element_type for name, each in look_inside(opened, sample).items()}
    stages = tuple(_stages(opened, layers, _pieces(opened, layers, types)))
    weights = {layer.name: layer.weight for layer in layers}
    return RoundingPlan(stages, opened.output, weights, choose_batch(opened, inputs), opened.fixed_batch is not None)


def choose_batch(opened: Opened, inputs: Mapping[str, Array]) -> int:
    """How many samples to run at a time: one, if the model says that it takes any number and then does not."""
    if opened.fixed_batch is not None:
        return opened.fixed_batch
    tensors = look_inside(opened, feed(inputs, np.arange(1)))
    largest = max(each.size_bytes for each in tensors.values())
    batch = min(MOST_SAMPLES, max(1, BATCH_BYTES // max(largest, 1)), len(next(iter(inputs.values()))))
    try:
        (made,) = run_on(opened, session_for(opened, []), [opened.output], feed(inputs, np.arange(batch)))
    except TuneError:
        return 1
    return batch if made.ndim and len(made) == batch else 1


def look_inside(opened: Opened, sample: Mapping[str, Array]) -> dict[str, SeenTensor]:
    """Types and sizes of the inputs and of all that the nodes make, found by running them."""
    names = [name for node in opened.model.graph.node for name in node.output if name]
    made = run_on(opened, session_for(opened, names), names, sample)
    found = dict(sample) | dict(zip(names, made, strict=True))
    return {
        name: SeenTensor(int(helper.np_dtype_to_tensor_dtype(value.dtype)), value.nbytes)
        for name, value in found.items()
        if isinstance(value, np.ndarray) and value.dtype != np.object_
    }


def session_for(opened: Opened, names: Sequence[str]) -> Any:
    """A session over the whole model that also gives some tensors from anywhere in it."""
    shown = ModelProto()
    shown.CopyFrom(opened.model)
    known = {each.name for each in shown.graph.output}
    shown.graph.output.extend(ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in known)
    try:
        return open_session(shown.SerializeToString(), 1, optimise=True)
    except Exception as error:  # the C++ side raises a dozen unrelated kinds, and protobuf has enough at 2 GiB
        raise ModelError(f"{opened.path}: cannot be loaded: {first_line(error)}") from error


def run_on(opened: Opened, session: Any, names: Sequence[str], given: Mapping[str, Array]) -> list[Array]:
    """Run a session over the whole model."""
    try:
        return list(session.run(list(names), dict(given)))
    except Exception as error:  # the C++ side raises a dozen unrelated kinds
        raise TuneError(f"{opened.path}: the model fails on the samples: {first_line(error)}") from error


def _pieces(opened: Opened, layers: Sequence[WeightedLayer], types: Mapping[str, int]) -> list[ModelPiece]:
    """The pieces between the layers; each layer takes its two operands from outside."""
    cut = ModelProto()
    cut.CopyFrom(opened.model)
    graph = cut.graph
    made = {name for node in graph.node for name in node.output}
    wanted = dict.fromkeys([opened.output, *(graph.node[layer.position].input[0] for layer in layers)])
    for layer in layers:
        for at, name in enumerate((rounded_input(layer.name), weight_input(layer.name))):
            graph.node[layer.position].input[at] = name
            graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    del graph.output[:]
    graph.output.extend(helper.make_tensor_value_info(name, types[name], None) for name in wanted if name in made)
    prune(graph)
    starts = {rounded_input(layer.name) for layer in layers}
    cuts = [at for at, node in enumerate(graph.node) if at and not starts.isdisjoint(node.input)]
    try:
        return split(cut, cuts, types)
    except KeyError as error:
        raise TuneError(f"{opened.path}: {error} is no plain tensor, and in use where a layer begins") from error


def _stages(opened: Opened, layers: Sequence[WeightedLayer], pieces: Sequence[ModelPiece]) -> Iterator[Stage]:
    starts = {rounded_input(layer.name): layer for layer in layers}
    begun = [next((starts[name] for name in piece.inputs if name in starts), None) for piece in pieces]
    given = {each.name for each in opened.model.graph.input}
    sources = [opened.model.graph.node[layer.position].input[0] if layer else "" for layer in begun]
    own = [{rounded_input(layer.name), weight_input(layer.name)} if layer else set[str]() for layer in begun]
    taken = [tuple(n for n in piece.inputs if n not in mine) for piece, mine in zip(pieces, own, strict=True)]
    needed = dict.fromkeys([opened.output])
    live: list[tuple[str, ...]] = []
    for at in range(len(pieces) - 1, -1, -1):
        needed |= dict.fromkeys(filter(None, (*taken[at], sources[at])))
        made_later = {name for piece in pieces[at:] for name in piece.outputs}
        live.insert(0, tuple(name for name in needed if name not in made_later and name not in given))
    for at, piece in enumerate(pieces):
        layer = begun[at]
        yield Stage(
            layer.name if layer else None, sources[at], piece.model.SerializeToString(), taken[at], piece.outputs,
            live[at],
        )  # fmt: skip

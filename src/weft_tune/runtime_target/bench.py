"""Builds, scores and times variants of one model: the measurements on which the choice among them is based.

Times of single layers come from ONNX Runtime's own profiler, in the graph that it really runs. For that, all nodes of a
layer and their outputs get names with the layer's number (a *mark*) in a copy of the variant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from weft.base.errors import TuneError
from weft.models.onnx_graph import OnnxModel, OnnxNode, copied
from weft.runtime.onnxruntime_cpu.profiler import mark, node_events
from weft.runtime.onnxruntime_cpu.sessions import first_line, open_model, open_session
from weft.runtime.samples import count_rows, feed
from weft.runtime.tensors import Array
from weft.runtime.timing import TURNS, Turns, measure_in_turns, run_all, time_in_turns
from weft_tune.quantised.data import LabelledData
from weft_tune.quantised.metrics import closeness
from weft_tune.quantised.opened import OpenedModel, choose_batch, run_on
from weft_tune.quantised.scoring import CALIBRATION, make_scorer
from weft_tune.runtime_target.prepared import PreparedModel, TensorRange, measure_ranges, prepare_model
from weft_tune.runtime_target.qdq import QdqOptions, WrittenVariant, eight_bit_places, write_halves, write_qdq

HARM_SAMPLES = 32
"""Cap on the samples on which the harm of single layers to the outputs is measured."""
PROFILE_S, FEWEST_RUNS, MOST_RUNS = 3.0, 8, 100
"""Seconds for profiled runs, and their least and largest number."""
FOLLOWERS = ("Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish")
"""Operators that ONNX Runtime fuses into the layer before them; the fused node is named after the follower's output."""


@dataclass(frozen=True, slots=True, eq=False)
class BuiltVariant:
    """A variant of the model that was opened in ONNX Runtime, and the inputs of a timed run."""

    written: WrittenVariant | None
    """None for the source file itself."""
    session: Any
    inputs: Mapping[str, Array]

    def run(self) -> None:
        self.session.run(None, self.inputs)


class RuntimeBench:
    """Builds variants of a model, and measures their scores and times."""

    def __init__(
        self, opened: OpenedModel, wanted: Sequence[str], data: LabelledData | Mapping[str, Array], metric: str
    ) -> None:
        """wanted: names of the layers that may change. data: samples, without labels if *metric* needs none."""
        inputs = data.inputs if isinstance(data, LabelledData) else data
        self.prepared = prepare_model(opened.path, wanted)
        self._simplified = replace(opened, model=self.prepared.model)
        self._batch = choose_batch(opened, inputs)
        self._run_inputs = feed(inputs, np.arange(1), opened.fixed_batch)
        self.original = BuiltVariant(None, open_model(opened.path, threads=1), self._run_inputs)
        self.scorer = make_scorer(opened, data, metric, self.original.session, self._batch)
        self._ranges = self._calibrate(opened, inputs)
        rows = np.arange(min(HARM_SAMPLES, count_rows(inputs), self._batch))
        self._harm_inputs = feed(inputs, rows, opened.fixed_batch)
        self._original_outputs = self._run_outputs(self.original)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that can be computed in 8 bits."""
        return tuple(layer.name for layer in self.prepared.layers)

    @property
    def rows(self) -> int:
        """Number of samples in a timed run."""
        return count_rows(self._run_inputs)

    def eight_bits(self, chosen: frozenset[str], options: QdqOptions) -> BuiltVariant:
        """Build the variant with the layers *chosen* in 8 bits; the original model if there are none."""
        if not chosen:
            return self.original
        return self._build(write_qdq(self.prepared, self._ranges, chosen, options))

    def halves(self) -> BuiltVariant:
        """Build the variant with all layers in float16; raises TuneError if ONNX Runtime cannot run it."""
        return self._build(write_halves(self.prepared))

    def score(self, variant: BuiltVariant) -> float:
        return self.scorer.score(variant.session)

    def race(self, variants: Sequence[BuiltVariant], turns: int = TURNS) -> tuple[Turns, ...]:
        """Time the variants in turns, so that disturbances affect all of them; one ``Turns`` per variant."""
        return time_in_turns([variant.run for variant in variants], turns)

    def harm(self, layer: str, options: QdqOptions) -> float:
        """The mean relative distance of the outputs from the original outputs if only *layer* is in 8 bits."""
        changed = self._run_outputs(self.eight_bits(frozenset([layer]), options))
        return 1 - float(closeness(changed, self._original_outputs).mean())

    def layer_times(self, variants: Sequence[BuiltVariant]) -> list[dict[str, float]]:
        """For each variant, layer -> seconds; the variants are profiled in turns."""
        written = [variant.written or _unchanged_variant(self.prepared) for variant in variants]
        return layer_times(written, self.layers, self._run_inputs)

    def _calibrate(self, opened: OpenedModel, inputs: Mapping[str, Array]) -> dict[str, TensorRange]:
        """Measure the ranges of all tensors that are 8 bits wide in any variant."""
        graph, layers = self.prepared.model.graph, self.prepared.layers
        names = set().union(*(eight_bit_places(graph, layers, joined).ranged for joined in (True, False)))
        names |= {graph.node[layer.position].input[0] for layer in layers}
        rows = np.arange(min(CALIBRATION, count_rows(inputs)))
        return measure_ranges(self._simplified, sorted(names), feed(inputs, rows), self._batch)

    def _run_outputs(self, variant: BuiltVariant) -> Array:
        """The outputs of *variant* on the samples of ``harm``."""
        (outputs,) = run_on(self._simplified, variant.session, [self._simplified.output], self._harm_inputs)
        return outputs

    def _build(self, written: WrittenVariant) -> BuiltVariant:
        """Open a session for a variant, and run it once to see that it works."""
        session = _session(self._simplified, written.model)
        run_on(self._simplified, session, [self._simplified.output], self._run_inputs)
        return BuiltVariant(written, session, self._run_inputs)


def _session(opened: OpenedModel, model: OnnxModel) -> Any:
    """Open a variant in ONNX Runtime; raises TuneError if that fails."""
    try:
        return open_session(model.SerializeToString(), threads=1, optimise=True)
    except Exception as error:  # the C++ side raises a dozen unrelated kinds, and protobuf its own above 2 GiB
        raise TuneError(f"{opened.path}: ONNX Runtime cannot load it in other formats: {first_line(error)}") from error


def _unchanged_variant(prepared: PreparedModel) -> WrittenVariant:
    """The prepared model itself as a variant, so that its layers can be profiled, too."""
    owners = {prepared.model.graph.node[layer.position].output[0]: layer.name for layer in prepared.layers}
    return WrittenVariant(prepared.model, owners)


def layer_times(
    variants: Sequence[WrittenVariant], layers: Sequence[str], inputs: Mapping[str, Array]
) -> list[dict[str, float]]:
    """Profile the variants in turns on *inputs*; for each, layer -> seconds of its nodes in one run.

    The nodes of a layer include those that convert its numbers.
    """
    numbers = {name: number for number, name in enumerate(layers)}
    with TemporaryDirectory() as folder:
        sessions = [
            open_session(
                _mark_layers(variant, numbers).SerializeToString(),
                threads=1,
                optimise=True,
                profile=Path(folder, f"{index}-"),
            )
            for index, variant in enumerate(variants)
        ]
        runs = [partial(run_all, [partial(session.run, None, dict(inputs))]) for session in sessions]
        measure_in_turns(runs, MOST_RUNS, fewest=FEWEST_RUNS, longest_s=PROFILE_S)
        return [_sum_by_layer(session, layers) for session in sessions]


def _sum_by_layer(session: Any, layers: Sequence[str]) -> dict[str, float]:
    """Add up the profiled times of the nodes of each layer; a node counts with the mean of its middle times."""
    times_us: dict[tuple[int, str], list[float]] = {}
    for number, event in node_events(session):
        times_us.setdefault((number, event["name"]), []).append(event["dur"])
    seconds: dict[str, float] = {}
    for (number, _), node_us in times_us.items():
        seconds[layers[number]] = seconds.get(layers[number], 0.0) + middle(node_us) / 1e6
    return seconds


def middle(values: Sequence[float]) -> float:
    """The mean of the middle half of *values*.

    Not the median, because the profiler counts whole microseconds; not the mean, because some runs are disturbed.
    """
    ordered = np.sort(np.asarray(values, float))
    quarter = len(ordered) // 4
    return float(ordered[quarter : len(ordered) - quarter].mean())


def _mark_layers(variant: WrittenVariant, numbers: Mapping[str, int]) -> OnnxModel:
    """Copy the model with a mark in the names of the nodes of layers and of their outputs; *numbers*: of the layers."""
    model = copied(variant.model)
    owners = {output: numbers[name] for output, name in variant.owners.items() if name in numbers}
    renamed: dict[str, str] = {}
    for node in model.graph.node:
        number = owners.get(node.output[0], _fused_layer(node, owners))
        if number is not None:
            owners[node.output[0]] = number
            renamed[node.output[0]] = f"{mark(number)}{len(renamed)}"
            node.name = renamed[node.output[0]]
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    for output in model.graph.output:
        output.name = renamed.get(output.name, output.name)
    return model


def _fused_layer(node: OnnxNode, owners: Mapping[str, int]) -> int | None:
    """The number of the layer that ONNX Runtime fuses *node* into, by the owner of its input; None if it does not."""
    return owners.get(node.input[0]) if node.op_type in FOLLOWERS else None

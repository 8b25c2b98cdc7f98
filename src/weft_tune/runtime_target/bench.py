"""Where variants of one model are built, scored and measured: all that the choice among them rests on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import ModelProto

from weft.base.errors import TuneError
from weft.runtime.onnxruntime_cpu.sessions import first_line, open_model, open_session
from weft.runtime.tensors import Array
from weft_tune.quantised.data import LabelledData
from weft_tune.quantised.exported import CALIBRATION
from weft_tune.quantised.feeding import count_rows, feed
from weft_tune.quantised.likeness import closeness
from weft_tune.quantised.opened import Opened
from weft_tune.quantised.stages import choose_batch, run_on
from weft_tune.runtime_target.halves import write_halves
from weft_tune.runtime_target.layer_times import layer_times
from weft_tune.runtime_target.places import eight_bit_places
from weft_tune.runtime_target.prepared import PreparedModel, prepare_model
from weft_tune.runtime_target.qdq import QdqWay, WrittenVariant, write_qdq
from weft_tune.runtime_target.ranges import TensorRange, see_ranges
from weft_tune.runtime_target.scoring import make_scorer
from weft_tune.runtime_target.timing import TURNS, Turns, in_turns

LOOKED_AT = 32
"""Samples, at most, on which single layers show what they do to the outputs."""


@dataclass(frozen=True, slots=True, eq=False)
class BuiltVariant:
    """A variant that can be run."""

    written: WrittenVariant | None
    """None for the file as it was given."""
    session: Any
    given: Mapping[str, Array]

    def run(self) -> None:
        self.session.run(None, self.given)


class RuntimeBench:
    """Builds variants of a model and says what they are worth and what they take."""

    def __init__(
        self, opened: Opened, wanted: Sequence[str], data: LabelledData | Mapping[str, Array], metric: str,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:  # fmt: skip
        inputs = data.inputs if isinstance(data, LabelledData) else data
        self.prepared = prepare_model(opened.path, wanted)
        self._simple, self._clock = replace(opened, model=self.prepared.model), clock
        self._batch = choose_batch(opened, inputs)
        self._one = feed(inputs, np.arange(1), opened.fixed_batch)
        self.original = BuiltVariant(None, open_model(opened.path, 1), self._one)
        self.scorer = make_scorer(opened, data, metric, self.original.session, self._batch)
        self._ranges = self._calibrated(opened, inputs)
        self._looked_at = feed(inputs, np.arange(min(LOOKED_AT, count_rows(inputs), self._batch)), opened.fixed_batch)
        self._answers = self._look(self.original)

    @property
    def layers(self) -> tuple[str, ...]:
        """Those that can be computed in 8 bits."""
        return tuple(layer.name for layer in self.prepared.layers)

    @property
    def rows(self) -> int:
        """Samples in a run that is measured."""
        return count_rows(self._one)

    def eight_bits(self, chosen: frozenset[str], way: QdqWay) -> BuiltVariant:
        """The model with some layers in 8 bits; as it was, if there are none."""
        if not chosen:
            return self.original
        return self._built(write_qdq(self.prepared, self._ranges, chosen, way))

    def halves(self) -> BuiltVariant:
        """The model with all its layers in float16."""
        return self._built(write_halves(self.prepared))

    def score(self, variant: BuiltVariant) -> float:
        return self.scorer.score(variant.session)

    def race(self, variants: Sequence[BuiltVariant], turns: int = TURNS) -> tuple[Turns, ...]:
        """What a run of each takes, in turns."""
        return in_turns([variant.run for variant in variants], turns, self._clock)

    def harm(self, layer: str, way: QdqWay) -> float:
        """How far the outputs are from what they were if only this layer is in 8 bits."""
        changed = self._look(self.eight_bits(frozenset([layer]), way))
        return 1 - float(closeness(changed, self._answers).mean())

    def layer_times(self, variants: Sequence[BuiltVariant]) -> list[dict[str, float]]:
        """Layer -> what it takes, in each of the variants, which take turns."""
        written = [variant.written or _as_it_is(self.prepared) for variant in variants]
        return layer_times(written, self.layers, self._one)

    def _calibrated(self, opened: Opened, inputs: Mapping[str, Array]) -> dict[str, TensorRange]:
        """The ranges of all tensors that some variant has in 8 bits."""
        graph, layers = self.prepared.model.graph, self.prepared.layers
        names = set().union(*(eight_bit_places(graph, layers, joined).seen for joined in (True, False)))
        names |= {graph.node[layer.position].input[0] for layer in layers}
        rows = np.arange(min(CALIBRATION, count_rows(inputs)))
        return see_ranges(self._simple, sorted(names), feed(inputs, rows), self._batch)

    def _look(self, variant: BuiltVariant) -> Array:
        (outputs,) = run_on(self._simple, variant.session, [self._simple.output], self._looked_at)
        return outputs

    def _built(self, written: WrittenVariant) -> BuiltVariant:
        """Ready to run; that it does is seen here."""
        session = _session(self._simple, written.model)
        run_on(self._simple, session, [self._simple.output], self._one)
        return BuiltVariant(written, session, self._one)


def _session(opened: Opened, model: ModelProto) -> Any:
    try:
        return open_session(model.SerializeToString(), 1, optimise=True)
    except Exception as error:  # the C++ side raises a dozen unrelated kinds, and protobuf has enough at 2 GiB
        raise TuneError(f"{opened.path}: ONNX Runtime cannot load it in other formats: {first_line(error)}") from error


def _as_it_is(prepared: PreparedModel) -> WrittenVariant:
    owners = {prepared.model.graph.node[layer.position].output[0]: layer.name for layer in prepared.layers}
    return WrittenVariant(prepared.model, owners)

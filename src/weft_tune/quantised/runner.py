"""Batches of samples through the stages of a model, under formats; what two configurations share is run once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from weft.base.errors import EvaluationError
from weft.runtime.onnxruntime_cpu.sessions import first_line, open_session
from weft.runtime.tensors import Array
from weft_tune.numbers.arrays import rounded
from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.format import FLOAT32
from weft_tune.quantised.cache import ArrayCache
from weft_tune.quantised.feeding import Ints, feed
from weft_tune.quantised.plan import RoundingPlan, Stage, rounded_input, weight_input

_WEIGHT = "weft:weight"


class LayerFormats(NamedTuple):
    """Of one layer."""

    weight: AnyFormat = FLOAT32
    input: AnyFormat = FLOAT32


class SampleOrder(NamedTuple):
    """Inputs and the order in which they are taken."""

    inputs: Mapping[str, Array]
    order: Ints


class PlanRunner:
    """Runs a plan in this process."""

    def __init__(self, plan: RoundingPlan, cache_bytes: int) -> None:
        self._plan = plan
        self._sessions = [open_session(stage.model, 1, optimise=True) for stage in plan.stages]
        self._prefixes: dict[Hashable, int] = {}
        self._cache = ArrayCache(cache_bytes)
        self._samples: dict[str, SampleOrder] = {}
        self._current = ("", -1)

    @property
    def process_ids(self) -> list[int]:
        return []

    def add(self, name: str, samples: SampleOrder) -> None:
        self._samples[name] = samples

    def drop(self, name: str) -> None:
        del self._samples[name]
        self._cache.drop(name)

    def close(self) -> None:
        """Do nothing: no process was started."""

    def run(self, name: str, formats: Mapping[str, LayerFormats], numbers: Iterable[int]) -> list[Array]:
        """The output for some batches of the samples called *name*; batch n is the n-th stretch of their order."""
        keys = self._keys(formats)
        if (name, keys[-1]) != self._current:
            self._current = name, keys[-1]
            self._cache.begin_round()
        weights = {layer: self._rounded_weight(layer, each.weight) for layer, each in formats.items()}
        return [self._batch(name, number, formats, weights, keys) for number in numbers]

    def _keys(self, formats: Mapping[str, LayerFormats]) -> list[int]:
        """For the start of each stage and for the end, a number that stands for all formats before it."""
        keys = [0]
        for stage in self._plan.stages:
            step = (keys[-1], stage.layer, formats.get(stage.layer or ""))
            keys.append(self._prefixes.setdefault(step, len(self._prefixes) + 1))
        return keys

    def _rounded_weight(self, layer: str, form: AnyFormat) -> Array:
        plain = self._plan.weights[layer]
        if form == FLOAT32:
            return plain
        if (known := self._cache.get((_WEIGHT, layer, form))) is not None:
            return known[_WEIGHT]
        found = rounded(plain, form)
        self._cache.put((_WEIGHT, layer, form), {_WEIGHT: found})
        return found

    def _batch(
        self, name: str, number: int, formats: Mapping[str, LayerFormats], weights: Mapping[str, Array], keys: list[int]
    ) -> Array:
        samples, plan = self._samples[name], self._plan
        rows = samples.order[number * plan.batch : (number + 1) * plan.batch]
        start, known = self._resume(name, number, keys)
        given = feed(samples.inputs, rows, plan.batch if plan.padded else None) if start < len(plan.stages) else {}
        for at in range(start, len(plan.stages)):
            made = self._run(plan.stages[at], self._sessions[at], {**given, **known}, formats, weights)
            live = plan.stages[at + 1].live if at + 1 < len(plan.stages) else (plan.output,)
            known = {each: made[each] if each in made else known[each] for each in live}
            self._cache.put((name, number, at + 1, keys[at + 1]), known)
        return known[plan.output][: len(rows)]

    def _resume(self, name: str, number: int, keys: list[int]) -> tuple[int, Mapping[str, Array]]:
        """The last stage whose start is known, and what is live there."""
        for at in range(len(self._plan.stages), 0, -1):
            if (known := self._cache.get((name, number, at, keys[at]))) is not None:
                return at, known
        return 0, {}

    def _run(
        self,
        stage: Stage,
        session: Any,
        tensors: Mapping[str, Array],
        formats: Mapping[str, LayerFormats],
        weights: Mapping[str, Array],
    ) -> dict[str, Array]:
        given = {name: tensors[name] for name in stage.inputs}
        if stage.layer is not None:
            form, entering = formats[stage.layer].input, tensors[stage.source]
            given[rounded_input(stage.layer)] = entering if form == FLOAT32 else rounded(entering, form)
            given[weight_input(stage.layer)] = weights[stage.layer]
        try:
            made: Sequence[Array] = session.run(stage.outputs, given)
        except Exception as error:  # the C++ side raises a dozen unrelated kinds
            where = f"from layer {stage.layer!r} on" if stage.layer else "before the first layer"
            raise EvaluationError(f"the model fails {where}: {first_line(error)}") from error
        return dict(zip(stage.outputs, made, strict=True))

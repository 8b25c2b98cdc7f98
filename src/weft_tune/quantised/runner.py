"""Runs batches of samples through the stages of a model under formats; stages that configurations share run once.

A ``RoundingPlan`` holds the pieces of a model as bytes, so that a worker process needs no graphs. Weights of layers are
inputs of the pieces, not constants, so that another format needs no new session. An ``ArrayCache`` holds the tensors at
the cuts between pieces; the least recently used tensors are evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import EvaluationError
from weft.runtime.onnxruntime_cpu.sessions import first_line, open_session
from weft.runtime.samples import Ints, feed
from weft.runtime.tensors import Array
from weft_tune.numbers.arrays import rounded
from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.format import FLOAT32

Arrays = Mapping[str, Array]


class _CacheEntry(NamedTuple):
    arrays: Arrays
    size_bytes: int


class ArrayCache:
    """A cache of named arrays by key, up to *limit_bytes* in all.

    A round reads many entries one after another. If they do not all fit, evicting the least recently used entry would
    leave none of them for the next round. So entries that the current round used or stored are not evicted; further
    entries of that round are not stored.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._entries: OrderedDict[Hashable, _CacheEntry] = OrderedDict()
        self._in_round: set[Hashable] = set()
        """Keys that the current round used or stored."""

    def __len__(self) -> int:
        return len(self._entries)

    def begin_round(self) -> None:
        """Allow the eviction of all present entries."""
        self._in_round.clear()

    def get(self, key: Hashable) -> Arrays | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        self._in_round.add(key)
        return entry.arrays

    def put(self, key: Hashable, arrays: Arrays) -> None:
        """Keep *arrays* if there is room for them."""
        size_bytes = sum(array.nbytes for array in arrays.values())
        if key in self._entries or not self._make_room(size_bytes):
            return
        self._entries[key] = _CacheEntry(arrays, size_bytes)
        self._in_round.add(key)
        self.size_bytes += size_bytes

    def _make_room(self, size_bytes: int) -> bool:
        """Evict entries until there is room for *size_bytes*; return False if only entries of this round are left."""
        while self.size_bytes + size_bytes > self.limit_bytes:
            oldest = next(iter(self._entries), None)
            if oldest is None or oldest in self._in_round:
                return False
            self.size_bytes -= self._entries.pop(oldest).size_bytes
        return True

    def drop(self, prefix: Hashable) -> None:
        """Remove all keys that are tuples beginning with *prefix*."""
        for key in [key for key in self._entries if isinstance(key, tuple) and key[0] == prefix]:
            self.size_bytes -= self._entries.pop(key).size_bytes
            self._in_round.discard(key)


Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Stage:
    """A piece of a model that begins with a layer; the first piece may begin with none."""

    layer: str | None
    source: str
    """The tensor that enters the layer, unrounded."""
    model: bytes
    inputs: tuple[str, ...]
    """Inputs of the piece other than the layer's rounded input and weights."""
    outputs: tuple[str, ...]
    live: tuple[str, ...]
    """Tensors of earlier stages that this stage or a later stage needs."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundingPlan:
    """The pieces and weights to run a model with rounded layers."""

    stages: tuple[Stage, ...]
    output: str
    weights: Mapping[str, Floats]
    """Layer -> weights as trained, in the order of the stages."""
    batch: int
    """Samples in a run."""
    padded: bool
    """Whether batches are filled up, as the model takes a fixed number of samples."""

    def with_weights(self, weights: Mapping[str, Floats]) -> RoundingPlan:
        return replace(self, weights=weights)


def weight_input(layer: str) -> str:
    """The name that the rounded weights of *layer* have as an input of a piece."""
    return f"weft:{layer}.weight"


def rounded_input(layer: str) -> str:
    """The name that the rounded tensor entering *layer* has as an input of a piece."""
    return f"weft:{layer}.input"


_WEIGHT = "weft:weight"  # begins the cache keys of rounded weights; no samples have this name


class LayerFormats(NamedTuple):
    """The formats of one layer."""

    weight: AnyFormat = FLOAT32
    input: AnyFormat = FLOAT32


class SampleOrder(NamedTuple):
    """Samples and the order in which batches take them."""

    inputs: Mapping[str, Array]
    order: Ints


class PlanRunner:
    """Runs a plan in this process."""

    def __init__(self, plan: RoundingPlan, cache_bytes: int) -> None:
        self._plan = plan
        self._sessions = [open_session(stage.model, threads=1, optimise=True) for stage in plan.stages]
        self._key_of_prefix: dict[Hashable, int] = {}
        """(key of the stage before, layer, its formats) -> cache key; see ``_keys``."""
        self._cache = ArrayCache(cache_bytes)
        self._samples: dict[str, SampleOrder] = {}
        self._current = ("", -1)
        """Samples and cache key of the configuration that the cache's current round belongs to."""

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
        """Run the batches *numbers* of the samples called *name*; batch n has the n-th ``plan.batch`` samples."""
        keys = self._keys(formats)
        if (name, keys[-1]) != self._current:  # another configuration, or other samples
            self._current = name, keys[-1]
            self._cache.begin_round()
        weights = {layer: self._round_weight(layer, form.weight) for layer, form in formats.items()}
        return [self._run_batch(name, number, formats, weights, keys) for number in numbers]

    def _keys(self, formats: Mapping[str, LayerFormats]) -> list[int]:
        """Cache keys, one per stage and one for the end: numbers that stand for the formats of all earlier layers."""
        keys = [0]  # before the first stage, no layer has a format
        for stage in self._plan.stages:
            prefix = (keys[-1], stage.layer, formats.get(stage.layer or ""))
            keys.append(self._key_of_prefix.setdefault(prefix, len(self._key_of_prefix) + 1))
        return keys

    def _round_weight(self, layer: str, form: AnyFormat) -> Array:
        """The weights of *layer* in *form*, cached."""
        trained = self._plan.weights[layer]
        if form == FLOAT32:
            return trained
        if (cached := self._cache.get((_WEIGHT, layer, form))) is not None:
            return cached[_WEIGHT]
        weight = rounded(trained, form)
        self._cache.put((_WEIGHT, layer, form), {_WEIGHT: weight})
        return weight

    def _run_batch(
        self, name: str, number: int, formats: Mapping[str, LayerFormats], weights: Mapping[str, Array], keys: list[int]
    ) -> Array:
        """Run one batch from the last cached stage on, and cache the tensors at the cuts.

        name: of the samples; number: of the batch. formats, weights: those of each layer, the weights rounded. keys: a
        cache key for the tensors before each stage, and one for the output (``_keys``).
        """
        samples, plan = self._samples[name], self._plan
        rows = samples.order[number * plan.batch : (number + 1) * plan.batch]
        start, live = self._resume(name, number, keys)  # live: the tensors at the present cut
        # nothing is fed if even the output is cached
        inputs = feed(samples.inputs, rows, plan.batch if plan.padded else None) if start < len(plan.stages) else {}
        for index in range(start, len(plan.stages)):
            tensors = {**inputs, **live} | self._run_stage(index, {**inputs, **live}, formats, weights)
            needed = plan.stages[index + 1].live if index + 1 < len(plan.stages) else (plan.output,)
            live = {tensor: tensors[tensor] for tensor in needed}
            self._cache.put((name, number, index + 1, keys[index + 1]), live)
        return live[plan.output][: len(rows)]

    def _resume(self, name: str, number: int, keys: list[int]) -> tuple[int, Mapping[str, Array]]:
        """Find the last stage whose input tensors are cached; return its index and these tensors.

        *keys*: from ``_keys``. The index is the number of stages if the output itself is cached.
        """
        for index in range(len(self._plan.stages), 0, -1):
            if (live := self._cache.get((name, number, index, keys[index]))) is not None:
                return index, live
        return 0, {}

    def _run_stage(
        self,
        index: int,
        tensors: Mapping[str, Array],
        formats: Mapping[str, LayerFormats],
        weights: Mapping[str, Array],
    ) -> dict[str, Array]:
        """Run one stage on *tensors* (name -> value); return its outputs. *weights*: layer -> rounded weights."""
        stage = self._plan.stages[index]
        inputs = {name: tensors[name] for name in stage.inputs}
        if stage.layer is not None:
            form, entering = formats[stage.layer].input, tensors[stage.source]
            inputs[rounded_input(stage.layer)] = entering if form == FLOAT32 else rounded(entering, form)
            inputs[weight_input(stage.layer)] = weights[stage.layer]
        try:
            outputs: Sequence[Array] = self._sessions[index].run(stage.outputs, inputs)
        except Exception as error:  # the C++ side raises a dozen unrelated kinds
            where = f"from layer {stage.layer!r} on" if stage.layer else "before the first layer"
            raise EvaluationError(f"the model fails {where}: {first_line(error)}") from error
        return dict(zip(stage.outputs, outputs, strict=True))

"""Scores of an ONNX model on labelled samples under number formats.

Hard samples come first: those that the float model gets wrong, then those that it is least sure of. They are run in
chunks that do not depend on the number of processes, and after each chunk the score cannot be higher than if all the
rest were right. As soon as that is below what is needed, the rest is not run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from weft.base.errors import EvaluationError, TuneError, unknown_name
from weft.base.shapes import written
from weft.models.weighted_layers import WeightedLayer
from weft.runtime.tensors import Array
from weft_tune.evaluation import Score, Scored, Subset
from weft_tune.network import ROLES, Network
from weft_tune.numbers.configuration import Configuration
from weft_tune.quantised.data import FEWEST, Labels, check_inputs
from weft_tune.quantised.feeding import Ints, count_rows, feed
from weft_tune.quantised.metrics import Doubles, Function, fingerprint, make_metric
from weft_tune.quantised.opened import Opened, open_for_tuning
from weft_tune.quantised.plan import RoundingPlan
from weft_tune.quantised.runner import LayerFormats, PlanRunner, SampleOrder
from weft_tune.quantised.stages import make_plan, run_on, session_for
from weft_tune.quantised.workers import Workers

CACHE_BYTES = 1 << 30
FIRST_CHUNK = 128
"""Samples, at least; later chunks are an eighth of what was run before them, if that is more."""
NUMERICS = 1
"""Raised when the same configuration may come to another score than before."""
_FLOAT, _OTHER = "float", "other"
"""Names of samples beside the subsets."""


class _Subset(NamedTuple):
    """Some of the samples, hard ones first."""

    rows: Ints
    labels: Labels
    float_scores: Doubles
    """Under the float model."""


class OnnxEvaluator:
    """Runs a model under configurations; an ``Evaluator``."""

    stops_early = True

    def __init__(
        self,
        model: str | Path | Opened,
        inputs: Mapping[str, Array],
        labels: npt.ArrayLike,
        network: Network,
        *,
        small: float = 0.2,
        metric: str | Function = "top1",
        workers: int = 1,
        cache_bytes: int = CACHE_BYTES,
        seed: int = 0,
    ) -> None:
        self._opened = opened = model if isinstance(model, Opened) else open_for_tuning(model)
        self._inputs = check_inputs(inputs, opened.inputs)
        self._metric = make_metric(metric, gives_probability=opened.gives_probability)
        self._labels = self._metric.check_labels(labels, count_rows(self._inputs))
        self._layers = _layers(opened, network)
        self._plan = make_plan(opened, self._layers, self._inputs)
        self._small, self._seed = _small_count(small, len(self._labels)), seed
        self._engine = _engine(self._plan, cache_bytes, workers)
        self._subsets: dict[str, _Subset] = {}
        self._example = self._checked_example()

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that have formats, in the order in which they run."""
        return tuple(layer.name for layer in self._layers)

    @property
    def process_ids(self) -> list[int]:
        """The processes of the workers, as far as they run."""
        return self._engine.process_ids

    @cached_property
    def fingerprint(self) -> str:
        """Of all that scores depend on but the configuration."""
        digest = hashlib.sha256(f"{NUMERICS} {ort.__version__} {self._small} {self._seed} {self.layers}".encode())
        digest.update(fingerprint(self._metric).encode())
        digest.update(self._opened.output.encode())
        digest.update(self._opened.digest)
        for name, array in sorted(self._inputs.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        digest.update(self._labels.tobytes())
        return digest.hexdigest()

    def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
        """The score on the small or the full set; a bound below *needed* where it is below that."""
        formats = self._formats(configuration)
        chosen = self._subset(subset)
        if all(each == LayerFormats() for each in formats.values()):
            return Score(float(chosen.float_scores.mean()), samples=len(chosen.rows))
        return self._scored(subset, chosen.labels, formats, needed)

    def evaluate_many(
        self, configurations: Sequence[Configuration], subset: Subset, scored: Scored | None = None
    ) -> list[Score | EvaluationError]:
        """Exact scores; a failure takes the place of a score."""
        found: list[Score | EvaluationError] = []
        for position, configuration in enumerate(configurations):
            try:
                score = self.evaluate(configuration, subset)
            except EvaluationError as error:
                found.append(error)
                continue
            found.append(score)
            if scored is not None:
                scored(position, score)
        return found

    def measure(self, configuration: Configuration, inputs: Mapping[str, Array], labels: npt.ArrayLike) -> float:
        """The score on other samples, all of them: a test set that the search has never seen."""
        given = check_inputs(inputs, self._opened.inputs)
        right = self._metric.check_labels(labels, count_rows(given))
        self._metric.check_classes(self._example, right)
        self._engine.add(_OTHER, SampleOrder(given, np.arange(len(right))))
        try:
            return self._scored(_OTHER, right, self._formats(configuration), -math.inf).value
        finally:
            self._engine.drop(_OTHER)

    def close(self) -> None:
        """End the processes; another evaluation would start them again."""
        self._engine.close()

    def __enter__(self) -> OnnxEvaluator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _formats(self, configuration: Configuration) -> dict[str, LayerFormats]:
        known = {f"{layer.name}.{role}" for layer in self._layers for role in ROLES}
        if strange := [name for name in configuration if name not in known]:
            raise TuneError(unknown_name("object", strange[0], known))
        return {
            layer.name: LayerFormats(configuration[f"{layer.name}.weight"], configuration[f"{layer.name}.input"])
            for layer in self._layers
        }

    def _scored(self, name: str, labels: Labels, formats: Mapping[str, LayerFormats], needed: float) -> Score:
        """Run the samples called *name* chunk by chunk, until they are all done or it is no use."""
        total, gained, done = len(labels), 0.0, 0
        for numbers in _chunks(total, self._plan.batch):
            outputs = np.concatenate(self._engine.run(name, formats, numbers))
            gained += float(self._metric.scores(outputs, labels[done : done + len(outputs)]).sum())
            done += len(outputs)
            bound = (gained + total - done) / total
            if bound < needed and done < total:
                return Score(bound, exact=False, samples=done)
        return Score(gained / total, samples=total)

    def _subset(self, subset: Subset) -> _Subset:
        if not self._subsets:
            self._run_float()
        return self._subsets[subset]

    def _run_float(self) -> None:
        """Find out which samples are hard."""
        total = len(self._labels)
        self._engine.add(_FLOAT, SampleOrder(self._inputs, np.arange(total)))
        formats = {layer.name: LayerFormats() for layer in self._layers}
        scores, hardness = list[Doubles](), list[Doubles]()
        done = 0
        for numbers in _chunks(total, self._plan.batch):
            outputs = np.concatenate(self._engine.run(_FLOAT, formats, numbers))
            right = self._labels[done : done + len(outputs)]
            scores.append(self._metric.scores(outputs, right))
            hardness.append(self._metric.hardness(outputs, right))
            done += len(outputs)
        self._engine.drop(_FLOAT)
        if not any(each.any() for each in scores):
            raise TuneError(
                f"{self._opened.path}: gets none of {total} samples right as it is; "
                "check the labels, the scale of the inputs and which output is scored"
            )
        rows = np.argsort(np.concatenate(hardness), kind="stable")
        chosen = np.random.default_rng(self._seed).choice(total, self._small, replace=False)
        subsets = {"full": rows, "small": rows[np.isin(rows, chosen)]}
        for subset, order in subsets.items():
            self._engine.add(subset, SampleOrder(self._inputs, order))
        float_scores = np.concatenate(scores)
        self._subsets = {
            subset: _Subset(order, self._labels[order], float_scores[order]) for subset, order in subsets.items()
        }

    def _checked_example(self) -> Array:
        """Outputs for a batch; the pieces must give what the whole model gives, and the labels must be its classes."""
        opened, rows = self._opened, np.arange(min(self._plan.batch, len(self._labels)))
        given = feed(self._inputs, rows, opened.fixed_batch)
        session = session_for(opened, [])
        (whole,) = run_on(opened, session, [opened.output], given)
        if whole.ndim == 0 or len(whole) != count_rows(given):
            raise TuneError(
                f"{opened.path}: output {opened.output!r} is {written(whole.shape)}, must have a row for each of "
                f"{len(rows)} samples; name another output (--scored-output), or export with a free batch dimension"
            )
        self._metric.check_classes(whole, self._labels)
        runner = PlanRunner(self._plan, 0)
        runner.add(_FLOAT, SampleOrder(self._inputs, rows))
        (staged,) = runner.run(_FLOAT, {layer.name: LayerFormats() for layer in self._layers}, [0])
        if not np.allclose(staged, whole[: len(rows)], rtol=1e-3, atol=1e-4, equal_nan=True):
            raise EvaluationError(f"{opened.path}: the model gives other outputs when it is cut between its layers")
        return staged


def _engine(plan: RoundingPlan, cache_bytes: int, workers: int) -> PlanRunner | Workers:
    if workers < 1:
        raise TuneError(f"workers = {workers} must be at least 1")
    if cache_bytes < 0:
        raise TuneError(f"cache_bytes = {cache_bytes} must not be negative")
    return PlanRunner(plan, cache_bytes) if workers == 1 else Workers(plan, cache_bytes, workers)


def _layers(opened: Opened, network: Network) -> tuple[WeightedLayer, ...]:
    """Those of the network, in the order of the graph."""
    wanted = [layer for target in network.targets for layer in target.layers]
    known = {layer.name for layer in opened.layers}
    if strange := [name for name in wanted if name not in known]:
        raise TuneError(f"{opened.path}: {unknown_name('layer', strange[0], known)}")
    return tuple(layer for layer in opened.layers if layer.name in wanted)


def _small_count(small: float, total: int) -> int:
    if not 0 < small <= 1:
        raise TuneError(f"the small set is {small} of all samples, must be above 0 and at most 1")
    return max(min(total, FEWEST), round(small * total))


def _chunks(total: int, batch: int) -> Iterator[range]:
    """Numbers of batches that are run together; the same whoever runs them."""
    batches = -(-total // batch)
    start = 0
    while start < batches:
        end = min(batches, start + max(-(-FIRST_CHUNK // batch), start // 8))
        yield range(start, end)
        start = end

"""Scores of an ONNX model on labelled samples under number formats.

Hard samples come first: those that the float model gets wrong, then those with the smallest margins. Samples are run in
chunks that do not depend on the number of processes. After each chunk there is an upper bound of the score: that all
samples left are right. As soon as this bound is below the needed score, the rest is not run.
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
from weft.runtime.samples import Ints, count_rows, feed
from weft.runtime.tensors import Array
from weft_tune.evaluation import OnScore, Score, Subset
from weft_tune.network import ROLES, Network, check_layers
from weft_tune.numbers.configuration import Configuration
from weft_tune.quantised.data import FEWEST, Labels, check_inputs
from weft_tune.quantised.metrics import Doubles, Function, fingerprint, make_metric
from weft_tune.quantised.opened import OpenedModel, make_plan, open_for_tuning, run_on, session_for
from weft_tune.quantised.runner import LayerFormats, PlanRunner, RoundingPlan, SampleOrder
from weft_tune.quantised.workers import Workers
from weft_tune.weighted_layers import WeightedLayer

CACHE_BYTES = 1 << 30
"""Memory for rounded weights and tensors at the cuts, of all processes together: 1 GiB; more saves more runs."""
FIRST_CHUNK = 128
"""Least number of samples in a chunk; a later chunk has an eighth of all samples before it, if that is more."""
NUMERICS = 1
"""Version of the arithmetic in fingerprints; raise it when a configuration may get another score than before."""
_UNSORTED, _TEST = "float", "other"
"""Names of sample orders that are not subsets of the search: all samples unsorted, and a test set."""


class _SubsetSamples(NamedTuple):
    """The samples of a subset, hard samples first; *rows* are their numbers in the data."""

    rows: Ints
    labels: Labels
    float_scores: Doubles
    """Scores of the float model."""


class OnnxEvaluator:
    """Runs a model under configurations; an ``Evaluator``."""

    stops_early = True

    def __init__(
        self,
        model: str | Path | OpenedModel,
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
        """small: share of the samples in the small set, chosen by *seed*. cache_bytes: of all *workers* together."""
        self._opened = opened = model if isinstance(model, OpenedModel) else open_for_tuning(model)
        self._inputs = check_inputs(inputs, opened.inputs)
        self._metric = make_metric(metric, gives_probability=opened.gives_probability)
        self._labels = self._metric.check_labels(labels, count_rows(self._inputs))
        self._layers = _layers(opened, network)
        self._plan = make_plan(opened, self._layers, self._inputs)
        self._small, self._seed = _small_count(small, len(self._labels)), seed
        self._runner = _make_runner(self._plan, cache_bytes, workers)
        self._subsets: dict[str, _SubsetSamples] = {}
        self._example = self._check_example()
        """Outputs of one batch, with which labels of other sets are checked."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that have formats, in the order in which they run."""
        return tuple(layer.name for layer in self._layers)

    @property
    def process_ids(self) -> list[int]:
        """The processes of running workers."""
        return self._runner.process_ids

    @cached_property
    def fingerprint(self) -> str:
        """Identifies all that scores depend on but the configuration."""
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
        """Score a configuration on a subset; if the score is below *needed*, perhaps only an upper bound of it."""
        formats = self._formats(configuration)
        samples = self._subset(subset)
        if all(form == LayerFormats() for form in formats.values()):
            return Score(float(samples.float_scores.mean()), samples=len(samples.rows))
        return self._score(subset, samples.labels, formats, needed)

    def evaluate_many(
        self, configurations: Sequence[Configuration], subset: Subset, scored: OnScore | None = None
    ) -> list[Score | EvaluationError]:
        """Score configurations one after another, each on all samples of the subset (no early stop, no upper bounds).

        A failure takes the place of a score. scored: as in ``Evaluator``.
        """
        outcomes: list[Score | EvaluationError] = []
        for position, configuration in enumerate(configurations):
            try:
                score = self.evaluate(configuration, subset)
            except EvaluationError as error:
                outcomes.append(error)
                continue
            outcomes.append(score)
            if scored is not None:
                scored(position, score)
        return outcomes

    def measure(self, configuration: Configuration, inputs: Mapping[str, Array], labels: npt.ArrayLike) -> float:
        """Score a configuration on all samples of another set, such as a test set."""
        checked_inputs = check_inputs(inputs, self._opened.inputs)
        checked_labels = self._metric.check_labels(labels, count_rows(checked_inputs))
        self._metric.check_classes(self._example, checked_labels)
        self._runner.add(_TEST, SampleOrder(checked_inputs, np.arange(len(checked_labels))))
        try:
            return self._score(_TEST, checked_labels, self._formats(configuration), needed=-math.inf).value
        finally:
            self._runner.drop(_TEST)

    def close(self) -> None:
        """End the worker processes; another evaluation would start them again."""
        self._runner.close()

    def __enter__(self) -> OnnxEvaluator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _formats(self, configuration: Configuration) -> dict[str, LayerFormats]:
        """Layer -> its formats; raises TuneError if the configuration names an unknown object."""
        known = {f"{layer.name}.{role}" for layer in self._layers for role in ROLES}
        if unknown := [name for name in configuration if name not in known]:
            raise TuneError(unknown_name("object", unknown[0], known))
        return {
            layer.name: LayerFormats(configuration[f"{layer.name}.weight"], configuration[f"{layer.name}.input"])
            for layer in self._layers
        }

    def _score(self, name: str, labels: Labels, formats: Mapping[str, LayerFormats], needed: float) -> Score:
        """Run the samples called *name* chunk by chunk, until all are done or the score cannot reach *needed*."""
        count, score_sum, done = len(labels), 0.0, 0
        for batch_numbers in _chunks(count, self._plan.batch):
            outputs = np.concatenate(self._runner.run(name, formats, batch_numbers))
            score_sum += float(self._metric.scores(outputs, labels[done : done + len(outputs)]).sum())
            done += len(outputs)
            bound = (score_sum + count - done) / count
            if bound < needed and done < count:
                return Score(bound, exact=False, samples=done)
        return Score(score_sum / count, samples=count)

    def _subset(self, subset: Subset) -> _SubsetSamples:
        """The samples of *subset*; the first call runs the float model to sort them."""
        if not self._subsets:
            self._run_float()
        return self._subsets[subset]

    def _run_float(self) -> None:
        """Run the float model on all samples, and sort both subsets by how hard the samples are."""
        total = len(self._labels)
        self._runner.add(_UNSORTED, SampleOrder(self._inputs, np.arange(total)))
        formats = {layer.name: LayerFormats() for layer in self._layers}
        scores, hardness = list[Doubles](), list[Doubles]()
        done = 0
        for batch_numbers in _chunks(total, self._plan.batch):
            outputs = np.concatenate(self._runner.run(_UNSORTED, formats, batch_numbers))
            labels = self._labels[done : done + len(outputs)]
            scores.append(self._metric.scores(outputs, labels))
            hardness.append(self._metric.hardness(outputs, labels))
            done += len(outputs)
        self._runner.drop(_UNSORTED)
        if not any(chunk.any() for chunk in scores):
            raise TuneError(
                f"{self._opened.path}: gets none of {total} samples right as it is; "
                "check the labels, the scale of the inputs and which output is scored"
            )
        rows = np.argsort(np.concatenate(hardness), kind="stable")
        chosen = np.random.default_rng(self._seed).choice(total, self._small, replace=False)
        subsets = {"full": rows, "small": rows[np.isin(rows, chosen)]}  # subset -> rows of the data, hard ones first
        for subset, order in subsets.items():
            self._runner.add(subset, SampleOrder(self._inputs, order))
        float_scores = np.concatenate(scores)
        self._subsets = {
            subset: _SubsetSamples(order, self._labels[order], float_scores[order]) for subset, order in subsets.items()
        }

    def _check_example(self) -> Array:
        """Run one batch through the whole model and through its pieces; return the outputs of the pieces.

        Raises an error if the two differ, or if the labels are not classes of the outputs.
        """
        opened, rows = self._opened, np.arange(min(self._plan.batch, len(self._labels)))
        batch = feed(self._inputs, rows, opened.fixed_batch)
        session = session_for(opened, [])
        (outputs,) = run_on(opened, session, [opened.output], batch)
        if outputs.ndim == 0 or len(outputs) != count_rows(batch):
            raise TuneError(
                f"{opened.path}: output {opened.output!r} is {written(outputs.shape)}, must have a row for each of "
                f"{len(rows)} samples; name another output (--scored-output), or export with a free batch dimension"
            )
        self._metric.check_classes(outputs, self._labels)
        runner = PlanRunner(self._plan, cache_bytes=0)
        runner.add(_UNSORTED, SampleOrder(self._inputs, rows))
        (piece_outputs,) = runner.run(_UNSORTED, {layer.name: LayerFormats() for layer in self._layers}, [0])
        # The tolerance: a piece is optimised separately and may add in another order than the whole model.
        if not np.allclose(piece_outputs, outputs[: len(rows)], rtol=1e-3, atol=1e-4, equal_nan=True):
            raise EvaluationError(f"{opened.path}: the model gives other outputs when it is cut between its layers")
        return piece_outputs


def _make_runner(plan: RoundingPlan, cache_bytes: int, workers: int) -> PlanRunner | Workers:
    """Make a runner in this process for one worker, otherwise one over worker processes."""
    if workers < 1:
        raise TuneError(f"workers = {workers} must be at least 1")
    if cache_bytes < 0:
        raise TuneError(f"cache_bytes = {cache_bytes} must not be negative")
    return PlanRunner(plan, cache_bytes) if workers == 1 else Workers(plan, cache_bytes, workers)


def _layers(opened: OpenedModel, network: Network) -> tuple[WeightedLayer, ...]:
    """The layers of the network, in the order of the graph."""
    check_layers(network, {layer.name for layer in opened.layers}, str(opened.path))
    return tuple(layer for layer in opened.layers if layer.name in network.layers)


def _small_count(small: float, total: int) -> int:
    if not 0 < small <= 1:
        raise TuneError(f"the small set is {small} of all samples, must be above 0 and at most 1")
    return max(min(total, FEWEST), round(small * total))


def _chunks(total: int, batch: int) -> Iterator[range]:
    """Yield ranges of batch numbers that are run together; they do not depend on the number of workers.

    A range has ``FIRST_CHUNK`` samples, or an eighth of all before it, if that is more. *total*: number of samples.
    """
    batches, least_batches = math.ceil(total / batch), math.ceil(FIRST_CHUNK / batch)
    start = 0
    while start < batches:
        end = min(batches, start + max(least_batches, start // 8))
        yield range(start, end)
        start = end

"""One network under every tuning method, on its full validation images: the searches of ``number_formats.py``.

A ``SearchJob`` is one search. Each has a database of its own, so that an interrupted search continues and no method
profits from the scores of another. Test images are used only after a search has ended.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self

import numpy as np

from weft.base.errors import InputError
from weft.models.classifiers import Labelled, data_of, model_path
from weft_papers.libnumber.jobs import COVERING, ENUMERATED, SearchJob, enumerated, settings, shift_first_biases
from weft_papers.libnumber.lab import (
    EXHAUSTIVE,
    INT8,
    INT8_CHANNELS,
    RELAXED,
    REPAIRED,
    RISTRETTO,
    SMALL,
    START,
    STRIPES,
)
from weft_papers.libnumber.recorded import Int8, ScoredRun, Widths
from weft_tune.baselines import BASELINES, Baseline, exhaustive
from weft_tune.network import ROLES, Network, Role, Target
from weft_tune.numbers.configuration import AnyFormat, Configuration
from weft_tune.numbers.format import BIN, FIXED
from weft_tune.quantised.evaluator import OnnxEvaluator
from weft_tune.quantised.opened import find_targets
from weft_tune.quantised.scoring import classes, quantise_int8
from weft_tune.result import Tuning
from weft_tune.search_space import first_scale
from weft_tune.tuner import find_formats

KINDS = {"mlp-m": "fc", "mlp-c": "fc", "lenet": "conv", "cuda-convnet": "conv"}
"""Fully connected layers of the MLPs, convolutions of the others, as in the chapter."""
SMALL_SHARE = 0.2
CALIBRATION = 1000
"""Training images that show how large inputs get; no search is scored on them."""
WIDEST = 16


class Splits(NamedTuple):
    """Images of a data set."""

    train: Labelled
    validation: Labelled
    test: Labelled


def read_splits(folder: Path, name: str) -> Splits:
    """The parts of a network's data set, from the folder that ``training/fetch.py`` wrote."""
    path = folder / f"{data_of(name)}.npz"
    if not path.is_file():
        raise InputError(f"{path}: not there; run `python training/fetch.py --to {folder}`")
    with np.load(path) as stored:
        parts = [Labelled(stored[f"{part}_image"], stored[f"{part}_label"]) for part in Splits._fields]
    return Splits(*parts)


class NetworkBench:
    """One network, its images, and all that is run on them."""

    def __init__(
        self,
        name: str,
        splits: Splits,
        scratch: Path,
        *,
        workers: int = 1,
        seed: int = 0,
        moved: Callable[[OnnxEvaluator], OnnxEvaluator] | None = None,
    ) -> None:
        """*moved* puts an evaluator on other hardware."""
        self.name, self.splits, self._scratch, self._workers, self._seed = name, splits, scratch, workers, seed
        self._moved = moved
        self.model = model_path(name)
        self.network = find_targets(self.model, {"image": _inputs(splits.train, CALIBRATION)}, layers=KINDS[name])
        self._scorer, self._test = self._evaluator(), _inputs(splits.test)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._scorer.close()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.model.read_bytes()).hexdigest()

    @property
    def images(self) -> dict[str, int]:
        full = len(self.splits.validation.label)
        return {"small": round(SMALL_SHARE * full), "full": full, "test": len(self.splits.test.label)}

    def validation(self, configuration: Configuration) -> float:
        return self._scorer.evaluate(configuration, "full").value

    def test(self, configuration: Configuration) -> float:
        return self._scorer.measure(configuration, {"image": self._test}, self.splits.test.label)

    def run(self, job: SearchJob) -> tuple[list[ScoredRun], Tuning | None]:
        """What a job found, and the search itself where it is one of ours; a baseline that fails is also repaired."""
        if job.method in _BASELINES:
            return self._baseline(job), None
        if job.method == EXHAUSTIVE:
            return [self._exhaustive(job)], None
        return self._tuned(job)

    def widths(self) -> Widths:
        """Accuracy on the test images in 1 to 16 bits of fixed point; one bit is plus or minus the largest power."""
        bits = tuple(range(1, WIDEST + 1))
        weights, both = ([self.test(_uniform(self.network, width, roles)) for width in bits] for roles in
                         (ROLES[:1], ROLES))  # fmt: skip
        return Widths(bits, tuple(weights), tuple(both))

    def int8(self) -> dict[str, Int8]:
        """The tuned layers in int8 instead, with one scale for a tensor and with one for each channel."""
        calibration = {"image": _inputs(self.splits.train, CALIBRATION)}
        nodes = [layer for target in self.network.targets for layer in target.layers]
        results = {}
        for kind in (INT8, INT8_CHANNELS):
            with TemporaryDirectory() as folder:
                made = quantise_int8(
                    self.model, calibration, Path(folder) / "int8.onnx", per_channel=kind == INT8_CHANNELS, nodes=nodes
                )
                tuned_on, untouched = (
                    float(np.mean(classes(made.path, {"image": _inputs(part)}) == part.label))
                    for part in (self.splits.validation, self.splits.test)
                )
                results[kind] = Int8(tuned_on, untouched, made.weights, made.scale_bytes, made.file_bytes)
        return results

    def _evaluator(self, share: float = SMALL_SHARE) -> OnnxEvaluator:
        """A new one for each search, so that none finds what another has left in its memory."""
        images = self.splits.validation
        made = OnnxEvaluator(
            self.model, {"image": _inputs(images)}, images.label, self.network, small=share, workers=self._workers,
            seed=self._seed,
        )  # fmt: skip
        return made if self._moved is None else self._moved(made)

    def _database(self, job: SearchJob) -> Path:
        words = (self.name, self.sha256[:12], job.method, f"{job.margin:g}", job.option)
        return self._scratch / f"{'-'.join(str(word) for word in words).replace(' ', '_')}.sqlite"

    def _tuned(self, job: SearchJob) -> tuple[list[ScoredRun], Tuning]:
        share = job.option if job.method == SMALL else SMALL_SHARE
        shift = job.option if job.method == START else 0
        assert not isinstance(share, str) and not isinstance(shift, str) and share and shift is not None
        network, began = shift_first_biases(self.network, shift), time.perf_counter()
        with self._evaluator(share) as evaluator:
            result = find_formats(
                network, evaluator, margin=job.margin, database=self._database(job), **settings(network, job)
            )
        seconds = time.perf_counter() - began
        run = self._scored(job, result.configuration, result.score, result.base["full"], True)
        note = f"{result.reused} scores from an interrupted search" if result.reused else ""
        samples = sum(result.samples.values())
        return [replace(run, seconds=seconds, iterations=result.iterations, samples=samples, note=note)], result

    def _baseline(self, job: SearchJob) -> list[ScoredRun]:
        results = [self._of_baseline(job)]
        if not results[0].feasible and job.method != STRIPES:
            results.append(self._of_baseline(job, repair=True))
        return results

    def _of_baseline(self, job: SearchJob, **options: bool) -> ScoredRun:
        method: Callable[..., Baseline] = BASELINES[_BASELINES[job.method]]
        named = job._replace(method=job.method + REPAIRED) if options else job
        if job.option == COVERING:
            options["covering"] = True
        began = time.perf_counter()
        with self._evaluator() as evaluator:
            result = method(self.network, evaluator, margin=job.margin, database=self._database(job), **options)
        seconds = time.perf_counter() - began
        run = self._scored(named, result.configuration, result.score, result.base, result.feasible)
        return replace(run, seconds=seconds, iterations=result.evaluations, samples=result.samples)

    def _exhaustive(self, job: SearchJob) -> ScoredRun:
        began = time.perf_counter()
        with self._evaluator() as evaluator:
            result = exhaustive(
                self.network, evaluator, platform=enumerated(self.name, job.margin), margin=job.margin,
                biases=ENUMERATED[self.name, job.margin].biases, database=self._database(job),
            )  # fmt: skip
        seconds = time.perf_counter() - began
        best = result.configuration or Configuration({})
        run = self._scored(job, best, result.score, result.base, result.configuration is not None)
        return replace(run, seconds=seconds, iterations=result.scored, note=f"{result.size} configurations")

    def _scored(self, job: SearchJob, found: Configuration, score: float, base: float, feasible: bool) -> ScoredRun:
        return ScoredRun(job.method, job.margin, found, score, self.test(found), base, feasible, 0, 0, 0.0, job.option)


_BASELINES = {RISTRETTO: "ristretto", RELAXED: "relaxed-ristretto", STRIPES: "stripes"}


def _inputs(images: Labelled, count: int | None = None) -> Any:
    return Labelled(images.image[:count], images.label[:count]).inputs()


def _uniform(network: Network, bits: int, roles: Iterable[Role]) -> Configuration:
    """Fixed point of one width, its range from the largest value."""

    def form(target: Target, role: Role) -> AnyFormat:
        scale = first_scale(target.largest(role))
        return FIXED(bits, scale) if bits > 1 else BIN(scale)

    return Configuration(
        {name: form(target, role) for target in network.targets for role in roles for name in target.objects(role)}
    )

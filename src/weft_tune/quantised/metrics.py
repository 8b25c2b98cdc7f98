"""Metrics: a number from 0 to 1 for each sample, by its outputs and its label; the score is their mean.

A sample whose output holds a NaN is wrong. Metrics that are not a mean over samples (mAP, F1) need an evaluator of
their own. ``LIKENESS`` has metrics for samples without labels: the similarity of the outputs to those of the model
before the change, which does not tell whether either is right.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.base.errors import EvaluationError, TuneError, unknown_name
from weft.base.shapes import written
from weft.runtime.tensors import Array
from weft_tune.quantised.data import Labels, check_labels

Doubles = npt.NDArray[np.float64]
Function = Callable[[Any, Any], Any]
"""(outputs, labels), a row for each sample -> a number from 0 to 1 for each."""

TOP = {"top1": 1, "top5": 5}  # metric -> ``Metric.top``


@dataclass(frozen=True, slots=True)
class Metric:
    """Scores samples, and ranks them by how hard they are."""

    name: str
    top: int = 1
    """A sample is right if its class is among this many best classes."""
    threshold: float = 0.0
    """The value of a single output that separates two classes."""
    function: Function | None = None

    def scores(self, outputs: Array, labels: Labels) -> Doubles:
        """A score from 0 to 1 for each sample."""
        if self.function is not None:
            return _call_function(self.name, self.function, outputs, labels)
        if outputs.dtype.kind in "iu":
            return np.asarray(_column(outputs) == labels, np.float64)
        margins = self._margins(outputs, labels)
        return (margins > 0).astype(np.float64)

    def hardness(self, outputs: Array, labels: Labels) -> Doubles:
        """Sort key of each sample: the lower, the more likely a changed network gets the sample wrong."""
        if self.function is not None or outputs.dtype.kind in "iu":
            return self.scores(outputs, labels)
        return self._margins(outputs, labels)

    def _margins(self, outputs: Array, labels: Labels) -> Doubles:
        """The lead of the right class over the class that would make the sample wrong; above 0 if the sample is right.

        On a tie the earlier class wins. A sample with NaN gets -inf.
        """
        logits = _matrix(outputs).astype(np.float64)
        has_nan = np.isnan(logits).any(axis=1)
        if logits.shape[1] == 1:
            distance = logits[:, 0] - self.threshold
            # exactly at the threshold is class 0, so its margin must be above 0 there
            margins = np.where(
                labels == 1, distance, np.where(distance > 0, -distance, np.maximum(-distance, np.finfo(float).tiny))
            )
        else:
            margins = _lead(logits, labels, self.top)
        return np.where(has_nan, -np.inf, margins)

    def check_labels(self, labels: npt.ArrayLike, count: int) -> Labels:
        """Check labels: one for each sample; they must be classes, unless the metric is a user's function."""
        return check_labels(labels, count, classes=self.function is None)

    def check_classes(self, outputs: Array, labels: Labels) -> None:
        """Raise TuneError if *labels* are not classes of *outputs*, or if *outputs* have too few classes."""
        if self.function is not None:
            return
        classes = 2 if (width := _matrix(outputs).shape[1]) == 1 else width
        if outputs.dtype.kind in "iu":
            return
        if classes <= self.top:
            raise TuneError(f"metric {self.name}: the model tells only {classes} classes apart; use top1")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise TuneError(
                f"labels are {low} to {high}, but the model has the classes 0 to {classes - 1}; "
                "number them from 0, or name another output, as scored_output = NAME"
            )


def make_metric(metric: str | Function, *, gives_probability: bool = False) -> Metric:
    """The metric of ``top1``, ``top5``, ``file.py:function``, or a function."""
    if not isinstance(metric, str):
        if not callable(metric):
            raise TuneError(f"metric {metric!r} is no function; give {' or '.join(TOP)} or a function")
        return Metric(getattr(metric, "__qualname__", type(metric).__name__), function=metric)
    if ":" in metric:
        return Metric(metric, function=_import_function(metric))
    if metric not in TOP:
        raise TuneError(f"{unknown_name('metric', metric, TOP)}; or give your own as file.py:function")
    return Metric(metric, top=TOP[metric], threshold=0.5 if gives_probability else 0.0)


def fingerprint(metric: Metric) -> str:
    """A digest that changes with the metric, as far as its source can be read."""
    text = f"{metric.name} {metric.top} {metric.threshold}"
    if metric.function is not None:
        try:
            text += inspect.getsource(metric.function)
        except (OSError, TypeError):
            text += repr(getattr(metric.function, "__module__", ""))
    return hashlib.sha256(text.encode()).hexdigest()


def _import_function(text: str) -> Function:
    """Import a metric named as ``file.py:function``."""
    path, _, name = text.rpartition(":")
    if not Path(path).is_file():
        raise TuneError(f"metric {text!r}: there is no file {path!r}; give file.py:function")
    spec = importlib.util.spec_from_file_location(f"weft_metric_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise TuneError(f"metric {text!r}: {path!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        # Not by the loader: it would run cached bytecode if the file was edited within the same second.
        exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)
    except Exception as error:
        raise TuneError(f"metric {text!r}: importing {path} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise TuneError(f"metric {text!r}: {path} has no function {name!r}")
    return function  # type: ignore[no-any-return]  # any callable; its result is checked


def _call_function(name: str, function: Function, outputs: Array, labels: Labels) -> Doubles:
    """Call a user's metric and check its result; a failure is an EvaluationError, which a search may skip."""
    try:
        scores = np.asarray(function(outputs, labels), np.float64)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise EvaluationError(f"metric {name} failed: {why}", traceback.format_exc()) from error
    count = len(labels)
    if scores.shape != (count,):
        raise TuneError(f"metric {name}: gave the shape {written(scores.shape)} for {count} samples, must be one each")
    if not ((scores >= 0) & (scores <= 1)).all():
        raise EvaluationError(
            f"metric {name}: gave {scores.min()} to {scores.max()}, must be from 0 to 1 for each sample"
        )
    return scores


def _matrix(outputs: Array) -> npt.NDArray[Any]:
    """Reshape outputs to [sample, class]; raises TuneError if a sample has more than one number per class."""
    flat: npt.NDArray[Any] = outputs.reshape(len(outputs), -1)
    if outputs.ndim > 1 and flat.shape[1] != outputs.shape[1]:
        raise TuneError(
            f"the output has the shape {written(outputs.shape)}, not one number per class and sample; "
            "name another output, as scored_output = NAME, or give a metric of your own as file.py:function"
        )
    return flat


def _column(outputs: Array) -> npt.NDArray[Any]:
    """Reshape outputs that are class numbers to [sample]."""
    flat = _matrix(outputs)
    if flat.shape[1] != 1:
        raise TuneError(
            f"the output is of whole numbers, {flat.shape[1]} per sample; name another output, as scored_output = NAME"
        )
    return flat[:, 0]


def _lead(logits: Doubles, labels: Labels, top: int) -> Doubles:
    """The lead of the right class over the *top*-th best other class; on a tie the earlier class wins."""
    rows = np.arange(len(labels))
    right = logits[rows, labels]
    others = logits.copy()
    others[rows, labels] = -np.inf
    rival = -np.partition(-others, top - 1, axis=1)[:, top - 1]
    earlier_ties = (np.arange(logits.shape[1]) < labels[:, None]) & (others == right[:, None])
    better = (others > right[:, None]).sum(axis=1) + earlier_ties.sum(axis=1)
    with np.errstate(invalid="ignore"):
        lead = np.abs(right - rival)
    lead = np.where(np.isnan(lead), 0.0, lead)
    return np.where(better < top, np.maximum(lead, np.finfo(float).tiny), -lead)  # tiny: above 0 also on a tie


def agreement(outputs: Array, first: Array) -> Doubles:
    """For each sample, the share of its answers that equal those of *first*, the outputs before the change.

    An answer is the class of the largest value on the last axis.
    """
    if outputs.ndim < 2 or outputs.shape[-1] < 2:
        raise TuneError(
            f"metric = agreement: the output has the shape {written(outputs.shape)}, and no last axis of classes; "
            "metric = closeness compares numbers"
        )
    same: npt.NDArray[Any] = outputs.argmax(axis=-1) == first.argmax(axis=-1)
    has_nan = np.isnan(outputs).reshape(len(outputs), -1).any(axis=1)
    return np.where(has_nan, 0.0, same.reshape(len(outputs), -1).mean(axis=1))


def closeness(outputs: Array, first: Array) -> Doubles:
    """For each sample, 1 less the relative distance to *first*, the outputs before the change; at least 0.

    The distance is the Euclidean norm of the difference over that of *first*.
    """
    rows = len(outputs)
    before = np.asarray(first, np.float64).reshape(rows, -1)
    distance = np.linalg.norm(np.asarray(outputs, np.float64).reshape(rows, -1) - before, axis=1)
    length = np.linalg.norm(before, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative_distance = np.where(distance == 0, 0.0, distance / length)
    return np.asarray(np.clip(1 - np.nan_to_num(relative_distance, nan=1.0), 0.0, 1.0), np.float64)


LIKENESS: dict[str, Function] = {"agreement": agreement, "closeness": closeness}
"""Name -> a metric whose labels are the outputs of the model before it was changed."""


def likeness(name: str) -> Metric:
    """The metric of ``LIKENESS`` called *name*."""
    return Metric(name, function=LIKENESS[name])

"""The exit at which each sample leaves: drawn from rates, or by a confidence rule from a record of a real network.

A record is an .npz file with the confidence and the correctness of a trained network at every exit,
for every sample of a test set. The rule is the usual one: a sample leaves at the first exit whose
confidence reaches the threshold, and at the end otherwise. Exits are counted from 0; the end is the last exit.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from warnings import warn

import numpy as np
import numpy.typing as npt

from weft.base.errors import WorkloadError
from weft.workloads.arrivals import BLOCK

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Rng = np.random.Generator

MOST_VALUES = 10**8
"""Largest number of values in an array of a record; a file with more is damaged."""

MOST_EXITS = 256
"""Largest number of early exits of a model: more than published networks have, and a bound on the memory of a run."""

RATE_TOLERANCE = 1e-6
"""Largest distance of the sum of exit rates from 1: accepts 1/3 written with six digits, but no typing error."""


@dataclass(frozen=True, slots=True, eq=False)
class ExitRecord:
    """Outputs of a network for a test set: confidence and correctness of each sample at each exit."""

    confidence: Floats
    """(samples, exits), 0 to 1."""
    correct: Bools
    """(samples, exits): whether the answer of that exit was right."""

    @property
    def samples(self) -> int:
        return len(self.confidence)

    @property
    def exits(self) -> int:
        """Number of exits, the end included."""
        return int(self.confidence.shape[1])

    def fates(self, threshold: float) -> Ints:
        """Return ``exits_taken`` under its name before 0.3, with a DeprecationWarning until 0.4."""
        warn("ExitRecord.fates is exits_taken now; the old name ends with 0.4", DeprecationWarning, stacklevel=2)
        return self.exits_taken(threshold)

    def exits_taken(self, threshold: float) -> Ints:
        """Return the exit at which each sample leaves: the first whose confidence reaches *threshold*, else the end."""
        confident = self.confidence >= threshold
        confident[:, -1] = True
        return np.asarray(confident.argmax(axis=1), np.int64)

    def rates(self, threshold: float) -> tuple[float, ...]:
        """Return the share of the samples that leave at each exit."""
        counts = np.bincount(self.exits_taken(threshold), minlength=self.exits)
        return tuple((counts / self.samples).tolist())

    def accuracy(self, threshold: float) -> float:
        """Return the share of the samples whose answer is right at the exit at which they leave."""
        return float(self.correct[np.arange(self.samples), self.exits_taken(threshold)].mean())


class ExitBlock(NamedTuple):
    """The exit at which each of a block of successive samples leaves, and the sample's row in the record."""

    exits: Ints
    rows: Ints
    """-1 for samples whose exits were drawn from rates."""


def from_rates(rates: Sequence[float], rng: Rng) -> Iterator[ExitBlock]:
    """Yield endless blocks of independent samples; *rates*: the probability of each exit, the end last."""
    bounds = np.cumsum(rates)
    bounds[-1] = np.inf  # the sum may be rounded to less than 1, and every sample needs an exit
    rows = np.full(BLOCK, -1, np.int64)  # drawn samples have no row in a record
    while True:
        yield ExitBlock(np.asarray(np.searchsorted(bounds, rng.random(BLOCK), side="right"), np.int64), rows)


def from_record(record: ExitRecord, threshold: float, rng: Rng) -> Iterator[ExitBlock]:
    """Yield endless blocks of samples drawn from the rows of a record, with replacement."""
    exits_taken = record.exits_taken(threshold)
    while True:
        rows = rng.integers(record.samples, size=BLOCK)
        yield ExitBlock(exits_taken[rows], rows)


def number_or_names(value: Any) -> Any:
    """Validate the setting ``exits``: the number of early exits, or names of outputs with the end last.

    Returns the value unchanged; ValueError if it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= MOST_EXITS:
            raise ValueError(f"must be 1 to {MOST_EXITS} early exits, the end not counted")
    elif value is not None:
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
            raise ValueError("must be a number of exits, or a list of names of the model's outputs")
        if len(value) < 2:
            raise ValueError("must name at least two outputs: an early exit and, last, the end of the model")
    return value


def miscounted(key: str, count: int, early_exits: int) -> str:
    """Return the error message for exit rates or a record, the value of *key*, that do not fit the model's exits.

    count: the number of exits in that value, the end included.
    """
    if not early_exits:
        return f"{key} is for {count} exits, but the model has none; place some with exits = {count - 1}"
    return f"{key} is for {count} exits, must be for {early_exits + 1}: {early_exits} early and the end"


def check_rates(rates: Sequence[float]) -> None:
    """Raise ValueError unless *rates* are from 0 to 1 and sum to 1."""
    if any(not 0 <= rate <= 1 for rate in rates):  # false for NaN
        raise ValueError(f"exit_rates = {_rates_text(rates)}: each must be 0 to 1")
    total = math.fsum(rates)
    if abs(total - 1) > RATE_TOLERANCE:
        raise ValueError(f"exit_rates = {_rates_text(rates)} sum to {total:g}, must sum to 1; the last is the end's")


def read_record(path: str | Path) -> ExitRecord:
    """Read the record in an .npz file; WorkloadError if the file cannot be read or is no valid record."""
    try:
        with zipfile.ZipFile(path) as archive:
            confidence, correct = (_array(archive, name) for name in ("confidence", "correct"))
            return _check_record(confidence, correct)
    except WorkloadError as error:
        raise WorkloadError(f"{path}: {error}") from error
    except OSError as error:
        raise WorkloadError(f"{path}: cannot read the record: {error.strerror or error}") from error
    except Exception as error:  # zipfile, zlib and numpy's header parser each raise their own kinds
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise WorkloadError(f"{path}: not a record of exits ({reason}); write it with numpy.savez") from error


def _array(archive: zipfile.ZipFile, name: str) -> npt.NDArray[Any]:
    """Read an array of the file; its header is checked before memory is allocated, since it may claim any size."""
    if f"{name}.npy" not in archive.namelist():
        stored = ", ".join(entry.removesuffix(".npy") for entry in archive.namelist()[:8]) or "nothing"
        raise WorkloadError(f"a record of exits has the arrays 'confidence' and 'correct'; this file holds {stored}")
    info = archive.getinfo(f"{name}.npy")
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if header is None:
            raise WorkloadError(f"{name} is stored in an unknown version of numpy's format; write it with numpy.savez")
        shape, _, dtype = header(file)
    if dtype.hasobject or math.prod(shape) > MOST_VALUES or math.prod(shape) * dtype.itemsize > info.file_size:
        raise WorkloadError(f"{name} has the shape {_shape(shape)} of {dtype}, which is not in the file or too large")
    with archive.open(info) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _check_record(confidence: npt.NDArray[Any], correct: npt.NDArray[Any]) -> ExitRecord:
    """Return the record with these arrays; WorkloadError if types, shapes or values are wrong."""
    if confidence.dtype.kind != "f":
        raise WorkloadError(f"confidence is of type {confidence.dtype}, must be floating point")
    if correct.dtype.kind != "b":
        raise WorkloadError(f"correct is of type {correct.dtype}, must be boolean")
    if confidence.ndim != 2 or confidence.shape[0] < 1 or confidence.shape[1] < 2:
        raise WorkloadError(
            f"confidence has the shape {_shape(confidence.shape)}, must be samples x exits, "
            "at least 1 x 2 (the end is an exit)"
        )
    if correct.shape != confidence.shape:
        raise WorkloadError(f"correct is {_shape(correct.shape)}, must be {_shape(confidence.shape)} as confidence is")
    inside = (confidence >= 0) & (confidence <= 1)  # False for NaN
    if not inside.all():
        row, column = map(int, np.argwhere(~inside)[0])
        raise WorkloadError(
            f"confidence of sample {row} at exit {column} is {float(confidence[row, column]):g}, must be 0 to 1"
        )
    return ExitRecord(confidence.astype(np.float64), correct)


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _rates_text(rates: Sequence[float]) -> str:
    return "[" + ", ".join(f"{rate:g}" for rate in rates) + "]"

"""Fit of the PCCS contention model to a matrix of measured bandwidths.

A matrix has a row per intensity of the unit's own work and a column per intensity of the others': what the unit
still achieves. The published five steps (Xu et al., MICRO 2021) read the parameters off it; a pattern search then moves
them to where the mean error in points of relative speed is least. Measuring this machine is in
``weft_map.memory_contention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from weft.base.errors import InputError
from weft.base.jsonfile import first_problem, read_json
from weft.devices import Pccs, Soc, relative_speed

Floats = npt.NDArray[np.float64]
Numbers = Sequence[float] | Floats
Table = Sequence[Sequence[float]] | Floats

FEWEST, MOST = 3, 64
"""Rows, and columns, of a matrix that can be fitted."""
LEAST_GB_S, MOST_GB_S = 1e-3, 1e6
NOISE_PCT = 2.0
"""A reduction that counts as none, where the matrix does not say."""
NO_MINOR_PCT = 10.0
"""The gentlest row losing more than this means that there is no minor region (step 1)."""
FLOOR_PCT = 10.0
"""Speed below which no model goes: beyond the calibrated range its straight lines would reach 0 and below."""
SUITED = 4
"""Borders between regions that are tried because they fit the other numbers best."""
COARSE, FINE = 9, 18
"""How often a pattern search halves its steps: to compare borders, and for the result."""
DIRECTIONS = np.array([signs for signs in product((-1.0, 0.0, 1.0), repeat=4) if any(signs)])
"""Where it looks: along each parameter and along each diagonal, since they trade off."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """Bandwidth that work achieves beside others, in GB/s; checked when made."""

    own_gb_s: Floats
    """The bandwidth of the work alone, one per row, increasing."""
    external_gb_s: Floats
    """The bandwidth of the others without the work, together, one per column, increasing."""
    achieved_gb_s: Floats
    """The bandwidth that the work reached: [own, external]."""
    noise_pct: float = NOISE_PCT
    """A reduction that counts as none."""
    source: str = ""
    peak_gb_s: float | None = None
    """The most that was drawn together, where known."""

    def __post_init__(self) -> None:
        _check_levels("own_gb_s", self.own_gb_s)
        _check_levels("external_gb_s", self.external_gb_s)
        _check_achieved(self)

    @cached_property
    def relative_speed_pct(self) -> Floats:
        """The percent of its speed alone that the work keeps: [own, external]."""
        speed: Floats = 100 * self.achieved_gb_s / self.own_gb_s[:, None]
        return speed

    @property
    def lost_pct(self) -> float:
        """The largest lasting reduction: over the upper third of the external levels, in the second worst row.

        The worst row may be a disturbance.
        """
        tail = max(1, len(self.external_gb_s) // 3)
        return float(100 - np.sort(np.median(self.relative_speed_pct[:, -tail:], axis=1))[1])

    @property
    def contended(self) -> bool:
        return self.lost_pct > self.noise_pct


@dataclass(frozen=True)
class Fit:
    """The model that suits a matrix, and where the search for it began."""

    model: Pccs
    start: Pccs
    """What the five steps found."""
    mean_error_points: float
    """Mean distance of the model from the matrix, in points of relative speed."""
    start_error_points: float
    contended: bool
    """Whether the matrix shows any contention; the parameters mean nothing where it does not."""
    lost_pct: float
    """The largest lasting reduction in the matrix."""
    noise_pct: float


class _Shape(NamedTuple):
    """Parameters as the search moves them: how many rows are minor, how many minor or normal, and four numbers."""

    minor: int
    normal: int
    values: tuple[float, float, float, float]
    """mrmc_pct, tbwdc, cbp, rate_n"""


class _MatrixFile(BaseModel, extra="forbid", frozen=True):
    """The keys of a matrix file."""

    format: Literal[1] = 1
    source: str = ""
    own_gb_s: list[float]
    external_gb_s: list[float]
    achieved_gb_s: list[list[float]]
    noise_pct: float = NOISE_PCT
    peak_gb_s: Annotated[float, Field(ge=1e-6, le=1e9, allow_inf_nan=False)] | None = None
    fit: dict[str, Any] | None = None
    """What a calibration wrote beside its matrix; fitted anew, not read."""
    device: dict[str, Any] | None = None
    """What came of it, for ``weft.devices.load_soc``; not read here."""


def read_matrix(path: str | Path) -> Matrix:
    """The matrix of a JSON file with own_gb_s, external_gb_s and achieved_gb_s."""
    try:
        file = _MatrixFile.model_validate(read_json(path, InputError))
    except ValidationError as error:
        raise InputError(f"{path}: {first_problem(error, _MatrixFile)}") from error
    try:
        matrix = _make(file.own_gb_s, file.external_gb_s, file.achieved_gb_s, file.noise_pct)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return replace(matrix, source=file.source, peak_gb_s=file.peak_gb_s)


def calibration_as_dict(matrix: Matrix, fit: Fit, device: Soc | None = None) -> dict[str, object]:
    """The matrix as ``read_matrix`` reads it, with the fit beside it, and as the device that ``load_soc`` reads."""
    return {
        "format": 1,
        "source": matrix.source,
        "own_gb_s": matrix.own_gb_s.tolist(),
        "external_gb_s": matrix.external_gb_s.tolist(),
        "achieved_gb_s": matrix.achieved_gb_s.tolist(),
        "noise_pct": matrix.noise_pct,
        "peak_gb_s": matrix.peak_gb_s,
        "fit": {
            "contended": fit.contended,
            "lost_pct": fit.lost_pct,
            "model": fit.model.model_dump() if fit.contended else None,
            "start": fit.start.model_dump() if fit.contended else None,
            "mean_error_points": fit.mean_error_points,
            "start_error_points": fit.start_error_points,
        },
        "device": None if device is None else device.model_dump(mode="json"),
    }


def sample_matrix() -> Matrix:
    """The calibration input that was published with PCCS."""
    with resources.as_file(resources.files("weft_map") / "data" / "pccs-sample.json") as path:
        return read_matrix(path)


def fit_pccs(own: Numbers, external: Numbers, achieved: Table, *, noise_pct: float = NOISE_PCT) -> Fit:
    """The model of a unit that alone draws *own*, and *achieved* [own, external] while others draw *external*."""
    return fit_matrix(_make(own, external, achieved, noise_pct))


def fit_matrix(matrix: Matrix) -> Fit:
    """``fit_pccs`` of a matrix."""
    if matrix.contended:
        begin = _five_steps(matrix)
        start, model = _model(matrix, begin), _model(matrix, _refine(matrix, begin))
    else:
        rows = len(matrix.own_gb_s)
        start = model = _model(matrix, _Shape(rows, rows, (0.0, 0.0, 0.0, 0.0)))
    error, start_error = (mean_error_points(candidate, matrix) for candidate in (model, start))
    return Fit(model, start, error, start_error, matrix.contended, matrix.lost_pct, matrix.noise_pct)


def mean_error_points(model: Pccs, matrix: Matrix) -> float:
    """Mean distance of a model from a matrix, in points of relative speed."""
    speeds = [[relative_speed(model, own, other) for other in matrix.external_gb_s] for own in matrix.own_gb_s]
    return float(np.abs(np.array(speeds) - matrix.relative_speed_pct).mean())


def _make(own: Numbers, external: Numbers, achieved: Table, noise_pct: float) -> Matrix:
    try:
        rows, columns, table = (np.array(values, dtype=np.float64) for values in (own, external, achieved))
    except (TypeError, ValueError):
        raise InputError("a contention matrix needs numbers, and rows of the same length") from None
    return Matrix(rows, columns, table, noise_pct)


def _check_levels(name: str, levels: Floats) -> None:
    if levels.ndim != 1 or not FEWEST <= len(levels) <= MOST:
        levels_text = f"{len(levels)}" if levels.ndim == 1 else f"an array of {levels.ndim} dimensions"
        raise InputError(f"{name}: a contention matrix needs {FEWEST} to {MOST} levels, not {levels_text}")
    for before, level in zip((0.0, *levels), levels, strict=False):
        if not (LEAST_GB_S <= level <= MOST_GB_S and level > before):
            raise InputError(
                f"{name}: {level:g} comes after {before:g}; levels increase and lie between {LEAST_GB_S:g} and "
                f"{MOST_GB_S:g} GB/s"
            )


def _check_achieved(matrix: Matrix) -> None:
    own, achieved = matrix.own_gb_s, matrix.achieved_gb_s
    wanted = (len(own), len(matrix.external_gb_s))
    if achieved.shape != wanted:
        shape = " x ".join(map(str, achieved.shape))
        raise InputError(
            f"achieved_gb_s is {shape}; {wanted[0]} own and {wanted[1]} external levels need {wanted[0]} x {wanted[1]}"
        )
    bad = np.argwhere(~(np.isfinite(achieved) & (achieved > 0) & (achieved <= 1.5 * own[:, None])))
    if len(bad):
        row, column = bad[0]
        raise InputError(
            f"achieved_gb_s[{row}][{column}] = {achieved[row, column]:g} where the work alone draws {own[row]:g}; "
            "achieved bandwidths are positive and not above that (rows are own levels, columns external ones)"
        )
    if not 0 <= matrix.noise_pct < 100:
        raise InputError(f"noise_pct = {matrix.noise_pct:g} is no percentage from 0 to 100")


# The five steps


def _five_steps(matrix: Matrix) -> _Shape:
    """Parameters read off the matrix; a shape that a step does not foresee falls back on its neighbours."""
    own, external, lost = matrix.own_gb_s, matrix.external_gb_s, 100 - matrix.relative_speed_pct
    rows = len(own)
    # 1: the minor region, and what counts as a drop from here on
    has_minor = bool(lost[0, -1] <= NO_MINOR_PCT)
    drop = min(NO_MINOR_PCT, 2 * max(lost[0, -1], matrix.noise_pct / 2))
    minor = _first(lost[:, -1] > drop, rows) if has_minor else 0
    mrmc = max(0.0, float(lost[minor - 1, -1])) if minor else 0.0
    if minor == rows:
        return _Shape(rows, rows, (mrmc, float(own[-1] + external[-1]), float(external[-1]), 0.0))
    # 2: the intensive region; its first row still lies on the border, hence is judged as normal
    intensive = minor + _first(lost[minor:, 0] >= drop, rows - minor)
    normal = range(minor, max(minor + 1, intensive))
    # 3 and 4: where the drop starts and where it ends
    starts = {row: _first(lost[row] >= drop, len(external) - 1) for row in normal}
    tbwdc = float(np.mean([own[row] + external[column] for row, column in starts.items()]))
    slopes = np.diff(lost, axis=1, prepend=0.0) / np.diff(external, prepend=0.0)
    cbp = float(np.mean([external[_flat(slopes[row], column)] for row, column in starts.items()]))
    # 5: how fast it drops
    steep = [slopes[row, (own[row] + external >= tbwdc) & (external <= cbp)] for row in normal]
    slope = np.concatenate(steep) if sum(map(len, steep)) else slopes[list(normal)].max(axis=1)
    return _Shape(minor, min(rows, intensive + 1), (mrmc, tbwdc, cbp, max(0.0, float(slope.mean()))))


def _first(matches: npt.NDArray[np.bool_], otherwise: int) -> int:
    return int(np.argmax(matches)) if matches.any() else otherwise


def _flat(slopes: Floats, start: int) -> int:
    """The first column after *start* whose slope is under a third of the mean so far; the last if none is."""
    for column in range(start + 1, len(slopes)):
        if slopes[column] < slopes[start:column].mean() / 3:
            return column
    return len(slopes) - 1


def _model(matrix: Matrix, shape: _Shape) -> Pccs:
    own = matrix.own_gb_s
    mrmc, tbwdc, cbp, rate = (float(f"{value:.6g}") for value in shape.values)
    return Pccs(
        normal_bw=float(own[shape.minor - 1]) if shape.minor else 0.0,
        intensive_bw=float(own[shape.normal - 1]) if shape.normal else 0.0,
        mrmc_pct=mrmc,
        pbw=float(matrix.external_gb_s[-1]),
        tbwdc=tbwdc,
        cbp=cbp,
        rate_n=rate,
        floor_pct=FLOOR_PCT,
    )


# The search


def _refine(matrix: Matrix, begin: _Shape) -> _Shape:
    """The best shape that moves of the borders, each with its best numbers, lead to from *begin*."""
    best, error = _descend(matrix, begin, COARSE)
    while True:
        tries = (_descend(matrix, move, COARSE) for move in _moves(matrix, best))
        improved = next(((shape, less) for shape, less in tries if less < error - 1e-3), None)
        if improved is None:
            return _descend(matrix, best, FINE)[0]
        best, error = improved


def _moves(matrix: Matrix, shape: _Shape) -> list[_Shape]:
    """Other borders: those that suit the numbers best as they are, and those one row away."""
    regions = _lost(matrix, np.array([shape.values]))
    speeds = [np.clip(100 - lost[0], FLOOR_PCT, 100) for lost in regions]
    costs = [np.abs(speed - matrix.relative_speed_pct).sum(axis=1) for speed in speeds]
    minor, normal, intensive = (np.concatenate(([0.0], np.cumsum(cost))) for cost in costs)
    total = (minor - normal)[:, None] + (normal - intensive)[None, :]
    total[np.tril_indices_from(total, -1)] = np.inf
    suited = [divmod(int(place), len(total)) for place in np.argsort(total, axis=None, kind="stable")[:SUITED]]
    near = [(shape.minor + up, shape.normal + down) for up, down in product((-1, 0, 1), repeat=2)]
    borders = [pair for pair in dict.fromkeys(suited + near) if 0 <= pair[0] <= pair[1] < len(total)]
    return [_Shape(*pair, shape.values) for pair in borders if pair != shape[:2]]


def _descend(matrix: Matrix, shape: _Shape, halvings: int) -> tuple[_Shape, float]:
    """Pattern search over the four numbers, the borders as they are; the shape and its mean error."""
    own, external = float(matrix.own_gb_s[-1]), float(matrix.external_gb_s[-1])
    upper = np.array([100.0, own + external, external, 1e4 / own])
    here = np.minimum(np.array(shape.values), upper)
    step = np.array([2.0, own / 8, external / 8, max(4 / own, shape.values[3] / 4)])
    error = float(_errors(matrix, shape.minor, shape.normal, here[None])[0])
    for _ in range(halvings):
        for _ in range(64):
            candidates = np.clip(here + DIRECTIONS * step, 0.0, upper)
            errors = _errors(matrix, shape.minor, shape.normal, candidates)
            best = int(errors.argmin())
            if errors[best] >= error - 1e-12:
                break
            here, error = candidates[best], float(errors[best])
        step /= 2
    return _Shape(shape.minor, shape.normal, (float(here[0]), float(here[1]), float(here[2]), float(here[3]))), error


def _errors(matrix: Matrix, minor_rows: int, normal_rows: int, values: Floats) -> Floats:
    """Mean error of each row of *values* (mrmc_pct, tbwdc, cbp, rate_n), for borders after that many rows."""
    minor, normal, intensive = _lost(matrix, values)
    lost = np.concatenate(
        (minor[:, :minor_rows], normal[:, minor_rows:normal_rows], intensive[:, normal_rows:]), axis=1
    )
    speed = np.clip(100 - lost, FLOOR_PCT, 100)
    errors: Floats = np.abs(speed - matrix.relative_speed_pct).mean(axis=(1, 2))
    return errors


def _lost(matrix: Matrix, values: Floats) -> tuple[Floats, Floats, Floats]:
    """Percent lost in each region for each row of *values*: ``relative_speed`` over arrays."""
    own, external = matrix.own_gb_s[:, None], matrix.external_gb_s[None, :]
    mrmc, tbwdc, cbp, rate = (column[:, None, None] for column in values.T)
    minor = mrmc * external / external[0, -1] + np.zeros_like(own)
    plateau = np.maximum(0.0, own + cbp - tbwdc) * rate
    normal = np.maximum(minor, np.minimum(plateau, (own + external - tbwdc) * rate))
    share = np.divide(np.minimum(external, cbp), cbp, out=np.ones_like(minor), where=cbp > 0)
    return minor, normal, plateau * share

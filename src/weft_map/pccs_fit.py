"""Fit of the PCCS contention model to a matrix of measured bandwidths.

A matrix has a row per intensity of the unit's own work and a column per intensity of the other units' work; its values
are the bandwidth that the unit still achieves. The published five steps (Xu et al., MICRO 2021) read the parameters off
it; then a pattern search minimises the mean error in points of relative speed. ``weft_map.memory_contention`` measures
such a matrix on this machine.

PCCS divides work into regions by its own demand: minor (hardly slowed down), normal, and intensive (slowed down by any
other work). *Borders* are two row numbers: where the minor region ends, and where the normal region ends. Its other
parameters, named as in ``weft.devices.Pccs``: mrmc, the largest reduction in the minor region; tbwdc, the total demand
at which the speed begins to drop; cbp, the external demand from which it drops no further; rate_n, the slope between.
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
"""Bounds of the number of rows, and of columns, of a matrix."""
LEAST_GB_S, MOST_GB_S = 1e-3, 1e6
"""Bounds of the levels (bandwidths) of a matrix."""
NOISE_PCT = 2.0
"""Reductions of speed by less count as none, if the matrix does not give its noise."""
NO_MINOR_PCT = 10.0
"""If the row of the lowest intensity loses more than this, there is no minor region (step 1)."""
FLOOR_PCT = 10.0
"""Lower limit of the relative speed of a model: beyond the measured range its straight lines would reach 0."""
BEST_BORDERS = 4
"""Number of borders that are tried in each round because they fit the present parameters best."""
COARSE, FINE = 9, 18
"""Numbers of times that a pattern search halves its step: to compare borders, and for the result."""
DIRECTIONS = np.array([signs for signs in product((-1.0, 0.0, 1.0), repeat=4) if any(signs)])
"""Directions of the pattern search: along each parameter and each diagonal, because parameters trade off."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """Bandwidth that work achieves while other units read too, in GB/s; the constructor checks it (InputError)."""

    own_gb_s: Floats
    """[row]: bandwidth of the work alone, increasing."""
    external_gb_s: Floats
    """[column]: bandwidth of all other units together, without the work, increasing."""
    achieved_gb_s: Floats
    """[row, column]: bandwidth of the work beside the others."""
    noise_pct: float = NOISE_PCT
    """Reductions by less than this count as none."""
    source: str = ""
    peak_gb_s: float | None = None
    """The largest total bandwidth that was measured; None if unknown."""

    def __post_init__(self) -> None:
        _check_levels("own_gb_s", self.own_gb_s)
        _check_levels("external_gb_s", self.external_gb_s)
        _check_achieved(self)

    @cached_property
    def relative_speed_pct(self) -> Floats:
        """[row, column]: the speed of the work beside the others, in percent of its speed alone."""
        speed: Floats = 100 * self.achieved_gb_s / self.own_gb_s[:, None]
        return speed

    @property
    def lost_pct(self) -> float:
        """The largest lasting reduction in percent: the median over the upper third of the external levels.

        It is that of the second worst row, because the worst may come from a disturbance of the measurement.
        """
        tail = max(1, len(self.external_gb_s) // 3)
        return float(100 - np.sort(np.median(self.relative_speed_pct[:, -tail:], axis=1))[1])

    @property
    def contended(self) -> bool:
        return self.lost_pct > self.noise_pct


@dataclass(frozen=True)
class Fit:
    """The fitted model of a matrix, and the model from which the search started."""

    model: Pccs
    start: Pccs
    """The model of the five steps."""
    mean_error_points: float
    """Mean distance of the model from the matrix, in points of relative speed."""
    start_error_points: float
    contended: bool
    """Whether the matrix shows any contention; if not, the parameters mean nothing."""
    lost_pct: float
    """The largest lasting reduction in the matrix."""
    noise_pct: float


class _Parameters(NamedTuple):
    """The parameters of PCCS in the form that the search changes."""

    minor: int
    """Number of rows in the minor region."""
    normal: int
    """Number of rows in the minor and the normal region together."""
    values: tuple[float, float, float, float]
    """mrmc_pct, tbwdc, cbp, rate_n of ``Pccs``."""


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
    """The fit that a calibration wrote beside its matrix; ignored, because a matrix is always fitted again."""
    device: dict[str, Any] | None = None
    """The fitted device, which ``weft.devices.load_soc`` reads; ignored here."""


def read_matrix(path: str | Path) -> Matrix:
    """Read the matrix of a JSON file with own_gb_s, external_gb_s and achieved_gb_s; raises InputError."""
    try:
        file = _MatrixFile.model_validate(read_json(path, InputError))
    except ValidationError as error:
        raise InputError(f"{path}: {first_problem(error, _MatrixFile)}") from error
    try:
        matrix = _make_matrix(file.own_gb_s, file.external_gb_s, file.achieved_gb_s, file.noise_pct)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return replace(matrix, source=file.source, peak_gb_s=file.peak_gb_s)


def calibration_as_dict(matrix: Matrix, fit: Fit, device: Soc | None = None) -> dict[str, object]:
    """The content of a calibration file: the matrix for ``read_matrix``, the fit, and the device for ``load_soc``."""
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
    """Fit PCCS to a unit: *own* GB/s alone, *achieved*[own][external] while other units draw *external* GB/s."""
    return fit_matrix(_make_matrix(own, external, achieved, noise_pct))


def fit_matrix(matrix: Matrix) -> Fit:
    """Fit PCCS to *matrix*; without contention, the model slows nothing down."""
    if matrix.contended:
        first = _five_steps(matrix)
        start, model = _model(matrix, first), _model(matrix, _refine(matrix, first))
    else:
        rows = len(matrix.own_gb_s)
        start = model = _model(matrix, _Parameters(rows, rows, (0.0, 0.0, 0.0, 0.0)))
    error, start_error = (mean_error_points(candidate, matrix) for candidate in (model, start))
    return Fit(model, start, error, start_error, matrix.contended, matrix.lost_pct, matrix.noise_pct)


def mean_error_points(model: Pccs, matrix: Matrix) -> float:
    """Mean distance of a model from a matrix, in points of relative speed."""
    speeds = [[relative_speed(model, own, other) for other in matrix.external_gb_s] for own in matrix.own_gb_s]
    return float(np.abs(np.array(speeds) - matrix.relative_speed_pct).mean())


def _make_matrix(own: Numbers, external: Numbers, achieved: Table, noise_pct: float) -> Matrix:
    try:
        rows, columns, table = (np.array(values, dtype=np.float64) for values in (own, external, achieved))
    except (TypeError, ValueError):
        raise InputError("a contention matrix needs numbers, and rows of the same length") from None
    return Matrix(rows, columns, table, noise_pct)


def _check_levels(name: str, levels: Floats) -> None:
    """Refuse levels that are too few, too many, out of range or not increasing."""
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
    """Refuse bandwidths of the wrong shape, not positive, or far above that of the work alone."""
    own, achieved = matrix.own_gb_s, matrix.achieved_gb_s
    wanted = (len(own), len(matrix.external_gb_s))
    if achieved.shape != wanted:
        shape = " x ".join(map(str, achieved.shape))
        raise InputError(
            f"achieved_gb_s is {shape}; {wanted[0]} own and {wanted[1]} external levels need {wanted[0]} x {wanted[1]}"
        )
    # Up to half above the bandwidth of the work alone is taken for noise.
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


def _five_steps(matrix: Matrix) -> _Parameters:
    """Read the parameters off the matrix, as PCCS's authors do, in five numbered steps.

    Where no row or column meets a step's condition, the end of the axis is taken.
    """
    own, external, lost = matrix.own_gb_s, matrix.external_gb_s, 100 - matrix.relative_speed_pct
    rows = len(own)
    # 1: the minor region, and the reduction that counts as a drop in the other steps
    has_minor = bool(lost[0, -1] <= NO_MINOR_PCT)
    drop = min(NO_MINOR_PCT, 2 * max(lost[0, -1], matrix.noise_pct / 2))
    minor = _first_true(lost[:, -1] > drop, rows) if has_minor else 0
    mrmc = max(0.0, float(lost[minor - 1, -1])) if minor else 0.0
    if minor == rows:
        return _Parameters(rows, rows, (mrmc, float(own[-1] + external[-1]), float(external[-1]), 0.0))
    # 2: the intensive region; its first row lies on the border and counts as normal
    intensive = minor + _first_true(lost[minor:, 0] >= drop, rows - minor)
    normal = range(minor, max(minor + 1, intensive))
    # 3 and 4: where the drop starts and where it ends
    start_columns = {row: _first_true(lost[row] >= drop, len(external) - 1) for row in normal}
    tbwdc = float(np.mean([own[row] + external[column] for row, column in start_columns.items()]))
    slopes = np.diff(lost, axis=1, prepend=0.0) / np.diff(external, prepend=0.0)
    cbp = float(np.mean([external[_end_of_drop(slopes[row], column)] for row, column in start_columns.items()]))
    # 5: the rate of the drop
    slopes_in_drop = [slopes[row, (own[row] + external >= tbwdc) & (external <= cbp)] for row in normal]
    rates = np.concatenate(slopes_in_drop) if sum(map(len, slopes_in_drop)) else slopes[list(normal)].max(axis=1)
    return _Parameters(minor, min(rows, intensive + 1), (mrmc, tbwdc, cbp, max(0.0, float(rates.mean()))))


def _first_true(matches: npt.NDArray[np.bool_], otherwise: int) -> int:
    """Index of the first match; *otherwise* if there is none."""
    return int(np.argmax(matches)) if matches.any() else otherwise


def _end_of_drop(slopes: Floats, start: int) -> int:
    """The first column after *start* whose slope is under a third of the mean since *start*; the last if none is."""
    for column in range(start + 1, len(slopes)):
        if slopes[column] < slopes[start:column].mean() / 3:
            return column
    return len(slopes) - 1


def _model(matrix: Matrix, parameters: _Parameters) -> Pccs:
    """The device model of *parameters*, rounded to six digits; a border is the demand of the last row before it."""
    own = matrix.own_gb_s
    mrmc, tbwdc, cbp, rate = (float(f"{value:.6g}") for value in parameters.values)
    return Pccs(
        normal_bw=float(own[parameters.minor - 1]) if parameters.minor else 0.0,
        intensive_bw=float(own[parameters.normal - 1]) if parameters.normal else 0.0,
        mrmc_pct=mrmc,
        pbw=float(matrix.external_gb_s[-1]),
        tbwdc=tbwdc,
        cbp=cbp,
        rate_n=rate,
        floor_pct=FLOOR_PCT,
    )


# The search


def _refine(matrix: Matrix, start: _Parameters) -> _Parameters:
    """Local search from *start*: move to other borders, with the best values for them, as long as the error drops."""
    best, error = _descend(matrix, start, COARSE)
    while True:
        attempts = (_descend(matrix, neighbour, COARSE) for neighbour in _neighbours(matrix, best))
        # an error that is lower by less than 0.001 points does not count
        improved = next(((parameters, lower) for parameters, lower in attempts if lower < error - 1e-3), None)
        if improved is None:
            fine, _ = _descend(matrix, best, FINE)
            return fine
        best, error = improved


def _neighbours(matrix: Matrix, parameters: _Parameters) -> list[_Parameters]:
    """The same values with other borders: the ``BEST_BORDERS`` that fit these values best, and those one row away."""
    lost_by_region = _lost_pct(matrix, np.array([parameters.values]))
    speeds = [np.clip(100 - lost[0], FLOOR_PCT, 100) for lost in lost_by_region]
    errors = [np.abs(speed - matrix.relative_speed_pct).sum(axis=1) for speed in speeds]
    # [row]: error of all rows before it, if they belong to the region
    minor, normal, intensive = (np.concatenate(([0.0], np.cumsum(error))) for error in errors)
    # total[a, b]: error if rows before a are minor, rows from a to b normal, and the others intensive (less a constant)
    total = (minor - normal)[:, None] + (normal - intensive)[None, :]
    total[np.tril_indices_from(total, -1)] = np.inf
    best = np.argsort(total, axis=None, kind="stable")[:BEST_BORDERS].tolist()
    best_borders = [divmod(index, len(total)) for index in best]
    one_row_away = [(parameters.minor + a, parameters.normal + b) for a, b in product((-1, 0, 1), repeat=2)]
    borders = [(a, b) for a, b in dict.fromkeys(best_borders + one_row_away) if 0 <= a <= b < len(total)]
    return [
        _Parameters(*border, parameters.values) for border in borders if border != (parameters.minor, parameters.normal)
    ]


def _descend(matrix: Matrix, parameters: _Parameters, halvings: int) -> tuple[_Parameters, float]:
    """Pattern search over the four values with fixed borders; returns the best parameters and their mean error.

    The step is halved *halvings* times; at each size the search moves as long as some direction improves the error.
    """
    minor, normal, first_values = parameters
    own, external = float(matrix.own_gb_s[-1]), float(matrix.external_gb_s[-1])
    # In the order of ``_Parameters.values``: mrmc_pct, tbwdc, cbp, rate_n.
    upper = np.array([100.0, own + external, external, 1e4 / own])  # the largest values that a matrix can show
    values = np.minimum(np.array(first_values), upper)
    step = np.array([2.0, own / 8, external / 8, max(4 / own, first_values[3] / 4)])
    error = float(_errors(matrix, minor, normal, values[None])[0])
    for _ in range(halvings):
        for _ in range(64):  # a limit on the moves at one size; few are needed
            candidates = np.clip(values + DIRECTIONS * step, 0.0, upper)
            errors = _errors(matrix, minor, normal, candidates)
            best = int(errors.argmin())
            if errors[best] >= error - 1e-12:
                break
            values, error = candidates[best], float(errors[best])
        step /= 2
    mrmc, tbwdc, cbp, rate = (float(value) for value in values)
    return _Parameters(minor, normal, (mrmc, tbwdc, cbp, rate)), error


def _errors(matrix: Matrix, minor_rows: int, normal_rows: int, values: Floats) -> Floats:
    """Mean error in points for each row of *values* (mrmc_pct, tbwdc, cbp, rate_n), with the given borders."""
    minor, normal, intensive = _lost_pct(matrix, values)
    lost = np.concatenate(
        (minor[:, :minor_rows], normal[:, minor_rows:normal_rows], intensive[:, normal_rows:]), axis=1
    )
    speed = np.clip(100 - lost, FLOOR_PCT, 100)
    errors: Floats = np.abs(speed - matrix.relative_speed_pct).mean(axis=(1, 2))
    return errors


def _lost_pct(matrix: Matrix, values: Floats) -> tuple[Floats, Floats, Floats]:
    """Percent of speed lost if all rows were minor, if all were normal, and if all were intensive.

    Each is [row of *values*, own, external]. The formulas are those of ``weft.devices.relative_speed``, over arrays.
    """
    own, external = matrix.own_gb_s[:, None], matrix.external_gb_s[None, :]
    mrmc, tbwdc, cbp, rate = (column[:, None, None] for column in values.T)
    minor = mrmc * external / external[0, -1] + np.zeros_like(own)
    plateau = np.maximum(0.0, own + cbp - tbwdc) * rate
    normal = np.maximum(minor, np.minimum(plateau, (own + external - tbwdc) * rate))
    share = np.divide(np.minimum(external, cbp), cbp, out=np.ones_like(minor), where=cbp > 0)
    return minor, normal, plateau * share

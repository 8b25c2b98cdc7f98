"""Values to codes and codes to values by the formula, in doubles: what the compiled loops must equal.

Every step is exact. A magnitude a lies between the codes of two neighbours: with e the exponent of a, but at least
1 - B, a is q 2^(e - n_f), and the lower neighbour's code is (e + B - 1) 2^n_f + floor(q), whatever the kind of the
format. Only the choice between the two depends on the rounding.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from weft.base.errors import NumberError
from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.format import Format
from weft_tune.numbers.rounding import Bools, Doubles, Longs, Rounding, check_rounding, goes_up
from weft_tune.numbers.twos_complement import TwosComplement

FLOAT32_MAX = float(np.finfo(np.float32).max)


def codes(
    x: Doubles, form: AnyFormat, rounding: Rounding = "nearest-even", rng: np.random.Generator | None = None
) -> Longs:
    """The code of each value of *x*; NaN only where the format has codes for it."""
    check_rounding(rounding, rng)
    if isinstance(form, TwosComplement):
        return _twos_codes(x, form, rounding)
    if rounding == "log-nearest" and form.kind != "EXP":
        raise NumberError(f"log-nearest rounding is for EXP formats; {form} is {form.kind}; use nearest-even")
    if form.kind == "BIN":
        return (x < 0).astype(np.int64)
    negative = np.signbit(x) if form.sign_bits else np.zeros(x.shape, np.bool_)
    magnitude = np.abs(x) if form.sign_bits else np.maximum(x, 0.0)
    found = _magnitude_codes(magnitude, negative, form, rounding, rng)
    if form.specials:
        found = np.where(np.isinf(magnitude), infinity_code(form), found)
        found = np.where(np.isnan(x), nan_code(form), found)
    return np.asarray(found | negative.astype(np.int64) << form.bits - 1)


def values(codes: npt.NDArray[np.integer], form: AnyFormat) -> Doubles:
    """What each code means."""
    wide = codes.astype(np.int64)
    if isinstance(form, TwosComplement):
        half = 1 << form.bits - 1
        return np.ldexp((((wide & 2 * half - 1) ^ half) - half).astype(np.float64), -form.fraction_length)
    if form.kind == "BIN":
        return np.where(wide & 1, -form.largest, form.largest)
    magnitude = wide & (1 << form.exponent_bits + form.fraction_bits) - 1
    exponent = magnitude >> form.fraction_bits
    fraction = magnitude & (1 << form.fraction_bits) - 1
    significand = fraction + ((exponent > 0).astype(np.int64) << form.fraction_bits)
    scale = np.maximum(exponent, 1) - form.bias - form.fraction_bits
    if form.specials:
        special = exponent > form.top_exponent
        found = np.ldexp(significand.astype(np.float64), np.where(special, 0, scale))
        found = np.where(special, np.where(fraction == 0, np.inf, np.nan), found)
    else:
        found = np.ldexp(significand.astype(np.float64), scale)
    negative = wide >> form.bits - 1 & form.sign_bits == 1
    return np.where(negative, -found, found)


def rounded(
    x: npt.NDArray[np.floating],
    form: AnyFormat,
    rounding: Rounding = "nearest-even",
    rng: np.random.Generator | None = None,
) -> npt.NDArray[np.float32]:
    """The value of each value's code, as float32; NaN stays NaN."""
    with np.errstate(invalid="ignore"):  # some NaN signal
        wide = x.astype(np.float64)
    missing = np.isnan(wide)
    found = values(codes(np.where(missing, 0.0, wide), form, rounding, rng), form)
    found = np.where(np.isinf(found), found, np.clip(found, *float32_range(form)))
    return np.where(missing, np.nan, found).astype(np.float32)


@lru_cache(maxsize=1024)
def float32_range(form: AnyFormat) -> tuple[float, float]:
    """The lowest and the largest finite value that the format and float32 both hold."""
    ends = np.clip(np.array([form.lowest, form.largest]), -FLOAT32_MAX, FLOAT32_MAX)
    if isinstance(form, TwosComplement):
        ends = np.trunc(ends / form.step) * form.step
    elif form.kind != "BIN":
        ends = values(codes(ends, form, "toward-zero"), form)
    near = ends.astype(np.float32)
    beyond = np.abs(near.astype(np.float64)) > np.abs(ends)
    near = np.where(beyond, np.nextafter(near, np.float32(0)), near)
    return float(near[0]), float(near[1])


def infinity_code(form: Format) -> int:
    """The code of infinity without its sign; only formats with specials have one."""
    return (1 << form.exponent_bits) - 1 << form.fraction_bits


def nan_code(form: Format) -> int:
    """The quiet one, without the sign; for formats with specials."""
    return infinity_code(form) | 1 << form.fraction_bits - 1


def _magnitude_codes(
    magnitude: Doubles, negative: Bools, form: Format, rounding: Rounding, rng: np.random.Generator | None
) -> Longs:
    held = np.minimum(np.where(np.isnan(magnitude), 0.0, magnitude), form.largest)
    exponent = np.maximum(np.frexp(held)[1].astype(np.int64) - 1, 1 - form.bias)
    exponent = np.where(held == 0, 1 - form.bias, exponent)
    position = np.ldexp(held, form.fraction_bits - exponent)
    below = np.floor(position)
    lower = ((exponent + form.bias - 1) << form.fraction_bits) + below.astype(np.int64)
    return np.asarray(lower + goes_up(rounding, lower, position - below, negative, rng))


def _twos_codes(x: Doubles, form: TwosComplement, rounding: Rounding) -> Longs:
    if rounding not in ("nearest-even", "nearest-away"):
        raise NumberError(f"{form} rounds half away from zero by its definition, not {rounding}; leave rounding out")
    half = 1 << form.bits - 1
    places = np.ldexp(np.clip(x, form.lowest, form.largest), form.fraction_length)
    below = np.floor(np.abs(places))
    away = below + (np.abs(places) - below >= 0.5)
    return np.where(places < 0, -away, away).astype(np.int64) & 2 * half - 1

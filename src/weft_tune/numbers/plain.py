"""Values to codes and codes to values by the formula, in doubles: the definition that compiled loops must equal.

Every step is exact. A magnitude a lies between two neighbouring values of the format. Let e be the exponent of a, but
at least 1 - B; then a is q 2^(e - n_f), and the code of the lower neighbour is (e + B - 1) 2^n_f + floor(q), for every
kind of format. Only the choice between the two neighbours depends on the rounding (``goes_up``). Values are clipped to
the format's range first, so the upper neighbour always exists.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from weft.base.errors import NumberError, unknown_name
from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.format import Format, TwosComplement

FLOAT32_MAX = float(np.finfo(np.float32).max)
Bools = npt.NDArray[np.bool_]
Doubles = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]

Rounding = Literal["nearest-even", "nearest-away", "toward-zero", "up", "down", "stochastic", "log-nearest"]
"""Choices between the two neighbours of a value. nearest-even: the nearer; half way, the neighbour with the even code
(not with the even significand: without fraction bits, as in EXP, all significands are odd). nearest-away: the nearer;
half way, that further from zero. toward-zero, up, down: always in that direction. stochastic: the upper with a
probability that grows linearly from 0 at the lower to 1 at the upper. log-nearest, for EXP only: the nearer on a
logarithmic scale; below the smallest power 2^e, zero up to 2^(e - 1/2)."""

ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)


def check_rounding(rounding: str, rng: np.random.Generator | None) -> None:
    """Refuse an unknown rounding, and stochastic rounding without a generator."""
    if rounding not in ROUNDINGS:
        raise NumberError(unknown_name("rounding", rounding, ROUNDINGS))
    if rounding == "stochastic" and rng is None:
        raise NumberError("stochastic rounding draws numbers; give rng=numpy.random.default_rng(seed)")


def goes_up(
    rounding: Rounding, lower: Longs, share: Doubles, negative: Bools, rng: np.random.Generator | None
) -> Bools:
    """Whether each magnitude is rounded to its upper neighbour, away from zero.

    lower: code of the lower neighbour; share: how far the magnitude is on the way to the upper one, from 0 to 1.
    """
    match rounding:
        case "nearest-even":
            return np.asarray((share > 0.5) | ((share == 0.5) & (lower & 1 == 1)))
        case "nearest-away":
            return share >= 0.5
        case "toward-zero":
            return np.zeros(share.shape, np.bool_)
        case "up":
            return (share > 0) & ~negative
        case "down":
            return (share > 0) & negative
        case "log-nearest":
            return np.asarray(share > np.where(lower == 0, np.sqrt(0.5), np.sqrt(2.0) - 1.0))
        case "stochastic":
            assert rng is not None
            return rng.random(share.shape) < share


def codes(
    x: Doubles, form: AnyFormat, rounding: Rounding = "nearest-even", rng: np.random.Generator | None = None
) -> Longs:
    """Encode each value of *x*; it may hold NaN only if the format has codes for it."""
    check_rounding(rounding, rng)
    if isinstance(form, TwosComplement):
        return _twos_codes(x, form, rounding)
    if rounding == "log-nearest" and form.kind != "EXP":
        raise NumberError(f"log-nearest rounding is for EXP formats; {form} is {form.kind}; use nearest-even")
    if form.kind == "BIN":
        return (x < 0).astype(np.int64)
    negative = np.signbit(x) if form.sign_bits else np.zeros(x.shape, np.bool_)
    magnitude = np.abs(x) if form.sign_bits else np.maximum(x, 0.0)
    encoded = _magnitude_codes(magnitude, negative, form, rounding, rng)
    if form.specials:
        infinity = (1 << form.exponent_bits) - 1 << form.fraction_bits
        encoded = np.where(np.isinf(magnitude), infinity, encoded)
        encoded = np.where(np.isnan(x), infinity | 1 << form.fraction_bits - 1, encoded)  # the quiet NaN
    return np.asarray(encoded | negative.astype(np.int64) << form.bits - 1)


def values(codes: npt.NDArray[np.integer], form: AnyFormat) -> Doubles:
    """Decode: the value of each code."""
    integers = codes.astype(np.int64)
    if isinstance(form, TwosComplement):
        # xor and subtraction extend the sign
        half = 1 << form.bits - 1
        return np.ldexp((((integers & 2 * half - 1) ^ half) - half).astype(np.float64), -form.fraction_length)
    if form.kind == "BIN":
        return np.where(integers & 1, -form.largest, form.largest)
    magnitude = integers & (1 << form.exponent_bits + form.fraction_bits) - 1
    exponent = magnitude >> form.fraction_bits
    fraction = magnitude & (1 << form.fraction_bits) - 1
    significand = fraction + ((exponent > 0).astype(np.int64) << form.fraction_bits)
    scale = np.maximum(exponent, 1) - form.bias - form.fraction_bits
    special = (exponent > form.top_exponent) & form.specials
    # special codes get any exponent that does not overflow, as their value is replaced
    decoded = np.ldexp(significand.astype(np.float64), np.where(special, 0, scale))
    decoded = np.where(special, np.where(fraction == 0, np.inf, np.nan), decoded)
    negative = integers >> form.bits - 1 & form.sign_bits == 1
    return np.where(negative, -decoded, decoded)


def rounded(
    x: npt.NDArray[np.floating],
    form: AnyFormat,
    rounding: Rounding = "nearest-even",
    rng: np.random.Generator | None = None,
) -> npt.NDArray[np.float32]:
    """Encode and decode each value, as float32; NaN stays NaN."""
    with np.errstate(invalid="ignore"):  # signalling NaN would warn
        doubles = x.astype(np.float64)
    is_nan = np.isnan(doubles)
    decoded = values(codes(np.where(is_nan, 0.0, doubles), form, rounding, rng), form)
    decoded = np.where(np.isinf(decoded), decoded, np.clip(decoded, *float32_range(form)))
    return np.where(is_nan, np.nan, decoded).astype(np.float32)


@lru_cache(maxsize=1024)
def float32_range(form: AnyFormat) -> tuple[float, float]:
    """The lowest and the largest finite value that the format and float32 both hold."""
    ends = np.clip(np.array([form.lowest, form.largest]), -FLOAT32_MAX, FLOAT32_MAX)
    if isinstance(form, TwosComplement):
        ends = np.trunc(ends / form.step) * form.step
    elif form.kind != "BIN":
        ends = values(codes(ends, form, "toward-zero"), form)
    as_float32 = ends.astype(np.float32)
    # the nearest float32 may lie outside the format; then the next one towards zero is the end
    too_large = np.abs(as_float32.astype(np.float64)) > np.abs(ends)
    as_float32 = np.where(too_large, np.nextafter(as_float32, np.float32(0)), as_float32)
    return float(as_float32[0]), float(as_float32[1])


def _magnitude_codes(
    magnitude: Doubles, negative: Bools, form: Format, rounding: Rounding, rng: np.random.Generator | None
) -> Longs:
    """Encode magnitudes without the sign bit; *negative* tells the directed roundings which way is up."""
    clipped = np.minimum(np.where(np.isnan(magnitude), 0.0, magnitude), form.largest)
    exponent = np.maximum(np.frexp(clipped)[1].astype(np.int64) - 1, 1 - form.bias)
    exponent = np.where(clipped == 0, 1 - form.bias, exponent)  # frexp gives zero the exponent 0
    position = np.ldexp(clipped, form.fraction_bits - exponent)
    below = np.floor(position)
    lower = ((exponent + form.bias - 1) << form.fraction_bits) + below.astype(np.int64)
    return np.asarray(lower + goes_up(rounding, lower, position - below, negative, rng))


def _twos_codes(x: Doubles, form: TwosComplement, rounding: Rounding) -> Longs:
    """Encode values in two's complement, half away from zero."""
    if rounding not in ("nearest-even", "nearest-away"):
        raise NumberError(f"{form} rounds half away from zero by its definition, not {rounding}; leave rounding out")
    half = 1 << form.bits - 1
    steps = np.ldexp(np.clip(x, form.lowest, form.largest), form.fraction_length)
    lower = np.floor(np.abs(steps))
    magnitude = lower + (np.abs(steps) - lower >= 0.5)
    return np.where(steps < 0, -magnitude, magnitude).astype(np.int64) & 2 * half - 1

"""Rounding and codes against two independent packages: gfloat for any format, ml_dtypes for those it has."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from gfloat import Domain, FormatInfo, RoundMode, decode_ndarray, round_ndarray

from tests.numbers.probes import assert_same_bits, hard_values
from weft_tune.numbers.arrays import code_table, encode, rounded
from weft_tune.numbers.format import EXP, FIXED, FLOAT, FLOAT16, Format

MODES = {
    "nearest-even": RoundMode.TiesToEven,
    "nearest-away": RoundMode.TiesToAway,
    "toward-zero": RoundMode.TowardZero,
    "up": RoundMode.TowardPositive,
    "down": RoundMode.TowardNegative,
}

FAMILY = [
    Format(1, exponent, fraction, bias)
    for exponent in range(6)
    for fraction in range(11)
    if exponent or fraction
    for bias in dict.fromkeys((0, max(0, (1 << exponent >> 1) - 1), -3, 4, 7, 60))
]
"""n_e 0 to 5, n_f 0 to 10, up to six biases each: FLOAT, FIXED and EXP."""
OTHERS = [
    *(FIXED(bits, bias) for bits in (2, 8, 16, 23, 24) for bias in (-100, -1, 100)),
    *(EXP(bits, bias) for bits in (7, 8, 9) for bias in (0, 63, 127, 128, 200, 255)),
    *(FLOAT(bits) for bits in range(9, 32) if bits != 16),
    *(Format(0, exponent, fraction, 3) for exponent in range(4) for fraction in (0, 1, 4, 12) if exponent or fraction),
    *(Format(1, exponent, fraction, 70) for exponent in (6, 7) for fraction in (0, 3, 11, 15, 21, 22)),
]


def gfloat_format(form: Format) -> FormatInfo:
    return FormatInfo(
        str(form), form.bits, form.fraction_bits + 1, bias=form.bias, is_signed=bool(form.sign_bits),
        domain=Domain.Extended if form.specials else Domain.Finite, has_nz=bool(form.sign_bits),
        num_high_nans=(1 << form.fraction_bits) - 1 if form.specials else 0, has_subnormals=True,
        is_twos_complement=False,
    )  # fmt: skip


def by_gfloat(x: npt.NDArray[np.float32], form: Format, rounding: str) -> npt.NDArray[np.float32]:
    """Of values that neither the lack of a sign nor float32's range keeps from being rounded there as here."""
    wide = x.astype(np.float64) if form.sign_bits else np.maximum(x.astype(np.float64), 0.0)
    with np.errstate(over="ignore"):
        return round_ndarray(gfloat_format(form), wide, MODES[rounding], sat=True).astype(np.float32)


def test_there_are_hundreds_of_formats():
    assert len(set(FAMILY)) >= 300


@pytest.mark.parametrize("exponent_bits", range(6))
@pytest.mark.parametrize("rounding", MODES)
def test_every_format_rounds_as_gfloat_does(rounding, exponent_bits):
    for form in FAMILY:
        if form.exponent_bits == exponent_bits:
            x = hard_values(form, abs(form.bias), codes=64)
            assert_same_bits(rounded(x, form, rounding=rounding), by_gfloat(x, form, rounding), x, form)


@pytest.mark.parametrize("form", OTHERS, ids=str)
def test_formats_at_the_edges_of_float32_round_as_gfloat_does(form):
    x = hard_values(form)
    wanted = by_gfloat(x, form, "nearest-even")
    held = np.isfinite(wanted)
    assert held.mean() > 0.5
    assert_same_bits(rounded(x, form)[held], wanted[held], x[held], form)
    assert np.isfinite(rounded(x, form)).all()


def test_half_precision_is_numpys_where_it_does_not_overflow():
    x = hard_values(FLOAT16, codes=4096)
    x = x[np.abs(x) < 65520]
    assert_same_bits(rounded(x, FLOAT16), x.astype(np.float16).astype(np.float32), x, FLOAT16)
    assert rounded([65520.0, 1e9, -1e9, np.inf, -np.inf], FLOAT16).tolist() == [65504, 65504, -65504, np.inf, -np.inf]


@pytest.mark.parametrize("form", [*FAMILY[::7], FLOAT16], ids=str)
def test_code_tables_are_gfloats(form):
    codes = np.arange(1 << form.bits)
    np.testing.assert_array_equal(code_table(form), decode_ndarray(gfloat_format(form), codes))
    own = ~np.isnan(code_table(form))
    np.testing.assert_array_equal(encode(code_table(form)[own], form), codes[own])


COINCIDE = {
    "float4_e2m1fn": Format(1, 2, 1, 1),
    "float6_e2m3fn": Format(1, 2, 3, 1),
    "float6_e3m2fn": Format(1, 3, 2, 3),
}
"""Without infinities and NaN: the same formats."""
COINCIDE_BELOW = {
    "float8_e4m3fn": (Format(1, 4, 3, 7), 464.0),
    "float8_e4m3": (Format(1, 4, 3, 7), 248.0),
    "float8_e3m4": (Format(1, 3, 4, 3), 15.75),
    "float8_e5m2": (Format(1, 5, 2, 15), 61440.0),
    "float8_e4m3fnuz": (Format(1, 4, 3, 8), 248.0),
    "float8_e5m2fnuz": (Format(1, 5, 2, 16), 61440.0),
    "float8_e4m3b11fnuz": (Format(1, 4, 3, 11), 31.0),
    "bfloat16": (Format(1, 8, 7, 127), 3.38e38),
}
"""The same up to a magnitude, then they have infinities or NaN; fnuz has no minus zero."""


@pytest.mark.parametrize("name", COINCIDE)
def test_small_formats_round_as_in_ml_dtypes(name):
    form, x = COINCIDE[name], hard_values(COINCIDE[name], codes=2000)
    assert_same_bits(rounded(x, form), x.astype(getattr(ml_dtypes, name)).astype(np.float32), x, form)


@pytest.mark.parametrize("name", COINCIDE_BELOW)
def test_formats_with_infinities_round_as_in_ml_dtypes_below_them(name):
    form, limit = COINCIDE_BELOW[name]
    x = hard_values(form, codes=2000)
    x = x[np.abs(x) < limit]
    zero = np.float32(0)  # adding it drops the sign of minus zero
    wanted = x.astype(getattr(ml_dtypes, name)).astype(np.float32)
    found = rounded(x, form)
    assert_same_bits(*(((found + zero, wanted + zero)) if "uz" in name else (found, wanted)), x, form)

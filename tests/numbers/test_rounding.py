"""Rounded arrays: the compiled loops equal the formula, and the rules for what a format does not hold."""

from __future__ import annotations

from collections import Counter

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.jit import said_with_the_jit_off
from tests.numbers.probes import assert_same_bits, hard_values
from weft.base.errors import NumberError
from weft_tune.kernels import LOOPS
from weft_tune.numbers import plain
from weft_tune.numbers.arrays import code_table, decode, encode, fits_float32, loop_for, rounded
from weft_tune.numbers.format import (
    BIN,
    EXP,
    FIXED,
    FLOAT,
    FLOAT16,
    FLOAT32,
    Format,
    TwosComplement,
)
from weft_tune.numbers.plain import ROUNDINGS

NAN = float("nan")


def assert_loop_equals_formula(form, codes=128):
    x = np.append(hard_values(form, codes=codes), np.array([NAN, -NAN], np.float32))
    assert_same_bits(rounded(x, form), plain.rounded(x, form), x, form)


# Against the twin

BY_LOOP = {
    "fixed": (FIXED(2), FIXED(8, -3), FIXED(24), FIXED(24, 126), FIXED(9, -103)),
    "fine_fixed": (FIXED(25), FIXED(32), FIXED(30, -50)),
    "floating": (FLOAT(3), FLOAT(8), FLOAT(15), Format(1, 6, 10, 31), Format(1, 7, 1, 126)),
    "floating_or_infinite": (FLOAT16, Format(1, 4, 3, 7, True)),
    "power_of_two": (EXP(2), EXP(4), EXP(4, 4), EXP(8, 126), EXP(8, 127)),
    "scaled_floating": (Format(1, 5, 7, 160), Format(1, 5, 1, 140)),
    "scaled_power_of_two": (EXP(9, 200), EXP(9, 255), EXP(3, 150)),
    "by_bits": (FLOAT(17), FLOAT(31), EXP(9), Format(1, 5, 22, 15), Format(1, 5, 23, 15), Format(1, 6, 30, 31)),
    "twos": (TwosComplement(1, 0), TwosComplement(8, 5), TwosComplement(24, -9), TwosComplement(2, 100)),
    "sign": (BIN(), BIN(3), BIN(-5)),
    "unsigned_fixed": (Format(0, 0, 4, 1),),
    "unsigned_fine_fixed": (Format(0, 0, 30, 1),),
    "unsigned_floating": (Format(0, 3, 4, 3), Format(0, 5, 10, 15)),
    "unsigned_power_of_two": (Format(0, 3, 0, 3), Format(0, 3, 0, 2)),
    "unsigned_by_bits": (Format(0, 4, 12, 7),),
}
NO_LOOP = (
    TwosComplement(25, 3),
    FIXED(4, -120),
    Format(1, 9, 5, 200),
    Format(0, 3, 3, 7, True),
    Format(1, 11, 20, 1024),
)


@pytest.mark.parametrize("name", BY_LOOP)
def test_each_loop_equals_the_formula(name):
    for form in BY_LOOP[name]:
        loop = loop_for(form)
        assert loop is not None and loop.name == name, form
        assert_loop_equals_formula(form)


def test_no_loop_goes_untested():
    assert BY_LOOP.keys() == LOOPS.keys()


def test_each_compiled_loop_is_kept_in_a_file_of_its_own():
    assert [loop.__qualname__.partition("-")[0] for loop in LOOPS.values()] == list(LOOPS)


@pytest.mark.parametrize("form", NO_LOOP, ids=str)
def test_what_float32_cannot_do_is_done_in_doubles(form):
    assert loop_for(form) is None
    assert_loop_equals_formula(form)


@given(
    st.integers(0, 1), st.integers(0, 11), st.integers(0, 30), st.integers(-160, 260), st.booleans(), st.integers(0, 9)
)
def test_any_format_rounds_by_the_formula(sign, exponent, fraction, bias, specials, seed):
    try:
        form = Format(sign, exponent, fraction, bias, specials)
    except NumberError:
        return
    x = hard_values(form, seed, codes=40)
    assert_same_bits(rounded(x, form), plain.rounded(x, form), x, form)


@pytest.mark.parametrize("form", [FIXED(5, -1), EXP(4, 2), FLOAT(7), Format(0, 2, 3, 1), FLOAT(9, 20)], ids=str)
def test_the_formula_finds_the_nearest_of_all_values(form):
    x = hard_values(form).astype(np.float64)
    table, codes = code_table(form), np.arange(1 << form.bits)
    distance = np.abs(np.clip(x, form.lowest, form.largest)[:, None] - table)
    nearest = distance == distance.min(axis=1, keepdims=True)
    same_sign = np.signbit(table) == (np.signbit(x)[:, None] & bool(form.sign_bits))
    best = np.where(nearest & same_sign, codes % 2, 2)
    np.testing.assert_array_equal(encode(x, form), best.argmin(axis=1))


def test_the_loops_are_right_with_the_jit_off():
    assert said_with_the_jit_off("tests.numbers.test_rounding") == (0, "45 formats equal\n", "")


# What a format does not hold


def test_values_beyond_the_ends_become_the_ends_and_infinities_too():
    x = np.array([100.0, -100.0, np.inf, -np.inf], np.float32)
    assert rounded(x, FIXED(4)).tolist() == [1.75, -1.75, 1.75, -1.75]
    assert rounded(x, EXP(3)).tolist() == [4.0, -4.0, 4.0, -4.0]
    assert rounded(x, FLOAT(8)).tolist() == [96.0, -96.0, 480.0, -480.0]
    assert rounded(x, Format(0, 2, 2, 1)).tolist() == [7.0, 0.0, 7.0, 0.0]
    assert rounded(x, TwosComplement(4, 2)).tolist() == [1.75, -2.0, 1.75, -2.0]


EACH_KIND = (
    FIXED(4), FIXED(32), EXP(4), FLOAT(8), FLOAT16, FLOAT32, FLOAT(20), BIN(), TwosComplement(8, 3),
    TwosComplement(30, 3), Format(0, 3, 3, 3), EXP(9, 255),
)  # fmt: skip


@pytest.mark.parametrize("form", EACH_KIND, ids=str)
def test_nan_stays_nan(form):
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    assert np.isnan(rounded(bits.view(np.float32), form)).all()


def test_only_half_and_single_precision_keep_infinities():
    x = [np.inf, -np.inf, 1e6, 3.4e38]
    assert rounded(x, FLOAT16).tolist() == [np.inf, -np.inf, 65504.0, 65504.0]
    assert rounded(x, FLOAT32).tolist() == np.array(x, np.float32).tolist()
    largest = (2 - 2.0**-8) * 2.0**127  # FLOAT 17 goes on to 2^129, float32 does not
    assert rounded(x, FLOAT(17))[:2].tolist() == [largest, -largest]


def test_minus_zero_stays_where_there_is_a_sign():
    x = np.array([-0.0, -1e-9, 0.0, 1e-9], np.float32)
    for form in (FIXED(4), EXP(4), FLOAT(8), FLOAT16, FIXED(30, 0)):
        assert np.signbit(rounded(x, form)).tolist() == [True, True, False, False], form
    for form in (Format(0, 3, 3, 3), TwosComplement(4, 2)):
        assert not np.signbit(rounded(x, form)).any()


def test_a_single_bit_is_a_sign():
    assert rounded([0.0, -0.0, 5.0, -1e-9], BIN(1)).tolist() == [0.5, 0.5, 0.5, -0.5]
    assert encode([3.0, -3.0], BIN()).tolist() == [0, 1]
    assert decode(np.array([0, 1]), BIN(-2)).tolist() == [4.0, -4.0]


def test_without_fraction_bits_ties_go_to_the_even_code():
    form = EXP(4)  # codes 1 to 7 are 2^-2 to 2^4
    ties = 1.5 * 2.0 ** np.arange(-2, 4)
    assert encode(ties, form).tolist() == [2, 2, 4, 4, 6, 6]
    assert rounded(ties, form.with_bias(4)).tolist() == [0.25, 1.0, 1.0, 4.0, 4.0, 8.0]


def test_twos_complement_is_clamped_then_rounded_half_away_from_zero():
    x = [0.5, -0.5, 1.5, -1.5, 2.5, 7.6, -9.0, 0.49999997]
    assert rounded(x, TwosComplement(4, 0)).tolist() == [1, -1, 2, -2, 3, 7, -8, 0]
    assert encode([-1.0, -8.0, 7.0], TwosComplement(4, 0)).tolist() == [15, 8, 7]
    assert decode(np.array([15, 8, 7]), TwosComplement(4, 0)).tolist() == [-1, -8, 7]


def test_results_are_values_of_both_the_format_and_float32():
    assert rounded([1e9], FIXED(32)).tolist() == [2 - 2.0**-23]  # the largest, 2 - 2^-30, is no float32
    assert decode(encode([1e9], FIXED(32)), FIXED(32)).tolist() == [2 - 2.0**-30]
    assert rounded([-3e38, 3e38], TwosComplement(2, -127)).tolist() == [-(2.0**127), 2.0**127]
    assert rounded([-3e38, 3e38], TwosComplement(8, -140)).tolist() == [0, 0]
    assert rounded([-3e38], TwosComplement(24, -104)).tolist() == [-(2.0**127)]


# Other roundings


def test_the_other_roundings_by_hand():
    x, form = [0.3, -0.3, 0.375, -0.375], FIXED(4)
    assert rounded(x, form, rounding="toward-zero").tolist() == [0.25, -0.25, 0.25, -0.25]
    assert rounded(x, form, rounding="up").tolist() == [0.5, -0.25, 0.5, -0.25]
    assert rounded(x, form, rounding="down").tolist() == [0.25, -0.5, 0.25, -0.5]
    assert rounded([0.125, -0.125, 0.625], form, rounding="nearest-away").tolist() == [0.25, -0.25, 0.75]


def test_log_nearest_parts_at_the_square_root():
    x = [1.41, 1.42, 2.82, 2.84, 0.176, 0.177]  # EXP 4 begins at 1/4
    assert rounded(x, EXP(4), rounding="log-nearest").tolist() == [1.0, 2.0, 2.0, 4.0, 0.0, 0.25]
    with pytest.raises(NumberError, match="log-nearest rounding is for EXP formats; <1, 0, 3, 0> is FIXED"):
        rounded(x, FIXED(4), rounding="log-nearest")


def test_stochastic_rounding_is_right_on_average_and_repeats_with_its_seed():
    x = np.full(40_000, 0.3, np.float32)
    first = rounded(x, FIXED(4), rounding="stochastic", rng=np.random.default_rng(1))
    again = rounded(x, FIXED(4), rounding="stochastic", rng=np.random.default_rng(1))
    np.testing.assert_array_equal(first, again)
    assert Counter(first.tolist()).keys() == {0.25, 0.5}
    assert abs(first.mean() - 0.3) < 0.003
    with pytest.raises(NumberError, match=r"rng=numpy.random.default_rng\(seed\)"):
        rounded(x, FIXED(4), rounding="stochastic")


def test_a_rounding_nobody_knows_is_named():
    with pytest.raises(NumberError, match="unknown rounding 'nearest'; did you mean log-nearest or nearest-even"):
        rounded([1.0], FIXED(4), rounding="nearest")
    with pytest.raises(NumberError, match="TWOS 4 0 rounds half away from zero by its definition, not up"):
        rounded([1.0], TwosComplement(4, 0), rounding="up")


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("form", [FIXED(5), EXP(4), FLOAT(7), Format(0, 2, 3, 1)], ids=str)
def test_rounding_twice_changes_nothing(form, rounding):
    if rounding == "log-nearest" and form.kind != "EXP":
        return
    rng = np.random.default_rng(0)
    once = rounded(hard_values(form), form, rounding=rounding, rng=rng)
    np.testing.assert_array_equal(rounded(once, form, rounding=rounding, rng=rng), once)


# Arrays of every kind


@pytest.mark.parametrize("form", [FIXED(8), EXP(9, 255), FLOAT(8), FLOAT32, TwosComplement(28, 20)], ids=str)
def test_in_place_into_another_and_from_anywhere_give_the_same(form):
    x = np.random.default_rng(0).standard_normal((130, 300), np.float32)
    wanted = rounded(x, form)
    assert wanted.shape == x.shape and not np.may_share_memory(wanted, x)
    np.testing.assert_array_equal(rounded(x[:, ::-1], form), wanted[:, ::-1])
    np.testing.assert_array_equal(rounded(x.T, form), wanted.T)
    np.testing.assert_array_equal(rounded(x.astype(np.float64), form), wanted)
    other = np.empty_like(x)
    assert rounded(x, form, out=other) is other
    np.testing.assert_array_equal(other, wanted)
    sparse = np.zeros((130, 600), np.float32)
    rounded(x, form, out=sparse[:, ::2])
    np.testing.assert_array_equal(sparse[:, ::2], wanted)
    shifted = np.append(x.reshape(-1), np.float32(0))
    rounded(shifted[:-1], form, out=shifted[1:])
    np.testing.assert_array_equal(shifted[1:], wanted.reshape(-1))
    assert rounded(x, form, out=x) is x
    np.testing.assert_array_equal(x, wanted)


def test_bytes_that_may_not_be_written_or_are_not_aligned_are_rounded_too():
    x = np.linspace(-2, 2, 101, dtype=np.float32)
    frozen = np.frombuffer(x.tobytes(), np.float32)
    odd = np.frombuffer(b"-" + x.tobytes(), np.uint8)[1:].view(np.float32)
    assert not frozen.flags.writeable and not odd.flags.aligned
    for values in (frozen, odd, x.astype(">f4")):
        np.testing.assert_array_equal(rounded(values, FLOAT(8)), rounded(x, FLOAT(8)))
    with pytest.raises(NumberError, match="out is read-only"):
        rounded(x, FLOAT(8), out=frozen)


def test_other_types_are_taken_as_they_are_or_refused():
    for kind in (np.int8, np.uint16, np.int64, np.float16, np.bool_):
        assert rounded(np.array([0, 1], kind), FIXED(4)).tolist() == [0.0, 1.0]
    assert rounded(1.3, FIXED(4)).shape == ()
    assert rounded([], FIXED(4)).shape == (0,)
    assert rounded(np.array([1 + 2.0**-30]), Format(1, 0, 1, 0), rounding="up").tolist() == [1.0]
    assert rounded(np.array([0.125 + 2.0**-40]), FIXED(4)).tolist() == [0.25]  # as a float32 it would be a tie
    with pytest.raises(NumberError, match="values of type complex128 cannot be rounded"):
        rounded(np.array([1j]), FIXED(4))
    with pytest.raises(NumberError, match=r"out is float64\[3\]; it must be float32\[3\]"):
        rounded(np.zeros(3, np.float32), FIXED(4), out=np.zeros(3))


# Codes


@pytest.mark.parametrize("form", [FIXED(2), FIXED(12, 3), EXP(5), FLOAT(8), FLOAT16, BIN(), TwosComplement(7, 9),
                                  Format(0, 3, 2, 1), Format(0, 0, 4, 0)], ids=str)  # fmt: skip
def test_every_code_has_a_value_and_every_value_its_code(form):
    codes = np.arange(1 << form.bits)
    values = decode(codes, form)
    own = ~np.isnan(values)
    np.testing.assert_array_equal(encode(values[own], form), codes[own])
    assert values.dtype == np.float32
    assert np.nanmax(values[np.isfinite(values)]) == form.largest
    assert np.nanmin(values[np.isfinite(values)]) == form.lowest


def test_codes_come_in_the_smallest_type():
    for bits, kind in ((2, np.uint8), (8, np.uint8), (9, np.uint16), (16, np.uint16), (17, np.uint32), (32, np.uint32)):
        assert encode([0.5], FIXED(bits)).dtype == kind
    assert encode([0.5], Format(1, 11, 30, 1026)).dtype == np.uint64


@pytest.mark.parametrize(
    "form", [FIXED(32, 4), FLOAT32, FLOAT(24), Format(1, 11, 40, 1024), TwosComplement(32, 8)], ids=str
)
def test_wide_codes_come_back(form):
    x = hard_values(form)
    x = x[np.isfinite(x) & (np.abs(x) < min(form.largest, 1e38))]
    once = decode(encode(x, form), form)
    np.testing.assert_array_equal(decode(encode(once, form), form), once)
    np.testing.assert_array_equal(once.astype(np.float32), rounded(x, form))
    assert (once.dtype == np.float32) == fits_float32(form)


def test_codes_of_infinities_and_nan():
    assert [hex(code) for code in encode([np.inf, -np.inf, NAN], FLOAT16)] == ["0x7c00", "0xfc00", "0x7e00"]
    assert np.isnan(decode(np.array([0x7E00]), FLOAT16)).all()
    with pytest.raises(NumberError, match=r"2 of 3 values are NaN, and <1, 0, 3, 0> has no code for it; replace them"):
        encode([NAN, 1.0, NAN], FIXED(4))


def test_what_is_no_code_is_refused():
    with pytest.raises(NumberError, match="codes of <1, 0, 3, 0> are 0 to 15, not 3 to 16"):
        decode(np.array([3, 16]), FIXED(4))
    with pytest.raises(NumberError, match="codes are whole numbers, not float64"):
        decode(np.array([1.0]), FIXED(4))
    with pytest.raises(NumberError, match=r"2\^17 codes; tables are made up to 16 bits"):
        code_table(FIXED(17))


def main() -> None:
    assert numba.config.DISABLE_JIT
    forms = [form for several in BY_LOOP.values() for form in several]
    for form in forms:
        with np.errstate(all="ignore"):
            assert_loop_equals_formula(form, codes=8)
    print(f"{len(forms)} formats equal")  # noqa: T201 - read by the test


if __name__ == "__main__":
    main()

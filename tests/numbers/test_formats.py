"""Formats, how they are written, and configurations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.base.errors import NumberError
from weft_tune.numbers.arrays import code_table
from weft_tune.numbers.configuration import Configuration, parse_configuration, read_configuration, write_configuration
from weft_tune.numbers.format import (
    BIN,
    EXP,
    FIXED,
    FLOAT,
    FLOAT16,
    FLOAT32,
    Format,
    TwosComplement,
    label,
    parse_format,
    spell,
)


def test_the_formats_that_the_chapter_names():
    assert (str(FLOAT32), str(FLOAT16)) == ("<1, 8, 23, 127>", "<1, 5, 10, 15>")
    assert (str(EXP(8)), str(EXP(6)), str(EXP(8, 127))) == ("<1, 7, 0, 63>", "<1, 5, 0, 15>", "<1, 7, 0, 127>")
    assert (str(FIXED(15, -3)), str(FIXED(16)), str(BIN())) == ("<1, 0, 14, -3>", "<1, 0, 15, 0>", "<1, 0, 0, 0>")


def test_ranges_and_steps():
    assert (FIXED(4).step, FIXED(4).largest, FIXED(4).lowest) == (0.25, 1.75, -1.75)
    assert (EXP(4).smallest, EXP(4).largest) == (0.25, 16.0)
    assert (FLOAT16.largest, FLOAT16.smallest) == (65504.0, 2.0**-24)
    assert FLOAT32.largest == 3.4028234663852886e38
    assert (FLOAT(8).largest, BIN(2).largest, Format(0, 0, 3, 0).lowest) == (480.0, 0.25, 0.0)
    assert (TwosComplement(8, 5).largest, TwosComplement(8, 5).lowest) == (127 / 32, -4.0)


def test_two_bits_are_three_values_whatever_the_type():
    assert set(code_table(FIXED(2, 3))) == set(code_table(EXP(2, 4))) == {0.0, 2.0**-3, -(2.0**-3)}


@pytest.mark.parametrize("bits", range(3, 33))
def test_a_float_of_any_width_has_that_width(bits):
    form = FLOAT(bits)
    assert (form.bits, form.kind) == (bits, "FLOAT")
    assert form.specials == (bits in (16, 32))


def test_kinds():
    assert [form.kind for form in (FLOAT(8), FIXED(8), EXP(8), BIN(), TwosComplement(8, 1))] == [
        "FLOAT", "FIXED", "EXP", "BIN", "TWOS",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FIXED(1), "FIXED 1: must have 2 to 32 bits; for one bit use BIN"),
        (lambda: EXP(10), "EXP 10: must have 2 to 9 bits"),
        (lambda: FLOAT(2), "FLOAT 2: must have 3 to 32 bits"),
        (lambda: Format(0, 0, 0, 0), "no bit that tells two values apart"),
        (lambda: Format(2, 1, 1, 1), "sign_bits = 2 must be a whole number from 0 to 1"),
        (lambda: Format(1, 1, True, 1), "fraction_bits = True must be a whole number"),
        (lambda: Format(1, 1, 1, 1, True), "no room for infinities and NaN"),
        (lambda: Format(1, 11, 4, 1000), r"reaches from 2\^-1003 to 2\^1048; doubles do not; move the bias"),
        (lambda: Format(1, 0, 40, 1100), r"reaches from 2\^-1139 to 2\^-1099"),
        (lambda: TwosComplement(33, 1), "TWOS bits = 33 must be a whole number from 1 to 32"),
        (lambda: TwosComplement(8, 1.5), "TWOS fraction_length = 1.5 must be a whole number"),
    ],
)
def test_what_is_no_format_is_refused(make, message):
    with pytest.raises(NumberError, match=message):
        make()


FORMATS = st.one_of(
    st.builds(FLOAT, st.integers(3, 32), st.none() | st.integers(-20, 200)),
    st.builds(FIXED, st.integers(2, 32), st.integers(-99, 99)),
    st.builds(EXP, st.integers(2, 9), st.none() | st.integers(-99, 99)),
    st.builds(BIN, st.integers(-99, 99)),
    st.builds(Format, st.just(1), st.integers(0, 8), st.integers(0, 30), st.integers(-9, 200)),
    st.builds(Format, st.just(0), st.integers(1, 8), st.integers(0, 30), st.integers(-9, 200)),
    st.builds(Format, st.integers(0, 1), st.integers(2, 8), st.integers(1, 23), st.integers(-9, 200), st.just(True)),
    st.builds(TwosComplement, st.integers(1, 32), st.integers(-99, 99)),
)


@given(FORMATS)
def test_what_is_spelt_is_read_back(form):
    assert parse_format(spell(form)) == form
    assert parse_format(spell(form).lower()) == form
    assert label(form).endswith(str(form.bits))


def test_labels():
    assert [label(form) for form in (FIXED(4), EXP(3), FLOAT16, BIN())] == ["I4", "E3", "F16", "B1"]
    assert (label(FIXED(4, -3), bias=True), label(FLOAT16, bias=True)) == ("I4(-3)", "F16")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "FIXED",
        "FIXED x",
        "FLOAT 8 1 2",
        "CUSTOM 1 2 3",
        "CUSTOM IEEE",
        "FLOAT 8 IEEE",
        "INT 8",
        "TWOS 8",
        "BIN 1 2",
    ],
)
def test_what_is_no_spelling_is_refused(text):
    with pytest.raises(NumberError, match=r"FLOAT bits \[bias\], FIXED bits"):
        parse_format(text)


def test_the_chapters_file(tmp_path):
    lines = ("// config.txt", "conv1.weight EXP 8", "conv1.input   EXP 6", "", "fc1.weight FIXED 15 -3  # by layer")
    text = "\n".join([*lines, "fc1.input FLOAT 32"])
    found = parse_configuration(text)
    assert dict(found) == {"conv1.input": EXP(6), "conv1.weight": EXP(8), "fc1.weight": FIXED(15, -3)}
    assert found["fc1.input"] == found["never named"] == FLOAT32
    write_configuration(tmp_path / "opt_conf.txt", found)
    assert read_configuration(tmp_path / "opt_conf.txt") == found
    assert found.text == "conv1.input EXP 6 15\nconv1.weight EXP 8 63\nfc1.weight FIXED 15 -3\n"


def test_configurations_are_equal_by_what_they_say():
    assert Configuration({"a": FIXED(4), "b": FLOAT32}) == Configuration({"a": FIXED(4)})
    assert hash(Configuration({"a": FIXED(4), "b": EXP(4)})) == hash(Configuration({"b": EXP(4), "a": FIXED(4)}))
    assert Configuration({"a": FIXED(4)}) != Configuration({"a": FIXED(5)})
    assert len(Configuration({"a": FIXED(4), "b": FLOAT32})) == 1


def test_a_wrong_line_is_named():
    with pytest.raises(NumberError, match=r"opt\.txt:2: FIXED 40: must have 2 to 32 bits"):
        parse_configuration("a FIXED 4\nb FIXED 40\n", "opt.txt")
    with pytest.raises(NumberError, match="configuration:2: 'a' has a format already"):
        parse_configuration("a FIXED 4\na EXP 4\n")


def test_files_that_cannot_be_read_or_written_are_named(tmp_path):
    with pytest.raises(NumberError, match=r"none\.txt: cannot read the configuration"):
        read_configuration(tmp_path / "none.txt")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(NumberError, match=r"bytes\.txt: cannot read the configuration"):
        read_configuration(tmp_path / "bytes.txt")
    with pytest.raises(NumberError, match="cannot write"):
        write_configuration(tmp_path, Configuration({}))

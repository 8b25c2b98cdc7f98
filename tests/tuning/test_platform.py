"""Which formats a platform has, and the nearest of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.base.errors import TuneError
from weft_tune.numbers.format import (
    BIN,
    EXP,
    FIXED,
    FLOAT,
    FLOAT16,
    FLOAT32,
    Format,
)
from weft_tune.platform import Unbiased, as_wide, load_platform, parse_platform, platforms


def spelled(choices: tuple[Unbiased, ...]) -> list[str]:
    return [str(choice) for choice in choices]


def test_the_fpga_has_the_chapters_formats():
    fpga = load_platform("fpga")
    assert fpga.weight == fpga.activation
    assert len(fpga.weight) == 41
    assert spelled(fpga.weight)[:4] == ["FLOAT 16", "FLOAT 32", "FIXED 2", "FIXED 3"]
    assert spelled(fpga.weight)[-1] == "EXP 9"


def test_stripes_keeps_weights_at_sixteen_bits():
    stripes = load_platform("stripes")
    assert spelled(stripes.choices("weight")) == ["FIXED 16"]
    assert spelled(stripes.choices("input")) == [f"FIXED {bits}" for bits in range(2, 17)]


@pytest.mark.parametrize("name", platforms())
def test_every_shipped_platform_can_be_read(name):
    platform = load_platform(name)
    assert platform.name == name and platform.source
    for choice in platform.weight + platform.activation:
        assert choice.at(3).bits == choice.bits


def test_a_file_of_the_users(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nformats = ["bin", "EXP 4", "EXP 3..4"]\n[weight]\nformats = ["FLOAT 8"]\n', "utf-8")
    mine = load_platform(str(path))
    assert spelled(mine.weight) == ["FLOAT 8"]
    assert spelled(mine.activation) == ["EXP 3", "EXP 4", "BIN"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"formats": ["FIXED 8"]}, "name is missing"),
        ({"name": "x"}, "no formats for weights"),
        ({"name": "x", "weight": {"formats": ["FIXED 8"]}}, "no formats for activations"),
        ({"name": "x", "format": ["FIXED 8"]}, "unknown key 'format'; did you mean 'formats'"),
        ({"name": "x", "weight": {"bits": 8}}, "weight.formats is missing|unknown key 'weight.bits'"),
        ({"name": "x", "formats": []}, "formats = "),
        ({"name": "x", "formats": ["FIXED 1"]}, "FIXED 1: must have 2 to 32 bits"),
        ({"name": "x", "formats": ["EXP 2..10"]}, "EXP 10: must have 2 to 9 bits"),
        ({"name": "x", "formats": ["FIXED 8..4"]}, "write FIXED 4..8"),
        ({"name": "x", "formats": ["FIXED 2..99999999"]}, "so many widths"),
        ({"name": "x", "formats": [f"FIXED 2..{10**20}"]}, "no type is so wide"),
        ({"name": "x", "formats": ["FIXED " + "9" * 5000]}, "no type is so wide"),
        ({"name": "x", "formats": ["INT 8"]}, "'INT 8': must be FLOAT, FIXED or EXP"),
        ({"name": "x", "formats": ["FIXED 8 3"]}, "'FIXED 8 3': must be"),
        ({"name": "x", "formats": [""]}, "must be FLOAT"),
        ({"name": "x", "formats": ["FIXED 2..4..8"]}, "must be FLOAT"),
    ],
)
def test_what_is_wrong_is_named(raw, message):
    with pytest.raises(TuneError, match=message):
        parse_platform(raw, "x.toml")


def test_unknown_names_and_unreadable_files(tmp_path: Path):
    with pytest.raises(TuneError, match="did you mean stripes"):
        load_platform("stripe")
    with pytest.raises(TuneError, match="cannot read the platform file"):
        load_platform(str(tmp_path / "none.toml"))
    (tmp_path / "broken.toml").write_text("name = ", "utf-8")
    with pytest.raises(TuneError, match="not a TOML file"):
        load_platform(str(tmp_path / "broken.toml"))


@pytest.mark.parametrize(
    ("platform", "kind", "bits", "expected"),
    [
        ("fpga", "FIXED", 8, "FIXED 8"),
        ("fpga", "FLOAT", 24, "FIXED 24"),
        ("int8", "FIXED", 4, "FIXED 8"),
        ("int8", "FLOAT", 16, "FIXED 16"),
        ("int8", "FLOAT", 32, "FLOAT 32"),
        ("small-floats", "FIXED", 2, "FLOAT 4"),
        ("small-floats", "FIXED", 16, "FLOAT 16"),
        ("stripes", "FLOAT", 32, "FIXED 16"),
    ],
)
def test_the_nearest_format_that_is_not_narrower(platform, kind, bits, expected):
    assert str(as_wide(load_platform(platform).activation, kind, bits)) == expected


@pytest.mark.parametrize(
    ("choice", "scale", "expected"),
    [
        (Unbiased("FIXED", 8), -3, FIXED(8, -3)),
        (Unbiased("BIN", 1), 2, BIN(2)),
        (Unbiased("EXP", 3), 0, EXP(3, 3)),
        (Unbiased("EXP", 8), -2, EXP(8, 125)),
        (Unbiased("FLOAT", 16), 5, FLOAT16),
        (Unbiased("FLOAT", 32), 5, FLOAT32),
        (Unbiased("FLOAT", 4), 0, FLOAT(4, 3)),
        (Unbiased("FLOAT", 8), -1, FLOAT(8, 14)),
    ],
)
def test_scales_become_biases(choice: Unbiased, scale: int, expected: Format):
    form = choice.at(scale)
    assert form == expected
    if choice.biased:
        assert 2.0**-scale <= form.largest < 2.0 ** (1 - scale)
        assert (form.largest == 2.0**-scale) == choice.power_topped

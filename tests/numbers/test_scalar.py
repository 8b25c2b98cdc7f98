"""Single numbers: storing, assigning and computing as in Table III.1."""

from __future__ import annotations

import math

import pytest

from weft.base.errors import NumberError
from weft_tune.numbers.configuration import parse_configuration
from weft_tune.numbers.format import EXP, FIXED, FLOAT, FLOAT16, FLOAT32
from weft_tune.numbers.scalar import Number, wider
from weft_tune.numbers.twos_complement import TwosComplement


def test_a_value_is_stored_in_its_format():
    number = Number(0.3, FIXED(4))
    assert (float(number), number.form, number.code) == (0.25, FIXED(4), 1)
    assert float(Number(-100, FIXED(4))) == -1.75
    assert repr(number) == "Number(0.25, <1, 0, 3, 0>)"


def test_a_name_gives_the_format_and_an_unknown_one_single_precision():
    configuration = parse_configuration("conv1.weight EXP 8 127\nfc1.weight FIXED 15 -3\n")
    assert Number.named("conv1.weight", configuration).form == EXP(8, 127)
    assert Number.named("fc1.weight", configuration, 1.0).form == FIXED(15, -3)
    assert Number.named("fc1.input", configuration, 0.1).form == FLOAT32


def test_assignment_copies_value_and_format_and_native_values_are_single_precision():
    assert (Number(Number(0.3, EXP(4))).form, float(Number(Number(0.3, EXP(4))))) == (EXP(4), 0.25)
    assert Number(3).form == Number(3.5).form == FLOAT32
    assert float(Number(Number(0.3, FIXED(8)), FIXED(4))) == 0.25


def test_results_are_computed_in_single_precision_and_stored_in_the_wider_format():
    assert float(Number(1.5, FIXED(4)) + Number(1.5, FIXED(4))) == 1.75  # saturates in its own format
    total = Number(1.5, FIXED(4)) + Number(1.0, FIXED(8))
    assert (total.form, float(total)) == (FIXED(8), 2 - 2.0**-6)
    product = Number(0.75, FIXED(4)) * Number(4.0, EXP(4))
    assert (product.form, float(product)) == (EXP(4), 2.0)  # 3 is a tie of codes 4 and 5
    assert (Number(0.75, FIXED(4)) * Number(4.0, FLOAT(8))).form == FLOAT(8)


def test_native_operands_count_as_single_precision_on_either_side():
    for result in (Number(0.25, FIXED(4)) + 0.1, 0.1 + Number(0.25, FIXED(4)), Number(0.25, FIXED(4)) * 2):
        assert result.form == FLOAT32
    assert 2 * Number(0.25, FIXED(4)) == 0.5
    assert float(Number(0.1) + Number(0.2)) == pytest.approx(0.3, rel=1e-7)


def test_the_wider_format():
    assert wider(EXP(9), FLOAT(8)) == wider(FLOAT(8), EXP(9)) == FLOAT(8)
    assert wider(EXP(8), FIXED(16)) == EXP(8)
    assert wider(FIXED(8), FIXED(8, -3)) == FIXED(8, -3)  # the same range, but it saturates later
    assert wider(FLOAT16, FLOAT32) == FLOAT32
    assert wider(TwosComplement(8, 0), FIXED(8)) == TwosComplement(8, 0)
    assert wider(FIXED(8, 1), FIXED(8, 1)) == FIXED(8, 1)


def test_a_sum_that_overflows_is_infinite_in_single_precision_only():
    assert math.isinf(float(Number(3e38) + Number(3e38)))
    assert float(Number(60000, FLOAT16) + Number(60000, FLOAT16)) == 65504.0
    assert float(Number(1e300)) == math.inf


def test_conversions():
    assert (int(Number(-1.75, FIXED(4))), int(Number(1.75, FIXED(4)))) == (-1, 1)
    with pytest.raises(NumberError, match=r"Number\(inf, <1, 8, 23, 127>\) is no whole number"):
        int(Number(math.inf))
    assert Number(1, FIXED(4)) == Number(1.0, EXP(4)) == 1
    assert len({Number(1, FIXED(4)), Number(1.0, EXP(4))}) == 1

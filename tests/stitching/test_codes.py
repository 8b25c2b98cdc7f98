"""Weights as codes of few bits: packed as ``weft tune`` packs them."""

from __future__ import annotations

import numpy as np
import pytest

from weft_stitch.cost import MOST_BITS, ROW_CODES, encode, pack_codes
from weft_tune.numbers.arrays import pack


@pytest.mark.parametrize("bits", range(1, MOST_BITS + 1))
@pytest.mark.parametrize("count", [1, 7, 8, 1001])
def test_codes_are_packed_as_those_of_tuned_models(bits: int, count: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, count)
    rows, wanted = pack_codes(codes, bits), pack(codes, bits)
    assert rows.shape == (-(-count // ROW_CODES), bits) and rows.dtype == np.uint8
    np.testing.assert_array_equal(rows.reshape(-1)[: wanted.size], wanted)
    assert not rows.reshape(-1)[wanted.size :].any()


def test_an_array_of_few_numbers_takes_the_bits_that_tell_them_apart() -> None:
    array = np.random.default_rng(0).choice(np.float32([-1, 0, 0.5, 2, 3]), (40, 50))
    found = encode(array)
    assert found is not None and found.bits == 3 and found.octets.shape == (250, 3) and len(found.table) == 5
    assert encode(np.random.default_rng(0).random((40, 50), np.float32)) is None

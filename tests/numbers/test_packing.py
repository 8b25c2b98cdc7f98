"""Codes packed into bytes and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.base.errors import NumberError
from weft_tune.numbers.arrays import code_type, encode, pack, packed_bytes, unpack
from weft_tune.numbers.format import FIXED


def packed_by_integers(codes: list[int], bits: int) -> bytes:
    """One large integer, the first code lowest."""
    whole = sum(code << at * bits for at, code in enumerate(codes))
    return whole.to_bytes((len(codes) * bits + 7) // 8, "little")


@given(st.integers(1, 32).flatmap(lambda bits: st.tuples(st.just(bits), st.lists(st.integers(0, 2**bits - 1)))))
def test_packing_is_one_large_integer_and_comes_back(case):
    bits, codes = case
    data = pack(np.array(codes, np.uint64), bits)
    assert data.tobytes() == packed_by_integers(codes, bits)
    assert data.size == packed_bytes(len(codes), bits)
    back = unpack(data.tobytes(), bits, len(codes))
    assert back.tolist() == codes and back.dtype == code_type(bits)


@pytest.mark.parametrize("bits", range(1, 33))
def test_every_width_comes_back_from_a_longer_stream(bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, 1001)
    data = np.append(pack(codes, bits), np.uint8(255))
    np.testing.assert_array_equal(unpack(data, bits, codes.size), codes)
    np.testing.assert_array_equal(unpack(memoryview(data), bits, 7), codes[:7])


def test_the_order_of_bits_by_hand():
    assert pack(np.array([0b101, 0b110, 0b011]), 3).tolist() == [0b11110101, 0b0]
    assert pack(np.array([[1, 2], [3, 0]]), 4).tolist() == [0x21, 0x03]
    assert pack(np.array([0x12345678]), 32).tobytes() == b"\x78\x56\x34\x12"


def test_three_bits_a_weight_are_three_eighths_of_a_byte():
    weights = np.random.default_rng(0).standard_normal(8000)
    assert pack(encode(weights, FIXED(3)), 3).nbytes == 3000


def test_what_cannot_be_packed_or_unpacked_is_refused():
    for bits in (0, 33, 2.5):
        with pytest.raises(NumberError, match="bits cannot be packed; from 1 to 32 they can"):
            pack(np.array([1]), bits)
    with pytest.raises(NumberError, match="codes of 3 bits are 0 to 7, not 1 to 8"):
        pack(np.array([1, 8]), 3)
    with pytest.raises(NumberError, match="not -1 to 2"):
        pack(np.array([2, -1]), 3)
    with pytest.raises(NumberError, match="not float64; encode the values first"):
        pack(np.array([0.5]), 3)
    with pytest.raises(NumberError, match="9 codes of 3 bits do not lie in 3 bytes"):
        unpack(b"abc", 3, 9)
    with pytest.raises(NumberError, match="-1 codes"):
        unpack(b"abc", 3, -1)
    with pytest.raises(NumberError, match="a packed stream is bytes, not int64"):
        unpack(np.array([1]), 3, 1)

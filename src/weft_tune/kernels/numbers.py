"""Values rounded to a number format, and codes packed into bytes: compiled loops over flat arrays.

Twins: ``weft_tune.numbers.plain`` rounds by the formula, the tests pack with Python's integers. Rounding is to nearest,
ties to the even code. Formulas are as short as their kind of format allows, because memory is hardly slower than they
are, and none has a branch. *out* may be *x* itself. NaN stays NaN.

Adding M and taking it away again rounds a to multiples of u, if u is the distance of neighbours at M. For M to suit
every a, M is a itself times a power of two: then M / u is even at each tie, so ties stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.kernels.compiling import loop as kept
from weft_tune.kernels.simd import (
    WIDTH,
    bits_of,
    choose,
    compiled,
    greater,
    lesser,
    multiply_add,
    value_of,
    with_sign,
)

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]


def fixed(value: Any, largest: Any, magic: Any) -> Any:
    """One step for all values, at most 2^23 of them: *magic* is 2^23 steps."""
    a = lesser(abs(value), largest)
    return with_sign((a + magic) - magic, value)


def fine_fixed(value: Any, largest: Any, magic: Any) -> Any:
    """More than 2^23 steps: from *magic* on, float32 has no finer ones."""
    a = lesser(abs(value), largest)
    return with_sign(choose(a >= magic, a, (a + magic) - magic), value)


def floating(value: Any, largest: Any, least: Any, power: Any) -> Any:
    """A step for each exponent, 1 to 10 fraction bits: *power* is 2^(23 - n_f), *least* 1.5 times the smallest normal.

    M - a has the exponent of M, but for a hardly above a power of two, where the finer step finds that power, too.
    """
    a = lesser(abs(value), largest)
    q = greater(a, least)
    return with_sign(multiply_add(q, power, multiply_add(-q, power, a)), value)


def floating_or_infinite(value: Any, largest: Any, least: Any, power: Any, infinity: Any) -> Any:
    """As ``floating``, but infinities stay what they are."""
    return choose(abs(value) == infinity, value, floating(value, largest, least, power))


def power_of_two(value: Any, largest: Any, least: Any, power: Any, half: Any) -> Any:
    """No fraction bits: as ``floating``, but M / u gets the parity of the exponent, so that the even code wins ties.

    *half* is 2^22 where odd exponents have even codes: it flips the parity for those a whose fraction is a half.
    """
    a = lesser(abs(value), largest)
    bits = bits_of(greater(a, least))
    q = value_of(bits + ((bits + half) >> 23))
    return with_sign(multiply_add(q, power, multiply_add(-q, power, a)), value)


def by_bits(
    value: Any, largest: Any, least: Any, magic: Any, shift: Any, half: Any, odd: Any, one: Any, mask: Any
) -> Any:
    """Any exponents and fraction bits: the lower *shift* bits are rounded away, below *least* as in ``fixed``.

    *half* is one less than half of what is rounded away, *odd* 1 if codes whose last bit is set are the even ones,
    *one* 0 if nothing is rounded away. NaN goes the other way, where it stays.
    """
    a = lesser(abs(value), largest)
    bits = bits_of(a)
    near = value_of((bits + half + (((bits >> shift) ^ odd) & one)) & mask)
    return with_sign(choose(a >= least, near, (a + magic) - magic), value)


def twos(value: Any, lowest: Any, largest: Any, magic: Any, step: Any, half: Any, zero: Any) -> Any:
    """Two's complement up to 24 bits: clamped, then half away from zero; there is no minus zero."""
    held = lesser(greater(value, lowest), largest)
    a = abs(held)
    even = (a + magic) - magic
    return with_sign(choose(a - even >= half, even + step, even), held) + zero


def sign(value: Any, level: Any, zero: Any) -> Any:
    """Plus or minus *level*; NaN stays."""
    return choose(value < zero, -level, choose(value >= zero, level, value))


def unsigned(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The formula for formats without a sign: what is negative becomes zero first."""

    def clamped(value: Any, zero: Any, *constants: Any) -> Any:
        return formula(greater(value, zero), *constants)

    return clamped


def scaled(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The formula for formats that go on below float32's normal values: all is larger while it is rounded."""

    def enlarged(value: Any, larger: Any, smaller: Any, *constants: Any) -> Any:
        return formula(value * larger, *constants) * smaller

    return enlarged


def _loop(name: str, formula: Callable[..., Any]) -> Callable[..., None]:
    many, one = compiled(formula, WIDTH), compiled(formula, 1)

    def loop(x, out, constants):
        whole = x.size // WIDTH * WIDTH
        for at in range(0, whole, WIDTH):
            many(x, out, at, constants)
        for at in range(whole, x.size):
            one(x, out, at, constants)

    # Of this numba makes the name of a file. Under a common one, two processes that compile at once may swap loops.
    loop.__qualname__ = name
    return kept(loop)


_PLAIN = (fixed, fine_fixed, floating, floating_or_infinite, power_of_two, by_bits, twos, sign)
_UNSIGNED = (fixed, fine_fixed, floating, power_of_two, by_bits)
_SCALED = (floating, power_of_two)
_FORMULAS = {
    **{formula.__name__: formula for formula in _PLAIN},
    **{f"unsigned_{formula.__name__}": unsigned(formula) for formula in _UNSIGNED},
    **{f"scaled_{formula.__name__}": scaled(formula) for formula in _SCALED},
}
LOOPS = {name: _loop(name, formula) for name, formula in _FORMULAS.items()}
"""Name -> loop over (x, out, constants): float32 arrays, and the constants of the formula as a tuple.

Those of unsigned ones begin with a zero, those of scaled ones with the scale and its inverse.
"""


@kept
def pack_bits(codes: Words, bits: int, packed: Bytes) -> None:
    """Fill *packed*, (codes * bits + 7) // 8 bytes, lowest bits first."""
    held, waiting, at = np.uint64(0), 0, 0
    for code in codes:
        held |= np.uint64(code) << np.uint64(waiting)
        waiting += bits
        while waiting >= 8:
            packed[at] = held & np.uint64(255)
            held >>= np.uint64(8)
            waiting -= 8
            at += 1
    if waiting:
        packed[at] = held & np.uint64(255)


@kept
def unpack_bits(packed: Bytes, bits: int, codes: Words) -> None:
    """Fill *codes* from the beginning of *packed*."""
    held, waiting, at = np.uint64(0), 0, 0
    mask = np.uint64((1 << bits) - 1)
    for index in range(codes.size):
        while waiting < bits:
            held |= np.uint64(packed[at]) << np.uint64(waiting)
            waiting += 8
            at += 1
        codes[index] = held & mask
        held >>= np.uint64(bits)
        waiting -= bits

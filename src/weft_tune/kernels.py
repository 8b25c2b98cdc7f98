"""Values rounded to a number format, and codes packed into bytes: compiled loops over flat arrays.

Twins: ``weft_tune.numbers.plain`` rounds by the formula, the tests pack with Python's integers. Rounding is to nearest,
ties to the even code. Formulas are as short as their kind of format allows, because memory is hardly slower than they
are, and none has a branch: LLVM makes vector code of them. Comparisons are written so that NaN stays NaN.

Adding M and taking it away again rounds a to multiples of u, if u is the distance of neighbours at M. For M to suit
every a, M is a itself times a power of two: then M / u is even at each tie, so ties stay what they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable as formula

from weft.kernels.compiling import loop as kept

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]


@formula
def _clamp(value: Any, largest: Any) -> Any:
    """The magnitude of a value, at most *largest*."""
    a = np.float32(abs(value))
    return largest if a > largest else a


@formula
def _copy_sign(magnitude: Any, value: Any) -> Any:
    return np.float32(math.copysign(magnitude, value))


@formula
def _bits(a: Any) -> Any:
    return np.float32(a).view(np.uint32)


@formula
def _value(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@formula
def fixed(value: Any, largest: Any, magic: Any) -> Any:
    """One step for all values, at most 2^23 of them: *magic* is 2^23 steps."""
    return _copy_sign((_clamp(value, largest) + magic) - magic, value)


@formula
def fine_fixed(value: Any, largest: Any, magic: Any) -> Any:
    """More than 2^23 steps: from *magic* on, float32 has no finer ones."""
    a = _clamp(value, largest)
    return _copy_sign(a if a >= magic else (a + magic) - magic, value)


@formula
def floating(value: Any, largest: Any, least: Any, power: Any) -> Any:
    """A step for each exponent, 1 to 10 fraction bits: *power* is 2^(23 - n_f), *least* 1.5 times the smallest normal.

    M - a has the exponent of M, but for a hardly above a power of two, where the finer step finds that power, too.
    """
    a = _clamp(value, largest)
    m = (least if a < least else a) * power
    return _copy_sign(m + (a - m), value)


@formula
def floating_or_infinite(value: Any, largest: Any, least: Any, power: Any, infinity: Any) -> Any:
    """As ``floating``, but infinities stay what they are."""
    return value if abs(value) == infinity else floating(value, largest, least, power)


@formula
def power_of_two(value: Any, largest: Any, least: Any, power: Any, half: Any) -> Any:
    """No fraction bits: as ``floating``, but M / u gets the parity of the exponent, so that the even code wins ties.

    *half* is 2^22 where odd exponents have even codes: it flips the parity for those a whose fraction is a half.
    """
    a = _clamp(value, largest)
    bits = _bits(least if a < least else a)
    m = _value(bits + (np.uint32(bits + half) >> np.uint32(23))) * power
    return _copy_sign(m + (a - m), value)


@formula
def by_bits(
    value: Any, largest: Any, least: Any, magic: Any, shift: Any, half: Any, odd: Any, one: Any, mask: Any
) -> Any:
    """Any exponents and fraction bits: the lower *shift* bits are rounded away, below *least* as in ``fixed``.

    *half* is one less than half of what is rounded away, *odd* 1 if codes whose last bit is set are the even ones,
    *one* 0 if nothing is rounded away. NaN goes the other way, where it stays.
    """
    a = _clamp(value, largest)
    bits = _bits(a)
    near = _value((bits + half + (((bits >> shift) ^ odd) & one)) & mask)
    return _copy_sign(near if a >= least else (a + magic) - magic, value)


@formula
def twos(value: Any, lowest: Any, largest: Any, magic: Any, step: Any, half: Any, zero: Any) -> Any:
    """Two's complement up to 24 bits: clamped, then half away from zero; there is no minus zero."""
    raised = lowest if value < lowest else value
    held = largest if raised > largest else raised
    a = np.float32(abs(held))
    even = (a + magic) - magic
    return _copy_sign(even + step if a - even >= half else even, held) + zero


@formula
def sign(value: Any, level: Any, zero: Any) -> Any:
    """Plus or minus *level*; NaN stays."""
    return -level if value < zero else (level if value >= zero else value)


def _loop(rounded: Callable[..., Any]) -> Callable[..., None]:
    def loop(x, out, constants):
        for at in range(x.size):
            out[at] = rounded(x[at], *constants)

    return loop


def _unsigned_loop(rounded: Callable[..., Any]) -> Callable[..., None]:
    """The loop for formats without a sign: negative values become zero first."""

    def loop(x, out, constants):
        zero = np.float32(0)
        for at in range(x.size):
            out[at] = rounded(zero if x[at] <= zero else x[at], *constants)

    return loop


def _scaled_loop(rounded: Callable[..., Any]) -> Callable[..., None]:
    """The loop for formats that reach below float32's normal values: values are scaled up while they are rounded."""

    def loop(x, out, constants):
        for at in range(x.size):
            out[at] = rounded(x[at] * constants[0], *constants[2:]) * constants[1]

    return loop


def _compile_loop(name: str, loop: Callable[..., None]) -> Callable[..., None]:
    # numba makes the name of its cache file of this. Two processes that compile at once may swap loops that share one.
    loop.__qualname__ = name
    return kept(loop)


_PLAIN = (fixed, fine_fixed, floating, floating_or_infinite, power_of_two, by_bits, twos, sign)
_LOOPS = {
    **{rounded.__name__: _loop(rounded) for rounded in _PLAIN},
    **{
        f"unsigned_{rounded.__name__}": _unsigned_loop(rounded)
        for rounded in (fixed, fine_fixed, floating, power_of_two, by_bits)
    },
    **{f"scaled_{rounded.__name__}": _scaled_loop(rounded) for rounded in (floating, power_of_two)},
}
LOOPS = {name: _compile_loop(name, loop) for name, loop in _LOOPS.items()}
"""Name -> loop over (x, out, constants): float32 arrays, and the constants of the formula as a tuple.

Those of scaled ones begin with the scale and its inverse. *out* may be *x* itself, which is several times slower:
LLVM makes no vector code where a loop may read what it wrote.
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

"""Values rounded to a number format, and codes packed into bytes: compiled loops over flat arrays.

Twins: ``weft_tune.numbers.plain`` rounds by the formula, the tests pack with Python's integers. Rounding is to nearest,
ties to the even code. There is a formula per kind of format, each as short as possible, because memory is hardly slower
than the arithmetic; none has a branch, so LLVM can vectorise it. Comparisons are written so that NaN stays NaN.

The trick: (a + M) - M in float32 rounds the magnitude a to multiples of u, the distance of neighbouring floats at M.
If the step is the same for all values, M is a constant (*magic*, 2^23 steps). If it depends on the exponent of a, M is
a times a power of two (*power*); then M / u is even at each tie, so ties still go to the even code.

Arguments of the formulas: largest: the largest magnitude of the format; least: the smallest magnitude of which M is
taken. All constants come from ``weft_tune.numbers.arrays``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable as formula

from weft.kernels.compiling import loop as compiled

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
    """The 32 bits of a float32 as an unsigned integer."""
    return np.float32(a).view(np.uint32)


@formula
def _value(bits: Any) -> Any:
    """The float32 with these 32 bits."""
    return np.uint32(bits).view(np.float32)


@formula
def fixed(value: Any, largest: Any, magic: Any) -> Any:
    """FIXED with up to 2^23 steps of one size; *magic* is 2^23 steps."""
    return _copy_sign((_clamp(value, largest) + magic) - magic, value)


@formula
def fine_fixed(value: Any, largest: Any, magic: Any) -> Any:
    """FIXED with more than 2^23 steps: values from *magic* on are multiples of a step already."""
    a = _clamp(value, largest)
    return _copy_sign(a if a >= magic else (a + magic) - magic, value)


@formula
def floating(value: Any, largest: Any, least: Any, power: Any) -> Any:
    """FLOAT with n_f = 1 to 10 fraction bits; *power* is 2^(23 - n_f), *least* 1.5 times the smallest normal value.

    The result is M + (a - M), where a - M has the exponent of M and so is rounded to steps of a's exponent. Only for a
    hardly above a power of two it has a smaller exponent and a finer step, which still finds that power of two.
    """
    a = _clamp(value, largest)
    m = (least if a < least else a) * power
    return _copy_sign(m + (a - m), value)


@formula
def floating_or_infinite(value: Any, largest: Any, least: Any, power: Any, infinity: Any) -> Any:
    """As ``floating``, but infinities stay infinite: for formats that have codes for them."""
    return value if abs(value) == infinity else floating(value, largest, least, power)


@formula
def power_of_two(value: Any, largest: Any, least: Any, power: Any, half: Any) -> Any:
    """EXP, which has no fraction bits: as ``floating``, but M / u gets the parity of a's exponent.

    So the even code wins ties. *half* is 2^22 if odd exponents have even codes: added to the bits, it flips the parity
    for the values half way between two powers.
    """
    a = _clamp(value, largest)
    bits = _bits(least if a < least else a)
    m = _value(bits + (np.uint32(bits + half) >> np.uint32(23))) * power
    return _copy_sign(m + (a - m), value)


@formula
def by_bits(
    value: Any, largest: Any, least: Any, magic: Any, shift: Any, half: Any, odd: Any, one: Any, mask: Any
) -> Any:
    """Any exponent and fraction bits: round the lower *shift* bits of the float32 away; below *least* as ``fixed``.

    half: one less than half of the unit that is kept. odd: 1 if codes whose last bit is set are the even codes. one: 0
    if no bit is rounded away, else 1. mask: the bits that are kept. NaN takes the ``fixed`` branch, where it stays NaN.
    """
    a = _clamp(value, largest)
    bits = _bits(a)
    rounded_value = _value((bits + half + (((bits >> shift) ^ odd) & one)) & mask)
    return _copy_sign(rounded_value if a >= least else (a + magic) - magic, value)


@formula
def twos(value: Any, lowest: Any, largest: Any, magic: Any, step: Any, half: Any, zero: Any) -> Any:
    """Two's complement up to 24 bits: clamp to *lowest* and *largest*, round half away from zero; no minus zero.

    step: distance of neighbours; half: half a step; zero: 0, whose addition turns minus zero into zero.
    """
    raised = lowest if value < lowest else value
    clamped = largest if raised > largest else raised
    a = np.float32(abs(clamped))
    to_even = (a + magic) - magic
    return _copy_sign(to_even + step if a - to_even >= half else to_even, clamped) + zero


@formula
def sign(value: Any, level: Any, zero: Any) -> Any:
    """BIN: plus or minus *level*; zero becomes plus, NaN stays NaN."""
    return -level if value < zero else (level if value >= zero else value)


def _loop(rounded: Callable[..., Any]) -> Callable[..., None]:
    """The loop that applies the formula *rounded* to each value."""

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
    # numba names its cache file after this name. If loops shared a name, processes that compile at the same time could
    # read each other's loop.
    loop.__qualname__ = name
    return compiled(loop)


_FORMULAS = (fixed, fine_fixed, floating, floating_or_infinite, power_of_two, by_bits, twos, sign)
_LOOPS = {  # name -> plain loop; compiled below
    **{rounded.__name__: _loop(rounded) for rounded in _FORMULAS},
    **{
        f"unsigned_{rounded.__name__}": _unsigned_loop(rounded)
        for rounded in (fixed, fine_fixed, floating, power_of_two, by_bits)
    },
    **{f"scaled_{rounded.__name__}": _scaled_loop(rounded) for rounded in (floating, power_of_two)},
}
LOOPS = {name: _compile_loop(name, loop) for name, loop in _LOOPS.items()}
"""Name -> loop over (x, out, constants): two float32 arrays, and the constants of the formula as a tuple.

The constants of scaled loops begin with the scale and its inverse. *out* may be *x* itself, but that is several times
slower, because LLVM does not vectorise a loop that may read what it wrote.
"""


@compiled
def pack_bits(codes: Words, bits: int, packed: Bytes) -> None:
    """Write the lowest *bits* of each code into *packed* without gaps, lowest bits first.

    *packed* has (number of codes * bits + 7) // 8 bytes.
    """
    buffer, filled, next_byte = np.uint64(0), 0, 0  # bits that are not written yet, and their number
    for code in codes:
        buffer |= np.uint64(code) << np.uint64(filled)
        filled += bits
        while filled >= 8:
            packed[next_byte] = buffer & np.uint64(255)
            buffer >>= np.uint64(8)
            filled -= 8
            next_byte += 1
    if filled:
        packed[next_byte] = buffer & np.uint64(255)


@compiled
def unpack_bits(packed: Bytes, bits: int, codes: Words) -> None:
    """Fill *codes* with codes of *bits* bits from the beginning of *packed*; the inverse of ``pack_bits``."""
    buffer, filled, next_byte = np.uint64(0), 0, 0  # bits that were read but not used, and their number
    mask = np.uint64((1 << bits) - 1)
    for index in range(codes.size):
        while filled < bits:
            buffer |= np.uint64(packed[next_byte]) << np.uint64(filled)
            filled += 8
            next_byte += 1
        codes[index] = buffer & mask
        buffer >>= np.uint64(bits)
        filled -= bits

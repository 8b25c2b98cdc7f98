"""The compiled loop that rounds to a format, and its constants.

A loop works in float32, so the format's steps must lie within its range. Where only the lower end does not (an EXP
format with a large bias), values are made 2^24 times larger first and smaller again afterwards, which is exact.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft_tune.kernels.numbers import LOOPS
from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.format import Format, TwosComplement
from weft_tune.numbers.plain import float32_range

Floats = npt.NDArray[np.float32]

LEAST_NORMAL, LEAST_STEP, MOST_STEP, BEYOND = 2.0**-126, 2.0**-149, 2.0**104, 2.0**128
"""Limits of float32: smallest normal, smallest subnormal, largest step, and the first power of two too large; 2^23
steps of MOST_STEP are the last power of two below BEYOND."""
SCALE_BITS = 24
"""Exponent of the factor for formats below float32's normal values. Even, so that exponents keep their parity, and
large enough for the smallest step of EXP, 2^-149, to become normal."""


class Loop(NamedTuple):
    """A compiled loop and the constants of a format."""

    name: str
    """A key of ``LOOPS`` in ``weft_tune.kernels.numbers``."""
    constants: tuple[np.float32 | np.uint32, ...]

    def run(self, values: Floats, results: Floats) -> None:
        """Round *values* into *results*; both flat and contiguous, possibly the same array."""
        if np.may_share_memory(values, results):
            values = values.copy()  # rounding in place costs several times as much as a copy (kernels/numbers.py)
        with np.errstate(all="ignore"):  # with the JIT off numpy computes, and would warn of what overflows on purpose
            LOOPS[self.name](values, results, self.constants)


@lru_cache(maxsize=4096)
def loop_for(form: AnyFormat) -> Loop | None:
    """Choose the shortest loop for a format, rounding to nearest; None if only doubles will do."""
    if isinstance(form, TwosComplement):
        return _twos(form)
    if form.kind == "BIN":
        return Loop("sign", _floats(float32_range(form)[1], 0.0))
    # the fastest first; by_bits covers what is left
    if form.sign_bits:
        return _fixed(form) or _floating(form) or _scaled(form) or _by_bits(form)
    signed = _fixed(form) or _floating(form) or _by_bits(form)
    if signed is None or form.specials:
        return None
    return signed._replace(name=f"unsigned_{signed.name}")


def _floats(*values: float) -> tuple[np.float32, ...]:
    return tuple(np.float32(value) for value in values)


def _fixed(form: Format) -> Loop | None:
    if form.kind != "FIXED" or not LEAST_STEP <= form.step <= MOST_STEP:
        return None
    name = "fixed" if form.fraction_bits <= 23 else "fine_fixed"
    return Loop(name, _floats(float32_range(form)[1], form.step * 2.0**23))


def _floating(form: Format, scale: float = 1.0) -> Loop | None:
    """The loop for values and results times *scale*."""
    # M = power * magnitude must not overflow, also for the least magnitude that M is taken of
    normal, largest = 2.0 ** (1 - form.bias) * scale, float32_range(form)[1] * scale
    power = 2.0 ** (23 - form.fraction_bits)
    if not form.exponent_bits or form.fraction_bits > 10 or max(largest, 2 * normal) * power >= BEYOND:
        return None
    if normal < LEAST_NORMAL and scale == 1.0:
        return None
    constants = _floats(largest, 1.5 * max(normal, LEAST_NORMAL), power)
    if form.specials:
        return Loop("floating_or_infinite", (*constants, np.float32(np.inf)))
    if form.fraction_bits:
        return Loop("floating", constants)
    return Loop("power_of_two", (*constants, np.uint32(form.bias % 2 << 22)))


def _scaled(form: Format) -> Loop | None:
    """The loop for formats below float32's normal values, which are scaled up and down again.

    Large values become infinite on the way and then the largest, so the format must have no infinities.
    """
    if 2.0 ** (1 - form.bias) >= LEAST_NORMAL or form.specials:
        return None
    loop = _floating(form, 2.0**SCALE_BITS)
    return loop and Loop(f"scaled_{loop.name}", _floats(2.0**SCALE_BITS, 2.0**-SCALE_BITS) + loop.constants)


def _by_bits(form: Format) -> Loop | None:
    """The loop that rounds the lower bits of a float32 away; for any exponents and up to 23 fraction bits."""
    kept = min(form.fraction_bits, 23)
    normal = 2.0 ** (1 - form.bias)
    if not form.exponent_bits or form.specials or form.step > MOST_STEP or (kept < 23 and normal < LEAST_NORMAL):
        return None
    magic = form.step * 2.0**23 if form.step >= LEAST_STEP else 0.0
    limits = _floats(float32_range(form)[1], min(normal, magic) if kept == 23 else normal, magic)
    # shift, half, odd, one and mask of the kernel
    words = (
        23 - kept,
        (1 << 22 - kept) - 1 if kept < 23 else 0,
        (form.bias + 1) % 2 if kept == 0 else 0,
        int(kept < 23),
        0x7FFFFFFF >> 23 - kept << 23 - kept,
    )
    return Loop("by_bits", (*limits, *(np.uint32(word) for word in words)))


def _twos(form: TwosComplement) -> Loop | None:
    magic = form.step * 2.0**23
    if form.bits > 24 or form.step < 2 * LEAST_STEP or magic - form.lowest >= BEYOND:
        return None
    constants = (form.lowest, form.largest, magic, form.step, form.step / 2, 0.0)
    return Loop("twos", _floats(*constants))

"""Arrays in a number format: rounded to its values, or encoded, packed into bytes, and back.

``rounded`` returns the values that encoding and decoding would give, as float32; emulation needs no more. Values above
the format's largest become the largest, values below the lowest become the lowest (zero without a sign); so finite
values never become infinite. NaN stays NaN. Infinities become the largest and the lowest, unless the format has codes
for them. Minus zero stays if the format has a sign. BIN keeps only the sign, zero counts as plus, whatever the
rounding. TwosComplement always rounds half away from zero. Rounded values are values of both the format and float32.

Packed codes leave no gaps: the first code fills the low bits of the first byte, its own lowest bit first; the next code
begins where it ended. So bit i of code k is bit (k n + i) mod 8 of byte (k n + i) // 8, n the bits of a code. The last
byte is filled with zeros.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import NumberError
from weft_tune.kernels import LOOPS, pack_bits, unpack_bits
from weft_tune.numbers import plain
from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.format import FLOAT32, Format, TwosComplement
from weft_tune.numbers.plain import Rounding, check_rounding, float32_range

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Codes = npt.NDArray[np.unsignedinteger]

LEAST_NORMAL, LEAST_STEP, MOST_STEP, BEYOND = 2.0**-126, 2.0**-149, 2.0**104, 2.0**128
"""Limits of float32: smallest normal, smallest subnormal, largest step, and the first power of two too large; 2^23
steps of MOST_STEP are the last power of two below BEYOND."""
SCALE_BITS = 24
"""Exponent of the factor for formats below float32's normal values. Even, so that exponents keep their parity, and
large enough for the smallest step of EXP, 2^-149, to become normal."""


class Loop(NamedTuple):
    """A compiled loop and the constants of a format.

    A loop works in float32, so the format's steps must lie within its range. Where only the lower end does not (an EXP
    format with a large bias), values are made 2^24 times larger first and smaller again afterwards, which is exact.
    """

    name: str
    """A key of ``LOOPS`` in ``weft_tune.kernels``."""
    constants: tuple[np.float32 | np.uint32, ...]

    def run(self, values: Floats, results: Floats) -> None:
        """Round *values* into *results*; both flat and contiguous, possibly the same array."""
        if np.may_share_memory(values, results):
            values = values.copy()  # rounding in place costs several times as much as a copy (kernels.py)
        with np.errstate(all="ignore"):  # with the JIT off numpy computes, and would warn of what overflows on purpose
            LOOPS[self.name](values, results, self.constants)


@lru_cache(maxsize=4096)
def loop_for(form: AnyFormat) -> Loop | None:
    """Choose the shortest loop for a format, rounding to nearest; None if only doubles will do."""
    if isinstance(form, TwosComplement):
        return _twos_loop(form)
    if form.kind == "BIN":
        return Loop("sign", _floats(float32_range(form)[1], 0.0))
    # The fastest loop first; by_bits covers the other formats.
    if form.sign_bits:
        return _fixed_loop(form) or _floating_loop(form) or _scaled_loop(form) or _by_bits_loop(form)
    signed = _fixed_loop(form) or _floating_loop(form) or _by_bits_loop(form)
    if signed is None or form.specials:
        return None
    return signed._replace(name=f"unsigned_{signed.name}")


def _floats(*values: float) -> tuple[np.float32, ...]:
    return tuple(np.float32(value) for value in values)


def _fixed_loop(form: Format) -> Loop | None:
    """The loop for FIXED formats whose steps lie within float32's range; otherwise None."""
    if form.kind != "FIXED" or not LEAST_STEP <= form.step <= MOST_STEP:
        return None
    name = "fixed" if form.fraction_bits <= 23 else "fine_fixed"
    return Loop(name, _floats(float32_range(form)[1], form.step * 2.0**23))


def _floating_loop(form: Format, scale: float = 1.0) -> Loop | None:
    """The loop for formats with up to 10 fraction bits; None if it cannot be used.

    scale: factor by which values and results are scaled.
    """
    # M = power * magnitude must not overflow, also for the least magnitude of which M is taken.
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


def _scaled_loop(form: Format) -> Loop | None:
    """The loop for formats below float32's normal values, which are scaled up and down again.

    Large values become infinite on the way and then the largest, so the format must have no infinities.
    """
    if 2.0 ** (1 - form.bias) >= LEAST_NORMAL or form.specials:
        return None
    loop = _floating_loop(form, scale=2.0**SCALE_BITS)
    return loop and Loop(f"scaled_{loop.name}", _floats(2.0**SCALE_BITS, 2.0**-SCALE_BITS) + loop.constants)


def _by_bits_loop(form: Format) -> Loop | None:
    """The loop that rounds the lower bits of a float32 away, for any exponent bits and up to 23 fraction bits."""
    kept_bits = min(form.fraction_bits, 23)
    normal = 2.0 ** (1 - form.bias)
    below_normal = kept_bits < 23 and normal < LEAST_NORMAL
    if not form.exponent_bits or form.specials or form.step > MOST_STEP or below_normal:
        return None
    magic = form.step * 2.0**23 if form.step >= LEAST_STEP else 0.0  # see ``kernels``
    limits = _floats(float32_range(form)[1], min(normal, magic) if kept_bits == 23 else normal, magic)
    # the arguments shift, half, odd, one and mask of ``kernels.by_bits``
    words = (
        23 - kept_bits,
        (1 << 22 - kept_bits) - 1 if kept_bits < 23 else 0,
        (form.bias + 1) % 2 if kept_bits == 0 else 0,
        int(kept_bits < 23),
        0x7FFFFFFF >> 23 - kept_bits << 23 - kept_bits,
    )
    return Loop("by_bits", (*limits, *(np.uint32(word) for word in words)))


def _twos_loop(form: TwosComplement) -> Loop | None:
    """The loop for two's complement of up to 24 bits; None if its steps leave float32's range."""
    magic = form.step * 2.0**23  # see ``kernels``; so is the order of the constants
    if form.bits > 24 or form.step < 2 * LEAST_STEP or magic - form.lowest >= BEYOND:
        return None
    constants = (form.lowest, form.largest, magic, form.step, form.step / 2, 0.0)
    return Loop("twos", _floats(*constants))


MAX_BITS = 32
"""Widest code that can be packed: the kernels keep one code and a started byte in 64 bits."""
MAX_TABLE_BITS = 16
"""Widest format whose codes are decoded by a table: 2^16 doubles are 512 KiB."""
_BLOCK = 1 << 14
"""Values computed at a time in doubles, so that intermediate arrays stay in the processor's cache."""


def code_type(bits: int) -> np.dtype[np.unsignedinteger]:
    """The smallest unsigned type that holds codes of a width."""
    for kind in (np.uint8, np.uint16, np.uint32):
        if bits <= np.iinfo(kind).bits:
            return np.dtype(kind)
    return np.dtype(np.uint64)


def packed_bytes(count: int, bits: int) -> int:
    """The size of *count* packed codes."""
    return (count * bits + 7) // 8


def pack(codes: npt.NDArray[np.integer], bits: int) -> Bytes:
    """Pack the lowest *bits* of each code, in C order."""
    _check_bits(bits)
    flat = np.ascontiguousarray(codes).reshape(-1)
    if flat.dtype.kind not in "ui":
        raise NumberError(f"codes to pack are whole numbers, not {flat.dtype}; encode the values first")
    if flat.size and (int(flat.max()) >> bits or int(flat.min()) < 0):
        raise NumberError(f"codes of {bits} bits are 0 to {(1 << bits) - 1}, not {flat.min()} to {flat.max()}")
    packed = np.zeros(packed_bytes(flat.size, bits), np.uint8)
    pack_bits(flat.astype(np.uint32, copy=False), bits, packed)
    return packed


def unpack(data: bytes | bytearray | memoryview | Bytes, bits: int, count: int) -> Codes:
    """Read the first *count* codes of a packed stream, in the smallest unsigned type."""
    _check_bits(bits)
    stream = np.ascontiguousarray(data) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    if stream.dtype != np.uint8:
        raise NumberError(f"a packed stream is bytes, not {stream.dtype}; view it as uint8")
    if count < 0 or packed_bytes(count, bits) > stream.size:
        raise NumberError(f"{count} codes of {bits} bits do not lie in {stream.size} bytes; is the count right?")
    codes = np.empty(count, np.uint32)
    unpack_bits(stream.reshape(-1), bits, codes)
    return codes.astype(code_type(bits))


def _check_bits(bits: int) -> None:
    if not isinstance(bits, int) or not 1 <= bits <= MAX_BITS:
        raise NumberError(f"codes of {bits!r} bits cannot be packed; from 1 to {MAX_BITS} they can")


def rounded(
    x: npt.ArrayLike,
    form: AnyFormat,
    *,
    rounding: Rounding = "nearest-even",
    out: Floats | None = None,
    rng: np.random.Generator | None = None,
) -> Floats:
    """Round each value of *x* to *form*, as float32; into *out* if given, which may be *x* itself.

    Rounding float32 values to nearest is compiled (benchmarks/number_speed.py). Other roundings, float64 values and the
    few formats that the loops cannot handle (``loop_for`` returns None) are rounded in doubles, many times slower.
    *rng* is for stochastic rounding.
    """
    array = _exact_floats(x)
    check_rounding(rounding, rng)
    target = _result_array(out, array)
    values, results = array.reshape(-1), target.reshape(-1)
    # two's complement has one rounding, which is to nearest
    nearest = rounding == "nearest-even" or (isinstance(form, TwosComplement) and rounding == "nearest-away")
    loop = loop_for(form) if nearest and values.dtype == np.float32 else None
    if form == FLOAT32 and values.dtype == np.float32:
        np.copyto(results, values)
    elif loop is None:
        for start in range(0, values.size, _BLOCK):
            results[start : start + _BLOCK] = plain.rounded(values[start : start + _BLOCK], form, rounding, rng)
    else:
        loop.run(values, results)
    if out is not None and target is not out:
        out[...] = target
        return out
    return target


def encode(
    x: npt.ArrayLike,
    form: AnyFormat,
    *,
    rounding: Rounding = "nearest-even",
    rng: np.random.Generator | None = None,
) -> Codes:
    """Encode each value, sign in the top bit, then exponent and fraction; in the smallest unsigned type."""
    values = _exact_floats(x)
    if not (isinstance(form, Format) and form.specials) and (nan_count := int(np.isnan(values).sum())):
        raise NumberError(
            f"{nan_count} of {values.size} values are NaN, and {form} has no code for it; replace them first"
        )
    codes = np.empty(values.size, code_type(form.bits))
    flat = values.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK].astype(np.float64)
        codes[start : start + _BLOCK] = plain.codes(block, form, rounding, rng)
    return codes.reshape(values.shape)


def decode(codes: npt.NDArray[np.integer], form: AnyFormat) -> Floats | Doubles:
    """Decode codes: to float32 if that holds every value of the format, otherwise to float64."""
    codes = np.asarray(codes)
    if codes.dtype.kind not in "ui":
        raise NumberError(f"codes are whole numbers, not {codes.dtype}")
    if codes.size and (int(codes.max()) >> form.bits or int(codes.min()) < 0):
        raise NumberError(f"codes of {form} are 0 to {(1 << form.bits) - 1}, not {codes.min()} to {codes.max()}")
    values = code_table(form)[codes] if form.bits <= MAX_TABLE_BITS else plain.values(codes, form)
    return values.astype(np.float32) if fits_float32(form) else values


@lru_cache(maxsize=256)
def code_table(form: AnyFormat) -> Doubles:
    """The value of every code, in order; read-only, for formats of up to 16 bits."""
    if form.bits > MAX_TABLE_BITS:
        raise NumberError(f"{form} has 2^{form.bits} codes; tables are made up to {MAX_TABLE_BITS} bits, use decode")
    table = plain.values(np.arange(1 << form.bits), form)
    table.flags.writeable = False
    return table


def fits_float32(form: AnyFormat) -> bool:
    """Whether float32 holds every value of the format."""
    significant_bits = form.bits - 1 if not isinstance(form, Format) else form.fraction_bits + (form.exponent_bits > 0)
    return (
        significant_bits <= 24
        and form.step >= 2.0**-149
        and form.largest <= plain.FLOAT32_MAX
        and form.lowest >= -plain.FLOAT32_MAX
    )


def _result_array(out: Floats | None, values: npt.NDArray[Any]) -> Floats:
    """The array for results: *out*, or a new one if *out* is None or cannot be written while *values* are read."""
    if out is None:
        return np.empty(values.shape, np.float32)
    if out.dtype != np.float32 or out.shape != values.shape:
        raise NumberError(f"out is {out.dtype}{list(out.shape)}; it must be float32{list(values.shape)}")
    if not out.flags.writeable:
        raise NumberError("out is read-only; give an array of your own, or none")
    # *out* may be the array *values* itself, whose elements are overwritten once they are read; elements of a shifted
    # view of it would be overwritten before they are read
    is_input = out.ctypes.data == values.ctypes.data and values.dtype == np.float32
    usable = out.flags.c_contiguous and out.flags.aligned and (is_input or not np.may_share_memory(out, values))
    return out if usable else np.empty(values.shape, np.float32)


def _exact_floats(x: npt.ArrayLike) -> npt.NDArray[Any]:
    """A contiguous array of float32 if that is exact for the type, otherwise of float64."""
    values: npt.NDArray[Any] = np.asarray(x)
    if values.dtype in (np.float32, np.float64):
        return np.require(values, requirements=["C_CONTIGUOUS", "ALIGNED"])
    if values.dtype.kind not in "fiub" or values.dtype.itemsize > 8:
        raise NumberError(f"values of type {values.dtype} cannot be rounded to a format; make them float32 or float64")
    return values.astype(np.float32 if values.dtype.itemsize <= 2 else np.float64)

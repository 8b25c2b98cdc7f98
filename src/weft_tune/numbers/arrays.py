"""Arrays in a number format: rounded in place of being stored, or turned into codes and back.

``rounded`` gives what would come back from a format, still as float32: emulation needs no more. Values beyond the
largest become the largest, below the lowest the lowest (zero, where there is no sign): finite values never become
infinite. NaN stays NaN. Infinities become the largest and the lowest, unless the format has codes for them. Minus zero
stays where the format has a sign. BIN keeps nothing but the sign, zero counts as plus, whatever the rounding.
TwosComplement has one rounding of its own. What a format holds and float32 does not is left out: rounded values are
values of both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.base.errors import NumberError
from weft_tune.numbers import plain
from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.format import FLOAT32, Format
from weft_tune.numbers.loops import loop_for
from weft_tune.numbers.packing import code_type
from weft_tune.numbers.rounding import Rounding, check_rounding
from weft_tune.numbers.twos_complement import TwosComplement

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Codes = npt.NDArray[np.unsignedinteger]

MAX_TABLE_BITS = 16
_BLOCK = 1 << 14


def rounded(
    x: npt.ArrayLike,
    form: AnyFormat,
    *,
    rounding: Rounding = "nearest-even",
    out: Floats | None = None,
    rng: np.random.Generator | None = None,
) -> Floats:
    """The value of *form* that each value becomes, as float32; into *out* if given, which may be *x* itself.

    Compiled for float32 values to nearest (benchmarks/number_speed.py). Other roundings, float64 values and the few
    formats that float32 cannot follow (``loops.loop_for`` gives None) are rounded in doubles, many times slower.
    """
    given = _floating(x)
    check_rounding(rounding, rng)
    target = _target(out, given)
    values, results = given.reshape(-1), target.reshape(-1)
    nearest = rounding == "nearest-even" or (isinstance(form, TwosComplement) and rounding == "nearest-away")
    loop = loop_for(form) if nearest and values.dtype == np.float32 else None
    if form == FLOAT32 and values.dtype == np.float32:
        np.copyto(results, values)
    elif loop is None:
        for at in range(0, values.size, _BLOCK):
            results[at : at + _BLOCK] = plain.rounded(values[at : at + _BLOCK], form, rounding, rng)
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
    """The code of each value, sign in the top bit, then exponent and fraction; in the smallest unsigned type."""
    given = _floating(x)
    if not (isinstance(form, Format) and form.specials) and (missing := int(np.isnan(given).sum())):
        raise NumberError(
            f"{missing} of {given.size} values are NaN, and {form} has no code for it; replace them first"
        )
    found = np.empty(given.size, code_type(form.bits))
    flat = given.reshape(-1)
    for at in range(0, flat.size, _BLOCK):
        found[at : at + _BLOCK] = plain.codes(flat[at : at + _BLOCK].astype(np.float64), form, rounding, rng)
    return found.reshape(given.shape)


def decode(codes: npt.NDArray[np.integer], form: AnyFormat) -> Floats | Doubles:
    """What each code means: float32 if that holds every value of the format, otherwise float64."""
    given = np.asarray(codes)
    if given.dtype.kind not in "ui":
        raise NumberError(f"codes are whole numbers, not {given.dtype}")
    if given.size and (int(given.max()) >> form.bits or int(given.min()) < 0):
        raise NumberError(f"codes of {form} are 0 to {(1 << form.bits) - 1}, not {given.min()} to {given.max()}")
    found = code_table(form)[given] if form.bits <= MAX_TABLE_BITS else plain.values(given, form)
    return found.astype(np.float32) if fits_float32(form) else found


@lru_cache(maxsize=256)
def code_table(form: AnyFormat) -> Doubles:
    """The value of every code, in order; read only, and up to 16 bits."""
    if form.bits > MAX_TABLE_BITS:
        raise NumberError(f"{form} has 2^{form.bits} codes; tables are made up to {MAX_TABLE_BITS} bits, use decode")
    table = plain.values(np.arange(1 << form.bits), form)
    table.flags.writeable = False
    return table


def fits_float32(form: AnyFormat) -> bool:
    """Whether float32 holds every value of the format."""
    significant = form.bits - 1 if not isinstance(form, Format) else form.fraction_bits + (form.exponent_bits > 0)
    return (
        significant <= 24
        and form.step >= 2.0**-149
        and form.largest <= plain.FLOAT32_MAX
        and form.lowest >= -plain.FLOAT32_MAX
    )


def _target(out: Floats | None, given: npt.NDArray[Any]) -> Floats:
    """Where results go: *out*, or something new if there is none or if it cannot be written front to back."""
    if out is None:
        return np.empty(given.shape, np.float32)
    if out.dtype != np.float32 or out.shape != given.shape:
        raise NumberError(f"out is {out.dtype}{list(out.shape)}; it must be float32{list(given.shape)}")
    if not out.flags.writeable:
        raise NumberError("out is read-only; give an array of your own, or none")
    same = out.ctypes.data == given.ctypes.data and given.dtype == np.float32
    usable = out.flags.c_contiguous and out.flags.aligned and (same or not np.may_share_memory(out, given))
    return out if usable else np.empty(given.shape, np.float32)


def _floating(x: npt.ArrayLike) -> npt.NDArray[Any]:
    """Front to back, as float32 if that is exact for the type, otherwise as float64."""
    given: npt.NDArray[Any] = np.asarray(x)
    if given.dtype in (np.float32, np.float64):
        return np.require(given, requirements=["C_CONTIGUOUS", "ALIGNED"])
    if given.dtype.kind not in "fiub" or given.dtype.itemsize > 8:
        raise NumberError(f"values of type {given.dtype} cannot be rounded to a format; make them float32 or float64")
    return given.astype(np.float32 if given.dtype.itemsize <= 2 else np.float64)

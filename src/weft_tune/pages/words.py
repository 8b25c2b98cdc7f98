"""What a number format can stand for, in words."""

from __future__ import annotations

from weft_tune.numbers.format import Format
from weft_tune.numbers.twos_complement import TwosComplement


def format_meaning(form: Format | TwosComplement) -> str:
    """What a number format can stand for."""
    if isinstance(form, TwosComplement):
        least, most = -(2.0 ** (form.bits - 1)) * form.step, form.largest
        return f"{form.bits} bits in two's complement: {least:.4g} to {most:.4g} in steps of {form.step:.4g}"
    sign = "a sign, " if form.sign_bits else "no sign, "
    plus = "±" if form.sign_bits else ""
    match form.kind:
        case "BIN":
            return f"1 bit: plus or minus {form.largest:.4g}"
        case "FIXED":
            size = f"{form.fraction_bits} bits of magnitude in steps of {form.step:.4g}"
            return f"{form.bits} bits, fixed point: {sign}{size}, up to {plus}{form.largest:.4g}"
        case "EXP":
            span = f"{form.smallest:.4g}" + (f" to {form.largest:.4g}" if form.largest > form.smallest else "")
            what = "a power of two" if form.largest == form.smallest else "powers of two"
            field = f"{_counted(form.exponent_bits)} of exponent, bias {form.bias}"
            return f"{form.bits} bits, {what}: zero and {plus}{span} ({field})"
    fields = (
        f"{_counted(form.exponent_bits)} of exponent (bias {form.bias}), {_counted(form.fraction_bits)} of fraction"
    )
    ieee = ", as in IEEE 754" if form.specials else ""
    return f"{form.bits} bits, floating point{ieee}: {sign}{fields}; {form.smallest:.3g} to {form.largest:.3g}"


def _counted(bits: int) -> str:
    return f"{bits} bit{'' if bits == 1 else 's'}"

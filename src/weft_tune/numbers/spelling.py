"""Formats as text: ``EXP 8 127`` in files, ``E8(127)`` in tables."""

from __future__ import annotations

from weft.base.errors import NumberError
from weft_tune.numbers.format import BIN, EXP, FIXED, FLOAT, Format
from weft_tune.numbers.twos_complement import TwosComplement

_SYNTAX = (
    "FLOAT bits [bias], FIXED bits [bias], EXP bits [bias], BIN [bias], "
    "CUSTOM n_s n_e n_f bias [IEEE] or TWOS bits fraction"
)

_SPECIALS = "IEEE"
"""Behind a custom format that has infinities and NaN."""


def parse_format(text: str) -> Format | TwosComplement:
    """The format that a text means."""
    kind, *rest = text.upper().split() or [""]
    specials = kind == "CUSTOM" and rest[-1:] == [_SPECIALS]
    try:
        numbers = [int(word) for word in (rest[:-1] if specials else rest)]
    except ValueError:
        raise NumberError(f"{text!r}: widths and biases are whole numbers; a format is {_SYNTAX}") from None
    match (kind, numbers):
        case ("FLOAT", [bits]):
            return FLOAT(bits)
        case ("FLOAT", [bits, bias]):
            return FLOAT(bits, bias)
        case ("FIXED", [bits, *bias]) if len(bias) <= 1:
            return FIXED(bits, *bias)
        case ("EXP", [bits, *bias]) if len(bias) <= 1:
            return EXP(bits, *bias)
        case ("BIN", bias) if len(bias) <= 1:
            return BIN(*bias)
        case ("CUSTOM", [sign, exponent, fraction, bias]):
            return Format(sign, exponent, fraction, bias, specials)
        case ("TWOS", [bits, fraction]):
            return TwosComplement(bits, fraction)
    raise NumberError(f"{text!r} is no number format; it is {_SYNTAX}")


def spell(form: Format | TwosComplement) -> str:
    """The format as a file spells it; ``parse_format`` gives the same format back."""
    if isinstance(form, TwosComplement):
        return str(form)
    if form.sign_bits and form.kind == "FIXED" and 2 <= form.bits <= 32:
        return f"FIXED {form.bits} {form.bias}"
    if form.sign_bits and form.kind == "EXP" and form.bits <= 9:
        return f"EXP {form.bits} {form.bias}"
    if form.kind == "BIN":
        return f"BIN {form.bias}"
    if form.kind == "FLOAT" and 3 <= form.bits <= 32 and form in (FLOAT(form.bits), FLOAT(form.bits, form.bias)):
        return f"FLOAT {form.bits}" if form == FLOAT(form.bits) else f"FLOAT {form.bits} {form.bias}"
    fields = f"CUSTOM {form.sign_bits} {form.exponent_bits} {form.fraction_bits} {form.bias}"
    return f"{fields} {_SPECIALS}" if form.specials else fields


def label(form: Format | TwosComplement, *, bias: bool = False) -> str:
    """Short, as the chapter's tables have it: I for FIXED, E for EXP, F for FLOAT; the bias in parentheses."""
    letter = {"FIXED": "I", "EXP": "E", "FLOAT": "F", "BIN": "B", "TWOS": "T"}[form.kind]
    moved = form.fraction_length if isinstance(form, TwosComplement) else form.bias
    return f"{letter}{form.bits}({moved})" if bias and letter != "F" else f"{letter}{form.bits}"

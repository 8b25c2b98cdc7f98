"""Number formats: four small numbers ``<n_s, n_e, n_f, B>`` define the values of a few bits; and formats as text.

A code has a sign, an exponent field E and a fraction field F. It means (1 + F 2^-n_f) 2^(E-B) where E > 0 and
F 2^-n_f 2^(1-B) where E = 0 (Oh et al., PACT 2018). FLOAT has both fields, FIXED no exponent, EXP no fraction; with
neither, the formula gives nothing but zero, so BIN is a rule of its own: plus or minus 2^-B.
Two's complement, whose codes are not sign and magnitude, is a type of its own.

As text a format is ``EXP 8 127`` in files (``spell``) and ``E8(127)`` in tables (``label``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from weft.base.errors import NumberError

Kind = Literal["FLOAT", "FIXED", "EXP", "BIN"]

MAX_EXPONENT_BITS, MAX_FRACTION_BITS, MAX_BIAS = 11, 52, 1200
"""Limits of doubles, in which all formulas are computed; ``Format`` checks the exact ends of its range as well."""
MAX_FRACTION_LENGTH = 900
"""Limit of two's complement, so that doubles hold every value."""


def _check_fields(form: Any, limits: Mapping[str, tuple[int, int]], prefix: str = "") -> None:
    """Refuse fields that are not whole numbers within their limits."""
    for name, (least, most) in limits.items():
        value = getattr(form, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise NumberError(f"{prefix}{name} = {value!r} must be a whole number from {least} to {most}")


@dataclass(frozen=True, slots=True)
class Format:
    """A number format of sign, exponent and fraction; formats with the same fields are equal."""

    sign_bits: int
    exponent_bits: int
    fraction_bits: int
    bias: int
    specials: bool = False
    """Whether the top exponent stands for infinities and NaN, as in IEEE 754; otherwise it encodes finite values."""

    def __post_init__(self) -> None:
        limits = {
            "sign_bits": (0, 1),
            "exponent_bits": (0, MAX_EXPONENT_BITS),
            "fraction_bits": (0, MAX_FRACTION_BITS),
            "bias": (-MAX_BIAS, MAX_BIAS),
        }
        _check_fields(self, limits)
        if self.specials and (self.exponent_bits < 2 or self.fraction_bits < 1):
            raise NumberError(f"{self} has no room for infinities and NaN; leave specials out")
        if self.bits == 0 or (self.kind == "BIN" and not self.sign_bits):
            raise NumberError(f"{self} has no bit that tells two values apart; use at least FIXED 2")
        lower, upper = 1 - self.bias - self.fraction_bits, self.top_exponent - self.bias
        if lower < -1074 or upper > 1023:  # the smallest subnormal and the largest exponent of a double
            raise NumberError(f"{self} reaches from 2^{lower} to 2^{upper + 1}; doubles do not; move the bias")

    @property
    def bits(self) -> int:
        return self.sign_bits + self.exponent_bits + self.fraction_bits

    @property
    def kind(self) -> Kind:
        """The type by the fields that the format has."""
        if self.exponent_bits and self.fraction_bits:
            return "FLOAT"
        if self.fraction_bits:
            return "FIXED"
        return "EXP" if self.exponent_bits else "BIN"

    @property
    def top_exponent(self) -> int:
        """The largest exponent field of a finite value."""
        return (1 << self.exponent_bits) - (2 if self.specials else 1)

    @property
    def step(self) -> float:
        """The distance between neighbours next to zero."""
        return 2.0 ** (-self.bias if self.kind == "BIN" else 1 - self.bias - self.fraction_bits)

    @property
    def largest(self) -> float:
        """The largest finite value."""
        if self.kind == "BIN":
            return 2.0**-self.bias
        if not self.exponent_bits:
            return ((1 << self.fraction_bits) - 1) * self.step
        return (2.0 - 2.0**-self.fraction_bits) * 2.0 ** (self.top_exponent - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest value above zero."""
        return self.step

    @property
    def lowest(self) -> float:
        """The most negative finite value; zero without a sign."""
        return -self.largest if self.sign_bits else 0.0

    def with_bias(self, bias: int) -> Format:
        return replace(self, bias=bias)

    def __str__(self) -> str:
        """The format as the chapter writes it: ``<1, 8, 23, 127>``."""
        return f"<{self.sign_bits}, {self.exponent_bits}, {self.fraction_bits}, {self.bias}>"


_EXPONENT_BITS = {3: 1, 4: 2, 5: 2, 6: 3, 7: 3, 8: 4, 9: 5} | dict.fromkeys(range(10, 17), 5)
"""Exponent bits of FLOAT(N); from 17 bits on there are 8, as in TF32 and float32. The chapter names only 16 and 32."""


def FLOAT(bits: int, bias: int | None = None, *, exponent_bits: int | None = None) -> Format:
    """A floating-point format; 16 and 32 bits are those of IEEE 754, smaller ones have no infinities and no NaN."""
    if not isinstance(bits, int) or not 3 <= bits <= 32:
        raise NumberError(f"FLOAT {bits}: must have 3 to 32 bits")
    exponents = _EXPONENT_BITS.get(bits, 8) if exponent_bits is None else exponent_bits
    usual_bias = (1 << exponents - 1) - 1 if exponents > 0 else 0
    is_ieee = bits in (16, 32) and exponents == _EXPONENT_BITS.get(bits, 8) and bias in (None, usual_bias)
    return Format(1, exponents, bits - 1 - exponents, usual_bias if bias is None else bias, specials=is_ieee)


def FIXED(bits: int, bias: int = 0) -> Format:
    """Dynamic fixed point: sign and magnitude below 2^(1-bias)."""
    if not isinstance(bits, int) or not 2 <= bits <= 32:
        raise NumberError(f"FIXED {bits}: must have 2 to 32 bits; for one bit use BIN")
    return Format(1, 0, bits - 1, bias)


def EXP(bits: int, bias: int | None = None) -> Format:
    """Zero and powers of two."""
    if not isinstance(bits, int) or not 2 <= bits <= 9:
        raise NumberError(f"EXP {bits}: must have 2 to 9 bits")
    return Format(1, bits - 1, 0, (1 << bits - 2) - 1 if bias is None else bias)


def BIN(bias: int = 0) -> Format:
    """One bit: plus or minus 2^-bias; zero becomes plus."""
    return Format(1, 0, 0, bias)


FLOAT32 = FLOAT(32)
FLOAT16 = FLOAT(16)


@dataclass(frozen=True, slots=True)
class TwosComplement:
    """Dynamic fixed point of Ristretto in two's complement, which rounds ties away from zero.

    *fraction_length* of the *bits* are behind the point; it may be negative, or exceed *bits*.
    """

    bits: int
    fraction_length: int

    def __post_init__(self) -> None:
        limits = {"bits": (1, 32), "fraction_length": (-MAX_FRACTION_LENGTH, MAX_FRACTION_LENGTH)}
        _check_fields(self, limits, prefix="TWOS ")

    @property
    def kind(self) -> str:
        return "TWOS"

    @property
    def step(self) -> float:
        return 2.0**-self.fraction_length

    @property
    def largest(self) -> float:
        return float((1 << self.bits - 1) - 1) * self.step

    @property
    def lowest(self) -> float:
        return -float(1 << self.bits - 1) * self.step

    def __str__(self) -> str:
        return f"TWOS {self.bits} {self.fraction_length}"


_SYNTAX = (
    "FLOAT bits [bias], FIXED bits [bias], EXP bits [bias], BIN [bias], "
    "CUSTOM n_s n_e n_f bias [IEEE] or TWOS bits fraction"
)

_SPECIALS = "IEEE"
"""The word after a custom format that has infinities and NaN."""


def parse_format(text: str) -> Format | TwosComplement:
    """Parse the text of a format, as files and options write it."""
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
    """Write a format as files do; ``parse_format`` gives the same format back."""
    if isinstance(form, TwosComplement):
        return str(form)
    # the short names hold few widths; what they cannot express is CUSTOM
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
    """Abbreviate a format as the chapter's tables do: I for FIXED, E for EXP, F for FLOAT; the bias in parentheses."""
    letter = {"FIXED": "I", "EXP": "E", "FLOAT": "F", "BIN": "B", "TWOS": "T"}[form.kind]
    shift = form.fraction_length if isinstance(form, TwosComplement) else form.bias
    return f"{letter}{form.bits}({shift})" if bias and letter != "F" else f"{letter}{form.bits}"

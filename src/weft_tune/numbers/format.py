"""Number formats: four small numbers ``<n_s, n_e, n_f, B>`` that say which values a few bits can stand for.

A code has a sign, an exponent field E and a fraction field F. It means (1 + F 2^-n_f) 2^(E-B) where E > 0 and
F 2^-n_f 2^(1-B) where E = 0 (Oh et al., PACT 2018). FLOAT has both fields, FIXED no exponent, EXP no fraction; with
neither, the formula gives nothing but zero, so BIN is a rule of its own: plus or minus 2^-B.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from weft.base.errors import NumberError

Kind = Literal["FLOAT", "FIXED", "EXP", "BIN"]

MAX_EXPONENT_BITS, MAX_FRACTION_BITS, MAX_BIAS = 11, 52, 1200
"""What a double can follow."""


@dataclass(frozen=True, slots=True)
class Format:
    """One number format; a value, equal to any other with the same fields."""

    sign_bits: int
    exponent_bits: int
    fraction_bits: int
    bias: int
    specials: bool = False
    """Whether the top exponent stands for infinities and NaN, as in IEEE 754; otherwise it is one like the others."""

    def __post_init__(self) -> None:
        fields = (
            ("sign_bits", 0, 1),
            ("exponent_bits", 0, MAX_EXPONENT_BITS),
            ("fraction_bits", 0, MAX_FRACTION_BITS),
            ("bias", -MAX_BIAS, MAX_BIAS),
        )
        for name, least, most in fields:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise NumberError(f"{name} = {value!r} must be a whole number from {least} to {most}")
        if self.specials and (self.exponent_bits < 2 or self.fraction_bits < 1):
            raise NumberError(f"{self.tuple_text} has no room for infinities and NaN; leave specials out")
        if self.bits == 0 or (self.kind == "BIN" and not self.sign_bits):
            raise NumberError(f"{self.tuple_text} has no bit that tells two values apart; use at least FIXED 2")
        lower, upper = 1 - self.bias - self.fraction_bits, self.top_exponent - self.bias
        if lower < -1074 or upper > 1023:
            raise NumberError(
                f"{self.tuple_text} reaches from 2^{lower} to 2^{upper + 1}; doubles do not; move the bias"
            )

    @property
    def bits(self) -> int:
        return self.sign_bits + self.exponent_bits + self.fraction_bits

    @property
    def kind(self) -> Kind:
        if self.exponent_bits and self.fraction_bits:
            return "FLOAT"
        if self.fraction_bits:
            return "FIXED"
        return "EXP" if self.exponent_bits else "BIN"

    @property
    def tuple_text(self) -> str:
        """The format as the chapter writes it: ``<1, 8, 23, 127>``."""
        return f"<{self.sign_bits}, {self.exponent_bits}, {self.fraction_bits}, {self.bias}>"

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
        return self.tuple_text


_EXPONENT_BITS = {3: 1, 4: 2, 5: 2, 6: 3, 7: 3, 8: 4, 9: 5} | dict.fromkeys(range(10, 17), 5)
"""Exponent bits of FLOAT(N); from 17 bits on there are 8, as in TF32 and float32. The chapter names only 16 and 32."""


def FLOAT(bits: int, bias: int | None = None, *, exponent_bits: int | None = None) -> Format:
    """A floating-point format; 16 and 32 bits are those of IEEE 754, smaller ones have no infinities and no NaN."""
    if not isinstance(bits, int) or not 3 <= bits <= 32:
        raise NumberError(f"FLOAT {bits}: must have 3 to 32 bits")
    exponents = _EXPONENT_BITS.get(bits, 8) if exponent_bits is None else exponent_bits
    usual = (1 << exponents - 1) - 1 if exponents > 0 else 0
    ieee = bits in (16, 32) and exponents == _EXPONENT_BITS.get(bits, 8) and bias in (None, usual)
    return Format(1, exponents, bits - 1 - exponents, usual if bias is None else bias, ieee)


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

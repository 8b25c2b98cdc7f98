"""Two's complement dynamic fixed point, the format of Ristretto: one negative value more, ties away from zero.

It is not of the canonical form, whose codes are sign and magnitude, so it is a type of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.errors import NumberError

MAX_FRACTION_LENGTH = 900
"""So that doubles hold every value."""


@dataclass(frozen=True, slots=True)
class TwosComplement:
    """``bits`` in all, ``fraction_length`` of them behind the point; that may be negative or more than there are."""

    bits: int
    fraction_length: int

    def __post_init__(self) -> None:
        for name, least, most in (("bits", 1, 32), ("fraction_length", -MAX_FRACTION_LENGTH, MAX_FRACTION_LENGTH)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise NumberError(f"TWOS {name} = {value!r} must be a whole number from {least} to {most}")

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

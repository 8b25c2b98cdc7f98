"""One number in a format, with the arithmetic of chapter III.2: computed in float32, stored in one operand's format.

``Number(x)`` is the chapter's assignment: of a Number it copies value and format, of a float or an int it takes the
value and FLOAT 32. ``Number(x, form)`` stores a value in a format, ``Number.named`` in that of a named object.
"""

from __future__ import annotations

import math

import numpy as np

from weft.base.errors import NumberError
from weft_tune.numbers.arrays import encode, rounded
from weft_tune.numbers.configuration import AnyFormat, Configuration
from weft_tune.numbers.format import FLOAT32


class Number:
    """A value that its format holds; it never changes."""

    __slots__ = ("_form", "_value")

    def __init__(self, value: Number | float, form: AnyFormat | None = None) -> None:
        if form is None:
            form = value.form if isinstance(value, Number) else FLOAT32
        self._form = form
        self._value = float(rounded(_float32(value), form))

    @classmethod
    def named(cls, name: str, configuration: Configuration, value: Number | float = 0.0) -> Number:
        """A value in the format that *configuration* gives to the object *name*; FLOAT 32 if it names it not."""
        return cls(value, configuration[name])

    @property
    def form(self) -> AnyFormat:
        return self._form

    @property
    def code(self) -> int:
        """The bits that store the number."""
        return int(encode(self._value, self._form))

    def __float__(self) -> float:
        return self._value

    def __int__(self) -> int:
        """Toward zero, as C does it."""
        if not math.isfinite(self._value):
            raise NumberError(f"{self} is no whole number")
        return int(self._value)

    def __add__(self, other: Number | float) -> Number:
        right = other if isinstance(other, Number) else Number(other)
        with np.errstate(over="ignore", invalid="ignore"):
            return Number(float(_float32(self) + _float32(right)), wider(self._form, right._form))

    def __mul__(self, other: Number | float) -> Number:
        right = other if isinstance(other, Number) else Number(other)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            return Number(float(_float32(self) * _float32(right)), wider(self._form, right._form))

    __radd__ = __add__
    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Number):
            return self._value == other._value
        return self._value == other

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return f"Number({self._value!r}, {self._form})"


def wider(left: AnyFormat, right: AnyFormat) -> AnyFormat:
    """The format in which the result of two operands is stored: the one of wider dynamic range, so as not to saturate.

    Dynamic range is the largest value over the smallest one above zero; where it is the same, the larger largest value
    counts, then the left operand. FLOAT is preferred to EXP whatever the ranges, for it is more precise.
    """
    if {left.kind, right.kind} == {"FLOAT", "EXP"}:
        return left if left.kind == "FLOAT" else right
    return right if _range(right) > _range(left) else left


def _range(form: AnyFormat) -> tuple[float, float]:
    top = max(form.largest, -form.lowest)
    return math.log2(top) - math.log2(form.step), top


def _float32(value: Number | float) -> np.float32:
    with np.errstate(over="ignore"):
        return np.float32(float(value))

"""Arithmetic on many float32 at once: one formula, run by numpy or compiled to vector instructions.

A loop that the compiler turns into vectors by itself works on two registers at a time, too few to keep a processor
busy, and not at all where it overwrites its input. So formulas are compiled for WIDTH values at once here. A formula
takes the values, then constants, and uses +, -, *, abs and what is below; with the JIT off it gets numpy's arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numba
import numpy as np
from numba.core import cgutils
from numba.extending import intrinsic, overload

WIDTH = 32
"""Eight registers of 128 bits."""

_FLOAT, _WORD = ir.FloatType(), ir.IntType(32)


class SimdVector:
    """A vector of float32 or of 32 bits while code is made for it."""

    def __init__(self, builder: Any, value: Any, width: int) -> None:
        self.builder, self.value, self.width = builder, value, width

    @property
    def floating(self) -> bool:
        return bool(self.value.type == _of(_FLOAT, self.width))

    def made(self, value: Any) -> SimdVector:
        return SimdVector(self.builder, value, self.width)

    def __add__(self, other: SimdVector) -> SimdVector:
        add = self.builder.fadd if self.floating else self.builder.add
        return self.made(add(self.value, other.value))

    def __sub__(self, other: SimdVector) -> SimdVector:
        return self.made(self.builder.fsub(self.value, other.value))

    def __mul__(self, other: SimdVector) -> SimdVector:
        return self.made(self.builder.fmul(self.value, other.value))

    def __neg__(self) -> SimdVector:
        return self.made(self.builder.fneg(self.value))

    def __and__(self, other: SimdVector) -> SimdVector:
        return self.made(self.builder.and_(self.value, other.value))

    def __xor__(self, other: SimdVector) -> SimdVector:
        return self.made(self.builder.xor(self.value, other.value))

    def __rshift__(self, other: SimdVector | int) -> SimdVector:
        if isinstance(other, int):
            other = _splat(self.builder, _WORD(other), self.width)
        return self.made(self.builder.lshr(self.value, other.value))

    def __ge__(self, other: SimdVector) -> SimdVector:
        return self.made(self.builder.fcmp_ordered(">=", self.value, other.value))

    def __lt__(self, other: SimdVector) -> SimdVector:
        return self.made(self.builder.fcmp_ordered("<", self.value, other.value))

    def __eq__(self, other: object) -> Any:
        assert isinstance(other, SimdVector)
        return self.made(self.builder.fcmp_ordered("==", self.value, other.value))

    def __abs__(self) -> SimdVector:
        return self.instruction("llvm.fabs")

    def instruction(self, name: str, *others: SimdVector) -> SimdVector:
        kind = self.value.type
        suffix = ("" if self.width == 1 else f"v{self.width}") + ("f32" if self.floating else "i32")
        shape = ir.FunctionType(kind, [kind] * (1 + len(others)))
        function = cgutils.get_or_insert_function(self.builder.module, shape, f"{name}.{suffix}")
        return self.made(self.builder.call(function, [self.value, *(other.value for other in others)]))

    def cast(self, kind: Any) -> SimdVector:
        return self.made(self.builder.bitcast(self.value, _of(kind, self.width)))


def lesser(a: Any, b: Any) -> Any:
    """NaN if either is: one instruction, which a comparison and a choice are not everywhere."""
    return a.instruction("llvm.minimum", b) if isinstance(a, SimdVector) else np.minimum(a, b)


def greater(a: Any, b: Any) -> Any:
    return a.instruction("llvm.maximum", b) if isinstance(a, SimdVector) else np.maximum(a, b)


def with_sign(a: Any, b: Any) -> Any:
    return a.instruction("llvm.copysign", b) if isinstance(a, SimdVector) else np.copysign(a, b)


def multiply_add(a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once or twice: only for products that are exact."""
    return a.instruction("llvm.fmuladd", b, c) if isinstance(a, SimdVector) else a * b + c


def choose(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, SimdVector):
        return condition.made(condition.builder.select(condition.value, a.value, b.value))
    return np.where(condition, a, b)


def bits_of(a: Any) -> Any:
    return a.cast(_WORD) if isinstance(a, SimdVector) else a.view(np.uint32)


def value_of(a: Any) -> Any:
    return a.cast(_FLOAT) if isinstance(a, SimdVector) else a.view(np.float32)


def compiled(formula: Callable[..., Any], width: int) -> Callable[..., None]:
    """A function (x, out, at, constants) that puts the formula of *width* values of x, from *at*, into out."""

    def plain(x, out, at, constants):
        with np.errstate(all="ignore"):
            out[at : at + width] = formula(x[at : at + width], *constants)

    def step(context, x, out, at, constants):
        def generate(context, builder, signature, arguments):
            kinds = signature.args
            vector = _of(_FLOAT, width)
            places = [
                builder.bitcast(
                    builder.gep(context.make_array(kind)(context, builder, array).data, [arguments[2]]),
                    vector.as_pointer(),
                )
                for kind, array in zip(kinds[:2], arguments[:2], strict=True)
            ]
            value = SimdVector(builder, builder.load(places[0], align=4), width)
            fixed = [_splat(builder, each, width) for each in cgutils.unpack_tuple(builder, arguments[3])]
            builder.store(formula(value, *fixed).value, places[1], align=4)
            return context.get_dummy_value()

        return numba.void(x, out, at, constants), generate

    run: Any = intrinsic(step)
    overload(plain)(lambda x, out, at, constants: lambda x, out, at, constants: run(x, out, at, constants))
    return plain


def _of(kind: Any, width: int) -> Any:
    return kind if width == 1 else ir.VectorType(kind, width)


def _splat(builder: Any, scalar: Any, width: int) -> SimdVector:
    if width == 1:
        return SimdVector(builder, scalar, width)
    vector = _of(scalar.type, width)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _WORD(0))
    same = ir.Constant(_of(_WORD, width), [0] * width)
    return SimdVector(builder, builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), same), width)

"""Formats as nodes of QONNX, the dialect of ONNX for numbers of any width that FINN, hls4ml and Brevitas read.

Its operators are IntQuant, FloatQuant and BipolarQuant of the domain ``qonnx.custom_op.general``, version 1. They take
and give float32, with widths and scales as inputs. A stock onnxruntime does not know them.
"""

from __future__ import annotations

from weft.base.errors import TuneError
from weft_tune.export.emitter import Emitter
from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.format import FLOAT32, Format
from weft_tune.numbers.loops import LEAST_NORMAL
from weft_tune.numbers.plain import FLOAT32_MAX
from weft_tune.numbers.spelling import spell
from weft_tune.numbers.twos_complement import TwosComplement

DOMAIN = "qonnx.custom_op.general"
VERSION = 1


def quantised(emitter: Emitter, source: str, form: AnyFormat) -> str:
    """*source* in a format."""
    if form == FLOAT32:
        return source
    if isinstance(form, TwosComplement):
        return _integer(emitter, source, form, signed=1, narrow=0, rounding_mode="HALF_UP")
    if form.kind == "BIN":
        return emitter.node("BipolarQuant", [source, *_numbers(emitter, form, form.largest)], source, domain=DOMAIN)
    if form.kind == "FIXED":
        signed = form.sign_bits
        return _integer(emitter, source, form, signed=signed, narrow=signed, rounding_mode="ROUND")
    return _float(emitter, source, form)


def _numbers(emitter: Emitter, form: AnyFormat, *values: float) -> list[str]:
    if not all(value == 0 or LEAST_NORMAL <= value <= FLOAT32_MAX for value in values):
        raise TuneError(f"{spell(form)} reaches too far for QONNX; choose a bias nearer to the values")
    return [emitter.number(value) for value in values]


def _integer(emitter: Emitter, source: str, form: AnyFormat, **attributes: int | str) -> str:
    inputs = [source, *_numbers(emitter, form, form.step, 0, form.bits)]
    return emitter.node("IntQuant", inputs, source, domain=DOMAIN, **attributes)


def _float(emitter: Emitter, source: str, form: Format) -> str:
    """EXP is a float without a mantissa. Biases are positive there; what a negative one lacks goes into the scale."""
    if not form.sign_bits:
        raise TuneError(f"{spell(form)} has no sign, which QONNX has only for integers; use the style simulated")
    scale = 2.0 ** max(0, 1 - form.bias)
    fields = (scale, form.exponent_bits, form.fraction_bits, max(1, form.bias), form.largest / scale)
    return emitter.node(
        "FloatQuant",
        [source, *_numbers(emitter, form, *fields)],
        source,
        domain=DOMAIN,
        has_inf=int(form.specials),
        has_nan=int(form.specials),
        has_subnormal=1,
        saturation=1,
        rounding_mode="ROUND",
    )

"""Scores of the classifiers under number formats on a GPU, for ``number_formats.py --cuda``.

A search over thousands of images takes minutes on a CPU and seconds on a GPU. Sums are added in another order than in
ONNX Runtime, so a score may differ by one image; therefore ONNX Runtime scores the result of a search again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor
from torch.nn import functional

from weft_tune.numbers.configuration import AnyFormat
from weft_tune.numbers.format import FLOAT32, TwosComplement
from weft_tune.quantised.evaluator import OnnxEvaluator
from weft_tune.quantised.runner import LayerFormats, SampleOrder

FIRST, AT_ONCE = 1024, 8192
"""Images: most configurations are given up after the first."""


def rounded(x: Tensor, form: AnyFormat) -> Tensor:
    """As ``weft_tune.numbers.arrays.rounded``, to nearest, in doubles."""
    if form == FLOAT32:
        return x
    wide = x.double()
    if isinstance(form, TwosComplement):
        held = wide.clamp(form.lowest, form.largest) / form.step
        return (held.sign() * (held.abs() + 0.5).floor() * form.step).float()
    if form.kind == "BIN":
        return torch.where(wide < 0, -form.largest, form.largest).float()
    a = wide.abs().clamp(max=form.largest)
    exponent = torch.frexp(a).exponent - 1
    normal = (exponent >= 1 - form.bias) & (form.exponent_bits > 0)
    exponent = torch.where(normal, exponent, 1 - form.bias)
    unit = torch.ldexp(torch.ones_like(a), exponent - form.fraction_bits)
    found = (a / unit).round() * unit
    if not form.fraction_bits:  # half way between two powers the even code wins
        down = normal & (a / unit == 1.5) & ((exponent + form.bias) % 2 == 0)
        found = torch.where(down, unit, found)
    return torch.copysign(found, wide).clamp(form.lowest, form.largest).float()


class Engine:
    """Runs batches of samples as the evaluator's own engine does, but many at once."""

    process_ids: list[int] = []  # noqa: RUF012

    def __init__(self, model: Path, batch: int, device: str) -> None:
        self._graph, self._batch, self._device = onnx.load(model).graph, batch, device
        self._weights = {tensor.name: self._tensor(numpy_helper.to_array(tensor)) for tensor in self._graph.initializer}
        self._samples: dict[str, Tensor] = {}
        self._asked: Any = None
        self._answers = np.empty(0)

    def add(self, name: str, samples: SampleOrder) -> None:
        (images,) = samples.inputs.values()
        self._samples[name] = self._tensor(images[samples.order])

    def drop(self, name: str) -> None:
        del self._samples[name]
        self._asked = None

    def close(self) -> None:
        """Nothing was started."""

    def run(self, name: str, formats: Mapping[str, LayerFormats], numbers: Iterable[int]) -> list[Any]:
        if self._asked != (asked := (name, tuple(sorted(formats.items())))):
            self._asked, self._answers = asked, np.empty((0, 0), np.float32)
        return [self._part(self._samples[name], formats, number * self._batch) for number in numbers]

    def _part(self, images: Tensor, formats: Mapping[str, LayerFormats], start: int) -> Any:
        """The outputs of one batch; more images are run where they do not reach so far."""
        end = min(start + self._batch, len(images))
        while (done := len(self._answers)) < end:
            with torch.no_grad():
                more = self._run(images[done : done + (AT_ONCE if done else FIRST)], formats).cpu().numpy()
            self._answers = np.concatenate([self._answers, more]) if done else more
        return self._answers[start:end]

    def _run(self, images: Tensor, formats: Mapping[str, LayerFormats]) -> Tensor:
        values = {self._graph.input[0].name: images, **self._weights}
        for node in self._graph.node:
            given = [values[name] for name in node.input]
            if node.name in formats:
                form = formats[node.name]
                given[:2] = rounded(given[0], form.input), rounded(given[1], form.weight)
            attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
            values[node.output[0]] = OPERATORS[node.op_type](attributes, *given)
        return values[self._graph.output[0].name]

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self._device)


def _padded(attributes: Mapping[str, Any], x: Tensor, value: float) -> Tensor:
    top, left, bottom, right = attributes["pads"]
    return functional.pad(x, (left, right, top, bottom), value=value)


def _maximum(attributes: Mapping[str, Any], x: Tensor) -> Tensor:
    x = _padded(attributes, x, -torch.inf)
    return functional.max_pool2d(x, attributes["kernel_shape"], attributes["strides"])


def _average(attributes: Mapping[str, Any], x: Tensor) -> Tensor:
    there = _padded(attributes, torch.ones_like(x[:1, :1]), 0.0)
    shape = attributes["kernel_shape"], attributes["strides"]
    return functional.avg_pool2d(_padded(attributes, x, 0.0), *shape) / functional.avg_pool2d(there, *shape)


def _convolution(attributes: Mapping[str, Any], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.conv2d(_padded(attributes, x, 0.0), weight, bias, attributes["strides"])


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "Sub": lambda attributes, a, b: a - b,
    "Mul": lambda attributes, a, b: a * b,
    "Relu": lambda attributes, x: torch.relu(x),
    "Flatten": lambda attributes, x: x.flatten(1),
    "Gemm": lambda attributes, x, weight, bias: functional.linear(x, weight, bias),
    "Conv": _convolution,
    "MaxPool": _maximum,
    "AveragePool": _average,
}
"""Those of the four networks."""


def on_gpu(evaluator: OnnxEvaluator, model: Path, device: str = "cuda") -> OnnxEvaluator:
    """The evaluator, computing with torch from now on."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    evaluator._runner.close()
    evaluator._runner = Engine(model, evaluator._plan.batch, device)  # type: ignore[assignment]
    return evaluator

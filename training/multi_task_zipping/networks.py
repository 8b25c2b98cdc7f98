"""Training nets with torch: ``train`` from drawn weights, ``accuracy``, and ``forward``, which both are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from weft.base.errors import StitchError
from weft_stitch.net import Array, Net, Op, Window

__all__ = [
    "Examples", "OpTensors", "Tensor", "accuracy", "forward", "functional", "scales", "tables", "torch", "train",
    "with_tables",
]  # fmt: skip

Tensor: TypeAlias = Any
"""torch.Tensor, whose types are not followed."""
Visit = Callable[[Op, list[Tensor]], Tensor | None]
"""Sees each op with its inputs before it runs; may give its result itself."""

MOMENTUM = 0.1
TINY = 1e-5
"""Added to a variance before it divides."""


class Examples(NamedTuple):
    """Pictures with the class that each belongs to."""

    images: Array
    """float32, [count, channels, height, width]."""
    labels: Array
    """The class of each picture: int64, [count]."""

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end, each round in another order; what does not fill a batch is left for the next round."""
        rng = np.random.default_rng(seed)
        size = min(size, len(self.labels))
        while True:
            order = rng.permutation(len(self.labels))
            for start in range(0, len(order) - size + 1, size):
                rows = order[start : start + size]
                yield torch.from_numpy(self.images[rows]), torch.from_numpy(self.labels[rows])

    def first(self, count: int) -> Tensor:
        return torch.from_numpy(self.images[:count])


@dataclass(eq=False)
class OpTensors:
    """The numbers of one op as tensors."""

    weight: Tensor = None
    scale: Tensor = None
    shift: Tensor = None


def tables(net: Net) -> dict[str, OpTensors]:
    """Copies of the net's numbers, by the value that each op writes."""
    return {op.output: OpTensors(_copy(op.weight), _copy(op.scale), _copy(op.shift)) for op in net.ops}


def with_tables(net: Net, numbers: Mapping[str, OpTensors]) -> Net:
    """The net with other numbers in the same places."""

    def changed(op: Op) -> Op:
        mine = numbers[op.output]
        return replace(op, weight=_array(mine.weight), scale=_array(mine.scale), shift=_array(mine.shift))

    return replace(net, ops=tuple(map(changed, net.ops)))


def forward(net: Net, numbers: Mapping[str, OpTensors], pictures: Tensor, visit: Visit | None = None) -> Tensor:
    """The first output of the net, [rows, numbers]."""
    values = {net.inputs[0].value: pictures.contiguous(memory_format=torch.channels_last)}
    for op in net.ops:
        inputs = [values[each] for each in op.inputs]
        given = visit(op, inputs) if visit else None
        values[op.output] = _apply(op, numbers[op.output], inputs) if given is None else given
    return values[net.outputs[0].value].flatten(1)


def accuracy(net: Net, examples: Examples, batch: int = 500) -> float:
    """The part of the examples whose class the net names."""
    numbers, right = tables(net), 0
    with torch.inference_mode():
        for start in range(0, len(examples.labels), batch):
            answers = forward(net, numbers, torch.from_numpy(examples.images[start : start + batch]))
            right += int((answers.argmax(1).numpy() == examples.labels[start : start + batch]).sum())
    return right / len(examples.labels)


def train(
    net: Net, examples: Examples, *, epochs: float, batch: int = 128, learning_rate: float = 5e-3, seed: int = 0
) -> Net:
    """The net with trained weights; affines that scale are batch normalisations while it learns, tables after it."""
    numbers = tables(net)
    norms = {op.output: _Norm(numbers[op.output]) for op in net.ops if op.kind == "affine" and scales(op)}
    learned = [each for mine in numbers.values() for each in (mine.weight, mine.scale, mine.shift) if each is not None]
    for each in learned:
        each.requires_grad_()
    optimizer = torch.optim.AdamW(learned, weight_decay=0.01)
    steps = max(1, round(epochs * len(examples.labels) / batch))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps + 1)

    def normalised(op: Op, inputs: list[Tensor]) -> Tensor | None:
        return norms[op.output](inputs[0]) if op.output in norms else None

    for _, (pictures, labels) in zip(range(steps), examples.batches(batch, seed), strict=False):
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(forward(net, numbers, pictures, normalised), labels).backward()
        optimizer.step()
        schedule.step()
    return with_tables(net, {**numbers, **{value: norm.folded() for value, norm in norms.items()}})


def scales(op: Op) -> bool:
    """Whether an affine is more than a bias."""
    return op.scale is not None and not bool((op.scale == 1).all())


class _Norm:
    """A batch normalisation with its running mean and variance."""

    def __init__(self, numbers: OpTensors) -> None:
        self._numbers = numbers
        self._mean, self._variance = torch.zeros_like(numbers.scale), torch.ones_like(numbers.scale)

    def __call__(self, value: Tensor) -> Tensor:
        mine = self._numbers
        return functional.batch_norm(
            value, self._mean, self._variance, mine.scale, mine.shift, training=True, momentum=MOMENTUM, eps=TINY
        )

    def folded(self) -> OpTensors:
        scale = self._numbers.scale * (self._variance + TINY).rsqrt()
        return OpTensors(scale=scale, shift=self._numbers.shift - scale * self._mean)


def _apply(op: Op, numbers: OpTensors, inputs: list[Tensor]) -> Tensor:
    value = inputs[0]
    if op.kind == "conv":
        window, pads = op.window, op.window.pads[:2]
        if op.window.pads[2:] != pads:
            value, pads = _padded(value, window, 0.0), (0, 0)
        return functional.conv2d(value, numbers.weight, None, window.strides, pads, window.dilations, op.groups)
    if op.kind == "affine":
        value = value if numbers.scale is None else value * numbers.scale[:, None, None]
        return value if numbers.shift is None else value + numbers.shift[:, None, None]
    if op.kind == "unary":
        return _unary(op)(value)
    if op.kind in ("add", "mul"):
        for other in inputs[1:]:
            value = value + other if op.kind == "add" else value * other
        return value
    if op.kind == "concat":
        return torch.cat(inputs, 1)
    if op.kind == "global_pool":
        return value.mean((2, 3), keepdim=True)
    return _pool(op, value)


def _pool(op: Op, value: Tensor) -> Tensor:
    kernel, strides = op.window.kernel, op.window.strides
    if op.kind == "max_pool":
        value = _padded(value, op.window, -float("inf"))
        return functional.max_pool2d(value, kernel, strides, dilation=op.window.dilations)
    if op.kind != "avg_pool" or op.window.dilations != (1, 1):
        raise StitchError(f"{op.name}: a dilated average or an island cannot be trained; leave it out of the nets")
    sums = functional.avg_pool2d(_padded(value, op.window, 0.0), kernel, strides)
    if op.settings.get("count_include_pad") or not any(op.window.pads):
        return sums
    return sums / functional.avg_pool2d(_padded(torch.ones_like(value[:1, :1]), op.window, 0.0), kernel, strides)


def _padded(value: Tensor, window: Window, filling: float) -> Tensor:
    top, left, bottom, right = window.pads
    return functional.pad(value, (left, right, top, bottom), value=filling) if any(window.pads) else value


def _unary(op: Op) -> Callable[[Tensor], Tensor]:
    settings = op.settings
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "Relu": functional.relu,
        "Sigmoid": torch.sigmoid,
        "Tanh": torch.tanh,
        "Silu": functional.silu,
        "HardSwish": functional.hardswish,
        "Softplus": functional.softplus,
        "Gelu": lambda x: functional.gelu(x, approximate="tanh" if settings.get("tanh") else "none"),
        "HardSigmoid": lambda x: (settings.get("alpha", 0.2) * x + settings.get("beta", 0.5)).clamp(0, 1),
        "LeakyRelu": lambda x: functional.leaky_relu(x, settings.get("alpha", 0.01)),
        "Elu": lambda x: functional.elu(x, settings.get("alpha", 1.0)),
        "Clip": lambda x: x.clamp(settings.get("min"), settings.get("max")),
    }
    if op.function not in known:
        raise StitchError(f"{op.name}: {op.function} cannot be trained; it may be {', '.join(known)}")
    return known[op.function]


def _copy(array: Array | None) -> Tensor:
    return None if array is None else torch.from_numpy(np.array(array, np.float32))


def _array(tensor: Tensor) -> Array | None:
    return None if tensor is None else tensor.detach().numpy().copy()

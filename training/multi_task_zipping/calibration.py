"""What a net's channels look like on some pictures: ``moments`` and ``statistics``, and ``restore`` to keep them.

Keeping the mean and deviation of every channel after weights were merged is what a batch normalisation would do that
sees the new weights: Jordan et al., REPAIR: REnormalizing Permuted Activations for Interpolation Repair, ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft_stitch.net import Array, Net, Op

from .networks import OpTensors, Tensor, forward, scales, torch

Statistics = Mapping[str, tuple[Tensor, Tensor]]
"""Value that an affine writes -> mean and deviation of each of its channels."""

FLAT = 1e-6
"""A channel that deviates less is constant: it has no scale to set."""


def moments(net: Net, numbers: Mapping[str, OpTensors], pictures: Tensor) -> dict[str, Array]:
    """Means of products of each convolution's input channels, float64, by the value it writes."""
    found: dict[str, Array] = {}

    def see(op: Op, inputs: list[Tensor]) -> None:
        if op.kind == "conv":
            flat = inputs[0].double().transpose(0, 1).flatten(1)
            found[op.output] = (flat @ flat.T / flat.shape[1]).numpy()

    _look(net, numbers, pictures, see)
    return found


def statistics(net: Net, numbers: Mapping[str, OpTensors], pictures: Tensor) -> Statistics:
    """The means and deviations that all affines give out on *pictures*."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def see(op: Op, inputs: list[Tensor]) -> None:
        if op.kind == "affine":
            mine, (mean, deviation) = numbers[op.output], _spread(inputs[0])
            scale = torch.ones_like(mean) if mine.scale is None else mine.scale
            shift = torch.zeros_like(mean) if mine.shift is None else mine.shift
            found[op.output] = scale * mean + shift, scale.abs() * deviation

    _look(net, numbers, pictures, see)
    return found


def restore(net: Net, numbers: Mapping[str, OpTensors], pictures: Tensor, wanted: Statistics) -> None:
    """Set the affines in *numbers* so that they have the *wanted* statistics; biases only get the mean."""
    last = {port.value for port in net.outputs}

    def see(op: Op, inputs: list[Tensor]) -> None:
        mine = numbers[op.output]
        if op.kind != "affine" or mine.shift is None or op.output in last:
            return
        (mean, deviation), (wanted_mean, wanted_deviation) = _spread(inputs[0]), wanted[op.output]
        if scales(op):
            factor = torch.where(deviation > FLAT, wanted_deviation / deviation.clamp_min(FLAT), mine.scale.abs())
            mine.scale = mine.scale.sign() * factor
        mine.shift = wanted_mean - (mean if mine.scale is None else mine.scale * mean)

    _look(net, numbers, pictures, see)


def _look(
    net: Net, numbers: Mapping[str, OpTensors], pictures: Tensor, see: Callable[[Op, list[Tensor]], None]
) -> None:
    with torch.no_grad():
        forward(net, numbers, pictures, see)


def _spread(value: Tensor) -> tuple[Tensor, Tensor]:
    return value.mean((0, 2, 3)), value.std((0, 2, 3), correction=0)

"""Early exits on any model: placed at equal shares of its MACs, each at the end of a block, with a head of its own.

A head is made of ordinary layers, which stand right after the block. ``fc`` averages every channel
and has one fully connected layer. ``conv`` has a convolution before that, sized so that it takes one
hundredth of the model's MACs: 3x3 where that buys 32 channels in an image, else 1x1 with as many
channels as it buys.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from weft.base.errors import ModelError, unknown_name
from weft.models.layer import Exit, Gemm, Layer, Model

HEADS = ("fc", "conv")

_CONV_SHARE = 100  # a convolution head has 1/100 of the model's MACs, so that heads hardly change what is scheduled
_FEWEST_CHANNELS = 32  # fewer 3x3 channels tell too little apart; 1x1 buys nine times as many for the same MACs


def with_exits(model: Model, count: int = 3, *, head: str = "fc", classes: int | None = None) -> Model:
    """*model* with *count* exits before its end, as near to equal shares of its MACs as its block ends allow.

    classes: number of classes of a head; by default the columns of the model's last product.
    """
    if head not in HEADS:
        raise ModelError(unknown_name("exit head", head, HEADS))
    if model.exits:
        listed = ", ".join(early.name for early in model.exits)
        raise ModelError(f"{model.name} has exits already ({listed}); use these, or a model without")
    if count < 1:
        raise ModelError(f"{model.name}: exits = {count} must be at least 1, the end of the model not counted")
    wanted = _classes(model) if classes is None else classes
    if wanted < 1:
        raise ModelError(f"{model.name}: an exit head needs at least 1 class, got {wanted}")
    heads = [
        _head(f"exit{number}", model, place, head, wanted)
        for number, place in enumerate(_places(model, count), start=1)
    ]
    return _insert_heads(model, heads)


def subnets(model: Model) -> tuple[range, ...]:
    """Ranges of layers from one exit to the next, up to the end."""
    bounds = (0, *(early.after for early in model.exits), len(model.layers))
    return tuple(map(range, bounds, bounds[1:]))


def exit_shares(model: Model) -> tuple[float, ...]:
    """Share of the model's MACs up to each exit, the end (1) included."""
    done = list(accumulate((layer.macs for layer in model.layers), initial=0))
    return tuple(done[after] / max(1, done[-1]) for after in (*(early.after for early in model.exits), -1))


class _Place(NamedTuple):
    """A block end to put an exit at: layers before it, positions and channels of its activation."""

    after: int
    positions: int
    channels: int


class _HeadLayers(NamedTuple):
    after: int
    name: str
    layers: tuple[Layer, ...]


def _places(model: Model, count: int) -> list[_Place]:
    """The block ends nearest to equal shares of the MACs, each used once, in order."""
    done = list(accumulate((layer.macs for layer in model.layers), initial=0))
    # Of block ends with no multiplication between them the last: the norm and the pool belong to the block.
    last_at = {done[end]: index for index, end in enumerate(model.block_ends) if 0 < done[end] < done[-1]}
    if len(last_at) < count:
        raise ModelError(
            f"{model.name} has room for {len(last_at)} exits (ends of blocks, where one activation crosses), "
            f"not for {count}; ask for fewer, or name outputs of an ONNX file"
        )
    chosen = _nearest(list(last_at), [done[-1] * share / (count + 1) for share in range(1, count + 1)])
    return [_place(model, last_at[macs]) for macs in chosen]


def _nearest(ascending: Sequence[int], targets: Sequence[float]) -> list[int]:
    """The nearest value to each target, no value twice, leaving enough for the targets that follow."""
    chosen: list[int] = []
    first = 0
    for place, target in enumerate(targets):
        stop = len(ascending) - (len(targets) - place - 1)
        after = min(max(bisect_left(ascending, target), first), stop - 1)
        before = max(after - 1, first)
        best = before if target - ascending[before] <= abs(ascending[after] - target) else after
        chosen.append(ascending[best])
        first = best + 1
    return chosen


def _place(model: Model, index: int) -> _Place:
    after = model.block_ends[index]
    if model.block_shapes:
        return _Place(after, *model.block_shapes[index])
    before = model.layers[after - 1]
    channels = before.gemm.n * before.gemm.groups if before.gemm else max(1, before.output_elements)
    return _Place(after, max(1, before.output_elements // channels), channels)


def _classes(model: Model) -> int:
    last = next((layer.gemm for layer in reversed(model.layers) if layer.gemm and layer.weights), None)
    if last is None:
        raise ModelError(f"{model.name} multiplies no weights: say how many classes its exits tell apart")
    return last.n * last.groups


def _head(name: str, model: Model, place: _Place, kind: str, classes: int) -> _HeadLayers:
    like = next(layer for layer in reversed(model.layers[: place.after]) if layer.macs)
    layers: list[Layer] = []
    channels = place.channels
    if kind == "conv":
        convolution = _convolution(f"{name}/conv", model, place, like)
        layers.append(convolution)
        channels = convolution.output_elements // place.positions
    values = place.positions * channels
    layers.append(
        Layer(
            f"{name}/pool",
            "pool",
            "GlobalAveragePool",
            input_elements=values,
            output_elements=channels,
            activation_bits=like.activation_bits,
        )
    )
    layers.append(_product(f"{name}/fc", "Gemm", Gemm(1, channels, classes), like))
    return _HeadLayers(place.after, name, tuple(layers))


def _convolution(name: str, model: Model, place: _Place, like: Layer) -> Layer:
    budget = model.macs // _CONV_SHARE
    image = any(layer.kind == "conv" and layer.gemm and layer.gemm.kernel > 1 for layer in model.layers[: place.after])
    per_channel = place.positions * place.channels
    kernel = 9 if image and budget // (9 * per_channel) >= _FEWEST_CHANNELS else 1
    outs = max(1, round(budget / (kernel * per_channel)))
    return _product(name, "Conv", Gemm(place.positions, place.channels * kernel, outs, kernel=kernel), like)


def _product(name: str, op: str, gemm: Gemm, like: Layer) -> Layer:
    """A layer with weights and a bias, with the bit widths of *like*."""
    return Layer(
        name,
        "conv" if op == "Conv" else "gemm",
        op,
        gemm=gemm,
        weights=gemm.k * gemm.n,
        parameters=(gemm.k + 1) * gemm.n,
        input_elements=gemm.m * gemm.k // gemm.kernel,
        output_elements=gemm.m * gemm.n,
        weight_bits=like.weight_bits,
        activation_bits=like.activation_bits,
    )


def _insert_heads(model: Model, heads: Sequence[_HeadLayers]) -> Model:
    """The model with the heads inserted; block ends move along, and each head adds one."""
    taken = {layer.name for layer in model.layers}
    if clash := next((layer.name for head in heads for layer in head.layers if layer.name in taken), None):
        raise ModelError(f"{model.name} has a layer called {clash!r} already, the name of an exit's layer")
    layers: list[Layer] = []
    exits: list[Exit] = []
    ends: dict[int, tuple[int, int]] = {}
    shapes = dict(zip(model.block_ends, model.block_shapes or ((0, 0),) * len(model.block_ends), strict=True))
    at = {head.after: head for head in heads}
    for done, layer in enumerate(model.layers, start=1):
        layers.append(layer)
        if done in shapes:
            ends[len(layers)] = shapes[done]
        if done in at:
            layers += at[done].layers
            exits.append(Exit(at[done].name, len(layers)))
            ends[len(layers)] = shapes[done]
    return replace(
        model,
        layers=tuple(layers),
        exits=tuple(exits),
        block_ends=tuple(ends),
        block_shapes=tuple(ends.values()) if model.block_shapes else (),
    )

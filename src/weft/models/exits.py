"""Early exits on any model: placed at equal shares of its MACs, each at the end of a block, with a head of its own.

A head is made of ordinary layers, which stand right after the block. ``fc`` averages every channel
and has one fully connected layer. ``conv`` has a convolution before that, sized so that it takes one
hundredth of the model's MACs: in image networks 3x3 if this allows at least 32 channels, else 1x1.
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

_CONV_SHARE = 100  # a convolution head has 1/100 of the model's MACs, so that heads hardly change the schedule
_FEWEST_CHANNELS = 32  # fewer 3x3 channels classify poorly; a 1x1 convolution has nine times as many at equal MACs


def with_exits(model: Model, count: int = 3, *, head: str = "fc", classes: int | None = None) -> Model:
    """Add *count* exits to a model, as near to equal shares of its MACs as its block ends allow.

    classes: number of classes of a head; by default the columns of the model's last matrix product.
    """
    if head not in HEADS:
        raise ModelError(unknown_name("exit head", head, HEADS))
    if model.exits:
        listed = ", ".join(early.name for early in model.exits)
        raise ModelError(f"{model.name} has exits already ({listed}); use these, or a model without")
    if count < 1:
        raise ModelError(f"{model.name}: exits = {count} must be at least 1, the end of the model not counted")
    class_count = _count_classes(model) if classes is None else classes
    if class_count < 1:
        raise ModelError(f"{model.name}: an exit head needs at least 1 class, got {class_count}")
    heads = [
        _make_head(f"exit{number}", model, block_end, head, class_count)
        for number, block_end in enumerate(_choose_block_ends(model, count), start=1)
    ]
    return _insert_heads(model, heads)


def subnets(model: Model) -> tuple[range, ...]:
    """The ranges of layers between exits: from the start to the first exit, from exit to exit, and to the end."""
    bounds = (0, *(early.after for early in model.exits), len(model.layers))
    return tuple(map(range, bounds, bounds[1:]))


def exit_shares(model: Model) -> tuple[float, ...]:
    """Fraction of the model's MACs before each exit, and last before the end (1)."""
    macs_before = list(accumulate((layer.macs for layer in model.layers), initial=0))
    places = (*(early.after for early in model.exits), -1)  # -1: the end
    return tuple(macs_before[after] / max(1, macs_before[-1]) for after in places)


class _ExitPlace(NamedTuple):
    """A block end with room for an exit: the number of layers before, positions and channels of the activation."""

    after: int
    positions: int
    channels: int


class _HeadLayers(NamedTuple):
    """The layers of an exit's head, to be inserted after the first *after* layers of the model."""

    after: int
    name: str
    layers: tuple[Layer, ...]


def _choose_block_ends(model: Model, count: int) -> list[_ExitPlace]:
    """Choose *count* different block ends nearest to equal shares of the MACs, in order."""
    macs_before = list(accumulate((layer.macs for layer in model.layers), initial=0))
    total = macs_before[-1]
    # Of block ends without MACs between them, the last counts, so that a norm or pool stays with its block.
    end_at = {macs_before[end]: index for index, end in enumerate(model.block_ends) if 0 < macs_before[end] < total}
    if len(end_at) < count:
        raise ModelError(
            f"{model.name} has room for {len(end_at)} exits (ends of blocks, where one activation crosses), "
            f"not for {count}; ask for fewer, or name outputs of an ONNX file"
        )
    chosen = _nearest(list(end_at), [total * number / (count + 1) for number in range(1, count + 1)])
    return [_exit_place(model, end_at[macs]) for macs in chosen]


def _nearest(ascending: Sequence[int], targets: Sequence[float]) -> list[int]:
    """Choose a different value for each ascending target: the nearest one that leaves enough for later targets."""
    chosen: list[int] = []
    first = 0
    for number, target in enumerate(targets):
        stop = len(ascending) - (len(targets) - number - 1)  # from here on, values are left for later targets
        after = min(max(bisect_left(ascending, target), first), stop - 1)
        before = max(after - 1, first)
        best = before if target - ascending[before] <= abs(ascending[after] - target) else after
        chosen.append(ascending[best])
        first = best + 1
    return chosen


def _exit_place(model: Model, index: int) -> _ExitPlace:
    """The block end number *index* of a model; its shape is guessed from the layer before if it is unknown."""
    after = model.block_ends[index]
    if model.block_shapes:
        return _ExitPlace(after, *model.block_shapes[index])
    before = model.layers[after - 1]
    channels = before.gemm.n * before.gemm.groups if before.gemm else max(1, before.output_elements)
    return _ExitPlace(after, max(1, before.output_elements // channels), channels)


def _count_classes(model: Model) -> int:
    """The columns of the model's last product with weights; raises ModelError if the model has none."""
    last = next((layer.gemm for layer in reversed(model.layers) if layer.gemm and layer.weights), None)
    if last is None:
        raise ModelError(f"{model.name} multiplies no weights: say how many classes its exits tell apart")
    return last.n * last.groups


def _make_head(name: str, model: Model, place: _ExitPlace, kind: str, classes: int) -> _HeadLayers:
    """The layers of a head at a block end: a convolution if *kind* is "conv", a pool and a fully connected layer."""
    # the head has the bit widths of the last layer before it that multiplies
    reference = next(layer for layer in reversed(model.layers[: place.after]) if layer.macs)
    layers: list[Layer] = []
    channels = place.channels
    if kind == "conv":
        convolution = _convolution(f"{name}/conv", model, place, reference)
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
            activation_bits=reference.activation_bits,
        )
    )
    layers.append(_product(f"{name}/fc", "Gemm", Gemm(1, channels, classes), reference))
    return _HeadLayers(place.after, name, tuple(layers))


def _convolution(name: str, model: Model, place: _ExitPlace, reference: Layer) -> Layer:
    """The convolution of a head with about 1/``_CONV_SHARE`` of the model's MACs, and the bit widths of *reference*."""
    budget = model.macs // _CONV_SHARE
    # a network for images has convolutions with windows
    image = any(layer.kind == "conv" and layer.gemm and layer.gemm.kernel > 1 for layer in model.layers[: place.after])
    per_channel = place.positions * place.channels
    kernel = 9 if image and budget // (9 * per_channel) >= _FEWEST_CHANNELS else 1
    channels = max(1, round(budget / (kernel * per_channel)))
    return _product(name, "Conv", Gemm(place.positions, place.channels * kernel, channels, kernel=kernel), reference)


def _product(name: str, op: str, gemm: Gemm, reference: Layer) -> Layer:
    """A layer with weights and a bias, with the bit widths of *reference*."""
    return Layer(
        name,
        "conv" if op == "Conv" else "gemm",
        op,
        gemm=gemm,
        weights=gemm.k * gemm.n,
        parameters=(gemm.k + 1) * gemm.n,
        input_elements=gemm.m * gemm.k // gemm.kernel,
        output_elements=gemm.m * gemm.n,
        weight_bits=reference.weight_bits,
        activation_bits=reference.activation_bits,
    )


def _insert_heads(model: Model, heads: Sequence[_HeadLayers]) -> Model:
    """The model with the heads inserted as exits; block ends are renumbered, and the end of each head is a new one."""
    used_names = {layer.name for layer in model.layers}
    if clash := next((layer.name for head in heads for layer in head.layers if layer.name in used_names), None):
        raise ModelError(f"{model.name} has a layer called {clash!r} already, the name of an exit's layer")
    layers: list[Layer] = []
    exits: list[Exit] = []
    ends: dict[int, tuple[int, int]] = {}  # block end in the result -> positions and channels there
    shapes = dict(zip(model.block_ends, model.block_shapes or ((0, 0),) * len(model.block_ends), strict=True))
    head_after = {head.after: head for head in heads}
    for done, layer in enumerate(model.layers, start=1):
        layers.append(layer)
        if done in shapes:
            ends[len(layers)] = shapes[done]
        if head := head_after.get(done):
            layers += head.layers
            exits.append(Exit(head.name, len(layers)))
            ends[len(layers)] = shapes[done]
    return replace(
        model,
        layers=tuple(layers),
        exits=tuple(exits),
        block_ends=tuple(ends),
        block_shapes=tuple(ends.values()) if model.block_shapes else (),
    )

"""What the kernel of the form ``fused`` computes, tile by tile, in numpy: its twin, and what runs without CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft_stitch.net import Array
from weft_stitch.packing import Activation, PackedLayer, Tile


def plain(
    packed: PackedLayer,
    rows: Sequence[int],
    activation: Activation,
    x: Array,
    weights: Array,
    scale: Array,
    shift: Array,
    residual: Array | None = None,
) -> Array:
    """*x* and *residual* are [rows, height, width, columns], as is the result."""
    patches, (tall, wide) = _patches(packed, x)
    taps = packed.window.kernel[0] * packed.window.kernel[1]
    y = np.zeros((len(patches), packed.outputs), np.float32)
    for fields in packed.tiles([each * tall * wide for each in rows], 1 << 30, 1 << 30):
        tile = Tile(*(int(each) for each in fields[: len(Tile._fields)]))
        k, channel = np.arange(tile.depth), tile.skip + np.arange(tile.width)
        place, line = _place_of(packed, tile, k, taps)
        owned = place >= 0
        at = place[owned][:, None, None] + (line[owned][:, None] * np.arange(taps))[:, :, None] + channel
        positions = slice(tile.first_position, tile.end_position)
        total = np.einsum("pkt,ktn->pn", patches[positions][:, k[owned]], weights[at], optimize=True)
        out = tile.column + channel
        total = total * scale[tile.task, out] + shift[tile.task, out]
        total += 0.0 if residual is None else residual.reshape(y.shape)[positions][:, out]
        y[positions, tile.column + tile.skip : tile.column + tile.skip + tile.width] = activated(total, activation)
    return y.reshape(len(x), tall, wide, packed.outputs)


def _place_of(packed: PackedLayer, tile: Tile, k: Array, taps: int) -> tuple[Array, Array]:
    """Where the weights of each input column begin (-1: the task has none), and how far it is from tap to tap."""
    if packed.by_table:
        place, line = packed.places.reshape(2, -1)[:, tile.table + k]
        return np.where(place < 0, -1, place * packed.align), line * packed.align
    second = k >= tile.second_column
    owned = (k < tile.first_end) | (second & (k < tile.second_end))
    place = tile.first_place + k * taps * tile.line + second * tile.jump
    return np.where(owned, place, -1), np.full_like(k, tile.line)


def _patches(packed: PackedLayer, x: Array) -> tuple[Array, tuple[int, int]]:
    """[output position, column, tap]: what every output position sees; and the size of the output."""
    window = packed.window
    top, left, bottom, right = window.pads
    padded = np.pad(np.asarray(x, np.float32), ((0, 0), (top, bottom), (left, right), (0, 0)))
    tall, wide = window.output(x.shape[1], x.shape[2])
    seen = []
    for i in range(window.kernel[0]):
        for j in range(window.kernel[1]):
            first, second = i * window.dilations[0], j * window.dilations[1]
            cut = padded[:, first :: window.strides[0], second :: window.strides[1]][:, :tall, :wide]
            seen.append(cut.reshape(-1, padded.shape[-1]))
    return np.stack(seen, axis=-1), (tall, wide)


def activated(y: Array, activation: Activation) -> Array:
    """The activation's function of *y*."""
    function, alpha, beta = activation
    if function in ("Sigmoid", "Silu"):
        with np.errstate(over="ignore"):
            gate = 1.0 / (1.0 + np.exp(-y))
        return gate if function == "Sigmoid" else y * gate
    if function == "HardSigmoid":
        return np.clip(alpha * y + beta, 0, 1)
    if function == "HardSwish":
        return y * np.clip(y / 6 + 0.5, 0, 1)
    if function == "LeakyRelu":
        return np.where(y < 0, alpha * y, y)
    if function == "Clip":
        return np.clip(y, alpha, beta)
    return np.maximum(y, 0) if function == "Relu" else y

"""A layer of all tasks in one step, in torch: ``FusedConv``; on CUDA it is one kernel (``kernel``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft_stitch.graph import GraphStep
from weft_stitch.net import Array
from weft_stitch.packing import LARGEST, Activation, PackedLayer, Tile
from weft_stitch.running.operators import Tensor, torch


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
    for fields in packed.tiles([row_count * tall * wide for row_count in rows], 1 << 30, 1 << 30):
        tile = Tile(*(int(field) for field in fields[: len(Tile._fields)]))
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


class Shape(NamedTuple):
    """How much one program of the kernel does, and how the compiler arranges it."""

    tall: int
    """How many output positions it computes."""
    wide: int
    """How many output channels it computes."""
    deep: int
    """How many input columns it reads at a time."""
    warps: int = 4
    stages: int = 3
    flat: bool = False
    """Walk taps and columns as one dimension: better when there are few columns."""


class FusedConv(torch.nn.Module):
    """Convolve, scale, shift, add and activate all tasks' rows; tensors are [rows, columns, height, width]."""

    def __init__(self, packed: PackedLayer, rows: Sequence[int], activation: Activation, *tables: Array) -> None:
        super().__init__()
        self.packed, self.rows, self.activation = packed, tuple(rows), activation
        self.shape = Shape(64, 32, 32)
        self.reuses = False
        """Whether the result takes the place of the residual, which nothing else needs."""
        self._places: dict[Any, tuple[Tensor, ...]] = {}
        """Tables of tiles for the shapes that it had so far."""
        for name, table in zip(("weights", "scale", "shift"), tables, strict=True):
            self.register_buffer(name, torch.from_numpy(np.array(table)))

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, into: Tensor | None = None, keep: bool = False
    ) -> Tensor:
        """The layer's output, in *into* if that lies as it does; *keep* leaves the residual as it is."""
        lying = x.permute(0, 2, 3, 1).contiguous()
        more = None if residual is None else residual.permute(0, 2, 3, 1).contiguous()
        place = more if self.reuses and not keep else None
        if into is not None and into.dtype == x.dtype and into.permute(0, 2, 3, 1).is_contiguous():
            place = into.permute(0, 2, 3, 1)
            if self.packed.ragged:
                place.zero_()
        y = self.launch(lying, more, place) if x.is_cuda else self.plainly(lying, more)
        if place is not None and y is not place:  # where there is no kernel
            y = place.copy_(y)
        return y.permute(0, 3, 1, 2)

    def plainly(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The layer computed without CUDA: [rows, height, width, columns] in and out."""
        given, weights, scale, shift = (
            tensor.float().cpu().numpy() for tensor in (x, self.weights, self.scale, self.shift)
        )
        more = None if residual is None else residual.float().cpu().numpy()
        y = plain(self.packed, self.rows, self.activation, given, weights, scale, shift, more)
        return torch.from_numpy(y).to(x)

    def launch(self, x: Tensor, residual: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """One kernel: [rows, height, width, columns] in and out; *into* may be the residual."""
        from weft_stitch.running.kernel import fused_kernel

        height, width = self.packed.window.output(x.shape[1], x.shape[2])
        size = (x.shape[0], height, width, self.packed.outputs)
        if max(x.numel(), x.shape[0] * height * width * self.packed.outputs) >= LARGEST:
            raise StitchError(f"{list(size)} values are more than the fused form can count; use fewer rows")
        y = into
        if y is None:
            y = (torch.zeros if self.packed.ragged else torch.empty)(size, dtype=x.dtype, device=x.device)
        tiles, *_ = tables = self.tables(height * width, x.device)
        fused_kernel[(tiles.shape[0],)](*self.arguments(x, tables, residual, y), **self.settings(residual is not None))
        return y

    @property
    def narrow(self) -> int:
        """The width of what rides along with the tiles of shared blocks, 0 when it is too wide for that."""
        width = max(16, 1 << (self.packed.narrow - 1).bit_length()) if self.packed.narrow else 0
        return width if 2 * width <= self.shape.wide else 0

    def tables(self, positions: int, device: Any) -> tuple[Tensor, ...]:
        """Tables of tiles, places and lines for *positions* output positions of a row."""
        key = (positions, self.shape.tall, self.shape.wide, self.narrow, device)
        if key not in self._places:
            tiles = self.packed.tiles([rows * positions for rows in self.rows], *key[1:4])
            arrays = (tiles, *(self.packed.places if self.packed.by_table else (tiles, tiles)))
            self._places[key] = tuple(torch.from_numpy(array).to(device) for array in arrays)
        return self._places[key]

    def forget_tables(self) -> None:
        """Give tables back; the next launch makes those that it needs."""
        self._places.clear()

    def arguments(self, x: Tensor, tables: Sequence[Tensor], residual: Tensor | None, y: Tensor) -> tuple[Any, ...]:
        packed, (tiles, places, lines) = self.packed, tables
        return (
            x, self.weights, places, lines, tiles, self.scale, self.shift, y if residual is None else residual, y,
            x.shape[1], x.shape[2], y.shape[1], y.shape[2],
            packed.inputs // packed.input_align, packed.outputs // packed.align,
        )  # fmt: skip

    def settings(self, residual: bool) -> dict[str, Any]:
        window, packed, shape = self.packed.window, self.packed, self.shape
        return dict(
            TAPS_HIGH=window.kernel[0], TAPS_WIDE=window.kernel[1],
            STRIDE_H=window.strides[0], STRIDE_W=window.strides[1], PAD_H=window.pads[0], PAD_W=window.pads[1],
            DILATION_H=window.dilations[0], DILATION_W=window.dilations[1],
            BY_TABLE=packed.by_table, RESIDUAL=residual,
            ACTIVATION=self.activation.function, ALPHA=self.activation.alpha, BETA=self.activation.beta,
            ALIGN=packed.align, INPUT_ALIGN=packed.input_align,
            FLAT=shape.flat, DEPTH=packed.depth if shape.flat else 0,
            PRECISION="tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
            TALL=shape.tall, WIDE=shape.wide, DEEP=shape.deep, NARROW=self.narrow,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip


def operator(step: GraphStep, constants: Mapping[str, Array]) -> FusedConv:
    """The module of a step ``FusedConv``."""
    given = step.attributes
    return FusedConv(
        given["packed"], given["rows"], given["activation"], *(constants[name] for name in step.inputs[1:4])
    )

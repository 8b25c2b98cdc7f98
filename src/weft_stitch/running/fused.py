"""A layer of all tasks in one step, in torch: ``FusedConv``; on CUDA it is one kernel (``kernel``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft_stitch.fused_plain import plain
from weft_stitch.graph import GraphStep
from weft_stitch.net import Array
from weft_stitch.packing import LARGEST, Activation, PackedLayer
from weft_stitch.running.operators import Tensor, torch


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
            each.float().cpu().numpy() for each in (x, self.weights, self.scale, self.shift)
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
        """Tiles, places and lines for so many positions of a row."""
        key = (positions, self.shape.tall, self.shape.wide, self.narrow, device)
        if key not in self._places:
            tiles = self.packed.tiles([rows * positions for rows in self.rows], *key[1:4])
            arrays = (tiles, *(self.packed.places if self.packed.by_table else (tiles, tiles)))
            self._places[key] = tuple(torch.from_numpy(each).to(device) for each in arrays)
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
        given["packed"], given["rows"], given["activation"], *(constants[each] for each in step.inputs[1:4])
    )

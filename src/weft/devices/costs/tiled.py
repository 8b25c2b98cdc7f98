"""The cost of a layer on a tiled NPU: a product (R x P) @ (P x C) in tiles that stay until their sum is complete.

The loop nest (Fluid Batching, sections II-C and III-A; output stationary, every operand in off-chip memory)::

    for each group:  for each tile of T_R rows:  for each pass over the T_C PEs:  for each T_P of the reduction:
        load rows x T_P inputs for every sample in the pass, T_P weights for every PE; one row per cycle

A batch of b samples is B_P lanes of B_R samples each. The samples of a lane are stacked as rows and share one fetch of
the weights; the lanes lie side by side and fetch weights separately. B_P = b - B_R + 1 (equation 1), so mixtures leave
slots empty, which cost time and weights but no activations. Off-chip traffic overlaps with computing (a roofline).

The arithmetic is compiled (``weft.kernels.tiled``): a search prices millions of such settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError
from weft.devices.tiled import Edges, PReading, TiledNpu
from weft.kernels import tiled as kernel
from weft.models.layer import Layer, Model

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

STATES_OF_K_BITS = 2
"""Bits of a look-up table's entry for the setting of the stackable PEs, which has three values."""

READINGS: dict[PReading, int] = {
    "straddle": kernel.STRADDLE,
    "refetch": kernel.REFETCH,
    "groups": kernel.GROUPS,
    "broadcast": kernel.BROADCAST,
}
EDGES: dict[Edges, int] = {
    "added": kernel.EDGES_ADDED,
    "within": kernel.EDGES_WITHIN,
    "none": kernel.EDGES_NONE,
}


class Best(NamedTuple):
    """The best time of every design and product, and the shape index and B_R with that time."""

    times_s: Floats
    """Seconds: one row per design, one column per product."""
    shape: Ints
    b_r: Ints


class TiledChoice(NamedTuple):
    """How a layer processes a batch, and its time."""

    at_once: int
    """Samples processed at a time: the batch size, or 1 if the layer runs sample by sample."""
    b_r: int
    """Samples stacked as rows (B_R)."""
    k: float
    """The setting of the stackable PEs (``PeShape.k``)."""
    time_s: float
    """Seconds for the whole batch."""

    @property
    def b_p(self) -> int:
        """Lanes of samples side by side (B_P)."""
        return self.at_once - self.b_r + 1


@dataclass(frozen=True, slots=True)
class LookupTable:
    """The look-up table in the control block of the Fluid Batching Engine, with the time of each choice."""

    model: str
    device: str
    layers: tuple[str, ...]
    """The layers that are matrix products; other layers need no entry."""
    rows: tuple[tuple[TiledChoice, ...], ...]
    """Index: batch size - 1; a choice for each of ``layers``."""

    @property
    def max_batch(self) -> int:
        return len(self.rows)

    @property
    def bits_per_entry(self) -> int:
        return math.ceil(math.log2(self.max_batch)) + STATES_OF_K_BITS

    @property
    def storage_bits(self) -> int:
        """Bits of the table: an entry of B_R and k for each layer and batch size."""
        return len(self.layers) * self.max_batch * self.bits_per_entry


def layer_times_s(model: Model, device: TiledNpu, batch: int) -> tuple[float, ...]:
    """Seconds of every layer of the model for a batch, each with its fastest setting."""
    return tuple(choice.time_s for choice in choices(model, device, batch))


def choices(model: Model, device: TiledNpu, batch: int) -> tuple[TiledChoice, ...]:
    """The fastest (B_R, k) of every layer at that batch size; a layer that is no matrix product has no alternatives."""
    if batch < 1:
        raise InputError(f"{model.name}: a batch has at least one sample, not {batch}")
    layer_choices = [_without_product(layer, device, batch) for layer in model.layers]
    shapes = np.array([[shape[1:] for shape in device.shapes]], dtype=np.float64)
    for mode, indices in by_mode(model.layers, device).items():
        best = best_times(products([model.layers[index] for index in indices]), shapes, device, mode, batch)
        for column, index in enumerate(indices):
            k = device.shapes[best.shape[0, column]].k
            b_r, time_s = int(best.b_r[0, column]), float(best.times_s[0, column])
            layer_choices[index] = TiledChoice(mode.at_once(batch), b_r, k, time_s)
    return tuple(layer_choices)


def best_times(products: Floats, shapes: Floats, device: TiledNpu, mode: Mode, batch: int) -> Best:
    """Compute the best time of each product on each of many designs, for a whole batch.

    products: an array as ``products`` returns it. shapes: an array (designs, shapes, 3) of the tiles (T_R, T_P, T_C)
    that each design may use. mode: how the batch is processed. *device* gives clock, bandwidth and options only.
    """
    at_once = mode.at_once(batch)
    size = (shapes.shape[0], products.shape[0])
    times, chosen = np.empty(size), np.zeros((*size, 2), dtype=np.int64)
    # Seconds of a cycle, and of an element on the memory channel.
    costs = 1 / device.clock_hz, device.element_bytes / device.bandwidth_bytes_per_s
    readings = READINGS[device.p_reading], EDGES[device.edges]
    kernel.best_times(products, shapes, at_once, mode.splits(at_once), readings, costs, times, chosen)
    return Best(times * (batch // at_once), chosen[..., 0], chosen[..., 1])


def lookup_table(model: Model, device: TiledNpu, max_batch: int = 8) -> LookupTable:
    """The choices of every product at every batch size up to *max_batch*."""
    if max_batch < 1:
        raise InputError(f"{model.name}: a look-up table holds batches from 1, not up to {max_batch}")
    product_indices = [index for index, layer in enumerate(model.layers) if layer.gemm]
    rows = [choices(model, device, batch) for batch in range(1, max_batch + 1)]
    return LookupTable(
        model.name,
        device.name,
        tuple(model.layers[index].name for index in product_indices),
        tuple(tuple(row[index] for index in product_indices) for row in rows),
    )


class Mode(NamedTuple):
    """How a device can process a batch in a layer."""

    together: bool
    """Process the whole batch at once; False: sample by sample."""
    below: bool = True
    """Samples may be stacked as rows."""
    beside: bool = False
    """Samples may lie side by side, each with its own fetch of the weights."""

    def at_once(self, batch: int) -> int:
        """Samples that the layer processes at a time."""
        return batch if self.together else 1

    def splits(self, at_once: int) -> tuple[int, int]:
        """The largest and the smallest B_R to try."""
        return at_once if self.below else 1, 1 if self.beside else at_once


def mode_of(layer: Layer, device: TiledNpu) -> Mode:
    """How the device processes a batch in this layer.

    Samples of a product of two activations are never stacked as rows: each has a right-hand side of its own.
    """
    shared = layer.reuses_weights
    match device.batching:
        case "fluid":
            return Mode(together=True, below=shared, beside=True)
        case "p":
            return Mode(together=True, below=False, beside=True)
        case "r":
            return Mode(together=shared)
        case "fc":
            return Mode(together=shared and layer.kind != "conv")
        case "none":
            return Mode(together=False)


def by_mode(layers: Sequence[Layer], device: TiledNpu) -> dict[Mode, list[int]]:
    """The indices of the layers that are matrix products, grouped by mode."""
    modes: dict[Mode, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.gemm:
            modes.setdefault(mode_of(layer, device), []).append(index)
    return modes


def products(layers: Sequence[Layer]) -> Floats:
    """An array with a row (rows, depth, columns, groups) for the matrix product of each layer."""
    return np.array([(gemm.m, gemm.k, gemm.n, gemm.groups) for layer in layers if (gemm := layer.gemm)], np.float64)


def other_time_s(layer: Layer, device: TiledNpu, batch: int) -> float:
    """Seconds of a layer that is no matrix product, for a batch."""
    if device.elementwise == "free":
        return 0.0
    elements = batch * (layer.input_elements + layer.output_elements)
    return elements * device.element_bytes / device.bandwidth_bytes_per_s


def _without_product(layer: Layer, device: TiledNpu, batch: int) -> TiledChoice:
    """The choice of a layer that is no matrix product; a placeholder for one that is."""
    return TiledChoice(batch, batch, 1.0, 0.0 if layer.gemm else other_time_s(layer, device, batch))

"""The design-space search: which <T_R, T_P, T_C> suits some models on a board (Fluid Batching, equation 2).

Exhaustive over the MAC trees and PEs that the board's DSPs allow, each with the most rows its memory holds. A
design's score for one model is the weighted sum of its GOP/s over the batch sizes; for several models it is the
geometric mean over the models, so that a faster model does not count for more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.base.errors import InputError
from weft.devices import Board, TiledNpu, parse_tiled
from weft.devices.costs.tiled import Floats, Mode, best_times, by_mode, other_time_s, products
from weft.devices.tiled import Batching, Edges, Elementwise, PReading
from weft.models.layer import Model

CHUNK = 1024
"""Designs priced between two reports of progress."""

Progress = Callable[[int, int], None]


class TileSizes(NamedTuple):
    """The sizes of the tiles, one per design."""

    t_r: Floats
    t_p: Floats
    t_c: Floats


class ProductGroup(NamedTuple):
    """The distinct matrix products of a model that process a batch in the same mode, and how often each occurs."""

    mode: Mode
    products: Floats
    """As ``tiled.products`` returns them."""
    occurrences: Floats
    """(products)."""


@dataclass(frozen=True, slots=True, eq=False)
class Exploration:
    """All designs that fit the board, with times and scores. Arrays have one entry per design, by T_P, then T_C."""

    platform: Board
    template: TiledNpu
    """The options all designs share; its tile is the first design's."""
    models: tuple[str, ...]
    weights: tuple[float, ...]
    """The weight of each batch size from 1 in the score."""
    tile: TileSizes
    times_s: Floats
    """Model x batch size - 1 x design: one pass over the model with that batch."""
    gops: Floats
    """Model x batch size - 1 x design: 10^9 operations per second, two per MAC."""
    scores: Floats
    """The higher the better."""

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def max_batch(self) -> int:
        return len(self.weights)

    @property
    def best(self) -> int:
        """Index of the highest score; among equals the first."""
        return int(np.argmax(self.scores))

    @property
    def dsps(self) -> Floats:
        return self.tile.t_p * self.tile.t_c

    @property
    def latency_s(self) -> Floats:
        """Seconds for a single sample: geometric mean over the models."""
        return np.asarray(np.exp(np.log(self.times_s[:, 0]).mean(axis=0)))

    @property
    def throughput(self) -> Floats:
        """Samples per second at the largest batch size: geometric mean over the models."""
        return np.asarray(np.exp(np.log(self.max_batch / self.times_s[:, -1]).mean(axis=0)))

    def ranked(self, count: int) -> list[int]:
        """Indices of the *count* designs with the highest scores, best first."""
        return [int(index) for index in np.argsort(-self.scores, kind="stable")[:count]]

    def device(self, index: int | None = None) -> TiledNpu:
        """The design with this index as a device; the best design by default."""
        design = self.best if index is None else index
        t_r, t_p, t_c = (int(sizes[design]) for sizes in self.tile)
        name = f"{self.platform.name}-{'-'.join(self.models)}"
        return self.template.model_copy(update={"name": name, "t_r": t_r, "t_p": t_p, "t_c": t_c})

    @property
    def latency_front(self) -> list[int]:
        """The Pareto front of latency at batch 1 and throughput at the largest batch, as indices of designs."""
        return pareto_front(self.latency_s, self.throughput)

    @property
    def size_front(self) -> list[int]:
        """The Pareto front of DSPs and score, as indices of designs."""
        return pareto_front(self.dsps, self.scores)


def explore(
    models: Sequence[Model],
    platform: Board,
    *,
    max_batch: int = 8,
    weights: Sequence[float] | None = None,
    batching: Batching = "fluid",
    stackable: bool = True,
    p_reading: PReading = "straddle",
    elementwise: Elementwise = "free",
    edges: Edges = "added",
    element_bits: int = 16,
    bandwidth_gb_s: float | None = None,
    clock_mhz: float | None = None,
    progress: Progress | None = None,
) -> Exploration:
    """Price every design that fits the platform on every model and batch size.

    max_batch: the largest batch size. weights: the weight of each batch size from 1 in the score, equal by default.
    batching, stackable, p_reading, elementwise, edges, element_bits: options of all designs (``TiledNpu``). Clock and
    bandwidth are the platform's by default. progress: called with the steps done and the number of steps. The designs
    of the result have no ``platform``, because the board may not come from a file; a caller that writes a device file
    adds it.
    """
    batch_weights = _check_weights(weights, max_batch)
    if not models:
        raise InputError("nothing to explore: give at least one model")
    tile = design_points(platform, element_bits=element_bits, even=stackable)
    options = {"batching": batching, "stackable": stackable, "p_reading": p_reading, "elementwise": elementwise}
    template = parse_tiled(
        {
            "name": platform.name,
            "source": "weft explore npu",
            **{name: int(sizes[0]) for name, sizes in zip(TileSizes._fields, tile, strict=True)},
            "clock_mhz": platform.clock_mhz if clock_mhz is None else clock_mhz,
            "bandwidth_gb_s": platform.bandwidth_gb_s if bandwidth_gb_s is None else bandwidth_gb_s,
            "element_bits": element_bits,
            "edges": edges,
            **options,
        },
        platform.name,
    )
    times = _all_times(models, template, tile, max_batch, progress)
    operations = np.array([2e-9 * model.macs for model in models])[:, None, None]  # 10^9, two per MAC
    gops = operations * np.arange(1, max_batch + 1)[:, None] / times
    per_model = np.tensordot(gops, batch_weights, axes=(1, 0))
    scores = np.exp(np.log(per_model).mean(axis=0))
    names = tuple(model.name for model in models)
    return Exploration(platform, template, names, tuple(batch_weights.tolist()), tile, times, gops, scores)


def design_points(platform: Board, *, element_bits: int = 16, even: bool = True) -> TileSizes:
    """Every (T_P, T_C) within the DSPs, each with the largest T_R whose tiles fit the memory.

    even: round T_R down to an even number, as stackable PEs halve it (all values in Table I of the paper are even).
    """
    pe_counts_by_width = [np.arange(1.0, platform.dsps // t_p + 1) for t_p in range(1, platform.dsps + 1)]
    t_p = np.repeat(np.arange(1.0, platform.dsps + 1), [len(pe_counts) for pe_counts in pe_counts_by_width])
    t_c = np.concatenate(pe_counts_by_width)
    # The largest T_R of the double-buffered tiles (``TiledNpu.bram_bits``).
    t_r = np.floor((platform.bram_bits // (2 * element_bits) - t_p * t_c) / (t_p + t_c))
    if even:
        t_r -= t_r % 2
    fits = t_r >= 1
    if not fits.any():
        raise InputError(f"{platform.name}: its {platform.bram_bits} bits of BRAM do not hold the tiles of any design")
    return TileSizes(t_r[fits], t_p[fits], t_c[fits])


def pareto_front(costs: Floats, values: Floats) -> list[int]:
    """Indices of the Pareto-optimal points (low cost, high value), by rising cost; of equal points the first."""
    front: list[int] = []
    highest = -math.inf
    for index in np.lexsort((-values, costs)).tolist():
        if values[index] > highest:
            highest = values[index]
            front.append(index)
    return front


def _check_weights(weights: Sequence[float] | None, max_batch: int) -> Floats:
    """The weights of the batch sizes as an array, all 1 by default; raises InputError if they are unusable."""
    if max_batch < 1:
        raise InputError(f"max_batch = {max_batch} must be at least 1")
    weight_array = np.ones(max_batch) if weights is None else np.array(weights, dtype=np.float64)
    if len(weight_array) != max_batch:
        raise InputError(
            f"weights has {len(weight_array)} numbers for {max_batch} batch sizes; give one for each size from 1"
        )
    if not (np.isfinite(weight_array).all() and (weight_array >= 0).all() and weight_array.any()):
        raise InputError(f"weights {weight_array.tolist()} must be finite, none negative and not all zero")
    return weight_array


def _all_times(
    models: Sequence[Model], template: TiledNpu, tile: TileSizes, max_batch: int, progress: Progress | None
) -> Floats:
    """Seconds of one pass by model, batch size - 1 and design; each design at its best PE shape.

    template: the options of all designs. tile: their tile sizes. progress: as of ``explore``.
    """
    # (designs, PE shapes, 3): the tile sizes of each shape.
    shapes = stackable_shapes(tile) if template.stackable else np.stack(tile, axis=-1)[:, None]
    times = np.zeros((len(models), max_batch, len(shapes)))
    chunks = [slice(start, start + CHUNK) for start in range(0, len(shapes), CHUNK)]
    steps = [(number, batch, chunk) for number in range(len(models)) for batch in range(max_batch) for chunk in chunks]
    groups = [_group_products(model, template) for model in models]
    for done, (number, batch, chunk) in enumerate(steps):
        if progress:
            progress(done, len(steps))
        others = (other_time_s(layer, template, batch + 1) for layer in models[number].layers if not layer.gemm)
        times[number, batch, chunk] += math.fsum(others)
        for mode, rows, occurrences in groups[number]:
            times[number, batch, chunk] += (
                best_times(rows, shapes[chunk], template, mode, batch + 1).times_s @ occurrences
            )
    return times


def _group_products(model: Model, template: TiledNpu) -> list[ProductGroup]:
    """Group the distinct matrix products of a model by mode; raises InputError if it has none."""
    groups = []
    for mode, indices in by_mode(model.layers, template).items():
        rows, counts = np.unique(products([model.layers[index] for index in indices]), axis=0, return_counts=True)
        groups.append(ProductGroup(mode, rows, counts.astype(np.float64)))
    if not groups:
        raise InputError(f"{model.name}: no layer is a matrix product, so every design serves it alike")
    return groups


def stackable_shapes(tile: TileSizes) -> Floats:
    """The three tiles (T_R, T_P, T_C) of each design with stackable PEs, as in ``TiledNpu.shapes``.

    An array (designs, 3, 3); a tile with a zero is impossible.
    """
    t_r, t_p, t_c = tile
    half = t_r // 2
    return np.stack([[t_r, t_p, t_c], [half, 2 * t_p, t_c // 2], [half, t_p // 2, 2 * t_c]]).transpose(2, 0, 1).copy()

"""Cycles, traffic and time of matrix products on a tiled NPU, compiled; ``weft.devices.costs.tiled`` explains them.

Sizes are whole numbers held as floats: exact to 2^53, and they do not wrap around beyond it. The plain twin
enumerates the loop nest tile by tile (tests/devices/test_tiled.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.kernels.compiling import loop

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

STRADDLE, REFETCH, GROUPS, BROADCAST = range(4)
"""Readings of how lanes side by side share a pass; see ``TiledNpu.p_reading``."""
EDGES_ADDED, EDGES_WITHIN, EDGES_NONE = range(3)
"""Readings of the cost of loading the first tiles and writing the last one; see ``TiledNpu.edges``."""


class ProductWork(NamedTuple):
    """The work of a product on the two resources, array and memory."""

    cycles: float
    elements: float
    """Elements read from and written to off-chip memory."""
    fill_elements: float
    """Elements loaded before the first cycle."""
    drain_elements: float
    """Elements of the largest tile written, which nothing hides at the end."""


@loop
def work(product: Floats, tile: Floats, batch: int, b_r: int, reading: int) -> ProductWork:
    """Return cycles and traffic of a product for *batch* samples, *b_r* of which are stacked in the rows.

    product: rows, depth, columns, groups; tile: T_R, T_P, T_C. reading: STRADDLE to BROADCAST.
    """
    rows, depth, columns, groups = product[0], product[1], product[2], product[3]
    t_r, t_p, t_c = tile[0], tile[1], tile[2]
    lanes = float(batch - b_r + 1)
    # The first *full* lanes hold b_r samples each (tall), one more the rest (short); further lanes are empty.
    full, rest = float(batch // b_r), float(batch % b_r)
    own_passes = np.ceil(columns / t_c)  # passes over the columns of one lane; names with "first": of the first pass
    fetches = batch * own_passes
    if reading in (STRADDLE, REFETCH):
        passes = np.ceil(lanes * columns / t_c)
        first_lanes = min(lanes, np.ceil(t_c / columns))
        if reading == REFETCH:
            full_pieces = _pieces(full, columns, t_c)
            fetches = b_r * full_pieces + rest * (_pieces(full + 1.0, columns, t_c) - full_pieces)
    else:
        lanes_per_pass = max(1.0, np.floor(t_c / columns)) if reading == GROUPS else 1.0
        passes = np.ceil(lanes / lanes_per_pass) * own_passes
        first_lanes = min(lanes, lanes_per_pass)
    row_tiles = np.ceil(b_r * rows / t_r)
    tall, short = min(t_r, b_r * rows), min(t_r, rest * rows)
    tall_lanes, first_columns = min(first_lanes, full), min(t_c, first_lanes * columns)
    first_rows = tall_lanes * tall + (short if first_lanes > full else 0.0)
    tall_columns = min(t_c, tall_lanes * columns)
    short_columns = min(t_c, min(first_lanes, full + 1.0) * columns) - tall_columns
    return ProductWork(
        groups * b_r * rows * np.ceil(depth / t_p) * passes,
        groups * (rows * depth * fetches + depth * columns * row_tiles * lanes + batch * rows * columns),
        min(depth, t_p) * (first_rows + first_columns),
        tall_columns * tall + short_columns * short,
    )


@loop
def _pieces(lanes: float, columns: float, t_c: float) -> float:
    """Return into how many pieces *lanes* lanes, laid end to end, are cut by the ends of lanes and of passes.

    A lane has *columns* columns, and a pass *t_c*.
    """
    if lanes * columns == 0:
        return 0.0
    a, b = columns, t_c  # Euclid: a becomes their greatest common divisor
    while b > 0:
        a, b = b, a % b
    common_end = columns / a * t_c  # least common multiple: there, the ends of a lane and of a pass are one cut
    return float(np.ceil(lanes * columns / t_c) + lanes - np.ceil(lanes * columns / common_end))


@loop
def time_s(work: ProductWork, s_per_cycle: float, s_per_element: float, edges: int) -> float:
    """Return the seconds that a product takes: the roofline of the two resources, and the edges as *edges* counts them.

    s_per_cycle, s_per_element: seconds of a cycle of the array, and of an element to or from memory. edges: EDGES_ADDED
    to EDGES_NONE.
    """
    compute, traffic = work.cycles * s_per_cycle, work.elements * s_per_element
    if edges == EDGES_NONE:
        return max(compute, traffic)
    edge = (work.fill_elements + work.drain_elements) * s_per_element
    return max(compute, traffic - edge if edges == EDGES_WITHIN else traffic) + edge


@loop
def best_times(
    products: Floats,
    shapes: Floats,
    batch: int,
    splits: tuple[int, int],
    readings: tuple[int, int],
    costs: tuple[float, float],
    times: Floats,
    chosen: Ints,
) -> None:
    """Fill *times* (designs, products) with the best time, and *chosen* (designs, products, 2) with its shape and B_R.

    products: (products, 4), see ``work``. shapes: tile shapes (designs, shapes, 3); a zero marks an impossible shape.
    splits: the highest and the lowest B_R. readings: of lanes and of edges. costs: seconds per cycle and per element.
    Among equals the first shape wins, then the highest B_R.
    """
    for design in range(shapes.shape[0]):
        for place in range(products.shape[0]):
            times[design, place] = np.inf
            for shape in range(shapes.shape[1]):
                tile = shapes[design, shape]
                if min(tile[0], tile[1], tile[2]) < 1:
                    continue
                for b_r in range(splits[0], splits[1] - 1, -1):
                    time = time_s(work(products[place], tile, batch, b_r, readings[0]), *costs, readings[1])
                    if time < times[design, place]:
                        times[design, place] = time
                        chosen[design, place, 0] = shape
                        chosen[design, place, 1] = b_r

"""The fastest tiles for the products of a body, by trying: ``tune``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from weft.base.errors import StitchError
from weft_stitch.running.body_rows import RowTables
from weft_stitch.running.fused_body import (
    LIBRARY,
    PLAINEST,
    Early,
    FusedBody,
    Key,
    RowNorm,
    SharedProduct,
    TileShape,
    able_to_start_early,
    launch_narrow,
    launch_norm,
    launch_product,
    product_call,
)
from weft_stitch.running.kernel_shapes import replay_seconds
from weft_stitch.running.operators import Tensor, torch

SHAPES = (
    TileShape(128, 256, 64, 8, 3), TileShape(128, 128, 64, 8, 3), TileShape(64, 128, 64, 4, 4),
    TileShape(64, 64, 64, 4, 5), TileShape(64, 64, 128, 4, 4), TileShape(64, 32, 128, 4, 4),
    TileShape(32, 64, 128, 4, 4), TileShape(32, 32, 128, 4, 4), TileShape(16, 64, 128, 4, 4),
    TileShape(16, 32, 256, 4, 3),
)  # fmt: skip
PARTS = (1, 2, 4)
MIXED = 64
"""Tiles of so many rows may be better off with narrow factors applied before."""
FEW, MANY = 12, 800
"""Programs of a launch: with fewer most of a GPU is idle, more of them are small ones that read too much."""


class PlaceTrial(NamedTuple):
    """The products at one place of every layer."""

    products: list[SharedProduct]
    norms: list[RowNorm]
    """Behind them, where they sum up parts."""
    gelu: bool

    def run(self, x: Tensor, tables: RowTables, shape: TileShape, early: Early) -> None:
        for each in self.products:
            y = launch_product(x, each, tables, shape, gelu=self.gelu, early=early)
            if self.norms:
                launch_norm(y, y[0] if y.dim() == 3 else y, self.norms[0], tables, early)


def trials(body: FusedBody) -> dict[str, PlaceTrial]:
    """By the names of ``BodyLayer``."""
    layers = body.weights.layers
    return {
        "asked": PlaceTrial([each.asked for each in layers], [], False),
        "mixed": PlaceTrial([each.mixed for each in layers], [each.attended for each in layers], False),
        "inner": PlaceTrial([each.inner for each in layers], [], True),
        "outer": PlaceTrial([each.outer for each in layers], [each.done for each in layers], False),
    }


def shapes(product: SharedProduct, rows: int, summed: bool) -> list[TileShape]:
    """What is worth trying; of a small product whatever fits."""
    found = [*_shapes(product, rows, summed, FEW)] or [*_shapes(product, rows, summed, 1)]
    return found or [PLAINEST] if product.fits(PLAINEST) else found


def _shapes(product: SharedProduct, rows: int, summed: bool, few: int) -> Iterator[TileShape]:
    """Those with at least so many programs."""
    if product.fits(LIBRARY):
        yield LIBRARY
    for parts in PARTS if summed else (1,):
        for each in SHAPES:
            shape = each._replace(parts=parts)
            programs = -(-rows // shape.tall) * product.weight.shape[1] // shape.wide * parts
            large = shape.tall * shape.wide >= 128 * 128 and parts == 1
            if product.fits(shape) and shape.tall < 2 * rows and (programs <= MANY or large) and programs >= few:
                yield shape
                if product.rank and shape.tall >= MIXED:
                    yield shape._replace(before=True)


class BodyTrials(NamedTuple):
    """How many seconds everything took that was tried."""

    products: dict[str, dict[TileShape, float]]
    """By the names of ``BodyLayer``."""
    bodies: dict[Early, float]


def tune(body: FusedBody, tables: RowTables, dtype: Any) -> BodyTrials:
    """Give *body* what is fastest for rows as those of *tables*."""
    early = Early.ALL if able_to_start_early(tables.whose.device) else Early.NONE
    rows = len(tables.positions)
    found, shaped = {}, dict(body.shapes)
    known = trials(body)
    tried = {name: list(shapes(each.products[0], rows, bool(each.norms))) for name, each in known.items()}
    given = {
        name: torch.randn(rows, len(each.products[0].weight), device=tables.whose.device).to(dtype)
        for name, each in known.items()
    }
    _compile([(known[name], given[name], shape) for name in known for shape in tried[name]], tables, early)
    chosen = []
    for name, trial in known.items():
        found[name] = times = _times(trial, given[name], tables, tried[name], early)
        if not times:
            raise StitchError(f"no tiles fit this GPU for the product {name} of {rows} rows; use another form")
        first = trial.products[0]
        key: Key = (*first.weight.shape, first.rank, rows, rows // len(tables.whose))
        shaped[key] = min(times, key=times.__getitem__)
        chosen.append((trial, given[name], shaped[key]))
    body.shapes = shaped
    _compile(chosen, tables, Early.NONE)
    bodies = _bodies(body, tables, list(Early) if early is Early.ALL else [early])
    body.early = min(bodies, key=bodies.__getitem__)
    return BodyTrials(found, bodies)


def _bodies(body: FusedBody, tables: RowTables, able: Sequence[Early]) -> dict[Early, float]:
    """Whole runs."""
    longest, found = int(tables.lengths.max()), {}
    for body.early in able:
        run = partial(body, torch.zeros_like(tables.positions), tables, longest)
        found[body.early] = min(replay_seconds(run, repeats=2) for _ in range(2))
    return found


def _times(
    trial: PlaceTrial, x: Tensor, tables: RowTables, tried: list[TileShape], early: Early
) -> dict[TileShape, float]:
    """The seconds of one product, with the norm behind it."""
    from triton.runtime.errors import OutOfResources

    found = {}
    for shape in tried:
        try:
            seconds = replay_seconds(partial(trial.run, x, tables, shape, early), repeats=2)
        except OutOfResources:
            continue
        found[shape] = seconds / len(trial.products)
    return found


def _compile(jobs: Sequence[tuple[PlaceTrial, Tensor, TileShape]], tables: RowTables, early: Early) -> None:
    """On all cores; what does not compile shows again when it is timed."""
    from weft_stitch.running.body_kernels import product_kernel

    def compiled(trial: PlaceTrial, x: Tensor, shape: TileShape) -> None:
        first = trial.products[0]
        narrowed = launch_narrow(x, first, tables, early) if shape.before else None
        arguments, settings = product_call(x, first, tables, shape, trial.gelu, early, narrowed)
        product_kernel.warmup(*arguments, grid=(1,), **settings)

    with ThreadPoolExecutor() as pool:
        for each in [pool.submit(compiled, *job) for job in jobs if job[2].tall]:
            each.exception()

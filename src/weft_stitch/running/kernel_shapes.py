"""Autotuning of Triton kernels: ``tune`` for the fused layers of a module, ``tune_body`` for the products of a body.

A *shape* is a tile configuration of a kernel. One program computes ``tall`` rows (output positions) by ``wide`` columns
(output channels), and sums ``deep`` inputs per step of its loop; warps and pipeline stages are the compiler's. Both
functions compile all candidates first, on all cores, and then time them one after another inside CUDA graphs.
Candidates for which the GPU lacks registers or shared memory are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple, TypeVar

from weft.base.errors import StitchError
from weft.runtime.timing import Run
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
from weft_stitch.running.module import FusedConv, Shape, StitchedModule
from weft_stitch.running.operators import Tensor, torch

HALF_SHAPES = (
    Shape(128, 256, 64, 8, 3), Shape(128, 128, 64, 8, 3), Shape(128, 128, 32, 4, 4), Shape(128, 64, 64, 4, 3),
    Shape(128, 64, 64, 8, 4), Shape(128, 64, 32, 4, 4), Shape(64, 128, 64, 8, 4), Shape(64, 128, 32, 4, 4),
    Shape(64, 64, 64, 4, 4), Shape(64, 64, 64, 8, 4), Shape(64, 64, 128, 8, 3), Shape(64, 64, 32, 4, 5),
    Shape(64, 32, 128, 8, 4), Shape(16, 64, 128, 4, 4), Shape(64, 16, 64, 4, 4),
)  # fmt: skip
"""Candidates for fused layers in half precision: wide tiles for full nets, small ones for pruned and narrow nets."""
FLOAT_SHAPES = (
    Shape(128, 128, 32, 8, 3), Shape(128, 64, 32, 8, 3), Shape(64, 64, 32, 4, 3), Shape(64, 32, 32, 4, 3),
    Shape(64, 16, 32, 4, 3), Shape(128, 16, 16, 4, 3), Shape(32, 32, 64, 4, 3), Shape(32, 64, 32, 4, 3),
    Shape(16, 16, 64, 2, 3), Shape(16, 64, 64, 4, 3),
)  # fmt: skip
"""Candidates for fused layers in single precision."""
PRODUCT_SHAPES = (
    TileShape(128, 256, 64, 8, 3), TileShape(128, 128, 64, 8, 3), TileShape(64, 128, 64, 4, 4),
    TileShape(64, 64, 64, 4, 5), TileShape(64, 64, 128, 4, 4), TileShape(64, 32, 128, 4, 4),
    TileShape(32, 64, 128, 4, 4), TileShape(32, 32, 128, 4, 4), TileShape(16, 64, 128, 4, 4),
    TileShape(16, 32, 256, 4, 3),
)  # fmt: skip
"""Candidates for the products of a body."""
PARTS = (1, 2, 4)
"""Numbers of parts into which the sum over a product's depth may be split."""
MIXED = 64
"""Rows of a tile from which it may contain many models, so that a separate kernel for narrow factors may be faster."""
FEW, MANY = 12, 800
"""Least and most programs of a launch: with fewer, most of a GPU is idle; with more, small tiles read too much."""

TileChoice = TypeVar("TileChoice", Shape, TileShape)
Trial = tuple[FusedConv, Tensor, Tensor | None]
"""A fused layer, with an input and a residual (or None) like those it gets."""
Progress = Callable[[int, int], None]
"""Called with the number of tuned layers and of all layers."""


def replay_seconds(run: Run, repeats: int = 10) -> float:
    """Seconds of one call: the mean over the *repeats* calls of a CUDA graph, in the fastest of three replays."""
    run()  # compiles the kernels, which a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # relaxed: another thread of a server may be computing on the GPU during the capture
    with torch.cuda.graph(graph, capture_error_mode="relaxed"), torch.no_grad():
        for _ in range(repeats):
            run()
    best = float("inf")
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / repeats / 1e3)
    return best


def _seconds_by_shape(
    shapes: Iterable[TileChoice],
    run_in: Callable[[TileChoice], Run],
    repeats: int,
    stop: Callable[[TileChoice], bool] = lambda shape: False,
) -> dict[TileChoice, float]:
    """Shape -> seconds of a kernel, for each shape for which the GPU has resources.

    *run_in*: returns a run of the kernel in a shape. *repeats*: see ``replay_seconds``. *stop*: ends the trials if it
    returns True for the next shape; it is not called before one shape has run.
    """
    from triton.runtime.errors import OutOfResources

    times: dict[TileChoice, float] = {}
    for shape in shapes:
        if times and stop(shape):
            break
        try:
            times[shape] = replay_seconds(run_in(shape), repeats)
        except OutOfResources:
            continue
    return times


def _compile_all(jobs: Iterable[Callable[[], object]]) -> list[Future[object]]:
    """Run *jobs*, each of which compiles a kernel, on all cores; return their ended futures.

    A failure is kept in the future; it occurs again when the candidate is timed.
    """
    # threads suffice, as the compiler does most of its work outside Python
    with ThreadPoolExecutor() as pool:
        return [pool.submit(job) for job in jobs]


# --- fused layers -----------------------------------------------------------------------------------------------------


def tune(
    module: StitchedModule,
    *example: Tensor,
    on_progress: Progress | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Give every fused layer of *module* its fastest shape for inputs like *example*; equal layers are timed once.

    *enough*: returns whether tuning must end; every layer still gets a shape that runs. Raises ``StitchError`` if a
    layer has none, or *example* is not on CUDA.
    """
    if other_devices := {str(tensor.device) for tensor in example if tensor.device.type != "cuda"}:
        raise StitchError(f"tiles are timed on CUDA; the example is on {', '.join(sorted(other_devices))}")
    trials = _trials(module, example)
    distinct = {_timing_key(*trial): trial for trial in trials}
    compiled = _compile(list(distinct.values()), enough)
    fastest: dict[Any, Shape] = {}  # timing key -> shape
    for number, (key, trial) in enumerate(distinct.items(), 1):
        fastest[key] = _fastest(*trial, compiled, enough)
        if on_progress is not None:
            on_progress(number, len(distinct))
    for layer, x, residual in trials:
        layer.shape = fastest[_timing_key(layer, x, residual)]
        layer.forget_tables()  # those of the shapes that were tried


def shapes(layer: FusedConv) -> Iterator[Shape]:
    """The shapes to try for *layer*: without those of which a large part would compute nothing."""
    taps = layer.packed.window.kernel[0] * layer.packed.window.kernel[1]
    widest_block = max(tile.span for targets in layer.packed.targets for tile in targets)  # of output columns
    for shape in HALF_SHAPES if layer.weights.dtype == torch.float16 else FLOAT_SHAPES:
        if shape.wide >= 2 * max(16, widest_block):  # a tile of half the width holds the same columns
            continue
        # a step has inputs of one tap only: with more than one tap, steps deeper than the input stay partly empty
        if taps == 1 or layer.packed.inputs >= shape.deep:
            yield shape
        # a flat step continues in the next tap, and computes tap and address for each of its inputs: not too many
        if taps > 1 and shape.deep <= 64:
            yield shape._replace(flat=True)


def _trials(module: StitchedModule, example: tuple[Tensor, ...]) -> list[Trial]:
    """Run the module once, and record the inputs of its fused layers: [rows, height, width, columns]."""
    trials: list[Trial] = []

    def record(layer: FusedConv, inputs: tuple[Tensor, ...]) -> None:
        channels_last = [tensor.permute(0, 2, 3, 1).contiguous() for tensor in inputs]
        trials.append((layer, channels_last[0], channels_last[1] if len(channels_last) > 1 else None))

    hooks = [layer.register_forward_pre_hook(record) for layer in module.fused_layers]
    with torch.no_grad():
        module(*example)
    for hook in hooks:
        hook.remove()
    return trials


def _timing_key(layer: FusedConv, x: Tensor, residual: Tensor | None) -> Any:
    """A key that is equal for layers that take equally long in the same shape, so that one of them is timed."""
    packed = layer.packed
    sizes = (packed.window, packed.inputs, packed.outputs, packed.unique, packed.widest_rider, packed.align)
    return (x.shape, x.dtype, residual is None, layer.rows, layer.activation, sizes, packed.by_table)


def _compile_job(
    layer: FusedConv, x: Tensor, residual: Tensor | None, shape: Shape
) -> tuple[Any, tuple[Any, ...], Any]:
    """How to compile the kernel of *layer* in *shape*: a key, equal for equal kernels; its arguments; its settings."""
    shape_before, layer.shape = layer.shape, shape
    # compiling needs the types of arguments only: tables for one position suffice, and *x* stands in for the output
    settings, tables = layer.settings(residual is not None), layer.tables(1, x.device)
    layer.shape = shape_before
    key = (x.dtype, *sorted((name, str(value)) for name, value in settings.items()))
    return key, layer.arguments(x, tables, residual, x), settings


def _compile(trials: list[Trial], enough: Callable[[], bool]) -> set[Any]:
    """Compile the candidates of all layers until *enough* returns True; return the keys (of jobs) of those tried.

    The first candidate of every layer is compiled before the second of any, so that each layer has one when time runs
    out.
    """
    from weft_stitch.running.kernel import fused_kernel

    jobs: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # key -> arguments and settings
    rounds = zip_longest(*([(*trial, shape) for shape in shapes(trial[0])] for trial in trials))
    for candidate in filter(None, chain.from_iterable(rounds)):
        key, arguments, settings = _compile_job(*candidate)
        jobs[key] = arguments, settings

    def compile_one(arguments: tuple[Any, ...], settings: dict[str, Any]) -> bool:
        if not enough():
            fused_kernel.warmup(*arguments, grid=(1,), **settings)
            return True
        return False

    attempts = zip(jobs, _compile_all(partial(compile_one, *job) for job in jobs.values()), strict=True)
    return {key for key, future in attempts if future.exception() is not None or future.result()}


def _fastest(
    layer: FusedConv, x: Tensor, residual: Tensor | None, compiled: set[Any], enough: Callable[[], bool]
) -> Shape:
    """The fastest of the shapes that are compiled; if none of them runs on this GPU, the first other one that does.

    *compiled*: keys of ``_compile_job``. *enough*: returns whether the time for trials is used up.
    """
    ready = [shape for shape in shapes(layer) if _compile_job(layer, x, residual, shape)[0] in compiled]

    def run_in(shape: Shape) -> Run:
        layer.shape = shape
        return partial(layer.launch, x, residual)

    candidates = dict.fromkeys((*ready, *shapes(layer)))
    times = _seconds_by_shape(candidates, run_in, 10, lambda shape: enough() or shape not in ready)
    if not times:
        sizes = f"{layer.packed.inputs} to {layer.packed.outputs} columns"
        raise StitchError(f"no shape of the fused kernel fits this GPU for a layer of {sizes}; use another form there")
    return min(times, key=times.__getitem__)


# --- the products of a body -------------------------------------------------------------------------------------------


class PlaceTrial(NamedTuple):
    """The products at one place of every layer, such as ``inner``, which are tuned together."""

    products: list[SharedProduct]
    norms: list[RowNorm]
    """The norms that follow the products and add up the parts of split ones; empty if none does."""
    gelu: bool
    """Whether a GELU follows."""

    def run(self, x: Tensor, tables: RowTables, early: Early, shape: TileShape) -> None:
        """Run all products, and one norm after each to count the cost of adding parts up."""
        for product in self.products:
            y = launch_product(x, product, tables, shape, gelu=self.gelu, early=early)
            if self.norms:
                residual = y[0] if y.dim() == 3 else y  # any tensor [rows, width]: only the time counts
                launch_norm(y, residual, self.norms[0], tables, early)


class BodyTrials(NamedTuple):
    """The seconds of all candidates that were timed."""

    products: dict[str, dict[TileShape, float]]
    """Name of a product in ``BodyLayer`` -> tile -> seconds."""
    bodies: dict[Early, float]
    """Launch mode -> seconds of the whole body."""


def tune_body(body: FusedBody, tables: RowTables, dtype: Any) -> BodyTrials:
    """Give *body* the fastest tiles and launch mode for rows like those of *tables*; return all times.

    *dtype*: the type of the products' inputs. Raises ``StitchError`` if no tile of a product runs on this GPU.
    """
    early = Early.ALL if able_to_start_early(tables.granule_models.device) else Early.NONE
    rows = len(tables.positions)
    times, chosen = {}, dict(body.shapes)  # product -> shape -> seconds, and key -> shape
    trials = _place_trials(body)
    candidates = {name: product_shapes(trial.products[0], rows, bool(trial.norms)) for name, trial in trials.items()}
    inputs = {
        name: torch.randn(rows, len(trial.products[0].weight), device=tables.granule_models.device).to(dtype)
        for name, trial in trials.items()
    }
    _compile_products(((trials[name], inputs[name], candidates[name]) for name in trials), tables, early)
    chosen_jobs = []
    for name, trial in trials.items():
        run_in = partial(partial, trial.run, inputs[name], tables, early)  # shape -> a run in that shape
        times_by_shape = _seconds_by_shape(candidates[name], run_in, 2)
        times[name] = {shape: total / len(trial.products) for shape, total in times_by_shape.items()}
        if not times[name]:
            raise StitchError(f"no tiles fit this GPU for the product {name} of {rows} rows; use another form")
        product = trial.products[0]  # the products of a place are equally large
        key: Key = (*product.weight.shape, product.rank, rows, rows // len(tables.granule_models))
        chosen[key] = min(times[name], key=times[name].__getitem__)
        chosen_jobs.append((trial, inputs[name], [chosen[key]]))
    body.shapes = chosen
    _compile_products(chosen_jobs, tables, Early.NONE)  # launch modes without early products need these
    bodies = _body_seconds(body, tables, list(Early) if early is Early.ALL else [early])
    body.early = min(bodies, key=bodies.__getitem__)
    return BodyTrials(times, bodies)


def _place_trials(body: FusedBody) -> dict[str, PlaceTrial]:
    """Name of a product in ``BodyLayer`` -> its trial."""
    layers = body.weights.layers
    attention_norms, outer_norms = [layer.attention_norm for layer in layers], [layer.outer_norm for layer in layers]
    return {
        "qkv": PlaceTrial([layer.qkv for layer in layers], [], gelu=False),
        "attention_out": PlaceTrial([layer.attention_out for layer in layers], attention_norms, gelu=False),
        "inner": PlaceTrial([layer.inner for layer in layers], [], gelu=True),
        "outer": PlaceTrial([layer.outer for layer in layers], outer_norms, gelu=False),
    }


def product_shapes(product: SharedProduct, rows: int, summed: bool) -> list[TileShape]:
    """The tiles to try for a product of *rows* rows; if all make fewer than ``FEW`` programs, all that divide it.

    *summed*: whether a norm follows that can add up parts, so that the depth may be split.
    """
    candidates = [*_fitting_tiles(product, rows, summed, FEW)] or [*_fitting_tiles(product, rows, summed, 1)]
    return [PLAINEST] if not candidates and product.fits(PLAINEST) else candidates


def _fitting_tiles(product: SharedProduct, rows: int, summed: bool, least: int) -> Iterator[TileShape]:
    """The tiles to try that divide the product and make *least* programs or more; *summed*: as above."""
    if product.fits(LIBRARY):
        yield LIBRARY
    for parts in PARTS if summed else (1,):
        for shape in (candidate._replace(parts=parts) for candidate in PRODUCT_SHAPES):
            programs = -(-rows // shape.tall) * product.weight.shape[1] // shape.wide * parts
            is_large = shape.tall * shape.wide >= 128 * 128 and parts == 1  # it reads little for each of its values
            if product.fits(shape) and shape.tall < 2 * rows and least <= programs and (programs <= MANY or is_large):
                yield shape
                if product.rank and shape.tall >= MIXED:
                    yield shape._replace(before=True)


def _compile_products(
    jobs: Iterable[tuple[PlaceTrial, Tensor, Sequence[TileShape]]], tables: RowTables, early: Early
) -> None:
    """Compile the kernels of all candidates; *jobs*: trials, each with its input and tiles."""
    from weft_stitch.running.body_kernels import product_kernel

    def compile_one(trial: PlaceTrial, x: Tensor, shape: TileShape) -> None:
        product = trial.products[0]
        narrowed = launch_narrow(x, product, tables, early) if shape.before else None
        arguments, settings = product_call(x, product, tables, shape, trial.gelu, early, narrowed)
        product_kernel.warmup(*arguments, grid=(1,), **settings)

    _compile_all(partial(compile_one, trial, x, shape) for trial, x, tiles in jobs for shape in tiles if shape.tall)


def _body_seconds(body: FusedBody, tables: RowTables, modes: Sequence[Early]) -> dict[Early, float]:
    """Launch mode -> seconds of the whole body."""
    longest, times = int(tables.lengths.max()), {}
    for body.early in modes:  # calls of *body* use the mode in this attribute
        run = partial(body, torch.zeros_like(tables.positions), tables, longest)
        times[body.early] = min(replay_seconds(run, repeats=2) for _ in range(2))
    return times

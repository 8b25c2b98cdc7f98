"""The fastest shape of the fused kernel for every layer of a module, by trying: ``tune``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

from weft.base.errors import StitchError
from weft_stitch.running.fused import FusedConv, Shape
from weft_stitch.running.module import StitchedModule
from weft_stitch.running.operators import Tensor, torch

HALF_SHAPES = (
    Shape(128, 256, 64, 8, 3), Shape(128, 128, 64, 8, 3), Shape(128, 128, 32, 4, 4), Shape(128, 64, 64, 4, 3),
    Shape(128, 64, 64, 8, 4), Shape(128, 64, 32, 4, 4), Shape(64, 128, 64, 8, 4), Shape(64, 128, 32, 4, 4),
    Shape(64, 64, 64, 4, 4), Shape(64, 64, 64, 8, 4), Shape(64, 64, 128, 8, 3), Shape(64, 64, 32, 4, 5),
    Shape(64, 32, 128, 8, 4), Shape(16, 64, 128, 4, 4),
)  # fmt: skip
FLOAT_SHAPES = (
    Shape(128, 128, 32, 8, 3), Shape(128, 64, 32, 8, 3), Shape(64, 64, 32, 4, 3), Shape(64, 32, 32, 4, 3),
    Shape(64, 16, 32, 4, 3), Shape(128, 16, 16, 4, 3), Shape(32, 32, 64, 4, 3), Shape(32, 64, 32, 4, 3),
    Shape(16, 16, 64, 2, 3), Shape(16, 64, 64, 4, 3),
)  # fmt: skip
"""What is tried: wide tiles for full nets, small ones for pruned nets and late layers."""


Trial = tuple[FusedConv, Tensor, Tensor | None]
"""A layer with an input and a residual like those it gets."""
Progress = Callable[[int, int], None]


def tune(
    module: StitchedModule,
    *example: Tensor,
    on_progress: Progress | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Give every fused layer of *module* its fastest shape for inputs like *example*; equal layers are timed once.

    enough: whether to make do with what was compiled and tried so far; a shape is found for every layer all the same.
    """
    if places := {str(each.device) for each in example if each.device.type != "cuda"}:
        raise StitchError(f"tiles are timed on CUDA; the example is on {', '.join(sorted(places))}")
    trials = _trials(module, example)
    different = {_key(*trial): trial for trial in trials}
    compiled = _compile(list(different.values()), enough)
    found: dict[Any, Shape] = {}
    for done, (key, trial) in enumerate(different.items()):
        found[key] = _fastest(*trial, compiled, enough)
        if on_progress is not None:
            on_progress(done + 1, len(different))
    for trial in trials:
        trial[0].shape = found[_key(*trial)]
        trial[0].forget_tables()


def shapes(layer: FusedConv) -> Iterator[Shape]:
    """What is worth trying for *layer*."""
    taps = layer.packed.window.kernel[0] * layer.packed.window.kernel[1]
    most = max(tile.span for targets in layer.packed.targets for tile in targets)
    for shape in HALF_SHAPES if layer.weights.dtype == torch.float16 else FLOAT_SHAPES:
        if shape.wide >= 2 * max(16, most):
            continue
        if taps == 1 or layer.packed.inputs >= shape.deep:
            yield shape
        if taps > 1 and shape.deep <= 64:
            yield shape._replace(flat=True)


def _trials(module: StitchedModule, example: tuple[Tensor, ...]) -> list[Trial]:
    """Run the module once and keep what its fused layers are given."""
    trials: list[Trial] = []

    def keep(layer: FusedConv, given: tuple[Tensor, ...]) -> None:
        lying = [each.permute(0, 2, 3, 1).contiguous() for each in given]
        trials.append((layer, lying[0], lying[1] if len(lying) > 1 else None))

    hooks = [each.register_forward_pre_hook(keep) for each in module.modules() if isinstance(each, FusedConv)]
    with torch.no_grad():
        module(*example)
    for hook in hooks:
        hook.remove()
    return trials


def _key(layer: FusedConv, x: Tensor, residual: Tensor | None) -> Any:
    packed = layer.packed
    sizes = (packed.window, packed.inputs, packed.outputs, packed.unique, packed.narrow, packed.align, packed.by_table)
    return (x.shape, x.dtype, residual is None, layer.rows, layer.activation, sizes)


def _job(layer: FusedConv, x: Tensor, residual: Tensor | None, shape: Shape) -> tuple[Any, tuple[Any, ...], Any]:
    """What tells apart the kernels that are compiled for a layer in this shape, and what one is compiled with."""
    given, layer.shape = layer.shape, shape
    settings, tables = layer.settings(residual is not None), layer.tables(1, x.device)
    layer.shape = given
    key = (x.dtype, *sorted((name, str(value)) for name, value in settings.items()))
    return key, layer.arguments(x, tables, residual, x), settings


def _compile(trials: list[Trial], enough: Callable[[], bool]) -> set[Any]:
    """Compile what will be tried, a shape of each layer after another, on all cores; what there is in the end.

    The compiler does most of its work outside Python.
    """
    from weft_stitch.running.kernel import fused_kernel

    jobs: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    rounds = zip_longest(*([(*trial, shape) for shape in shapes(trial[0])] for trial in trials))
    for each in (one for together in rounds for one in together if one is not None):
        key, arguments, settings = _job(*each)
        jobs[key] = arguments, settings

    def compiled(arguments: tuple[Any, ...], settings: dict[str, Any]) -> bool:
        if not enough():
            fused_kernel.warmup(*arguments, grid=(1,), **settings)
            return True
        return False

    with ThreadPoolExecutor() as pool:
        done = {key: pool.submit(compiled, *job) for key, job in jobs.items()}
        # what does not compile shows again, and is passed over, when it is timed
        return {key for key, each in done.items() if each.exception() is not None or each.result()}


def _fastest(
    layer: FusedConv, x: Tensor, residual: Tensor | None, compiled: set[Any], enough: Callable[[], bool]
) -> Shape:
    """Of the shapes that are compiled; where none of them fits, the first that does."""
    from triton.runtime.errors import OutOfResources

    ready = [shape for shape in shapes(layer) if _job(layer, x, residual, shape)[0] in compiled]
    times: dict[Shape, float] = {}
    for shape in dict.fromkeys((*ready, *shapes(layer))):
        if times and (enough() or shape not in ready):
            break
        layer.shape = shape
        try:
            times[shape] = replay_seconds(lambda: layer.launch(x, residual))
        except OutOfResources:
            continue
    if not times:
        sizes = f"{layer.packed.inputs} to {layer.packed.outputs} columns"
        raise StitchError(f"no shape of the fused kernel fits this GPU for a layer of {sizes}; use another form there")
    return min(times, key=lambda shape: times[shape])


def replay_seconds(run: Callable[[], object], repeats: int = 10) -> float:
    """The least seconds of one call inside a CUDA graph of *repeats* calls."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"), torch.no_grad():  # others may be computing
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

"""Stitched models on a GPU compared with every other method to run them: time, weights and peak memory of each.

The models are untrained ones with shared weights (``weft_stitch.making.generator``) and their own normalisations; all
methods of a configuration get the same inputs and take turns. Every method but those called eager is one CUDA graph.
Results of a configuration are written at once, in addition to those in the file.

    python benchmarks/stitch_gpu.py --set targets
    python benchmarks/stitch_gpu.py --set paper --resume
    python benchmarks/stitch_gpu.py --set tiny --device cpu --out tiny.json

It needs torch and triton with CUDA, and of weft's own requirements only numpy.
"""

# ruff: noqa: E402 (the package may have to be made ready before it is imported)

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

SOURCE = Path(__file__).parents[1] / "src" / "weft"
if find_spec("pydantic") is None or find_spec("numba") is None:
    # a machine without weft's other requirements: the stitcher does without them, but not behind weft/__init__.py
    bare = ModuleType("weft")
    bare.__path__ = [str(SOURCE)]
    sys.modules["weft"] = bare
    sys.path.append(str(SOURCE.parent))

from stitch_ways import BATCH, COMPILED, GROUPED, SEPARATE, WAYS, by_batch, draw, error, make, reference

from weft_stitch.family import Block, ChannelSpace, Family, Sharing, part
from weft_stitch.graph import Graph
from weft_stitch.making.generator import FamilyRecipe, Generated
from weft_stitch.net import Net, Op, Port, assemble
from weft_stitch.reading.alignment import align
from weft_stitch.running.gpu_timing import (
    LOAD_BYTES,
    REPLAYS,
    ROUNDS,
    BuiltModules,
    Place,
    RivalWay,
    TimedWay,
    build,
    precision,
    prepare,
    settle,
    times_ms,
)
from weft_stitch.running.module import Shape

RESULTS = Path(__file__).parent / "results" / "stitch_gpu.json"
EXACT = 1e-5
"""The largest relative difference to the separate models in float32 without TF32."""
ALL_WAYS = ("eager", "sequential", "streams", "grouped-eager", "grouped", "mts", "split", "fused", "batch")
PAPER_WAYS = ("eager", "sequential", "streams", "grouped", "mts", "split", "fused")
SIZES = (4, 8, 16, 32)
SMALL = (1, 2)
"""Groups of the paper's form that are timed alone, for the paper's grouping."""
CAPTURED = {WAYS[way]: way for way in ("sequential", "grouped", "mts", "split", "fused", "batch")}
"""For each source the way that its layout is chosen by."""
CHANNELS_FIRST, CHANNELS_LAST = "channels_first", "channels_last"
FC_WIDTH = 1024
UNEQUAL_WIDTHS = (1.0, 1.5)
"""Of pruning .9: every second task is pruned by .85."""
UNEQUAL_BATCHES = (1, 2, 3)


@dataclass(frozen=True)
class Configuration:
    """What is measured together."""

    net: str
    tasks: int
    pruning: float = 0.0
    dtype: str = "float32"
    sharing: float = 0.9
    mixed: str = ""
    """``widths`` or ``batches`` that differ between tasks."""
    ways: tuple[str, ...] = ALL_WAYS
    exact: bool = False
    """Whether to check the outputs without TF32 too."""

    @property
    def stock(self) -> tuple[Any, ...]:
        """What models it takes; one with fewer tasks takes the first of them."""
        return self.net, self.pruning, self.sharing, self.mixed

    @property
    def title(self) -> str:
        pruned = f" pruned {self.pruning:g}" if self.pruning else ""
        mixed = f", mixed {self.mixed}" if self.mixed else ""
        return f"{self.net}{pruned}, {self.dtype}, T = {self.tasks}, sharing {self.sharing:g}{mixed}"

    def widths(self) -> list[float] | None:
        return _cycle(UNEQUAL_WIDTHS, self.tasks) if self.mixed == "widths" else None

    def batches(self) -> list[int] | None:
        return _cycle(UNEQUAL_BATCHES, self.tasks) if self.mixed == "batches" else None

    def sources(self) -> list[str]:
        """The graphs its ways run, each once."""
        return list(dict.fromkeys(WAYS[way] for way in self.ways))


def _cycle(values: Sequence[Any], count: int) -> list[Any]:
    return [values[number % len(values)] for number in range(count)]


def _sizes(net: str, sizes: Sequence[int], **given: Any) -> list[Configuration]:
    return [Configuration(net, tasks, exact=tasks == sizes[0], **given) for tasks in sizes]


def _paper() -> Iterator[Configuration]:
    small = {"pruning": 0.9, "ways": PAPER_WAYS}
    yield from _sizes("resnet18", SMALL, pruning=0.9, ways=("sequential", "mts", "fused"))
    yield from _sizes("vgg16", SIZES, pruning=0.9)
    yield from _sizes("resnet18", SIZES, mixed="batches", **small)
    yield from _sizes("vgg16", SIZES, mixed="widths", **small)
    for sharing in (0.8, 0.7, 0.6):
        yield from _sizes("resnet18", SIZES, sharing=sharing, **small)
        yield from _sizes("resnet18", SMALL[1:], sharing=sharing, pruning=0.9, ways=("mts",))
    yield from _sizes("fc", (2, *SIZES), ways=PAPER_WAYS)
    yield from _sizes("resnet50", (4, 8, 16))
    yield from _sizes("vgg16", SMALL, pruning=0.9, ways=("sequential", "mts", "fused"))
    yield from _sizes("resnet50", SMALL, ways=("sequential", "mts", "fused"))
    yield from _sizes("resnet50", SMALL, dtype="float16", ways=("sequential", "mts", "fused"))


TARGETS = [*_sizes("resnet18", SIZES, pruning=0.9), *_sizes("resnet50", (8, 32, 16, 4), dtype="float16")]
COMPILING = [
    Configuration("resnet18", 4, 0.9, ways=COMPILED),
    *(Configuration("resnet18", tasks, 0.9, ways=("vmap",)) for tasks in (8, 32, 16)),
    Configuration("resnet50", 8, dtype="float16", ways=("vmap",)),
]
TINY = [
    Configuration("tinynet", 3, 0.4, exact=True),
    Configuration("tiny-mobile", 2, 0.4, ways=PAPER_WAYS, exact=True),
    Configuration("tinynet", 3, 0.4, mixed="widths", ways=PAPER_WAYS, exact=True),
    Configuration("tinynet", 4, 0.4, mixed="batches", ways=PAPER_WAYS, exact=True),
    Configuration("fc", 3, ways=PAPER_WAYS, exact=True),
]
SETS: Mapping[str, list[Configuration]] = {
    "tiny": TINY,
    "quick": TARGETS[:1],
    "targets": TARGETS,
    "compile": COMPILING,
    "paper": [*TARGETS, *_paper(), *COMPILING],
}


class Stock:
    """Models of one kind, as many as any configuration takes, with inputs and what they answer alone."""

    def __init__(self, largest: Configuration, device: str) -> None:
        self.device = device
        self.nets, self.planted = _generated(largest)
        torch.manual_seed(0)
        self.inputs = [torch.randn(net.batch, *net.inputs[0].shape) for net in self.nets]
        self.answers: dict[int, torch.Tensor] = {}
        self.graphs: dict[tuple[int, str, int], tuple[Graph, ...]] = {}

    @cached_property
    def family(self) -> Family:
        return align(self.nets)

    def draw(self, tasks: int, sources: Sequence[str], item_bytes: int) -> None:
        """Make the graphs that are not there yet, side by side."""
        keys = [(tasks, source, _align(source, item_bytes)) for source in sources]
        missing = [key for key in keys if key not in self.graphs]
        family, sharing = part(self.family, self.planted, range(tasks))
        with ThreadPoolExecutor() as pool:
            result = pool.map(lambda key: draw(key[1], family, sharing, key[2]), missing)
            self.graphs.update(zip(missing, result, strict=True))

    def answer(self, tasks: int, separate: Sequence[Graph]) -> list[torch.Tensor]:
        """What the first *tasks* models answer alone, in float32."""
        for task in range(len(self.answers), tasks):
            self.answers[task] = reference(separate[task], self.inputs[task], self.device)
        return [self.answers[task] for task in range(tasks)]


def _align(source: str, item_bytes: int) -> int:
    """Only the fused form's graphs depend on it."""
    return LOAD_BYTES // item_bytes if source == "fused" else 1


def _generated(largest: Configuration) -> tuple[tuple[Net, ...], Sharing]:
    if largest.net == "fc":
        made = fully_connected(largest.tasks, largest.sharing)
        return made.nets, made.planted
    recipe = FamilyRecipe(
        largest.net,
        largest.tasks,
        pruning=largest.pruning,
        sharing=largest.sharing,
        widths=largest.widths(),
        batches=largest.batches() or 1,
    )
    planted = recipe.planted
    with ThreadPoolExecutor() as pool:
        return tuple(pool.map(recipe.net, range(largest.tasks))), planted


def fully_connected(tasks: int, sharing: float, width: int = FC_WIDTH) -> Generated:
    """One layer for each task whose first outputs are all tasks' (the paper's Fig. 2b)."""
    rng = np.random.default_rng(0)
    shared = round(sharing * width)
    common = rng.standard_normal((shared, width, 1, 1), np.float32)
    nets = []
    for task in range(tasks):
        own = rng.standard_normal((width - shared, width, 1, 1), np.float32)
        weight = np.concatenate([common, own]) / np.float32(width) ** 0.5
        ports = Port("x", "x", (width,)), Port("y", "fc", (width,))
        nets.append(assemble(f"fc-{task}", ports[:1], [Op("fc", "conv", ("x",), "fc", weight)], ports[1:]))
    every, rest = np.arange(shared), np.arange(shared, width)
    blocks = [Block({task: every for task in range(tasks)}), *(Block({task: rest}) for task in range(tasks))]
    spaces = {"x": ChannelSpace.common(width, tasks), "fc": ChannelSpace((width,) * tasks, tuple(blocks))}
    return Generated(tuple(nets), Sharing(spaces))


class Layout(NamedTuple):
    """How the pictures of a source's modules lie, inputs like that, and the modules."""

    name: str
    inputs: list[torch.Tensor]
    built: BuiltModules


class Measurement:
    """One configuration on the device."""

    def __init__(self, configuration: Configuration, stock: Stock, settings: argparse.Namespace) -> None:
        self.configuration, self.stock, self.settings = configuration, stock, settings
        self.layouts: dict[str, Layout] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, TimedWay] = {}

    def graphs(self, source: str) -> tuple[Graph, ...]:
        return self.stock.graphs[self.configuration.tasks, source, _align(source, self._dtype.itemsize)]

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.configuration.dtype)

    def measure(self, wanted: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        for name in self.configuration.ways:
            self.rows[name] = self._row(name)
            try:
                self._prepare(name, wanted)
            except Exception as problem:  # one way's failure must not cost the others their numbers
                first, *_ = str(problem).strip().splitlines() or [""]
                self.rows[name]["note"] = f"{type(problem).__name__}: {first[:200]}"
                print(f"  {name}: {self.rows[name]['note']}", flush=True)
        for name, ms in times_ms(self.runs, rounds=self.settings.rounds, replays=self.settings.replays).items():
            self.rows[name]["ms"] = ms
        return list(self.rows.values())

    def _row(self, name: str) -> dict[str, Any]:
        given = self.configuration
        return {
            "net": given.net,
            "pruning": given.pruning,
            "dtype": given.dtype,
            "tasks": given.tasks,
            "sharing": given.sharing,
            "widths": given.widths(),
            "batches": given.batches(),
            "classes": int(self.stock.nets[0].outputs[0].shape[0]),
            "way": name,
            **dict.fromkeys(("ms", "weight_bytes", "peak_bytes", "launches", "error")),
            **dict.fromkeys(("exact_error", "pool_bytes", "workspace_bytes", "layout", "note")),
        }

    def _prepare(self, name: str, wanted: Sequence[torch.Tensor]) -> None:
        source = WAYS[name]
        if source not in self.layouts:
            self.layouts[source] = self._best_layout(source)
        _, inputs, built = layout = self.layouts[source]
        before = self._allocated()
        way = make(name, self.graphs(source), built.modules, inputs)
        stacked = self._allocated() - before if name == "vmap" else 0
        run = self.runs[name] = prepare(way)
        row = self.rows[name]
        row.update(weight_bytes=way.weight_bytes, launches=way.launches, layout=layout.name)
        row.update(pool_bytes=run.pool_bytes, workspace_bytes=run.workspace_bytes)
        if run.added_bytes is not None and built.resident_bytes is not None:
            stay = stacked if name == "vmap" else built.resident_bytes
            row["peak_bytes"] = stay + sum(array.nbytes for array in way.inputs) + run.added_bytes
        if WAYS[name] != BATCH:
            row["error"] = error(run.outputs, wanted)
            if self.configuration.exact and self.configuration.dtype == "float32":
                row["exact_error"] = _exact_error(way, built, wanted)

    def _best_layout(self, source: str) -> Layout:
        """Half precision and the fused form lie channels last, everything else as it is faster."""
        last = self._dtype.itemsize == 2 or source == "fused"
        if last or self.stock.inputs[0].dim() != 4 or self.settings.device != "cuda":
            return self._layout(source, CHANNELS_LAST if last else CHANNELS_FIRST)
        results = {}
        for name in (CHANNELS_FIRST, CHANNELS_LAST):
            layout = self._layout(source, name)
            way = make(CAPTURED[source], self.graphs(source), layout.built.modules, layout.inputs)
            results[times_ms({name: prepare(way)}, rounds=1)[name]] = layout
        return results[min(results)]

    def _layout(self, source: str, name: str) -> Layout:
        place = Place(self.settings.device, self._dtype, name == CHANNELS_LAST)
        inputs = [place.tensor(picture) for picture in self.stock.inputs[: self.configuration.tasks]]
        return Layout(name, inputs, build(self.graphs(source), _given(source, inputs), place))

    def _allocated(self) -> int:
        if self.settings.device != "cuda":
            return 0
        settle()
        return int(torch.cuda.memory_allocated())


def _given(source: str, inputs: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The inputs of each of a source's graphs."""
    if source == SEPARATE:
        return [[row] for row in inputs]
    if source == BATCH:
        return [[torch.cat(inputs)]]
    if source == GROUPED:
        return [[inputs[task] for task in tasks] for tasks in by_batch([len(row) for row in inputs])]
    return [inputs]


def _exact_error(way: RivalWay, built: BuiltModules, wanted: Sequence[torch.Tensor]) -> float:
    """Without TF32; fused layers in their plainest shape, so that little has to be compiled for it."""
    layers = [layer for module in built.modules for layer in module.fused_layers]
    shapes = [layer.shape for layer in layers]
    for layer in layers:
        layer.shape = Shape(64, 32, 32)
    with precision(tf32=False, search=False):
        result = error(way.run(), wanted)
    for layer, shape in zip(layers, shapes, strict=True):
        layer.shape = shape
    return result


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    def cell(value: Any, scale: float, digits: int) -> str:
        return "-" if value is None else f"{value / scale:.{digits}f}"

    lines = [f"  {'way':14}{'ms':>9}{'weights MB':>12}{'peak MB':>10}{'launches':>10}{'error':>10}{'exact':>10}"]
    for row in rows:
        numbers = [cell(row["ms"], 1, 3), cell(row["weight_bytes"], 1e6, 1), cell(row["peak_bytes"], 1e6, 1)]
        errors = ["-" if row[key] is None else f"{row[key]:.1e}" for key in ("error", "exact_error")]
        failed = "  too large" if (row["exact_error"] or 0.0) > EXACT else ""
        launches = cell(row["launches"], 1, 0)
        lines.append(
            f"  {row['way']:14}{numbers[0]:>9}{numbers[1]:>12}{numbers[2]:>10}{launches:>10}{errors[0]:>10}"
            f"{errors[1]:>10}{failed}{'  ' + row['note'] if row['note'] else ''}"
        )
    return "\n".join(lines)


class Clock:
    """Seconds since the start, and how long a configuration will take, after what its like took."""

    def __init__(self, budget_s: float) -> None:
        self.began_s, self.budget_s = perf_counter(), budget_s
        self.last: dict[str, tuple[int, float]] = {}
        """Of each net; the first of many models also makes them, so that more of them take hardly longer."""

    @property
    def elapsed_s(self) -> float:
        return perf_counter() - self.began_s

    def fits(self, configuration: Configuration) -> bool:
        tasks, seconds = self.last.get(configuration.net, (1, 0.0))
        return self.elapsed_s + seconds * min(1.0, configuration.tasks / tasks) <= self.budget_s

    def note(self, configuration: Configuration, seconds: float) -> None:
        self.last[configuration.net] = configuration.tasks, seconds


class Steps:
    """The seconds of each step of a configuration, for its line in the log."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, job: Callable[[], Any]) -> Any:
        began_s = perf_counter()
        result = job()
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - began_s
        return result

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())


class Shelf:
    """The stocks in use; what no later configuration takes is dropped."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.stocks: dict[tuple[Any, ...], Stock] = {}

    def take(self, configuration: Configuration, later: Sequence[Configuration]) -> Stock:
        key = configuration.stock
        alike = [other for other in (configuration, *later) if other.stock == key]
        if key not in self.stocks:
            self.stocks[key] = Stock(max(alike, key=lambda each: each.tasks), self.device)
        return self.stocks[key]

    def clear(self, later: Sequence[Configuration]) -> None:
        wanted = {configuration.stock for configuration in later}
        sizes = {(configuration.stock, configuration.tasks) for configuration in later}
        self.stocks = {key: stock for key, stock in self.stocks.items() if key in wanted}
        for key, stock in self.stocks.items():
            stock.graphs = {at: graphs for at, graphs in stock.graphs.items() if (key, at[0]) in sizes}
        gc.collect()


def run_all(chosen: Sequence[Configuration], settings: argparse.Namespace) -> None:
    clock, shelf = Clock(settings.budget_s), Shelf(settings.device)
    for number, configuration in enumerate(chosen):
        if not clock.fits(configuration):
            print(f"{configuration.title}: left out, {clock.elapsed_s:.0f} s of {settings.budget_s:.0f} s are gone")
            continue
        began_s = perf_counter()
        later = chosen[number + 1 :]
        rows = measure(configuration, shelf, later, settings)
        write(settings, rows)
        shelf.clear(later)
        clock.note(configuration, perf_counter() - began_s)
        print(f"  {perf_counter() - began_s:.1f} s, {clock.elapsed_s:.0f} s in all\n", flush=True)


def measure(
    configuration: Configuration, shelf: Shelf, later: Sequence[Configuration], settings: argparse.Namespace
) -> list[dict[str, Any]]:
    print(configuration.title, flush=True)
    steps = Steps()
    stock: Stock = steps.time("models", lambda: shelf.take(configuration, later))
    item_bytes = getattr(torch, configuration.dtype).itemsize
    sources = list(dict.fromkeys((SEPARATE, *configuration.sources())))
    steps.time("graphs", lambda: stock.draw(configuration.tasks, sources, item_bytes))
    separate = stock.graphs[configuration.tasks, SEPARATE, 1]
    wanted = steps.time("reference", lambda: stock.answer(configuration.tasks, separate))
    with precision(settings.tf32):
        rows: list[dict[str, Any]] = steps.time(
            "ways", lambda: Measurement(configuration, stock, settings).measure(wanted)
        )
    settle()
    print(table(rows))
    print(f"  {steps}")
    return rows


def write(settings: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """The file with *rows* in place of those of the same configurations and ways."""
    new = {_key(row) for row in rows}
    kept = [row for row in _read(settings.out) if _key(row) not in new]
    result = {
        "machine": described_machine(settings.device),
        "versions": versions(),
        "settings": {
            "tf32": settings.tf32,
            "rounds": settings.rounds,
            "replays": settings.replays,
            "norm": "per_task",
            "seed": 0,
        },
        "rows": [*kept, *rows],
    }
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(text(result))


def text(result: Mapping[str, Any]) -> str:
    """JSON with a line for each row."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in result["rows"])
    rest = json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=1)
    return rest.removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n'


def _read(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("net", "pruning", "dtype", "tasks", "sharing", "widths", "batches", "way")
    return tuple(json.dumps(row[name]) for name in names)


def described_machine(device: str) -> dict[str, Any]:
    results: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        results.update(gpu=gpu.name, gpu_bytes=gpu.total_memory, multiprocessors=gpu.multi_processor_count)
    return results


def versions() -> dict[str, Any]:
    results = {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
    if torch.cuda.is_available():
        import triton

        results.update(triton=triton.__version__, cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version())
    return results


def _done(configuration: Configuration, rows: Sequence[Mapping[str, Any]]) -> bool:
    names = ("net", "pruning", "dtype", "tasks", "sharing")
    have = {
        row["way"]
        for row in rows
        if all(row[name] == getattr(configuration, name) for name in names)
        and row["widths"] == configuration.widths()
        and row["batches"] == configuration.batches()
    }
    return have.issuperset(configuration.ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--set", choices=SETS, default="targets", help="which configurations")
    parser.add_argument("--only", help="only those of this net")
    parser.add_argument("--tasks", type=int, nargs="*", help="only these numbers of models")
    parser.add_argument("--ways", nargs="*", choices=WAYS, help="only these ways")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start nothing that would end after this")
    parser.add_argument("--resume", action="store_true", help="leave out what the file has")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tf32", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--replays", type=int, default=REPLAYS)
    settings = parser.parse_args()
    chosen = [configuration for configuration in SETS[settings.set] if settings.only in (None, configuration.net)]
    chosen = [configuration for configuration in chosen if not settings.tasks or configuration.tasks in settings.tasks]
    if settings.ways:
        chosen = [_with_ways(configuration, tuple(settings.ways)) for configuration in chosen]
    if settings.resume:
        done = _read(settings.out)
        chosen = [configuration for configuration in chosen if not _done(configuration, done)]
    run_all(chosen, settings)


def _with_ways(configuration: Configuration, ways: tuple[str, ...]) -> Configuration:
    return replace(configuration, ways=tuple(way for way in ways if way in configuration.ways) or ways)


if __name__ == "__main__":
    gc.freeze()  # what is imported stays: waste is collected before every look at the memory
    main()

"""Engines for the same ONNX files on one GPU: rows per second of each engine, all rows of a batch in one run.

`onnxruntime` is its CUDA provider in a CUDA graph, as weft serves it; `eager` and `compiled` are the file as a torch
module, without and with `torch.compile`; `package` is the output of weft's compiler process (AOTInductor), loaded
again; `module eager` and `module compiled` are the module that the file was exported from. All are captured, and run in
turns for about ten seconds; `error` is the largest difference from ONNX Runtime in float32 on the CPU, relative to the
largest output. Needs one NVIDIA GPU, torch, triton and gcc; without onnxruntime-gpu, `onnxruntime` is left out.

    PYTHONPATH=src python benchmarks/gpu_engines.py [--only REGEX] [--rivals REGEX] [--most-s 500] [--results FILE]

Packages are compiled first, several at a time (`--jobs`); `--folder` keeps them for the next start. Each row is written
to the results as soon as it is measured, and is not measured again by a later run.
`--device cuda:twin --only tiny` tries the logic on a CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
import torch
from gpu_engine_nets import NETWORKS, Network
from machine import machine

from weft.models.onnx_graph import load
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda.compiling import CompileLimits, NotCompiled, compile_model
from weft.runtime.cuda.engine import device_named
from weft.runtime.cuda.packages import CompileJob, find
from weft.runtime.cuda.precision import difference
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.cuda.torch_files import torch_device_name
from weft.runtime.cuda.torch_onnx import OnnxModule, folded
from weft.runtime.cuda.torch_packages import open_packages
from weft.runtime.cuda.torch_types import PRECISIONS

RESULTS = Path(__file__).parent / "results" / "gpu_engines.json"
TURNS = 5
"""How often each rival runs; the median counts."""
LIMITS = CompileLimits(seconds=600.0, memory_bytes=64 << 30, threads=4)
"""Of the compiler of one package."""


class Captured(NamedTuple):
    """A network that is captured already."""

    replay: Callable[[], None]
    outputs: list[Any]
    model: Any
    """Holds what the graph uses."""


class Rival:
    """An engine with a network captured on fixed inputs."""

    def __init__(self, device: Any, run: Callable[[], Any] | Captured, prepared_s: float) -> None:
        """run: computes the outputs, which lie at the same place each time once it is captured."""
        # the graph reads the weights that *run* holds, and kernels that it has loaded
        self._device, self._run, self._outputs, self.prepared_s = device, run, [], prepared_s
        if isinstance(run, Captured):
            self._replay, self._outputs = run.replay, run.outputs
            return

        def keep() -> None:
            self._outputs = list(run())

        self._replay = device.capture(keep)

    def outputs(self) -> list[Any]:
        self._replay()
        self._device.finish()
        return [torch.as_tensor(output).float().cpu().numpy() for output in self._outputs]

    def rate(self, rows: int, seconds: float) -> float:
        """Rows per second of runs that are started one behind the other."""
        runs, began_s = 0, time.perf_counter()
        while not runs or time.perf_counter() - began_s < seconds:
            for _ in range(8):
                self._replay()
            self._device.finish()
            runs += 8
        return runs * rows / (time.perf_counter() - began_s)


class Row:
    """One network at one batch size."""

    def __init__(self, device: Any, network: Network, rows: int, precision: str) -> None:
        self.device, self.network, self.rows, self.precision = device, network, rows, precision
        self.where, self.dtype = torch_device_name(device), PRECISIONS[precision]
        rng = np.random.default_rng(0)
        kinds = {value.name: value.type.tensor_type.elem_type for value in load(network.path).graph.input}
        self.feed: dict[str, Any] = {}
        for name, (_, *sizes) in network.shapes.items():
            drawn = rng.standard_normal((rows, *sizes)) if kinds[name] == 1 else rng.integers(0, 2, (rows, *sizes))
            self.feed[name] = drawn.astype(np.float32 if kinds[name] == 1 else np.int64)
        self.given = [torch.from_numpy(array).to(self.where) for array in self.feed.values()]

    def rivals(self, folder: Path, compiler: str) -> Iterator[tuple[str, Callable[[], Callable[[], Any] | Captured]]]:
        """Name -> what prepares a rival and returns its run."""
        if "CUDAExecutionProvider" in ort.get_available_providers():
            yield "onnxruntime", self._served
        yield "eager", lambda: self._converted(None)
        yield "compiled", lambda: self._converted(compiler)
        if compiler == "inductor":
            yield "package", lambda: self._packaged(folder)
        if self.network.module is not None:
            yield "module eager", lambda: self._module(None)
            yield "module compiled", lambda: self._module(compiler)

    def _served(self) -> Captured:
        options = LoadOptions(
            grain_s=1e3,
            precision=self.precision,
            max_batch=self.rows,
            independent_rows=True,
            shapes=self.network.shapes,
        )
        model: Any = prepare_on(self.device, self.network.path, options)
        rung = next(rung for rung in model._rungs if rung.rows >= self.rows)
        with torch.inference_mode():  # as the tensors of a rung were made
            for name, array in self.feed.items():
                self.device.copy(rung.tensors[name], self.device.copy_in([array]))
        outputs = [rung.tensors[spec.name] for spec in model.outputs]
        return Captured(lambda: rung.run(0), outputs, model)

    def _converted(self, compiler: str | None) -> Callable[[], Any]:
        model = folded(load(self.network.path, weights=True), {name: array.shape for name, array in self.feed.items()})
        module = OnnxModule(model, self.dtype, channels_last=self.dtype is not None).to(self.where)
        if compiler is not None:  # a graph of torch's operators, as the compiler process takes it
            module = torch.export.export(module, tuple(self.given), strict=False).module()
        return self._compiled(module, self.given, compiler)

    def _module(self, compiler: str | None) -> Callable[[], Any]:
        assert self.network.module is not None
        module, given = self.network.module.to(self.where, self.dtype), [x.to(self.dtype) for x in self.given]
        if given[0].dim() == 4 and self.dtype is not None:
            module = module.to(memory_format=torch.channels_last)
            given = [x.contiguous(memory_format=torch.channels_last) for x in given]
        return self._compiled(module, given, compiler)

    def _compiled(self, module: Any, given: list[Any], compiler: str | None) -> Callable[[], Any]:
        call = module if compiler is None else torch.compile(module, dynamic=False, fullgraph=True, backend=compiler)

        def run() -> list[Any]:
            result = call(*given)
            return list(result) if isinstance(result, tuple) else [result]

        run()
        return run

    def job(self) -> CompileJob:
        return CompileJob(
            model=self.network.path, shapes=self.network.shapes, rows=(self.rows,), precision=self.precision,
            device=self.where, device_name=self.device.name,
        )  # fmt: skip

    def _packaged(self, folder: Path) -> Callable[[], Any]:
        place = compile_model(self.job(), folder, LIMITS)
        manifest = find(place)
        assert manifest is not None
        began_s = time.perf_counter()
        (segment,) = open_packages(self.device, place, manifest)
        print(f"    loaded in {time.perf_counter() - began_s:.2f} s", flush=True)
        values = segment.from_arrays(self.feed)
        return lambda: list(segment.run_uncaptured(values).values())

    def measured(self, folder: Path, compiler: str, rivals: str, row_s: float) -> dict[str, Any]:
        """rivals: a regular expression of those that are measured."""
        wanted = self._expected()
        ready, results = dict[str, Rival](), dict[str, Any]()
        for name, prepare in self.rivals(folder, compiler):
            if not re.search(rivals, name):
                continue
            began_s = time.perf_counter()
            try:
                run = prepare()
                ready[name] = Rival(self.device, run, time.perf_counter() - began_s)
                outputs = ready[name].outputs()
                error = difference(wanted, dict(zip(wanted, outputs, strict=True)))
                results[name] = {"error": float(f"{error:.2g}"), "prepared_s": round(ready[name].prepared_s, 1)}
            except Exception as error:  # compilers raise whatever they meet
                results[name] = {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
                ready.pop(name, None)
            print(f"    {name}: {results[name]}", flush=True)
        seconds = row_s / TURNS / max(1, len(ready))
        rates: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(TURNS):
            for name, rival in ready.items():
                rates[name].append(rival.rate(self.rows, seconds))
        for name, taken in rates.items():
            results[name] |= {"rows_per_s": round(median(taken), 1), "spread": round(max(taken) / min(taken), 3)}
        return results

    def _expected(self) -> Mapping[str, Any]:
        session = ort.InferenceSession(str(self.network.path), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, self.feed), strict=True))


def compile_ahead(rows: Mapping[str, Row], folder: Path, jobs: int) -> dict[str, float]:
    """Compile the packages of all rows, *jobs* at a time; returns the seconds that each took, by the row's name."""

    def compile_one(row: Row) -> float:
        began_s = time.perf_counter()
        with suppress(NotCompiled):  # the row says why
            compile_model(row.job(), folder, LIMITS)
        return time.perf_counter() - began_s

    with ThreadPoolExecutor(jobs) as pool:
        taken = dict(zip(rows, pool.map(compile_one, rows.values()), strict=True))
    print("compiled in", {name: round(seconds, 1) for name, seconds in taken.items()}, flush=True)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="^(?!tiny)")
    parser.add_argument("--rivals", default="", help="regular expression")
    parser.add_argument("--precision", default="fp16", choices=sorted(PRECISIONS))
    parser.add_argument("--most-s", type=float, default=1e9)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--compiler", default="inductor", help="aot_eager: no code is made, to try the logic")
    parser.add_argument("--row-s", type=float, default=10.0, help="seconds of all turns of a row together")
    parser.add_argument("--jobs", type=int, default=4, help="packages that are compiled at a time")
    parser.add_argument("--folder", type=Path, help="keeps networks and packages")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        run(arguments, folder)


def run(asked: argparse.Namespace, folder: Path) -> None:
    """Compile and measure the rows that are asked for and not in the results yet."""
    began_s = time.monotonic()
    done = json.loads(asked.results.read_text("utf-8")) if asked.results.is_file() else {"rows": {}}
    device = device_named(asked.device)
    done["machine"] = {**machine("torch", "onnx"), "device": device.name, "onnxruntime": ort.__version__}
    torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = True, False
    # compilers guard against another mode: all that is compiled and captured is in this one
    with device.lane_context(), torch.inference_mode(False), torch.no_grad():
        rows: dict[str, Row] = {}
        for name, (make, sizes) in NETWORKS.items():
            keys = {f"{name} b{count} {asked.precision}": count for count in sizes}
            left = {key: count for key, count in keys.items() if key not in done["rows"] and re.search(asked.only, key)}
            if left:
                network = make(folder / f"{name}.onnx")
                rows |= {key: Row(device, network, count, asked.precision) for key, count in left.items()}
        compiled_s = {}
        if asked.compiler == "inductor" and re.search(asked.rivals, "package"):
            compiled_s = compile_ahead(rows, folder / "packages", asked.jobs)
        for key, row in rows.items():
            if time.monotonic() - began_s > asked.most_s:
                print("time is up; start it again for the rest")
                return
            print(f"{time.monotonic() - began_s:6.1f} s {key}", flush=True)
            found = row.measured(folder / "packages", asked.compiler, asked.rivals, asked.row_s)
            if "package" in found and key in compiled_s:
                found["package"]["compiled_s"] = round(compiled_s[key], 1)
            done["rows"][key] = found
            rates = {rival: figures.get("rows_per_s") for rival, figures in found.items()}
            print(f"{time.monotonic() - began_s:6.1f} s {key} {rates}", flush=True)
            asked.results.write_text(json.dumps(done, indent=1) + "\n", "utf-8")
            torch._dynamo.reset()
            if device.kind == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

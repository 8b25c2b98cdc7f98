"""Stitched models on a GPU as weft serves them, compared with the kernel that was written for them.

32 ResNet50 that share 90 % of their channels (``weft_stitch.making.generator``, untrained) are stitched into one ONNX
file with open rows and prepared as ``weft serve`` does; one round, a row of each model, is replayed in captured
segments. In the same process and in turns with it: the form ``fused`` as one CUDA graph of torch, as ``stitch_gpu.py``
measures it.

Needs one NVIDIA GPU, torch, triton and onnxruntime-gpu (docs/gpu.md). Rows are written as soon as they are measured:

    python benchmarks/gpu_stitched.py [--form split] [--precision fp16] [--results FILE]
    python benchmarks/gpu_stitched.py --net tinynet --tasks 3 --device cuda:twin --precision fp32 --results tiny.json

The row ``stitched/NET/TASKS``: milliseconds of a round and bytes of weights of both, their ratio, the form that weft
runs (``runs``: the form fused in torch, read from the file, or ONNX Runtime), the number of segments and of those that
could not be captured, the longest segment, and the difference of the two answers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import machine
from stitch_ways import draw, error, make

from weft.runtime.backend import LoadOptions
from weft.runtime.cuda.engine import device_named
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.cuda.rounds import StitchedDeviceModel
from weft_stitch.family import Family, Sharing
from weft_stitch.file_description import family_metadata, metadata
from weft_stitch.lowering import lower
from weft_stitch.making.generator import FamilyRecipe
from weft_stitch.onnx_writer import write_onnx
from weft_stitch.reading.alignment import align
from weft_stitch.running.gpu_timing import Place, TimedWay, build, precision, prepare, times_ms

RESULTS = Path(__file__).parent / "results" / "gpu_stitched.json"
SHARED = 0.9
TYPES = {"fp16": torch.float16, "fp32": torch.float32}


class Models(NamedTuple):
    """A family of models, what they share, and a picture for each."""

    family: Family
    sharing: Sharing
    pictures: list[torch.Tensor]


class Said:
    """Says when a part of the work has ended, and how long it took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, what: str, work: Callable[[], Any]) -> Any:
        began_s = time.perf_counter()
        result = work()
        self.seconds[what] = round(time.perf_counter() - began_s, 2)
        print(f"  {what}: {self.seconds[what]} s", flush=True)
        return result


def generated(net: str, tasks: int) -> Models:
    recipe = FamilyRecipe(net, tasks, sharing=SHARED)
    sharing = recipe.planted
    with ThreadPoolExecutor() as pool:
        nets = tuple(pool.map(recipe.net, range(tasks)))
    torch.manual_seed(0)
    return Models(align(nets), sharing, [torch.randn(1, *net.inputs[0].shape) for net in nets])


def written(models: Models, form: str, path: Path) -> Path:
    graph = lower(models.family, models.sharing, form, dynamic=True)
    told = metadata(models.family, models.family.batches) | family_metadata(models.family, models.sharing, graph)
    write_onnx(graph, path, told)
    return path


def fused(models: Models, where: str, number_type: torch.dtype) -> tuple[TimedWay, dict[str, Any]]:
    """The form for a GPU, tuned and captured."""
    place = Place(where, number_type, channels_last=True)
    graphs = draw("fused", models.family, models.sharing, place.align)
    inputs = [place.tensor(picture) for picture in models.pictures]
    built = build(graphs, [inputs], place)
    way = make("fused", graphs, built.modules, inputs)
    return prepare(way), {"weight_bytes": way.weight_bytes, "resident_bytes": built.resident_bytes}


def served(
    model: StitchedDeviceModel, pictures: Sequence[torch.Tensor]
) -> tuple[TimedWay, list[torch.Tensor], dict[str, Any]]:
    """A round of what weft serves, its answers, and what it is."""
    rung, segments = model._rungs[0], range(len(model.segments))
    inputs = [next(iter(task.inputs.values())) for task in model.tasks.specs]
    answers = model.run({name: picture.numpy() for name, picture in zip(inputs, pictures, strict=True)})
    outputs = [next(iter(task.outputs.values())) for task in model.tasks.specs]
    made = tuple(torch.as_tensor(rung.tensors[name]) for name in outputs)

    def replay() -> None:
        for segment in segments:
            rung.run(segment)

    environment = {
        "runs": "fused" if model.blueprint.segments[0].nodes is not None else "onnxruntime",
        "segments": len(segments),
        "uncaptured": len(model.uncaptured()),
        "longest_ms": max(model.timing.times_s[1]) * 1e3,
        "weight_bytes": model._weights.bytes,
        "memory_bytes": model.residency.memory_bytes,
        "remarks": list(model.remarks),
    }
    return TimedWay(replay, made, None, None, None), [torch.from_numpy(answers[name]) for name in outputs], environment


def measured(given: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure one after the other, then both in turns; what is known is kept whenever there is more of it."""
    device: Any = device_named(given.device)
    where, said = "cpu" if given.device.endswith("twin") else "cuda", Said()
    models: Models = said("models", lambda: generated(given.net, given.tasks))
    row: dict[str, Any] = {"sharing": SHARED, "seconds": said.seconds}
    row |= {name: getattr(given, name) for name in ("form", "precision", "grain_ms")}
    with tempfile.TemporaryDirectory() as folder, precision(tf32=False):
        path = said("file", lambda: written(models, given.form, Path(folder) / "body.onnx"))
        kernel, row["fused"] = said("fused", lambda: fused(models, where, TYPES[given.precision]))
        keep(row | {"fused": row["fused"] | {"ms": times_ms({"": kernel})[""]}})
        model = said("weft", lambda: prepare_on(device, path, _options(given)))
        if not isinstance(model, StitchedDeviceModel):
            raise SystemExit(f"not on the device: {model.remarks[-1]}")
        with device.lane_context():
            body, answers, row["weft"] = served(model, models.pictures)
            ms = said("timed", lambda: times_ms({"weft": body, "fused": kernel}))
    for name, time_ms in ms.items():
        row[name]["ms"] = time_ms
    row["times_fused"] = ms["weft"] / ms["fused"]
    row["weights_of_fused"] = row["weft"]["weight_bytes"] / row["fused"]["weight_bytes"]
    keep(row | {"difference": error(answers, kernel.outputs)})


def _options(given: argparse.Namespace) -> LoadOptions:
    """As a server has them, but for one round only, and rows are not followed: they are known to be kept apart."""
    return LoadOptions(grain_s=given.grain_ms / 1e3, precision=given.precision, max_batch=1, independent_rows=True)


def _machine(device: str) -> dict[str, object]:
    if device.endswith("twin"):
        return machine("torch", "onnxruntime", "onnx")
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return machine("torch", "triton", "onnxruntime-gpu", "onnx") | {"gpu": gpu}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--net", default="resnet50")
    options.add_argument("--tasks", type=int, default=32)
    options.add_argument("--form", default="split", help="of all layers in the ONNX file: split, mts, half or separate")
    options.add_argument("--precision", choices=TYPES, default="fp16")
    options.add_argument("--grain-ms", type=float, default=0.25)
    options.add_argument("--device", default="cuda:0")
    options.add_argument("--results", type=Path, default=RESULTS)
    arguments = options.parse_args()
    kept = json.loads(arguments.results.read_text()) if arguments.results.exists() else {"rows": {}}
    kept["machine"], key = _machine(arguments.device), f"stitched/{arguments.net}/{arguments.tasks}"

    def keep(row: dict[str, Any]) -> None:
        print(key, json.dumps(row), flush=True)
        kept["rows"][key] = row
        arguments.results.write_text(json.dumps(kept, indent=1) + "\n")

    print(key, flush=True)
    measured(arguments, keep)


if __name__ == "__main__":
    main()

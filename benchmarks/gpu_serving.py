"""A server on a GPU compared with the bare device: throughput, latency, the cost of segments, and an urgent model.

Needs one NVIDIA GPU, torch and onnxruntime-gpu (docs/gpu.md). Each row is written to the results as soon as it is
measured, and is not measured again by a later run:

    python benchmarks/gpu_serving.py [--only PART-OF-A-NAME] [--seconds 3] [--results FILE] [--ocr FILE]

Rows: `bare/MODEL/ROWS`: the captured model in one piece and in segments, replayed in a loop without a server;
`attention/MODEL/ROWS`: an encoder of 197 tokens compared with torch's own attention; `served/MODEL/WIRE/ROWS`: requests
in a closed loop over binary HTTP, system or CUDA shared memory; `alone/MODEL`: one-row requests at a fifth of the
device's throughput; `killed/MODEL`: time from the death of the worker to the next answer; `beside/URGENT/ROWS of
OTHER`: one-row requests at a fifth of the device's throughput, on an idle GPU and, at the same times, while the other
model gets requests without pause. Models compute in fp16, except the text detector, which in fp16 finds text in noise
and so computes in fp32. It comes from the package rapidocr-onnxruntime or the file of `--ocr`. Its images and outputs
are in shared memory, and so are those of `pixel-map`, a small network that needs no file: `--only pixel-map` shows what
outputs of 1.6 MB in CUDA shared memory cost beside the bare device (`ratio`, of rows per second).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from gpu_asking import (
    FOLDER,
    MAP,
    OCR,
    OCR_SIDE,
    Rows,
    Served,
    clients,
    connected,
    end_when_told,
    exchanged,
    exported,
    provide_ocr,
    registered,
    request_for,
)

MODELS = {"resnet50": (1, 8, 32), "bert-base": (1, 8, 32), OCR: (1, 8), MAP: (1, 8)}
"""Model -> rows of its requests."""
SETTINGS: dict[str, dict[str, Any]] = {
    "resnet50": {"slo_ms": 1000.0, "max_batch": 32},
    "bert-base": {"slo_ms": 2.0, "max_batch": 32},
    OCR: {"slo_ms": 1000.0, "max_batch": 8, "shapes.x": [1, 3, OCR_SIDE, OCR_SIDE], "precision": "fp32"},
    MAP: {"slo_ms": 1000.0, "max_batch": 8, "shapes.x": [1, 3, OCR_SIDE, OCR_SIDE]},
}
RESULTS = Path(__file__).parent / "results" / "gpu_serving.json"
ASKING = 6
"""Connections over which requests at random times come, so that one does not wait for the answer to another."""
LOAD = 0.2
"""The part of what the device can do, at which one model alone is asked."""
APART_S = 300.0
"""How long something without a server may take."""


class Pair(NamedTuple):
    """An urgent model, and another one that has all the time there is."""

    urgent: str
    other: str
    rows: int
    """Of a request for the other one."""
    max_batch: int
    grain_ms: float = 0.25

    @property
    def key(self) -> str:
        return f"beside/{self.urgent}/{self.rows} rows of {self.other} cut at {self.grain_ms} ms"

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The urgent one is due after what an idle GPU takes at most: one that is late gives way to the others."""
        other = {"slo_ms": 1000.0, "max_batch": self.max_batch, "grain_ms": self.grain_ms}
        return {self.urgent: {"slo_ms": 10.0, "priority": 1, "max_batch": 4}, self.other: other}


PAIRS = (
    Pair("bert-base", "resnet50", 8, 32),
    Pair("bert-base", "resnet50", 8, 32, 0.0625),
    Pair("bert-large-16", "resnet50", 32, 32),
    Pair("bert-large-16", "encoder-24", 16, 16),
    Pair("resnet50", "encoder-24", 64, 64),
)


# Without a server


def bare(name: str, on: str, seconds: float) -> dict[int, dict[str, Any]]:
    """A model in one piece and in segments, replayed as fast as Python can, at each number of rows."""
    from weft.runtime.backend import LoadOptions
    from weft.runtime.cuda.engine import device_named
    from weft.runtime.cuda.preparing import prepare_on

    device, settings = device_named(on), SETTINGS[name]
    shapes = {"x": tuple(settings["shapes.x"])} if "shapes.x" in settings else {}
    results: dict[int, dict[str, Any]] = {rows: {} for rows in MODELS[name]}
    for label, grain_s in (("whole", 1.0), ("cut", 0.00025)):
        precision, max_batch = settings.get("precision", "fp16"), settings["max_batch"]
        options = LoadOptions(grain_s=grain_s, precision=precision, max_batch=max_batch, shapes=shapes)
        prepare_on(device, exported(name), options, FOLDER / "bare").close()
        model: Any = prepare_on(device, exported(name), options, FOLDER / "bare", learn=False)
        for rows in results:
            results[rows][label] = {
                "segments": len(model.segments),
                **_replayed(device, model, rows, seconds),
                "longest_ms": max(model.timing.times_s[rows]) * 1e3,
                "memory_mib": model.residency.memory_bytes >> 20,
                "remarks": list(model.remarks),
            }
        model.close()
    for result in results.values():
        result["cutting_costs"] = result["cut"]["ms"] / result["whole"]["ms"] - 1
    return results


def _replayed(device: Any, model: Any, rows: int, seconds: float) -> dict[str, float]:
    rung = next(rung for rung in model._rungs if rung.rows >= rows)
    with device.lane_context():
        replays, began_s = 0, time.perf_counter()
        while time.perf_counter() - began_s < seconds:
            for _ in range(50):
                for segment in range(len(model.segments)):
                    rung.run(segment)
            device.finish()
            replays += 50
        took_s = time.perf_counter() - began_s
    return {"ms": took_s / replays * 1e3, "rows_per_s": replays * rows / took_s}


def attention(name: str, on: str, seconds: float, rows: int = 16) -> dict[str, Any]:
    """An encoder of plain operators as weft runs it, with attention as one operator and without, beside torch's own."""
    from gpu_programs import WIDTH, bare_ms, encoder

    from weft.runtime.backend import LoadOptions
    from weft.runtime.cuda import onnx_files, preparing
    from weft.runtime.cuda.engine import device_named

    device = device_named(on)
    results: dict[str, Any] = {"torch_ms": bare_ms(device, encoder(24), rows, WIDTH, seconds)}
    fusing = onnx_files.with_attention
    for label, fuse in (("fused_ms", fusing), ("plain_ms", lambda path, folder: path)):
        onnx_files.with_attention = fuse
        options = LoadOptions(grain_s=1.0, precision="fp16", max_batch=rows)
        model: Any = preparing.prepare_on(device, exported(name), options)
        results[label] = _replayed(device, model, rows, seconds)["ms"]
        model.close()
    return results | {"rows": rows, "times_torch": results["fused_ms"] / results["torch_ms"]}


# A server and its clients


def served(server: Served, name: str, wire: str, rows: int, seconds: float) -> dict[str, Any]:
    """Requests of so many rows, without end."""
    request, memory = request_for(name, rows, wire)
    best: dict[str, Any] = {}
    with registered(server.port, memory):
        for count in (4, 12) if rows > 1 else (48,):
            result = clients(count, server.port, request, seconds)()
            result |= {"clients": count, "rows_per_s": result["per_s"] * rows}
            best = max(best, result, key=lambda each: each.get("rows_per_s", 0.0))
    return best


def alone(server: Served, name: str, seconds: float) -> dict[str, Any]:
    request, _ = request_for(name, 1, "http")
    graph_ms = server.graph_ms(name)
    result = clients(ASKING, server.port, request, seconds, ASKING * graph_ms / 1e3 / LOAD)()
    return result | {"graph_ms": graph_ms, "over_graph_ms": result["p50_ms"] - graph_ms}


def beside(server: Served, pair: Pair, seconds: float) -> dict[str, Any]:
    quiet = alone(server, pair.urgent, seconds)
    request, memory = request_for(pair.other, pair.rows, "memory")
    with registered(server.port, memory):
        background = clients(ASKING, server.port, request, seconds + 1.5)
        time.sleep(0.5)
        busy = alone(server, pair.urgent, seconds)
        rate = background()
    return {"alone": quiet, "beside": busy, "other": rate, "p99_ratio": busy["p99_ms"] / quiet["p99_ms"]}


def killed(server: Served, name: str) -> dict[str, Any]:
    request, _ = request_for(name, 1, "http")
    connection = connected(server.port)
    assert exchanged(connection, request)[0] == 200
    os.kill(server.worker(), signal.SIGKILL)
    began_s, refused = time.perf_counter(), 0
    while exchanged(connection, request)[0] != 200:
        refused += 1
        time.sleep(0.02)
    return {"back_after_s": time.perf_counter() - began_s, "refused": refused}


# Rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="")
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--device", default="cuda:0")
    options.add_argument("--ocr", type=Path, help=f"the file of {OCR}, where its package is not installed")
    options.add_argument("--bare", default="")
    options.add_argument("--attention", default="")
    arguments = options.parse_args()
    end_when_told()
    FOLDER.mkdir(exist_ok=True)
    if arguments.attention:
        print(json.dumps(attention(arguments.attention, arguments.device, arguments.seconds)))
    elif arguments.bare:
        print(json.dumps(bare(arguments.bare, arguments.device, arguments.seconds)))
    else:
        rows = Rows(arguments.results, arguments.only, arguments.device)
        measure(rows, arguments.device, arguments.seconds, with_ocr=provide_ocr(arguments.ocr))


def measure(rows: Rows, device: str, seconds: float, *, with_ocr: bool) -> None:
    zoo, mapping = [name for name in MODELS if name not in (OCR, MAP)], [OCR, MAP] if with_ocr else [MAP]
    for name in [*zoo, *mapping]:
        for count in MODELS[name]:
            rows.measure(f"bare/{name}/{count}", lambda n=name, c=count: _apart("bare", n, device, seconds)[str(c)])
    rows.measure("attention/bert-large/16", lambda: _apart("attention", "encoder-24", device, seconds))
    asked = _served_rows(zoo, ("cuda", "memory", "http"), seconds)
    asked |= {f"alone/{name}": partial(alone, name=name, seconds=seconds) for name in zoo}
    asked["killed/resnet50"] = partial(killed, name="resnet50")
    rows.measure_on(lambda: Served({name: SETTINGS[name] for name in zoo}, device=device), asked)
    for name in mapping:
        asked = _served_rows([name], ("cuda", "memory"), seconds)
        rows.measure_on(lambda name=name: Served({name: SETTINGS[name]}, device=device), asked)
    _add_ratios(rows)
    for pair in PAIRS:
        run = partial(beside, pair=pair, seconds=seconds)
        rows.measure_on(lambda pair=pair: Served(pair.settings, device=device), {pair.key: run})


def _add_ratios(rows: Rows) -> None:
    """Add to what was served its rows per second in relation to those of the bare device in one piece."""
    for key, row in rows.found.items():
        what = key.split("/")
        device = rows.found.get(f"bare/{what[1]}/{what[-1]}") if what[0] == "served" else None
        if device is not None:
            row["ratio"] = row["rows_per_s"] / device["whole"]["rows_per_s"]
            print(f"{key}: {row['ratio']:.2f} of the bare device", flush=True)
    rows.write()


def _served_rows(
    names: Sequence[str], wires: Sequence[str], seconds: float
) -> dict[str, Callable[[Served], dict[str, Any]]]:
    return {
        f"served/{name}/{wire}/{count}": partial(served, name=name, wire=wire, rows=count, seconds=seconds)
        for name in names
        for wire in wires
        for count in MODELS[name]
    }


@cache
def _apart(what: str, name: str, device: str, seconds: float) -> dict[str, Any]:
    """Something without a server in a process of its own, which gives the device's memory back."""
    command = [sys.executable, __file__, f"--{what}", name, "--device", device, "--seconds", str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=APART_S)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    main()

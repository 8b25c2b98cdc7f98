"""Engines of a server on a GPU: rows per second of the same models in ONNX Runtime and compiled, and of the bare graph.

One server serves every model twice: in ONNX Runtime, and compiled by torch's compiler while the server answers. Clients
then send requests to both in turns, with one row over binary HTTP, and with one row and the largest batch in shared
memory of the system and of the GPU; large answers are written to it, too. `ready_s`: time until the server is ready;
`compiled_s`: further time until the compiled model runs, `complete_s`: until it is compiled for all batch sizes. The
row `compiling` has the 99th percentile of one client's requests for one row of the first network in ONNX Runtime, in
windows until all are complete (and some after). The bare graph is the same packages replayed without a server, after
the server's end.

    python benchmarks/gpu_engine_serving.py [--only PART-OF-A-NAME] [--seconds 2] [--results FILE] [--keep]

The server's cache is emptied first, so that everything is compiled; `--keep` keeps it, to time a second start. Needs
one NVIDIA GPU, torch, triton and gcc, and onnxruntime-gpu (docs/gpu.md): without it, models are served in the compiled
engine only, and the requests of the row `compiling` are for the first of them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import onnxruntime as ort
from gpu_asking import (
    FOLDER,
    Rows,
    Served,
    clients,
    connected,
    end_when_told,
    exchanged,
    registered,
    request_for,
    tensor_in,
)
from gpu_engine_nets import NETWORKS

from weft.serving.learning import COMPILED_REMARK

RESULTS = Path(__file__).parent / "results" / "gpu_engine_serving.json"
ENGINES = ("onnxruntime", "compiled")
"""The engines that models are served in; the first is asked while models are compiled."""
SERVED = ("resnet50", "vit-b16", "speech")
"""Networks that are served together unless others are named."""
STATE = b"GET /weft/state HTTP/1.1\r\nHost: localhost\r\n\r\n"
WINDOW_S, AFTER = 2.0, 6
"""Length of a window of requests while models are compiled, and how many windows there are afterwards."""
LARGE_BYTES = 1 << 20
"""Answers from this size on are written to shared memory, if inputs lie there."""
BARE_S = 240.0
"""How long the process of the bare graphs may take."""


def largest(network: str) -> int:
    """The largest batch of a network."""
    return NETWORKS[network][1][-1]


def model_name(network: str, engine: str) -> str:
    return f"{network}-{engine}"


def settings_of(network: str, engine: str) -> dict[str, Any]:
    return {
        "slo_ms": 1000.0,
        "max_batch": largest(network),
        "engine": engine,
        "rows": "independent",
    }


@cache
def network_file(network: str) -> Path:
    """The network's file, written once, under the names of its models."""
    paths = [FOLDER / "models" / model_name(network, engine) / "1" / "model.onnx" for engine in ENGINES]
    if not all(path.exists() for path in paths):
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        make, _ = NETWORKS[network]
        make(paths[0])
        for path in paths[1:]:
            shutil.copyfile(paths[0], path)
    return paths[-1]


def engines_in(metrics: str) -> dict[str, str]:
    """Model -> the engine that runs it, from the server's metrics."""
    lines = re.findall(r"^weft_model_engine\{(.*)\} 1", metrics, re.MULTILINE)
    labels = [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines]
    return {label["model"]: label["engine"] for label in labels}


class Compiling(Served):
    """weft over models in both engines; waits until the compiled ones run."""

    def __init__(self, networks: list[str], device: str, wait_s: float) -> None:
        for network in networks:
            network_file(network)
        began_s = time.perf_counter()
        models = {model_name(n, engine): settings_of(n, engine) for engine in ENGINES for n in networks}
        super().__init__(models, device=device)
        self.ready_s = time.perf_counter() - began_s
        self.compiled_s, self.complete_s = dict[str, float](), dict[str, float]()
        self.windows: list[dict[str, float]] = []
        self._ready_at_s = time.perf_counter()
        request, _ = request_for(model_name(networks[0], ENGINES[0]), 1, "http")
        while len(self.complete_s) < len(networks) and self._since_ready_s() < wait_s:
            self._ask(request)
            engines, messages = engines_in(self.metrics()), self._messages()
            for network in networks:
                name = model_name(network, "compiled")
                if engines.get(name) == "compiled":
                    self.compiled_s.setdefault(network, self._since_ready_s())
                    if messages[name] != COMPILED_REMARK:
                        self.complete_s.setdefault(network, self._since_ready_s())
        self.compiling = len(self.windows)
        for _ in range(AFTER):
            self._ask(request)
        print("compiled after", self.compiled_s, self.complete_s, self._messages(), file=sys.stderr, flush=True)

    def _since_ready_s(self) -> float:
        return time.perf_counter() - self._ready_at_s

    def _ask(self, request: bytes) -> None:
        """One window of a client's requests."""
        began_s, result = self._since_ready_s(), clients(1, self.port, request, WINDOW_S, every_s=0.005)()
        self.windows.append({"since_s": began_s, "p50_ms": result["p50_ms"], "p99_ms": result["p99_ms"]})
        print(self.windows[-1], file=sys.stderr, flush=True)

    def _messages(self) -> dict[str, str]:
        """Model -> its message in the server's state."""
        state = json.loads(exchanged(connected(self.port), STATE)[1])
        return {model["name"]: model["message"] for model in state["models"]}

    def latencies(self) -> dict[str, Any]:
        """The windows, and the median of their 99th percentiles while models were compiled and afterwards."""
        parts = {"compiling": self.windows[: self.compiling], "after": self.windows[self.compiling :]}
        medians = {name: median(window["p99_ms"] for window in part) for name, part in parts.items() if part}
        return {
            "p99_ms": medians,
            "compiled_s": self.compiled_s,
            "complete_s": self.complete_s,
            "windows": self.windows,
        }


def served_rates(server: Compiling, network: str, wire: str, rows: int, seconds: float) -> dict[str, Any]:
    """Rows per second of both engines, in two turns; the better turn and number of clients of each counts."""
    results: dict[str, Any] = {
        "ready_s": round(server.ready_s, 1),
        "compiled_s": server.compiled_s.get(network),
        "complete_s": server.complete_s.get(network),
    }
    first_request, _ = request_for(model_name(network, ENGINES[0]), rows, "http")
    answer_bytes = len(tensor_in(exchanged(connected(server.port), first_request)[1]))
    answer_bytes = answer_bytes if answer_bytes >= LARGE_BYTES else 0
    for turn in range(2):
        for engine in ENGINES:
            name = model_name(network, engine)
            request, memory = request_for(name, rows, wire, answer_bytes)
            with registered(server.port, memory):
                for count in (12,) if rows > 1 else (1, 48):
                    result = clients(count, server.port, request, seconds)()
                    result |= {"clients": count, "rows_per_s": result["per_s"] * rows}
                    if count == 1:
                        results[f"{engine} alone p50_ms"] = result["p50_ms"]
                    elif turn == 0 or result["rows_per_s"] > results[engine]["rows_per_s"]:
                        results[engine] = max(results.get(engine, result), result, key=lambda each: each["rows_per_s"])
    return results


def bare(networks: list[str], on: str, seconds: float) -> dict[str, dict[str, Any]]:
    """`network/rows` -> its compiled graph, from the server's packages, replayed without a server."""
    from dataclasses import replace

    from gpu_serving import _replayed

    from weft.runtime.backend import LoadOptions
    from weft.runtime.cuda.cpu_twins import is_twin
    from weft.runtime.cuda.engine import device_named
    from weft.runtime.cuda.packager import Packager
    from weft.runtime.cuda.preparing import prepare_on
    from weft.runtime.cuda.requirements import gpu_called
    from weft.runtime.cutting import DEVICE_GRAIN_S

    device, results = device_named(on), dict[str, dict[str, Any]]()
    for network in networks:
        path, folder = network_file(network), FOLDER / "bare"
        options = LoadOptions(  # as the server's, so that its packages are found
            grain_s=DEVICE_GRAIN_S,
            precision="fp16",
            max_batch=largest(network),
            independent_rows=True,
            engine="compiled",
        )
        plain: Any = prepare_on(device, path, options, folder)
        code = Packager(on, "cpu" if is_twin(on) else gpu_called(on)).packages(
            path, options, plain, FOLDER / "cache" / "segments", compile_now=False
        )
        plain.close()
        if code is None:
            continue
        began_s = time.perf_counter()
        model: Any = prepare_on(device, path, replace(options, packages=str(code.folder)), folder, learn=False)
        opened_s = time.perf_counter() - began_s
        for rows in (1, largest(network)):
            results[f"{network}/{rows}"] = {
                **_replayed(device, model, rows, seconds),
                "opened_s": opened_s,
                "memory_mib": model.residency.memory_bytes >> 20,
                "weights_mib": path.stat().st_size >> 21,
                "remark": model.remarks[-1],
            }
        model.close()
    return results


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="")
    options.add_argument("--seconds", type=float, default=2.0)
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--device", default="cuda:0")
    options.add_argument("--networks", default=",".join(SERVED), help="those that are served together")
    options.add_argument("--wait-s", type=float, default=420.0, help="for all models to be compiled")
    options.add_argument("--keep", action="store_true", help="use what an earlier run has compiled")
    options.add_argument("--bare", action="store_true", help="only the bare graphs, as JSON")
    arguments = options.parse_args()
    end_when_told()
    networks = arguments.networks.split(",")
    if arguments.device != "cuda:twin" and "CUDAExecutionProvider" not in ort.get_available_providers():
        global ENGINES
        ENGINES = ("compiled",)
    FOLDER.mkdir(exist_ok=True)
    if arguments.bare:
        print(json.dumps(bare(networks, arguments.device, arguments.seconds)))
        return
    if not arguments.keep:
        shutil.rmtree(FOLDER / "cache", ignore_errors=True)
    rows = Rows(arguments.results, arguments.only, arguments.device)
    wanted: dict[str, Any] = {"compiling": Compiling.latencies} | {
        f"served/{network}/{wire}/{count}": partial(
            served_rates, network=network, wire=wire, rows=count, seconds=arguments.seconds
        )
        for network in networks
        for wire, counts in (("http", (1,)), ("memory", (largest(network),)), ("cuda", (1, largest(network))))
        for count in counts
    }
    rows.measure_on(lambda: Compiling(networks, arguments.device, arguments.wait_s), wanted)
    command = [sys.executable, __file__, "--bare", "--device", arguments.device, "--networks", arguments.networks]
    graphs = cache(
        lambda: json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=BARE_S).stdout)
    )
    for network in networks:
        for count in (1, largest(network)):
            rows.measure(f"bare/{network}/{count}", lambda key=f"{network}/{count}": graphs()[key])


if __name__ == "__main__":
    main()

"""Models that share a GPU under weft's server: in turns, on streams, on partitions, and as `abreast` decides.

Needs one NVIDIA GPU, torch and cuda-bindings (docs/gpu.md); models run in ONNX Runtime, or without onnxruntime-gpu in
torch step by step. Each row is written to the results as soon as it is measured, and is not measured again later:

    python benchmarks/gpu_sharing.py [--only PART-OF-A-NAME] [--grain-ms 0.5] [--seconds 3] [--results FILE]

Rows: `A ROWS + B ROWS/POLICY`: requests without pause for both models, with that number of rows each, over inputs in
shared memory; `rates` are the answers per second of each model relative to the model alone under `punctual`, which
gives each the whole GPU in turn; `POLICY, gates`: with gates between segments (docs/gpu.md); `time` has the seconds
that each ran on every share, by multiprocessors. `like/A ROWS + B ROWS`: the measured contention of the models.
Segments are longer than the server's default, because each one costs 0.3 ms of CPU time.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gpu_asking import FOLDER, Rows, Served, clients, connected, end_when_told, exchanged, registered, request_for

RESULTS = Path(__file__).parent / "results" / "gpu_sharing.json"
POLICIES = ("punctual", "streams", "split", "abreast")
WITH_GATES = ("punctual", "abreast")
ASKING = 3
"""Clients of each model: one batch is computed while others wait."""
NO_HURRY_MS = 10_000.0


class PlanRequest(NamedTuple):
    """A model, and the rows of its requests."""

    name: str
    rows: int

    def __str__(self) -> str:
        return f"{self.name} {self.rows}"


PAIRS = (
    (PlanRequest("resnet50", 32), PlanRequest("bert-large-16", 1)),
    (PlanRequest("resnet50", 8), PlanRequest("bert-large-16", 1)),
    (PlanRequest("resnet50", 1), PlanRequest("bert-large-16", 1)),
    (PlanRequest("encoder-24", 16), PlanRequest("bert-large-16", 1)),
    (PlanRequest("encoder-24", 16), PlanRequest("resnet50", 32)),
)


def answered(server: Served, seconds: float, models: tuple[PlanRequest, ...]) -> list[float]:
    """Answers per second of each, all of them asked without end."""
    with ExitStack() as kept:
        running = []
        for model in models:
            request, memory = request_for(model.name, model.rows, "memory")
            kept.enter_context(registered(server.port, memory))
            running.append(clients(ASKING, server.port, request, seconds))
        return [float(ended()["per_s"]) for ended in running]


def shared(server: Served, pair: tuple[PlanRequest, PlanRequest], seconds: float, alone: list[float]) -> dict[str, Any]:
    alone = alone or [answered(server, seconds, (plan_request,))[0] for plan_request in pair]
    before = times(server)
    together = answered(server, seconds, pair)
    rates = [a / b for a, b in zip(together, alone, strict=True)]
    spent = {key: round(time_s - before.get(key, 0.0), 3) for key, time_s in times(server).items()}
    return {"alone_per_s": alone, "per_s": together, "rates": rates, "sum": sum(rates), "time": spent}


def times(server: Served) -> dict[str, float]:
    """Model and share -> seconds."""
    lines = [line for line in server.metrics().splitlines() if line.startswith("weft_share_seconds_total{")]
    return {line[len("weft_share_seconds_total") :].rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def likeness(server: Served) -> dict[str, Any]:
    """What the server's models are like, and how the GPU was cut."""
    _, body = exchanged(connected(server.port), b"GET /weft/profile HTTP/1.1\r\nHost: localhost\r\n\r\n")
    told = json.loads(body)
    return {"gpu": told["gpu"], "like": {name: model["like"] for name, model in told["models"].items()}}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="")
    options.add_argument("--grain-ms", type=float, default=0.5)
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--device", default="cuda:0")
    arguments = options.parse_args()
    end_when_told()
    FOLDER.mkdir(exist_ok=True)
    rows = Rows(arguments.results, arguments.only, arguments.device)
    for pair in PAIRS:
        # Compilers beside the server would disturb what is measured.
        common = {"slo_ms": NO_HURRY_MS, "grain_ms": arguments.grain_ms, "engine": "onnxruntime"}
        settings = {plan_request.name: {**common, "max_batch": plan_request.rows} for plan_request in pair}
        key = " + ".join(map(str, pair))
        for policy, gates in [*((policy, False) for policy in POLICIES), *((policy, True) for policy in WITH_GATES)]:
            alone = rows.found.get(f"{key}/{POLICIES[0]}", {}).get("alone_per_s", [])
            name = f"{key}/{policy}, gates" if gates else f"{key}/{policy}"
            asked = {name: partial(shared, pair=pair, seconds=arguments.seconds, alone=alone)}
            if policy == "abreast" and not gates:
                asked[f"like/{key}"] = likeness
            rows.measure_on(partial(Served, settings, device=arguments.device, policy=policy, gates=gates), asked)


if __name__ == "__main__":
    main()

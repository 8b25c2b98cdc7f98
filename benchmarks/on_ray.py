"""What weft on Ray costs and what it is good for, on a cluster of three nodes on this machine.

- cost: one small request at a time, in turns through a gate and straight to a server. Counted is the processor time
  of the gate and the servers, from /proc, less what they use when nobody asks; and the latencies. Rounds alternate;
  shown is the median of them, and of the differences within a round.
- routers: three models, one server slowed to half (stopped for 5 ms of every 10), the same requests in turns through a
  gate that goes by expected finish (``slack``) and one that goes by requests in flight (``two-in-flight``: of two that
  are drawn the one with fewer, which is what Ray Serve's own router does).
- kills: a server's process is killed five times on the way, each time another one.
- refused: how long a gate takes to refuse what cannot be on time anywhere.

Ray must be installed (``pip install 'weft[ray]'``).

    python benchmarks/on_ray.py [--only cost,routers,kills,refused] [--requests 20000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from isolation_cost import write_chain
from machine import machine
from processes import cpu_s
from serving_overhead import FEATURES, write_network

from weft.gates.gate import GateSettings
from weft.gates.thread import GateThread
from weft.jsonfile import write_json
from weft.load import LoadResult, run_load
from weft.load.client import Pool, call, parse_url, request_bytes
from weft.placing.placement import PlacedMachine, PlacedModel, Placement, write_placement
from weft.ray.local import LocalCluster
from weft.ray.settings import KEY_VARIABLE
from weft.serving.config import ServerConfig
from weft.workloads.requests import parse_workload

RESULTS = Path(__file__).parent / "results" / "on_ray.json"
MACHINES, MODELS = ("one", "two", "three"), ("mlp", "chain", "short")
ROUNDS, EACH = 9, 400
SLOWED, HALF_S = "one", 0.005
KILLS, RATE = 5, 200.0


def written(folder: Path) -> None:
    """Three models on every one of three machines."""
    write_network(folder / "mlp.onnx")
    write_chain(folder / "chain.onnx")
    write_network(folder / "short.onnx")
    models = tuple(PlacedModel(model=model, share=1 / 3, rate=1.0, compute=0.001) for model in MODELS)
    placed = [
        PlacedMachine(
            name=name, kind="host", zone="default", models=models, compute=0.003, bandwidth=0.0, other=0.0, busy=0.003,
            busy_cap=0.8, memory_bytes=0, memory_limit_bytes=1, limit="compute", limited_by="chain",
        )
        for name in MACHINES
    ]  # fmt: skip
    write_placement(Placement(machines=tuple(placed), value=1.0, bound=1.0), folder / "placement.json")


# What a hop costs


def small(target: Any, key: str | None) -> bytes:
    raw = np.zeros(FEATURES, np.float32).tobytes()
    tensor = {"name": "x", "shape": [1, FEATURES], "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"parameters": {"binary_data_output": True, "timeout": 10_000_000}, "inputs": [tensor]}).encode()
    head = f"Inference-Header-Content-Length: {len(text)}\r\nContent-Type: application/octet-stream\r\n"
    return request_bytes(target, "POST", "v2/models/mlp/infer", key=key, head=head, body=text + raw)


async def asked(url: str, key: str | None, count: int) -> list[float]:
    """Seconds that requests take, one after another."""
    pool = Pool(parse_url(url), 1)
    request, times = small(pool.target, key), []
    for _ in range(count):
        began = time.perf_counter()
        answer = await call(pool, request)
        times.append(time.perf_counter() - began)
        assert answer.status == 200, answer
    await pool.close()
    return times


def used_s(pids: list[int]) -> float:
    return sum(map(cpu_s, pids))


def cost(cluster: LocalCluster, key: str) -> dict[str, Any]:
    pids = [cluster.gate_pid(), *(cluster.where(machine)[0] for machine in MACHINES)]
    server = cluster.told()["servers"][0]["url"]
    ways = {"gate": (cluster.urls[0], None), "direct": (server, key)}
    rounds: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        began, before = time.perf_counter(), used_s(pids)
        time.sleep(1.0)
        idle = (used_s(pids) - before) / (time.perf_counter() - began)
        for name, (url, its_key) in ways.items():
            began, before = time.perf_counter(), used_s(pids)
            times = asyncio.run(asked(url, its_key, EACH))
            passed = time.perf_counter() - began
            rounds[name].append((((used_s(pids) - before) - idle * passed) / EACH, times))
    found: dict[str, Any] = {}
    for name, each in rounds.items():
        found[name] = {
            "cpu_ms": statistics.median(cpu for cpu, _ in each) * 1e3,
            "p50_ms": statistics.median(float(np.median(times)) for _, times in each) * 1e3,
            "p99_ms": statistics.median(float(np.quantile(times, 0.99)) for _, times in each) * 1e3,
        }
    pairs = list(zip(rounds["gate"], rounds["direct"], strict=True))
    found["added"] = {
        "cpu_ms": statistics.median(gate[0] - direct[0] for gate, direct in pairs) * 1e3,
        "p50_ms": statistics.median(float(np.median(g[1]) - np.median(d[1])) for g, d in pairs) * 1e3,
        "p99_ms": statistics.median(float(np.quantile(g[1], 0.99) - np.quantile(d[1], 0.99)) for g, d in pairs) * 1e3,
    }
    return found


# Routers


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """A process that has half of the time."""
    done = threading.Event()

    def hold() -> None:
        while not done.wait(HALF_S):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(HALF_S)
            os.kill(pid, signal.SIGCONT)

    holding = threading.Thread(target=hold)
    holding.start()
    try:
        yield
    finally:
        done.set()
        holding.join()


@contextmanager
def gate(cluster: LocalCluster, placement: Placement, key: str, router: str) -> Iterator[str]:
    """Another gate before the same servers, in this process."""
    thread = GateThread(placement, ServerConfig(http_port=0), GateSettings(router=router, key=key))
    port = thread.start()
    try:
        thread.know({each["machine"]: [each["url"]] for each in cluster.told()["servers"]})
        while thread.told()["missing"]:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        thread.stop()


def sent(url: str, streams: list[dict[str, Any]], seconds: float, seed: int) -> LoadResult:
    return run_load(parse_workload({"duration_s": seconds, "warmup_s": 1.0, "seed": seed, "stream": streams}, "w"), url)


def routers(cluster: LocalCluster, placement: Placement, key: str) -> dict[str, Any]:
    streams = [
        {"model": "chain", "rate": 12.0, "deadline_ms": 60.0},
        {"model": "mlp", "rate": 40.0, "deadline_ms": 12.0},
        {"model": "short", "rate": 40.0, "deadline_ms": 12.0},
    ]
    missed: dict[str, list[float]] = {"slack": [], "two-in-flight": []}
    with slowed(cluster.where(SLOWED)[0]):
        for seed in range(4):
            for router, shares in missed.items():
                with gate(cluster, placement, key, router) as url:
                    result = sent(url, streams, 7.0, seed)
                due = sum(each.figures.scheduled for each in result.streams)
                met = sum(round((each.figures.met_share or 0) * each.figures.scheduled) for each in result.streams)
                shares.append(1 - met / due)
    return {"missed": {name: statistics.mean(shares) for name, shares in missed.items()}, "runs": missed}


# Kills


def kills(cluster: LocalCluster, requests: int) -> dict[str, Any]:
    seconds = requests / RATE
    back: list[float] = []
    done = threading.Event()

    def kill() -> None:
        for number in range(KILLS):
            if done.wait(seconds / (KILLS + 1)):
                return
            name = MACHINES[number % len(MACHINES)]
            known = {each["url"] for each in cluster.told()["servers"] if each["machine"] == name}
            os.kill(cluster.where(name)[0], signal.SIGKILL)
            began = time.monotonic()
            while not done.wait(0.05):
                up = {each["url"] for each in cluster.told()["servers"] if each["machine"] == name and each["up"]}
                if up - known:
                    back.append(time.monotonic() - began)
                    break

    killer = threading.Thread(target=kill)
    killer.start()
    streams = [{"model": model, "rate": RATE / 2, "deadline_ms": 5000.0} for model in ("mlp", "short")]
    result = sent(cluster.urls[0], streams, seconds, 0)
    done.set()
    killer.join()
    told = cluster.told()
    return {
        "requests": sum(each.figures.scheduled for each in result.streams),
        "answered": sum(each.figures.answered for each in result.streams),
        "statuses": {each.stream.model: dict(each.figures.statuses) for each in result.streams},
        "broken": sum(each.figures.broken + each.figures.lost for each in result.streams),
        "kills": len(back),
        "replacement_s": back,
        "tried_again": told["counts"].get("tried_again", 0),
        "lost": told["counts"].get("lost", 0),
        "p99_ms": [(each.figures.p99_s or 0) * 1e3 for each in result.streams],
    }


# Refusals


async def refusals(url: str) -> dict[str, float]:
    """Requests that no server can answer in a microsecond, behind one that has the gate hear from them."""
    pool = Pool(parse_url(url), 1)
    good = small(pool.target, None)
    bad = good.replace(b'"timeout": 10000000', b'"timeout": 1       ')
    times = []
    for _ in range(200):
        await call(pool, good)
        began = time.perf_counter()
        answer = await call(pool, bad)
        times.append((time.perf_counter() - began) * 1e3)
        assert answer.status == 504, answer
    await pool.close()
    return {"p50_ms": float(np.median(times)), "p99_ms": float(np.quantile(times, 0.99))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="cost,refused,routers,kills")
    parser.add_argument("--requests", type=int, default=20_000, help="in which servers are killed")
    parser.add_argument("--output", default=str(RESULTS))
    asked_for = parser.parse_args()
    key = os.environ.setdefault(KEY_VARIABLE, secrets.token_urlsafe(32))
    found: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written(folder)
        placement = Placement.model_validate_json((folder / "placement.json").read_text())
        began = time.monotonic()
        with LocalCluster(3, placement=name, port=0, server={"lanes": 1, "learn_first": True}) as cluster:
            found["start_s"] = time.monotonic() - began
            parts = {
                "cost": lambda: cost(cluster, key),
                "refused": lambda: asyncio.run(refusals(cluster.urls[0])),
                "routers": lambda: routers(cluster, placement, key),
                "kills": lambda: kills(cluster, asked_for.requests),
            }
            for part in asked_for.only.split(","):
                found[part] = parts[part]()
                print(part, json.dumps(found[part], indent=1), flush=True)
    write_json(asked_for.output, found)


if __name__ == "__main__":
    main()

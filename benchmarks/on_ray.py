"""The cost and the benefit of weft on Ray, on a cluster of three nodes on this machine.

- cost: one small request at a time, in turns through a gate (router) and straight to a server. Measured are latencies
  and the CPU time of the gate and the servers, from /proc, less their CPU time without requests. Rounds alternate;
  shown is the median of them, and of the differences within a round.
- routers: gates that choose by expected finish (``slack``) and gates that choose by requests in flight
  (``two-in-flight``: of two random servers the one with fewer; with one try that is Ray Serve's own router), one gate
  and four, in front of three servers of three models, one at half speed. These servers sleep instead of computing and
  need no Ray: three that compute would share the cores of one machine and slow each other down.
- kills: a server's process is killed five times while requests run, another one each time.
- refused: the time until a gate refuses a request that no server can answer in time.

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from isolation_cost import write_chain
from machine import machine
from processes import cpu_s
from serving_overhead import FEATURES, write_network

from weft.base.jsonfile import write_json
from weft.http.client import Pool, call, parse_url, request_bytes
from weft.http.messages import HttpExchange, HttpResponse, ServerEstimate, age_of
from weft.http.server import HttpServer
from weft.load import LoadResult, run_load
from weft.serving.config import ServerConfig
from weft.serving.endpoints import model_of
from weft.serving.routes import header_length, peeked
from weft.workloads.requests import parse_workload
from weft_cluster.gates.gate import GateSettings
from weft_cluster.gates.thread import GateThread
from weft_cluster.placing.placement import PlacedMachine, PlacedModel, Placement, write_placement
from weft_cluster.ray.local import LocalCluster
from weft_cluster.ray.settings import KEY_VARIABLE

RESULTS = Path(__file__).parent / "results" / "on_ray.json"
MACHINES, MODELS = ("one", "two", "three"), ("mlp", "chain", "short")
ROUNDS, EACH = 9, 400
SLOWED, SECONDS, SEEDS, BUSY = "one", 8.0, 2, 0.5
SLEEPS_S = {"short": 0.01, "middle": 0.02, "long": 0.04}
"""Model -> what a request takes of a server at full speed; each model keeps *BUSY* of one busy."""
KILLS, RATE = 5, 200.0


def written(folder: Path) -> None:
    """Three models on every one of three machines."""
    write_network(folder / "mlp.onnx")
    write_chain(folder / "chain.onnx")
    write_network(folder / "short.onnx")
    write_placement(placement_of(MODELS), folder / "placement.json")


def placement_of(names: tuple[str, ...]) -> Placement:
    models = tuple(PlacedModel(model=model, share=1 / 3, rate=1.0, compute=0.01) for model in names)
    placed = [
        PlacedMachine(
            name=name, kind="host", zone="default", models=models, compute=0.003, bandwidth=0.0, other=0.0, busy=0.003,
            busy_cap=0.8, memory_bytes=0, memory_limit_bytes=1, limit="compute", limited_by=names[0],
        )
        for name in MACHINES
    ]  # fmt: skip
    return Placement(machines=tuple(placed), value=1.0, bound=1.0)


# What a hop costs


def small(target: Any, key: str | None) -> bytes:
    raw = np.zeros(FEATURES, np.float32).tobytes()
    tensor = {"name": "x", "shape": [1, FEATURES], "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"parameters": {"binary_data_output": True, "timeout": 10_000_000}, "inputs": [tensor]}).encode()
    head = f"Inference-Header-Content-Length: {len(text)}\r\nContent-Type: application/octet-stream\r\n"
    return request_bytes(target, "POST", "v2/models/mlp/infer", key=key, head=head, body=text + raw)


async def sequential_times(url: str, key: str | None, count: int) -> list[float]:
    """Seconds that requests take, one after another."""
    pool = Pool(parse_url(url), 1)
    return await times_of(pool, small(pool.target, key), count)


async def times_of(pool: Pool, request: bytes, count: int) -> list[float]:
    """Seconds that the same request takes, again and again; the pool is closed then."""
    times = []
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
    server = cluster.status()["servers"][0]["url"]
    ways = {"gate": (cluster.urls[0], None), "direct": (server, key)}
    rounds: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        began, before = time.perf_counter(), used_s(pids)
        time.sleep(1.0)
        idle = (used_s(pids) - before) / (time.perf_counter() - began)
        for name, (url, its_key) in ways.items():
            began, before = time.perf_counter(), used_s(pids)
            times = asyncio.run(sequential_times(url, its_key, EACH))
            passed = time.perf_counter() - began
            rounds[name].append((((used_s(pids) - before) - idle * passed) / EACH, times))
    results: dict[str, Any] = {}
    for name, samples in rounds.items():
        results[name] = {
            "cpu_ms": statistics.median(cpu for cpu, _ in samples) * 1e3,
            "p50_ms": statistics.median(float(np.median(times)) for _, times in samples) * 1e3,
            "p99_ms": statistics.median(float(np.quantile(times, 0.99)) for _, times in samples) * 1e3,
        }
    pairs = list(zip(rounds["gate"], rounds["direct"], strict=True))
    results["added"] = {
        "cpu_ms": statistics.median(gate[0] - direct[0] for gate, direct in pairs) * 1e3,
        "p50_ms": statistics.median(float(np.median(g[1]) - np.median(d[1])) for g, d in pairs) * 1e3,
        "p99_ms": statistics.median(float(np.quantile(g[1], 0.99) - np.quantile(d[1], 0.99)) for g, d in pairs) * 1e3,
    }
    return results


# Routers


class SleepingServer:
    """A server that takes the time of a lane and nothing of the processor, so that only routing is compared."""

    def __init__(self, speed: float) -> None:
        self._speed, self._free_s = speed, 0.0
        self._http = HttpServer(self._handle)

    async def start(self) -> str:
        return f"http://127.0.0.1:{await self._http.start('127.0.0.1', 0)}"

    def close(self) -> None:
        self._http.close()

    def _handle(self, exchange: HttpExchange) -> None:
        model, infers = model_of(exchange.path)
        if not infers:
            inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 4]}]
            exchange.respond(HttpResponse(200, json.dumps({"name": model, "inputs": inputs, "outputs": []}).encode()))
            return
        loop, own_s = asyncio.get_running_loop(), SLEEPS_S[model] / self._speed
        due_s = peeked(exchange.body, header_length(exchange.headers))["timeout"] / 1e6
        due_s += loop.time() - (age_of(exchange.headers) or 0) / 1e9
        end_s = max(loop.time(), self._free_s) + own_s
        if end_s > due_s:
            self._answer(exchange, 504, own_s)
        else:
            self._free_s = end_s
            loop.call_at(end_s, self._answer, exchange, 200, own_s)

    def _answer(self, exchange: HttpExchange, status: int, own_s: float) -> None:
        ahead_s = max(0.0, self._free_s - asyncio.get_running_loop().time())
        told = ServerEstimate(round(ahead_s * 1e9), round(own_s * 1e9), 1)
        exchange.respond(HttpResponse(status, b"{}", headers=(told.header(),)))


@contextmanager
def sleeping() -> Iterator[dict[str, list[str]]]:
    """Three such servers, the first at half speed."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    servers = [SleepingServer(0.5 if name == SLOWED else 1.0) for name in MACHINES]
    urls = [asyncio.run_coroutine_threadsafe(server.start(), loop).result() for server in servers]
    try:
        yield {name: [url] for name, url in zip(MACHINES, urls, strict=True)}
    finally:
        for server in servers:
            loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


class Case(NamedTuple):
    """Gates that are alike."""

    router: str
    tries: int
    gates: int

    def __str__(self) -> str:
        tried = "second tries" if self.tries > 1 else "one try"
        return f"{self.router}, {tried}, {self.gates} gate{'s' * (self.gates > 1)}"


CASES = [Case("slack", 1, 1), Case("slack", 2, 1), Case("two-in-flight", 1, 1), Case("two-in-flight", 2, 1)]
CASES += [Case("slack", 2, 4), Case("two-aged", 2, 4), Case("two-in-flight", 1, 4)]


def missed(case: Case, seed: int) -> tuple[int, int]:
    """How many deadlines are missed, and of how many; each gate has its part of the requests."""
    streams = [
        {"model": name, "rate": BUSY / case.gates / took_s, "deadline_ms": 5e3 * took_s}
        for name, took_s in SLEEPS_S.items()
    ]
    placed, how = placement_of(tuple(SLEEPS_S)), GateSettings(router=case.router, tries=case.tries)
    threads = [GateThread(placed.models, ServerConfig(http_port=0, grpc_port=None), how) for _ in range(case.gates)]
    urls = [f"http://127.0.0.1:{thread.start()}" for thread in threads]
    try:
        with sleeping() as servers, ThreadPoolExecutor(case.gates) as pool:
            for thread in threads:
                thread.set_servers({url: machine for machine in placed.machines for url in servers[machine.name]})
            while any(not server["up"] for thread in threads for server in thread.status()["servers"]):
                time.sleep(0.05)
            numbers = range(case.gates)
            results = list(pool.map(lambda at: sent(urls[at], streams, SECONDS, 100 * seed + at), numbers))
    finally:
        for thread in threads:
            thread.stop()
    figures = [stream.figures for result in results for stream in result.streams]
    return sum(figure.scheduled - figure.met for figure in figures), sum(figure.scheduled for figure in figures)


def sent(url: str, streams: list[dict[str, Any]], seconds: float, seed: int, warmup_s: float = 1.0) -> LoadResult:
    raw = {"duration_s": seconds, "warmup_s": warmup_s, "seed": seed, "stream": streams}
    return run_load(parse_workload(raw, "requests"), url)


def routers() -> dict[str, Any]:
    results: dict[str, list[tuple[int, int]]] = {}
    for seed in range(SEEDS):
        for case in CASES:
            results.setdefault(str(case), []).append(missed(case, seed))
    shares = {name: sum(late for late, _ in runs) / sum(all_ for _, all_ in runs) for name, runs in results.items()}
    return {"missed": shares, "late_of": results}


# Kills


def kills(cluster: LocalCluster, requests: int) -> dict[str, Any]:
    seconds = requests / RATE
    back: list[float] = []
    done = threading.Event()

    def kill() -> None:
        start = time.monotonic()
        for number in range(KILLS):
            at = start + seconds * (number + 0.5) / KILLS
            if done.wait(max(0.0, at - time.monotonic())):
                return
            name = MACHINES[number % len(MACHINES)]
            known = {server["url"] for server in cluster.status()["servers"] if server["machine"] == name}
            os.kill(cluster.where(name)[0], signal.SIGKILL)
            began = time.monotonic()
            while not done.wait(0.05):
                up = {
                    server["url"]
                    for server in cluster.status()["servers"]
                    if server["machine"] == name and server["up"]
                }
                if up - known:
                    back.append(time.monotonic() - began)
                    break

    killer = threading.Thread(target=kill)
    killer.start()
    streams = [{"model": model, "rate": RATE / 2, "deadline_ms": 5000.0} for model in ("mlp", "short")]
    result = sent(cluster.urls[0], streams, seconds, 0, 0.0)
    done.set()
    killer.join()
    told = cluster.status()
    return {
        "requests": sum(stream.figures.scheduled for stream in result.streams),
        "answered": sum(stream.figures.answered for stream in result.streams),
        "statuses": {stream.stream.model: dict(stream.figures.statuses) for stream in result.streams},
        "broken": sum(stream.figures.broken + stream.figures.lost for stream in result.streams),
        "kills": len(back),
        "replacement_s": back,
        "tried_again": told["counts"].get("tried_again", 0),
        "lost": told["counts"].get("lost", 0),
        "p99_ms": [(stream.figures.p99_s or 0) * 1e3 for stream in result.streams],
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
    parser.add_argument("--output", default=str(RESULTS), help="parts that are not asked for stay as they are there")
    asked_for = parser.parse_args()
    key = os.environ.setdefault(KEY_VARIABLE, secrets.token_urlsafe(32))
    kept = Path(asked_for.output)
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    found["machine"] = machine()
    parts = asked_for.only.split(",")
    if "routers" in parts:
        found["routers"] = routers()
        print("routers", json.dumps(found["routers"], indent=1), flush=True)
        parts.remove("routers")
    if parts:
        on_cluster(parts, asked_for.requests, found, key)
    write_json(asked_for.output, found)


def on_cluster(parts: list[str], requests: int, found: dict[str, Any], key: str) -> None:
    """What needs a cluster of Ray."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written(folder)
        began = time.monotonic()
        with LocalCluster(
            3, placement=name, port=0, grpc_port=None, server={"lanes": 1, "learn_first": True}
        ) as cluster:
            found["start_s"] = time.monotonic() - began
            ways = {
                "cost": lambda: cost(cluster, key),
                "refused": lambda: asyncio.run(refusals(cluster.urls[0])),
                "kills": lambda: kills(cluster, requests),
            }
            for part in parts:
                found[part] = ways[part]()
                print(part, json.dumps(found[part], indent=1), flush=True)


if __name__ == "__main__":
    main()

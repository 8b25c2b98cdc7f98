"""Two connections from a gate (router) to a server on Ray: the server's own port, or Serve's handles; and neither.

Two servers on two nodes have the same small model. A request goes in turns

- through a gate, over HTTP to a server's port, as in weft;
- through a thin front end that calls Serve's handle, whose replica passes the tensor to the server in its own process:
  nothing is parsed there, so this is less work than a gate over handles would have. A router of ours
  (``RequestRouter``) sends the request to the server with the fewest known waiting requests;
- straight to a server.

Measured are latencies, one request at a time, and the CPU time of all processes on the path, from /proc, less their CPU
time without requests. Rounds alternate; shown are medians of them. Front end and replicas run with
RAY_SERVE_THROUGHPUT_OPTIMIZED=1 and without a log of requests, which makes handles cheapest.

    python benchmarks/ray_handles.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from on_ray import FEATURES, placement_of, sequential_times, times_of, used_s
from serving_overhead import write_network

from weft.base.jsonfile import write_json
from weft.http.client import Pool, parse_url, request_bytes
from weft.http.messages import HttpExchange, HttpResponse
from weft.http.server import HttpServer
from weft.serving.in_process import InProcessServer
from weft_cluster.placing.placement import write_placement
from weft_cluster.ray.local import LocalCluster
from weft_cluster.ray.settings import KEY_VARIABLE

RESULTS = Path(__file__).parent / "results" / "ray_handles.json"
ROUNDS, EACH, SERVERS = 7, 200, 2


class EngineReplica:
    """A server that is asked by Serve, in its own process."""

    async def __init__(self, file: str) -> None:
        self._server = InProcessServer(file, lanes=1, learn_first=True)
        await self._server.start_async()
        self._open = 0

    async def infer(self, raw: bytes) -> bytes:
        self._open += 1
        try:
            result = await self._server.infer_async("mlp", {"x": np.frombuffer(raw, np.float32).reshape(1, -1)})
        finally:
            self._open -= 1
        return next(iter(result.values())).tobytes()

    def record_routing_stats(self) -> dict[str, float]:
        return {"ahead": self._open}

    def where(self) -> int:
        return os.getpid()


class HandleFace:
    """What a gate would be that went by handles: HTTP in, a call out."""

    async def __init__(self, engines: Any) -> None:
        self._engines, self._tasks = engines, set[asyncio.Task[None]]()
        self._http = HttpServer(self._handle)
        self._port = await self._http.start("127.0.0.1", 0)

    def _handle(self, exchange: HttpExchange) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: HttpExchange) -> None:
        exchange.respond(HttpResponse(200, await self._engines.infer.remote(exchange.body)))

    def where(self) -> tuple[int, int]:
        return os.getpid(), self._port

    async def engine(self) -> int:
        return int(await self._engines.where.remote())


def deployed(file: str) -> Any:
    """The application of handles; its own handle."""
    from ray.serve.config import RequestRouterConfig
    from ray_router import EarliestRouter

    from ray import serve

    ours = RequestRouterConfig(request_router_class=EarliestRouter, request_routing_stats_period_s=0.5)
    cheap = {"env_vars": {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}}
    common = {"max_ongoing_requests": 1000, "ray_actor_options": {"num_cpus": 0, "runtime_env": cheap}}
    common["logging_config"] = {"enable_access_log": False}
    engines = serve.deployment(EngineReplica).options(num_replicas=SERVERS, request_router_config=ours, **common)
    face = serve.deployment(HandleFace).options(**common)
    return serve.run(face.bind(engines.bind(file)), name="handles", route_prefix=None)


async def asked_by_handle(port: int, count: int) -> list[float]:
    """Seconds that requests through the face of handles take, one after another."""
    pool = Pool(parse_url(f"http://127.0.0.1:{port}"), 1)
    body = np.zeros(FEATURES, np.float32).tobytes()
    return await times_of(pool, request_bytes(pool.target, "POST", "infer", body=body), count)


def measured(cluster: LocalCluster, handle: Any, key: str) -> dict[str, Any]:
    face, port = handle.where.remote().result()
    engines = {handle.engine.remote().result() for _ in range(50)}
    pids = [cluster.gate_pid(), *(cluster.where(name)[0] for name in cluster.machines), face, *engines]
    url, server = cluster.urls[0], cluster.status()["servers"][0]["url"]
    ways = {
        "direct": lambda: sequential_times(server, key, EACH),
        "gate": lambda: sequential_times(url, None, EACH),
        "handles": lambda: asked_by_handle(port, EACH),
    }
    rounds: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        began, before = time.perf_counter(), used_s(pids)
        time.sleep(2.0)
        idle = (used_s(pids) - before) / (time.perf_counter() - began)
        for name, way in ways.items():
            began, before = time.perf_counter(), used_s(pids)
            times = asyncio.run(way())
            passed = time.perf_counter() - began
            if turn:  # the first warms up
                rounds[name].append((((used_s(pids) - before) - idle * passed) / EACH, times))
    return {
        name: {
            "cpu_ms": statistics.median(cpu for cpu, _ in samples) * 1e3,
            "p50_ms": statistics.median(float(np.median(times)) for _, times in samples) * 1e3,
            "p99_ms": statistics.median(float(np.quantile(times, 0.99)) for _, times in samples) * 1e3,
            "cpu_ms_by_round": [cpu * 1e3 for cpu, _ in samples],
        }
        for name, samples in rounds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=str(RESULTS))
    output = parser.parse_args().output
    key = os.environ.setdefault(KEY_VARIABLE, secrets.token_urlsafe(32))
    with tempfile.TemporaryDirectory() as folder:
        write_network(Path(folder) / "mlp.onnx")
        whole = placement_of(("mlp",))
        write_placement(
            whole.model_copy(update={"machines": whole.machines[:SERVERS]}), Path(folder) / "placement.json"
        )
        settings = {"placement": folder, "port": 0, "grpc_port": None, "server": {"lanes": 1, "learn_first": True}}
        with LocalCluster(SERVERS, **settings) as cluster:
            result = measured(cluster, deployed(str(Path(folder) / "mlp.onnx")), key)
    write_json(output, {"machine": machine(), **result})
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

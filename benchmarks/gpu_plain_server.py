"""weft on a GPU compared with a plain server: requests per second, and the gain at the same 99th percentile.

Needs one NVIDIA GPU, torch and onnxruntime-gpu (docs/gpu.md), and starlette and uvicorn with their requirements;
uvicorn uses the httptools and uvloop that weft installs. Each row is written to the results as soon as it is measured,
and is not measured again by a later run:

    python benchmarks/gpu_plain_server.py [--only PART-OF-A-NAME] [--seconds 3] [--results FILE] [--device cuda:0]

Both compute the same networks, ResNet50 and BERT-base of 128 tokens in fp16, in batches of up to 32 rows. Clients in
processes of their own send one row at a time over binary HTTP, in a closed loop. Rows are `MODEL/SERVER/CONNECTIONS`;
all servers run at the same time and take turns. `plain` is one session of ONNX Runtime behind Starlette, `tuned` the
same with a session for each size (peers/plain_onnx.py). For each point of these two, the ratio is weft's throughput at
a p99 that is no larger, interpolated between weft's own points.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gpu_asking import (
    FOLDER,
    Rows,
    Running,
    Served,
    clients,
    connected,
    end_when_told,
    exchanged,
    exported,
    request_for,
    tensor_in,
)
from verdicts import show_table

MODELS = ("resnet50", "bert-base")
WEFT, PLAIN, TUNED = "weft", "plain", "tuned"
RESULTS = Path(__file__).parent / "results" / "gpu_plain_server.json"
PEER = Path(__file__).parent / "peers" / "plain_onnx.py"
AIM = 1.5
COLUMNS = {"connections": 0, "p99_ms": 1, "per_s": 0, "weft_per_s": 0, "ratio": 2}
"""Of the table, with digits."""
FAR = 0.05
"""How far answers may be apart, as a part of the largest number: both round to 16 bits, in another order."""


class Point(NamedTuple):
    """What a server came to at a number of connections."""

    connections: int
    per_s: float
    p99_ms: float


def rate_within(points: Sequence[Point], p99_ms: float) -> float:
    """The largest rate whose 99th percentile is no larger, straight between the points; 0 where there is none."""
    best = max((point.per_s for point in points if point.p99_ms <= p99_ms), default=0.0)
    for pair in pairwise(points):
        low, high = sorted(pair, key=lambda each: each.p99_ms)
        if low.p99_ms <= p99_ms < high.p99_ms:
            part = (p99_ms - low.p99_ms) / (high.p99_ms - low.p99_ms)
            best = max(best, low.per_s + part * (high.per_s - low.per_s))
    return best


def compared(ours: Sequence[Point], theirs: Sequence[Point]) -> list[dict[str, float]]:
    """Each point of a server, and what weft answers per second at its 99th percentile."""
    results = []
    for point in theirs:
        rate = rate_within(ours, point.p99_ms)
        results.append({**point._asdict(), "weft_per_s": rate, "ratio": rate / point.per_s})
    return results


# Servers


def half(name: str) -> Path:
    """A network in 16 bits, as weft converts it: inputs and outputs keep their types."""
    from weft.runtime.cuda.precision import converted

    folder = exported(name).parent
    kept = folder / "half.onnx"
    return kept if kept.exists() else converted(exported(name), "fp16", folder)


def start(kind: str, device: str, rows: int) -> Running:
    if kind == WEFT:
        return Served({name: {"slo_ms": 1000.0, "max_batch": rows} for name in MODELS}, device=device)
    listed = Path(tempfile.mkdtemp(prefix="plain-", dir=FOLDER)) / "models.json"
    listed.write_text(json.dumps({name: str(half(name)) for name in MODELS}))
    return Running([str(PEER), str(listed), device, str(rows), *(["--tuned"] if kind == TUNED else [])])


def answer(server: Running, request: bytes) -> np.ndarray[Any, Any]:
    status, body = exchanged(connected(server.port), request)
    if status != 200:
        raise RuntimeError(f"{status}: {body[:200]!r}")
    return np.frombuffer(tensor_in(body), np.float32)


def check(server: Running, reference: Running, requests: dict[str, bytes]) -> None:
    """Refuse a server that computes something else than another one."""
    for name, request in requests.items():
        found, wanted = answer(server, request), answer(reference, request)
        far = np.abs(found - wanted).max() / np.abs(wanted).max() if found.shape == wanted.shape else np.inf
        if not far < FAR:
            raise RuntimeError(f"{name}: the answer differs by {far:.1e} of the largest number")


# Rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="")
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--device", default="cuda:0")
    options.add_argument("--servers", default=f"{WEFT},{PLAIN},{TUNED}")
    options.add_argument("--connections", default="1,4,16,64")
    options.add_argument("--rows", type=int, default=32, help="of the largest batch")
    arguments = options.parse_args()
    end_when_told()
    FOLDER.mkdir(exist_ok=True)
    rows = Rows(arguments.results, arguments.only, arguments.device)
    counts = [int(part) for part in arguments.connections.split(",")]
    keys = {
        f"{name}/{kind}/{count}": (name, kind, count)
        for name in MODELS
        for count in counts
        for kind in arguments.servers.split(",")
    }
    measure(rows, {key: point for key, point in keys.items() if rows.is_missing(key)}, arguments)
    report(rows)


def measure(rows: Rows, wanted: dict[str, tuple[str, str, int]], given: argparse.Namespace) -> None:
    """Rows of servers that are all there; one that does not start, or gives other answers, is told and left out."""
    requests = {name: request_for(name, 1, "http")[0] for name in MODELS} if wanted else {}
    servers: dict[str, Running] = {}
    with ExitStack() as running:
        for kind in dict.fromkeys(kind for _, kind, _ in wanted.values()):
            try:
                server = start(kind, given.device, given.rows)
                running.callback(server.close)
                check(server, next(iter(servers.values()), server), requests)
                servers[kind] = server
            except RuntimeError as error:
                print(f"{kind} is left out: {error}", file=sys.stderr, flush=True)
        for key, (name, kind, count) in wanted.items():
            if kind in servers:
                asked = partial(clients, count, servers[kind].port, requests[name], given.seconds)
                rows.measure(key, lambda asked=asked: asked()())


def report(rows: Rows) -> None:
    """Keep and show the ratios of all rows that there are."""
    points: dict[tuple[str, str], list[Point]] = {}
    for key, row in rows.found.items():
        name, kind, count = key.split("/")
        points.setdefault((name, kind), []).append(Point(int(count), row["per_s"], row["p99_ms"]))
    ratios = {
        f"{name}/{kind}": compared(sorted(points.get((name, WEFT), [])), sorted(theirs))
        for (name, kind), theirs in points.items()
        if kind != WEFT
    }
    rows.kept["ratios"] = ratios
    rows.write()
    cells = [
        (key, *(f"{result[column]:.{digits}f}" for column, digits in COLUMNS.items()))
        for key, found in ratios.items()
        for result in found
    ]
    show_table(f"at the same p99; aimed at is a ratio of {AIM}", ("server", *COLUMNS), cells)


if __name__ == "__main__":
    main()

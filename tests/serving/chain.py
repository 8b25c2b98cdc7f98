"""A model of several segments, and requests for it that occupy a lane for as long as a test wants."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.serving import live
from tests.support.concurrency import until
from tests.support.inference import send, state

CHAIN_WIDTH = 128

LONG_ROWS = 3
"""Requests for the chain with so many rows occupy the lane for as long as a test wants."""


def chain(path: Path, settings: str = "") -> Path:
    """A model of several segments, on a machine of any speed."""
    live.heavy(path, layers=24, width=CHAIN_WIDTH, rows="n")  # type: ignore[arg-type]
    path.with_suffix(".toml").write_text(f"grain_ms = 0.0001\nmax_pieces = 8\nmax_batch = 1\n{settings}")
    return path


def chain_request(rows: int, **parameters: Any) -> bytes:
    """A whole HTTP request for the chain, with binary data, as bytes."""
    size = rows * CHAIN_WIDTH * 4
    x = {"name": "x", "shape": [rows, CHAIN_WIDTH], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    header = json.dumps({"inputs": [x], "parameters": parameters}).encode()
    head = (
        f"POST /v2/models/chain/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(header) + size}\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\n\r\n"
    )
    return head.encode() + header + np.full(rows * CHAIN_WIDTH, 0.5, np.float32).tobytes()


def computed(server: live.Live, since: float) -> list[str]:
    """The segments of long requests for the chain that were run, as "3/16"."""
    spans = send(server, "GET", f"/weft/timeline?since={since}").json()["spans"]
    return [span["segment"] for span in spans if span["model"] == "chain" and span["batch"] == LONG_ROWS]


@contextlib.contextmanager
def occupied(server: live.Live) -> Iterator[None]:
    """The only lane is in the second segment of the chain until the block ends, when who asked for it leaves.

    All others are due later.
    """
    address = "127.0.0.1", server.server.http_port or 0
    with live.Gate(server, "chain", LONG_ROWS, after=1) as gate:
        with socket.create_connection(address, timeout=live.PATIENCE_S) as client:
            client.sendall(chain_request(LONG_ROWS, weft_slo_ms=0.001))
            gate.wait()
            yield
        until(lambda: not state(server)["lanes"][0]["busy"], "the lane is free")


SOME_ROWS = 64
"""Rows of ``some_input``."""


def some_input() -> dict[str, np.ndarray]:
    """A request for the chain."""
    return {"x": np.random.default_rng(0).normal(size=(SOME_ROWS, CHAIN_WIDTH)).astype(np.float32)}

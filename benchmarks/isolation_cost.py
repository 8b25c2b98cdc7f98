"""The cost of isolation: the same models in threads of a server and in worker processes, in turns.

Two servers with default settings and one lane, one with ``--isolation process``. Requests are for a tiny network
(64-128-10, about 10 us of work; in threads it runs on the event loop itself) and for a chain of matrix products of more
than 5 ms, over HTTP with binary tensors, in a closed loop. Measured is the CPU time of the server and all its children,
from /proc, without the client's. Rounds alternate, so that both servers see the same machine, and disturbed rounds are
repeated (``undisturbed``); shown is the median of the rounds, and of the differences within a round.

    python benchmarks/isolation_cost.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from machine import awake, machine
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table
from serving_overhead import Round, Target, binary_request, measure, write_network
from undisturbed import PATIENCE_S, Undisturbed

from weft.base.jsonfile import write_json
from weft.serving.process import ServerProcess

TARGET_US, TARGET_SHARE = 100.0, 0.02
ROWS, WIDTH, LAYERS = 64, 512, 14
RESULTS = Path(__file__).parent / "results" / "isolation_cost.json"


class Case(NamedTuple):
    """One model, asked over so many connections."""

    model: str
    connections: int
    request: bytes


def write_chain(path: Path) -> Path:
    """x [64, 512] -> y, a product and a Tanh per layer."""
    rng = np.random.default_rng(0)
    nodes, weights = [], []
    for layer in range(LAYERS):
        weights.append(numpy_helper.from_array(rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 23, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [f"h{layer}", f"w{layer}"], [f"p{layer}"]))
        nodes.append(helper.make_node("Tanh", [f"p{layer}"], [f"h{layer + 1}"]))
    ends = [helper.make_tensor_value_info(f"h{at}", TensorProto.FLOAT, [ROWS, WIDTH]) for at in (0, LAYERS)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


def chain_request() -> bytes:
    """The protocol's, with binary tensors both ways."""
    raw = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32).tobytes()
    tensor = {"name": "h0", "shape": [ROWS, WIDTH], "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [tensor]}).encode()
    head = (
        f"POST /v2/models/chain/infer HTTP/1.1\r\nHost: localhost\r\nInference-Header-Content-Length: {len(text)}\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {len(text) + len(raw)}\r\n\r\n"
    )
    return head.encode() + text + raw


CASES = (
    Case("mlp", 1, binary_request()),
    Case("mlp", 8, binary_request()),
    Case("chain", 1, chain_request()),
    Case("chain", 2, chain_request()),
)


def rounds_of(seconds: float, rounds: int, undisturbed: Undisturbed) -> dict[Case, list[tuple[Round, Round]]]:
    """Threads and workers in turns, every case in every round."""
    results: dict[Case, list[tuple[Round, Round]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        write_network(Path(folder) / "mlp.onnx")
        write_chain(Path(folder) / "chain.onnx")
        options = (folder, "--lanes", "1")
        with ServerProcess(*options) as threads, ServerProcess(*options, "--isolation", "process") as workers:
            for _ in range(rounds):
                for case in CASES:
                    both = partial(_measured_both, threads, workers, case, seconds)
                    results[case].append(undisturbed(both))
    return results


def _measured_both(one: ServerProcess, other: ServerProcess, case: Case, seconds: float) -> tuple[Round, Round]:
    return _measured(one, case, seconds), _measured(other, case, seconds)


def _measured(server: ServerProcess, case: Case, seconds: float) -> Round:
    port = int(server.url.rpartition(":")[2])
    return measure(Target("weft", "binary", server.pid, port, case.request), case.connections, seconds)


def summary(case: Case, rounds: list[tuple[Round, Round]]) -> dict[str, Any]:
    """The medians of both, and what isolation adds."""
    more = [workers.cpu_us - threads.cpu_us for threads, workers in rounds]
    share = [workers.cpu_us / threads.cpu_us - 1 for threads, workers in rounds]
    row: dict[str, Any] = {"model": case.model, "connections": case.connections, "rounds": len(rounds)}
    for name, side in (("threads", 0), ("workers", 1)):
        for key in ("cpu_us", "p50_ms", "p99_ms", "per_s"):
            row[f"{name}_{key}"] = statistics.median(getattr(pair[side], key) for pair in rounds)
    return row | {"more_us": statistics.median(more), "more_share": statistics.median(share)}


def show(rows: list[dict[str, Any]]) -> None:
    """Print a line for each case."""
    table = Table(title="processor time per request", title_justify="left", box=None, pad_edge=False)
    for column in ("model", "connections", "threads us", "workers us", "more us", "more", "p50 ms", "p50 ms isolated"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        table.add_row(
            row["model"], str(row["connections"]), f"{row['threads_cpu_us']:.0f}", f"{row['workers_cpu_us']:.0f}",
            f"{row['more_us']:.0f}", f"{row['more_share']:.1%}", f"{row['threads_p50_ms']:.2f}",
            f"{row['workers_p50_ms']:.2f}",
        )  # fmt: skip
    Console(width=110).print(table)


def judge(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """The claims, and whether they hold."""
    small = {row["connections"]: row["more_us"] for row in rows if row["model"] == "mlp"}
    large = [row["more_share"] for row in rows if row["model"] == "chain"]
    verdicts = {
        f"a small request costs at most {TARGET_US:g} us more, {count} at a time": more_us <= TARGET_US
        for count, more_us in small.items()
    }
    return verdicts | {f"one of 5 ms and more costs less than {TARGET_SHARE:.0%} more": max(large) < TARGET_SHARE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds in which rounds are done again")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    before, undisturbed = machine("onnxruntime"), Undisturbed(options.patience)
    rounds = rounds_of(options.seconds, options.rounds, undisturbed)
    rows = [summary(case, pairs) for case, pairs in rounds.items()]
    show(rows)
    verdicts = judge(rows)
    for claim, holds in verdicts.items():
        Console().print(f"{'yes' if holds else 'NO '}  {claim}")
    again = {"done_again": undisturbed.again, "disturbed": undisturbed.counted}
    raw = {"machine": before, "seconds": options.seconds, **again, "rows": rows, "verdicts": verdicts}
    write_json(options.json, raw)


if __name__ == "__main__":
    with awake():
        main()

"""Memory that gRPC requests leave behind: 64 bytes to 64 MB, valid and refused, unary and in streams.

Sizes are log-uniform. The model answers with the shape of its input, because ONNX Runtime keeps the memory of its
largest intermediate value, which is not what is measured here. Memory is that of the server and its workers, before the
first and after the last request, when no request is in flight.

    python benchmarks/grpc_sizes.py [--gigabytes 10] [--mode T] [--save]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import onnx
from machine import machine
from modes import MODES, as_served, settings_for, settings_known, write_settings
from onnx import TensorProto, helper
from processes import free_port, memory_bytes
from verdicts import Verdict, show_table, show_verdicts

from weft.base.jsonfile import write_json
from weft.serving import proto
from weft.serving.process import ServerProcess

LEAST_BYTES, MOST_BYTES = 64, 64_000_000
MOST_LEFT_BYTES = 50_000_000
SETTLE_S, PATIENCE_S = 3.0, 60.0
INFER, STREAM = (f"/{proto.SERVICE}/{name}" for name in ("ModelInfer", "ModelStreamInfer"))
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
MODEL = "measured"
NAMED = bytes(proto.CLASSES["ModelInferRequest"](model_name=MODEL).SerializeToString())
KINDS = ("valid", "valid", "valid", "other model", "other shape", "broken off", "fields")
"""What is sent, as often as it stands here."""
EXPECTED = {
    "valid": {"OK"},
    "other model": {"NOT_FOUND"},
    "other shape": {"INVALID_ARGUMENT"},
    "broken off": {"INVALID_ARGUMENT"},
    "fields": {"RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"},
}
RESULTS = Path(__file__).parent / "results" / "grpc_sizes.json"


def write_measured(path: Path) -> None:
    """x [1, n] of bytes -> y, its shape."""
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, [1, "n"])
    y = helper.make_tensor_value_info("y", TensorProto.INT64, [2])
    graph = helper.make_graph([helper.make_node("Shape", ["x"], ["y"])], MODEL, [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))


# Clients


def message(kind: str, size: int) -> bytes:
    """A request of about so many bytes."""
    if kind == "fields":
        return NAMED + b"\x3a\x00" * (size // 2)
    request = proto.CLASSES["ModelInferRequest"](model_name="nobody" if kind == "other model" else MODEL)
    values = max(1, size - 40)
    request.inputs.add(name="x", datatype="UINT8", shape=[1, values + (kind == "other shape")])
    request.raw_input_contents.append(bytes(values))
    data = bytes(request.SerializeToString())
    return data[:-1] if kind == "broken off" else data


def requests(total_bytes: int, rng: random.Random) -> Iterator[tuple[str, int]]:
    """Kinds and sizes, until they come to so many bytes."""
    sent = 0
    while sent < total_bytes:
        size = round(math.exp(rng.uniform(math.log(LEAST_BYTES), math.log(MOST_BYTES))))
        yield rng.choice(KINDS), size
        sent += size


def ask(channel: grpc.Channel, data: bytes) -> str:
    """The code of a unary call."""
    try:
        channel.unary_unary(INFER)(data, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def ask_in_stream(channel: grpc.Channel, data: bytes) -> str:
    """The code that a stream of one request stands for; it tells errors in words."""
    reply = proto.CLASSES["ModelStreamInferResponse"]
    try:
        (answer,) = channel.stream_stream(STREAM, None, reply.FromString)(iter([data]), timeout=PATIENCE_S)
    except grpc.RpcError as error:
        return str(error.code().name)
    if not (words := answer.error_message):
        return "OK"
    no_model, many = "nobody" in words, "more than" in words and "fields" in words
    return "NOT_FOUND" if no_model else "RESOURCE_EXHAUSTED" if many else "INVALID_ARGUMENT"


def client_process(port: int, total_bytes: int, results: Any) -> None:
    """Send everything, one request after another on one channel; gives what was answered, and what was not expected."""
    answers, odd = Counter[str](), list[str]()
    with grpc.insecure_channel(f"127.0.0.1:{port}", OPTIONS) as channel:
        for number, (kind, size) in enumerate(requests(total_bytes, random.Random(0))):
            way = ask_in_stream if number % 3 == 2 else ask
            code = way(channel, message(kind, size))
            answers[f"{'stream' if way is ask_in_stream else 'unary'} {kind}: {code}"] += 1
            if code not in EXPECTED[kind]:
                odd.append(f"{kind} of {size} bytes: {code}")
    results.put((answers, odd))


# The run


def send_sizes(pid: int, grpc_port: int, total_bytes: int) -> tuple[list[Verdict], Counter[str], list[int]]:
    """Verdicts on a server that has the model, what was answered, and its memory before and after."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    before = memory_bytes(pid)
    client = context.Process(target=client_process, args=(grpc_port, total_bytes, results))
    client.start()
    answers, odd = results.get(timeout=600 + total_bytes / 1e6)
    client.join()
    time.sleep(SETTLE_S)
    left = memory_bytes(pid) - before
    sent = f"{sum(answers.values())} requests, {total_bytes / 1e9:.1f} GB"
    verdicts = [
        Verdict("gRPC of all sizes is answered as it should", not odd, "; ".join(odd[:3]) or sent),
        Verdict(
            f"gRPC of all sizes leaves less than {MOST_LEFT_BYTES / 1e6:.0f} MB behind",
            left < MOST_LEFT_BYTES,
            f"{before / 1e6:.0f} MB before, {left / 1e6:+.0f} after {sent}",
        ),
    ]
    return verdicts, answers, [before, before + left]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--mode", choices=MODES, default="T", help="T: in threads; P: with isolation")
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{RESULTS.name}")
    arguments = parser.parse_args()
    known = settings_known()
    with tempfile.TemporaryDirectory() as scratch:
        write_measured(Path(scratch) / f"{MODEL}.onnx")
        settings = settings_for(arguments.mode, known, lanes=1) or {}
        config = write_settings(Path(scratch) / "serve.toml", (f"{scratch}/{MODEL}.onnx",), settings)
        port = free_port()
        with ServerProcess("--config", str(config), f"--grpc-port={port}", *as_served(known)) as server:
            verdicts, answers, memory = send_sizes(server.pid, port, round(arguments.gigabytes * 1e9))
    rows = [(*what.partition(": ")[::2], str(count)) for what, count in sorted(answers.items())]
    show_table("what was sent over gRPC", ("kind", "answer", "times"), rows)
    show_verdicts(verdicts)
    if arguments.save:
        results = {"answers": dict(answers), "memory_bytes": memory, "verdicts": list(map(asdict, verdicts))}
        write_json(RESULTS, {"machine": machine("onnxruntime", "grpcio"), "mode": arguments.mode, **results})
    raise SystemExit(0 if all(verdict.kept for verdict in verdicts) else 1)


if __name__ == "__main__":
    main()

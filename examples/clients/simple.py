"""Add and subtract two rows of sixteen numbers, over HTTP (binary and JSON) and over gRPC.

The model `simple` is among those that `python -m tests.conformance --write-models models/` writes.

python examples/clients/simple.py
"""

import argparse
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import tritonclient.grpc
import tritonclient.http


def compute(library: ModuleType, address: str, **encoding: bool) -> tuple[np.ndarray, np.ndarray]:
    """Sum and difference of 0 to 15 and of ones; *encoding*: whether tensors are binary, where there is a choice."""
    rows = [np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)]
    inputs = [library.InferInput(f"INPUT{k}", [1, 16], "INT32") for k in (0, 1)]
    for tensor, row in zip(inputs, rows, strict=True):
        tensor.set_data_from_numpy(row, **encoding)
    outputs = [library.InferRequestedOutput(f"OUTPUT{k}", **encoding) for k in (0, 1)]
    with library.InferenceServerClient(address) as server:
        answer = server.infer("simple", inputs, outputs=outputs, request_id="sum and difference")
    return answer.as_numpy("OUTPUT0"), answer.as_numpy("OUTPUT1")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--http", default="127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    args = parser.parse_args(argv)
    variants = {
        "HTTP, binary": (tritonclient.http, args.http, {"binary_data": True}),
        "HTTP, JSON": (tritonclient.http, args.http, {"binary_data": False}),
        "gRPC": (tritonclient.grpc, args.grpc, {}),
    }
    for name, (library, address, encoding) in variants.items():
        total, difference = compute(library, address, **encoding)
        print(f"{name}: sums {total[0].tolist()}, differences {difference[0].tolist()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Many requests in flight at once, without asyncio: futures over HTTP, callbacks over gRPC.

python examples/clients/async_requests.py
"""

import argparse
import queue
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http


def inputs(library: ModuleType, first: int) -> list[Any]:
    """The two inputs of `simple`: the numbers from *first* to *first* + 15, and ones."""
    tensors = [library.InferInput(f"INPUT{k}", [1, 16], "INT32") for k in (0, 1)]
    tensors[0].set_data_from_numpy(np.arange(first, first + 16, dtype=np.int32).reshape(1, 16))
    tensors[1].set_data_from_numpy(np.ones((1, 16), np.int32))
    return tensors


def over_http(address: str, count: int) -> list[int]:
    """The first sum of each answer, in the order of the requests."""
    with tritonclient.http.InferenceServerClient(address, concurrency=4) as server:
        futures = [server.async_infer("simple", inputs(tritonclient.http, k)) for k in range(count)]
        return [int(future.get_result().as_numpy("OUTPUT0")[0, 0]) for future in futures]


def over_grpc(address: str, count: int) -> list[int]:
    """The same over gRPC; answers come in any order, and their ids name the requests."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(address) as server:
        for k in range(count):
            call = inputs(tritonclient.grpc, k)
            server.async_infer("simple", call, lambda result, error: answers.put((result, error)), request_id=str(k))
        sums = {}
        for _ in range(count):
            result, error = answers.get()
            if error is not None:
                raise error
            sums[int(result.get_response().id)] = int(result.as_numpy("OUTPUT0")[0, 0])
    return [sums[k] for k in range(count)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--http", default="127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    parser.add_argument("--count", type=int, default=8)
    args = parser.parse_args(argv)
    print(f"HTTP: {over_http(args.http, args.count)}")
    print(f"gRPC: {over_grpc(args.grpc, args.count)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Requests in a stream over gRPC: one connection, answers in the order of the requests, an error among them.

python examples/clients/streams.py
"""

import argparse
import queue
from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as client


def send_request(server: Any, model: str, number: int) -> None:
    """Send one request in the stream; its id is *number*."""
    inputs = [client.InferInput(f"INPUT{k}", [1, 16], "INT32") for k in (0, 1)]
    inputs[0].set_data_from_numpy(np.full((1, 16), number, np.int32))
    inputs[1].set_data_from_numpy(np.ones((1, 16), np.int32))
    server.async_stream_infer(model, inputs, request_id=str(number))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    parser.add_argument("--count", type=int, default=4)
    args = parser.parse_args(argv)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with client.InferenceServerClient(args.grpc) as server:
        server.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(args.count):
            send_request(server, "simple", number)
        send_request(server, "no-such-model", args.count)
        for _ in range(args.count + 1):
            result, error = answers.get()
            if error is None:
                print(f"{result.get_response().id}: {result.as_numpy('OUTPUT0')[0, 0]}")
            else:
                print(f"refused: {error.message()}")
        server.stop_stream()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

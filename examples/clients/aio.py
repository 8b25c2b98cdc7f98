"""Many requests at once with asyncio, over HTTP and over gRPC.

python examples/clients/aio.py
"""

import argparse
import asyncio
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import tritonclient.grpc.aio
import tritonclient.http.aio


async def first_sum(server: object, library: ModuleType, first: int) -> int:
    """Send one request for `simple`; return the first number of its first output."""
    inputs = [library.InferInput(f"INPUT{k}", [1, 16], "INT32") for k in (0, 1)]
    inputs[0].set_data_from_numpy(np.arange(first, first + 16, dtype=np.int32).reshape(1, 16))
    inputs[1].set_data_from_numpy(np.ones((1, 16), np.int32))
    answer = await server.infer("simple", inputs)  # type: ignore[attr-defined]
    return int(answer.as_numpy("OUTPUT0")[0, 0])


async def send_all(library: ModuleType, address: str, count: int) -> list[int]:
    async with library.InferenceServerClient(address) as server:
        return await asyncio.gather(*(first_sum(server, library, k) for k in range(count)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--http", default="127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    parser.add_argument("--count", type=int, default=8)
    args = parser.parse_args(argv)
    print(f"HTTP: {asyncio.run(send_all(tritonclient.http.aio, args.http, args.count))}")
    print(f"gRPC: {asyncio.run(send_all(tritonclient.grpc.aio, args.grpc, args.count))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Tensors that are not sent at all: inputs and outputs in system shared memory, over HTTP or gRPC.

The client and the server must be on one machine. The model `simple` is among those that
`python -m tests.conformance --write-models models/` writes.

python examples/clients/shared_memory.py
"""

import argparse
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import shared_memory

ROW_BYTES = 16 * 4


def region(stack: ExitStack, server: Any, name: str) -> Any:
    """A region for two rows that the server knows too; both forget it when the block ends."""
    key = f"/{name}"
    handle = shared_memory.create_shared_memory_region(name, key, 2 * ROW_BYTES)
    stack.callback(shared_memory.destroy_shared_memory_region, handle)
    server.register_system_shared_memory(name, key, 2 * ROW_BYTES)
    stack.callback(server.unregister_system_shared_memory, name)
    return handle


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--address", default="127.0.0.1:8000")
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http")
    args = parser.parse_args(argv)
    library = tritonclient.http if args.protocol == "http" else tritonclient.grpc
    ours = uuid.uuid4().hex[:8]
    taken, made = f"inputs-{ours}", f"outputs-{ours}"
    with ExitStack() as stack:
        server = stack.enter_context(library.InferenceServerClient(args.address))
        sent, came = region(stack, server, taken), region(stack, server, made)
        shared_memory.set_shared_memory_region(sent, [np.arange(16, dtype=np.int32), np.ones(16, np.int32)])
        inputs = [library.InferInput(f"INPUT{k}", [1, 16], "INT32") for k in (0, 1)]
        outputs = [library.InferRequestedOutput(f"OUTPUT{k}") for k in (0, 1)]
        for k in (0, 1):
            inputs[k].set_shared_memory(taken, ROW_BYTES, offset=k * ROW_BYTES)
            outputs[k].set_shared_memory(made, ROW_BYTES, offset=k * ROW_BYTES)
        server.infer("simple", inputs, outputs=outputs)
        for k, name in enumerate(("sums", "differences")):
            print(f"{name}: {shared_memory.get_contents_as_numpy(came, np.int32, [16], k * ROW_BYTES).tolist()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

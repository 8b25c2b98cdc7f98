"""Inputs and outputs in system shared memory instead of in messages, over HTTP or gRPC.

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
    """Create a region for two rows and register it with the server; *stack* undoes both."""
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
    suffix = uuid.uuid4().hex[:8]
    input_name, output_name = f"inputs-{suffix}", f"outputs-{suffix}"
    with ExitStack() as stack:
        server = stack.enter_context(library.InferenceServerClient(args.address))
        input_region, output_region = region(stack, server, input_name), region(stack, server, output_name)
        shared_memory.set_shared_memory_region(input_region, [np.arange(16, dtype=np.int32), np.ones(16, np.int32)])
        inputs = [library.InferInput(f"INPUT{k}", [1, 16], "INT32") for k in (0, 1)]
        outputs = [library.InferRequestedOutput(f"OUTPUT{k}") for k in (0, 1)]
        for k in (0, 1):
            inputs[k].set_shared_memory(input_name, ROW_BYTES, offset=k * ROW_BYTES)
            outputs[k].set_shared_memory(output_name, ROW_BYTES, offset=k * ROW_BYTES)
        server.infer("simple", inputs, outputs=outputs)
        for k, name in enumerate(("sums", "differences")):
            values = shared_memory.get_contents_as_numpy(output_region, np.int32, [16], k * ROW_BYTES)
            print(f"{name}: {values.tolist()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Numbers as strings: BYTES tensors there and back, over HTTP and over gRPC.

The model `simple_string` is among those that `python -m tests.conformance --write-models models/` writes.

python examples/clients/strings.py
"""

import argparse
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import tritonclient.grpc
import tritonclient.http


def compute(library: ModuleType, address: str) -> list[str]:
    """The sums of 0 to 15 and 1, all of them texts."""
    texts = [[str(number).encode() for number in range(16)], [b"1"] * 16]
    inputs = [library.InferInput(f"INPUT{k}", [1, 16], "BYTES") for k in (0, 1)]
    for tensor, row in zip(inputs, texts, strict=True):
        tensor.set_data_from_numpy(np.array([row], np.object_))
    with library.InferenceServerClient(address) as server:
        answer = server.infer("simple_string", inputs, outputs=[library.InferRequestedOutput("OUTPUT0")])
    return [text.decode() for text in answer.as_numpy("OUTPUT0")[0]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--http", default="127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    args = parser.parse_args(argv)
    print(f"HTTP: {' '.join(compute(tritonclient.http, args.http))}")
    print(f"gRPC: {' '.join(compute(tritonclient.grpc, args.grpc))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

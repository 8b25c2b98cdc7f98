"""Unload a model of a running server and load it again, over HTTP or gRPC.

python examples/clients/repository.py spare
"""

import argparse
from collections.abc import Sequence
from typing import Any

import tritonclient.grpc
import tritonclient.http


def state(server: Any, model: str) -> str:
    """The state of a model in the server's repository index."""
    index = server.get_model_repository_index()
    rows = index if isinstance(index, list) else [{"name": entry.name, "state": entry.state} for entry in index.models]
    return next((row["state"] for row in rows if row["name"] == model), "not there")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--address", default="127.0.0.1:8000")
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http")
    args = parser.parse_args(argv)
    library = tritonclient.http if args.protocol == "http" else tritonclient.grpc
    with library.InferenceServerClient(args.address) as server:
        print(f"{args.model} is {state(server, args.model)}")
        server.unload_model(args.model)
        print(f"unloaded: {state(server, args.model)}")
        server.load_model(args.model)
        print(f"loaded: {state(server, args.model)}")
        return 0 if server.is_model_ready(args.model) else 1


if __name__ == "__main__":
    raise SystemExit(main())

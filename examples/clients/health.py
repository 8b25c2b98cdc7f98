"""Is the server alive, is it ready, and are its models? Over HTTP and over gRPC.

python examples/clients/health.py [MODEL ...]
"""

import argparse
from collections.abc import Sequence

import tritonclient.grpc
import tritonclient.http


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--http", default="127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    args = parser.parse_args(argv)
    all_ready = True
    for name, library, address in (("HTTP", tritonclient.http, args.http), ("gRPC", tritonclient.grpc, args.grpc)):
        with library.InferenceServerClient(address) as server:
            states = {"live": server.is_server_live(), "ready": server.is_server_ready()}
            states |= {model: server.is_model_ready(model) for model in args.models}
        print(f"{name}: " + ", ".join(f"{what} {'yes' if state else 'no'}" for what, state in states.items()))
        all_ready = all_ready and all(states.values())
    return 0 if all_ready else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""What a server and one of its models say about themselves: versions, extensions, tensors, settings, counters.

python examples/clients/metadata.py simple
"""

import argparse
from collections.abc import Sequence

import tritonclient.http as client


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--http", default="127.0.0.1:8000")
    args = parser.parse_args(argv)
    with client.InferenceServerClient(args.http) as server:
        about = server.get_server_metadata()
        print(f"{about['name']} {about['version']}: {', '.join(about['extensions'])}")
        model = server.get_model_metadata(args.model)
        print(f"{model['name']} ({model['platform']}), versions {', '.join(model['versions'])}")
        for side in ("inputs", "outputs"):
            for tensor in model[side]:
                print(f"  {side[:-1]} {tensor['name']}: {tensor['datatype']} {tensor['shape']}")
        print(f"  batches of up to {server.get_model_config(args.model)['max_batch_size']} rows")
        (counted,) = server.get_inference_statistics(args.model)["model_stats"]
        print(f"  {counted['inference_count']} inferences in {counted['execution_count']} executions")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

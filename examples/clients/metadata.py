"""Metadata of a server and of one of its models: versions, extensions, tensors, settings, counters.

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
        metadata = server.get_server_metadata()
        print(f"{metadata['name']} {metadata['version']}: {', '.join(metadata['extensions'])}")
        model = server.get_model_metadata(args.model)
        print(f"{model['name']} ({model['platform']}), versions {', '.join(model['versions'])}")
        for side in ("inputs", "outputs"):
            for tensor in model[side]:
                print(f"  {side[:-1]} {tensor['name']}: {tensor['datatype']} {tensor['shape']}")
        print(f"  batches of up to {server.get_model_config(args.model)['max_batch_size']} rows")
        (statistics,) = server.get_inference_statistics(args.model)["model_stats"]
        print(f"  {statistics['inference_count']} inferences in {statistics['execution_count']} executions")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

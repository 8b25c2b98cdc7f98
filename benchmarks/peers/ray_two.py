"""Several models behind Ray Serve, each a replica of its own. Run: python ray_two.py MODELS.json PORT FOLDER."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from ray.serve.schema import LoggingConfig
from starlette.requests import Request
from starlette.responses import Response

import ray
from ray import serve


class Onnx:
    """One session with one thread; the bytes of a tensor of float32 in, those of the answer out."""

    def __init__(self, path: str, shape: list[int]) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        (self.input,) = [each.name for each in self.session.get_inputs()]
        self.shape = shape

    async def __call__(self, request: Request) -> Response:
        x = np.frombuffer(await request.body(), np.float32).reshape(self.shape)
        return Response(self.session.run(None, {self.input: x})[0].tobytes(), media_type="application/octet-stream")


def main(models: list[dict[str, Any]], port: int, folder: str) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=LoggingConfig(enable_access_log=False))
    for each in models:
        replica = serve.deployment(Onnx, name=each["name"], num_replicas=1, max_ongoing_requests=100)
        application = replica.bind(each["path"], each["shape"])
        serve.run(application, name=each["name"], route_prefix=f"/{each['name']}")
    print("ready", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), sys.argv[3])

"""Several models behind LitServe, each with a process of its own. Run: python litserve_two.py MODELS.json PORT."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import litserve as ls
import numpy as np
import onnxruntime as ort


class OnnxApi(ls.LitAPI):
    """One session with one thread; a tensor of float32 as base64 in, numbers out."""

    def __init__(self, path: str, shape: list[int], api_path: str) -> None:
        super().__init__(api_path=api_path)
        self.path, self.shape = path, shape

    def setup(self, device: str) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = ort.InferenceSession(self.path, options, providers=["CPUExecutionProvider"])
        (self.input,) = [each.name for each in self.session.get_inputs()]

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # a type would change what LitServe hands over
        return np.frombuffer(base64.b64decode(request["data"]), np.float32).reshape(self.shape)

    def predict(self, x: Any) -> Any:
        return self.session.run(None, {self.input: x})[0]

    def encode_response(self, output: Any) -> dict[str, Any]:
        return {"data": output.tolist()}


if __name__ == "__main__":
    models = json.loads(Path(sys.argv[1]).read_text())
    apis = [OnnxApi(each["path"], each["shape"], f"/{each['name']}") for each in models]
    server = ls.LitServer(apis, accelerator="cpu", workers_per_device=1, timeout=False)
    server.run(
        host="127.0.0.1", port=int(sys.argv[2]), num_api_servers=1, log_level="warning", generate_client_file=False
    )

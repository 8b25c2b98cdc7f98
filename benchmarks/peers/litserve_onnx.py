"""The benchmark's model behind LitServe. Run: python litserve_onnx.py MODEL PORT."""

from __future__ import annotations

import sys
from typing import Any

import litserve as ls
import numpy as np
import onnxruntime as ort


class OnnxApi(ls.LitAPI):
    """One session with one thread; rows in, rows out."""

    def setup(self, device: str) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # a type would change what LitServe hands over
        return np.array(request["data"], np.float32)

    def predict(self, x: Any) -> Any:
        return self.session.run(["y"], {"x": x})[0]

    def encode_response(self, output: Any) -> dict[str, Any]:
        return {"data": output.tolist()}


if __name__ == "__main__":
    server = ls.LitServer(OnnxApi(), accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1", port=int(sys.argv[2]), num_api_servers=1, log_level="warning", generate_client_file=False
    )

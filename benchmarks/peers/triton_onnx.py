"""A model of Triton's Python backend: the file beside it, in ONNX Runtime. Triton imports it as model.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime as ort
import triton_python_backend_utils as pb


class TritonPythonModel:
    """One session with one thread."""

    def initialize(self, given: dict[str, Any]) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = str(Path(given["model_repository"]) / "model.onnx")
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        config = json.loads(given["model_config"])
        (self.input,), (self.output,) = ([each["name"] for each in config[side]] for side in ("input", "output"))

    def execute(self, requests: list[Any]) -> list[Any]:
        found = []
        for request in requests:
            x = pb.get_input_tensor_by_name(request, self.input).as_numpy()
            (y,) = self.session.run([self.output], {self.input: x})
            found.append(pb.InferenceResponse([pb.Tensor(self.output, y)]))
        return found

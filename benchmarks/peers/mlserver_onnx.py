"""The benchmarks' models behind MLServer: runtimes of its own, as there is none for ONNX."""

from __future__ import annotations

import base64

import numpy as np
import onnxruntime as ort
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxModel(MLModel):
    """One session with one thread."""

    async def load(self) -> bool:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = self.settings.parameters.uri
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        x = NumpyCodec.decode_input(payload.inputs[0])
        (y,) = self.session.run(["y"], {"x": x})
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", y)])


class PackedOnnxModel(OnnxModel):
    """The same for large inputs: one tensor of float32 as base64, since MLServer's REST has no binary tensors."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        (text,) = payload.inputs[0].data
        raw = base64.b64decode(text)
        (name,) = [each.name for each in self.session.get_inputs()]
        x = np.frombuffer(raw, np.float32).reshape(self.settings.parameters.extra["shape"])
        (y,) = self.session.run(None, {name: x})
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", y)])

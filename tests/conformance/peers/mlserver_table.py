"""A model of the table behind MLServer, which has no runtime for ONNX; imported there, with nothing of ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse, RequestInput, ResponseOutput


class TableModel(MLModel):
    """One session."""

    async def load(self) -> bool:
        self.session = ort.InferenceSession(self.settings.parameters.uri, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = {each.name: _taken(each) for each in payload.inputs}
        names = [each.name for each in payload.outputs or ()] or [each.name for each in self.session.get_outputs()]
        made = self.session.run(names, given)
        outputs = [_made(name, array) for name, array in zip(names, made, strict=True)]
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=outputs)


def _taken(tensor: RequestInput) -> Any:
    if tensor.datatype != "BYTES":
        return NumpyCodec.decode_input(tensor)
    texts = [each.decode() if isinstance(each, bytes) else each for each in np.ravel(tensor.data.root).tolist()]
    return np.array(texts, np.object_).reshape(tensor.shape)


def _made(name: str, array: Any) -> ResponseOutput:
    if array.dtype.kind not in "OU":
        return NumpyCodec.encode_output(name, array)
    texts = [each.encode() for each in array.ravel().tolist()]
    return ResponseOutput(name=name, datatype="BYTES", shape=list(array.shape), data=texts)

"""A model with an input of each kind, and valid requests for it in JSON, in binary and over gRPC."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from weft.runtime.tensors import DATATYPES, Array, TensorSpec
from weft.serving import grpc_wire, proto
from weft.serving.wire import InferRequest, InferResponse, ModelSpec, encode, to_binary

MODEL = ModelSpec(
    "fuzzed",
    "1",
    (
        TensorSpec("f", "FP32", (-1, 2)),
        TensorSpec("h", "FP16", (-1, -1)),
        TensorSpec("i", "INT64", (2,)),
        TensorSpec("b", "BOOL", (-1,)),
        TensorSpec("t", "BYTES", (-1, 1)),
    ),
    (TensorSpec("y", "FP64", (-1, 2)), TensorSpec("s", "BYTES", (-1,))),
)

TYPED = replace(MODEL, inputs=tuple(spec for spec in MODEL.inputs if spec.datatype != "FP16"))

OUTPUTS: dict[str, Array] = {"y": np.zeros((1, 2)), "s": np.array([b"a", "b"], np.object_)}

INPUTS: dict[str, Array] = {
    "f": np.array([[1.5, 2]], np.float32),
    "h": np.array([[1, 2, 3]], np.float16),
    "i": np.array([-5, 2**40]),
    "b": np.array([True, False]),
    "t": np.array([[b"one"], [b""]], np.object_),
}


def assert_fits(request: InferRequest, model: ModelSpec) -> None:
    """A request may be anything but must fit the model, and must be answerable."""
    assert set(request.inputs) == {spec.name for spec in model.inputs}
    for spec in model.inputs:
        array = request.inputs[spec.name]
        assert array.dtype == DATATYPES[spec.datatype] and array.flags.aligned and array.flags.c_contiguous
        assert len(array.shape) == len(spec.shape)
        assert all(size == expected or expected < 0 for size, expected in zip(array.shape, spec.shape, strict=True))
    assert all(type(item) is bytes for item in request.inputs["t"].reshape(-1).tolist())
    assert set(request.inputs["b"].view(np.uint8).tolist()) <= {0, 1}
    names = [wanted.name for wanted in request.wanted]
    assert names and len(set(names)) == len(names) and set(names) <= {"y", "s"}
    assert isinstance(request.id, str) and len(request.id) <= 256
    assert all(isinstance(value, str | int | float) for value in request.parameters.values())
    encode(InferResponse(request, model, OUTPUTS))
    grpc_wire.encode_infer(InferResponse(request, model, OUTPUTS))


def json_tensor(spec: TensorSpec, array: Array) -> dict[str, Any]:
    data = [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(array.shape), "data": data}


def binary_tensor(spec: TensorSpec, array: Array) -> dict[str, Any]:
    size = {"binary_data_size": len(to_binary(array))}
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(array.shape), "parameters": size}


WANTED = [{"name": "y", "parameters": {"binary_data": True}}, {"name": "s"}]

JSON: dict[str, Any] = {
    "id": "1",
    "parameters": {"priority": 1, "binary_data_output": False},
    "inputs": [json_tensor(spec, INPUTS[spec.name]) for spec in MODEL.inputs],
    "outputs": WANTED,
}

BINARY: dict[str, Any] = JSON | {"inputs": [binary_tensor(spec, INPUTS[spec.name]) for spec in MODEL.inputs]}

TAIL = b"".join(to_binary(INPUTS[spec.name]) for spec in MODEL.inputs)

HEAD = orjson.dumps(BINARY)

BODIES = [(orjson.dumps(JSON), None), (HEAD + TAIL, len(HEAD))]

CONTENTS = {
    "BOOL": "bool_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


def grpc_request(model: ModelSpec, typed: bool) -> Any:
    request = proto.ModelInferRequest(model_name="fuzzed", id="1")
    request.parameters["priority"].int64_param = 1
    request.outputs.add(name="y")
    for spec in model.inputs:
        array = INPUTS[spec.name]
        tensor = request.inputs.add(name=spec.name, datatype=spec.datatype, shape=array.shape)
        if typed:
            getattr(tensor.contents, CONTENTS[spec.datatype]).extend(array.reshape(-1).tolist())
        else:
            request.raw_input_contents.append(to_binary(array))
    return request

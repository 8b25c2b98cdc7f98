"""Conversion between gRPC messages (``proto``) and requests, responses and the answers of endpoints.

All tensors of a request have typed contents, or all have raw contents (bytes); those of a response are raw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from google.protobuf import json_format

from weft.base.errors import BadRequest, Failed
from weft.runtime.client_memory import Input
from weft.runtime.tensors import Array
from weft.serving import proto, wire
from weft.serving.classification import classify
from weft.serving.regions import RegionPart, region_parts
from weft.serving.wire import Fitted, InferRequest, InferResponse, ModelSpec, Parameter, Wanted

_CONTENTS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Datatype -> the field of typed contents that holds it."""

_INT64_LIMIT = 2**63
"""Whole numbers from here on do not fit ``int64_param``, and are sent as ``uint64_param``."""

_ModelInferResponse = proto.CLASSES["ModelInferResponse"]


def decode_infer(message: Any, model: ModelSpec, raws: Sequence[bytes | memoryview] | None = None) -> InferRequest:
    """Read a ``ModelInferRequest``; raw inputs are read-only views into its bytes where those are aligned.

    raws: its raw contents, if the message was parsed without them (``grpc_messages``).
    """
    inputs, in_regions = _parse_inputs(
        message.inputs, list(message.raw_input_contents) if raws is None else raws, model
    )
    parameters = _values(message.parameters)
    for key, value in parameters.items():
        wire.refuse_request_parameter(key, value)
    wanted = _parse_outputs(message.outputs, model)
    shared = wire.shared_tensors(in_regions, _region_parts(message.outputs, "output"))
    return InferRequest(inputs, wire.check_id(message.id), parameters, wanted, shared)


def encode_infer(response: InferResponse) -> Any:
    """Build the ``ModelInferResponse`` with the requested outputs, all of them raw."""
    request, model = response.request, response.model
    message = _ModelInferResponse(model_name=model.name, model_version=model.version, id=request.id)
    fill_parameters(message.parameters, response.parameters)
    specs = model.outputs_by_name
    for wanted in request.wanted:
        spec = specs[wanted.name]
        array = wire.output_array(response.outputs, spec)
        if wanted.classes:
            spec, array = classify(spec, array, wanted.classes, response.labels.get(spec.name, ()))
        tensor = message.outputs.add(name=spec.name, datatype=spec.datatype, shape=array.shape)
        if spec.name in response.shared:
            fill_parameters(tensor.parameters, response.shared[spec.name].parameters())
            message.raw_output_contents.append(b"")  # clients assign raw contents to outputs by position
        else:
            message.raw_output_contents.append(wire.to_binary(array))
    return message


def parameters_of(message: Any) -> dict[str, str | int | bool | bytes]:
    """Return the parameters of any request as plain values."""
    return _values(message.parameters)


def filled(name: str, answer: Mapping[str, Any]) -> Any:
    """Build the message *name* from an endpoint's answer (the JSON over HTTP); members without a field are ignored."""
    try:
        return json_format.ParseDict(answer, proto.CLASSES[name](), ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise Failed(f"{name} cannot be made of our own answer: {' '.join(str(error).split())}") from error


def _parse_inputs(
    tensors: Any, raws: Sequence[bytes | memoryview], model: ModelSpec
) -> tuple[dict[str, Input], wire.InRegions]:
    """Decode the inputs of a request; return those with data, and separately those in regions.

    raws: the raw contents, one for each input that is not in a region, or empty for typed contents.
    """
    # islice: a request with more tensors is refused below, and should cost no more until then
    parts_by_input = _region_parts(islice(tensors, len(model.inputs)), "input")
    with_data, next_raw = len(tensors) - len(parts_by_input), iter(raws)
    if raws and len(raws) < with_data:  # surplus contents belong to no input and are ignored
        raise BadRequest(f"{len(raws)} raw input contents for {with_data} inputs; send one for each")
    specs = model.inputs_by_name
    inputs: dict[str, Input] = {}
    in_regions: wire.InRegions = {}
    for tensor in tensors:
        fitted = wire.fit_input(tensor.name, tensor.datatype, list(tensor.shape), specs)
        name = tensor.name
        if name in inputs or name in in_regions:
            raise BadRequest(f"input {name!r} is given twice")
        _refuse_parameters(tensor.parameters, "input")
        if name in parts_by_input:
            in_regions[name] = wire.check_in_region(
                parts_by_input[name], fitted, inline=bool(tensor.contents.ListFields())
            )
        elif not raws:
            inputs[name] = _from_contents(tensor.contents, fitted)
        elif tensor.HasField("contents") and tensor.contents.ListFields():
            raise BadRequest(f"input {name!r} has typed contents, but the request has raw contents; send one of them")
        else:
            inputs[name] = wire.from_binary(next(next_raw), fitted)
    if len(inputs) + len(in_regions) != len(model.inputs):
        raise BadRequest(wire.missing_inputs_message({**inputs, **in_regions}, model))
    return inputs, in_regions


def _parse_outputs(outputs: Any, model: ModelSpec) -> tuple[Wanted, ...]:
    """Parse the requested outputs of a message; all outputs if it names none."""
    if not outputs:
        return model.every_output[True]
    wire.check_wanted(len(outputs))
    wanted: dict[str, Wanted] = {}
    for output in outputs:
        _refuse_parameters(output.parameters, "output")
        classes = _values(output.parameters).get("classification")
        wire.add_wanted(wanted, output.name, binary=True, model=model, classes=classes)
    return tuple(wanted.values())


def _region_parts(tensors: Iterable[Any], kind: str) -> dict[str, RegionPart]:
    """Return the parts of regions that hold tensors; *kind*: input or output."""
    return region_parts(((tensor.name, _values(tensor.parameters)) for tensor in tensors), kind)


def _refuse_parameters(parameters: Any, kind: str) -> None:
    """Refuse unsupported parameters of an input or output (*kind*)."""
    if parameters:
        for key in parameters:
            wire.refuse_tensor_parameter(key, kind)


def _values(parameters: Any) -> dict[str, Any]:
    """Convert parameters of a message to plain values; BadRequest for a parameter without a value."""
    values: dict[str, Any] = {}
    if parameters:
        for key, parameter in parameters.items():
            field = parameter.WhichOneof("parameter_choice")
            if field is None:
                raise BadRequest(f"parameter {wire.shown(key)} has no value")
            values[key] = getattr(parameter, field)
    return values


def fill_parameters(field: Any, parameters: Mapping[str, Parameter]) -> None:
    """Write parameters into *field*, the map of parameters in a message."""
    for key, value in parameters.items():
        if isinstance(value, bool):
            field[key].bool_param = value
        elif isinstance(value, str):
            field[key].string_param = value
        elif isinstance(value, float):
            field[key].double_param = value
        elif value < _INT64_LIMIT:
            field[key].int64_param = value
        else:
            field[key].uint64_param = value


def _from_contents(contents: Any, fitted: Fitted) -> Array:
    """Decode the typed contents of an input; BadRequest if they do not fit its datatype and shape."""
    spec, dtype, shape, elements = fitted
    field = _CONTENTS.get(spec.datatype)
    if field is None:
        raise BadRequest(f"input {spec.name!r}: {spec.datatype} has no typed contents; send raw_input_contents")
    for other, _ in contents.ListFields():
        if other.name != field:
            raise BadRequest(f"input {spec.name!r}: {spec.datatype} goes into {field}, not into {other.name}")
    values = getattr(contents, field)
    if len(values) != elements:
        raise BadRequest(
            f"input {spec.name!r}: {len(values)} elements in {field}, its shape {list(shape)} needs {elements}"
        )
    if dtype.kind == "O":
        return wire.bytes_array(list(values)).reshape(shape)
    wire.check_range(values, spec)
    return np.fromiter(values, dtype, elements).reshape(shape)

"""Requests and answers of the Open Inference Protocol as bytes: JSON, with or without binary tensors after it.

``decode`` converts a request body to checked arrays, ``encode`` converts arrays to a response body. The functions below
them check tensors against the model and convert them from and to binary; ``grpc_wire`` uses those, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import orjson

from weft.base.errors import BadRequest, Failed, unknown_name
from weft.runtime.client_memory import Input
from weft.runtime.tensors import DATATYPES, Array, TensorSpec
from weft.serving import json_text
from weft.serving.classification import Labels, class_count, classify
from weft.serving.json_text import check_keys, check_parts, own_keys
from weft.serving.regions import PARAMETERS as REGION_PARAMETERS
from weft.serving.regions import RegionPart, part_of, region_parts

Parameter = str | int | float | bool

LARGE_ELEMENTS = 64 * 1024
"""Elements of an answer from which on its JSON is large: they take about ``LARGE_BYTES``."""
LARGE_BYTES = 1 << 20
"""JSON beyond this is parsed by helper processes: here it would block the event loop for tens of milliseconds."""
MAX_ID_CHARS = 64 * 1024
"""Limit on a request's id, which is held while the request is computed and repeated in its answer."""
MAX_TENSOR_BYTES = 2**62
"""Larger shapes are refused, even with a dimension of zero, so that sizes fit 64-bit integers."""

MOST_WANTED = 4096
"""Outputs that a request may name, repetitions included; bounds the time to check the list."""
EMPTY_FINAL = "triton_enable_empty_final_response"
"""A parameter of requests that has no effect here, where every request has one answer."""

_SHOWN_CHARS = 64
"""Characters of a client's value that an error message repeats; bounds the message."""
_PARAMETER_TYPES = (str, int, float)
"""Of parameters in JSON; bool is an int."""
_SEQUENCE_PARAMETERS = frozenset({"sequence_id", "sequence_start", "sequence_end"})
_TENSOR_PARAMETERS = frozenset({"binary_data", "binary_data_size"}) | REGION_PARAMETERS
"""Parameters of tensors that most requests have; ``refuse_tensor_parameter`` accepts them all."""

_ELEMENTS: dict[str, tuple[frozenset[type], str]] = {
    "b": (frozenset({bool, int}), "true or false"),
    "i": (frozenset({int}), "an integer"),
    "u": (frozenset({int}), "an integer"),
    "f": (frozenset({int, float}), "a number"),
    "O": (frozenset({str}), "a string"),
}
"""Kind of numpy type -> the Python types of its elements in JSON, and what to call them."""

_LIMITS = {"BOOL": (0, 1)} | {
    name: (-(2 ** (8 * dtype.itemsize - 1)), 2 ** (8 * dtype.itemsize - 1) - 1)
    if dtype.kind == "i"
    else (0, 2 ** (8 * dtype.itemsize) - 1)
    for name, dtype in DATATYPES.items()
    if dtype.kind in "iu"
}
"""Datatype -> its least and its greatest integer."""


@dataclass(frozen=True)
class ModelSpec:
    """The inputs and outputs of a version of a model, with lookups that every request needs."""

    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    exits: tuple[str, ...] = ()
    """Outputs of the early exits, which replace the last one for rows that leave early; clients cannot request them."""

    @cached_property
    def inputs_by_name(self) -> Mapping[str, TensorSpec]:
        return {spec.name: spec for spec in self.inputs}

    @cached_property
    def outputs_by_name(self) -> Mapping[str, TensorSpec]:
        return {spec.name: spec for spec in self.outputs}

    @cached_property
    def every_output(self) -> Mapping[bool, tuple[Wanted, ...]]:
        """The outputs of a request that names none: binary or not -> all outputs."""
        return {binary: tuple([Wanted(spec.name, binary) for spec in self.outputs]) for binary in (False, True)}


class Wanted(NamedTuple):
    """A requested output."""

    name: str
    binary: bool
    classes: int = 0
    """How many of its largest elements are wanted, as strings; 0: the tensor itself."""


@dataclass(slots=True)
class InferRequest:
    """One request, checked against the model."""

    inputs: dict[str, Input]
    id: str
    """Empty if the client gave none."""
    parameters: dict[str, Parameter]
    """Parameters of the client, without those that only concern the encoding of tensors."""
    wanted: tuple[Wanted, ...]
    """The requested outputs, in the order of the answer."""
    shared: SharedTensors | None = None
    """Tensors in shared memory regions; None if there are none."""


@dataclass(slots=True)
class InferResponse:
    """A request with its computed outputs; not frozen, because then creating it would take three times as long."""

    request: InferRequest
    model: ModelSpec
    outputs: Mapping[str, Array]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    """Parameters that describe how the request was served: queueing and computing time, batch."""
    labels: Mapping[str, Labels] = field(default_factory=dict)
    """Output -> the labels of its classes, where they are wanted."""
    shared: Mapping[str, RegionPart] = field(default_factory=dict)
    """Outputs that were written into regions, and where."""


Fitted = tuple[TensorSpec, np.dtype[np.generic], tuple[int, ...], int]
"""An input that fits the model, before its data is read: the model's spec, type, shape, number of elements."""

InRegions = dict[str, tuple[RegionPart, Fitted]]
"""Input -> its part of a region, and its checked description."""


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Tensors of a request that are in shared memory regions of its client (``regions``)."""

    inputs: InRegions
    """Inputs that are still to be read."""
    outputs: Mapping[str, RegionPart]
    """Outputs that are to be written into regions, and where."""


def decode(body: bytes | memoryview, header_length: int | None, model: ModelSpec) -> InferRequest:
    """Read a request; *header_length* is the size of its JSON part, None if all of it is JSON, 0 if none of it is.

    Binary inputs are read-only views into *body* where their place in it is aligned, so *body* must stay as it is.
    """
    tail = None
    if header_length is not None:
        view = memoryview(body)
        if header_length == 0:
            return _decode_headless(view, model)
        if not 0 < header_length <= len(view):
            raise BadRequest(f"header length {header_length} does not lie within the body of {len(view)} bytes")
        body, tail = view[:header_length], view[header_length:]
    message = _parse_message(body if isinstance(body, bytes) else bytes(body))
    parameters = _parameters(message, "request")
    binary = False
    if "binary_data_output" in parameters:
        binary = _flag(parameters, "binary_data_output", default=False)
        del parameters["binary_data_output"]
    request_id = check_id(message.get("id"))
    inputs, in_regions = _parse_inputs(message.get("inputs"), tail, model)
    outputs = message.get("outputs")
    wanted = _parse_outputs(outputs, binary, model)
    shared = shared_tensors(in_regions, _output_regions(outputs) if outputs else {}) if in_regions or outputs else None
    return InferRequest(inputs, request_id, parameters, wanted, shared)


def _parse_message(text: bytes) -> dict[str, Any]:
    """Parse the JSON object of a request; refuse JSON with too many parts or with duplicate keys."""
    check_parts(text)
    try:
        message = json_text.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request is not valid JSON: {error}") from error
    if type(message) is not dict:
        raise BadRequest(f"the request must be a JSON object, not {shown(message)}")
    check_keys(text, _key_count(message))
    return message


def _key_count(message: dict[str, Any]) -> int:
    """Count the keys of a parsed request, its tensors and their parameters.

    The JSON text has more keys if one was given twice, as parsing keeps only the last: ``check_keys`` compares them.
    """
    count = own_keys(message)
    for tensors in (message.get("inputs"), message.get("outputs")):
        if type(tensors) is not list:
            continue
        for tensor in tensors:
            if type(tensor) is dict:  # own_keys, written out: every request comes here, and a call costs 0.5 us
                count += len(tensor)
                if type(parameters := tensor.get("parameters")) is dict:
                    count += len(parameters)
    return count


def encode(response: InferResponse) -> tuple[list[bytes], int | None]:
    """Encode a response; return the parts of its body, and the length of the JSON part, None if all of it is JSON.

    Elements that are not finite are written as the literals ``NaN``, ``Infinity`` and ``-Infinity``.
    """
    request, model = response.request, response.model
    message: dict[str, Any] = {"model_name": model.name, "model_version": model.version}
    if request.id:
        message["id"] = request.id
    if response.parameters:
        message["parameters"] = response.parameters
    specs = model.outputs_by_name
    tensors: list[dict[str, Any]] = []
    parts = [b""]
    for wanted in request.wanted:
        spec = specs[wanted.name]
        array = output_array(response.outputs, spec)
        if wanted.classes:
            spec, array = classify(spec, array, wanted.classes, response.labels.get(spec.name, ()))
        tensor: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": array.shape}
        if spec.name in response.shared:
            tensor["parameters"] = response.shared[spec.name].parameters()
        elif wanted.binary:
            part = to_binary(array)
            tensor["parameters"] = {"binary_data_size": len(part)}
            parts.append(part)
        else:
            tensor["data"] = _to_json(array, spec)
        tensors.append(tensor)
    message["outputs"] = tensors
    try:
        parts[0] = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY)
        # orjson writes NaN and infinity as null
        if b"null" in parts[0] and json_text.spell_out(tensors):
            parts[0] = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:
        raise Failed(f"the answer of {model.name} cannot be written as JSON: {error}") from error
    return parts, len(parts[0]) if len(parts) > 1 else None


def shown(value: object) -> str:
    """Format a client's value for a message: short, on one line, and safe for deeply nested values."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = repr(value[: _SHOWN_CHARS + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def check_id(value: object) -> str:
    """Check the id of a request, and return it; empty without an id."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRequest(f"id must be a string, not {shown(value)}")
    if len(value) > MAX_ID_CHARS:
        raise BadRequest(f"id has {len(value)} characters; at most {MAX_ID_CHARS} are allowed")
    return value


def refuse_tensor_parameter(key: str, kind: str) -> None:
    """Refuse unknown parameters of an input or output (*kind*), and those that only other servers support."""
    if key.startswith("shared_memory") and key not in REGION_PARAMETERS:
        raise BadRequest(f"{kind} parameter {shown(key)} is unknown; known: {', '.join(sorted(REGION_PARAMETERS))}")
    if key == "classification" and kind == "input":
        raise BadRequest(f"{kind} parameter {key!r} is not supported; ask for the classes of an output")


def refuse_request_parameter(key: str, value: object) -> None:
    """Refuse parameters for sequences and for several answers to a request."""
    if key in _SEQUENCE_PARAMETERS and value:
        raise BadRequest(f"parameter {key!r} is not supported: models here keep nothing between requests")
    if key.startswith("triton_") and key != EMPTY_FINAL:
        raise BadRequest(f"parameter {shown(key)} is not supported: names that begin with triton_ are the server's")


def fit_input(name: object, datatype: object, shape: object, specs: Mapping[str, TensorSpec]) -> Fitted:
    """Check the name, datatype and shape that a client gave for an input; BadRequest if the model's input differs."""
    spec = specs.get(name) if isinstance(name, str) else None
    if spec is None:
        raise BadRequest(_unknown_name_message("input", name, specs))
    if datatype != spec.datatype:
        raise BadRequest(_wrong_datatype_message(spec, datatype))
    if type(shape) is not list:
        raise BadRequest(f"input {spec.name!r}: shape must be a list of integers, not {shown(shape)}")
    if len(shape) != len(spec.shape):
        raise BadRequest(f"input {spec.name!r}: shape has {len(shape)} dimensions, the model expects {_dims(spec)}")
    for size, expected in zip(shape, spec.shape, strict=True):
        if type(size) is not int or size < 0:
            raise BadRequest(f"input {spec.name!r}: dimension {shown(size)} is not an integer of at least 0")
        if size != expected and expected >= 0:
            raise BadRequest(f"input {spec.name!r}: dimension {size} does not fit, the model expects {_dims(spec)}")
    dtype = DATATYPES[datatype]
    elements = math.prod(shape)
    extent = elements or math.prod(size or 1 for size in shape)  # an empty tensor may have huge dimensions
    if extent * dtype.itemsize > MAX_TENSOR_BYTES:
        raise BadRequest(f"input {spec.name!r}: a tensor of that shape is too large")
    return spec, dtype, tuple(shape), elements


def missing_inputs_message(inputs: Mapping[str, object], model: ModelSpec) -> str:
    """Return the message for a request in which some of the model's inputs are missing."""
    names = [spec.name for spec in model.inputs if spec.name not in inputs]
    return f"model {model.name!r} needs {len(model.inputs)} inputs; missing: {', '.join(names)}"


def check_wanted(count: int) -> None:
    """Refuse a list of outputs that is too long; names may be repeated."""
    if count > MOST_WANTED:
        raise BadRequest(f"{count} outputs are asked for; at most {MOST_WANTED} may be")


def add_wanted(wanted: dict[str, Wanted], name: object, binary: bool, model: ModelSpec, classes: object = None) -> None:
    """Add a requested output to *wanted*; if a name is repeated, only the first request for it counts.

    classes: the client's number of classes, still unchecked; None: the tensor itself.
    """
    if isinstance(name, str) and name in wanted:
        return
    for spec in model.outputs:
        if spec.name == name:
            break
    else:
        if name in model.exits:
            answer = model.outputs[0].name
            raise BadRequest(f"output {name!r} is an exit; ask for {answer!r}, which holds what each row's exit gave")
        raise BadRequest(_unknown_name_message("output", name, [spec.name for spec in model.outputs]))
    wanted[spec.name] = Wanted(spec.name, binary, 0 if classes is None else class_count(classes, spec))


def from_binary(data: bytes | memoryview, fitted: Fitted) -> Array:
    """Decode a binary tensor: a view of *data* if that is aligned, else a copy."""
    spec, dtype, shape, elements = fitted
    if dtype.kind == "O":
        return bytes_array(_split_strings(data, spec.name, elements)).reshape(shape)
    check_size(len(data), fitted)
    # frombuffer takes half as long as ndarray, but refuses an empty buffer
    array: Array = np.frombuffer(data, dtype).reshape(shape) if elements else np.ndarray(shape, dtype, data)
    if dtype.kind == "b" and elements and array.view(np.uint8).max() > 1:
        raise BadRequest(f"input {spec.name!r}: a byte of a BOOL tensor must be 0 or 1")
    return array if array.flags.aligned else array.copy()


def check_size(count: int, fitted: Fitted) -> None:
    """Refuse binary data of a wrong size; for strings the size follows from the data itself."""
    spec, dtype, _, elements = fitted
    expected = elements * dtype.itemsize
    if count != expected and dtype.kind != "O":
        raise BadRequest(f"input {spec.name!r}: {count} bytes of data, its shape and datatype need {expected}")


def to_binary(array: Array) -> bytes:
    """Encode a tensor: little-endian, row-major; each string is preceded by its length in four bytes."""
    if array.dtype.kind not in "OUS":
        return array.tobytes()
    return b"".join([len(item).to_bytes(4, "little") + item for item in bytes_elements(array)])


def bytes_elements(array: Array) -> list[bytes]:
    """Return the elements of a BYTES tensor, row-major; text is encoded as UTF-8."""
    return [item.encode() if isinstance(item, str) else item for item in array.reshape(-1).tolist()]


def from_strings(data: bytes | memoryview, shape: tuple[int, ...]) -> Array:
    """Decode a BYTES tensor that ``to_binary`` encoded."""
    return bytes_array(_split_strings(data, "", math.prod(shape))).reshape(shape)


def bytes_array(items: list[bytes]) -> Array:
    """Make a flat BYTES tensor."""
    array = np.empty(len(items), np.object_)
    array[:] = items
    return array


def check_range(elements: Sequence[int], spec: TensorSpec) -> None:
    """Refuse integers that an input's datatype cannot hold; elements of other datatypes are not checked."""
    lowest, highest = _LIMITS.get(spec.datatype, (0, 0))
    if elements and highest and not (lowest <= min(elements) and max(elements) <= highest):
        raise BadRequest(
            f"input {spec.name!r}: an element is outside {lowest} to {highest}, the range of {spec.datatype}"
        )


def output_array(outputs: Mapping[str, Array], spec: TensorSpec) -> Array:
    """Return the array that was computed for an output; Failed if it is missing or of another type."""
    array = outputs.get(spec.name)
    if array is None:
        raise Failed(f"output {spec.name!r} was not computed")
    if array.dtype != DATATYPES[spec.datatype] and not (spec.datatype == "BYTES" and array.dtype.kind in "US"):
        raise Failed(f"output {spec.name!r} came out as {array.dtype}, not as {spec.datatype}")
    return array


def check_in_region(part: RegionPart, fitted: Fitted, inline: bool) -> tuple[RegionPart, Fitted]:
    """Check an input in a region; *inline*: whether the request also contains data for it."""
    spec = fitted[0]
    if inline:
        raise BadRequest(f"input {spec.name!r} lies in region {part.region!r} and has data, too; send one of them")
    check_size(part.byte_size, fitted)
    return part, fitted


def is_large(response: InferResponse) -> bool:
    """Tell whether an answer is slow to encode: much JSON, many or long strings, or classes of large outputs."""
    elements, texts = 0, []
    for wanted in response.request.wanted:
        array = response.outputs.get(wanted.name)
        if array is None or wanted.name in response.shared:
            continue
        if array.dtype.kind in "OUS":
            texts.append(array)
        elif wanted.binary and not wanted.classes:
            continue
        elements += array.size
    return elements > LARGE_ELEMENTS or sum(map(_text_size, texts)) > LARGE_BYTES


def _text_size(array: Array) -> int:
    """Return the total length of the strings in an array."""
    return sum(len(item) for item in array.reshape(-1).tolist() if isinstance(item, str | bytes))


def shared_tensors(inputs: InRegions, outputs: Mapping[str, RegionPart]) -> SharedTensors | None:
    """Return the tensors of a request that lie in regions; None if all were sent with it."""
    return SharedTensors(inputs, outputs) if inputs or outputs else None


def _parse_inputs(entries: object, tail: memoryview | None, model: ModelSpec) -> tuple[dict[str, Input], InRegions]:
    """Decode the inputs of a request; return those with data, and separately those in regions.

    entries: the JSON list of inputs. tail: the binary tensors after the JSON, one after another; None without them.
    """
    if type(entries) is not list:
        raise BadRequest(f"inputs must be a list of tensors, not {shown(entries)}")
    specs = model.inputs_by_name
    inputs: dict[str, Input] = {}
    in_regions: InRegions = {}
    used_bytes = 0  # bytes of the tail that inputs have used so far
    for item in entries:
        if type(item) is not dict:
            raise BadRequest(f"every input must be a JSON object, not {shown(item)}")
        name: Any = item.get("name")
        fitted = fit_input(name, item.get("datatype"), item.get("shape"), specs)
        if name in inputs or name in in_regions:
            raise BadRequest(f"input {name!r} is given twice")
        parameters = _parameters(item, "input") if "parameters" in item else {}
        part = None if REGION_PARAMETERS.isdisjoint(parameters) else part_of(parameters, "input", name)
        data = _binary_data(item, parameters, tail, used_bytes) if parameters else None
        if part is not None:
            in_regions[name] = check_in_region(part, fitted, inline=data is not None or "data" in item)
        elif data is None:
            inputs[name] = _from_json(item.get("data"), fitted)
        else:
            inputs[name] = from_binary(data, fitted)
            used_bytes += len(data)
    if len(inputs) + len(in_regions) != len(model.inputs):
        raise BadRequest(missing_inputs_message({**inputs, **in_regions}, model))
    if tail is not None and used_bytes != len(tail):
        raise BadRequest(f"{len(tail)} bytes follow the JSON part, but the inputs account for {used_bytes}")
    return inputs, in_regions


def _binary_data(
    item: dict[str, Any], parameters: Mapping[str, Parameter], tail: memoryview | None, used_bytes: int
) -> memoryview | None:
    """Return the binary data of an input, from byte *used_bytes* of the tail on; None if its data is JSON."""
    size, name = parameters.get("binary_data_size"), item["name"]
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise BadRequest(f"input {name!r}: binary_data_size {shown(size)} is not an integer of at least 0")
    if "data" in item:
        raise BadRequest(f"input {name!r} has both data and binary_data_size; send one of them")
    if tail is None:
        raise BadRequest(f"input {name!r} is binary, but the header Inference-Header-Content-Length is missing")
    if size > len(tail) - used_bytes:
        raise BadRequest(f"input {name!r}: binary_data_size {size}, but only {len(tail) - used_bytes} bytes are left")
    return tail[used_bytes : used_bytes + size]


def _parse_outputs(entries: object, binary: bool, model: ModelSpec) -> tuple[Wanted, ...]:
    """Parse the requested outputs, by default all; *binary*: whether they are binary unless they say otherwise."""
    if entries is None or entries == []:
        return model.every_output[binary]
    if type(entries) is not list:
        raise BadRequest(f"outputs must be a list, not {shown(entries)}")
    check_wanted(len(entries))
    wanted: dict[str, Wanted] = {}
    for item in entries:
        if type(item) is not dict:
            raise BadRequest(f"every requested output must be a JSON object, not {shown(item)}")
        parameters = _parameters(item, "output")
        flag = _flag(parameters, "binary_data", binary)
        add_wanted(wanted, item.get("name"), flag, model, parameters.get("classification"))
    return tuple(wanted.values())


def _output_regions(entries: Any) -> dict[str, RegionPart]:
    """Return where in regions outputs are to be written, from a list that ``_parse_outputs`` has checked."""
    return region_parts(((item["name"], item.get("parameters") or {}) for item in entries), "output")


def _parameters(holder: dict[str, Any], kind: str) -> dict[str, Parameter]:
    """Return the checked parameters of *holder*, the JSON object of a request, input or output (*kind*)."""
    parameters = holder.get("parameters")
    if parameters is None:
        return {}
    if type(parameters) is not dict:
        raise BadRequest(f"parameters of the {kind} must be a JSON object, not {shown(parameters)}")
    for key, value in parameters.items():
        if not isinstance(value, _PARAMETER_TYPES):
            raise BadRequest(f"{kind} parameter {shown(key)} must be a string, number or bool, not {shown(value)}")
        if kind == "request":
            if key != "binary_data_output":  # which most requests have
                refuse_request_parameter(key, value)
        elif key not in _TENSOR_PARAMETERS:
            refuse_tensor_parameter(key, kind)
    return parameters


def _flag(parameters: Mapping[str, Parameter], key: str, default: bool) -> bool:
    """Return a boolean parameter; BadRequest for another type."""
    value = parameters.get(key, default)
    if value is not True and value is not False:
        raise BadRequest(f"parameter {key!r} must be true or false, not {shown(value)}")
    return value


def _decode_headless(body: memoryview, model: ModelSpec) -> InferRequest:
    """Decode a body that is only the binary data of the single input; a string comes without its length."""
    if len(model.inputs) != 1:
        raise BadRequest(f"model {model.name!r} has {len(model.inputs)} inputs; a raw body works with one, send JSON")
    spec = model.inputs[0]
    free_dimensions = spec.shape.count(-1)
    fixed_elements = math.prod(size for size in spec.shape if size >= 0)
    if spec.datatype == "BYTES":
        if fixed_elements != 1:
            raise BadRequest(f"input {spec.name!r}: a raw body holds one string, the model expects {_dims(spec)}")
        array = bytes_array([bytes(body)]).reshape((1,) * len(spec.shape))
        return InferRequest({spec.name: array}, "", {}, model.every_output[True])
    stride_bytes = fixed_elements * DATATYPES[spec.datatype].itemsize
    if free_dimensions > 1 or (free_dimensions and not stride_bytes):
        raise BadRequest(f"input {spec.name!r}: the shape {_dims(spec)} cannot be told from a raw body, send JSON")
    if free_dimensions and len(body) % stride_bytes:
        raise BadRequest(
            f"input {spec.name!r}: {len(body)} bytes are no multiple of {stride_bytes}, as {_dims(spec)} needs"
        )
    shape = [len(body) // stride_bytes if size < 0 else size for size in spec.shape]
    array = from_binary(body, fit_input(spec.name, spec.datatype, shape, {spec.name: spec}))
    return InferRequest({spec.name: array}, "", {}, model.every_output[True])


def _from_json(data: object, fitted: Fitted) -> Array:
    """Decode the data of an input in JSON; BadRequest if it does not fit its shape and datatype."""
    spec, dtype, shape, elements = fitted
    flat = _flatten(data, spec, shape, elements)
    allowed, expected = _ELEMENTS[dtype.kind]
    if not allowed.issuperset(map(type, flat)):
        value = next(item for item in flat if type(item) not in allowed)
        raise BadRequest(f"input {spec.name!r}: every element of {spec.datatype} is {expected}, not {shown(value)}")
    if dtype.kind == "f":
        return _make_floats(flat, spec, dtype).reshape(shape)
    if dtype.kind == "O":
        return bytes_array([item.encode() for item in flat]).reshape(shape)
    check_range(flat, spec)
    return np.array(flat, dtype).reshape(shape)


def _make_floats(flat: list[Any], spec: TensorSpec, dtype: np.dtype[np.generic]) -> Array:
    """Convert numbers to a type of floating point; BadRequest if one is too large for it."""
    try:
        with np.errstate(over="raise"):
            return np.array(flat, dtype)
    except FloatingPointError as error:
        raise BadRequest(f"input {spec.name!r}: an element is too large for {spec.datatype}") from error


def _flatten(data: object, spec: TensorSpec, shape: tuple[int, ...], elements: int) -> list[Any]:
    """Flatten the data of a tensor, row-major; BadRequest unless it is flat or nested exactly like its shape."""
    if type(data) is not list:
        if shape:
            raise BadRequest(f"input {spec.name!r}: data must be a list, not {shown(data)}")
        return [data]
    if len(shape) > 1 and data and type(data[0]) is list:
        rows: list[Any] = [data]
        for size in shape:
            for row in rows:
                if type(row) is not list or len(row) != size:
                    raise BadRequest(f"input {spec.name!r}: data is not nested as its shape {list(shape)} says")
            rows = list(chain.from_iterable(rows))
        return rows
    if len(data) != elements:
        raise BadRequest(f"input {spec.name!r}: {len(data)} elements in data, its shape {list(shape)} needs {elements}")
    return data


def _to_json(array: Array, spec: TensorSpec) -> Array | list[str]:
    """Return the flat data of an output as a value that orjson can write; BadRequest if strings are not UTF-8."""
    if spec.datatype != "BYTES":
        return np.ascontiguousarray(array).reshape(-1)
    try:
        return [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]
    except UnicodeDecodeError as error:
        raise BadRequest(f"output {spec.name!r} is not UTF-8; ask for it with the parameter binary_data") from error


def _split_strings(data: bytes | memoryview, name: str, elements: int) -> list[bytes]:
    """Split *data* into strings, each preceded by its length in four bytes; BadRequest unless it holds *elements*."""
    if elements * 4 > len(data):
        raise BadRequest(f"input {name!r}: {len(data)} bytes are too few for {elements} strings")
    items: list[bytes] = []
    position = 0
    while position + 4 <= len(data) and len(items) < elements:
        end = position + 4 + int.from_bytes(data[position : position + 4], "little")
        if end > len(data):
            raise BadRequest(f"input {name!r}: string {len(items)} reaches beyond its data of {len(data)} bytes")
        items.append(bytes(data[position + 4 : end]))
        position = end
    if position != len(data) or len(items) != elements:
        raise BadRequest(
            f"input {name!r}: {len(items)} strings in {position} of {len(data)} bytes; its shape needs {elements}"
        )
    return items


def _dims(spec: TensorSpec) -> str:
    return str(list(spec.shape))


def _unknown_name_message(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the message for an unknown input or output (*kind*)."""
    if not isinstance(name, str):
        return f"the name of an {kind} must be a string, not {shown(name)}"
    return unknown_name(kind, name[:_SHOWN_CHARS], known)


def _wrong_datatype_message(spec: TensorSpec, datatype: object) -> str:
    if datatype == "BF16":
        return f"input {spec.name!r}: datatype BF16 is not supported; send {spec.datatype}"
    return f"input {spec.name!r}: datatype {shown(datatype)} does not fit, the model expects {spec.datatype}"

"""The requests of a stream as bytes: the inputs in the model's metadata, filled with seeded values or with samples.

Tensors are binary if the server announces the extension, otherwise JSON.

Samples come from an .npz file with a row of every input per sample, and labels if they are known. Values are sent as
they are: widened to the input's data type if that loses no digit, never scaled.
"""

from __future__ import annotations

import json
import struct
from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError, ShapeNeeded, WorkloadError, unknown_name
from weft.base.shapes import example, written
from weft.http.client import ServerAddress, request_bytes
from weft.runtime.samples import Ints, array_names, fits, read_arrays, require_arrays
from weft.runtime.tensors import DATATYPES, Array, TensorSpec
from weft.workloads.requests import Stream
from weft.workloads.requests import served_name as served_name

DEADLINES = ("strict", "soft", "none")
"""strict: the server may give up at the deadline; soft: it knows the deadline; none: it does not."""

BINARY = "binary_tensor_data"
"""The name of the extension in a server's metadata."""

TRITON_PRIORITY = {9: 1, 3: 2, 1: 3}
"""Weight of a stream -> the priority of the protocol, of which 1 is the highest."""
WORD = b"weft"
"""Value of every element of a string input without samples."""
MAX_TENSOR_BYTES = 1 << 30
"""Largest tensor that is sent; a larger one is a mistake in a shape, and would fill the memory."""
MAX_STREAM_BYTES = 1 << 30
"""Most bytes of the requests kept ready for a stream, one for every sample: they are all in memory."""
LABEL = "label"
"""Name of the array with the right class of each sample in an .npz file."""
MAX_ARRAY_BYTES = 1 << 30
"""Largest unpacked array of samples; a larger one is a damaged file, or cannot be kept ready to send."""


class Payload(NamedTuple):
    """The requests of a stream."""

    requests: tuple[bytes, ...]
    """Whole HTTP requests: one for every sample, or a single one that is sent each time."""
    sampled: bool = False
    labels: Ints | None = None
    """The right class of each sample, if known."""


def model_path(stream: Stream) -> str:
    """Return the path of a stream's model on a server."""
    return f"v2/models/{quote(served_name(stream.model), safe='')}"


def read_inputs(model: str, metadata: Any) -> tuple[TensorSpec, ...]:
    """Return the inputs in a model's metadata; InputError if it does not list them."""
    try:
        inputs = tuple(
            TensorSpec(entry["name"], entry["datatype"], tuple(int(size) for size in entry["shape"]))
            for entry in metadata["inputs"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{model}: its metadata does not say what its inputs are ({error!r})") from None
    for spec in inputs:
        if spec.datatype not in DATATYPES:
            raise InputError(
                f"{model}: its input {spec.name!r} has the data type {spec.datatype!r}, which is not known"
            )
    return inputs


def inputs_without_shape(stream: Stream, inputs: Sequence[TensorSpec]) -> set[str]:
    """Return the inputs with a free dimension besides the batch whose shape neither stream nor samples set."""
    with_shape = set(stream.shapes) if stream.samples is None else {spec.name for spec in inputs}
    return {spec.name for spec in inputs if any(size < 0 for size in spec.shape[1:])} - with_shape


def read_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes at which a weft server measures a model, by input; empty if *config* does not have them.

    config: the model's configuration, as the server describes it.
    """
    try:
        shapes = literal_eval(config["parameters"]["weft_shapes"]["string_value"])
        return {str(name): tuple(int(size) for size in shape) for name, shape in shapes.items()}
    except (KeyError, TypeError, ValueError, SyntaxError, AttributeError, RecursionError, MemoryError):
        return {}


def input_shape(stream: Stream, spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of an input to send: the stream's, or the model's with a batch of 1.

    ShapeNeeded if another dimension is free, WorkloadError if the stream's shape does not fit the model.
    """
    stream_shape = stream.shapes.get(spec.name)
    if stream_shape is None:
        shape = tuple(1 if size < 0 and axis == 0 else size for axis, size in enumerate(spec.shape))
        if any(size < 0 for size in shape):
            problem = f"{stream.model}: its input {spec.name!r} has the free shape {written(spec.shape)}"
            raise ShapeNeeded(problem, spec.name, example(spec.shape), model=stream.model)
        return shape
    if len(stream_shape) != len(spec.shape) or any(
        expected not in (-1, size) for size, expected in zip(stream_shape, spec.shape, strict=True)
    ):
        raise WorkloadError(
            f"{stream.model}: shape {written(stream_shape)} does not fit its input {spec.name!r}, {written(spec.shape)}"
        )
    return stream_shape


def build_payload(
    stream: Stream,
    inputs: Sequence[TensorSpec],
    target: ServerAddress,
    *,
    deadlines: str = "strict",
    binary: bool = True,
    key: str | None = None,
    seed: Sequence[int] = (0,),
    folder: str | Path = ".",
) -> Payload:
    """Build the HTTP requests of a stream; their values depend only on *seed*, or on the samples.

    deadlines: one of ``DEADLINES``. binary: whether tensors are sent in binary. key: API key, None for none.
    folder: where the file of samples is. WorkloadError if values, shapes or samples do not fit the *inputs*.
    """
    for name in (*stream.shapes, *stream.values):
        if name not in (known := [spec.name for spec in inputs]):
            axes = " (a server does not tell the names of axes: give shapes of inputs)"
            raise WorkloadError(f"{stream.model}: {unknown_name('input', name, known)}{axes}")
    template = _RequestTemplate(stream, tuple(inputs), target, _request_parameters(stream, deadlines), binary, key)
    if stream.samples is None:
        rng = np.random.default_rng(seed)
        values = [_draw_values(stream, spec, input_shape(stream, spec), rng) for spec in inputs]
        return Payload((template.fill(values),))
    samples = read_samples(Path(folder) / stream.samples, inputs)
    _check_shapes(stream, inputs, samples)
    return Payload(_sample_requests(template, samples), sampled=True, labels=samples.labels)


class _RequestTemplate(NamedTuple):
    """A request of a stream, to which tensors are added."""

    stream: Stream
    inputs: tuple[TensorSpec, ...]
    target: ServerAddress
    parameters: Mapping[str, object]
    binary: bool
    key: str | None

    def fill(self, tensors: Sequence[Array]) -> bytes:
        """Return the request with these tensors as bytes."""
        entries: list[dict[str, object]] = []
        binary_data = b""
        for spec, tensor in zip(self.inputs, tensors, strict=True):
            entry: dict[str, object] = {"name": spec.name, "shape": list(tensor.shape), "datatype": spec.datatype}
            if self.binary:
                data = _to_binary(tensor)
                binary_data += data
                entry["parameters"] = {"binary_data_size": len(data)}
            else:
                entry["data"] = _to_list(tensor)
            entries.append(entry)
        parameters = {**self.parameters, "binary_data_output": True} if self.binary else self.parameters
        text = json.dumps({"parameters": parameters, "inputs": entries}, allow_nan=False).encode()
        head = f"Inference-Header-Content-Length: {len(text)}\r\nContent-Type: application/octet-stream\r\n"
        return request_bytes(
            self.target,
            "POST",
            f"{model_path(self.stream)}/infer",
            key=self.key,
            head=head if self.binary else "Content-Type: application/json\r\n",
            body=text + binary_data,
        )


def _sample_requests(template: _RequestTemplate, samples: Samples) -> tuple[bytes, ...]:
    """Build a request for every sample; WorkloadError if a sample cannot be sent, or all take too much memory."""
    requests, total = [], 0
    where = f"{template.stream.samples}: sample"
    for row in range(len(samples)):
        try:
            requests.append(template.fill([samples.inputs[spec.name][row, ...] for spec in template.inputs]))
        except ValueError as error:  # JSON has no NaN, and text must be UTF-8
            raise WorkloadError(f"{where} {row} holds what no JSON can, and the server takes nothing else") from error
        total += len(requests[-1])
        if total > MAX_STREAM_BYTES:
            raise WorkloadError(
                f"{where}s up to {row} make requests of over {MAX_STREAM_BYTES} bytes; keep fewer of {len(samples)}"
            )
    return tuple(requests)


def _check_shapes(stream: Stream, inputs: Sequence[TensorSpec], samples: Samples) -> None:
    """Raise WorkloadError if a shape of the stream differs from that of its samples."""
    for spec in inputs:
        shape = samples.inputs[spec.name].shape[1:]
        if spec.name in stream.shapes and input_shape(stream, spec) != shape:
            raise WorkloadError(
                f"{stream.model}: shape {written(stream.shapes[spec.name])} of its input {spec.name!r} is not "
                f"that of its samples, {written(shape)}; leave one of them out"
            )


def _request_parameters(stream: Stream, deadlines: str) -> dict[str, object]:
    """Return the parameters of a stream's requests: priority, deadline and exit threshold."""
    parameters: dict[str, object] = {"priority": TRITON_PRIORITY[stream.priority]}
    if stream.deadline_ms is None:
        pass
    elif deadlines == "strict":
        parameters["timeout"] = max(1, round(stream.deadline_ms * 1e3))
    elif deadlines == "soft":
        parameters["weft_slo_ms"] = stream.deadline_ms
    threshold = sent_threshold(stream)
    if threshold is not None:
        if threshold <= 0:
            raise WorkloadError(f"{stream.model}: exit_threshold = {threshold:g} cannot be sent, must be above 0")
        parameters["weft_exit_threshold"] = threshold
    return parameters


def sent_threshold(stream: Stream) -> float | None:
    """Return the exit threshold to send with requests; None leaves it to the server.

    For a stream with a floor it is None: a server lowers its own threshold under load, but not that of a request.
    """
    is_set = "exit_threshold" in stream.model_fields_set and stream.exit_floor is None
    return stream.exit_threshold if is_set else None


def _draw_values(stream: Stream, spec: TensorSpec, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return a tensor for an input: filled with the stream's value for it, else with random numbers.

    Random integers are 0 or 1, which are valid even as indices into a table.
    """
    dtype = DATATYPES[spec.datatype]
    element_bytes = max(dtype.itemsize, 8)  # numpy draws integers of 8 bytes
    if float(np.prod(shape, dtype=float)) * element_bytes > MAX_TENSOR_BYTES:
        raise WorkloadError(f"{stream.model}: its input {spec.name!r} of shape {written(shape)} is too large to send")
    if dtype == np.object_:
        return np.full(shape, WORD, np.object_)
    if spec.name in stream.values:
        return np.full(shape, stream.values[spec.name]).astype(dtype)
    if dtype.kind == "f":
        return rng.standard_normal(shape, np.float32).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def _to_binary(tensor: Array) -> bytes:
    """Encode a tensor: little-endian, row-major; each string is preceded by its length in four bytes."""
    if tensor.dtype == np.object_:
        return b"".join(struct.pack("<I", len(word)) + word for word in tensor.ravel().tolist())
    return tensor.astype(tensor.dtype.newbyteorder("<"), copy=False).tobytes()


def _to_list(tensor: Array) -> list[Any]:
    """Return the elements of a tensor, row-major, for JSON."""
    if tensor.dtype == np.object_:
        return [word.decode() for word in tensor.ravel().tolist()]
    values: list[Any] = tensor.ravel().tolist()
    return values


def has_extension(server: Mapping[str, Any], extension: str) -> bool:
    """Tell whether a server's metadata lists an extension."""
    extensions = server.get("extensions")
    return isinstance(extensions, list) and extension in extensions


# Samples


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Samples for the requests of a stream."""

    inputs: Mapping[str, Array]
    """Input -> (samples, shape of one request's tensor)."""
    labels: Ints | None
    """The right class of each sample, if known."""

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))


def read_samples(path: str | Path, inputs: Sequence[TensorSpec]) -> Samples:
    """Read the samples in an .npz file and check them against the model's inputs; WorkloadError if they do not fit."""
    try:
        names, input_names = array_names(path), [spec.name for spec in inputs]
        require_arrays(names, input_names)
        wanted = {*input_names, *({LABEL} & {*names})}  # a file may lack labels
        return _check_samples(read_arrays(path, wanted, MAX_ARRAY_BYTES), inputs)
    except InputError as error:
        raise WorkloadError(f"{path}: {error}") from error


def _check_samples(stored: Mapping[str, npt.NDArray[Any]], inputs: Sequence[TensorSpec]) -> Samples:
    """Convert the arrays of a file to samples for these inputs; WorkloadError if they do not fit."""
    if not inputs:
        raise WorkloadError("the model takes no input that a sample could fill")
    tensors = {spec.name: _to_tensors(spec, stored[spec.name]) for spec in inputs}
    first = inputs[0].name
    count = len(tensors[first])
    if not count:
        raise WorkloadError(f"{first} holds no sample")
    for name, tensor in tensors.items():
        if len(tensor) != count:
            raise WorkloadError(f"{name} holds {len(tensor)} samples, {first} {count}")
    known = {spec.name for spec in inputs}
    return Samples(tensors, _check_labels(stored[LABEL], count) if LABEL in stored and LABEL not in known else None)


def _to_tensors(spec: TensorSpec, array: npt.NDArray[Any]) -> Array:
    """Return the samples in an array as tensors to send, one per entry of the first dimension.

    If the samples lack the input's batch dimension, each becomes a batch of one.
    """
    tensors = array[:, None] if 0 < array.ndim == len(spec.shape) else array
    if not tensors.ndim or not fits(tensors.shape[1:], spec.shape):
        raise WorkloadError(
            f"{spec.name} has the shape {written(array.shape)}, whose rows do not fit the input's {written(spec.shape)}"
        )
    return _cast(spec, tensors)


def _cast(spec: TensorSpec, array: npt.NDArray[Any]) -> Array:
    """Convert an array to the input's datatype; WorkloadError if that could lose digits."""
    dtype = DATATYPES[spec.datatype]
    if dtype == np.object_:
        if array.dtype.kind not in "SU":
            raise WorkloadError(f"{spec.name} is of type {array.dtype}, must be text, as the input is BYTES")
        texts = [text.encode() if isinstance(text, str) else text for text in array.ravel().tolist()]
        words = np.empty(len(texts), np.object_)
        words[:] = texts
        return words.reshape(array.shape)
    if not np.can_cast(array.dtype, dtype, "safe"):
        raise WorkloadError(
            f"{spec.name} is of type {array.dtype}, which does not fit into the input's {spec.datatype}; "
            f"save it as {dtype}"
        )
    return array.astype(dtype, copy=False)


def _check_labels(array: npt.NDArray[Any], count: int) -> Ints:
    """Return the labels of *count* samples as 64-bit integers; WorkloadError if they are none."""
    if array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64, "safe"):
        raise WorkloadError(f"{LABEL} is of type {array.dtype}, must be whole numbers of at most 63 bits")
    if array.shape != (count,):
        raise WorkloadError(f"{LABEL} has the shape {written(array.shape)}, must be one for each of {count} samples")
    return array.astype(np.int64)

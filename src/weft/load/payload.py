"""The requests a stream sends: what the model's metadata asks for, filled with seeded values or samples, as bytes.

Tensors travel in binary where the server announces that it takes them so, as JSON otherwise.
"""

from __future__ import annotations

import json
import struct
from ast import literal_eval
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from weft.base.errors import InputError, ShapeNeeded, WorkloadError, unknown_name
from weft.base.shapes import example, written
from weft.http.client import ServerAddress, request_bytes
from weft.load.samples import Ints, Samples, read_samples
from weft.runtime.tensors import DATATYPES, Array, TensorSpec
from weft.workloads.requests import Stream
from weft.workloads.requests import served_name as served_name

DEADLINES = ("strict", "soft", "none")
"""strict: the server may give up at the deadline; soft: it knows it; none: it is not told."""

BINARY = "binary_tensor_data"
"""The name under which servers announce the extension."""

TRITON_PRIORITY = {9: 1, 3: 2, 1: 3}
WORD = b"weft"
MAX_TENSOR_BYTES = 1 << 30
MAX_STREAM_BYTES = 1 << 30
"""The most that the requests kept ready for a stream, one for every sample, may take."""


class Payload(NamedTuple):
    """What a stream sends."""

    requests: tuple[bytes, ...]
    """Whole HTTP requests: one for every sample, or a single one that is sent each time."""
    sampled: bool = False
    labels: Ints | None = None
    """The right answer to each, where it is known."""


def model_path(stream: Stream) -> str:
    return f"v2/models/{quote(served_name(stream.model), safe='')}"


def read_inputs(model: str, metadata: Any) -> tuple[TensorSpec, ...]:
    """The inputs that a model's metadata lists."""
    try:
        inputs = tuple(
            TensorSpec(each["name"], each["datatype"], tuple(int(size) for size in each["shape"]))
            for each in metadata["inputs"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{model}: its metadata does not say what its inputs are ({error!r})") from None
    for spec in inputs:
        if spec.datatype not in DATATYPES:
            raise InputError(
                f"{model}: its input {spec.name!r} has the data type {spec.datatype!r}, which is not known"
            )
    return inputs


def unshaped(stream: Stream, inputs: Sequence[TensorSpec]) -> set[str]:
    """Inputs with a free dimension besides the batch of which the stream says nothing."""
    given = set(stream.shapes) if stream.samples is None else {spec.name for spec in inputs}
    return {spec.name for spec in inputs if any(size < 0 for size in spec.shape[1:])} - given


def read_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Input -> the shape that a weft server measures a model with, as its configuration tells; else nothing."""
    try:
        told = literal_eval(config["parameters"]["weft_shapes"]["string_value"])
        return {str(name): tuple(int(size) for size in shape) for name, shape in told.items()}
    except (KeyError, TypeError, ValueError, SyntaxError, AttributeError, RecursionError, MemoryError):
        return {}


def input_shape(stream: Stream, spec: TensorSpec) -> tuple[int, ...]:
    """The shape to send: free dimensions from the stream's shapes; a first one is the batch, 1."""
    given = stream.shapes.get(spec.name)
    if given is None:
        shape = tuple(1 if size < 0 and place == 0 else size for place, size in enumerate(spec.shape))
        if any(size < 0 for size in shape):
            problem = f"{stream.model}: its input {spec.name!r} has the free shape {written(spec.shape)}"
            raise ShapeNeeded(problem, spec.name, example(spec.shape), model=stream.model)
        return shape
    if len(given) != len(spec.shape) or any(
        want not in (-1, have) for have, want in zip(given, spec.shape, strict=True)
    ):
        raise WorkloadError(
            f"{stream.model}: shape {written(given)} does not fit its input {spec.name!r}, {written(spec.shape)}"
        )
    return given


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
    """The whole HTTP requests of a stream, the same for the same seed; *folder*: where its samples are looked for."""
    for name in (*stream.shapes, *stream.values):
        if name not in (known := [spec.name for spec in inputs]):
            axes = " (a server does not tell the names of axes: give shapes of inputs)"
            raise WorkloadError(f"{stream.model}: {unknown_name('input', name, known)}{axes}")
    form = _Form(stream, tuple(inputs), target, _parameters(stream, deadlines), binary, key)
    if stream.samples is None:
        rng = np.random.default_rng(seed)
        values = [_values(stream, spec, input_shape(stream, spec), rng) for spec in inputs]
        return Payload((form.filled(values),))
    samples = read_samples(Path(folder) / stream.samples, inputs)
    _check_shapes(stream, inputs, samples)
    return Payload(_filled_with(form, samples), True, samples.labels)


class _Form(NamedTuple):
    """A request to be filled with tensors."""

    stream: Stream
    inputs: tuple[TensorSpec, ...]
    target: ServerAddress
    parameters: Mapping[str, object]
    binary: bool
    key: str | None

    def filled(self, tensors: Sequence[Array]) -> bytes:
        entries: list[dict[str, object]] = []
        raw = b""
        for spec, tensor in zip(self.inputs, tensors, strict=True):
            entry: dict[str, object] = {"name": spec.name, "shape": list(tensor.shape), "datatype": spec.datatype}
            if self.binary:
                data = _raw(tensor)
                raw += data
                entry["parameters"] = {"binary_data_size": len(data)}
            else:
                entry["data"] = _listed(tensor)
            entries.append(entry)
        return self._request(entries, raw)

    def _request(self, entries: Sequence[Mapping[str, object]], raw: bytes) -> bytes:
        parameters = {**self.parameters, "binary_data_output": True} if self.binary else self.parameters
        text = json.dumps({"parameters": parameters, "inputs": entries}, allow_nan=False).encode()
        head = f"Inference-Header-Content-Length: {len(text)}\r\nContent-Type: application/octet-stream\r\n"
        return request_bytes(
            self.target,
            "POST",
            f"{model_path(self.stream)}/infer",
            key=self.key,
            head=head if self.binary else "Content-Type: application/json\r\n",
            body=text + raw,
        )


def _filled_with(form: _Form, samples: Samples) -> tuple[bytes, ...]:
    requests, total = [], 0
    where = f"{form.stream.samples}: sample"
    for row in range(len(samples)):
        try:
            requests.append(form.filled([samples.inputs[spec.name][row, ...] for spec in form.inputs]))
        except ValueError as error:  # the server takes JSON, which has no NaN, and text only as UTF-8
            raise WorkloadError(f"{where} {row} holds what no JSON can, and the server takes nothing else") from error
        total += len(requests[-1])
        if total > MAX_STREAM_BYTES:
            raise WorkloadError(
                f"{where}s up to {row} make requests of over {MAX_STREAM_BYTES} bytes; keep fewer of {len(samples)}"
            )
    return tuple(requests)


def _check_shapes(stream: Stream, inputs: Sequence[TensorSpec], samples: Samples) -> None:
    for spec in inputs:
        shape = samples.inputs[spec.name].shape[1:]
        if spec.name in stream.shapes and input_shape(stream, spec) != shape:
            raise WorkloadError(
                f"{stream.model}: shape {written(stream.shapes[spec.name])} of its input {spec.name!r} is not "
                f"that of its samples, {written(shape)}; leave one of them out"
            )


def _parameters(stream: Stream, deadlines: str) -> dict[str, object]:
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
    """How sure an early answer must be, where the stream states it; else that is the server's affair.

    So it is with a floor: what a request states does not sink with the load.
    """
    stated = "exit_threshold" in stream.model_fields_set and stream.exit_floor is None
    return stream.exit_threshold if stated else None


def _values(stream: Stream, spec: TensorSpec, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Random values that any model takes: whole numbers are 0 or 1, because they may be looked up in a table."""
    kind = DATATYPES[spec.datatype]
    if float(np.prod(shape, dtype=float)) * max(kind.itemsize, 8) > MAX_TENSOR_BYTES:
        raise WorkloadError(f"{stream.model}: its input {spec.name!r} of shape {written(shape)} is too large to send")
    if kind == np.object_:
        return np.full(shape, WORD, np.object_)
    if spec.name in stream.values:
        return np.full(shape, stream.values[spec.name]).astype(kind)
    if kind.kind == "f":
        return rng.standard_normal(shape, np.float32).astype(kind)
    return rng.integers(0, 2, shape).astype(kind)


def _raw(tensor: Array) -> bytes:
    if tensor.dtype == np.object_:
        return b"".join(struct.pack("<I", len(word)) + word for word in tensor.ravel().tolist())
    return tensor.astype(tensor.dtype.newbyteorder("<"), copy=False).tobytes()


def _listed(tensor: Array) -> list[Any]:
    if tensor.dtype == np.object_:
        return [word.decode() for word in tensor.ravel().tolist()]
    values: list[Any] = tensor.ravel().tolist()
    return values


def announced(server: Mapping[str, Any], extension: str) -> bool:
    """Whether a server's metadata lists an extension."""
    extensions = server.get("extensions")
    return isinstance(extensions, list) and extension in extensions

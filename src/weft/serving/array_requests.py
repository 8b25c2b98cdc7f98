"""Requests and answers within one process: arrays that are checked as in ``wire``, but never serialized.

Inputs are converted to the model's types where numpy can do that within the same kind (integer, float, string).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from weft.base.errors import BadRequest
from weft.runtime.client_memory import Input
from weft.runtime.tensors import Array, TensorSpec
from weft.serving.wire import (
    InferRequest,
    InferResponse,
    ModelSpec,
    Parameter,
    Wanted,
    add_wanted,
    bytes_array,
    bytes_elements,
    check_range,
    check_wanted,
    fit_input,
    missing_inputs_message,
    output_array,
    refuse_request_parameter,
)


def request_of(
    model: ModelSpec,
    inputs: Mapping[str, npt.ArrayLike],
    outputs: Iterable[str] = (),
    parameters: Mapping[str, Parameter] | None = None,
) -> InferRequest:
    """Build a request for a model from arrays; BadRequest if they do not fit. Without *outputs*, requests all."""
    for key, value in (parameters or {}).items():
        refuse_request_parameter(key, value)
    specs = model.inputs_by_name
    tensors: dict[str, Input] = {name: _tensor(name, value, specs) for name, value in inputs.items()}
    if len(tensors) != len(specs):
        raise BadRequest(missing_inputs_message(tensors, model))
    names = list(outputs)
    check_wanted(len(names))
    wanted: dict[str, Wanted] = {}
    for name in names:
        add_wanted(wanted, name, binary=True, model=model)
    return InferRequest(tensors, "", dict(parameters or {}), tuple(wanted.values()) or model.every_output[True])


def answer_of(response: InferResponse) -> dict[str, Array]:
    """Return the requested outputs as copies that the caller owns."""
    specs = {spec.name: spec for spec in response.model.outputs}
    names = [output.name for output in response.request.wanted]
    return {name: np.array(output_array(response.outputs, specs[name])) for name in names}


def _tensor(name: str, value: npt.ArrayLike, specs: Mapping[str, TensorSpec]) -> Array:
    """Convert *value* to an array of the type and shape of the input *name*; BadRequest if it does not fit."""
    try:
        array: Array = np.asarray(value)
    except ValueError as error:
        raise BadRequest(f"input {name!r}: no array can be made of it: {error}") from error
    known = specs.get(name)
    # the model's own datatype, to which the array is converted below; ``fit_input`` refuses an unknown name
    spec, dtype, _, _ = fit_input(name, known and known.datatype, list(array.shape), specs)
    if dtype.kind == "O":
        return _strings(array, spec)
    is_integer = dtype.kind in "iu" and array.dtype.kind in "iu"
    if not is_integer and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise BadRequest(f"input {name!r}: an array of {array.dtype} does not fit, the model expects {spec.datatype}")
    if is_integer and array.size:
        check_range([int(array.min()), int(array.max())], spec)
    try:
        with np.errstate(over="raise"):
            return np.asarray(array, dtype, order="C")
    except FloatingPointError as error:
        raise BadRequest(f"input {name!r}: an element is too large for {spec.datatype}") from error


def _strings(array: Array, spec: TensorSpec) -> Array:
    """Convert an array of strings or bytes to a BYTES tensor; BadRequest for other elements."""
    if array.dtype.kind not in "OUS" or not all(isinstance(item, str | bytes) for item in array.reshape(-1).tolist()):
        raise BadRequest(f"input {spec.name!r}: every element of {spec.datatype} is a string or bytes")
    return bytes_array(bytes_elements(array)).reshape(array.shape)

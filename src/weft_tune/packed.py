r"""Weights on disk in exactly the bits of their formats: ``write_packed`` and ``read_packed``.

The file: eight bytes ``weft\0w01``, the length of the header as a little-endian 32-bit number, the header, then the
codes of one tensor after another, each from a byte of its own, packed as ``weft_tune.numbers.arrays`` says. The header
is JSON: ``{"tensors": [{"name", "shape", "format", "bits", "offset"}, ...]}``; a format is written as in a
configuration (``EXP 4 9``), offsets count from the end of the header. FLOAT 32 is stored as it is, 32 bits each. Biases
and all that has no format stay in the ONNX file.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from weft.base.errors import NumberError, TuneError
from weft.base.files import replacing
from weft.base.jsonfile import first_problem
from weft_tune.network import Network, check_layers
from weft_tune.numbers.arrays import decode, encode, fits_float32, pack, packed_bytes, unpack
from weft_tune.numbers.configuration import AnyFormat, Configuration
from weft_tune.numbers.format import parse_format, spell
from weft_tune.numbers.plain import float32_range
from weft_tune.weighted_layers import find_layers, load_flat

Floats = npt.NDArray[np.float32]

MAGIC = b"weft\0w01"  # the first bytes of a file
_LENGTH = struct.Struct("<I")  # of the header, in bytes
MOST_HEADER_BYTES = 1 << 26
"""Limit of the header: 64 MiB describe hundreds of thousands of tensors; more is a damaged file."""
MOST_VALUES = 1 << 40
"""Limit of the values of a tensor, so that a damaged shape cannot ask for any amount of memory."""

_Size = Annotated[int, Field(ge=0, le=MOST_VALUES)]


class _PackedEntry(BaseModel, extra="forbid", strict=True):
    name: str
    shape: Annotated[list[_Size], Field(max_length=64)]
    format: str
    bits: Annotated[int, Field(ge=1, le=32)]
    offset: _Size


class _Header(BaseModel, extra="forbid", strict=True):
    tensors: list[_PackedEntry]


class PackedWeights(NamedTuple):
    """The sizes of the parts of a written file."""

    header_bytes: int
    """Bytes before the codes."""
    code_bytes: int

    @property
    def bytes(self) -> int:
        return self.header_bytes + self.code_bytes


def write_packed(
    path: str | os.PathLike[str], arrays: Mapping[str, npt.NDArray[np.floating]], configuration: Configuration
) -> PackedWeights:
    """Write tensors in their formats; the names are those of the configuration's objects (``conv1.weight``)."""
    entries, streams, offset = [], [], 0
    for name, array in arrays.items():
        form = configuration[name]
        streams.append(pack(encode(array, form), form.bits).tobytes())
        entries.append(
            _PackedEntry(
                name=name, shape=list(array.shape), format=spell(form), bits=form.bits, offset=offset
            ).model_dump()
        )
        offset += len(streams[-1])
    header = json.dumps({"tensors": entries}, separators=(",", ":")).encode()
    head = MAGIC + _LENGTH.pack(len(header)) + header
    with replacing(path, TuneError) as temporary:
        temporary.write_bytes(b"".join([head, *streams]))
    return PackedWeights(len(head), offset)


def weights_of(model: str | os.PathLike[str], network: Network) -> dict[str, Floats]:
    """The weights of a network's layers in an ONNX file, under the names of their objects."""
    known = {layer.name: layer.weight for layer in find_layers(load_flat(os.fspath(model)))}
    check_layers(network, known, str(model))
    return {f"{name}.weight": known[name] for name in network.layers}


def read_packed(path: str | os.PathLike[str]) -> dict[str, Floats]:
    """The tensors of a file as float32; raises ``TuneError`` with the path for every kind of damage."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise TuneError(f"{path}: cannot read the file: {error.strerror or error}") from error
    try:
        return _unpack_tensors(data)
    except (NumberError, TuneError) as error:
        raise TuneError(f"{path}: {error}") from error


def _unpack_tensors(data: bytes) -> dict[str, Floats]:
    header, start = _parse_header(data)
    tensors: dict[str, Floats] = {}
    for entry in header.tensors:
        if entry.name in tensors:
            raise TuneError(f"two tensors are called {entry.name!r}; write the file again")
        tensors[entry.name] = _unpack_tensor(entry, memoryview(data)[start:])
    return tensors


def _parse_header(data: bytes) -> tuple[_Header, int]:
    """The header and the offset of its end."""
    if data[: len(MAGIC)] != MAGIC:
        raise TuneError("holds no packed weights; it must begin with 'weft\\0w01'")
    if len(data) < len(MAGIC) + _LENGTH.size:
        raise TuneError("ends before its header; write the file again")
    start = len(MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    if length > min(MOST_HEADER_BYTES, len(data) - start):
        raise TuneError(f"claims a header of {length} bytes and has {len(data) - start} left; write the file again")
    try:
        return _Header.model_validate_json(data[start : start + length]), start + length
    except ValidationError as error:
        raise TuneError(f"its header is damaged: {first_problem(error, _Header, _PackedEntry)}") from error


def _unpack_tensor(entry: _PackedEntry, codes: memoryview) -> Floats:
    """Decode one tensor from *codes*, all bytes after the header; raises TuneError if the entry does not fit."""
    form: AnyFormat = parse_format(entry.format)
    if form.bits != entry.bits:
        raise TuneError(f"tensor {entry.name!r}: {entry.format} has {form.bits} bits, not {entry.bits}")
    count = math.prod(entry.shape)
    # Sizes of 0 count as 1, because numpy cannot reshape to sizes whose product overflows, even without any values.
    if math.prod(size or 1 for size in entry.shape) > MOST_VALUES:
        raise TuneError(f"tensor {entry.name!r} has a shape of {'x'.join(map(str, entry.shape))}; the file is damaged")
    needed = packed_bytes(count, form.bits)
    if entry.offset + needed > len(codes):
        raise TuneError(
            f"tensor {entry.name!r} needs bytes {entry.offset} to {entry.offset + needed} of {len(codes)}; "
            "the file is cut short or damaged"
        )
    packed = np.frombuffer(codes[entry.offset : entry.offset + needed], np.uint8)
    values = decode(unpack(packed, form.bits, count), form).reshape(entry.shape)
    in_float32 = values if fits_float32(form) else np.clip(values, *float32_range(form))
    return in_float32.astype(np.float32)

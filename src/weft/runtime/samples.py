"""Samples for the inputs of a model: generated (``sample``), stored in an .npz file (``read_arrays``), and as batches.

Files are not trusted: nothing is unpickled, and the size of every array is checked before it is read.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError, ModelError, unknown_name
from weft.base.shapes import Shapes
from weft.runtime.tensors import DATATYPES, Array, TensorSpec

Ints = npt.NDArray[np.int64]


def sample(
    inputs: Sequence[TensorSpec], shapes: Shapes, seed: int, values: Mapping[str, float] | None = None
) -> dict[str, Array]:
    """Generate plausible inputs: normally distributed floats, and the whole numbers 0 and 1, valid in every table.

    *shapes*: of each input, with its rows. *values*: input -> the number that fills it, such as a sampling rate.
    """
    # The constant keeps these apart from other uses of small seeds; it is "WEFT" in ASCII.
    rng = np.random.default_rng([seed, 0x57454654])
    feed = {spec.name: _generate(rng, spec.datatype, shapes[spec.name]) for spec in inputs}
    check_values(inputs, values or {})
    for name, value in (values or {}).items():
        feed[name] = np.full_like(feed[name], value)
    return feed


def check_values(inputs: Sequence[TensorSpec], values: Mapping[str, float]) -> None:
    """Raise ``ModelError`` if *values* has a number for a name that is no input, or for an input of text."""
    numbers = [spec.name for spec in inputs if spec.datatype != "BYTES"]
    for name in values:
        if name not in numbers:
            raise ModelError(unknown_name("number input", name, numbers))


def _generate(rng: np.random.Generator, datatype: str, shape: tuple[int, ...]) -> Array:
    """One input: normally distributed numbers for floats; 0 and 1, or the texts of them, for other types."""
    kind = DATATYPES[datatype]
    if datatype.startswith("FP"):
        return rng.standard_normal(shape).astype(kind)
    numbers = rng.integers(0, 2, shape)
    if datatype == "BYTES":
        return np.array([str(number) for number in numbers.ravel()], dtype=kind).reshape(shape)
    return np.asarray(numbers).astype(kind)


def array_names(path: str | Path) -> list[str]:
    """The names of the arrays in a file."""
    with _open_archive(path) as archive:
        return list(_unpacked_sizes(archive))


def read_arrays(path: str | Path, names: Iterable[str], max_bytes: int) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays called *names*; ``InputError`` if one of them takes more than *max_bytes* unpacked."""
    with _open_archive(path) as archive:
        sizes = _unpacked_sizes(archive)
        return {name: _read(archive, name, sizes[name], max_bytes) for name in names}


@contextmanager
def _open_archive(path: str | Path) -> Iterator[zipfile.ZipFile]:
    """Open an .npz file; all errors inside the block become ``InputError``."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read the samples: {error.strerror or error}") from error
    except Exception as error:  # zipfile, zlib and numpy's header parser each raise their own kinds
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise InputError(f"not a file of samples ({reason}); write it with numpy.savez") from error


def _unpacked_sizes(archive: zipfile.ZipFile) -> dict[str, int]:
    """Name of each array -> bytes that it takes unpacked, as the archive states them."""
    return {entry.filename.removesuffix(".npy"): entry.file_size for entry in archive.infolist()}


def _read(archive: zipfile.ZipFile, name: str, size_bytes: int, max_bytes: int) -> npt.NDArray[Any]:
    """Read the array *name* of an .npz archive; InputError if it takes more than *max_bytes*. Pickles are refused."""
    if size_bytes > max_bytes:
        raise InputError(f"{name} takes {size_bytes} bytes, must be at most {max_bytes}")
    with archive.open(f"{name}.npy") as file:
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def require_arrays(array_names: Sequence[str], inputs: Iterable[str]) -> None:
    """Raise ``InputError`` unless a file with arrays of these names has one for each of the *inputs* of the model."""
    if missing := [name for name in inputs if name not in array_names]:
        listed = ", ".join(array_names[:8]) or "nothing"
        raise InputError(f"has no array for the input {missing[0]!r} of the model; it holds {listed}")


def fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether *shape* fits the shape *wanted* of an input, in which -1 stands for any size."""
    return len(shape) == len(wanted) and all(size in (-1, actual) for actual, size in zip(shape, wanted, strict=True))


def count_rows(inputs: Mapping[str, Array]) -> int:
    """Number of samples: the length of each input's first axis."""
    return len(next(iter(inputs.values())))


def feed(inputs: Mapping[str, Array], rows: Ints, fixed: int | None = None) -> dict[str, Array]:
    """The samples with the indices *rows* as a batch.

    *fixed*: the batch size of a model that takes no other; smaller batches are padded with copies of the last sample.
    """
    if fixed is not None and len(rows) < fixed:
        rows = np.concatenate([rows, np.full(fixed - len(rows), rows[-1])])
    return {name: np.ascontiguousarray(array[rows]) for name, array in inputs.items()}


def batches(inputs: Mapping[str, Array], size: int, fixed: int | None) -> Iterator[dict[str, Array]]:
    """Yield all samples in batches of at most *size*, padded to *fixed* as by ``feed``."""
    count = count_rows(inputs)
    for start in range(0, count, size):
        yield feed(inputs, np.arange(start, min(start + size, count)), fixed)

"""Arrays in an .npz file, read without trusting it."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError


def array_names(path: str | Path) -> list[str]:
    """What the arrays in a file are called."""
    with _opened(path) as archive:
        return list(_sizes(archive))


def read_arrays(path: str | Path, names: Iterable[str], max_bytes: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays called *names*; none may take more than *max_bytes* unpacked."""
    with _opened(path) as archive:
        sizes = _sizes(archive)
        return {name: _read(archive, name, sizes[name], max_bytes) for name in names}


@contextmanager
def _opened(path: str | Path) -> Iterator[zipfile.ZipFile]:
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


def _sizes(archive: zipfile.ZipFile) -> dict[str, int]:
    return {each.filename.removesuffix(".npy"): each.file_size for each in archive.infolist()}


def _read(archive: zipfile.ZipFile, name: str, size_bytes: int, max_bytes: int) -> npt.NDArray[Any]:
    if size_bytes > max_bytes:
        raise InputError(f"{name} takes {size_bytes} bytes, must be at most {max_bytes}")
    with archive.open(f"{name}.npy") as file:
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))

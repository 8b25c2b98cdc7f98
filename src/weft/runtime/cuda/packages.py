"""Compiled models on disk: packages of torch's compiler, one for each piece and batch size, over common weights.

The process that loads a package executes its code. So the folder of packages belongs to this user alone, and is named
by a digest of everything that the packages depend on. ``compiling`` runs the compiler.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from weft.runtime.metadata import PROGRAM_SUFFIX
from weft.runtime.onnxruntime_cpu import cache as caching

FORMAT = 6
"""Increase it whenever packages, or the content of their folder, change."""
MANIFEST, WEIGHTS, REFERENCE = "packages.json", "weights.bin", "reference.npz"


class StoredWeight(BaseModel):
    """A tensor in the file of weights, stored as in memory: *offset* in bytes, *strides* in elements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    offset: int
    kind: int
    """ONNX's number of its type."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class CompiledPiece(BaseModel):
    """The names of a piece's inputs and outputs; those of the model are named as in its file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Package(BaseModel):
    """The package of a piece at a batch size."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shapes: tuple[tuple[int, ...], ...]
    """Of the inputs, in order."""
    weights: dict[str, str] = {}
    """Its name of each weight -> the digest of the weight's content."""


class Manifest(BaseModel):
    """The packages of a model, for each piece and batch size, and their weights; the content of ``packages.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pieces: tuple[CompiledPiece, ...]
    """One, unless the model was cut or has exits."""
    batched: bool = False
    """Whether all inputs and outputs have a row for each sample of a batch."""
    channels_last: tuple[str, ...] = ()
    """Tensors between pieces whose channels come last in memory."""
    weights: dict[str, StoredWeight] = {}
    """Digest of a weight's content -> the weight."""
    packages: dict[int, tuple[Package, ...]] = {}
    """Rows of a batch -> the package of each piece."""

    def folder(self, rows: int, piece: int) -> str:
        """The name of the folder with the package of a piece at a batch size."""
        return f"rows{rows}.{piece}of{len(self.pieces)}"

    def folders(self) -> list[str]:
        """The names of the folders of all packages."""
        return [self.folder(rows, piece) for rows in self.packages for piece in range(len(self.pieces))]


class CompileJob(BaseModel):
    """A model to compile, and the batch sizes, precision and device that it is compiled for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path  # its file: of ONNX, or a program of torch
    shapes: Mapping[str, tuple[int, ...]]
    """Input -> its shape for one row."""
    values: Mapping[str, float] = {}
    """Input -> the number that fills it in trial runs."""
    rows: tuple[int, ...]
    """Batch sizes; only 1 for a model that is not batched."""
    batched: bool = False
    exits: tuple[str, ...] = ()
    """Outputs that are exits, shallow to deep, the end last; it is cut at all of them, and has no other outputs."""
    precision: str  # as in ``LoadOptions``
    device: str
    """torch's name of the device."""
    device_name: str
    """The hardware model of the device, for which packages are valid."""
    grain_s: float | None = None
    """Longest segment of a model that may have to be cut, in seconds; None: it stays in one piece."""
    max_pieces: int = 1
    cuts: tuple[str, ...] = ()
    """The nodes of the exported program before which it is cut besides; chosen by the compiler (``torch_pieces``)."""

    @property
    def is_program(self) -> bool:
        """Whether the model is a program of torch, so that reading it may run code of its file."""
        return self.model.suffix == PROGRAM_SUFFIX

    def shapes_at(self, rows: int) -> dict[str, list[int]]:
        """Input -> its shape for *rows* rows."""
        return {name: [shape[0] * rows, *shape[1:]] if shape else [] for name, shape in self.shapes.items()}

    def first_stage(self) -> CompileJob:
        """The job for one row and the largest batch only, cut at exits alone."""
        return self.model_copy(update={"rows": tuple(sorted({1, *self.rows[-1:]})), "grain_s": None})

    def folder(self, cache: Path) -> Path:
        """The path of the folder for its packages in *cache*, named by a digest of the model and all settings."""
        versions = [_version(package) for package in ("torch", "triton")]
        settings = self.model_dump(mode="json", exclude={"model", "device"})
        return caching.entry(cache, self.model, json.dumps([FORMAT, settings, versions], sort_keys=True))


def find(folder: Path) -> Manifest | None:
    """The packages in a folder; None if there are none, or if another user could have written them."""
    try:
        # The compiler of a program has run its code, and to read a pipe or a link to a device would never end.
        if not stat.S_ISREG((folder / MANIFEST).lstat().st_mode):
            return None
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        return manifest if all(map(is_private, (folder, *folder.rglob("*")))) else None
    except (OSError, ValidationError):
        return None


def is_private(path: Path) -> bool:
    """Whether a file or folder belongs to this user, and no other user may write to it."""
    status = path.lstat()
    writable = stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.getuid() and not writable and not stat.S_ISLNK(status.st_mode)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""Compiled models on disk: packages of torch's compiler, one for each batch size, over weights that are stored once.

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

from weft.runtime.onnxruntime_cpu import cache as caching

FORMAT = 2
"""Increase it whenever packages, or the content of their folder, change."""
MANIFEST, WEIGHTS = "packages.json", "weights.bin"


class StoredWeight(BaseModel):
    """A tensor in the file of weights, stored as in memory: *offset* in bytes, *strides* in elements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    offset: int
    kind: int
    """ONNX's number of its type."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Manifest(BaseModel):
    """The packages of a model, one for each batch size, and their weights; the content of ``packages.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: dict[str, StoredWeight] = {}
    """Digest of a weight's content -> the weight."""
    constants: dict[int, dict[str, str]] = {}
    """Rows of a batch -> its package's name for each weight -> the weight's digest."""

    def folder(self, rows: int) -> str:
        """The name of the folder with the package of a batch size."""
        return f"rows{rows}"


class CompileJob(BaseModel):
    """A model to compile, and the batch sizes, precision and device that it is compiled for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path  # its ONNX file
    shapes: Mapping[str, tuple[int, ...]]
    """Input -> its shape for one row."""
    rows: tuple[int, ...]
    """Batch sizes; only 1 for a model that is not batched."""
    precision: str  # as in ``LoadOptions``
    device: str
    """torch's name of the device."""
    device_name: str
    """The hardware model of the device, for which packages are valid."""

    def shapes_at(self, rows: int) -> dict[str, list[int]]:
        """Input -> its shape for *rows* rows."""
        return {name: [shape[0] * rows, *shape[1:]] if shape else [] for name, shape in self.shapes.items()}

    def folder(self, cache: Path) -> Path:
        """The path of the folder for its packages in *cache*, named by a digest of the model and all settings."""
        versions = [_version(package) for package in ("torch", "triton")]
        settings = self.model_dump(mode="json", exclude={"model", "device"})
        return caching.entry(cache, self.model, json.dumps([FORMAT, settings, versions], sort_keys=True))


def find(folder: Path) -> Manifest | None:
    """The packages in a folder; None if there are none, or if another user could have written them."""
    try:
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

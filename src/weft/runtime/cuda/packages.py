"""Compiled models on disk: packages of torch's compiler, one for each batch size, over weights that are stored once.

The process that loads a package executes its code. So their folder belongs to this user alone, and is named by a digest
of everything that they depend on. ``compiling`` has them made.
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

FORMAT = 1
"""Increase it whenever packages, or what is in their folder, change."""
MANIFEST, WEIGHTS = "packages.json", "weights.bin"


class StoredWeight(BaseModel):
    """A tensor in the file of weights, as it lies in memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    offset: int
    kind: int
    """ONNX's number of its type."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Manifest(BaseModel):
    """The packages of a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: dict[str, StoredWeight] = {}
    """By a digest of their content."""
    constants: dict[int, dict[str, str]] = {}
    """Rows of a batch -> the names that its package has for weights, and their digests."""

    def file(self, rows: int) -> str:
        return f"rows{rows}.pt2"


class CompileJob(BaseModel):
    """What is compiled, and for what."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    shapes: Mapping[str, tuple[int, ...]]
    """Of the inputs, for one row."""
    rows: tuple[int, ...]
    """Batch sizes; one alone of 1 for a model that is not batched."""
    precision: str
    device: str
    """torch's name of it."""
    device_name: str
    """The name of its kind, which packages are for."""

    def shapes_at(self, rows: int) -> dict[str, list[int]]:
        return {name: [shape[0] * rows, *shape[1:]] if shape else [] for name, shape in self.shapes.items()}

    def folder(self, cache: Path) -> Path:
        """Where its packages are kept."""
        versions = [_version(package) for package in ("torch", "triton")]
        about = self.model_dump(mode="json", exclude={"model", "device"})
        return caching.entry(cache, self.model, json.dumps([FORMAT, about, versions], sort_keys=True))


def find(folder: Path) -> Manifest | None:
    """The packages in a folder; None if there are none, or if someone else could have written them."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        return manifest if all(map(is_private, (folder, *folder.iterdir()))) else None
    except (OSError, ValidationError):
        return None


def is_private(path: Path) -> bool:
    """Whether a file or folder is this user's, and no other may write to it."""
    status = path.lstat()
    writable = stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.getuid() and not writable and not stat.S_ISLNK(status.st_mode)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

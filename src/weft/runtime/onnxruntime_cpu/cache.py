"""Cache of prepared models on disk; the key is a digest of everything that they depend on.

An entry is a folder with ``prepared.json`` and the segments' files. It is written next to its final place and renamed,
so that it is complete or absent; an entry that does not match its digests counts as absent.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
from pathlib import Path

import onnxruntime as ort
from pydantic import BaseModel, ConfigDict, ValidationError

from weft.runtime.external import external_files
from weft.runtime.onnxruntime_cpu.model import Blueprint
from weft.runtime.own_folder import LOCK, make_folder, release

FORMAT = 7
"""Increase it whenever the content of an entry, or how it is prepared, changes."""
_RECORD = "prepared.json"
_CHUNK_BYTES = 1 << 20
"""Bytes that are hashed at a time, so that large weights are never in memory as a whole."""


class _Record(BaseModel):
    """The content of ``prepared.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digests: dict[str, str]
    """Name of each file of the entry -> its SHA-256."""
    blueprint: Blueprint


def entry(cache: Path, model: Path, options: str) -> Path:
    """The path of the entry for *model*, prepared with *options* (JSON) on this machine; the entry need not exist.

    The processor is a part of the key: ONNX Runtime optimises a graph for its instructions.
    """
    digest = hashlib.sha256()
    # With lengths, so that no two lists of parts give the same bytes.
    for part in (str(FORMAT), ort.__version__, platform.machine(), _processor(), options):
        digest.update(f"{len(part)}:{part}".encode())
    for path in (model, *external_files(model)):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        _hash(path, digest)
    return cache / digest.hexdigest()


def find(place: Path) -> Blueprint | None:
    """The blueprint of the entry at *place*; None if it is absent or damaged."""
    try:
        record = _Record.model_validate_json((place / _RECORD).read_bytes())
        sound = all(_digest(place / name) == digest for name, digest in record.digests.items())
    except (OSError, ValidationError):
        return None
    return record.blueprint if sound else None


def store(folder: Path, blueprint: Blueprint, place: Path) -> bool:
    """Complete *folder* to an entry and move it to *place*; False, and *folder* stays, if another writer was first."""
    digests = {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.name != LOCK}
    (folder / _RECORD).write_text(_Record(digests=digests, blueprint=blueprint).model_dump_json() + "\n", "utf-8")
    if place.exists() and find(place) is None:
        drop(place)  # a damaged entry
    try:
        folder.rename(place)
    except OSError:  # a folder with content is there
        return False
    release(folder, now_at=place)
    return True


def is_empty(cache: Path) -> bool:
    """Whether the cache has no entry, so that a model's files need not be hashed to look for one."""
    try:
        return all(path.name.startswith(".") for path in cache.iterdir())  # a dot: an entry that is being built
    except OSError:
        return True


def drop(place: Path) -> None:
    """Remove an entry that cannot be used."""
    shutil.rmtree(place, ignore_errors=True)


def new_folder(cache: Path | None) -> Path:
    """Create a folder to build an entry in: in the cache, whose parent folder must exist, or None: a temporary one."""
    if cache is None:
        return make_folder()
    cache.mkdir(exist_ok=True)  # without parents: if the folder above was removed, the server ends
    return make_folder(".building-", cache)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    _hash(path, digest)
    return digest.hexdigest()


def _hash(path: Path, digest: hashlib._Hash) -> None:
    """Add the content of a file to *digest*."""
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)


def _processor() -> str:
    """The model and the features of this machine's processor, as far as the system reports them."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return platform.processor()
    wanted = ("model name", "cpu implementer", "cpu part", "flags", "features")
    lines = (line for line in text.splitlines() if line.lower().startswith(wanted))
    return "\n".join(dict.fromkeys(lines))

"""Prepared models on disk, by what they were made from.

An entry is a folder with ``prepared.json`` and the segments' files. It is written beside its place and renamed into
it, so that it is there as a whole or not at all; one that does not match its digests is as good as none.
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
"""Raise it whenever what is prepared, or how, changes."""
_RECORD = "prepared.json"
_CHUNK_BYTES = 1 << 20


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    digests: dict[str, str]
    blueprint: Blueprint


def entry(cache: Path, model: Path, options: str) -> Path:
    """Where *model*, prepared by *options*, lies or would lie on a machine like this one."""
    digest = hashlib.sha256()
    for part in (str(FORMAT), ort.__version__, platform.machine(), _processor(), options):
        digest.update(f"{len(part)}:{part}".encode())
    for path in (model, *external_files(model)):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        _hash(path, digest)
    return cache / digest.hexdigest()


def find(place: Path) -> Blueprint | None:
    """The blueprint of an entry, if there is one and it is sound."""
    try:
        record = _Record.model_validate_json((place / _RECORD).read_bytes())
        sound = all(_digest(place / name) == digest for name, digest in record.digests.items())
    except (OSError, ValidationError):
        return None
    return record.blueprint if sound else None


def store(folder: Path, blueprint: Blueprint, place: Path) -> bool:
    """Finish *folder* and move it to *place*; False, and *folder* stays, where another writer was there first."""
    digests = {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.name != LOCK}
    (folder / _RECORD).write_text(_Record(digests=digests, blueprint=blueprint).model_dump_json() + "\n", "utf-8")
    if place.exists() and find(place) is None:
        drop(place)
    try:
        folder.rename(place)
    except OSError:
        return False
    release(folder, now_at=place)
    return True


def is_empty(cache: Path) -> bool:
    """Whether there cannot be an entry, so that nobody has to look at a model to find it."""
    try:
        return all(each.name.startswith(".") for each in cache.iterdir())  # those are being built
    except OSError:
        return True


def drop(place: Path) -> None:
    """Remove an entry that cannot be used."""
    shutil.rmtree(place, ignore_errors=True)


def new_folder(cache: Path | None) -> Path:
    """An empty folder to build an entry in, on the same disk; where the cache lies must be there."""
    if cache is None:
        return make_folder()
    cache.mkdir(exist_ok=True)  # not more, for the server may have gone with the folder above
    return make_folder(".building-", cache)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    _hash(path, digest)
    return digest.hexdigest()


def _hash(path: Path, digest: hashlib._Hash) -> None:
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)


def _processor() -> str:
    """The model of this machine's processor, as far as the system tells: optimised graphs fit one kind."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return platform.processor()
    wanted = ("model name", "cpu implementer", "cpu part", "flags", "features")
    lines = (line for line in text.splitlines() if line.lower().startswith(wanted))
    return "\n".join(dict.fromkeys(lines))

"""Prepared models on disk, by what they were made from.

An entry is a folder with ``prepared.json`` and the segments' files. It is written beside its place and renamed into
it, so that it is there as a whole or not at all; one that does not match its digests is as good as none.
"""

from __future__ import annotations

import hashlib
import mmap
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import onnxruntime as ort
from pydantic import BaseModel, ConfigDict, ValidationError

from weft.runtime.onnxruntime_cpu.model import Blueprint
from weft.runtime.wire_format import fields

FORMAT = 4
"""Raise it whenever what is prepared, or how, changes."""
_RECORD = "prepared.json"
_CHUNK_BYTES = 1 << 20
_STALE_S = 24 * 3600


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
    digests = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    (folder / _RECORD).write_text(_Record(digests=digests, blueprint=blueprint).model_dump_json() + "\n", "utf-8")
    if place.exists() and find(place) is None:
        drop(place)
    try:
        folder.rename(place)
    except OSError:
        return False
    return True


def drop(place: Path) -> None:
    """Remove an entry that cannot be used."""
    shutil.rmtree(place, ignore_errors=True)


def new_folder(cache: Path | None) -> Path:
    """An empty folder to build an entry in, on the same disk."""
    if cache is None:
        return Path(tempfile.mkdtemp(prefix="weft-"))
    cache.mkdir(parents=True, exist_ok=True)
    for path in cache.glob(".building-*"):  # of processes that were killed
        if path.stat().st_mtime < time.time() - _STALE_S:
            drop(path)
    return Path(tempfile.mkdtemp(prefix=".building-", dir=cache))


def external_files(model: Path) -> tuple[Path, ...]:
    """Files beside a model that hold weights of it; none where the file cannot be read as a model."""
    if model.stat().st_size == 0:
        return ()
    with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            names = {name: None for name in _locations(data, 0, len(data), _MODEL)}
        except (IndexError, UnicodeDecodeError):
            return ()
    paths = (model.parent / name for name in names)
    return tuple(path for path in paths if path.is_file())


_MODEL, _GRAPH, _NODE, _ATTRIBUTE, _TENSOR, _ENTRY = "model", "graph", "node", "attribute", "tensor", "entry"
_INSIDE = {
    (_MODEL, 7): _GRAPH,
    (_GRAPH, 1): _NODE,
    (_GRAPH, 5): _TENSOR,
    (_NODE, 5): _ATTRIBUTE,
    (_ATTRIBUTE, 5): _TENSOR,
    (_ATTRIBUTE, 10): _TENSOR,
    (_ATTRIBUTE, 6): _GRAPH,
    (_ATTRIBUTE, 11): _GRAPH,
    (_TENSOR, 13): _ENTRY,
}
"""Message and field number -> the message inside, on the way to the entries that name a file."""


def _locations(data: mmap.mmap, start: int, end: int, message: str) -> Iterator[str]:
    """Names of files in a serialised model; weights are stepped over, so that a large file is read in no time."""
    named: dict[int, bytes] = {}
    for number, first, last in fields(data, start, end):
        inner = _INSIDE.get((message, number))
        if inner is not None:
            yield from _locations(data, first, last, inner)
        elif message == _ENTRY:
            named[number] = data[first:last]
    if named.get(1) == b"location":
        yield named[2].decode()


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

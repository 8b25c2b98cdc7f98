"""The files of the project's own networks: small files come with weft, large files are fetched.

A checkout has all files. A wheel lacks the files in ``FETCHED``; ``fetch`` copies them into a folder of the user,
from a checkout or from a URL of the same tree, and accepts only files with the known digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from weft.base.errors import ModelError, reason_of, unknown_name
from weft.base.registry import registered

_PACKAGE = Path(__file__).parents[1]
_TIMEOUT_S = 60.0  # a download that stalls this long has failed; shorter would refuse slow mirrors

FETCHED: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("fetched.json").read_text("utf-8"))
"""Name -> file below the package -> its SHA-256. ``pyproject.toml`` keeps these files out of the wheel."""


class NetworkCard(BaseModel, extra="forbid", frozen=True):
    """Origin and accuracy of a network of the project."""

    name: str
    input: str
    data: str
    licence: str
    training: str
    """How it was trained: epochs, seed, version and device, images, optimizer or loss."""
    seed: int
    versions: dict[str, str]
    """Package -> version with which the files were written."""
    accuracy: float
    """Accuracy on the test set; if the network has exits, with exits at the card's threshold."""
    sha256: str
    """The digest of the .onnx file."""


def pixels(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The images as inputs of the networks, with values from 0 to 1."""
    return image.astype(np.float32) / np.float32(255)


def folder() -> Path:
    """The folder of fetched files: the environment variable WEFT_DATA, or ``~/.cache/weft/data``."""
    path = os.environ.get("WEFT_DATA")
    return Path(path) if path else Path.home() / ".cache/weft/data"


def data_path(file: str) -> Path:
    """The path of *file* (relative to the package): in weft if it came with it, else that to which it is fetched."""
    shipped = _shipped_path(file)
    return shipped if shipped.exists() else folder() / file


def _shipped_path(file: str) -> Path:
    """The path of a file that comes with weft; if its first folder is now a package of its own, below that package."""
    top_folder, _, rest = file.partition("/")
    tool = registered("modules").get(top_folder)
    return _PACKAGE / file if tool is None else _PACKAGE.parent.joinpath(*tool.target.split("."), rest)


def existing_data_path(file: str) -> Path:
    """The path of *file* (relative to the package); raises ModelError that says how to fetch a missing file."""
    path = data_path(file)
    if path.exists():
        return path
    name = next((name for name, files in FETCHED.items() if file in files), None)
    if name is None:
        raise ModelError(f"{path}: not there, though it comes with weft; install weft again")
    raise ModelError(
        f"{name} is too large to come with an installed weft; copy it from a checkout or a URL of its files: "
        f"weft models fetch {name} --from FOLDER (without a name: all files that were left out)"
    )


def fetch(name: str, source: str, done: Callable[[Path], None] = lambda path: None) -> tuple[Path, ...]:
    """Copy the files of a network in ``FETCHED`` from *source*, a checkout or a URL; return their paths.

    *done* is called with each path. A present file with the right digest is not copied again. A copied file with a
    wrong digest is refused and not stored.
    """
    if name not in FETCHED:
        raise ModelError(unknown_name("network to fetch", name, FETCHED))
    paths = []
    for file, sha256 in FETCHED[name].items():
        path = data_path(file)
        if not path.exists() or _digest(path.read_bytes()) != sha256:
            _store(path, _read(source, file), sha256)
        done(path)
        paths.append(path)
    return tuple(paths)


def _read(source: str, file: str) -> bytes:
    """The content of *file* in a checkout at the folder or URL *source*; raises ModelError if it cannot be read."""
    from http.client import HTTPException
    from urllib.error import URLError
    from urllib.request import urlopen

    where = f"{source.rstrip('/')}/src/{_shipped_path(file).relative_to(_PACKAGE.parent).as_posix()}"
    try:
        if source.startswith(("http://", "https://")):
            with urlopen(where, timeout=_TIMEOUT_S) as answer:
                content: bytes = answer.read()
                return content
        return Path(where).read_bytes()
    except (OSError, ValueError, HTTPException) as problem:
        reason = problem.reason if isinstance(problem, URLError) else reason_of(problem)
        raise ModelError(
            f"{where}: cannot be read: {reason}; --from {shlex.quote(source)} must be a checkout of weft"
        ) from problem


def _store(path: Path, content: bytes, sha256: str) -> None:
    """Check the digest of a file and write it; a partly written file never has the final name."""
    if _digest(content) != sha256:
        raise ModelError(f"{path.name}: not the file that this weft knows: its SHA-256 differs")
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as problem:
        raise ModelError(f"{path}: cannot be written: {problem.strerror or problem}") from problem
    finally:
        if unfinished.exists():
            unfinished.unlink()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

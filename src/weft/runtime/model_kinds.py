"""Kinds of model files, as tools register them: which one a file is of, and what is declared of it.

A kind is known by the ending of its files (``suffix``), or by a key in the metadata of an ONNX file (``metadata``);
every other file is taken for an ordinary ONNX file. ``devices`` are the kinds of devices that run it: what ``cpu``
runs goes there when a GPU cannot have it.
"""

from __future__ import annotations

from pathlib import Path

from weft.base.registry import Entry, registered
from weft.runtime.metadata import metadata_keys

ONNX = "onnx"
"""The kind of ordinary ONNX files."""
ONNX_SUFFIX = ".onnx"
CPU = "cpu"
"""The cores, as ``devices`` names them."""


def kind_of(path: Path, device: str) -> Entry:
    """The kind of a file for a kind of device (``cuda``); OSError where the file cannot be read."""
    kinds = registered("model_kinds")
    fit = [kind for kind in kinds.values() if device in kind.about.get("devices", ())]
    if path.suffix != ONNX_SUFFIX and (ended := [kind for kind in fit if kind.about.get("suffix") == path.suffix]):
        return ended[0]
    keys = metadata_keys(path) if path.is_file() else frozenset()
    return next((kind for kind in fit if kind.about.get("metadata") in keys), kinds[ONNX])


def suffixes() -> tuple[str, ...]:
    """The endings of model files, that of ONNX first."""
    return tuple(kind.about["suffix"] for kind in registered("model_kinds").values() if "suffix" in kind.about)

"""The models in a stitched ONNX file, with their weights, and what they share: ``read_stitched``, ``read_body``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import onnx
from onnx import numpy_helper

from weft.base.errors import StitchError
from weft.runtime.metadata import BODY_KEY, FAMILY_KEY
from weft_stitch.bodies.body import Body
from weft_stitch.bodies.described import rebuilt as rebuilt_body
from weft_stitch.family import Family
from weft_stitch.net import Array
from weft_stitch.rebuilding import rebuilt
from weft_stitch.sharing import Sharing


def read_stitched(path: Path) -> tuple[Family, Sharing]:
    """What ``described`` told the file of its models; ``StitchError`` where it was told nothing."""
    return rebuilt(*_told(path, FAMILY_KEY))


def read_body(path: Path) -> Body:
    """The same of models that have one body."""
    return rebuilt_body(*_told(path, BODY_KEY))


def _told(path: Path, key: str) -> tuple[str, Callable[[str], Array]]:
    """What the file says of its models, and its weights by name."""
    model = onnx.load(str(path))
    text = next((each.value for each in model.metadata_props if each.key == key), "")
    if not text:
        raise StitchError("it does not say how its models share weights; stitch it again")
    stored = {each.name: each for each in model.graph.initializer}

    @cache
    def weights(name: str) -> Array:
        found: Array = numpy_helper.to_array(stored[name])
        return found

    return text, weights

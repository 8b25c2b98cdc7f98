"""The models in a stitched ONNX file, with their weights, and what they share: ``read_stitched``."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import numpy_helper

from weft.errors import StitchError
from weft.runtime.metadata import FAMILY_KEY
from weft.stitching.family import Family
from weft.stitching.net import Array
from weft.stitching.rebuilding import rebuilt
from weft.stitching.sharing import Sharing


def read_stitched(path: Path) -> tuple[Family, Sharing]:
    """What ``described`` told the file of its models; ``StitchError`` where it was told nothing."""
    model = onnx.load(str(path))
    text = next((each.value for each in model.metadata_props if each.key == FAMILY_KEY), "")
    if not text:
        raise StitchError("it does not say how its models share weights; stitch it again")
    stored = {each.name: each for each in model.graph.initializer}

    def weights(name: str) -> Array:
        found: Array = numpy_helper.to_array(stored[name])
        return found

    return rebuilt(text, weights)

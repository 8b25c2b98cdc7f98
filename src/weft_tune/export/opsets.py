"""Raising a model to the opset and file version that its new nodes need."""

from __future__ import annotations

import onnx
from onnx import helper, version_converter

from weft.base.errors import TuneError

LEAST = 13
"""The least opset that has all nodes that are written."""

_FILE_VERSIONS = {13: 7, 19: 9, 21: 10}
"""Opset -> the file version that came with it."""


def raised(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """*model* with at least that opset of the standard operators; itself where it has that already."""
    present = max((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), default=1)
    if present < opset:
        model = _converted(model, opset)
    model.ir_version = max(model.ir_version, _FILE_VERSIONS[opset])
    return model


def _converted(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    try:
        found = version_converter.convert_version(model, opset)
    except Exception as error:  # the C++ side raises several unrelated kinds
        reason = " ".join(str(error).split())[:120]
        raise TuneError(
            f"the formats need opset {opset} and the model cannot be raised to it ({reason}); "
            f"export it with opset {opset}, or use the style simulated"
        ) from error
    helper.set_model_props(found, {each.key: each.value for each in model.metadata_props})
    return found

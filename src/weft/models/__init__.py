"""Models: layers in execution order, read from ONNX files or from the zoo."""

from weft.models.layer import Gemm, Layer, Model
from weft.models.onnx_import import import_onnx
from weft.models.packaged import packaged_models

__all__ = ["Gemm", "Layer", "Model", "import_onnx", "packaged_models"]

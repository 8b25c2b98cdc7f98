"""Models: layers in execution order, read from ONNX files or from the zoo, with or without early exits."""

from weft.models.exits import subnets, with_exits
from weft.models.layer import Exit, Gemm, Layer, Model
from weft.models.onnx_import import import_onnx
from weft.models.packaged import packaged_models

__all__ = ["Exit", "Gemm", "Layer", "Model", "import_onnx", "packaged_models", "subnets", "with_exits"]

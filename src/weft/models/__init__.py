"""Models: layers in execution order, read from ONNX files or from the zoo, with or without early exits.

Its modules: ``layer.py`` (``Layer``, ``Gemm``, ``Exit``, ``Model``: frozen counts for one sample); ``onnx_import/``,
import of any ONNX file as a ``Model`` (shapes, nested graphs, fusion; ``cuts.py``: its exits and block ends);
``operators/``, the table of operators: cost, shapes, rows, values, meaning in torch, stitching of each; ``zoo/``,
well-known networks as ONNX graphs; ``trained/`` and ``classifiers/``, networks that the project trained (``training/``
builds them); ``stored.py``, fetching of the networks' files that are not in the wheel; ``sources.py``, the model
that a name stands for.
"""

from weft.models.exits import subnets, with_exits
from weft.models.layer import Exit, Gemm, Layer, Model
from weft.models.onnx_import import import_onnx
from weft.models.packaged import packaged_models

__all__ = ["Exit", "Gemm", "Layer", "Model", "import_onnx", "packaged_models", "subnets", "with_exits"]

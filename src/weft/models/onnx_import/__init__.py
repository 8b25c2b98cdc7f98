"""ONNX files become models: ``import_onnx``. ``importer`` is the road through, the other modules its stations.

``tensors`` reads the file's values (``weft.models.onnx_graph`` its nodes and attributes), ``infer`` finds shapes and
small values (``fold``), ``walk`` orders the graph and enters its bodies, ``fusion`` joins what runs as one layer,
``cuts`` finds where the graph can be cut, ``widths`` knows how wide tuned layers are. What each operator costs, and its
shapes where ONNX's inference leaves them open, is in the table of operators (``weft.models.operators``).
"""

from weft.models.onnx_import.importer import import_onnx

__all__ = ["import_onnx"]

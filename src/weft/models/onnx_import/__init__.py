"""Import of ONNX files as models: ``import_onnx``. ``importer`` is the entry, the other modules its steps.

``tensors`` reads the file's values (``weft.models.onnx_graph`` its nodes and attributes), ``infer`` computes shapes and
small values, ``walk`` orders the graph, enters nested graphs and fuses what runs as one layer, ``cuts`` finds where the
graph can be cut, ``widths`` reads the bit widths of tuned layers. The cost of each operator, and its shapes where
ONNX's inference leaves them open, are in the table of operators (``weft.models.operators``).
"""

from weft.models.onnx_import.importer import import_onnx

__all__ = ["import_onnx"]

"""ONNX files become models: ``import_onnx``. ``importer`` is the road through, the other modules its stations.

``tensors`` and ``attributes`` read the file's values, ``infer`` finds shapes (``shapes`` where ONNX does not tell
them) and small values (``fold``), ``ops`` says how each operator is counted (``products``, ``attention``,
``contrib``), ``walk`` orders the graph and enters its bodies, ``fusion`` joins what runs as one layer, ``cuts`` finds
where the graph can be cut, ``widths`` knows how wide tuned layers are.
"""

from weft.models.onnx_import.importer import import_onnx

__all__ = ["import_onnx"]

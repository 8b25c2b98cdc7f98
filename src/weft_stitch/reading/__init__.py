"""The doors in: ONNX files (``onnx_reader``) and torch modules (``torch_reader``) become nets, nets a family.

Both readers write a ``draft``, which ``padding`` and ``tidying`` bring to the nine kinds of operation; what has no kind
is kept as an island in its source's own words. ``alignment`` lays the nets side by side.
"""

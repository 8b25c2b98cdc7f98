"""The formats that a runtime computes fastest, measured here: ``weft tune --target onnxruntime``.

``prepared`` is the model as the runtime simplifies it, with the ranges of its tensors. ``qdq`` writes variants with
8-bit integers or float16; ``bench`` builds, scores and times them. ``choice`` decides by these measurements,
``fastest`` goes from options to the result and its files.
"""

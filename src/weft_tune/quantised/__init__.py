"""Models on ONNX Runtime with weights and layer inputs rounded to any number format, scored on labelled data."""

import weft.runtime.onnxruntime_cpu  # noqa: F401  (which keeps ONNX Runtime from telling its maker)

"""Models on ONNX Runtime with weights and layer inputs rounded to any number format, scored on labelled data."""

import weft.runtime.onnxruntime_cpu  # noqa: F401  (its import turns off ONNX Runtime's telemetry)

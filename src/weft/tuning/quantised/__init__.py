"""Models on ONNX Runtime with weights and layer inputs rounded to any number format, scored on labelled data."""

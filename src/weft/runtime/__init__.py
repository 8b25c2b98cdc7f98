"""Real execution on ONNX Runtime: models cut into segments, measured, and run on lanes."""

"""Where a stitched ONNX file names its models, for who writes such files and for who serves them."""

STITCHED_KEY = "weft.stitched"
"""The key in a file's metadata; its value is JSON."""
STITCHED_VERSION = 1
"""Of what stands there."""

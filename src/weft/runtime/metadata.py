"""Where a stitched ONNX file names its models, for who writes such files and for who serves them."""

from weft.models.stitched_files import STITCHED_KEY as STITCHED_KEY

STITCHED_VERSION = 1
"""Of what stands there."""

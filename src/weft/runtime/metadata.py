"""What files are known by: where a stitched ONNX file names its models, and how programs of torch end."""

STITCHED_KEY = "weft.stitched"
"""The key in a file's metadata; its value is JSON."""
STITCHED_VERSION = 1
"""Of what stands there."""
FAMILY_KEY = "weft.family"
"""Where it says how its models share the weights that are in it; JSON, see ``weft.stitching.described``."""
BODY_KEY = "weft.body"
"""Where it says which steps its models are, of those with one body; JSON, see ``weft.stitching.bodies.described``."""
EXITS_KEY = "weft.exits"
"""Where a file may name its exits, shallow to deep, with commas between them."""
PROGRAM_SUFFIX = ".pt2"
"""Of what ``torch.export.save`` writes."""

"""What files are known by: where a stitched ONNX file names its models, and how programs of torch end."""

import re

STITCHED_KEY = "weft.stitched"
"""The key in a file's metadata; its value is JSON."""
STITCHED_VERSION = 1
"""Of what stands there."""
FAMILY_KEY = "weft.family"
"""Where it says how its models share the weights that are in it; JSON."""
BODY_KEY = "weft.body"
"""Where it says which steps its models are, of those with one body; JSON."""
EXITS_KEY = "weft.exits"
"""Where a file may name its exits, shallow to deep, with commas between them."""
PROGRAM_SUFFIX = ".pt2"
"""Of what ``torch.export.save`` writes."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def servable(name: str) -> bool:
    """Whether a model of that name can be asked for at a server: it is part of an address."""
    return _NAME.fullmatch(name) is not None and ".." not in name

"""``--stream MODEL:rate=10,deadline=250``: requests for a model on the command line, as bench and plan take them."""

from __future__ import annotations

from weft.cli.common import as_number, parse_shapes
from weft.errors import WorkloadError

LONGER = {"deadline": "deadline_ms", "think": "think_ms"}
"""Short names of a stream's keys on the command line."""
SHAPE = "shape"
"""The key that says what one input is sent, as shape=ids:1x128; it may be repeated."""


def parse_stream(text: str) -> dict[str, object]:
    """The keys of a stream, from MODEL:key=value,key=value."""
    model, _, rest = text.partition(":")
    if not model:
        raise WorkloadError(f"--stream {text!r} names no model; write MODEL{text if rest else ':rate=10'}")
    found: dict[str, object] = {"model": model}
    shapes: list[str] = []
    for part in rest.split(",") if rest else ():
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            raise WorkloadError(f"--stream {text!r} is not of the form MODEL:rate=10,deadline=250")
        if key == SHAPE:
            shapes.append(_shape(text, value))
        else:
            found[LONGER.get(key, key)] = as_number(value)
    return found | ({"shapes": parse_shapes(shapes, [model])[model]} if shapes else {})


def _shape(text: str, value: str) -> str:
    """A shape as ``--shape`` has it, from INPUT:1x128."""
    name, colon, dims = value.rpartition(":")
    if not colon or not name:
        raise WorkloadError(f"--stream {text!r}: shape={value} is not of the form shape=INPUT:1x128")
    return f"{name}={dims}"

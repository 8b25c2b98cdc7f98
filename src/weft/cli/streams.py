"""``--stream MODEL:rate=10,deadline=250``: requests for a model on the command line, as bench and plan take them."""

from __future__ import annotations

import re

from weft.cli.common import as_number, parse_shapes
from weft.errors import WorkloadError

LONGER = {"deadline": "deadline_ms", "think": "think_ms", "grain": "grain_ms"}
"""Short names of a stream's keys on the command line."""
LISTED = ("exits", "exit_rates")
"""Keys that take several values, with a + between them, as exit_rates=0.5+0.3+0.2."""
SHAPE, VALUE = "shape", "value"
"""Keys that say what one input is sent, as shape=ids:1x128 or value=sr:16000; they may be repeated."""


def parse_stream(text: str) -> dict[str, object]:
    """The keys of a stream, from MODEL:key=value,key=value."""
    model, _, rest = text.partition(":")
    if not model or re.match(r"\w+=", model):
        said = text.removeprefix(":") or "rate=10"
        raise WorkloadError(f"--stream {text!r} names no model; write MODEL:{said}")
    found: dict[str, object] = {"model": model}
    shapes: list[str] = []
    values: dict[str, object] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            raise WorkloadError(f"--stream {text!r} is not of the form MODEL:rate=10,deadline=250")
        if key == SHAPE:
            shapes.append("=".join(_of_input(text, key, value)))
        elif key == VALUE:
            name, held = _of_input(text, key, value)
            values[name] = as_number(held)
        elif key in LISTED and "+" in value:
            found[key] = [as_number(each.strip()) for each in value.split("+")]
        else:
            found[LONGER.get(key, key)] = as_number(value)
    found |= {"shapes": parse_shapes(shapes, [model])[model]} if shapes else {}
    return found | ({"values": values} if values else {})


def _of_input(text: str, key: str, value: str) -> tuple[str, str]:
    """The input and what is said of it, from INPUT:1x128."""
    name, colon, said = value.rpartition(":")
    if not colon or not name:
        raise WorkloadError(f"--stream {text!r}: {key}={value} is not of the form shape=INPUT:1x128, value=INPUT:1")
    return name, said

"""When two operations do the same but for their weights and widths: ``likeness``; and how they differ, in words."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from weft_stitch.net import Net, Op

COMMUTATIVE = ("add", "mul")
"""Kinds whose inputs may come in any order."""

_NOUNS = {
    "affine": "scale and shift per channel",
    "add": "addition",
    "mul": "multiplication",
    "concat": "concatenation",
    "max_pool": "max pool",
    "avg_pool": "average pool",
    "global_pool": "global average pool",
}


def likeness(net: Net, op: Op) -> Hashable:
    """Equal for operations that can be one layer: widths, weights and names do not count."""
    return tuple(_facets(net, op))


def difference(net: Net, op: Op, other_net: Net, other: Op) -> tuple[str, str]:
    """Each of two operations in words, up to the first thing in which they differ."""
    one, two = noun(op), noun(other)
    if one != two:
        return one, two
    pairs = zip(_facets(net, op), _facets(other_net, other), strict=False)
    for (label, mine), (_, theirs) in pairs:
        if mine != theirs:
            return f"{one} with {label} {_text(mine)}", f"one with {label} {_text(theirs)}"
    return one, two


def noun(op: Op) -> str:
    """What *op* is, with its article."""
    words = _NOUNS.get(op.kind) or op.function or op.kind
    if op.kind == "conv":
        words = "convolution"
        if op.depthwise:
            words = "depthwise convolution"
        elif op.groups > 1:
            words = f"convolution in {op.groups} groups"
    if op.kind == "island":
        words = f"foreign operator ({op.payload.signature})"
    if op.kind in ("conv", "max_pool", "avg_pool"):
        words = f"{op.window.kernel[0]}x{op.window.kernel[1]} {words}"
    return f"{'an' if words[0] in 'aeiouAEIOU8' else 'a'} {words}"


def _facets(net: Net, op: Op) -> Iterator[tuple[str, Hashable]]:
    yield "kind", op.kind
    yield "function", op.function
    yield "kernel", op.window.kernel
    yield "stride", op.window.strides
    yield "padding", op.window.pads
    yield "dilation", op.window.dilations
    yield "groups", _groups(op)
    yield "settings", tuple(sorted((name, float(number)) for name, number in op.settings.items()))
    yield "operator", op.payload.signature if op.kind == "island" else ""
    yield "input count", len(op.inputs)
    size = net.values[op.output]
    yield "a picture of", (size.height, size.width)
    if op.kind in COMMUTATIVE:
        yield "broadcasts of", tuple(sorted(_broadcast(net, op)))


def _groups(op: Op) -> Hashable:
    if op.depthwise and op.weight is not None:
        return "each channel", op.weight.shape[0] // op.groups
    return op.groups


def _broadcast(net: Net, op: Op) -> Iterator[tuple[bool, int, int]]:
    """Whether one channel of an operand is spread over all, and its picture; for each operand."""
    whole = net.values[op.output]
    for name in op.inputs:
        size = net.values[name]
        yield size.channels != whole.channels, size.height, size.width


def _text(facet: Hashable) -> str:
    if not isinstance(facet, tuple):
        return str(facet)
    if facet and isinstance(facet[0], tuple):
        return ", ".join(" ".join(map(str, each)) for each in facet)
    return " x ".join(map(str, facet)) if facet else "none"

"""Meanings of layer names and group names, in words, for pages; guessed from common naming conventions."""

from __future__ import annotations

import re

_ATTENTION = "attention: "
_PARTS = (
    (r"position_\w+|relative|shift", _ATTENTION + "how far apart positions are"),
    (r"qkv", _ATTENTION + "queries, keys and values in one matrix product"),
    (r"scores", _ATTENTION + "how much each position regards each other one, a product without weights"),
    (r"context", _ATTENTION + "the values, mixed by the scores, a product without weights"),
    (r"query|key|value|q_proj|k_proj|v_proj", _ATTENTION + "a matrix product that makes its queries, keys or values"),
    (r"o_proj|output", "a matrix product on the way out of a block"),
    (
        r"(ff|ffn|mlp)|expand|contract|up|down|intermediate",
        "feed-forward part: a matrix product to or from its inner size",
    ),
    (r"depthwise|dw\d*", "depthwise convolution: every channel by itself"),
    (r"downsample|shortcut", "convolution on the way around a block, to its size"),
    (r"reduce|project|expansion|squeeze", "1x1 convolution, to fewer or more channels"),
    (r"\w*?(\d+)x(\d+)\w*", r"convolution with a window of \1 by \2"),
    (r"conv\w*|tall|wide|row|column", "convolution"),
    (
        r"ip\d*|fc\w*|linear\w*|dense\w*|gemm\w*|classifier|head|logits|output_layer",
        "fully connected layer: a matrix product",
    ),
    (r"matmul\w*", "matrix product"),
    (r"\w*embed\w*|lookup|gather\w*|table\w*", "look-up in a table"),
    (r"lstm\w*|gru\w*|rnn\w*|cell", "recurrent layer: one step after the other"),
    (r"\w*pool\w*", "pooling: the largest or the mean of a window"),
    (r"softmax\w*", "softmax: shares that add up to one"),
    (r"\w*norm\d*|bn\w*|ln\w*", "normalisation"),
    (r"relu\w*|gelu\w*|sigmoid\w*|swish\w*|tanh\w*|act\w*", "activation, value by value"),
    (r"add\w*|sum\w*|bias|scale|mul\w*", "arithmetic, value by value"),
    (r"concat\w*|join|split|reshape\w*|transpose\w*|slice\w*|flatten\w*", "values moved, nothing computed"),
)
_PATTERNS = tuple((re.compile(pattern, re.IGNORECASE), meaning) for pattern, meaning in _PARTS)
_PIECE = re.compile(r"(.+)\[(\d+)/(\d+)\]")
_RANGE = re.compile(r"(.+?) ?\.\. ?(.+)")
_CUTS = re.compile(r"[./:]")
_NUMBER = re.compile(r"_?\d+$")


def layer_meaning(name: str) -> str:
    """Return a description of a layer, guessed from its name; empty if the name matches no convention."""
    if piece := _PIECE.fullmatch(name):
        meaning = _with_colon(layer_meaning(piece[1]))
        return f"part {piece[2]} of {piece[3]} of a layer larger than its share of the weight buffer{meaning}"
    if ends := _RANGE.fullmatch(name):
        return f"all layers from {ends[1]} to {ends[2]}"
    for part in reversed(_CUTS.split(name)):
        for pattern, meaning in _PATTERNS:
            if match := pattern.fullmatch(part) or pattern.fullmatch(_NUMBER.sub("", part)):
                return match.expand(meaning) if "\\" in meaning else meaning
    return ""


def group_meaning(name: str) -> str:
    """Return a description of a group of layers that run on one unit of a SoC, guessed from its name."""
    if numbers := re.fullmatch(r"(\d+)-(\d+)", name):
        return f"layers {numbers[1]} to {numbers[2]} of the network, counted from 0, on one unit"
    if number := re.fullmatch(r"g(\d+)", name):
        return f"group {number[1]}, counted from 0, of a profile that does not say which layers it holds"
    if ends := _RANGE.fullmatch(name):
        return f"the layers from {ends[1]} to {ends[2]}, one after the other on one unit"
    return "one layer" + _with_colon(layer_meaning(name))


def _with_colon(meaning: str) -> str:
    return f": {meaning}" if meaning else ""

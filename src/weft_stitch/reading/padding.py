"""Arithmetic of the zeros around pictures: what ``same`` padding is, and pools that round up put as others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft_stitch.net import Value, Window

Pads = tuple[int, int, int, int]
"""Top, left, bottom, right."""


def same_pads(
    kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], size: Value, *, upper: bool
) -> Pads:
    """The zeros that keep a picture's size (divided by the stride); an odd one goes to the end, or to the beginning."""
    begins, ends = [], []
    for k, s, d, length in zip(kernel, strides, dilations, (size.height, size.width), strict=True):
        total = max(0, (-(-length // s) - 1) * s + d * (k - 1) + 1 - length)
        small = total // 2
        begins.append(small if upper else total - small)
        ends.append(total - small if upper else small)
    return begins[0], begins[1], ends[0], ends[1]


def both(one: Pads, two: Pads) -> Pads:
    return one[0] + two[0], one[1] + two[1], one[2] + two[2], one[3] + two[3]


def rounded_up(window: Window, size: Value) -> Window:
    """*window* with so much more padding at the end that rounding down gives what rounding up gave.

    A last window that would begin in the padding is left out, as onnxruntime and torch do.
    """
    ends = []
    for axis, length in enumerate((size.height, size.width)):
        begin, end, stride = window.pads[axis], window.pads[axis + 2], window.strides[axis]
        span = window.dilations[axis] * (window.kernel[axis] - 1) + 1
        count = -(-(length + begin + end - span) // stride) + 1
        if (count - 1) * stride >= length + begin:
            count -= 1
        ends.append(max(end, (count - 1) * stride + span - length - begin))
    return replace(window, pads=(window.pads[0], window.pads[1], ends[0], ends[1]))

"""Tuned models as if they rounded nothing on their way: ``without_rounding``.

Two graphs that compute the same sums in another order differ in the last digit; where values are then rounded to a few
bits, one in a million tips to the other side. Whether a stitched graph is right can thus be told without the rounding.
"""

from __future__ import annotations

from dataclasses import replace

from weft_stitch.family import Family, FamilyLayer
from weft_stitch.net import ROUNDING, Net, Op


def without_rounding(family: Family) -> Family:
    """*family* with nothing in the place of what rounds."""
    return replace(
        family,
        nets=tuple(map(plain_net, family.nets)),
        layers=tuple(FamilyLayer(tuple(map(_plain, layer.ops)), layer.inputs, layer.output) for layer in family.layers),
        tails=tuple(tuple(map(_plain, tail)) for tail in family.tails),
    )


def plain_net(net: Net) -> Net:
    return replace(net, ops=tuple(map(_plain, net.ops)))


def _plain(op: Op) -> Op:
    return replace(op, function="Identity", payload=None) if op.function == ROUNDING else op

"""Residual image networks: ResNet of any published depth, ResNeXt, and a segmenter on top of one."""

from __future__ import annotations

import numpy as np

from weft.models.zoo.graph import NOTHING, GraphBuilder, GraphValue

BASIC = {18: (2, 2, 2, 2)}
BOTTLENECKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks of each stage by depth (He et al. 2016, table 1)."""


def resnet(
    g: GraphBuilder, *, depth: int, resolution: int, classes: int, groups: int = 1, group_width: int = 64
) -> None:
    """ResNet v1.5 (stride in the 3x3) with bottlenecks, and with several groups ResNeXt (Xie et al. 2017)."""
    x = _stem(g, resolution)
    for stage, blocks in enumerate(BOTTLENECKS[depth]):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            inner, out = groups * group_width << stage, 256 << stage
            x = _bottleneck(g, x, f"layer{stage + 1}.{block}", inner, out, stride, groups)
    g.classifier(x, "fc", classes)


def resnet18(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """ResNet-18: two 3x3 convolutions in a block."""
    g.classifier(_basic(g, resolution, 18), "fc", classes)


def fcn_resnet18(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """A fully convolutional segmenter (Long et al. 2015) on ResNet-18: a class for every pixel.

    The head is that of torchvision's FCN: a quarter of the channels, then the classes, scaled up to the image.
    """
    x = _basic(g, resolution, 18)
    x = g.conv_bn(x, "head.conv", x.width // 4, 3)
    x = g.conv(x, "head.classes", classes, activation="none")
    sides = g.constant("sides", (resolution, resolution), np.int64)
    y = g.node("Resize", "upsample", x, NOTHING, NOTHING, sides, mode="linear", axes=(2, 3))
    g.output(y, "scores", classes, resolution, resolution)


def _stem(g: GraphBuilder, resolution: int) -> GraphValue:
    x = g.conv_bn(g.image(resolution, at_least=32), "conv1", 64, 7, stride=2)
    return g.pool("MaxPool", x, "maxpool", 3, stride=2, pad=1)


def _basic(g: GraphBuilder, resolution: int, depth: int) -> GraphValue:
    """All of a ResNet of basic blocks but its classifier."""
    x = _stem(g, resolution)
    for stage, blocks in enumerate(BASIC[depth]):
        for block in range(blocks):
            x = _basic_block(g, x, f"layer{stage + 1}.{block}", 64 << stage, 2 if stage > 0 and block == 0 else 1)
    return x


def _basic_block(g: GraphBuilder, x: GraphValue, name: str, out: int, stride: int) -> GraphValue:
    y = g.conv_bn(x, f"{name}.conv1", out, 3, stride=stride)
    y = g.conv_bn(y, f"{name}.conv2", out, 3, activation="none")
    return _added(g, x, y, name, stride)


def _bottleneck(
    g: GraphBuilder, x: GraphValue, name: str, inner: int, out: int, stride: int, groups: int
) -> GraphValue:
    y = g.conv_bn(x, f"{name}.conv1", inner)
    y = g.conv_bn(y, f"{name}.conv2", inner, 3, stride=stride, groups=groups)
    y = g.conv_bn(y, f"{name}.conv3", out, activation="none")
    return _added(g, x, y, name, stride)


def _added(g: GraphBuilder, x: GraphValue, y: GraphValue, name: str, stride: int) -> GraphValue:
    if stride > 1 or x.width != y.width:
        x = g.conv_bn(x, f"{name}.downsample", y.width, stride=stride, activation="none")
    return g.node("Relu", f"{name}.relu", g.node("Add", f"{name}.add", y, x))

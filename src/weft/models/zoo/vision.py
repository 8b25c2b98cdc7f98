"""Image classifiers of plain, depthwise, densely connected and residual blocks, and a segmenter.

*resolution*: the side of the input image in pixels; *classes*: the number of logits; *depth*: the number in a name.
"""

from __future__ import annotations

import numpy as np

from weft.models.zoo.graph import NOTHING, GraphBuilder, GraphValue


def alexnet(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """AlexNet in one column (Krizhevsky 2014, arXiv:1404.5997): no groups, no normalisation."""
    x = g.conv(g.image(resolution, at_least=63), "conv1", 64, 11, stride=4, pad=2)
    x = g.pool("MaxPool", x, "pool1", 3, stride=2)
    x = g.pool("MaxPool", g.conv(x, "conv2", 192, 5), "pool2", 3, stride=2)
    for number, out in ((3, 384), (4, 256), (5, 256)):
        x = g.conv(x, f"conv{number}", out, 3)
    x = g.pool("MaxPool", x, "pool5", 3, stride=2)
    # conv1 leaves (resolution + 2 * 2 - 11) // 4 + 1 pixels a side; three pools follow
    side = _pooled_side(_pooled_side(_pooled_side((resolution - 7) // 4 + 1)))
    _three_dense(g, x, ("fc6", "fc7", "fc8"), side, classes)


def caffenet(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """CaffeNet: the AlexNet of 2012 with its two columns as groups, pooled before it is normalised."""
    x = g.conv(g.image(resolution, at_least=67), "conv1", 96, 11, stride=4, pad=0)
    x = g.local_norm(g.pool("MaxPool", x, "pool1", 3, stride=2), "norm1")
    x = g.conv(x, "conv2", 256, 5, groups=2)
    x = g.local_norm(g.pool("MaxPool", x, "pool2", 3, stride=2), "norm2")
    x = g.conv(x, "conv3", 384, 3)
    x = g.conv(x, "conv4", 384, 3, groups=2)
    x = g.conv(x, "conv5", 256, 3, groups=2)
    x = g.pool("MaxPool", x, "pool5", 3, stride=2)
    side = _pooled_side(_pooled_side(_pooled_side((resolution - 11) // 4 + 1)))  # after conv1 and three pools
    _three_dense(g, x, ("fc6", "fc7", "fc8"), side, classes)


VGG_STAGES = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions of each stage (Simonyan and Zisserman 2015, table 1, columns D and E)."""


def vgg(g: GraphBuilder, *, depth: int, resolution: int, classes: int) -> None:
    """VGG: 3x3 convolutions; each of the first pools doubles the channels."""
    x = g.image(resolution, at_least=32)
    for stage, count in enumerate(VGG_STAGES[depth], start=1):
        for number in range(1, count + 1):
            x = g.conv(x, f"conv{stage}_{number}", min(512, 32 << stage), 3)
        x = g.pool("MaxPool", x, f"pool{stage}", 2, stride=2)
    _three_dense(g, x, ("fc6", "fc7", "fc8"), resolution // 32, classes)  # five pools halve the side


def _pooled_side(side: int) -> int:
    """The side of an image after a 3x3 pool of stride 2."""
    return (side - 3) // 2 + 1


def _three_dense(g: GraphBuilder, x: GraphValue, names: tuple[str, str, str], side: int, classes: int) -> None:
    """The classifier of AlexNet and VGG: three fully connected layers; *side*: of the image before, in pixels."""
    x = g.node("Flatten", "flatten", x, width=x.width * side * side, axis=1)
    for name in names[:2]:
        x = g.activation(g.dense(x, name, 4096), name, "relu")
    g.output(g.dense(x, names[2], classes), "logits", classes)


MOBILENET_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, channels, blocks and first stride of each stage (Sandler et al. 2018, table 2)."""


def mobilenet_v2(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """MobileNetV2 at width 1.0."""
    x = g.conv_bn(g.image(resolution, at_least=32), "stem", 32, 3, stride=2, activation="relu6")
    number = 0
    for expansion, out, blocks, first_stride in MOBILENET_STAGES:
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            x = _inverted_residual(g, x, f"block{number}", expansion, out, stride)
            number += 1
    g.classifier(g.conv_bn(x, "head", 1280, activation="relu6"), "fc", classes)


def _inverted_residual(g: GraphBuilder, x: GraphValue, name: str, expansion: int, out: int, stride: int) -> GraphValue:
    """A block of MobileNetV2: *expansion* times the channels, a depthwise convolution, and *out* channels."""
    inner = x.width * expansion
    y = g.conv_bn(x, f"{name}.expand", inner, activation="relu6") if expansion > 1 else x
    y = g.conv_bn(y, f"{name}.depthwise", inner, 3, stride=stride, groups=inner, activation="relu6")
    y = g.conv_bn(y, f"{name}.project", out, activation="none")
    return g.node("Add", f"{name}.add", y, x) if stride == 1 and x.width == out else y


DENSENET_BLOCKS, GROWTH = (6, 12, 24, 16), 32
"""Layers of each block, and the channels that each layer adds (DenseNet-121, Huang et al. 2017, table 1)."""


def densenet121(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """DenseNet-121 with bottlenecks and compression (DenseNet-BC): every layer reads all earlier ones of its block."""
    x = g.conv_bn(g.image(resolution, at_least=32), "conv0", 2 * GROWTH, 7, stride=2)
    x = g.pool("MaxPool", x, "pool0", 3, stride=2, pad=1)
    for block, count in enumerate(DENSENET_BLOCKS, start=1):
        for number in range(1, count + 1):
            x = _dense_layer(g, x, f"block{block}.layer{number}")
        if block < len(DENSENET_BLOCKS):
            x = _plain_conv(g, g.norm_relu(x, f"transition{block}.norm"), f"transition{block}.conv", x.width // 2, 1)
            x = g.pool("AveragePool", x, f"transition{block}.pool", 2, stride=2)
    g.classifier(g.norm_relu(x, "norm5"), "fc", classes)


def _dense_layer(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    """A layer of DenseNet, which appends ``GROWTH`` channels to *x*."""
    y = g.conv_bn(g.norm_relu(x, f"{name}.norm1"), f"{name}.conv1", 4 * GROWTH)
    y = _plain_conv(g, y, f"{name}.conv2", GROWTH, 3)
    return g.node("Concat", f"{name}.concat", x, y, width=x.width + GROWTH, axis=1)


def _plain_conv(g: GraphBuilder, x: GraphValue, name: str, out: int, kernel: int) -> GraphValue:
    """A convolution without bias, norm and activation."""
    return g.conv(x, name, out, kernel, bias=False, activation="none")


BASIC = {18: (2, 2, 2, 2)}
BOTTLENECKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Depth -> basic or bottleneck blocks of each stage (He et al. 2016, table 1)."""


def resnet(
    g: GraphBuilder, *, depth: int, resolution: int, classes: int, groups: int = 1, group_width: int = 64
) -> None:
    """ResNet v1.5 (stride in the 3x3 convolution) with bottlenecks; with several groups, ResNeXt (Xie et al. 2017)."""
    x = _stem(g, resolution)
    for stage, blocks in enumerate(BOTTLENECKS[depth]):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            inner, out = groups * group_width << stage, 256 << stage
            x = _bottleneck(g, x, f"layer{stage + 1}.{block}", inner, out, stride, groups)
    g.classifier(x, "fc", classes)


def resnet18(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """ResNet-18: two 3x3 convolutions in a block."""
    g.classifier(_basic_features(g, resolution, 18), "fc", classes)


def fcn_resnet18(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """A fully convolutional segmenter (Long et al. 2015) on ResNet-18, which classifies every pixel.

    The head is that of torchvision's FCN: a convolution to a quarter of the channels, one to the classes, and a resize
    to the size of the image.
    """
    x = _basic_features(g, resolution, 18)
    x = g.conv_bn(x, "head.conv", x.width // 4, 3)
    x = g.conv(x, "head.classes", classes, activation="none")
    sides = g.constant("sides", (resolution, resolution), np.int64)
    y = g.node("Resize", "upsample", x, NOTHING, NOTHING, sides, mode="linear", axes=(2, 3))
    g.output(y, "scores", classes, resolution, resolution)


def _stem(g: GraphBuilder, resolution: int) -> GraphValue:
    """The layers of a ResNet before its first block."""
    x = g.conv_bn(g.image(resolution, at_least=32), "conv1", 64, 7, stride=2)
    return g.pool("MaxPool", x, "maxpool", 3, stride=2, pad=1)


def _basic_features(g: GraphBuilder, resolution: int, depth: int) -> GraphValue:
    """The features of a ResNet of basic blocks, before its classifier."""
    x = _stem(g, resolution)
    for stage, blocks in enumerate(BASIC[depth]):
        for block in range(blocks):
            x = _basic_block(g, x, f"layer{stage + 1}.{block}", 64 << stage, 2 if stage > 0 and block == 0 else 1)
    return x


def _basic_block(g: GraphBuilder, x: GraphValue, name: str, out: int, stride: int) -> GraphValue:
    """Two 3x3 convolutions with *out* channels, added to a shortcut from the input."""
    y = g.conv_bn(x, f"{name}.conv1", out, 3, stride=stride)
    y = g.conv_bn(y, f"{name}.conv2", out, 3, activation="none")
    return _add_shortcut(g, x, y, name, stride)


def _bottleneck(
    g: GraphBuilder, x: GraphValue, name: str, inner: int, out: int, stride: int, groups: int
) -> GraphValue:
    """A 1x1, a 3x3 and a 1x1 convolution with *inner*, *inner* and *out* channels, and a shortcut."""
    y = g.conv_bn(x, f"{name}.conv1", inner)
    y = g.conv_bn(y, f"{name}.conv2", inner, 3, stride=stride, groups=groups)
    y = g.conv_bn(y, f"{name}.conv3", out, activation="none")
    return _add_shortcut(g, x, y, name, stride)


def _add_shortcut(g: GraphBuilder, x: GraphValue, y: GraphValue, name: str, stride: int) -> GraphValue:
    """The relu of *x* + *y*; *x* passes a 1x1 convolution if its shape differs."""
    if stride > 1 or x.width != y.width:
        x = g.conv_bn(x, f"{name}.downsample", y.width, stride=stride, activation="none")
    return g.node("Relu", f"{name}.relu", g.node("Add", f"{name}.add", y, x))

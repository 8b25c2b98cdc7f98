"""Image classifiers: three-channel square images in, one logit for each class out."""

from __future__ import annotations

from weft.errors import ModelError
from weft.models.zoo.graph import Graph, Pair, Value


def resnet50(g: Graph, *, groups: int, group_width: int, resolution: int, classes: int) -> None:
    """ResNet-50 v1.5 (stride in the 3x3), and with several groups ResNeXt-50 (Xie et al. 2017)."""
    _at_least(g, resolution, 32)
    x = g.conv_bn(g.image(resolution), "conv1", 64, 7, stride=2)
    x = g.pool("MaxPool", x, "maxpool", 3, stride=2, pad=1)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            inner, out = groups * group_width << stage, 256 << stage
            x = _bottleneck(g, x, f"layer{stage + 1}.{block}", inner, out, stride, groups)
    g.classifier(x, "fc", classes)


def _bottleneck(g: Graph, x: Value, name: str, inner: int, out: int, stride: int, groups: int) -> Value:
    y = g.conv_bn(x, f"{name}.conv1", inner)
    y = g.conv_bn(y, f"{name}.conv2", inner, 3, stride=stride, groups=groups)
    y = g.conv_bn(y, f"{name}.conv3", out, activation="none")
    if stride > 1 or x.width != out:
        x = g.conv_bn(x, f"{name}.downsample", out, stride=stride, activation="none")
    return g.node("Relu", f"{name}.relu", g.node("Add", f"{name}.add", y, x))


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


def mobilenet_v2(g: Graph, *, resolution: int, classes: int) -> None:
    """MobileNetV2 at width 1.0."""
    _at_least(g, resolution, 32)
    x = g.conv_bn(g.image(resolution), "stem", 32, 3, stride=2, activation="relu6")
    number = 0
    for expansion, out, blocks, first_stride in MOBILENET_STAGES:
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            x = _inverted_residual(g, x, f"block{number}", expansion, out, stride)
            number += 1
    g.classifier(g.conv_bn(x, "head", 1280, activation="relu6"), "fc", classes)


def _inverted_residual(g: Graph, x: Value, name: str, expansion: int, out: int, stride: int) -> Value:
    inner = x.width * expansion
    y = g.conv_bn(x, f"{name}.expand", inner, activation="relu6") if expansion > 1 else x
    y = g.conv_bn(y, f"{name}.depthwise", inner, 3, stride=stride, groups=inner, activation="relu6")
    y = g.conv_bn(y, f"{name}.project", out, activation="none")
    return g.node("Add", f"{name}.add", y, x) if stride == 1 and x.width == out else y


def inception_v3(g: Graph, *, resolution: int, classes: int) -> None:
    """Inception-v3 (Szegedy et al. 2016) without the auxiliary head, which only training uses."""
    _at_least(g, resolution, 75)
    x = g.conv_bn(g.image(resolution), "conv1a", 32, 3, stride=2, pad=0)
    x = g.conv_bn(x, "conv2a", 32, 3, pad=0)
    x = g.conv_bn(x, "conv2b", 64, 3)
    x = g.pool("MaxPool", x, "maxpool1", 3, stride=2)
    x = g.conv_bn(x, "conv3b", 80)
    x = g.conv_bn(x, "conv4a", 192, 3, pad=0)
    x = g.pool("MaxPool", x, "maxpool2", 3, stride=2)
    for name, pool_width in (("mixed5b", 32), ("mixed5c", 64), ("mixed5d", 64)):
        x = _inception_a(g, x, name, pool_width)
    x = _reduction_a(g, x, "mixed6a")
    for name, inner in (("mixed6b", 128), ("mixed6c", 160), ("mixed6d", 160), ("mixed6e", 192)):
        x = _inception_b(g, x, name, inner)
    x = _reduction_b(g, x, "mixed7a")
    for name in ("mixed7b", "mixed7c"):
        x = _inception_c(g, x, name)
    g.classifier(x, "fc", classes)


ROW, COLUMN = (1, 7), (7, 1)


def _inception_a(g: Graph, x: Value, name: str, pool_width: int) -> Value:
    return _concat(
        g,
        name,
        _chain(g, x, f"{name}.branch1x1", (64, 1)),
        _chain(g, x, f"{name}.branch5x5", (48, 1), (64, 5)),
        _chain(g, x, f"{name}.branch3x3", (64, 1), (96, 3), (96, 3)),
        _pooled(g, x, name, pool_width),
    )


def _reduction_a(g: Graph, x: Value, name: str) -> Value:
    return _concat(
        g,
        name,
        _chain(g, x, f"{name}.branch3x3", (384, 3), last_stride=2),
        _chain(g, x, f"{name}.branch3x3x2", (64, 1), (96, 3), (96, 3), last_stride=2),
        g.pool("MaxPool", x, f"{name}.maxpool", 3, stride=2),
    )


def _inception_b(g: Graph, x: Value, name: str, inner: int) -> Value:
    twice = ((inner, 1), (inner, COLUMN), (inner, ROW), (inner, COLUMN), (192, ROW))
    return _concat(
        g,
        name,
        _chain(g, x, f"{name}.branch1x1", (192, 1)),
        _chain(g, x, f"{name}.branch7x7", (inner, 1), (inner, ROW), (192, COLUMN)),
        _chain(g, x, f"{name}.branch7x7x2", *twice),
        _pooled(g, x, name, 192),
    )


def _reduction_b(g: Graph, x: Value, name: str) -> Value:
    return _concat(
        g,
        name,
        _chain(g, x, f"{name}.branch3x3", (192, 1), (320, 3), last_stride=2),
        _chain(g, x, f"{name}.branch7x7x3", (192, 1), (192, ROW), (192, COLUMN), (192, 3), last_stride=2),
        g.pool("MaxPool", x, f"{name}.maxpool", 3, stride=2),
    )


def _inception_c(g: Graph, x: Value, name: str) -> Value:
    return _concat(
        g,
        name,
        _chain(g, x, f"{name}.branch1x1", (320, 1)),
        *_fork(g, _chain(g, x, f"{name}.branch3x3", (384, 1)), f"{name}.branch3x3"),
        *_fork(g, _chain(g, x, f"{name}.branch3x3x2", (448, 1), (384, 3)), f"{name}.branch3x3x2"),
        _pooled(g, x, name, 192),
    )


def _fork(g: Graph, x: Value, name: str) -> tuple[Value, Value]:
    """A 3x3 convolution spread as its row and its column, side by side."""
    return g.conv_bn(x, f"{name}.row", 384, (1, 3)), g.conv_bn(x, f"{name}.column", 384, (3, 1))


def _chain(g: Graph, x: Value, name: str, *steps: tuple[int, Pair], last_stride: int = 1) -> Value:
    """Convolutions (channels, kernel) in a row; one with a stride has no padding."""
    for number, (out, kernel) in enumerate(steps, start=1):
        strided = number == len(steps) and last_stride > 1
        stride, pad = (last_stride, 0) if strided else (1, None)
        x = g.conv_bn(x, f"{name}.conv{number}", out, kernel, stride=stride, pad=pad)
    return x


def _pooled(g: Graph, x: Value, name: str, out: int) -> Value:
    return g.conv_bn(g.pool("AveragePool", x, f"{name}.avgpool", 3, stride=1, pad=1), f"{name}.pool", out)


def _concat(g: Graph, name: str, *branches: Value) -> Value:
    return g.node("Concat", f"{name}.concat", *branches, width=sum(b.width for b in branches), axis=1)


def _at_least(g: Graph, resolution: int, least: int) -> None:
    if resolution < least:
        raise ModelError(f"{g.name}: resolution must be at least {least}, got {resolution}")

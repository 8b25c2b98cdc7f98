"""Image classifiers of parallel branches: GoogLeNet and Inception-v3, and the pieces all of the family share."""

from __future__ import annotations

from weft.models.zoo.graph import GraphBuilder, GraphValue, Pair

ROW, COLUMN = (1, 7), (7, 1)

GOOGLENET_STAGES = (
    ("3a", 64, 96, 128, 16, 32, 32),
    ("3b", 128, 128, 192, 32, 96, 64),
    ("4a", 192, 96, 208, 16, 48, 64),
    ("4b", 160, 112, 224, 24, 64, 64),
    ("4c", 128, 128, 256, 24, 64, 64),
    ("4d", 112, 144, 288, 32, 64, 64),
    ("4e", 256, 160, 320, 32, 128, 128),
    ("5a", 256, 160, 320, 32, 128, 128),
    ("5b", 384, 192, 384, 48, 128, 128),
)
"""Channels of the 1x1, of the 3x3 and what feeds it, of the 5x5 and what feeds it, and behind the pool."""


def googlenet(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """GoogLeNet (Szegedy et al. 2015, table 1) without the auxiliary heads, which only training uses."""
    x = g.conv(g.image(resolution, at_least=32), "conv1", 64, 7, stride=2)
    x = g.local_norm(_caffe_pool(g, x, "pool1"), "norm1")
    x = g.conv(g.conv(x, "conv2.reduce", 64), "conv2", 192, 3)
    x = _caffe_pool(g, g.local_norm(x, "norm2"), "pool2")
    for name, *widths in GOOGLENET_STAGES:
        x = _first_inception(g, x, f"inception{name}", *widths)
        if name in ("3b", "4e"):
            x = _caffe_pool(g, x, f"pool{name[0]}")
    g.classifier(x, "fc", classes)


def _first_inception(g: GraphBuilder, x: GraphValue, name: str, *widths: int) -> GraphValue:
    one, to_three, three, to_five, five, behind_pool = widths
    branches = (
        g.conv(x, f"{name}.1x1", one),
        g.conv(g.conv(x, f"{name}.3x3.reduce", to_three), f"{name}.3x3", three, 3),
        g.conv(g.conv(x, f"{name}.5x5.reduce", to_five), f"{name}.5x5", five, 5),
        g.conv(g.pool("MaxPool", x, f"{name}.pool", 3, stride=1, pad=1), f"{name}.pool.project", behind_pool),
    )
    return concat(g, name, *branches)


def _caffe_pool(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    return g.pool("MaxPool", x, name, 3, stride=2, partial=True)


def inception_v3(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """Inception-v3 (Szegedy et al. 2016) without the auxiliary head, which only training uses."""
    x = g.conv_bn(g.image(resolution, at_least=75), "conv1a", 32, 3, stride=2, pad=0)
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


def _inception_a(g: GraphBuilder, x: GraphValue, name: str, pool_width: int) -> GraphValue:
    return concat(
        g,
        name,
        chain(g, x, f"{name}.branch1x1", (64, 1)),
        chain(g, x, f"{name}.branch5x5", (48, 1), (64, 5)),
        chain(g, x, f"{name}.branch3x3", (64, 1), (96, 3), (96, 3)),
        pooled(g, x, name, pool_width),
    )


def _reduction_a(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    return concat(
        g,
        name,
        chain(g, x, f"{name}.branch3x3", (384, 3), last_stride=2),
        chain(g, x, f"{name}.branch3x3x2", (64, 1), (96, 3), (96, 3), last_stride=2),
        shrunk(g, x, name),
    )


def _inception_b(g: GraphBuilder, x: GraphValue, name: str, inner: int) -> GraphValue:
    twice = ((inner, 1), (inner, COLUMN), (inner, ROW), (inner, COLUMN), (192, ROW))
    return concat(
        g,
        name,
        chain(g, x, f"{name}.branch1x1", (192, 1)),
        chain(g, x, f"{name}.branch7x7", (inner, 1), (inner, ROW), (192, COLUMN)),
        chain(g, x, f"{name}.branch7x7x2", *twice),
        pooled(g, x, name, 192),
    )


def _reduction_b(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    return concat(
        g,
        name,
        chain(g, x, f"{name}.branch3x3", (192, 1), (320, 3), last_stride=2),
        chain(g, x, f"{name}.branch7x7x3", (192, 1), (192, ROW), (192, COLUMN), (192, 3), last_stride=2),
        shrunk(g, x, name),
    )


def _inception_c(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    return concat(
        g,
        name,
        chain(g, x, f"{name}.branch1x1", (320, 1)),
        *fork(g, chain(g, x, f"{name}.branch3x3", (384, 1)), f"{name}.branch3x3", 384),
        *fork(g, chain(g, x, f"{name}.branch3x3x2", (448, 1), (384, 3)), f"{name}.branch3x3x2", 384),
        pooled(g, x, name, 192),
    )


def fork(g: GraphBuilder, x: GraphValue, name: str, out: int) -> tuple[GraphValue, GraphValue]:
    """A 3x3 convolution spread as its row and its column, side by side."""
    return g.conv_bn(x, f"{name}.row", out, (1, 3)), g.conv_bn(x, f"{name}.column", out, (3, 1))


def chain(g: GraphBuilder, x: GraphValue, name: str, *steps: tuple[int, Pair], last_stride: int = 1) -> GraphValue:
    """Convolutions (channels, kernel) in a row; one with a stride has no padding."""
    for number, (out, kernel) in enumerate(steps, start=1):
        strided = number == len(steps) and last_stride > 1
        stride, pad = (last_stride, 0) if strided else (1, None)
        x = g.conv_bn(x, f"{name}.conv{number}", out, kernel, stride=stride, pad=pad)
    return x


def pooled(g: GraphBuilder, x: GraphValue, name: str, out: int) -> GraphValue:
    return g.conv_bn(g.pool("AveragePool", x, f"{name}.avgpool", 3, stride=1, pad=1), f"{name}.pool", out)


def shrunk(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    return g.pool("MaxPool", x, f"{name}.maxpool", 3, stride=2)


def concat(g: GraphBuilder, name: str, *branches: GraphValue) -> GraphValue:
    return g.node("Concat", f"{name}.concat", *branches, width=sum(b.width for b in branches), axis=1)

"""Inception-v4 and Inception-ResNet-v2 (Szegedy et al. 2017), figure by figure."""

from __future__ import annotations

from weft.models.zoo.graph import GraphBuilder, GraphValue
from weft.models.zoo.inception import (
    COLUMN,
    ROW,
    chain,
    concat,
    fork,
    pooled,
    shrunk,
)


def inception_v4(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """Inception-v4, as figure 9 draws it."""
    x = _stem(g, g.image(resolution, at_least=75))
    for number in range(1, 5):
        x = _block_a(g, x, f"inception_a{number}")
    x = _reduction_a(g, x, "reduction_a", (384, 192, 224, 256))
    for number in range(1, 8):
        x = _block_b(g, x, f"inception_b{number}")
    x = _reduction_b(g, x, "reduction_b")
    for number in range(1, 4):
        x = _block_c(g, x, f"inception_c{number}")
    g.classifier(x, "fc", classes)


def _stem(g: GraphBuilder, x: GraphValue) -> GraphValue:
    """The stem of figure 3."""
    x = g.conv_bn(x, "conv1", 32, 3, stride=2, pad=0)
    x = g.conv_bn(g.conv_bn(x, "conv2", 32, 3, pad=0), "conv3", 64, 3)
    x = concat(g, "stem1", shrunk(g, x, "stem1"), chain(g, x, "stem1", (96, 3), last_stride=2))
    short = g.conv_bn(chain(g, x, "stem2.short", (64, 1)), "stem2.short.last", 96, 3, pad=0)
    long = g.conv_bn(chain(g, x, "stem2.long", (64, 1), (64, COLUMN), (64, ROW)), "stem2.long.last", 96, 3, pad=0)
    x = concat(g, "stem2", short, long)
    return concat(g, "stem3", chain(g, x, "stem3", (192, 3), last_stride=2), shrunk(g, x, "stem3"))


def _block_a(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    """The block of figure 4."""
    return concat(
        g,
        name,
        chain(g, x, f"{name}.1x1", (96, 1)),
        chain(g, x, f"{name}.3x3", (64, 1), (96, 3)),
        chain(g, x, f"{name}.3x3x2", (64, 1), (96, 3), (96, 3)),
        pooled(g, x, name, 96),
    )


def _block_b(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    """The block of figure 5."""
    return concat(
        g,
        name,
        chain(g, x, f"{name}.1x1", (384, 1)),
        chain(g, x, f"{name}.7x7", (192, 1), (224, ROW), (256, COLUMN)),
        chain(g, x, f"{name}.7x7x2", (192, 1), (192, COLUMN), (224, ROW), (224, COLUMN), (256, ROW)),
        pooled(g, x, name, 128),
    )


def _block_c(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    """The block of figure 6."""
    return concat(
        g,
        name,
        chain(g, x, f"{name}.1x1", (256, 1)),
        *fork(g, chain(g, x, f"{name}.3x3", (384, 1)), f"{name}.3x3", 256),
        *fork(g, chain(g, x, f"{name}.3x3x2", (384, 1), (448, (3, 1)), (512, (1, 3))), f"{name}.3x3x2", 256),
        pooled(g, x, name, 256),
    )


def _reduction_a(g: GraphBuilder, x: GraphValue, name: str, widths: tuple[int, int, int, int]) -> GraphValue:
    """Figure 7; *widths* by table 1: n, then k, l, m."""
    n, k, l, m = widths  # noqa: E741 - the letters of the paper's table
    return concat(
        g,
        name,
        chain(g, x, f"{name}.3x3", (n, 3), last_stride=2),
        chain(g, x, f"{name}.3x3x2", (k, 1), (l, 3), (m, 3), last_stride=2),
        shrunk(g, x, name),
    )


def _reduction_b(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    """The reduction of figure 8."""
    return concat(
        g,
        name,
        chain(g, x, f"{name}.3x3", (192, 1), (192, 3), last_stride=2),
        chain(g, x, f"{name}.7x7", (256, 1), (256, ROW), (320, COLUMN), (320, 3), last_stride=2),
        shrunk(g, x, name),
    )


def inception_resnet_v2(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """Inception-ResNet-v2 as its authors released it: the stem of Inception-v3 before one plain inception block."""
    x = g.conv_bn(g.image(resolution, at_least=75), "conv1a", 32, 3, stride=2, pad=0)
    x = g.conv_bn(g.conv_bn(x, "conv2a", 32, 3, pad=0), "conv2b", 64, 3)
    x = g.conv_bn(shrunk(g, x, "stem1"), "conv3b", 80)
    x = shrunk(g, g.conv_bn(x, "conv4a", 192, 3, pad=0), "stem2")
    x = _mixed_5b(g, x, "mixed5b")
    for number in range(1, 11):
        x = _block_35(g, x, f"block35_{number}")
    x = _reduction_a(g, x, "mixed6a", (384, 256, 256, 384))
    for number in range(1, 21):
        x = _block_17(g, x, f"block17_{number}")
    x = _mixed_7a(g, x, "mixed7a")
    for number in range(1, 11):
        x = _block_8(g, x, f"block8_{number}", last=number == 10)
    g.classifier(g.conv_bn(x, "conv7b", 1536), "fc", classes)


def _mixed_5b(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    return concat(
        g,
        name,
        chain(g, x, f"{name}.1x1", (96, 1)),
        chain(g, x, f"{name}.5x5", (48, 1), (64, 5)),
        chain(g, x, f"{name}.3x3", (64, 1), (96, 3), (96, 3)),
        pooled(g, x, name, 64),
    )


def _mixed_7a(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    return concat(
        g,
        name,
        chain(g, x, f"{name}.3x3a", (256, 1), (384, 3), last_stride=2),
        chain(g, x, f"{name}.3x3b", (256, 1), (288, 3), last_stride=2),
        chain(g, x, f"{name}.3x3x2", (256, 1), (288, 3), (320, 3), last_stride=2),
        shrunk(g, x, name),
    )


def _block_35(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    branches = (
        chain(g, x, f"{name}.1x1", (32, 1)),
        chain(g, x, f"{name}.3x3", (32, 1), (32, 3)),
        chain(g, x, f"{name}.3x3x2", (32, 1), (48, 3), (64, 3)),
    )
    return _residual(g, x, concat(g, name, *branches), name, 0.17)


def _block_17(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    branches = chain(g, x, f"{name}.1x1", (192, 1)), chain(g, x, f"{name}.7x7", (128, 1), (160, ROW), (192, COLUMN))
    return _residual(g, x, concat(g, name, *branches), name, 0.1)


def _block_8(g: GraphBuilder, x: GraphValue, name: str, *, last: bool) -> GraphValue:
    branches = chain(g, x, f"{name}.1x1", (192, 1)), chain(g, x, f"{name}.3x3", (192, 1), (224, (1, 3)), (256, (3, 1)))
    return _residual(
        g, x, concat(g, name, *branches), name, 1.0 if last else 0.2, activation="none" if last else "relu"
    )


def _residual(
    g: GraphBuilder, x: GraphValue, inner: GraphValue, name: str, scale: float, activation: str = "relu"
) -> GraphValue:
    """The branches back to the width of *x*, scaled down (section 3.3), and added to it."""
    up = g.conv(inner, f"{name}.up", x.width, activation="none")
    if scale != 1:
        up = g.node("Mul", f"{name}.scale", up, g.constant(f"scale_{scale}", scale))
    return g.activation(g.node("Add", f"{name}.add", up, x), name, activation)

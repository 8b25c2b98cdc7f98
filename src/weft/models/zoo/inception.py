"""The Inception family, figure by figure: GoogLeNet, Inception-v3, Inception-v4 and Inception-ResNet-v2.

A block is a table of branches, each a list of convolutions (channels, kernel); all branches read the block's input.
*resolution*: the side of the input image in pixels; *classes*: the number of logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.models.zoo.graph import GraphBuilder, GraphValue, Pair

ROW, COLUMN = (1, 7), (7, 1)
"""The two kernels by which the network replaces one of 7 by 7."""

Steps = Sequence[tuple[int, Pair]]
"""Convolutions one after another: channels and kernel of each."""
Branches = Mapping[str, Steps]
"""Name of a branch -> its convolutions."""

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
"""Name of a block; channels of the 1x1, the 3x3's reduction, the 3x3, the 5x5's reduction, the 5x5, and the pool's
projection."""


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
    """A block of GoogLeNet; *widths*: as in ``GOOGLENET_STAGES``."""
    one, reduce_three, three, reduce_five, five, projection = widths
    branches = (
        g.conv(x, f"{name}.1x1", one),
        g.conv(g.conv(x, f"{name}.3x3.reduce", reduce_three), f"{name}.3x3", three, 3),
        g.conv(g.conv(x, f"{name}.5x5.reduce", reduce_five), f"{name}.5x5", five, 5),
        g.conv(g.pool("MaxPool", x, f"{name}.pool", 3, stride=1, pad=1), f"{name}.pool.project", projection),
    )
    return concat(g, name, *branches)


def _caffe_pool(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    """A 3x3 max pool of stride 2 that also pools windows beyond the edge."""
    return g.pool("MaxPool", x, name, 3, stride=2, partial=True)


# Inception-v3


def inception_v3(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """Inception-v3 (Szegedy et al. 2016) without the auxiliary head, which only training uses."""
    x = _stem_v3(g, resolution, "maxpool1", "maxpool2")
    for name, pool_width in (("mixed5b", 32), ("mixed5c", 64), ("mixed5d", 64)):
        x = _inception_a(g, x, name, pool_width)
    x = reduced(g, x, "mixed6a", {"branch3x3": [(384, 3)], "branch3x3x2": [(64, 1), (96, 3), (96, 3)]})
    for name, inner in (("mixed6b", 128), ("mixed6c", 160), ("mixed6d", 160), ("mixed6e", 192)):
        x = _inception_b(g, x, name, inner)
    branch_7x7: Steps = [(192, 1), (192, ROW), (192, COLUMN), (192, 3)]
    x = reduced(g, x, "mixed7a", {"branch3x3": [(192, 1), (320, 3)], "branch7x7x3": branch_7x7})
    for name in ("mixed7b", "mixed7c"):
        x = _inception_c(g, x, name)
    g.classifier(x, "fc", classes)


def _stem_v3(g: GraphBuilder, resolution: int, first_pool: str, second_pool: str) -> GraphValue:
    """The layers before the first Inception module; *first_pool*, *second_pool*: the names of their two poolings."""
    x = g.conv_bn(g.image(resolution, at_least=75), "conv1a", 32, 3, stride=2, pad=0)
    x = g.conv_bn(g.conv_bn(x, "conv2a", 32, 3, pad=0), "conv2b", 64, 3)
    x = g.conv_bn(g.pool("MaxPool", x, first_pool, 3, stride=2), "conv3b", 80)
    return g.pool("MaxPool", g.conv_bn(x, "conv4a", 192, 3, pad=0), second_pool, 3, stride=2)


def _inception_a(g: GraphBuilder, x: GraphValue, name: str, pool_width: int) -> GraphValue:
    """A module with branches of 1x1, 5x5 and two 3x3 convolutions, and of a pooling with *pool_width* channels."""
    branches: Branches = {
        "branch1x1": [(64, 1)],
        "branch5x5": [(48, 1), (64, 5)],
        "branch3x3": [(64, 1), (96, 3), (96, 3)],
    }
    return mixed(g, x, name, branches, pool_width)


def _inception_b(g: GraphBuilder, x: GraphValue, name: str, inner: int) -> GraphValue:
    """A module with branches of 1x1 and factorized 7x7 convolutions, which have *inner* channels inside."""
    branches: Branches = {
        "branch1x1": [(192, 1)],
        "branch7x7": [(inner, 1), (inner, ROW), (192, COLUMN)],
        "branch7x7x2": [(inner, 1), (inner, COLUMN), (inner, ROW), (inner, COLUMN), (192, ROW)],
    }
    return mixed(g, x, name, branches, 192)


def _inception_c(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    """A module whose 3x3 convolutions fork into a 1x3 and a 3x1 convolution."""
    return concat(
        g,
        name,
        chain(g, x, f"{name}.branch1x1", (320, 1)),
        *fork(g, chain(g, x, f"{name}.branch3x3", (384, 1)), f"{name}.branch3x3", 384),
        *fork(g, chain(g, x, f"{name}.branch3x3x2", (448, 1), (384, 3)), f"{name}.branch3x3x2", 384),
        pooled(g, x, name, 192),
    )


# Inception-v4 and Inception-ResNet-v2 (Szegedy et al. 2017)

BLOCK_A: Branches = {"1x1": [(96, 1)], "3x3": [(64, 1), (96, 3)], "3x3x2": [(64, 1), (96, 3), (96, 3)]}
"""Figure 4."""
BLOCK_B: Branches = {
    "1x1": [(384, 1)],
    "7x7": [(192, 1), (224, ROW), (256, COLUMN)],
    "7x7x2": [(192, 1), (192, COLUMN), (224, ROW), (224, COLUMN), (256, ROW)],
}
"""Figure 5."""
REDUCTION_B: Branches = {"3x3": [(192, 1), (192, 3)], "7x7": [(256, 1), (256, ROW), (320, COLUMN), (320, 3)]}
"""Figure 8."""
MIXED_5B: Branches = {"1x1": [(96, 1)], "5x5": [(48, 1), (64, 5)], "3x3": [(64, 1), (96, 3), (96, 3)]}
MIXED_7A: Branches = {
    "3x3a": [(256, 1), (384, 3)],
    "3x3b": [(256, 1), (288, 3)],
    "3x3x2": [(256, 1), (288, 3), (320, 3)],
}
"""The blocks of Inception-ResNet-v2 without a residual, by their authors' release."""
BLOCK_35: Branches = {"1x1": [(32, 1)], "3x3": [(32, 1), (32, 3)], "3x3x2": [(32, 1), (48, 3), (64, 3)]}
BLOCK_17: Branches = {"1x1": [(192, 1)], "7x7": [(128, 1), (160, ROW), (192, COLUMN)]}
BLOCK_8: Branches = {"1x1": [(192, 1)], "3x3": [(192, 1), (224, (1, 3)), (256, (3, 1))]}


def inception_v4(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """Inception-v4, as figure 9 draws it."""
    x = _stem_v4(g, g.image(resolution, at_least=75))
    for number in range(1, 5):
        x = mixed(g, x, f"inception_a{number}", BLOCK_A, 96)
    x = reduced(g, x, "reduction_a", _reduction_a(384, 192, 224, 256))
    for number in range(1, 8):
        x = mixed(g, x, f"inception_b{number}", BLOCK_B, 128)
    x = reduced(g, x, "reduction_b", REDUCTION_B)
    for number in range(1, 4):
        x = _block_c(g, x, f"inception_c{number}")
    g.classifier(x, "fc", classes)


def _stem_v4(g: GraphBuilder, x: GraphValue) -> GraphValue:
    """The stem of figure 3."""
    x = g.conv_bn(x, "conv1", 32, 3, stride=2, pad=0)
    x = g.conv_bn(g.conv_bn(x, "conv2", 32, 3, pad=0), "conv3", 64, 3)
    x = concat(g, "stem1", shrunk(g, x, "stem1"), chain(g, x, "stem1", (96, 3), last_stride=2))
    short = g.conv_bn(chain(g, x, "stem2.short", (64, 1)), "stem2.short.last", 96, 3, pad=0)
    long = g.conv_bn(chain(g, x, "stem2.long", (64, 1), (64, COLUMN), (64, ROW)), "stem2.long.last", 96, 3, pad=0)
    x = concat(g, "stem2", short, long)
    return concat(g, "stem3", chain(g, x, "stem3", (192, 3), last_stride=2), shrunk(g, x, "stem3"))


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


def _reduction_a(n: int, k: int, l: int, m: int) -> Branches:  # noqa: E741 - the letters of the paper's table
    """The branches of figure 7 with channels *n*, *k*, *l*, *m* as in table 1."""
    return {"3x3": [(n, 3)], "3x3x2": [(k, 1), (l, 3), (m, 3)]}


def inception_resnet_v2(g: GraphBuilder, *, resolution: int, classes: int) -> None:
    """Inception-ResNet-v2 as its authors released it: the stem of Inception-v3 before one plain inception block."""
    x = _stem_v3(g, resolution, "stem1.maxpool", "stem2.maxpool")
    x = mixed(g, x, "mixed5b", MIXED_5B, 64)
    for number in range(1, 11):
        x = _residual(g, x, f"block35_{number}", BLOCK_35, 0.17)
    x = reduced(g, x, "mixed6a", _reduction_a(384, 256, 256, 384))
    for number in range(1, 21):
        x = _residual(g, x, f"block17_{number}", BLOCK_17, 0.1)
    x = reduced(g, x, "mixed7a", MIXED_7A)
    for number in range(1, 10):
        x = _residual(g, x, f"block8_{number}", BLOCK_8, 0.2)
    x = _residual(g, x, "block8_10", BLOCK_8, 1.0, activation="none")
    g.classifier(g.conv_bn(x, "conv7b", 1536), "fc", classes)


def _residual(
    g: GraphBuilder, x: GraphValue, name: str, branches: Branches, scale: float, activation: str = "relu"
) -> GraphValue:
    """A residual block: the branches, a 1x1 convolution to the width of *x*, times *scale* (section 3.3), plus *x*."""
    branch_sum = g.conv(concat(g, name, *chains(g, x, name, branches)), f"{name}.up", x.width, activation="none")
    if scale != 1:
        branch_sum = g.node("Mul", f"{name}.scale", branch_sum, g.constant(f"scale_{scale}", scale))
    return g.activation(g.node("Add", f"{name}.add", branch_sum, x), name, activation)


# Parts of all of them


def mixed(g: GraphBuilder, x: GraphValue, name: str, branches: Branches, pool_width: int) -> GraphValue:
    """A block: concatenate the branches and an average pool with a convolution to *pool_width* channels."""
    return concat(g, name, *chains(g, x, name, branches), pooled(g, x, name, pool_width))


def reduced(g: GraphBuilder, x: GraphValue, name: str, branches: Branches) -> GraphValue:
    """A block that halves the image: concatenate branches whose last convolution has stride 2, and a max pool."""
    return concat(g, name, *chains(g, x, name, branches, last_stride=2), shrunk(g, x, name))


def chains(g: GraphBuilder, x: GraphValue, name: str, branches: Branches, last_stride: int = 1) -> list[GraphValue]:
    """The outputs of all branches; *last_stride*: the stride of their last convolutions."""
    return [chain(g, x, f"{name}.{branch}", *steps, last_stride=last_stride) for branch, steps in branches.items()]


def fork(g: GraphBuilder, x: GraphValue, name: str, out: int) -> tuple[GraphValue, GraphValue]:
    """A 1x3 and a 3x1 convolution of *x*, as two branches."""
    return g.conv_bn(x, f"{name}.row", out, (1, 3)), g.conv_bn(x, f"{name}.column", out, (3, 1))


def chain(g: GraphBuilder, x: GraphValue, name: str, *steps: tuple[int, Pair], last_stride: int = 1) -> GraphValue:
    """Convolutions (channels, kernel) one after another; a last convolution with a stride has no padding."""
    for number, (out, kernel) in enumerate(steps, start=1):
        strided = number == len(steps) and last_stride > 1
        stride, pad = (last_stride, 0) if strided else (1, None)
        x = g.conv_bn(x, f"{name}.conv{number}", out, kernel, stride=stride, pad=pad)
    return x


def pooled(g: GraphBuilder, x: GraphValue, name: str, out: int) -> GraphValue:
    """An average pool that keeps the size of the image, and a 1x1 convolution."""
    return g.conv_bn(g.pool("AveragePool", x, f"{name}.avgpool", 3, stride=1, pad=1), f"{name}.pool", out)


def shrunk(g: GraphBuilder, x: GraphValue, name: str) -> GraphValue:
    """A max pool that halves the image."""
    return g.pool("MaxPool", x, f"{name}.maxpool", 3, stride=2)


def concat(g: GraphBuilder, name: str, *branches: GraphValue) -> GraphValue:
    return g.node("Concat", f"{name}.concat", *branches, width=sum(b.width for b in branches), axis=1)

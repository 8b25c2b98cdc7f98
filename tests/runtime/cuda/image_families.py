"""Small networks of many families that read images: a block or two of each, with all its parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.cuda.family_layers import IMAGE, WIDTH, Apply, Branches, Families, Gate, Input, Residual


def conv(before: int, after: int, kernel: int = 3, act: Any = nn.ReLU, norm: Any = nn.BatchNorm2d, **more: Any) -> Any:
    pad = more.pop("padding", kernel // 2 * more.get("dilation", 1))
    parts = [nn.Conv2d(before, after, kernel, padding=pad, bias=norm is None, **more)]
    parts += [norm(after)] if norm else []
    return nn.Sequential(*parts, *([act()] if act else []))


def head(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def classifier(*body: nn.Module, stride: int = 2, width: int = WIDTH) -> nn.Module:
    return nn.Sequential(conv(3, WIDTH, stride=stride), *body, head(width))


def squeezed(width: int, inner: Any, outer: Any) -> nn.Module:
    """Squeeze and excitation."""
    small = width // 4
    return Gate(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, small, 1), inner(), nn.Conv2d(small, width, 1), outer())


def inverted(kernel: int, act: Any, inner: Any, outer: Any) -> nn.Module:
    """An inverted bottleneck with squeeze and excitation."""
    wide = 4 * WIDTH
    return Residual(
        conv(WIDTH, wide, 1, act), conv(wide, wide, kernel, act, groups=wide), squeezed(wide, inner, outer),
        conv(wide, WIDTH, 1, None),
    )  # fmt: skip


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of an image."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Scale(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))

    def forward(self, x: Any) -> Any:
        return x * self.scale


def convnext() -> nn.Module:
    block = Residual(
        nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH), ChannelNorm(WIDTH), nn.Conv2d(WIDTH, 4 * WIDTH, 1),
        nn.GELU(), nn.Conv2d(4 * WIDTH, WIDTH, 1), Scale(WIDTH, 1, 1),
    )  # fmt: skip
    return nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), ChannelNorm(WIDTH), block, head())


class Shuffle(nn.Module):
    """ShuffleNet v2: half of the channels pass, and the channels of both halves alternate."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.body = nn.Sequential(conv(half, half, 1), conv(half, half, 3, None, groups=half), conv(half, half, 1))

    def forward(self, x: Any) -> Any:
        kept, read = x.chunk(2, 1)
        x = torch.cat([kept, self.body(read)], 1)
        rows, width, high, wide = x.shape
        return x.view(rows, 2, width // 2, high, wide).transpose(1, 2).reshape(rows, width, high, wide)


class Scales(nn.Module):
    """Res2Net: each quarter of the channels reads the result of the quarter before."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(conv(WIDTH // 4, WIDTH // 4) for _ in range(3))

    def forward(self, x: Any) -> Any:
        first, *others = torch.split(x, WIDTH // 4, 1)
        results = [first]
        for part, other in zip(self.parts, others, strict=True):
            results.append(part(other + results[-1]))
        return x + torch.cat(results, 1)


def squeezenet() -> nn.Module:
    fire = [
        nn.Sequential(conv(WIDTH, 4, 1, norm=None), Branches(conv(4, 8, 1, norm=None), conv(4, 8, 3, norm=None)))
        for _ in range(2)
    ]
    pool = nn.MaxPool2d(3, 2, ceil_mode=True)
    return nn.Sequential(conv(3, WIDTH, stride=2, norm=None), pool, *fire, nn.Dropout(), head())


def repvgg() -> nn.Module:
    blocks = [
        Branches(conv(WIDTH, WIDTH, 3, None), conv(WIDTH, WIDTH, 1, None), nn.BatchNorm2d(WIDTH), add=True)
        for _ in range(2)
    ]
    return classifier(blocks[0], nn.ReLU(), blocks[1], nn.ReLU())


def dense_blocks() -> nn.Module:
    layers = [Branches(nn.Identity(), conv(WIDTH + 4 * at, 4, act=nn.ELU)) for at in range(3)]
    return classifier(*layers, nn.AvgPool2d(2), width=WIDTH + 12)


def mixer() -> nn.Module:
    def mix(size: int) -> nn.Module:
        return nn.Sequential(nn.Linear(size, 32), nn.GELU(), nn.Linear(32, size))

    def turn() -> nn.Module:
        return Apply(lambda x: x.transpose(1, 2))

    block = nn.Sequential(
        Residual(nn.LayerNorm(WIDTH), turn(), mix(16), turn()), Residual(nn.LayerNorm(WIDTH), mix(WIDTH))
    )
    cut = nn.Sequential(nn.Conv2d(3, WIDTH, 8, 8), nn.Flatten(2), turn())
    return nn.Sequential(cut, block, nn.LayerNorm(WIDTH), Apply(lambda x: x.mean(1)), nn.Linear(WIDTH, 5))


class Segmenter(nn.Module):
    """A U-Net of two halvings."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = conv(3, 8), conv(8, 16), conv(16, 32)
        self.up, self.last_up = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.joined, self.out = conv(32, 16), nn.Conv2d(16, 2, 1)

    def forward(self, x: Any) -> Any:
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        x = self.up(self.third(F.max_pool2d(second, 2)))
        x = self.last_up(self.joined(torch.cat([second, x], 1)))
        return self.out(torch.cat([first, x], 1))


class Pyramid(nn.Module):
    """RetinaNet: features of two sizes, of which the smaller is enlarged and added; boxes and classes of both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = conv(3, WIDTH, stride=2), conv(WIDTH, 32, stride=2)
        self.side, self.top = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(32, WIDTH, 1)
        self.boxes, self.classes = (nn.Conv2d(WIDTH, 3 * size, 3, padding=1) for size in (4, 5))

    def forward(self, x: Any) -> Any:
        fine = self.stem(x)
        coarse = self.top(self.down(fine))
        levels = [self.side(fine) + F.interpolate(coarse, scale_factor=2, mode="nearest"), coarse]
        found = [
            torch.cat([part(level).permute(0, 2, 3, 1).flatten(1, 2).unflatten(-1, (3, -1)).flatten(1, 2)
                       for level in levels], 1)
            for part in (self.boxes, self.classes)
        ]  # fmt: skip
        return found[0], torch.sigmoid(found[1])


class Detector(nn.Module):
    """YOLO: pools of growing windows, an enlarged map joined to a finer one, and boxes in cells of a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = conv(3, WIDTH, act=nn.SiLU, stride=4), conv(WIDTH, WIDTH, act=nn.SiLU, stride=2)
        self.joined, self.out = conv(4 * WIDTH, WIDTH, 1, nn.SiLU), nn.Conv2d(2 * WIDTH, 2 * 9, 1)
        y, x = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
        self.register_buffer("cells", torch.stack([x, y], -1)[None, None])
        self.register_buffer("anchors", torch.tensor([[10.0, 13.0], [33.0, 23.0]]).view(1, 2, 1, 1, 2))

    def forward(self, x: Any) -> Any:
        fine = self.stem(x)
        pools = [self.down(fine)]
        for _ in range(3):
            pools.append(F.max_pool2d(pools[-1], 5, 1, 2))
        x = F.interpolate(self.joined(torch.cat(pools, 1)), scale_factor=2.0)
        x = self.out(torch.cat([x, fine], 1))
        x = x.view(x.shape[0], 2, 9, 8, 8).permute(0, 1, 3, 4, 2).sigmoid()
        centres = (x[..., :2] * 2 - 0.5 + self.cells) * 4
        return torch.cat([centres, (x[..., 2:4] * 2) ** 2 * self.anchors, x[..., 4:]], -1).flatten(1, 3)


class Atrous(nn.Module):
    """DeepLab: dilated branches and one of the whole image, enlarged to the size of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, WIDTH, stride=2)
        self.parts = Branches(*(conv(WIDTH, 8, dilation=rate) for rate in (1, 2, 4)))
        self.whole = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(WIDTH, 8, 1))
        self.out = nn.Conv2d(32, 2, 1)

    def forward(self, image: Any) -> Any:
        x = self.stem(image)
        whole = F.interpolate(self.whole(x), x.shape[-2:], mode="bilinear", align_corners=False)
        x = self.out(torch.cat([self.parts(x), whole], 1))
        return F.interpolate(x, image.shape[-2:], mode="bilinear", align_corners=True)


def style() -> nn.Module:
    def padded(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(before, after, 3), nn.InstanceNorm2d(after, affine=True))

    body = Residual(padded(WIDTH, WIDTH), nn.PReLU(WIDTH), padded(WIDTH, WIDTH))
    return nn.Sequential(
        padded(3, WIDTH), nn.ReLU(), nn.MaxPool2d(2), body, nn.Upsample(scale_factor=2), padded(WIDTH, 3)
    )


def generator() -> nn.Module:
    return nn.Sequential(
        Apply(lambda x: x[:, :, None, None]), nn.ConvTranspose2d(WIDTH, 16, 4), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2),
        nn.ConvTranspose2d(8, 3, 3, 2, 1, output_padding=1), nn.Tanh(),
    )  # fmt: skip


def autoencoder() -> nn.Module:
    down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.Softplus(), nn.Flatten(), nn.Linear(2048, 4))
    up = nn.Sequential(nn.Linear(4, 2048), nn.Unflatten(1, (8, 16, 16)), nn.ConvTranspose2d(8, 3, 4, 2, 1))
    return nn.Sequential(down, up, nn.Hardtanh())


def video() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d((1, 2, 2)),
        nn.Conv3d(8, 8, (3, 1, 1)), nn.AvgPool3d(2), nn.Flatten(), nn.LogSoftmax(1),
    )  # fmt: skip


RELU, SIGMOID, HARD = nn.ReLU, nn.Sigmoid, nn.Hardsigmoid
FAMILIES: Families = {
    "convnext": (convnext, [IMAGE]),
    "efficientnet": (lambda: classifier(inverted(5, nn.SiLU, nn.SiLU, SIGMOID)), [IMAGE]),
    "mobilenet-v1": (lambda: classifier(conv(WIDTH, WIDTH, act=nn.ReLU6, groups=WIDTH), conv(WIDTH, 16, 1)), [IMAGE]),
    "mobilenet-v3": (lambda: classifier(inverted(3, nn.Hardswish, RELU, HARD)), [IMAGE]),
    "shufflenet-v2": (lambda: classifier(Shuffle(), Shuffle()), [IMAGE]),
    "res2net": (lambda: classifier(Scales()), [IMAGE]),
    "squeezenet": (squeezenet, [IMAGE]),
    "repvgg": (repvgg, [IMAGE]),
    "dense-elu": (dense_blocks, [IMAGE]),
    "mixer": (mixer, [IMAGE]),
    "u-net": (Segmenter, [IMAGE]),
    "retinanet": (Pyramid, [IMAGE]),
    "yolo": (Detector, [IMAGE]),
    "deeplab": (Atrous, [IMAGE]),
    "espcn": (lambda: nn.Sequential(nn.Conv2d(3, 12, 5, padding=2), nn.Tanh(), nn.PixelShuffle(2)), [IMAGE]),
    "style": (style, [IMAGE]),
    "dcgan": (generator, [Input((WIDTH,))]),
    "autoencoder": (autoencoder, [IMAGE]),
    "c3d": (video, [Input((3, 6, 8, 8))]),
}

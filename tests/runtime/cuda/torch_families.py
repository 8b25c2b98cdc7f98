"""Small networks of many families as modules of torch, to be exported: a block or two of each, with all its parts.

Attention, gates and normalisations are spelled out where exporters meet them spelled out in published code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, COUNT, WORDS = 16, 4, 6, 20
"""Channels or values of a token, heads of an attention, tokens of a text, words of a vocabulary."""


class Input(NamedTuple):
    """An input: the shape of a row, and the number of words if it holds words."""

    shape: tuple[int, ...]
    words: int = 0

    def draw(self, rows: int, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        shape = (rows, *self.shape)
        return rng.integers(0, self.words, shape) if self.words else rng.standard_normal(shape).astype(np.float32)


IMAGE, TEXT, STATES, FRAMES = Input((3, 32, 32)), Input((COUNT,), WORDS), Input((COUNT, WIDTH)), Input((WIDTH, 24))


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Residual(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return x + super().forward(x)


class Gate(nn.Sequential):
    """Its input times what its parts compute."""

    def forward(self, x: Any) -> Any:
        return x * super().forward(x)


class Branches(nn.ModuleList):
    """Parts that all read the input, joined as channels or added."""

    def __init__(self, *parts: nn.Module, add: bool = False) -> None:
        super().__init__(parts)
        self.add_up = add

    def forward(self, x: Any) -> Any:
        results = [part(x) for part in self]
        return sum(results) if self.add_up else torch.cat(results, 1)


# Images


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


# Sequences


class Attention(nn.Module):
    """Attention, with fewer heads of keys than of queries if told so."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.size, self.key_heads = WIDTH // HEADS, key_heads
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, key_heads * self.size) for _ in range(2))

    def split(self, x: Any, heads: int) -> Any:
        return x.view(x.shape[0], -1, heads, self.size).transpose(1, 2)

    def forward(self, x: Any, bias: Any = None, *, states: Any = None, turn: Any = lambda x: x) -> Any:
        states = x if states is None else states
        query = turn(self.split(self.query(x), HEADS))
        key, value = (self.split(part(states), self.key_heads) for part in (self.key, self.value))
        key = turn(key)
        if self.key_heads < HEADS:
            key, value = (
                each[:, :, None].expand(-1, -1, HEADS // self.key_heads, -1, -1).flatten(1, 2) for each in (key, value)
            )
        scores = query @ key.transpose(-1, -2) / self.size**0.5
        shares = F.softmax(scores if bias is None else scores + bias, -1)
        return self.out((shares @ value).transpose(1, 2).flatten(2))


def wide(act: Any = nn.GELU, width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), act(), nn.Linear(2 * width, width))


class Patches(nn.Module):
    """A vision transformer, with a token for the class."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.first = nn.Conv2d(3, WIDTH, 8, 8), nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.zeros(1, 17, WIDTH))
        self.blocks = nn.Sequential(
            Residual(nn.LayerNorm(WIDTH), Attention()), Residual(nn.LayerNorm(WIDTH), wide()), nn.LayerNorm(WIDTH)
        )
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Any) -> Any:
        x = self.cut(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0])


class Windows(nn.Module):
    """Swin: attention in windows, which are moved by half a window in the second block."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.blocks = nn.Conv2d(3, WIDTH, 4, 4), nn.ModuleList(Attention() for _ in range(2))
        self.bias, self.norm = nn.Parameter(torch.zeros(HEADS, 16, 16)), nn.LayerNorm(WIDTH)

    def forward(self, x: Any) -> Any:
        x = self.cut(x).permute(0, 2, 3, 1)
        rows = x.shape[0]
        for block, moved in zip(self.blocks, (0, 2), strict=True):
            if moved:
                x = torch.roll(x, (-moved, -moved), (1, 2))
            parts = x.view(rows, 2, 4, 2, 4, WIDTH).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, WIDTH)
            parts = parts + block(self.norm(parts), self.bias)
            x = parts.view(rows, 2, 2, 4, 4, WIDTH).permute(0, 1, 3, 2, 4, 5).reshape(rows, 8, 8, WIDTH)
            if moved:
                x = torch.roll(x, (moved, moved), (1, 2))
        return x


class Decoder(nn.Module):
    """GPT: no token sees a later one, and the table of words is the last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.norms, self.part = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)), Attention()
        self.wide = wide(lambda: nn.GELU("tanh"))

    def forward(self, tokens: Any) -> Any:
        count = tokens.shape[1]
        x = self.words(tokens) + self.places(torch.arange(count))
        later = torch.ones(count, count).tril() == 0
        x = x + self.part(self.norms[0](x), torch.zeros(count, count).masked_fill(later, -1e4))
        x = x + self.wide(self.norms[1](x))
        return x @ self.words.weight.t()


class RootNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Rotary(nn.Module):
    """Llama: turned queries and keys, two heads of keys, and a gated part."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.first, self.second = Attention(2), RootNorm(), RootNorm()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        angles = torch.arange(COUNT)[:, None] / 1e2 ** (torch.arange(0, 4, 2) / 4)
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turn(self, x: Any) -> Any:
        left, right = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * self.cos + torch.cat([-right, left], -1) * self.sin

    def forward(self, x: Any) -> Any:
        x = x + self.part(self.first(x), torch.full((COUNT, COUNT), -1e4).triu(1), turn=self.turn)
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Translator(nn.Module):
    """T5: a decoder that reads the states of an encoder; distances have a bias by their logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.distances = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, HEADS)
        self.parts, self.norms = nn.ModuleList(Attention() for _ in range(3)), nn.ModuleList(RootNorm() for _ in "abc")

    def forward(self, source: Any, target: Any) -> Any:
        places = torch.arange(COUNT)
        far = (places[:, None] - places[None]).abs()
        large = 4 + (torch.log(far.clamp(min=1).float() / 4) * 4).long().clamp(0, 3)
        bias = self.distances(torch.where(far < 4, far, large)).permute(2, 0, 1)[None]
        x, y = self.words(source), self.words(target)
        x = x + self.parts[0](self.norms[0](x), bias)
        y = y + self.parts[1](self.norms[1](y), bias)
        return y + self.parts[2](self.norms[2](y), states=x)


class Step(nn.Module):
    """A token of a decoder with stored keys and values, which it returns one longer."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Attention()

    def forward(self, x: Any, keys: Any, values: Any) -> Any:
        part = self.part
        query = part.split(part.query(x), HEADS)
        keys = torch.cat([keys, part.split(part.key(x), HEADS)], 2)
        values = torch.cat([values, part.split(part.value(x), HEADS)], 2)
        shares = torch.softmax((query * part.size**-0.5) @ keys.transpose(-1, -2), -1)
        return x + part.out((shares @ values).transpose(1, 2).flatten(2)), keys, values


class Linearised(nn.Module):
    """Attention without a softmax, by sums over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Any) -> Any:
        query, key, value = self.mixed(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        query, key = F.elu(query) + 1, F.elu(key) + 1
        summed = torch.einsum("bnhd,bnhe->bhde", key, value)
        below = torch.einsum("bnhd,bhd->bnh", query, key.sum(1))
        return (torch.einsum("bnhd,bhde->bnhe", query, summed) / below[..., None]).flatten(2)


def conformer() -> nn.Module:
    def turn() -> nn.Module:
        return Apply(lambda x: x.transpose(1, 2))

    convolved = nn.Sequential(
        nn.LayerNorm(WIDTH), turn(), nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.GLU(1),
        nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH), nn.BatchNorm1d(WIDTH), nn.SiLU(), turn(),
    )  # fmt: skip
    half = Residual(nn.LayerNorm(WIDTH), wide(nn.SiLU), Apply(lambda x: x / 2))
    return nn.Sequential(half, Residual(nn.LayerNorm(WIDTH), Attention()), Residual(convolved), nn.LayerNorm(WIDTH))


def speech() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, WIDTH, 10, 5), nn.GroupNorm(WIDTH, WIDTH), nn.GELU(), nn.Conv1d(WIDTH, WIDTH, 3, 2), nn.GELU(),
        Apply(lambda x: x.transpose(1, 2)), nn.LayerNorm(WIDTH), Residual(Attention()),
    )  # fmt: skip


class Causal(nn.Module):
    """A dilated convolution that reads the past only."""

    def __init__(self, rate: int, after: int = WIDTH) -> None:
        super().__init__()
        self.rate, self.conv = rate, nn.Conv1d(WIDTH, after, 2, dilation=rate)

    def forward(self, x: Any) -> Any:
        return self.conv(F.pad(x, (self.rate, 0)))


def temporal() -> nn.Module:
    return nn.Sequential(
        *(Residual(Causal(rate), nn.ReLU(), Causal(rate), nn.ReLU()) for rate in (1, 2, 4)), nn.AdaptiveMaxPool1d(1)
    )


class Waves(nn.Module):
    """WaveNet: gated layers, each of which adds to the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Causal(rate, 2 * WIDTH) for rate in (1, 2, 4))
        self.outs = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 1) for _ in self.layers)

    def forward(self, x: Any) -> Any:
        total: Any = 0
        for layer, out in zip(self.layers, self.outs, strict=True):
            wave, gate = layer(x).chunk(2, 1)
            kept, added = out(torch.tanh(wave) * torch.sigmoid(gate)).chunk(2, 1)
            x, total = x + kept, total + added
        return F.relu(total)


class Recurrent(nn.Module):
    """A recurrent layer or several over words; the last state, or the result of every word."""

    def __init__(self, kind: Any, *, last: bool = False, **more: Any) -> None:
        super().__init__()
        self.words, self.layer, self.last = nn.Embedding(WORDS, WIDTH), kind(WIDTH, 8, batch_first=True, **more), last
        self.out = nn.Linear(16 if more.get("bidirectional") else 8, 5)

    def forward(self, tokens: Any) -> Any:
        states, after = self.layer(self.words(tokens))
        last = after[0] if isinstance(after, tuple) else after
        return self.out(last[-1] if self.last else states)


class Lines(nn.Module):
    """CRNN: the columns of an image are a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(conv(3, 8), nn.MaxPool2d((2, 2)), conv(8, WIDTH), nn.MaxPool2d((16, 1)))
        self.layer, self.out = nn.LSTM(WIDTH, 8, bidirectional=True), nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        x, _ = self.layer(self.images(x).squeeze(2).permute(2, 0, 1))
        return F.log_softmax(self.out(x), 2).transpose(0, 1)


# Points, graphs, tables


def points() -> nn.Module:
    shared = nn.Sequential(nn.Conv1d(3, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Conv1d(WIDTH, 32, 1))
    return nn.Sequential(shared, Apply(lambda x: x.max(2).values), nn.Linear(32, 5), nn.Softmax(1))


class Graph(nn.Module):
    """A graph convolution and an attention to neighbours; who is a neighbour is a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.left, self.right = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: Any, edges: Any) -> Any:
        near = (edges > 0).float() + torch.eye(COUNT)
        scale = near.sum(-1).pow(-0.5)
        x = torch.relu(self.first(scale[..., None] * near * scale[:, None] @ x))
        x = self.second(x)
        scores = F.leaky_relu(self.left(x) + self.right(x).transpose(1, 2), 0.2)
        return torch.softmax(torch.where(near > 0, scores, torch.full_like(scores, -1e4)), -1) @ x


class Clicks(nn.Module):
    """DLRM: tables of categories, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(WORDS, WIDTH) for _ in range(3))
        self.bottom, self.top = nn.Linear(8, WIDTH), nn.Sequential(nn.Linear(WIDTH + 6, 8), nn.ReLU(), nn.Linear(8, 1))
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

    def forward(self, numbers: Any, categories: Any) -> Any:
        first = torch.relu(self.bottom(numbers))
        rows = torch.stack([first, *(table(categories[:, at]) for at, table in enumerate(self.tables))], 1)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat([first, products], 1)))


class Factors(nn.Module):
    """DeepFM: pairs by the square of a sum less the sum of squares, beside a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.line = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, 1)
        self.deep = nn.Sequential(nn.Linear(COUNT * WIDTH, 8), nn.Dropout(), nn.SELU(), nn.Linear(8, 1))

    def forward(self, fields: Any) -> Any:
        x = self.table(fields)
        pairs = (x.sum(1).square() - x.square().sum(1)).sum(1, keepdim=True) / 2
        return torch.sigmoid(self.line(fields).sum(1) + pairs / 100 + self.deep(x.flatten(1)))


class Towers(nn.Module):
    """Two texts, the mean of whose words is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.left, self.right = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, query: Any, document: Any) -> Any:
        known = (document > 0).float()[..., None]
        mean = (self.table(document) * known).sum(1) / known.sum(1).clamp(min=1)
        left, right = self.left(self.table(query).mean(1)), self.right(mean)
        return F.cosine_similarity(left, right), F.normalize(left, dim=-1)


class Twins(nn.Module):
    """Two images through the same network, and their distance."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = classifier(conv(WIDTH, WIDTH, stride=2)), nn.Linear(5, 1)

    def forward(self, left: Any, right: Any) -> Any:
        left, right = self.body(left), self.body(right)
        return torch.sigmoid(self.out((left - right).abs())), torch.norm(left - right, dim=1)


class Experts(nn.Module):
    """A mixture of experts, of which the best two count."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.parts = nn.Linear(WIDTH, 4), nn.ModuleList(wide() for _ in range(4))

    def forward(self, x: Any) -> Any:
        best, places = self.gate(x).topk(2)
        shares = torch.zeros_like(self.gate(x)).scatter(-1, places, best.softmax(-1))
        return sum(part(x) * shares[..., at : at + 1] for at, part in enumerate(self.parts))


class Forecast(nn.Module):
    """N-BEATS: each block explains a part of the past, and foretells by it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 30)) for _ in range(3))

    def forward(self, past: Any) -> Any:
        future: Any = 0
        for block in self.blocks:
            before, after = block(past).split([24, 6], 1)
            past, future = past - before, future + after
        return future


class Field(nn.Module):
    """NeRF: waves of a place, read twice; colours and a density."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(27, 32), nn.Linear(59, 32), nn.Linear(32, 4)

    def forward(self, place: Any) -> Any:
        waves = [place, *(wave(place * 2**at) for at in range(4) for wave in (torch.sin, torch.cos))]
        waves = torch.cat(waves, -1)
        x = torch.relu(self.second(torch.cat([torch.relu(self.first(waves)), waves], -1)))
        colour, density = self.out(x).split([3, 1], -1)
        return torch.sigmoid(colour), F.softplus(density)


RELU, SIGMOID, HARD = nn.ReLU, nn.Sigmoid, nn.Hardsigmoid
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Sequence[Input]]] = {
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
    "vit": (Patches, [IMAGE]),
    "swin": (Windows, [IMAGE]),
    "gpt": (Decoder, [TEXT]),
    "llama": (Rotary, [STATES]),
    "t5": (Translator, [TEXT, TEXT]),
    "decoder-step": (Step, [Input((1, WIDTH)), Input((HEADS, 7, 4)), Input((HEADS, 7, 4))]),
    "linear-attention": (Linearised, [STATES]),
    "conformer": (conformer, [STATES]),
    "wav2vec": (speech, [Input((1, 64))]),
    "tcn": (temporal, [FRAMES]),
    "wavenet": (Waves, [FRAMES]),
    "lstm-tagger": (lambda: Recurrent(nn.LSTM, bidirectional=True), [TEXT]),
    "gru-classifier": (lambda: Recurrent(nn.GRU, last=True, num_layers=2), [TEXT]),
    "rnn-classifier": (lambda: Recurrent(nn.RNN, last=True), [TEXT]),
    "crnn": (Lines, [IMAGE]),
    "pointnet": (points, [Input((3, 20))]),
    "gcn-gat": (Graph, [STATES, Input((COUNT, COUNT))]),
    "dlrm": (Clicks, [Input((8,)), Input((3,), WORDS)]),
    "deepfm": (Factors, [TEXT]),
    "two-tower": (Towers, [TEXT, Input((2 * COUNT,), WORDS)]),
    "siamese": (Twins, [IMAGE, IMAGE]),
    "experts": (Experts, [STATES]),
    "n-beats": (Forecast, [Input((24,))]),
    "nerf": (Field, [Input((3,))]),
}
"""Name -> what makes the module, and its inputs."""

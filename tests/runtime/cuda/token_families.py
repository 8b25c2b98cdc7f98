"""Small networks of many families that read texts, sounds and patches of images; attention is spelled out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.cuda.family_layers import (
    COUNT,
    FRAMES,
    HEADS,
    IMAGE,
    STATES,
    TEXT,
    WIDTH,
    WORDS,
    Apply,
    Families,
    Input,
    Residual,
)
from tests.runtime.cuda.image_families import conv


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


FAMILIES: Families = {
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
}

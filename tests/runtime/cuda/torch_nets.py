"""Small networks of torch, exported as programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import Dim

WIDTH, TOKENS = 8, 5


class Images(nn.Module):
    """Convolutions with a way around them, and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, image: Any) -> Any:
        x = torch.relu(self.first(image))
        x = torch.relu(self.norm(self.second(x)) + x)
        return self.head(x.mean((2, 3)))


class Writing(nn.Module):
    """Writes over what another name stands for."""

    def forward(self, x: Any) -> Any:
        doubled = x * 2
        half = doubled[:, :1]
        doubled.add_(1)
        return torch.tanh(half) + doubled


class Words(nn.Module):
    """Attention whose heads are told apart by the sizes of its input, and places that are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(16, WIDTH), nn.Embedding(32, WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Any, scale: Any) -> dict[str, Any]:
        rows, count = tokens.shape
        x = self.words(tokens) + self.places(torch.arange(count))
        for _ in range(2):
            parts = self.mixed(x).view(rows, count, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
            query, key, value = parts.unbind(0)
            found = nn.functional.scaled_dot_product_attention(query, key, value)
            x = self.norm(x + self.out(found.transpose(1, 2).reshape(rows, count, WIDTH)))
        return {"states": x, "pooled": x.mean(1) * scale}


def saved(module: nn.Module, path: Path, inputs: tuple[Any, ...], dynamic: Any) -> tuple[Path, nn.Module]:
    """A program of a module with weights that are always the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for each in module.parameters():
        nn.init.normal_(each, std=0.5)
    torch.export.save(torch.export.export(module.eval(), inputs, dynamic_shapes=dynamic), path)
    return path, module


def images(path: Path, most: int | None = None) -> tuple[Path, nn.Module]:
    rows = Dim("rows", max=most) if most else Dim("rows")
    return saved(Images(), path, (torch.zeros(2, 3, 6, 6),), ({0: rows},))


def words(path: Path) -> tuple[Path, nn.Module]:
    rows, count = Dim("rows"), Dim("count", max=32)
    inputs = (torch.zeros(2, TOKENS, dtype=torch.int64), torch.ones(2, 1))
    return saved(Words(), path, inputs, ({0: rows, 1: count}, {0: rows}))


TEXTS = {"tokens": (1, TOKENS), "scale": (1, 1)}


def draw_images(rows: int, seed: int = 0) -> dict[str, Any]:
    return {"image": np.random.default_rng(seed).standard_normal((rows, 3, 6, 6)).astype(np.float32)}


def draw_sentences(rows: int, count: int = TOKENS) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    return {"tokens": rng.integers(0, 16, (rows, count)), "scale": rng.standard_normal((rows, 1)).astype(np.float32)}


def run_net(net: nn.Module, feed: dict[str, Any]) -> Any:
    with torch.no_grad():
        return net(*(torch.from_numpy(each) for each in feed.values()))

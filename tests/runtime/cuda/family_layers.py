"""What small networks of torch that are exported have in common: their inputs, and how modules are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

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


Families = dict[str, tuple[Callable[[], nn.Module], Sequence[Input]]]
"""Name -> what makes the module, and its inputs."""

"""Small encoders in torch, exported to ONNX by its old exporter or its new one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from tests.stitching.encoders import sentences

WIDTH, HEADS = 32, 4


class Block(nn.Module):
    """A layer, after its attention or before it normalised, as one likes."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.taken = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, length, _ = hidden.shape
        apart = self.taken(hidden).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = apart[0], apart[1], apart[2]
        if self.whole:
            seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5 + mask
            seen = scores.softmax(-1) @ value
        hidden = self.first(hidden + self.mixed(seen.transpose(1, 2).reshape(rows, length, WIDTH)))
        return self.second(hidden + self.down(functional.gelu(self.up(hidden), approximate="tanh")))


class Encoder(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(whole) for _ in range(2))
        self.head: nn.Module = nn.Linear(WIDTH, 3)
        self.tags = False

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.words(input_ids) + self.places(places)
        mask = (1.0 - attention_mask[:, None, None, :].to(hidden.dtype)) * torch.finfo(hidden.dtype).min
        for block in self.blocks:
            hidden = block(hidden, mask)
        found: torch.Tensor = self.head(hidden if self.tags else hidden[:, 0])
        return found


def export_encoders(models: Sequence[Encoder], folder: Path, *, new: bool) -> list[Path]:
    example = tuple(torch.from_numpy(each) for each in sentences(2, 7).values())
    sizes = {0: "rows", 1: "length"}
    files = []
    for name, model in zip("abcd", models, strict=False):
        files.append(folder / f"{name}.onnx")
        axes = {"input_ids": sizes, "attention_mask": sizes}
        how = {"dynamic_shapes": axes} if new else {"dynamic_axes": {**axes, "y": sizes if model.tags else {0: "rows"}}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model.eval(), example, files[-1], dynamo=new, input_names=list(axes), output_names=["y"], **how
            )  # type: ignore[call-overload]
    return files

"""Two small text classifiers in torch that share all but their heads, as ONNX files."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS = 32, 4


class Layer(nn.Module):
    """As BERT's."""

    def __init__(self):
        super().__init__()
        self.key, self.query, self.value, self.mixed = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.inner, self.outer = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.attended, self.done = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden, mask):
        def apart(linear):
            return linear(hidden).view(*hidden.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)

        seen = functional.scaled_dot_product_attention(*map(apart, (self.query, self.key, self.value)), attn_mask=mask)
        hidden = self.attended(hidden + self.mixed(seen.transpose(1, 2).flatten(2)))
        return self.done(hidden + self.outer(functional.gelu(self.inner(hidden))))


class Classifier(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.words, self.kinds, self.places = (nn.Embedding(each, WIDTH) for each in (50, 2, 64))
        self.normed, self.layers = nn.LayerNorm(WIDTH), nn.ModuleList(Layer() for _ in range(2))
        self.pooler, self.classifier, self.activation = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), activation

    def forward(self, tokens, shown, kinds):
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        hidden = self.normed(self.words(tokens) + self.kinds(kinds) + places)
        for layer in self.layers:
            hidden = layer(hidden, shown[:, None, None, :].bool())
        return self.classifier(self.activation(self.pooler(hidden[:, 0])))


def export_classifiers(folder, activation=torch.tanh):
    """Two models with heads of their own, and what they are in torch."""
    torch.manual_seed(0)
    base, models, files = Classifier(activation).eval(), [], []
    names = ["tokens", "shown", "kinds"]
    example = tuple(torch.ones(2, 7, dtype=torch.int64) for _ in names)
    for name in ("mail", "news"):
        models.append(copy.deepcopy(base))
        models[-1].classifier = nn.Linear(WIDTH, len(name) - 2 * len(files))
        files.append(folder / f"{name}.onnx")
        axes = {each: {0: "rows", 1: "length"} for each in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                models[-1], example, files[-1], input_names=names, output_names=["found"], dynamic_axes=axes,
                dynamo=False,
            )  # fmt: skip
    return files, models

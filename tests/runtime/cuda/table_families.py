"""Small networks of many families that read points, graphs, tables and pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.cuda.family_layers import COUNT, IMAGE, STATES, TEXT, WIDTH, WORDS, Apply, Families, Input
from tests.runtime.cuda.image_families import classifier, conv
from tests.runtime.cuda.token_families import wide


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


FAMILIES: Families = {
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

"""Networks for ``gpu_engines.py``: from the zoo, from torch modules, and from installed packages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.models import zoo
from weft.models.packaged import PACKAGED, packaged_file, packaged_models


class Network(NamedTuple):
    """An ONNX file, the module that it was exported from, if any, and the shapes of its inputs for one row."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    module: nn.Module | None = None


class Block(nn.Module):
    """A layer of a transformer, whose attention is spelled out; with stored keys and values, a step of a decoder."""

    def __init__(self, width: int, heads: int, stored: int = 0) -> None:
        super().__init__()
        self.heads, self.size, self.stored = heads, width // heads, stored
        self.taken, self.given = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        if stored:
            self.keys = nn.Parameter(torch.randn(1, heads, stored, self.size))
            self.values = nn.Parameter(torch.randn(1, heads, stored, self.size))

    def forward(self, x: Any) -> Any:
        count, width = x.shape[1:]
        parts = self.taken(self.first(x)).view(-1, count, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts[0], parts[1], parts[2]
        if self.stored:
            keys = torch.cat([self.keys.expand(queries.shape[0], -1, -1, -1), keys], 2)
            values = torch.cat([self.values.expand(queries.shape[0], -1, -1, -1), values], 2)
        shares = torch.softmax(queries @ keys.transpose(-1, -2) * self.size**-0.5, -1)
        x = x + self.given((shares @ values).transpose(1, 2).reshape(-1, count, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


class Speech(nn.Module):
    """An encoder of speech: 3000 frames, of which two become one."""

    def __init__(self, layers: int = 6, width: int = 512) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(80, width, 3, padding=1), nn.Conv1d(width, width, 3, 2, 1)
        self.places = nn.Parameter(torch.randn(1500, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 8) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Any) -> Any:
        x = nn.functional.gelu(self.second(nn.functional.gelu(self.first(x))))
        return self.norm(self.blocks(x.transpose(1, 2) + self.places))


class Patches(nn.Module):
    """A vision transformer with patches of 16."""

    def __init__(self, layers: int = 12, width: int = 768) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.randn(196, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 12) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Any) -> Any:
        x = self.cut(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(x)).mean(1))


class Segmenter(nn.Module):
    """A U-Net of three halvings."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 8 * width]
        pairs = zip([3, *sizes], sizes, strict=False)
        self.down = nn.ModuleList(self._twice(before, after) for before, after in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in sizes[:-1])
        self.joined = nn.ModuleList(self._twice(2 * size, size) for size in sizes[:-1])
        self.head = nn.Conv2d(width, 2, 1)

    def _twice(self, before: int, after: int) -> nn.Module:
        layers = [
            layer
            for size in (before, after)
            for layer in (nn.Conv2d(size, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
        ]
        return nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        kept = []
        for at, step in enumerate(self.down):
            x = step(nn.functional.max_pool2d(x, 2) if at else x)
            kept.append(x)
        for at in reversed(range(len(self.up))):
            x = self.joined[at](torch.cat([kept[at], self.up[at](x)], 1))
        return self.head(x)


def of_zoo(name: str, options: Mapping[str, Any], path: Path) -> Network:
    model = zoo.materialise(zoo.build(name, **options))
    path.write_bytes(model.SerializeToString())
    inputs = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    return Network(path, {name: (1, *(size.dim_value for size in dims[1:])) for name, dims in inputs.items()})


def of_torch(make: Callable[[], nn.Module], shape: tuple[int, ...], path: Path) -> Network:
    torch.manual_seed(0)
    module = make().eval()
    free = {"x": {0: "n"}, "y": {0: "n"}}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # that there is another exporter, which needs another package
        torch.onnx.export(
            module, (torch.randn(shape),), str(path), input_names=["x"], output_names=["y"], dynamic_axes=free,
            dynamo=False, opset_version=17,
        )  # fmt: skip
    return Network(path, {"x": shape}, module)


def of_package(name: str, path: Path) -> Network:
    path.write_bytes(packaged_file(name).read_bytes())
    return Network(path, PACKAGED[name].shapes)


def of_torchvision(name: str, path: Path) -> Network:
    import torchvision

    def make() -> nn.Module:
        module: nn.Module = getattr(torchvision.models, name)()
        # Random weights shrink values from layer to layer, below what float16 holds; a batch's statistics keep them.
        norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
        for norm in norms:
            norm.momentum = None  # the running statistics become those of the batch
        if norms:
            with torch.no_grad():
                module.train()(torch.randn(8, 3, 224, 224))
        return module

    return of_torch(make, (1, 3, 224, 224), path)


IMAGE = (1, 3, 224, 224)
NETWORKS: dict[str, tuple[Callable[[Path], Network], tuple[int, ...]]] = {
    "speech": (partial(of_torch, Speech, (1, 80, 3000)), (1, 8)),
    "vit-b16": (partial(of_torch, Patches, IMAGE), (1, 32)),
    "step": (
        partial(of_torch, lambda: nn.Sequential(*(Block(1536, 12, 512) for _ in range(12))), (1, 1, 1536)), (1, 8)
    ),
    "u-net": (partial(of_torch, Segmenter, IMAGE), (1, 16)),
    "resnet50": (partial(of_zoo, "resnet50", {}), (1, 32)),
    "mobilenet-v2": (partial(of_zoo, "mobilenet-v2", {}), (1, 32)),
    "densenet121": (partial(of_zoo, "densenet121", {}), (1, 16)),
    "bert-base-16": (partial(of_zoo, "bert-base", {"seq_len": 16}), (1, 32)),
    "bert-base-128": (partial(of_zoo, "bert-base", {"seq_len": 128}), (1, 32)),
    "bert-large-16": (partial(of_zoo, "bert-large", {"seq_len": 16}), (1, 32)),
    "bert-large-128": (partial(of_zoo, "bert-large", {"seq_len": 128}), (1, 32)),
    "tiny-encoder": (partial(of_torch, lambda: Block(32, 2), (1, 5, 32)), (1, 2)),
}  # fmt: skip
"""Name -> what makes it, and its batch sizes; the last is for trying this script on a processor."""
NETWORKS |= {
    name: (partial(of_package, name), sizes)
    for name, sizes in (("pp-ocr-det", (1, 8)), ("pp-ocr-rec", (1, 32)))
    if name in packaged_models()
}
if find_spec("torchvision"):
    NETWORKS |= {
        name: (partial(of_torchvision, called), (1, 32))
        for name, called in (("convnext-tiny", "convnext_tiny"), ("efficientnet-b0", "efficientnet_b0"))
    }

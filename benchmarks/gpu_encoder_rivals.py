"""Encoders in plain torch, the rivals of a stitched body in ``gpu_encoders.py``; kernels of a LoRA server in Triton.

Each rival is an ``Encoder`` with the same steps; they differ in products, normalisations and outputs.
"""

from __future__ import annotations

from functools import partial
from itertools import product as every
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from weft_stitch.running.body_rows import RowTables
from weft_stitch.running.fused_body import BodyLayer, BodyWeights, OwnHead, RowNorm, SharedProduct
from weft_stitch.running.kernel_shapes import replay_seconds

NAMES = ("qkv", "attention_out", "inner", "outer")
"""The products of a layer."""


class Encoder:
    """The steps of all rivals; tokens are [requests, length]."""

    def __init__(self, weights: BodyWeights) -> None:
        self.weights = weights

    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = self.weights
        embedded = functional.embedding(tokens, given.words) + given.positions[: tokens.shape[1]]
        x = self.normed(embedded, given.embedding_norm)
        for number, layer in enumerate(given.layers):
            x = self.layer(x, number, layer)
        return self.answers(x[:, 0])

    def layer(self, x: torch.Tensor, number: int, layer: BodyLayer) -> torch.Tensor:
        parts = self.product(x, number, "qkv").unflatten(2, (3, self.weights.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        x = self.normed(x + self.product(mixed, number, "attention_out"), layer.attention_norm)
        inner = functional.gelu(self.product(x, number, "inner"))
        return self.normed(x + self.product(inner, number, "outer"), layer.outer_norm)

    def normed(self, x: torch.Tensor, norm: RowNorm) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[2:], norm.scale[0], norm.shift[0], norm.epsilon)

    def product(self, x: torch.Tensor, number: int, name: str) -> torch.Tensor:
        raise NotImplementedError

    def answers(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[requests, classes], each request by the heads of its model."""
        for head, activate in ((self.weights.pooler, torch.tanh), (self.weights.classifier, lambda y: y)):
            x = activate(torch.baddbmm(head.bias[:, None].to(x.dtype), x[:, None], head.weight)[:, 0])
        return tuple(x.unbind())


class Merged(NamedTuple):
    """The whole weights of all models: layer -> product -> [models, width, depth]."""

    layers: list[dict[str, torch.Tensor]]


def merged(weights: BodyWeights, models: int) -> Merged:
    return Merged([{name: _whole(getattr(layer, name), models) for name in NAMES} for layer in weights.layers])


def whole_of(product: SharedProduct, model: int) -> torch.Tensor:
    """A model's weight [depth, width] in float32."""
    result = product.weight.float()
    if product.down is None or product.up is None:
        return result
    ups = product.up[model].float().chunk(product.sections, dim=1)
    return result + torch.cat([down.float().T @ up for down, up in zip(product.down[model], ups, strict=True)], dim=1)


def _whole(product: SharedProduct, models: int) -> torch.Tensor:
    if product.down is None:
        return product.weight.T.contiguous()[None].repeat(models, 1, 1)
    return torch.stack([whole_of(product, model).T.to(product.weight.dtype) for model in range(models)])


class Alone(Encoder):
    """One model, for as many requests as it is given."""

    def __init__(self, weights: BodyWeights, whole: Merged, model: int) -> None:
        super().__init__(weights)
        self._whole = [{name: stack[model % len(stack)] for name, stack in layer.items()} for layer in whole.layers]
        self._heads = [(head.weight[model], head.bias[model]) for head in (weights.pooler, weights.classifier)]

    def product(self, x: torch.Tensor, number: int, name: str) -> torch.Tensor:
        return functional.linear(x, self._whole[number][name], getattr(self.weights.layers[number], name).bias[0])

    def answers(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (pooler, first), (classifier, second) = self._heads
        pooled = torch.tanh(torch.addmm(first.to(x.dtype), x, pooler))
        return tuple(torch.addmm(second.to(x.dtype), pooled, classifier).split(1))


class Batched(Encoder):
    """Products with all weights of all models; a request of each."""

    def __init__(self, weights: BodyWeights, whole: Merged) -> None:
        super().__init__(weights)
        self._whole = whole

    def product(self, x: torch.Tensor, number: int, name: str) -> torch.Tensor:
        bias = getattr(self.weights.layers[number], name).bias
        return torch.baddbmm(bias, x, self._whole.layers[number][name].transpose(1, 2))


class PlainParts(Encoder):
    """Shared products, and low-rank parts as batched products over the models; a request of each."""

    def __init__(self, weights: BodyWeights) -> None:
        super().__init__(weights)
        self._parts = [{name: _joint(getattr(layer, name)) for name in NAMES} for layer in weights.layers]
        self._shared = [
            {name: getattr(layer, name).weight.T.contiguous() for name in NAMES} for layer in weights.layers
        ]

    def product(self, x: torch.Tensor, number: int, name: str) -> torch.Tensor:
        down, up = self._parts[number][name]
        bias = getattr(self.weights.layers[number], name).bias[0]
        return torch.baddbmm(functional.linear(x, self._shared[number][name], bias), torch.bmm(x, down), up)


def _joint(product: SharedProduct) -> tuple[torch.Tensor, torch.Tensor]:
    """All sections' narrow factors side by side, and wide ones that are zero in other sections."""
    assert product.down is not None and product.up is not None
    models, sections, *_ = product.down.shape
    ups = product.up.chunk(sections, dim=2)
    up = torch.stack([torch.block_diag(*(weight[model] for weight in ups)) for model in range(models)])
    return product.down.flatten(1, 2).transpose(1, 2).contiguous(), up


@triton.jit
def shrink_kernel(
    x, down, whose, narrow, rows, depth, sections, steps,
    RANK: tl.constexpr, GRANULE: tl.constexpr, TALL: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """narrow [part, section, rows, RANK]: a part of ``x @ down`` for rows of one model."""
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    model = tl.load(whose + tl.program_id(0) * TALL // GRANULE)
    k = tl.program_id(2) * steps * DEEP + tl.arange(0, DEEP)
    rank = tl.arange(0, RANK)
    line = (model * sections + tl.program_id(1)) * RANK + rank
    total = tl.zeros((TALL, RANK), dtype=tl.float32)
    for _ in range(steps):
        a = tl.load(x + row[:, None] * depth + k[None, :])
        total = tl.dot(a, tl.trans(tl.load(down + line[:, None] * depth + k[None, :])), total)
        k += DEEP
    to = (tl.program_id(2) * sections + tl.program_id(1)) * rows + row
    tl.store(narrow + to[:, None] * RANK + rank[None, :], total)


@triton.jit
def expand_kernel(
    narrow, up, whose, y, rows, width, section, sections,
    RANK: tl.constexpr, GRANULE: tl.constexpr, PARTS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add ``narrow @ up`` to y."""
    row = tl.program_id(1) * TALL + tl.arange(0, TALL)
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    model = tl.load(whose + tl.program_id(1) * TALL // GRANULE)
    rank = tl.arange(0, RANK)
    total = tl.zeros((TALL, RANK), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        at = (part * sections + tl.program_id(0) * WIDE // section) * rows + row
        total += tl.load(narrow + at[:, None] * RANK + rank[None, :])
    wide = tl.load(up + (model * RANK + rank)[:, None] * width + column[None, :])
    to = y + row[:, None] * width + column[None, :]
    tl.store(to, (tl.load(to).to(tl.float32) + tl.dot(total.to(wide.dtype), wide)).to(y.dtype.element_ty))


class ServerShape(NamedTuple):
    """How much programs of the two kernels do."""

    tall: int
    wide: int
    parts: int


class ServerParts(Encoder):
    """A LoRA server's way: shared products of the library, then a kernel that shrinks and one that expands."""

    def __init__(self, weights: BodyWeights, tables: RowTables) -> None:
        super().__init__(weights)
        self._tables = tables
        self._shared = [
            {name: getattr(layer, name).weight.T.contiguous() for name in NAMES} for layer in weights.layers
        ]
        self.shapes = dict.fromkeys(NAMES, ServerShape(16, 64, 1))

    def tune(self) -> None:
        rows, layer = len(self._tables.positions), self.weights.layers[0]
        granule = rows // len(self._tables.granule_models)
        for name in NAMES:
            depth = getattr(layer, name).weight.shape[0]
            x = torch.randn(1, rows, depth, device=self._tables.granule_models.device, dtype=layer.qkv.weight.dtype)
            times: dict[ServerShape, float] = {}
            for wide, parts in every((64, 128), (1, 4)):
                shape = self.shapes[name] = ServerShape(min(64, granule), wide, parts)
                times[shape] = replay_seconds(partial(self.product, x, 0, name))
            self.shapes[name] = min(times, key=times.__getitem__)

    def product(self, x: torch.Tensor, number: int, name: str) -> torch.Tensor:
        product: SharedProduct = getattr(self.weights.layers[number], name)
        y = functional.linear(x, self._shared[number][name], product.bias[0])
        self._add(x.flatten(0, 1), product, y.flatten(0, 1), self.shapes[name])
        return y

    def _add(self, x: torch.Tensor, product: SharedProduct, y: torch.Tensor, shape: ServerShape) -> None:
        rows, (depth, width), whose = len(x), product.weight.shape, self._tables.granule_models
        sizes: dict[str, Any] = {"RANK": product.rank, "GRANULE": rows // len(whose), "TALL": shape.tall}
        narrow = torch.empty((shape.parts, product.sections, rows, product.rank), device=x.device)
        shrink_kernel[(rows // shape.tall, product.sections, shape.parts)](
            x, product.down, whose, narrow, rows, depth, product.sections, depth // 64 // shape.parts, DEEP=64, **sizes
        )
        expand_kernel[(width // shape.wide, rows // shape.tall)](
            narrow, product.up, whose, y, rows, width, width // product.sections, product.sections,
            PARTS=shape.parts, WIDE=shape.wide, **sizes,
        )  # fmt: skip


class Reference(Encoder):
    """The models alone in float32, nothing rounded; a request of each, one after another."""

    def __init__(self, weights: BodyWeights, model: int) -> None:
        super().__init__(_wide(weights))
        self._model = model

    def normed(self, x: torch.Tensor, norm: RowNorm) -> torch.Tensor:
        return super().normed(x, RowNorm(norm.scale.float(), norm.shift.float(), norm.epsilon))

    def product(self, x: torch.Tensor, number: int, name: str) -> torch.Tensor:
        product = getattr(self.weights.layers[number], name)
        return x @ whole_of(product, self._model) + product.bias[0]

    def answers(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        model, weights = self._model, self.weights
        pooled = torch.tanh(x @ weights.pooler.weight[model] + weights.pooler.bias[model])
        return tuple((pooled @ weights.classifier.weight[model] + weights.classifier.bias[model]).split(1))


def _wide(weights: BodyWeights) -> BodyWeights:
    """What is no product in float32; products are made so one by one."""

    def head(each: OwnHead) -> OwnHead:
        return OwnHead(each.weight.float(), each.bias.float())

    return weights._replace(
        words=weights.words.float(), positions=weights.positions.float(),
        pooler=head(weights.pooler), classifier=head(weights.classifier),
    )  # fmt: skip

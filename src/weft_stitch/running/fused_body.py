"""A backbone of fine-tuned encoders in torch: ``FusedBody``, one Triton kernel per product (``body_kernels``).

Weights that all models share are stored once. A product may add a low-rank part for each model (LoRA: *down* to the
rank, and *up* again), norms may be each model's own, heads always are. A tile is what one program of a kernel computes
(``TileShape``). Without CUDA, plain twins of the kernels compute the same. ``body_rows`` has the layout of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from weft.base.errors import StitchError
from weft_stitch.running.body_rows import FINEST, RowTables, room_for
from weft_stitch.running.operators import Tensor, torch


class TileShape(NamedTuple):
    """Tile of a product: how much one Triton program computes, and how it is compiled."""

    tall: int
    """Rows."""
    wide: int
    """Columns."""
    deep: int
    """Depth per step of the loop."""
    warps: int = 4
    stages: int = 3
    parts: int = 1
    """Number of parts into which the sum over the depth is split (split-K); the norm after the product adds them up."""
    before: bool = False
    """Whether a separate kernel computes ``x @ down`` first."""


PLAINEST = TileShape(16, 16, 16)
"""The smallest tile, which is used until tiles are tuned."""
LIBRARY = TileShape(0, 0, 0)
"""No tile: the product is computed by torch, which is possible without low-rank parts and own biases."""
MOST_NARROWED, BUSY = 8, 256
"""Limits for splitting ``x @ down``: at most 8 parts of the depth, and only until 256 programs keep the GPU busy."""


class Early(Enum):
    """Which kernels may launch before the previous one has ended (programmatic dependent launch).

    They start sooner, but compete with it for the GPU.
    """

    NONE = "none"
    LIGHT = "all but products"
    ALL = "all"


@dataclass(frozen=True, eq=False)
class SharedProduct:
    """A linear layer of all models: a shared weight, with a low-rank part and a bias for each model if they differ."""

    weight: Tensor
    """[depth, width]: numbers per input row and per output row."""
    bias: Tensor
    """[1 or models, width]."""
    down: Tensor | None = None
    """[models, sections, rank, depth]: the narrow factors, for each section of the columns, such as the queries."""
    up: Tensor | None = None
    """[models, rank, width]: the wide factors."""

    @property
    def rank(self) -> int:
        """The rank of the low-rank parts; 0 if there are none."""
        return 0 if self.down is None else int(self.down.shape[2])

    @property
    def sections(self) -> int:
        """Number of equally wide ranges of columns that have narrow factors of their own."""
        return 1 if self.down is None else int(self.down.shape[1])

    def fits(self, shape: TileShape) -> bool:
        """Whether tiles of *shape* divide the product evenly."""
        if not shape.tall:  # LIBRARY
            return not self.rank and len(self.bias) == 1
        depth, width = self.weight.shape
        return bool(depth % (shape.deep * shape.parts) == 0 and (width // self.sections) % shape.wide == 0)


class RowNorm(NamedTuple):
    """A layer norm; its tables are [1 or models, width]."""

    scale: Tensor
    shift: Tensor
    epsilon: float


class BodyLayer(NamedTuple):
    """A post-norm encoder layer: its norms follow the residual sums."""

    qkv: SharedProduct
    """Queries, keys and values, side by side."""
    attention_out: SharedProduct
    """The product after the attention."""
    attention_norm: RowNorm
    """The norm of the attention's residual sum."""
    inner: SharedProduct
    """The first product of the feed-forward part, followed by GELU."""
    outer: SharedProduct
    """The second product of the feed-forward part."""
    outer_norm: RowNorm
    """The norm of the feed-forward part's residual sum."""


class OwnHead(NamedTuple):
    """A linear layer of each model's own: weight [models, depth, width], bias [models, width]."""

    weight: Tensor
    bias: Tensor


class BodyWeights(NamedTuple):
    """The weights of all models of a body."""

    words: Tensor
    """Embeddings of tokens."""
    positions: Tensor
    embedding_norm: RowNorm
    """The norm of the summed embeddings."""
    layers: Sequence[BodyLayer]
    pooler: OwnHead
    classifier: OwnHead
    heads: int
    """Number of attention heads."""
    token_types: Tensor | None = None
    """Embeddings of token types; None if the models have none."""

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor, once even if it is used in several places."""
        tensors: dict[int, Tensor] = {}  # address -> tensor
        pending: list[Any] = list(self)
        while pending:
            entry = pending.pop()
            if isinstance(entry, torch.Tensor):
                tensors[entry.data_ptr()] = entry
            elif isinstance(entry, SharedProduct):
                pending += [entry.weight, entry.bias, entry.down, entry.up]
            elif isinstance(entry, (tuple, list)):
                pending += entry
        yield from tensors.values()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


Key = tuple[int, int, int, int, int]
"""Depth, width and rank of a product, and rows and granule (see ``body_rows``) of its input."""


@dataclass(eq=False)
class FusedBody:
    """Runs a body, in Triton kernels on CUDA and in plain torch elsewhere."""

    weights: BodyWeights
    shapes: Mapping[Key, TileShape] = field(default_factory=dict)
    """The tiles of the products (``kernel_shapes`` finds them); by default the smallest."""
    early: Early = Early.NONE
    """Which kernels may launch before the previous one has ended."""

    def __call__(self, tokens: Tensor, tables: RowTables, longest: int, token_types: Tensor | None = None) -> Tensor:
        """The outputs [requests, classes] for *tokens* [rows].

        *longest*: at least the length of the longest request. *token_types*: of each row; None: all are of type 0.
        """
        weights = self.weights
        added = weights.positions[tables.positions]  # to the embeddings of the tokens
        if weights.token_types is not None:
            added = added + (weights.token_types[:1] if token_types is None else weights.token_types[token_types])
        x = self.norm(weights.words[tokens], added, weights.embedding_norm, tables)
        for layer in weights.layers:
            attended = self.attention(self.product(x, layer.qkv, tables), tables, longest)
            attention_out = self.product(attended, layer.attention_out, tables, summed=True)
            x = self.norm(attention_out, x, layer.attention_norm, tables)
            inner = self.product(x, layer.inner, tables, gelu=True)
            x = self.norm(self.product(inner, layer.outer, tables, summed=True), x, layer.outer_norm, tables)
        pooled = self.head(x, weights.pooler, tables, at=tables.first, tanh=True)
        return self.head(pooled, weights.classifier, tables)

    def shape(self, product: SharedProduct, rows: int, granule: int) -> TileShape:
        """The tile for *rows* rows in granules of *granule* rows; ``StitchError`` if it does not divide the product."""
        key = (*product.weight.shape, product.rank, rows, granule)
        shape = self.shapes.get(key, PLAINEST)
        if not product.fits(shape):
            depth, width = product.weight.shape
            raise StitchError(f"tiles of {shape} do not go into a product of {depth}x{width}; choose others")
        return shape

    def product(
        self, x: Tensor, product: SharedProduct, tables: RowTables, *, gelu: bool = False, summed: bool = False
    ) -> Tensor:
        """The product of *x* [rows, depth]: [rows, width].

        *gelu*: apply GELU to it. *summed*: a norm follows and adds up parts, so it may be [parts, rows, width].
        """
        weight, bias, down, up = product.weight, product.bias, product.down, product.up
        if not x.is_cuda:
            return plain_product(x, weight, bias, down, up, tables, gelu)
        shape = self.shape(product, len(x), len(x) // len(tables.granule_models))
        shape = shape if summed else shape._replace(parts=1)
        return launch_product(x, product, tables, shape, gelu=gelu, early=self.early)

    def norm(self, x: Tensor, residual: Tensor, norm: RowNorm, tables: RowTables) -> Tensor:
        """The normalised sum of *x*, [rows, width] or in parts as ``product`` returns them, and *residual*."""
        if not x.is_cuda:
            return plain_norm(x, residual, *norm, tables)
        return launch_norm(x, residual, norm, tables, self.early)

    def attention(self, x: Tensor, tables: RowTables, longest: int) -> Tensor:
        """Attention of each request over its own rows; *x* has queries, keys and values side by side."""
        heads = self.weights.heads
        if not x.is_cuda:
            return plain_attention(x, heads, tables)
        return launch_attention(x, heads, tables, longest, self.early)

    def head(
        self, x: Tensor, head: OwnHead, tables: RowTables, *, at: Tensor | None = None, tanh: bool = False
    ) -> Tensor:
        """The outputs [requests, width] of each model's own layer; *at* selects a row of *x* for each request."""
        if not x.is_cuda:
            return plain_head(x if at is None else x[at.long()], *head, tables, tanh)
        return launch_head(x, head, tables, at=at, tanh=tanh, early=self.early)


def launch_product(
    x: Tensor, product: SharedProduct, tables: RowTables, shape: TileShape, *, gelu: bool = False,
    early: Early = Early.NONE,
) -> Tensor:  # fmt: skip
    """Launch a product with tiles of *shape*; return [rows, width], or [parts, rows, width] if its depth is split."""
    if not shape.tall:  # LIBRARY
        y = torch.addmm(product.bias[0], x, product.weight)
        return torch.nn.functional.gelu(y) if gelu else y
    from weft_stitch.running.body_kernels import product_kernel

    width = product.weight.shape[1]
    grid = (-(-width // shape.wide), -(-len(x) // shape.tall), shape.parts)
    narrowed = launch_narrow(x, product, tables, early) if shape.before and product.rank else None
    arguments, settings = product_call(x, product, tables, shape, gelu, early, narrowed)
    product_kernel[grid](*arguments, **settings)
    y = arguments[OUTPUT]
    return y[0] if shape.parts == 1 else y


OUTPUT = 7
"""Index of the output among the arguments of ``product_call``."""


def product_call(
    x: Tensor, product: SharedProduct, tables: RowTables, shape: TileShape, gelu: bool, early: Early,
    narrowed: Tensor | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Arguments and settings for a launch of the product kernel; *narrowed*: what ``launch_narrow`` has computed."""
    rows, (depth, width) = len(x), product.weight.shape
    y_type = x.dtype if shape.parts == 1 else torch.float32  # the norm sums parts: do not round them before
    y = torch.empty((shape.parts, rows, width), dtype=y_type, device=x.device)
    arguments = (
        x, product.weight, product.bias, *_factors(product),
        x if narrowed is None else narrowed,  # the kernel needs a pointer even if it does not read it
        tables.granule_models, y, rows, depth, width, width // product.sections, product.sections,
        depth // shape.deep // shape.parts,
    )  # fmt: skip
    settings = dict(
        RANK=product.rank, GRANULE=rows // len(tables.granule_models), OWN_BIAS=len(product.bias) > 1,
        GELU=gelu, PRECISION=_precision(), NARROWED=0 if narrowed is None else len(narrowed),
        TALL=shape.tall, WIDE=shape.wide, DEEP=shape.deep, num_warps=shape.warps, num_stages=shape.stages,
        **_launch_settings(x, early=early is Early.ALL),
    )  # fmt: skip
    return arguments, settings


def launch_narrow(x: Tensor, product: SharedProduct, tables: RowTables, early: Early = Early.NONE) -> Tensor:
    """Launch ``x @ down`` with each row's model's factors, in parts of the depth: [part, section, rows, rank]."""
    from weft_stitch.running.body_kernels import narrow_kernel

    rows, depth, sections = len(x), len(product.weight), product.sections
    granule = rows // len(tables.granule_models)
    # n & -n is the largest power of two that divides n, so that tiles divide the granule and the depth
    tall, deep = min(64, granule & -granule), min(128, depth & -depth)
    steps = depth // deep
    divisors = [count for count in range(1, MOST_NARROWED + 1) if steps % count == 0]
    # as few parts as keep the GPU busy
    parts = next((count for count in divisors if rows // tall * sections * count >= BUSY), divisors[-1])
    y = torch.empty((parts, sections, rows, product.rank), dtype=torch.float32, device=x.device)
    narrow_kernel[(rows // tall, sections, parts)](
        x, product.down, tables.granule_models, y, rows, depth, sections, steps // parts,
        RANK=product.rank, GRANULE=granule, PRECISION=_precision(), TALL=tall, DEEP=deep, num_warps=4,
        **_launch_settings(x, early=early is not Early.NONE),
    )  # fmt: skip
    return y


def _factors(product: SharedProduct) -> tuple[Tensor, Tensor]:
    """The narrow and wide factors; the weight stands for both if there are none, as a kernel needs pointers."""
    if product.down is None or product.up is None:
        return product.weight, product.weight
    return product.down, product.up


def launch_norm(x: Tensor, residual: Tensor, norm: RowNorm, tables: RowTables, early: Early = Early.NONE) -> Tensor:
    """Launch ``norm_kernel``; *x* is [rows, width], or [parts, rows, width] to be summed."""
    from weft_stitch.running.body_kernels import norm_kernel

    y = torch.empty_like(residual)
    rows, width = y.shape
    line = width if len(norm.scale) > 1 else 0  # from one model's table to the next
    norm_kernel[(rows,)](
        x, residual, norm.scale, norm.shift, tables.granule_models, y, rows, width, line, norm.epsilon,
        PARTS=len(x) if x.dim() == 3 else 1, GRANULE=rows // len(tables.granule_models), ROOM=room_for(width),
        num_warps=4, **_launch_settings(x, early=early is not Early.NONE),
    )  # fmt: skip
    return y


def launch_attention(x: Tensor, heads: int, tables: RowTables, longest: int, early: Early = Early.NONE) -> Tensor:
    """Launch ``attention_kernel``; *x*: [rows, 3 * width]; *longest*: at least the length of the longest request."""
    from weft_stitch.running.body_kernels import attention_kernel

    rows, width = len(x), x.shape[1] // 3
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    tall = min(64, max(FINEST, room_for(longest)))
    attention_kernel[(len(tables.first), heads, -(-longest // tall))](
        x, tables.first, tables.lengths, y, width, (width // heads) ** -0.5,
        HEAD=width // heads, HEAD_ROOM=max(16, room_for(width // heads)), PRECISION=_precision(), TALL=tall, DEEP=tall,
        num_warps=1 if tall == FINEST else 4, **_launch_settings(x, early=early is not Early.NONE),
    )  # fmt: skip
    return y


def launch_head(
    x: Tensor, head: OwnHead, tables: RowTables, *, at: Tensor | None = None, tanh: bool = False,
    early: Early = Early.NONE,
) -> Tensor:  # fmt: skip
    """Launch ``head_kernel``; *at*: the row of each request, if *x* has more rows than requests."""
    from weft_stitch.running.body_kernels import head_kernel

    _, depth, width = head.weight.shape
    requests, wide = len(tables.models), min(64, max(16, room_for(width)))
    y = torch.empty((requests, width), dtype=x.dtype, device=x.device)
    head_kernel[(requests, -(-width // wide))](
        x, tables.first if at is None else at, tables.models, head.weight, head.bias, y, depth, width,
        PICKED=at is not None, TANH=tanh, WIDE=wide, DEEP=32, num_warps=4,
        **_launch_settings(x, early=early is not Early.NONE),
    )  # fmt: skip
    return y


def _launch_settings(x: Tensor, *, early: bool) -> dict[str, bool]:
    """Settings of a launch; *early*: before the previous kernel has ended, from compute capability 9 (Hopper) on."""
    if not (x.is_cuda and able_to_start_early(x.device)):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": early}  # EARLY: the kernel waits by itself, and lets an early one follow


def able_to_start_early(device: Any) -> bool:
    """Whether *device* supports programmatic dependent launch."""
    return bool(torch.cuda.get_device_capability(device)[0] >= 9)


def _precision() -> str:
    """The precision of float32 products in Triton, as torch is set."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def models_of(tables: RowTables, rows: int) -> Tensor:
    """The model of each of *rows* rows."""
    return tables.granule_models.long().repeat_interleave(rows // len(tables.granule_models))


def plain_product(
    x: Tensor, weight: Tensor, bias: Tensor, down: Tensor | None, up: Tensor | None, tables: RowTables, gelu: bool
) -> Tensor:
    """The twin of ``product_kernel`` in plain torch."""
    # axes: m rows, k depth, s sections, r rank, n columns of a section
    models = models_of(tables, len(x))
    y = x @ weight + bias[models if len(bias) > 1 else torch.zeros_like(models)]
    if down is not None and up is not None:
        narrow = torch.einsum("mk,msrk->msr", x, down[models])
        wide_factors = up[models].unflatten(2, (down.shape[1], -1))
        y = y + torch.einsum("msr,mrsn->msn", narrow, wide_factors).flatten(1)
    return torch.nn.functional.gelu(y) if gelu else y


def plain_norm(x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, epsilon: float, tables: RowTables) -> Tensor:
    """The twin of ``norm_kernel`` in plain torch."""
    models = models_of(tables, len(x)) * (len(scale) > 1)  # all 0 if the models share one table
    normal = torch.nn.functional.layer_norm((x + residual).float(), x.shape[1:], eps=epsilon)
    return (normal * scale[models] + shift[models]).to(x.dtype)


def plain_attention(x: Tensor, heads: int, tables: RowTables) -> Tensor:
    """The twin of ``attention_kernel`` in plain torch; *x*: [rows, 3 * width]."""
    y = torch.zeros(len(x), x.shape[1] // 3, dtype=x.dtype, device=x.device)
    for first, length in zip(tables.first.tolist(), tables.lengths.tolist(), strict=True):
        if length:
            q, k, v = x[first : first + length].unflatten(1, (3, heads, -1)).permute(1, 2, 0, 3)
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)  # [heads, length, head width]
            y[first : first + length] = attended.transpose(0, 1).flatten(1)
    return y


def plain_head(x: Tensor, weight: Tensor, bias: Tensor, tables: RowTables, tanh: bool) -> Tensor:
    """The twin of ``head_kernel`` in plain torch; *x* has one row per request."""
    # axes: q requests, k depth, n columns
    models = tables.models.long()
    y = torch.einsum("qk,qkn->qn", x.float(), weight[models].float()) + bias[models]
    return (torch.tanh(y) if tanh else y).to(x.dtype)

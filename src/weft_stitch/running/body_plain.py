"""What the kernels of a body compute, in plain torch: their twins, and what runs without CUDA.

Every row is taken by itself, with the weights of its model.
"""

from __future__ import annotations

from weft_stitch.running.body_rows import RowTables
from weft_stitch.running.operators import Tensor, torch


def models_of(tables: RowTables, rows: int) -> Tensor:
    """The model of each row."""
    return tables.whose.long().repeat_interleave(rows // len(tables.whose))


def product(
    x: Tensor, weight: Tensor, bias: Tensor, down: Tensor | None, up: Tensor | None, tables: RowTables, gelu: bool
) -> Tensor:
    whose = models_of(tables, len(x))
    y = x @ weight + bias[whose if len(bias) > 1 else torch.zeros_like(whose)]
    if down is not None and up is not None:
        narrow = torch.einsum("mk,msrk->msr", x, down[whose])
        wide = up[whose].unflatten(2, (down.shape[1], -1))
        y = y + torch.einsum("msr,mrsn->msn", narrow, wide).flatten(1)
    return torch.nn.functional.gelu(y) if gelu else y


def norm(x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, epsilon: float, tables: RowTables) -> Tensor:
    whose = models_of(tables, len(x)) * (len(scale) > 1)
    plain = torch.nn.functional.layer_norm((x + residual).float(), x.shape[1:], eps=epsilon)
    return (plain * scale[whose] + shift[whose]).to(x.dtype)


def attention(x: Tensor, heads: int, tables: RowTables) -> Tensor:
    y = torch.zeros(len(x), x.shape[1] // 3, dtype=x.dtype, device=x.device)
    for first, length in zip(tables.first.tolist(), tables.lengths.tolist(), strict=True):
        if length:
            q, k, v = x[first : first + length].unflatten(1, (3, heads, -1)).permute(1, 2, 0, 3)
            found = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            y[first : first + length] = found.transpose(0, 1).flatten(1)
    return y


def head(x: Tensor, weight: Tensor, bias: Tensor, tables: RowTables, tanh: bool) -> Tensor:
    models = tables.models.long()
    y = torch.einsum("qk,qkn->qn", x.float(), weight[models].float()) + bias[models]
    return (torch.tanh(y) if tanh else y).to(x.dtype)

"""Recommenders: a user and an item in, one score out."""

from __future__ import annotations

from itertools import pairwise

from weft.base.errors import ModelError
from weft.models.onnx_import.importer import TABLES
from weft.models.zoo.graph import GraphBuilder

GMF_WIDTH, MLP_WIDTHS = 64, (256, 256, 128, 64)
"""The NeuMF of MLPerf Training v0.5; an embedding of the MLP is half its first width."""


def ncf(g: GraphBuilder, *, users: int, items: int, tables: str) -> None:
    """Neural collaborative filtering (He et al. 2017): a product of embeddings beside an MLP."""
    if tables not in ("stream", "gather"):
        raise ModelError(f"{g.name}: tables must be 'stream' or 'gather', got {tables!r}")
    g.metadata[TABLES] = tables
    user, item = g.ids("user"), g.ids("item")
    half = MLP_WIDTHS[0] // 2
    gmf_user = g.embedding(user, "gmf.user", users, GMF_WIDTH)
    gmf_item = g.embedding(item, "gmf.item", items, GMF_WIDTH)
    mlp_user = g.embedding(user, "mlp.user", users, half)
    mlp_item = g.embedding(item, "mlp.item", items, half)
    product = g.node("Mul", "gmf.product", gmf_user, gmf_item)
    x = g.node("Concat", "mlp.concat", mlp_user, mlp_item, width=2 * half, axis=-1)
    for number, (_, out) in enumerate(pairwise(MLP_WIDTHS)):
        x = g.activation(g.dense(x, f"mlp.fc{number}", out), f"mlp.fc{number}", "relu")
    both = g.node("Concat", "concat", product, x, width=GMF_WIDTH + x.width, axis=-1)
    g.output(g.node("Sigmoid", "sigmoid", g.dense(both, "predict", 1)), "score", 1)

"""A body of fine-tuned encoders with a kernel for each product: rows, plain twins, and kernels in the interpreter."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: its kernels then run as Python, without a GPU

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.errors import StitchError
from weft_stitch.running import fused_body
from weft_stitch.running.body_rows import TokenRequest, pack
from weft_stitch.running.fused_body import (
    PLAINEST,
    BodyLayer,
    BodyWeights,
    FusedBody,
    OwnHead,
    RowNorm,
    SharedProduct,
    TileShape,
)
from weft_stitch.running.kernel_shapes import product_shapes

MODELS, WIDTH, HEADS, RANK = 3, 32, 2, 16
REQUESTS = [TokenRequest(*each) for each in ((2, 5), (0, 19), (2, 14), (1, 1), (0, 16))]


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """TF32 would round the interpreter's products too."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def drawn(*sizes, spread=1.0):
    return spread * torch.randn(*sizes)


def product(depth, width, *, rank=RANK, sections=1, own_bias=True):
    factors = (drawn(MODELS, sections, rank, depth, spread=0.2), drawn(MODELS, rank, width, spread=0.2))
    return SharedProduct(
        drawn(depth, width, spread=depth**-0.5), drawn(MODELS if own_bias else 1, width), *(factors if rank else ())
    )


def norm(*, own=True):
    return RowNorm(1 + drawn(MODELS if own else 1, WIDTH, spread=0.1), drawn(MODELS if own else 1, WIDTH), 1e-5)


def layer(rank, own):
    return BodyLayer(
        product(WIDTH, 3 * WIDTH, rank=rank, sections=3, own_bias=own),
        product(WIDTH, WIDTH, rank=rank, own_bias=own),
        norm(own=own),
        product(WIDTH, 4 * WIDTH, rank=rank, own_bias=own),
        product(4 * WIDTH, WIDTH, rank=rank, own_bias=own),
        norm(own=own),
    )


def weights(rank=RANK, own=True, layers=2):
    torch.manual_seed(0)
    heads = [OwnHead(drawn(MODELS, WIDTH, each), drawn(MODELS, each)) for each in (WIDTH, 3)]
    made = [layer(rank, own) for _ in range(layers)]
    return BodyWeights(drawn(50, WIDTH), drawn(64, WIDTH), norm(own=own), made, *heads, HEADS)


def alone(body, model, tokens):
    """What a model answers by itself, with its low-rank parts merged into its weights."""

    def of(table):
        return table[model if len(table) > 1 else 0]

    def merged(each):
        if each.down is None:
            return each.weight
        up = each.up[model].chunk(each.sections, dim=1)
        return each.weight + torch.cat([each.down[model, at].T @ up[at] for at in range(each.sections)], dim=1)

    def linear(x, each):
        return x @ merged(each) + of(each.bias)

    def normed(x, each):
        return torch.nn.functional.layer_norm(x, (WIDTH,), of(each.scale), of(each.shift), each.epsilon)

    x = normed(body.words[tokens] + body.positions[: len(tokens)], body.embedding_norm)
    for each in body.layers:
        q, k, v = linear(x, each.qkv).unflatten(1, (3, HEADS, -1)).permute(1, 2, 0, 3)
        seen = torch.softmax(q @ k.transpose(1, 2) * (WIDTH // HEADS) ** -0.5, -1) @ v
        x = normed(x + linear(seen.transpose(0, 1).flatten(1), each.attention_out), each.attention_norm)
        x = normed(x + linear(torch.nn.functional.gelu(linear(x, each.inner)), each.outer), each.outer_norm)
    pooled = torch.tanh(x[0] @ body.pooler.weight[model] + body.pooler.bias[model])
    return pooled @ body.classifier.weight[model] + body.classifier.bias[model]


def asked(body, requests, granule):
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 50, (each.length,), generator=generator) for each in requests]
    packed = pack(requests, granule)
    laid = torch.from_numpy(packed.lay_out([each.numpy() for each in tokens]))
    wanted = [alone(body, each.model, mine) for each, mine in zip(requests, tokens, strict=True)]
    return packed, laid, torch.stack(wanted)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.builds(TokenRequest, st.integers(0, MODELS - 1), st.integers(1, 40)), min_size=1, max_size=8),
    st.sampled_from([16, 32]),
)
def test_requests_of_any_models_and_lengths_are_answered_as_alone(requests, granule):
    body = weights(layers=1)
    packed, laid, wanted = asked(body, requests, granule)
    found = FusedBody(body)(laid, packed.tables("cpu"), packed.longest)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("rank", "own"), [(RANK, True), (0, True), (RANK, False)])
def test_bodies_with_and_without_parts_of_their_own_answer_as_their_models(rank, own):
    body = weights(rank, own)
    packed, laid, wanted = asked(body, REQUESTS, 16)
    found = FusedBody(body)(laid, packed.tables("cpu"), packed.longest)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


PRODUCTS = {
    "a tile for each model": (TileShape(16, 16, 16), 16, 3, 16),
    "several models in a tile": (TileShape(64, 32, 32), 16, 3, 16),
    "several models in a tile of a higher rank": (TileShape(64, 32, 32), 16, 1, 32),
    "a granule of several tiles": (TileShape(16, 32, 16), 32, 1, 16),
    "two granules in a tile": (TileShape(64, 16, 32), 32, 3, 16),
    "two parts of a sum": (TileShape(32, 16, 16, parts=2), 16, 3, 16),
    "narrow factors before": (TileShape(64, 16, 16, before=True), 16, 3, 32),
    "narrow factors before, in parts": (TileShape(32, 32, 16, parts=2, before=True), 32, 1, 16),
    "no parts": (TileShape(64, 32, 32), 16, 1, 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_product_equals_its_twin(name):
    torch.manual_seed(2)
    shape, granule, sections, rank = PRODUCTS[name]
    tables = pack(REQUESTS, granule).tables("cpu")
    each = product(WIDTH, 96, rank=rank, sections=sections)
    x = drawn(len(tables.positions), WIDTH)
    gelu = sections == 1 and shape.parts == 1
    found = fused_body.launch_product(x, each, tables, shape, gelu=gelu)
    wanted = fused_body.plain_product(x, each.weight, each.bias, each.down, each.up, tables, gelu)
    torch.testing.assert_close(found.sum(0) if shape.parts > 1 else found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("own", [True, False])
def test_the_norm_adds_up_parts_as_its_twin(own):
    torch.manual_seed(3)
    tables = pack(REQUESTS).tables("cpu")
    parts, residual, each = drawn(2, 96, WIDTH), drawn(96, WIDTH), norm(own=own)
    wanted = fused_body.plain_norm(parts.sum(0), residual, *each, tables)
    torch.testing.assert_close(fused_body.launch_norm(parts, residual, each, tables), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("longest", [19, 70])
def test_attention_equals_its_twin_for_all_lengths(longest):
    torch.manual_seed(4)
    packed = pack([*REQUESTS, TokenRequest(1, longest)])
    tables = packed.tables("cpu", room=8)
    x = drawn(packed.rows, 3 * 48)
    found, wanted = fused_body.launch_attention(x, 2, tables, longest), fused_body.plain_attention(x, 2, tables)
    for first, (_, length) in zip(packed.first, packed.requests, strict=True):
        rows = slice(first, first + length)
        torch.testing.assert_close(found[rows], wanted[rows], atol=1e-5, rtol=1e-5)


def test_heads_equal_their_twin():
    torch.manual_seed(5)
    tables, x = pack(REQUESTS).tables("cpu"), drawn(96, 40)
    each = OwnHead(drawn(MODELS, 40, 70), drawn(MODELS, 70))
    picked = x[tables.first.long()]
    wanted = fused_body.plain_head(picked, *each, tables, True)
    for found in (
        fused_body.launch_head(x, each, tables, at=tables.first, tanh=True),
        fused_body.launch_head(picked, each, tables, tanh=True),
    ):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_rows_that_do_not_hold_the_requests_are_refused():
    with pytest.raises(StitchError, match="64 rows do not hold the requests, which take 96 in steps of 16"):
        pack(REQUESTS, rows=64)
    with pytest.raises(StitchError, match="a request of 0 tokens"):
        pack([TokenRequest(0, 0)])


@pytest.mark.parametrize("rank", [0, RANK])
def test_there_are_tiles_for_small_products_too(rank):
    assert product_shapes(product(128, 128, rank=rank), 64, False)
    assert product_shapes(product(32, 32, rank=rank), 64, False) == [PLAINEST]

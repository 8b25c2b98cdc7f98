"""The Triton kernels of a body: products, norms, attention and heads for the rows of all models, one launch each.

Rows of all models are in one matrix, those of a model from a multiple of GRANULE on (``body_rows``), so that a tile of
a product contains few models. A tile is TALL rows by WIDE columns, computed in steps of DEEP inputs. A low-rank part is
a product with a model's narrow factors (*down*) and one with its wide factors (*up*). A tile reads the shared weights
and, in the same loop, the narrow factors of its models; products of a row with another model's factors are masked
before the wide factors follow. Where a tile has many models, or a matrix many tiles, a separate kernel computes the
narrow products first. ``fused_body`` launches the kernels and has their twins in plain torch.
"""

# the kernels' arguments have no types, and their names are constants'
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """With EARLY, wait for the previous kernel and let the next one launch; otherwise launches are in order anyway."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["sections", "steps"])
def narrow_kernel(
    x, down, granule_models, y, rows, depth, sections, steps,
    RANK: tl.constexpr, GRANULE: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
    TALL: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Parts of ``x @ down[model]`` for each row's model; y [part, section, rows, RANK].

    *granule_models*: the model of each granule of rows. *steps*: of DEEP inputs in a part. Axes of programs: tile of
    rows, section, part of the depth.
    """
    wait_for_previous(EARLY)
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    model = tl.load(granule_models + tl.program_id(0) * TALL // GRANULE)
    k = tl.program_id(2) * steps * DEEP + tl.arange(0, DEEP)
    rank = tl.arange(0, RANK)
    factor_row = (model * sections + tl.program_id(1)) * RANK + rank
    x_at = x + row[:, None] * depth + k[None, :]
    down_at = down + factor_row[:, None] * depth + k[None, :]
    total = tl.zeros((TALL, RANK), dtype=tl.float32)
    for _ in range(steps):
        total = tl.dot(tl.load(x_at), tl.trans(tl.load(down_at)), total, input_precision=PRECISION)
        x_at += DEEP
        down_at += DEEP
    out_row = (tl.program_id(2) * sections + tl.program_id(1)) * rows + row
    tl.store(y + out_row[:, None] * RANK + rank[None, :], total)


@triton.jit(do_not_specialize=["sections", "steps"])
def product_kernel(
    x, weight, bias, down, up, narrowed, granule_models, y, rows, depth, width, section, sections, steps,
    RANK: tl.constexpr, GRANULE: tl.constexpr, OWN_BIAS: tl.constexpr, GELU: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr, NARROWED: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """``x @ weight + (x @ down[model]) @ up[model] + bias``; programs along axis 2 each compute a part of the sum.

    x [rows, depth], weight [depth, width], down [model, section, RANK, depth], up [model, RANK, width], y [part, rows,
    width]. *granule_models*: the model of each granule of rows. The columns of a tile are in one section of *section*
    columns, each of which has narrow factors of its own. *steps*: of DEEP inputs in a part. NARROWED: the number of
    parts of ``x @ down`` in *narrowed* [part, section, rows, RANK]; 0 if this kernel computes ``x @ down`` itself.
    """
    wait_for_previous(EARLY)
    part = tl.program_id(2)
    row = tl.program_id(1) * TALL + tl.arange(0, TALL)
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    k = part * steps * DEEP + tl.arange(0, DEEP)
    x_at = x + (row % rows)[:, None] * depth + k[None, :]
    weight_at = weight + k[:, None] * width + (column % width)[None, :]
    total = tl.zeros((TALL, WIDE), dtype=tl.float32)
    if RANK > 0:
        # a slot is one granule of the tile; the factors of all slots stand side by side
        SLOTS: tl.constexpr = TALL // GRANULE if TALL > GRANULE else 1
        slot = tl.arange(0, SLOTS * RANK) // RANK
        granule = (tl.program_id(1) * TALL) // GRANULE + slot
        model = tl.load(granule_models + granule, mask=granule * GRANULE < rows, other=0)
        rank = tl.arange(0, SLOTS * RANK) % RANK
        section_index = (tl.program_id(0) * WIDE) // section
        factor_row = (model * sections + section_index) * RANK + rank
        down_at = down + factor_row[:, None] * depth + k[None, :]
        narrow = tl.zeros((TALL, SLOTS * RANK), dtype=tl.float32)
    for _ in range(steps):
        a = tl.load(x_at)
        total = tl.dot(a, tl.load(weight_at), total, input_precision=PRECISION)
        x_at += DEEP
        weight_at += DEEP * width
        if RANK > 0 and NARROWED == 0:
            narrow = tl.dot(a, tl.trans(tl.load(down_at)), narrow, input_precision=PRECISION)
            down_at += DEEP
    if RANK > 0:
        # a row takes the factors of its own model only, not those of the tile's other models
        own_slot = tl.arange(0, TALL)[:, None] // (TALL // SLOTS) == slot[None, :]
        if NARROWED > 0:
            narrow = _gather_sums(narrowed, row, section_index, sections, rows, part, RANK, NARROWED, TALL, SLOTS)
        wide = tl.load(up + (model * RANK + rank)[:, None] * width + (column % width)[None, :])
        total = tl.dot(tl.where(own_slot, narrow, 0.0).to(wide.dtype), wide, total, input_precision=PRECISION)
    known = (row < rows)[:, None] & (column < width)[None, :]
    if part == 0:  # the parts are added up later: only one may have the bias
        if OWN_BIAS:
            owner = tl.load(granule_models + row // GRANULE, mask=row < rows, other=0)
            total += tl.load(bias + owner[:, None] * width + column[None, :], mask=known, other=0.0).to(tl.float32)
        else:
            total += tl.load(bias + column % width).to(tl.float32)[None, :]
    if GELU:
        total = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))  # the root of 1/2
    offsets = (part * rows + row)[:, None] * width + column[None, :]
    tl.store(y + offsets, total.to(y.dtype.element_ty), mask=known)


@triton.jit
def _gather_sums(
    narrowed, row, section_index, sections, rows, part,
    RANK: tl.constexpr, NARROWED: tl.constexpr, TALL: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The sums of ``narrow_kernel`` for each row, repeated for each slot of the tile; zero except in part 0.

    A slot is one granule of the tile, whose rows are of one model. Only part 0 may add what all parts share.
    """
    first_part = narrowed + (section_index * rows + row)[:, None] * RANK + tl.arange(0, RANK)[None, :]
    known = (row < tl.where(part == 0, rows, 0))[:, None]
    total = tl.zeros((TALL, RANK), dtype=tl.float32)
    for narrow_part in tl.static_range(NARROWED):
        total += tl.load(first_part + narrow_part * sections * rows * RANK, mask=known, other=0.0)
    return tl.reshape(tl.broadcast_to(total[:, None, :], (TALL, SLOTS, RANK)), (TALL, SLOTS * RANK))


@triton.jit
def norm_kernel(
    x, residual, scale, shift, granule_models, y, rows, width, line, epsilon,
    PARTS: tl.constexpr, GRANULE: tl.constexpr, ROOM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The sum of the parts of *x* and a residual, normalised with each row's model's tables.

    x [part, rows, width], scale and shift [model, width]. *line*: the distance from one model's table to the next; 0 if
    all models share it. ROOM: a power of two from *width* on.
    """
    wait_for_previous(EARLY)
    row = tl.program_id(0)
    column = tl.arange(0, ROOM)
    known = column < width
    offsets = row * width + column
    total = tl.load(residual + offsets, mask=known, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(x + part * rows * width + offsets, mask=known, other=0.0).to(tl.float32)
    centred = tl.where(known, total - tl.sum(total) / width, 0.0)
    normal = centred * tl.rsqrt(tl.sum(centred * centred) / width + epsilon)
    own_entry = tl.load(granule_models + row // GRANULE) * line + column
    normal = normal * tl.load(scale + own_entry, mask=known, other=0.0) + tl.load(
        shift + own_entry, mask=known, other=0.0
    )
    tl.store(y + offsets, normal.to(y.dtype.element_ty), mask=known)


@triton.jit
def attention_kernel(
    x, first, lengths, y, width, scale,
    HEAD: tl.constexpr, HEAD_ROOM: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
    TALL: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Attention of each request over its own tokens, with an online softmax over blocks of DEEP keys.

    x [rows, 3 * width]: queries, keys and values side by side; y [rows, width]. *first*, *lengths*: first row and
    number of tokens of each request. *scale*: of scores. HEAD: the width of a head, HEAD_ROOM: a power of two from
    there on. Axes of programs: request, head, tile of queries.
    """
    wait_for_previous(EARLY)
    start = tl.load(first + tl.program_id(0))
    length = tl.load(lengths + tl.program_id(0))
    if tl.program_id(2) * TALL < length:
        feature = tl.arange(0, HEAD_ROOM)
        column = tl.program_id(1) * HEAD + feature
        known = feature < HEAD
        query = tl.program_id(2) * TALL + tl.arange(0, TALL)
        query_mask = (query < length)[:, None] & known[None, :]
        q = tl.load(x + (start + query)[:, None] * (3 * width) + column[None, :], mask=query_mask, other=0.0)
        highest = tl.full((TALL,), -1e30, dtype=tl.float32)
        weight_sum = tl.zeros((TALL,), dtype=tl.float32)
        total = tl.zeros((TALL, HEAD_ROOM), dtype=tl.float32)
        for begin in range(0, length, DEEP):
            key = begin + tl.arange(0, DEEP)
            key_mask = (key < length)[:, None] & known[None, :]
            row_at = x + (start + key)[:, None] * (3 * width) + column[None, :]
            keys = tl.load(row_at + width, mask=key_mask, other=0.0)
            values = tl.load(row_at + 2 * width, mask=key_mask, other=0.0)
            scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
            scores = tl.where((key < length)[None, :], scores, -1e30)
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp(scores - new_highest[:, None])
            rescale = tl.exp(highest - new_highest)
            weight_sum = weight_sum * rescale + tl.sum(weights, 1)
            total = tl.dot(weights.to(values.dtype), values, total * rescale[:, None], input_precision=PRECISION)
            highest = new_highest
        y_at = y + (start + query)[:, None] * width + column[None, :]
        tl.store(y_at, (total / weight_sum[:, None]).to(y.dtype.element_ty), mask=query_mask)


@triton.jit
def head_kernel(
    x, at, models, weight, bias, y, depth, width,
    PICKED: tl.constexpr, TANH: tl.constexpr, EARLY: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """One row of each request times its model's matrix; x [rows, depth], weight [model, depth, width].

    *at*: with PICKED, the row of each request; otherwise x has one row per request.
    """
    wait_for_previous(EARLY)
    request = tl.program_id(0)
    model = tl.load(models + request)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    known = column < width
    row_at = x + (tl.load(at + request) if PICKED else request) * depth
    total = tl.zeros((DEEP, WIDE), dtype=tl.float32)
    for begin in range(0, depth, DEEP):
        k = begin + tl.arange(0, DEEP)
        values = tl.load(row_at + k, mask=k < depth, other=0.0).to(tl.float32)
        weight_offsets = (model * depth + k)[:, None] * width + column[None, :]
        weights = tl.load(weight + weight_offsets, mask=(k < depth)[:, None] & known[None, :], other=0.0).to(tl.float32)
        total += values[:, None] * weights
    answer = tl.sum(total, 0) + tl.load(bias + model * width + column, mask=known, other=0.0)
    if TANH:
        answer = 1.0 - 2.0 / (tl.exp(2.0 * answer) + 1.0)  # tanh
    tl.store(y + request * width + column, answer.to(y.dtype.element_ty), mask=known)

"""The Triton kernel behind the form ``fused``: a layer of all tasks in one launch, each row with its own weights.

A program computes one tile (``packing.Tile``): TALL output positions of one task by WIDE channels of one output block,
as an implicit matrix product over taps and input columns, DEEP in each step. A *rider* is an own block of the task that
is computed along with a shared block's tile, as both read the same input. A shared block reads the shared weights and
then its task's own, so that nothing is stored twice, nothing is multiplied by zero and nothing needs a mask; the tiles
of all tasks run at once and meet the shared weights in the cache. Scale, shift, a residual and the activation follow in
registers. ``module.plain`` is the same computation in numpy.
"""

# the kernel's arguments have no types, and their names are its constants'
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from weft_stitch.packing import Tile

FIELDS = tl.constexpr(len(Tile._fields))


@triton.jit
def activate(x, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr):
    """The activation FUNCTION of *x*; ALPHA, BETA: its parameters (``packing.Activation``)."""
    if FUNCTION == "Relu":
        x = tl.maximum(x, 0.0)
    if FUNCTION == "LeakyRelu":
        x = tl.where(x < 0.0, x * ALPHA, x)
    if FUNCTION == "Clip":
        x = tl.minimum(tl.maximum(x, ALPHA), BETA)
    if FUNCTION == "Sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    if FUNCTION == "Silu":
        x = x / (1.0 + tl.exp(-x))
    if FUNCTION == "HardSigmoid":
        x = tl.minimum(tl.maximum(x * ALPHA + BETA, 0.0), 1.0)
    if FUNCTION == "HardSwish":
        x = x * tl.minimum(tl.maximum(x / 6.0 + 0.5, 0.0), 1.0)
    return x


@triton.jit
def look_up_rows(places, lines, table, k, tap, inside, ALIGN: tl.constexpr):
    """Look up input columns *k* in *places* and *lines* from *table* on (see ``PackedLayer.places``).

    Returns the index of their weights at *tap*, and whether they have any. *inside*: which of *k* are columns.
    """
    place = tl.load(places + table + k, mask=inside, other=-1)
    row = (place + tap * tl.load(lines + table + k, mask=inside, other=0)) * ALIGN
    return row, place >= 0


@triton.jit
def tile_product(
    x, weights, places, lines, tile, corner, rows_seen, columns_seen, width, x_columns,
    TAPS_HIGH: tl.constexpr, TAPS_WIDE: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    BY_TABLE: tl.constexpr, ALIGN: tl.constexpr, INPUT_ALIGN: tl.constexpr,
    FLAT: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """The sums over taps and input columns for one tile, and for its rider if NARROW is above 0.

    *tile*: its row in the table of tiles; ``tile + 3`` is field 3 of ``packing.Tile``. *corner*: for each position, the
    index in *x* of its first tap. *rows_seen*, *columns_seen*: for each position, a bit per tap that is inside the
    picture. FLAT: taps and columns are one dimension of the loop. DEPTH: the columns of a row, or 0 if tasks differ.
    Places are computed by additions, not selections: only so does the compiler know that they are multiples of ALIGN.
    """
    TAPS: tl.constexpr = TAPS_HIGH * TAPS_WIDE
    # fields 3 first channel, 4 span, 8 to 13 as the variables are named (9 line, 12 jump), 14 depth, 15 table
    channels = tl.multiple_of(tl.load(tile + 3), 16) + tl.arange(0, WIDE)
    known = channels < tl.multiple_of(tl.load(tile + 4), ALIGN)
    first_place = tl.multiple_of(tl.load(tile + 8), ALIGN)
    line = tl.multiple_of(tl.load(tile + 9), ALIGN)
    first_end = tl.load(tile + 10)
    second_column = tl.load(tile + 11)
    jump = tl.multiple_of(tl.load(tile + 12), ALIGN)
    second_end = tl.load(tile + 13)
    table = tl.load(tile + 15)
    if NARROW > 0:
        rider = tile + FIELDS
        own_channels = tl.arange(0, NARROW)
        own_known = own_channels < tl.multiple_of(tl.load(rider + 4), ALIGN)
        own_first_place = tl.multiple_of(tl.load(rider + 8), ALIGN)
        own_line = tl.multiple_of(tl.load(rider + 9), ALIGN)
        own_jump = tl.multiple_of(tl.load(rider + 12), ALIGN)
        own_table = tl.load(rider + 15)
        own_total = tl.zeros((TALL, NARROW), dtype=tl.float32)
    depth = DEPTH if DEPTH > 0 else tl.multiple_of(tl.load(tile + 14), INPUT_ALIGN)
    deep_steps = tl.cdiv(depth, DEEP)
    steps = tl.cdiv(depth * TAPS, DEEP) if FLAT else deep_steps * TAPS
    total = tl.zeros((TALL, WIDE), dtype=tl.float32)
    for step in range(steps):
        if TAPS == 1:
            tap = 0
            k = step * DEEP + tl.arange(0, DEEP)
            inside = k < depth
        elif FLAT:
            flat = step * DEEP + tl.arange(0, DEEP)
            tap = flat // depth
            k = flat % depth
            inside = tap < TAPS
        else:
            tap = step // deep_steps
            k = (step - tap * deep_steps) * DEEP + tl.arange(0, DEEP)
            inside = k < depth
        tap_row = tap // TAPS_WIDE
        tap_column = tap % TAPS_WIDE
        offset = (tap_row * (DILATION_H * width) + tap_column * DILATION_W) * x_columns
        if TAPS == 1:
            valid = ((rows_seen & columns_seen) != 0)[:, None] & inside[None, :]
        elif FLAT:
            valid = ((rows_seen[:, None] >> tap_row[None, :]) & (columns_seen[:, None] >> tap_column[None, :]) & 1) != 0
            valid = valid & inside[None, :]
        else:
            valid = (((rows_seen >> tap_row) & (columns_seen >> tap_column) & 1) != 0)[:, None] & inside[None, :]
        a = tl.load(x + corner[:, None] + (offset + k)[None, :], mask=valid, other=0.0)
        second = k >= second_column
        if BY_TABLE:
            row, owned = look_up_rows(places, lines, table, k, tap, inside, ALIGN)
        else:
            owned = inside & ((k < first_end) | (second & (k < second_end)))
            row = (first_place + tap * line) + k * (TAPS * line) + second.to(tl.int32) * jump
        b = tl.load(weights + row[:, None] + channels[None, :], mask=owned[:, None] & known[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        if NARROW > 0:
            if BY_TABLE:
                own_row, owned = look_up_rows(places, lines, own_table, k, tap, inside, ALIGN)
            else:
                own_row = (own_first_place + tap * own_line) + k * (TAPS * own_line) + second.to(tl.int32) * own_jump
            own_mask = owned[:, None] & own_known[None, :]
            own_b = tl.load(weights + own_row[:, None] + own_channels[None, :], mask=own_mask, other=0.0)
            own_total = tl.dot(a, own_b, own_total, input_precision=PRECISION)
    if NARROW > 0:
        return total, own_total
    else:
        return total, total


@triton.jit
def finish(
    total, tile, positions, alive, scale, shift, residual, y, y_columns,
    RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    ALIGN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scale, shift and activate a tile's sums, add the residual, and write them; columns outside the block become 0.

    *alive*: which of *positions* belong to the task. Fields of ``packing.Tile``: 0 task, 3 first channel, 4 span, 5
    skip, 6 width, 7 column.
    """
    channels = tl.multiple_of(tl.load(tile + 3), 16) + tl.arange(0, WIDE)
    known = channels < tl.multiple_of(tl.load(tile + 4), ALIGN)
    skip = tl.load(tile + 5)
    in_block = (channels >= skip) & (channels < skip + tl.load(tile + 6))
    out = tl.multiple_of(tl.load(tile + 7), ALIGN) + channels
    channel_index = tl.load(tile) * y_columns + out
    total = total * tl.load(scale + channel_index, mask=known, other=0.0)[None, :]
    total += tl.load(shift + channel_index, mask=known, other=0.0)[None, :]
    offsets = positions[:, None] * y_columns + out[None, :]
    writes = alive[:, None] & known[None, :]
    if RESIDUAL:
        total += tl.load(residual + offsets, mask=writes, other=0.0).to(tl.float32)
    total = tl.where(in_block[None, :], activate(total, ACTIVATION, ALPHA, BETA), 0.0)
    tl.store(y + offsets, total.to(y.dtype.element_ty), mask=writes)


@triton.jit
def visible_taps(first, size, TAPS: tl.constexpr, DILATION: tl.constexpr):
    """A bit for each tap along one axis: is it inside a picture of *size*? *first*: the coordinate of the first tap."""
    bits = tl.zeros_like(first)
    for tap in tl.static_range(TAPS):
        coordinate = first + tap * DILATION
        bits = bits | (((coordinate >= 0) & (coordinate < size)).to(tl.int32) << tap)
    return bits


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width", "x_groups", "y_groups"])
def fused_kernel(
    x, weights, places, lines, tiles, scale, shift, residual, y,
    height, width, out_height, out_width, x_groups, y_groups,
    TAPS_HIGH: tl.constexpr, TAPS_WIDE: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    BY_TABLE: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr,
    BETA: tl.constexpr, ALIGN: tl.constexpr, INPUT_ALIGN: tl.constexpr, FLAT: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Compute one tile, and its rider if it has one; *tiles* are those of ``PackedLayer.tiles``.

    x, y and residual: [rows, height, width, columns]. *places*, *lines*: the two tables of ``PackedLayer.places``.
    *x_groups*, *y_groups*: columns divided by the alignment, so that the compiler knows that they are multiples of it.
    """
    tile = tiles + tl.program_id(0) * (2 * FIELDS)
    x_columns = x_groups * INPUT_ALIGN
    y_columns = y_groups * ALIGN
    positions = tl.load(tile + 1) + tl.arange(0, TALL)  # field 1: first position
    alive = positions < tl.load(tile + 2)  # field 2: end position
    plane = out_height * out_width
    image = positions // plane
    within = positions - image * plane
    top = (within // out_width) * STRIDE_H - PAD_H
    left = (within % out_width) * STRIDE_W - PAD_W
    corner = ((image * height + top) * width + left) * x_columns
    rows_seen = tl.where(alive, visible_taps(top, height, TAPS_HIGH, DILATION_H), 0)
    columns_seen = visible_taps(left, width, TAPS_WIDE, DILATION_W)
    if NARROW > 0 and tl.load(tile + FIELDS + 4) > 0:  # the rider spans columns
        total, own_total = tile_product(
            x, weights, places, lines, tile, corner, rows_seen, columns_seen, width, x_columns,
            TAPS_HIGH, TAPS_WIDE, DILATION_H, DILATION_W, BY_TABLE, ALIGN, INPUT_ALIGN, FLAT, DEPTH, PRECISION,
            TALL, WIDE, DEEP, NARROW,
        )  # fmt: skip
        finish(
            total, tile, positions, alive, scale, shift, residual, y, y_columns,
            RESIDUAL, ACTIVATION, ALPHA, BETA, ALIGN, WIDE,
        )  # fmt: skip
        finish(
            own_total, tile + FIELDS, positions, alive, scale, shift, residual, y, y_columns,
            RESIDUAL, ACTIVATION, ALPHA, BETA, ALIGN, NARROW,
        )  # fmt: skip
    else:
        single_total, _ = tile_product(
            x, weights, places, lines, tile, corner, rows_seen, columns_seen, width, x_columns,
            TAPS_HIGH, TAPS_WIDE, DILATION_H, DILATION_W, BY_TABLE, ALIGN, INPUT_ALIGN, FLAT, DEPTH, PRECISION,
            TALL, WIDE, DEEP, 0,
        )  # fmt: skip
        finish(
            single_total, tile, positions, alive, scale, shift, residual, y, y_columns,
            RESIDUAL, ACTIVATION, ALPHA, BETA, ALIGN, WIDE,
        )  # fmt: skip

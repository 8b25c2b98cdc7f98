"""Operators that move, choose or generate data: views, gathers, pads, constants, sequences, texts."""

from __future__ import annotations

from functools import partial

from weft.models.operators.operator import BLOCKED, EVERY_INPUT, MICROSOFT, Operator, StitchForm
from weft.models.operators.rules import costs, meanings, rows, window_meanings
from weft.models.operators.rules.shapes import (
    blocked,
    compressed,
    cropped,
    expanded,
    gathered_blocks,
    joined,
    like,
    looked_up,
    nonzero_places,
    reshaped,
    unblocked,
    unfolded,
)

_view = partial(Operator, cost=costs.free, view=True)
_moves = partial(Operator, cost=costs.movement)
_selects = partial(Operator, cost=costs.selection)
_free = partial(Operator, cost=costs.free)
_random = partial(_moves, random=True)
_same = (like(0),)

VIEWS = (
    _view(
        "Reshape",
        shapes=(reshaped,),
        rows=rows.reshaped,
        sized_by=(1,),
        torch=meanings.reshape,
        stitching=StitchForm("reshape"),
    ),
    _view("Flatten", rows=rows.reshaped, torch=meanings.flatten, stitching=StitchForm("flatten")),
    _view("Squeeze", rows=rows.reshaped, sized_by=(1,), torch=meanings.squeeze, stitching=StitchForm("squeeze")),
    _view("Unsqueeze", rows=rows.reshaped, sized_by=(1,), torch=meanings.unsqueeze, stitching=StitchForm("unsqueeze")),
    _view(
        "Identity",
        rows=rows.elementwise,
        torch=lambda t, x: x,
        stitching=StitchForm("same", "Identity", keeps_zero=True),
    ),
    _view(
        "Dropout",
        shapes=(like(0), like(0)),
        rows=rows.dropout,
        torch=meanings.dropout,
        numbers=(2,),
        stitching=StitchForm("dropout"),
    ),
    _view("Optional"),
    _view("OptionalGetElement"),
    _view("SequenceAt", sized_by=(1,)),
    _view("MemcpyFromHost", shapes=_same),
    _view("MemcpyToHost", shapes=_same),
    _view(f"{MICROSOFT}ExpandDims", shapes=(expanded,), sized_by=(1,)),
    _view(f"{MICROSOFT}BitmaskDropout", shapes=_same),
)

MOVED = (
    _moves("Transpose", rows=rows.moved(0), torch=meanings.transpose, stitching=StitchForm("transpose")),
    _moves("Concat", rows=rows.moved(), torch=meanings.concat, stitching=StitchForm("concat")),
    _moves(
        "Pad",
        rows=rows.moved(0, positions_in=(1, 3)),
        sized_by=(1, 3),
        torch=meanings.pad,
        numbers=(1, 2, 3),
        stitching=StitchForm("pad"),
    ),
    _moves("Expand", rows=rows.moved(0, positions_in=(1,)), sized_by=(1,), torch=meanings.expand),
    _moves(
        "Tile",
        rows=rows.moved(0, positions_in=(1,)),
        sized_by=(1, 2),
        torch=lambda t, x, repeats: t.torch.tile(x, repeats),
    ),
    _moves("DepthToSpace", rows=rows.moved(0), torch=meanings.depth_to_space),
    _moves("SpaceToDepth", rows=rows.moved(0), torch=meanings.space_to_depth),
    _moves("Trilu", rows=rows.triangle, torch=meanings.triangle, numbers=(1,)),
    _moves("ReverseSequence", rows=rows.reversed_sequence, torch=meanings.reverse_sequence),
    _moves("Resize", rows=rows.resized, sized_by=(1, 2, 3), torch=window_meanings.resize),
    _moves("Upsample", rows=rows.upsampled, sized_by=(1,), torch=window_meanings.upsample),
    _moves("GridSample", rows=rows.kept_apart(0, 1)),
    _moves("AffineGrid", rows=rows.kept_apart(0), sized_by=(1,)),
    _moves("Col2Im", rows=rows.kept_apart(0), sized_by=(1, 2)),
    _moves("CenterCropPad", sized_by=(1,)),
    _moves("Crop"),
    # ONNX Runtime's
    _moves(f"{MICROSOFT}QLinearConcat", shapes=(joined,), rows=rows.joined_quantised),
    _moves(f"{MICROSOFT}Pad", shapes_of=("Pad", 3), rows=rows.moved(0, positions_in=(1, 3)), sized_by=(1, 3)),
    _moves(f"{MICROSOFT}Trilu", shapes=_same, rows=rows.triangle),
    _moves(f"{MICROSOFT}GridSample", shapes_of=("GridSample", 2), rows=rows.kept_apart(0, 1)),
    _moves(f"{MICROSOFT}CropAndResize", shapes=(cropped,), sized_by=(3,)),
    _moves(f"{MICROSOFT}UnfoldTensor", shapes=(unfolded,)),
    _moves(f"{MICROSOFT}QuantizeBFP"),
    _moves(f"{MICROSOFT}DequantizeBFP"),
    _moves(f"{BLOCKED}ReorderInput", shapes=(blocked,), rows=rows.kept_apart(0, 3)),
    _moves(f"{BLOCKED}ReorderOutput", shapes=(unblocked,), rows=rows.kept_apart(0, 3)),
    _moves(f"{BLOCKED}Upsample", rows=rows.kept_apart(0, 3)),
)

CHOSEN = (
    Operator("Gather", cost=costs.gather, rows=rows.gathered, torch=meanings.gather),
    _selects("GatherElements", rows=rows.gathered_elements, torch=meanings.gather_elements),
    _selects("GatherND", rows=rows.gathered_slices, torch=meanings.gather_nd),
    _selects("Slice", rows=rows.moved(0, positions_in=(1, 2, 3, 4)), sized_by=(1, 2, 3, 4), torch=meanings.slice_),
    _selects("Split", rows=rows.moved(0, positions_in=(1,)), sized_by=(1,), torch=meanings.split),
    _selects("Compress", shapes=(compressed,), rows=rows.moved(0, positions_in=(1,)), sized_by=EVERY_INPUT),
    _selects("DynamicSlice"),
    _moves("Scatter", rows=rows.scattered, torch=meanings.scatter_elements),
    _moves("ScatterElements", rows=rows.scattered, torch=meanings.scatter_elements),
    _moves("ScatterND", rows=rows.scattered, torch=meanings.scatter_nd),
    _moves("TensorScatter", rows=rows.kept_apart(0, 1, 2)),
    _moves("OneHot", rows=rows.one_hot, sized_by=(1,), torch=meanings.one_hot),
    _moves("NonZero", shapes=(nonzero_places,), rows=rows.mixes_rows, sized_by=EVERY_INPUT),
    _moves("Unique", rows=rows.mixes_rows, sized_by=EVERY_INPUT),
    _moves("NonMaxSuppression", rows=rows.mixes_rows, sized_by=EVERY_INPUT),
    # ONNX Runtime's
    _selects(f"{MICROSOFT}GatherND", shapes_of=("GatherND", 2), rows=rows.gathered_slices),
    Operator(f"{MICROSOFT}TorchEmbedding", cost=costs.gather, shapes=(looked_up,)),
    Operator(f"{MICROSOFT}GatherBlockQuantized", cost=costs.gather, shapes=(gathered_blocks,)),
    _moves(f"{MICROSOFT}Unique", rows=rows.mixes_rows, sized_by=EVERY_INPUT),
)

MADE_UP = (
    _free("Constant"),
    _free("Shape", rows=rows.constant, torch=meanings.shape),
    _free("Size", rows=rows.constant),
    _moves("ConstantOfShape", sized_by=EVERY_INPUT),
    _moves("Range", sized_by=EVERY_INPUT),
    _moves(f"{MICROSOFT}Range", shapes_of=("Range", 3), sized_by=EVERY_INPUT),
    _moves("EyeLike", rows=rows.constant),
    _moves("BlackmanWindow", sized_by=EVERY_INPUT),
    _moves("HammingWindow", sized_by=EVERY_INPUT),
    _moves("HannWindow", sized_by=EVERY_INPUT),
    _moves("MelWeightMatrix", sized_by=EVERY_INPUT),
    _random("RandomNormal"),
    _random("RandomNormalLike"),
    _random("RandomUniform"),
    _random("RandomUniformLike"),
    _random("Multinomial"),
    _random("Bernoulli", cost=costs.elementwise),
)

CONTAINERS_AND_TEXTS = (
    _free("SequenceConstruct"),
    _free("SequenceEmpty"),
    _free("SequenceInsert", sized_by=(2,)),
    _free("SequenceErase", sized_by=(1,)),
    _free("SequenceLength"),
    _free("OptionalHasElement"),
    _moves("ConcatFromSequence"),
    _moves("SplitToSequence", sized_by=(1,)),
    Operator("StringConcat", rows=rows.elementwise),
    Operator("RegexFullMatch", rows=rows.elementwise),
    Operator("StringNormalizer", rows=rows.mixes_rows, sized_by=EVERY_INPUT),
    Operator("StringSplit", rows=rows.mixes_rows, sized_by=EVERY_INPUT),
    Operator("ImageDecoder", sized_by=EVERY_INPUT),
    Operator("TfIdfVectorizer", rows=rows.features),
    Operator(f"{MICROSOFT}Tokenizer", sized_by=EVERY_INPUT),
)

OPERATORS = (*VIEWS, *MOVED, *CHOSEN, *MADE_UP, *CONTAINERS_AND_TEXTS)

"""Norms: all inputs but the first are learned."""

from __future__ import annotations

from functools import partial
from typing import Any

from weft.models.operators.operator import MICROSOFT, Operator, StitchForm
from weft.models.operators.rules import costs, meanings, rows
from weft.models.operators.rules.language_shapes import normed
from weft.models.operators.rules.meanings import TorchNode
from weft.models.operators.rules.shapes import like

_norm = partial(Operator, cost=costs.norm)
_same = (like(0),)
_with_moments = (like(0), normed, normed)
_of_a_sum = (*_with_moments, like(0))


def _group_norm(t: TorchNode, x: Any, scale: Any, bias: Any) -> Any:
    """Group normalisation in torch. Until opset 20, *scale* and *bias* have one value per group, then per channel."""
    groups = t.get("num_groups")
    if t.version < 21:
        scale, bias = (values.repeat_interleave(x.shape[1] // groups) for values in (scale, bias))
    return t.nn.group_norm(x, groups, scale, bias, t.get("epsilon", 1e-5))


OPERATORS = (
    _norm(
        "BatchNormalization",
        fuses=True,
        shapes=_same,
        rows=rows.batch_norm,
        torch=meanings.batch_norm,
        stitching=StitchForm("batch_norm"),
    ),
    _norm("InstanceNormalization", shapes=_same, rows=rows.from_axis(2), torch=meanings.instance_norm),
    _norm("GroupNormalization", shapes=_same, rows=rows.from_axis(1), torch=_group_norm),
    _norm("LayerNormalization", shapes=_with_moments, rows=rows.layer_norm, torch=meanings.layer_norm),
    _norm("RMSNormalization", rows=rows.layer_norm, torch=meanings.rms_norm),
    _norm("LpNormalization", rows=rows.along_axis(-1), torch=meanings.lp_norm),
    _norm("MeanVarianceNormalization", shapes=_same, rows=rows.mean_variance, torch=meanings.mean_variance),
    _norm("LRN", rows=rows.from_axis(1), torch=meanings.local_response),
    # ONNX Runtime's, of which some are in the standard domain
    _norm("SimplifiedLayerNormalization", shapes=_with_moments, rows=rows.layer_norm, torch=meanings.rms_norm),
    _norm(f"{MICROSOFT}LayerNormalization", shapes=_with_moments, rows=rows.layer_norm),
    _norm("SkipLayerNormalization", shapes=_of_a_sum, rows=rows.along_axis(-1, 0, 1)),
    _norm(
        f"{MICROSOFT}SkipLayerNormalization",
        shapes=_of_a_sum,
        rows=rows.along_axis(-1, 0, 1),
        torch=meanings.skip_norm(meanings.layer_norm),
    ),
    _norm(
        f"{MICROSOFT}SkipSimplifiedLayerNormalization",
        shapes=_of_a_sum,
        rows=rows.along_axis(-1, 0, 1),
        torch=meanings.skip_norm(meanings.rms_norm),
    ),
    _norm(f"{MICROSOFT}GroupNorm", shapes=_same),
    _norm(f"{MICROSOFT}SkipGroupNorm", shapes=(like(0), like(0))),
    _norm(f"{MICROSOFT}BranchwiseRMSNorm", shapes=_same),
    _norm(f"{MICROSOFT}GatedRMSNorm", shapes=_same),
    _norm(f"{MICROSOFT}QOrderedLayerNormalization", shapes=_same),
)

"""The steps of a graph in torch: ``meaning`` of a step's operator, and ``StackRows``, which only stitched graphs have.

All other operators mean what the table of operators says (``weft.models.operators``).
"""

from __future__ import annotations

from typing import Any, TypeAlias

from weft.base.errors import StitchError
from weft.models.operators import Meaning, TorchNode, find

try:
    import torch
except ImportError as error:
    raise StitchError("running a stitched graph in torch needs torch: pip install 'weft[torch]'") from error

__all__ = ["Tensor", "meaning", "torch"]

Tensor: TypeAlias = Any
"""torch.Tensor; torch's types are not checked."""


def meaning(op: str) -> Meaning | None:
    """The function of torch for a step's operator; None if it does not run in torch."""
    return stack_rows if op == "StackRows" else find(op).torch


def stack_rows(t: TorchNode, *parts: Tensor) -> Tensor:
    """Concatenate the rows of *parts* in channels-last order, with zero channels up to the attribute ``columns``.

    *t* has the attributes; ``dtype`` is the type of the result, None: that of the parts.
    """
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    rows, channels, height, width = joined.shape
    stacked = joined.new_empty((rows, height, width, t.get("columns")), dtype=t.get("dtype"))
    stacked[..., :channels] = joined.permute(0, 2, 3, 1)
    stacked[..., channels:] = 0
    return stacked.permute(0, 3, 1, 2)

"""What it takes to run a model with rounded layers: its pieces as bytes, so that who runs them needs no graphs.

The weights of the layers are no constants of the pieces but inputs: another format needs no other session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Stage:
    """A piece that begins with a layer; the first one may begin with none."""

    layer: str | None
    source: str
    """The tensor that enters the layer, unrounded."""
    model: bytes
    inputs: tuple[str, ...]
    """All but the layer's own two."""
    outputs: tuple[str, ...]
    live: tuple[str, ...]
    """Tensors made by earlier stages that this one or a later one needs."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundingPlan:
    """All it takes to run a model with rounded layers."""

    stages: tuple[Stage, ...]
    output: str
    weights: Mapping[str, Floats]
    """Layer -> as trained, in the order of the stages."""
    batch: int
    """Samples in a run."""
    padded: bool
    """Whether the model takes no fewer."""

    def with_weights(self, weights: Mapping[str, Floats]) -> RoundingPlan:
        return replace(self, weights=weights)


def weight_input(layer: str) -> str:
    """What a piece calls the rounded weights of its layer."""
    return f"weft:{layer}.weight"


def rounded_input(layer: str) -> str:
    """What a piece calls the rounded tensor that enters its layer."""
    return f"weft:{layer}.input"

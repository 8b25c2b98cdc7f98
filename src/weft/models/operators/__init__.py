"""The table of operators: what weft knows of each, in one entry. ``find`` looks an operator up.

An entry (``Operator``) has a facet for each user: the importer reads cost and shapes, the proof that rows do not mix
reads rows, the one that a request's values do not decide its time reads the inputs that size things, GPU engines read
the meaning in torch, ``weft_stitch`` the form in which it is stitched. A facet that is left out has a safe default,
said beside its field. To add an operator, add one entry to the file of its family; rules that entries share stand in
``rules``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from weft.models.operators import (
    activations,
    arithmetic,
    classical,
    movement,
    normalisation,
    pooling,
    products,
    reductions,
    sequences,
)
from weft.models.operators.operator import Operator, StitchForm
from weft.models.operators.rules.meanings import Meaning, TorchNode

__all__ = ["KNOWN_DOMAINS", "OPERATORS", "Meaning", "Operator", "StitchForm", "TorchNode", "find", "qualified"]

FAMILIES = (
    activations, arithmetic, reductions, normalisation, pooling, products, sequences, movement, classical,
)  # fmt: skip

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {operator.name: operator for family in FAMILIES for operator in family.OPERATORS}
)
"""Qualified name -> entry. Control flow (If, Loop, Scan) has none: who follows a graph enters the bodies."""

KNOWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc"})
"""The domains whose operators mean what the table says; an operator of any other is unknown whatever its name."""


def find(name: str) -> Operator:
    """The entry of an operator by its qualified name; one with nothing but defaults where there is none."""
    return OPERATORS.get(name) or Operator(name)

"""The table of operators: one entry for each operator of ONNX and ONNX Runtime. ``find`` looks an operator up.

An entry (``Operator``) has a facet for each user: the importer reads cost and shapes; the proof that samples of a batch
stay independent reads ``rows``; the analysis of whether times depend on values reads ``sized_by``; GPU engines read the
meaning in torch; ``weft_stitch`` reads the stitched form. A facet that is left out has a safe default, described at its
field. To add an operator, add one entry to the file of its family; rules that entries share are in ``rules``.
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
    products,
    reductions,
    sequences,
)
from weft.models.operators.operator import Operator, StitchForm
from weft.models.operators.rules.meanings import Meaning, TorchNode

__all__ = ["KNOWN_DOMAINS", "OPERATORS", "Meaning", "Operator", "StitchForm", "TorchNode", "find", "qualified"]

FAMILIES = (
    activations, arithmetic, reductions, normalisation, products, sequences, movement, classical,
)  # fmt: skip

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {operator.name: operator for family in FAMILIES for operator in family.OPERATORS}
)
"""Qualified name -> entry. Control flow (If, Loop, Scan) has none, since code that walks a graph enters the bodies."""

KNOWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc"})
"""Domains whose operators are in the table; an operator of any other domain is unknown."""


def find(name: str) -> Operator:
    """The entry of an operator by its qualified name; for an unknown operator, an entry with only defaults."""
    return OPERATORS.get(name) or Operator(name)

"""The entry of an operator of ONNX or ONNX Runtime: ``Operator``, its facets and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.models.operators.rules import costs
from weft.models.operators.rules.costs import Cost
from weft.models.operators.rules.meanings import Meaning
from weft.models.operators.rules.rows import RowRule
from weft.models.operators.rules.shapes import ShapeRule

MICROSOFT = "com.microsoft:"
"""Prefix of ONNX Runtime's own operators."""
BLOCKED = "com.microsoft.nchwc:"
"""Prefix of the operators on images in blocks of channels that ONNX Runtime's optimiser writes."""
CLASSICAL = "ai.onnx.ml:"
"""Prefix of classical machine learning."""

EVERY_INPUT = tuple(range(32))
"""``Operator.sized_by`` of operators whose output shapes or run times depend on the values of all inputs."""


@dataclass(frozen=True, slots=True)
class StitchForm:
    """How ``weft_stitch`` stitches an operator: the name of a form, and the function and settings in this form."""

    form: str
    function: str = ""
    """The elementwise function of the form ``unary``, or the kind of pool."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Attributes that are numbers -> their defaults."""
    keeps_zero: bool = False
    """Whether the function maps 0 to 0 for all settings."""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator and its facets, one for each user of the table. Every facet has a safe default."""

    name: str
    """``Conv`` for an operator of the standard, ``com.microsoft:Attention`` for an operator of another domain."""

    cost: Cost = costs.unknown
    """Returns the layers of a node with their work. Default: one layer that costs its activation traffic."""
    fuses: bool = False
    """Whether the operator costs nothing directly after a matrix product, such as an activation or a bias."""
    product: bool = False
    """Whether its time on a GPU is estimated from MACs as well as from bytes. Default: from bytes only."""

    shapes: tuple[ShapeRule, ...] = ()
    """Rules for the shapes of the leading outputs, used if ONNX's inference leaves them open."""
    shapes_of: tuple[str, int] | None = None
    """A standard operator with the same shape inference, and the number of leading inputs that both have in common."""
    view: bool = False
    """Whether the first output is a view of the first input."""

    rows: RowRule | None = None
    """Which rows of the outputs depend on which rows of the inputs. Default: unknown, so the model is not batched."""
    random: bool = False
    """Whether the operator draws random numbers; it is then never folded, and its model not batched."""

    sized_by: tuple[int, ...] = ()
    """Indices of inputs whose values (not only shapes) decide output shapes or run time."""

    torch: Meaning | None = None
    """The same function in torch. Default: the node is left to ONNX Runtime."""
    numbers: tuple[int, ...] | None = None
    """Indices of inputs that the torch meaning takes as tuples of numbers. Default: *sized_by*."""

    stitching: StitchForm | None = None
    """How the operator is stitched. Default: not at all; it runs for each model alone."""

    @property
    def domain(self) -> str:
        return self.name.rpartition(":")[0]

    @property
    def torch_numbers(self) -> tuple[int, ...]:
        return self.sized_by if self.numbers is None else self.numbers

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


@dataclass(frozen=True, slots=True)
class StitchForm:
    """How ``weft_stitch`` reads an operator: the name of one of its forms, and what tells operators of a form apart."""

    form: str
    function: str = ""
    """Of the form ``unary``: the elementwise function."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Attributes that are numbers -> their defaults."""
    keeps_zero: bool = False
    """Whether the function of 0 is 0, whatever the settings."""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator and what each user of the table needs of it. Every facet has a safe default."""

    name: str
    """``Conv`` for an operator of the standard, ``com.microsoft:Attention`` for one of another domain."""

    cost: Cost = costs.unknown
    """The layers of a node: GEMM view, weights, bytes moved. Default: one layer that costs its activation traffic."""
    fuses: bool = False
    """Whether it costs nothing where it follows a product that writes its input: an activation, a bias."""
    product: bool = False
    """Whether a GPU's time for it is guessed by multiplications as well as by bytes. Default: by bytes."""

    shapes: tuple[ShapeRule, ...] = ()
    """Shapes of the leading outputs, where ONNX's inference leaves them open. Default: nothing is added to it."""
    shapes_of: tuple[str, int] | None = None
    """A standard operator whose inference holds here too, and how many leading inputs the two have in common."""
    view: bool = False
    """Whether the first output is a view of the first input."""

    rows: RowRule | None = None
    """Which rows of the outputs depend on which rows of the inputs. Default: not known, so the model is not batched."""
    random: bool = False
    """Whether it draws random numbers: it is never folded, and a model that has it is not batched."""

    sized_by: tuple[int, ...] = ()
    """Inputs whose values decide shapes or time. Default: shapes alone decide."""

    torch: Meaning | None = None
    """What it computes, in torch. Default: the node is left to ONNX Runtime."""
    numbers: tuple[int, ...] | None = None
    """Inputs that the torch meaning takes as tuples of numbers. Default: those of *sized_by*."""

    stitching: StitchForm | None = None
    """How it is stitched. Default: it is not; it runs for each model alone."""

    @property
    def domain(self) -> str:
        return self.name.rpartition(":")[0]

    @property
    def torch_numbers(self) -> tuple[int, ...]:
        return self.sized_by if self.numbers is None else self.numbers

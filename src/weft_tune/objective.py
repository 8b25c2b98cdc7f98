"""The objective that a search minimises: an expression over bits and sizes, or a function.

    weights + activations                             total bits of both, for one sample
    sum(l.macs * l.weight_bits * l.input_bits for l in layers)
    max(l.weight_bits for l in layers) * 1e6 + weights

``layers`` are the targets; each has name, weight_bits, input_bits, weights, inputs and macs. Other names, such as a
latency, come from the caller as functions of the configuration and cost nothing where the expression leaves them out.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

from weft.base.errors import TuneError, unknown_name
from weft_tune.network import Network
from weft_tune.numbers.configuration import Configuration

DEFAULT = "weights + activations"  # total bits of both, for one sample
Measure = Callable[[Network, Configuration], float]
Extras = Mapping[str, Callable[[Configuration], float]]  # further name in an expression -> its value
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min, "max": max, "sum": sum, "len": len, "abs": abs, "ceil": math.ceil, "floor": math.floor,
    "log2": math.log2, "sqrt": math.sqrt,
}  # fmt: skip
LARGEST_POWER = 8
"""Limit of an exponent in an expression, so that no expression computes numbers of unbounded length."""


class ConfiguredLayer(NamedTuple):
    """A target with its widths in a configuration; branches count as one layer with the width of the widest branch."""

    name: str
    weight_bits: int
    input_bits: int
    weights: int
    inputs: int
    macs: int


_ALLOWED = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.GeneratorExp,
    ast.ListComp, ast.comprehension, ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Tuple, ast.List,
    ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_REFUSED = (ast.LShift, ast.MatMult)  # a shift could compute huge numbers; there are no matrices


def layers_of(network: Network, configuration: Configuration) -> tuple[ConfiguredLayer, ...]:
    """The targets with the widths that a configuration gives them."""

    def bits(names: tuple[str, ...]) -> int:
        return max(configuration[name].bits for name in names)

    return tuple(
        ConfiguredLayer(
            target.name, bits(target.objects("weight")), bits(target.objects("input")), target.weights, target.inputs,
            target.macs,
        )
        for target in network.targets
    )  # fmt: skip


def total_bits(network: Network, configuration: Configuration) -> tuple[int, int]:
    """The bits of all weights, and of all activations of one sample."""
    layers = layers_of(network, configuration)
    weights = sum(layer.weights * layer.weight_bits for layer in layers)
    return weights, sum(layer.inputs * layer.input_bits for layer in layers)


@dataclass(frozen=True, slots=True)
class Expression:
    """An objective from text, checked by ``parse_objective``; a call returns a finite number or raises TuneError."""

    text: str
    extras: Extras
    code: CodeType
    names: frozenset[str]

    def __call__(self, network: Network, configuration: Configuration) -> float:
        known: dict[str, Any] = {"__builtins__": {}} | FUNCTIONS
        known["weights"], known["activations"] = total_bits(network, configuration)
        known["layers"] = layers_of(network, configuration)
        known |= {name: self.extras[name](configuration) for name in self.names & self.extras.keys()}
        try:
            value = eval(self.code, known)
        except (ArithmeticError, AttributeError, IndexError, NameError, TypeError, ValueError) as error:
            raise TuneError(f"objective {self.text!r}: {error}") from error
        return _finite(value, self.text)


def objective_from(objective: str | Measure, extras: Extras | None = None) -> Measure:
    """Parse an expression; a function stays as it is, but must return finite numbers."""
    if isinstance(objective, str):
        return parse_objective(objective, extras)

    def measure(network: Network, configuration: Configuration) -> float:
        return _finite(objective(network, configuration), getattr(objective, "__name__", "of the caller"))

    return measure


def parse_objective(text: str, extras: Extras | None = None) -> Expression:
    """Check and compile an expression; raises TuneError if it is anything but arithmetic over the known names."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
        names = _check_expression(tree, {"weights", "activations", "layers", *FUNCTIONS, *(extras or {})})
        code = compile(tree, "<objective>", "eval")
    except TuneError as error:
        raise TuneError(f"objective {text!r}: {error}") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        problem = error.msg if isinstance(error, SyntaxError) else error
        raise TuneError(f"objective {text!r} is no expression: {problem}") from error
    return Expression(text, dict(extras or {}), code, names)


def _check_expression(tree: ast.Expression, known: set[str]) -> frozenset[str]:
    """Raise TuneError if *tree* is not arithmetic over the *known* names; return the names in use.

    Comprehensions bind further names, as ``layer`` in ``sum(layer.bits for layer in layers)``, which must be new.
    """
    nodes = list(ast.walk(tree))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if clashing := bound & known:
        raise TuneError(f"{min(clashing)!r} has a meaning already; choose another name")
    comparisons = [node for node in nodes if isinstance(node, ast.Compare)]
    compared_ids = {id(operand) for node in comparisons for operand in (node.left, *node.comparators)}
    # Texts and lists may only be operands of comparisons. Elements of such a list are operands as well; ``ast.walk``
    # yields a list before its elements, so one pass marks them all.
    for node in nodes:
        if isinstance(node, ast.Tuple | ast.List) and id(node) in compared_ids:
            compared_ids.update(id(part) for part in node.elts)
        _check_node(node, known | bound, id(node) in compared_ids)
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name))


def _check_node(node: ast.AST, names: set[str], compared: bool) -> None:
    """Check one node; *compared*: it is an operand of a comparison, or in a list that is one."""
    if not isinstance(node, _ALLOWED) or isinstance(node, _REFUSED):
        raise TuneError(f"{type(node).__name__} may not be used; it is arithmetic over weights, activations and layers")
    if isinstance(node, ast.Name) and node.id not in names:
        raise TuneError(unknown_name("name", node.id, names))
    if isinstance(node, ast.Attribute) and node.attr not in ConfiguredLayer._fields:
        raise TuneError(unknown_name("attribute", node.attr, ConfiguredLayer._fields))
    if isinstance(node, ast.Call) and (
        not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS or node.keywords
    ):
        raise TuneError(f"{ast.unparse(node)} cannot be called; functions are {', '.join(FUNCTIONS)}")
    if isinstance(node, ast.Constant | ast.Tuple | ast.List) and not compared:
        value = node.value if isinstance(node, ast.Constant) else None
        if not isinstance(value, int | float):
            raise TuneError(f"{ast.unparse(node)} is no number; texts and lists can only be compared")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        if not _is_small(node.right):
            raise TuneError(f"{ast.unparse(node)}: a power must be a constant of at most {LARGEST_POWER}")
        if any(isinstance(part, ast.Pow) for part in ast.walk(node.left)):
            raise TuneError(f"{ast.unparse(node)}: a power of a power may not be used; multiply")


def _is_small(node: ast.expr) -> bool:
    """Whether *node* is a constant of at most ``LARGEST_POWER``, with or without a sign."""
    if isinstance(node, ast.UnaryOp):
        return _is_small(node.operand)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and abs(node.value) <= LARGEST_POWER


def _finite(value: Any, text: str) -> float:
    """Convert the value of objective *text* to a float; raises TuneError if it is not a finite number."""
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise TuneError(f"objective {text!r} gave {value!r}; it must be a finite number")
    return number

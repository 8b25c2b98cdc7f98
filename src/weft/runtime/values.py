"""Nodes of a graph whose time depends on the values of its inputs, and not only on their shapes.

The time of a node is known from earlier runs if it follows from the shapes of the inputs: requests of the same shapes
cost the same. It does not if a number in a request decides how often a loop runs or how large a tensor becomes; such a
node is *unsteady*, and so are all that read its outputs. Weights and shapes of ordinary tensors do not count as values.
The graph is followed from its inputs: each tensor gets a ``Fact``, whether its values or its shape depend on theirs.

Denormal numbers are ignored here, although some processors take a hundred times as long for them: expected times are
learned from observed ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from weft.models.element_types import ElementType
from weft.models.onnx_graph import OnnxGraph, OnnxModel, OnnxNode, bodies, qualified
from weft.models.operators import KNOWN_DOMAINS, find

_CONTROL = frozenset({"If", "Loop"})


class Fact(NamedTuple):
    """Whether a tensor depends on the values of the graph's inputs, and not only on their shapes."""

    valued: bool = False  # whether the tensor's values depend on them
    unshaped: bool = False
    """Whether the tensor's shape depends on them, too: it does not follow from the shapes of the inputs."""


FIXED = Fact()
Facts = dict[str, Fact]
"""Name of a tensor -> its fact; a tensor that is not in it is a weight, and fixed."""


def inputs_of(graph: OnnxGraph) -> Facts:
    """Facts of the inputs that a request fills. Those of text count as unshaped, as shapes have no lengths of texts."""
    weights = {tensor.name for tensor in graph.initializer}
    return {
        value.name: Fact(valued=True, unshaped=value.type.tensor_type.elem_type == ElementType.STRING)
        for value in graph.input
        if value.name not in weights
    }


def unsteady(model: OnnxModel) -> list[bool]:
    """For each node of the main graph, whether its cost or the shapes of its tensors depend on the inputs' values."""
    return Follower(model.functions).through(model.graph.node, inputs_of(model.graph))


class Follower:
    """Follows values through nodes, into local functions and the bodies of control flow."""

    def __init__(self, functions: Iterable[Any] = ()) -> None:
        self._functions = {(function.domain, function.name): function for function in functions}

    def through(self, nodes: Iterable[OnnxNode], facts: Facts) -> list[bool]:
        """Whether each of the *nodes*, which are in order, is unsteady; adds the facts of their outputs to *facts*."""
        return [self._follow_node(node, facts) for node in nodes]

    def _follow_node(self, node: OnnxNode, facts: Facts) -> bool:
        """Add the facts of a node's outputs; True if it is unsteady."""
        input_facts = [facts.get(name, FIXED) for name in node.input]
        result = self._node_fact(node, input_facts, facts)
        facts.update((name, result) for name in node.output if name)
        return result.unshaped or any(fact.unshaped for fact in input_facts)

    def _node_fact(self, node: OnnxNode, input_facts: Sequence[Fact], facts: Facts) -> Fact:
        """The ``Fact`` of all outputs of a node, from the facts of its inputs."""
        function = self._functions.get((node.domain, node.op_type))
        if function is not None:
            return self._function_fact(function, input_facts)
        if node.domain not in KNOWN_DOMAINS or node.op_type in _CONTROL:
            return Fact(valued=True, unshaped=True)
        if node.op_type in ("Shape", "Size"):  # the result is the shape of the input
            return Fact(valued=input_facts[0].unshaped)
        # Inputs whose values decide the size of an output, such as the shape for a Reshape.
        size_facts = (input_facts[index] for index in find(qualified(node)).sized_by if index < len(input_facts))
        unshaped = any(fact.unshaped for fact in input_facts) or any(fact.valued for fact in size_facts)
        unshaped = unshaped or any(self._unsteady_inside(body, unshaped, facts) for body in bodies(node))
        valued = unshaped or any(fact.valued for fact in input_facts) or bool(bodies(node))
        return Fact(valued, unshaped)

    def _function_fact(self, function: Any, input_facts: Sequence[Fact]) -> Fact:
        """The ``Fact`` of all outputs of a call of a local function, from the facts of its inputs."""
        inner = dict(zip(function.input, input_facts, strict=False))
        unsteady_inside = any(self.through(function.node, inner))
        results = [inner.get(name, FIXED) for name in function.output]
        return Fact(valued=unsteady_inside or any(fact.valued for fact in results), unshaped=unsteady_inside)

    def _unsteady_inside(self, body: OnnxGraph, unshaped: bool, facts: Facts) -> bool:
        """Whether the body of a control-flow node has an unsteady node; *unshaped*: whether its inputs are.

        *facts*: of the tensors outside, which the body may read.
        """
        body_inputs = dict.fromkeys((value.name for value in body.input), Fact(valued=True, unshaped=unshaped))
        return any(self.through(body.node, {**facts, **body_inputs}))

"""What two graphs have in common that differ only in their numbers and names: ``signature``."""

from __future__ import annotations

from weft_stitch.graph import Graph


def signature(graph: Graph) -> str:
    """Operators, attributes, shapes and connections; equal for graphs that take equally long."""
    numbers = {each.name: f"i{number}" for number, each in enumerate(graph.inputs)}
    lines = [str(each.shape) for each in graph.inputs]
    for number, step in enumerate(graph.steps):
        inputs = [_named(graph, numbers, name) for name in step.inputs]
        attributes = sorted((key, repr(value)) for key, value in step.attributes.items())
        shapes = [graph.shapes[name] for name in step.outputs]
        lines.append(f"{step.op} {inputs} {attributes} {shapes}")
        numbers |= {name: f"{number}.{place}" for place, name in enumerate(step.outputs)}
    return "\n".join([*lines, *(numbers[each.name] for each in graph.outputs)])


def _named(graph: Graph, numbers: dict[str, str], name: str) -> str:
    if name in graph.constants:
        array = graph.constants[name]
        return f"{array.dtype.str}{array.shape}"
    return numbers.get(name, name)

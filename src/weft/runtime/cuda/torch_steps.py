"""The nodes of an ONNX graph as steps in torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from weft.models.operators import Meaning, TorchNode


class Name(str):
    """The name of a tensor among the arguments of a step."""

    __slots__ = ()


class TorchStep(NamedTuple):
    """A node of an ONNX graph, with the function that computes it in torch."""

    label: str  # the name of the node, for errors
    operator: str  # its ONNX name
    function: Meaning
    context: TorchNode
    arguments: tuple[Any, ...]  # names of tensors, tuples of numbers, and None for inputs left out
    numbers: tuple[int, ...]
    """Indices of the arguments that the function takes as tuples of numbers."""
    outputs: tuple[str, ...]

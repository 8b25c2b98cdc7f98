"""Writing nodes and constants into a graph: names nobody else has, equal constants once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper


class Emitter:
    """Collects what is to be added to a graph; ``take`` hands over the nodes written since it was last called."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.constants: list[onnx.TensorProto] = []
        self._nodes: list[onnx.NodeProto] = []
        self._taken = _names(graph)
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def node(self, op: str, inputs: Iterable[str], hint: str, *, domain: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its one output."""
        output = self.name(f"{hint}/{op}")
        self._nodes.append(
            helper.make_node(op, list(inputs), [output], name=output, domain=domain or None, **attributes)
        )
        return output

    def constant(self, value: npt.ArrayLike, kind: npt.DTypeLike) -> str:
        """A constant; the same name for the same value."""
        array = np.asarray(value, kind)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = self.stored(numpy_helper.from_array(array, ""), "constant")
        return self._known[key]

    def number(self, value: float) -> str:
        """A float32."""
        return self.constant(value, np.float32)

    def zero(self, element: int) -> str:
        """A zero point of an ONNX type; bytes of nothing, whatever the type."""
        key = (f"zero {element}", (), b"")
        if key not in self._known:
            zero = onnx.TensorProto(data_type=element, raw_data=bytes(2 if element in _TWO_BYTES else 1))
            self._known[key] = self.stored(zero, "zero")
        return self._known[key]

    def stored(self, tensor: onnx.TensorProto, hint: str) -> str:
        """Keep a tensor under a new name, which is returned."""
        tensor.name = self.name(hint)
        self.constants.append(tensor)
        return tensor.name

    def name(self, hint: str) -> str:
        """*hint* itself, or with a number where that is taken."""
        found, number = hint, 2
        while found in self._taken:
            found, number = f"{hint}_{number}", number + 1
        self._taken.add(found)
        return found

    def take(self) -> list[onnx.NodeProto]:
        nodes, self._nodes = self._nodes, []
        return nodes


_TWO_BYTES = (TensorProto.INT16, TensorProto.UINT16)


def _names(graph: onnx.GraphProto) -> set[str]:
    values = {name for node in graph.node for name in (node.name, *node.input, *node.output)}
    return values | {each.name for each in (*graph.initializer, *graph.input, *graph.output)}

"""What ONNX Runtime raises when a run fails, as the error that says whose fault it is.

Mostly a free dimension has a size that the model cannot take, or values ask for a tensor that no memory holds
(``Expand``, ``ConstantOfShape``, ``Range``): the request is at fault. If there is no memory for a tensor of an ordinary
size, the server is at fault.
"""

from __future__ import annotations

import re

from weft.base.errors import UnfitInputs
from weft.runtime.onnxruntime_cpu.memory_limit import memory_limit_bytes
from weft.runtime.onnxruntime_cpu.sessions import RAISED, first_line

_NODE = re.compile(r"while running (\w+) node\. Name:'([^']*)'")
_ASKED = re.compile(r"(?:requested buffer of size|requested bytes of) (\d+)")
"""The arena of ONNX Runtime: the system has not that much, or the arena may not."""
_OVERFLOWS = ("Integer overflow", "storage size overflowed")
"""The size of a tensor does not fit into 64 bits."""


def explain(error: Exception) -> Exception:
    """Return the error that says whose fault a failed run is; what ONNX Runtime did not raise stays as it is."""
    if not isinstance(error, RAISED):
        return error
    text = str(error)
    if any(phrase in text for phrase in _OVERFLOWS):
        return UnfitInputs(f"{_node(text)} asks for a tensor whose size does not fit into 64 bits")
    if (asked := _ASKED.search(text)) is None:
        return (MemoryError if "allocate" in text else UnfitInputs)(first_line(error))
    size, limit = int(asked[1]), memory_limit_bytes()
    # A tensor exists at least twice, as itself and as the input of the next operator or as bytes of the answer. One of
    # more than half the memory can never be had; a smaller one was refused for what else is computed now.
    if 2 * size > limit:
        return UnfitInputs(f"{_node(text)} asks for a tensor of {size} bytes; {limit} bytes of memory are all there is")
    return MemoryError(f"{_node(text)} found no memory for a tensor of {size} bytes")


def _node(text: str) -> str:
    """The operator that failed, and its name where it has one."""
    node = _NODE.search(text)
    if node is None:
        return "an operator"
    return f"{node[1]} {node[2]!r}" if node[2] else node[1]

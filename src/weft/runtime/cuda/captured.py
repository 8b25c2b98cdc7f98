"""Check that a captured graph can be replayed: it must not read host memory or call the host.

ONNX Runtime writes tables of some operators to host memory, copies them and frees that memory in a callback. Both
become nodes of a graph, and a replay would read and free memory that is gone.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_KERNEL, _MEMCPY, _HOST = 0, 1, 3
"""Kinds of nodes, with the driver's numbers."""
_FROM_HOST, _UNIFIED = 1, 4
"""Kinds of source memory of a copy: the host's; and unified, where only the address tells."""
_KIND_AT, _SOURCE_AT, _PARAMETERS_BYTES = 32, 48, 256
"""Offsets of kind and source address in the driver's description of a copy, and a buffer that is large enough."""
_MEMORY_TYPE = 2
"""The driver's attribute of an address that tells whose memory it is."""


class NotReplayable(Exception):
    """A graph reads host memory, or calls the host, when it is replayed."""


@cache
def driver() -> Any:
    """The library of the CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


def check_replayable(graph: int) -> None:
    """Raise ``NotReplayable`` if *graph* (the driver's handle) calls the host or copies from its memory."""
    for node in _nodes(graph):
        kind = _node_kind(node)
        if kind == _HOST:
            raise NotReplayable("an operator calls the host back")
        if kind == _MEMCPY and _copies_from_host(node):
            raise NotReplayable("an operator copies from host memory")


def kernels_in(graph: int) -> int:
    """Number of kernels in a graph (the driver's handle)."""
    return sum(_node_kind(node) == _KERNEL for node in _nodes(graph))


def is_empty(graph: int) -> bool:
    """Whether nothing was captured, as in a segment that only changes shapes."""
    return not _nodes(graph)


def _node_kind(node: ctypes.c_void_p) -> int:
    kind = ctypes.c_int(-1)
    _check_result(driver().cuGraphNodeGetType(node, ctypes.byref(kind)))
    return kind.value


def _nodes(graph: int) -> list[ctypes.c_void_p]:
    """The handles of a graph's nodes; the first call of the driver only counts them."""
    count = ctypes.c_size_t(0)
    _check_result(driver().cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    if not count.value:  # the driver refuses to list the nodes of an empty graph
        return []
    nodes = (ctypes.c_void_p * count.value)()
    _check_result(driver().cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
    return [ctypes.c_void_p(node) for node in nodes]


def _copies_from_host(node: ctypes.c_void_p) -> bool:
    """Whether a copy reads host memory; also True if the driver does not know the address."""
    parameters = ctypes.create_string_buffer(_PARAMETERS_BYTES)
    _check_result(driver().cuGraphMemcpyNodeGetParams(node, parameters))
    kind = int.from_bytes(parameters.raw[_KIND_AT : _KIND_AT + 4], "little")
    if kind != _UNIFIED:
        return kind == _FROM_HOST
    address = int.from_bytes(parameters.raw[_SOURCE_AT : _SOURCE_AT + 8], "little")
    owner = ctypes.c_uint(0)
    failed = driver().cuPointerGetAttribute(ctypes.byref(owner), _MEMORY_TYPE, ctypes.c_uint64(address))
    return bool(failed) or owner.value == _FROM_HOST


def _check_result(result: int) -> None:
    if result:
        raise NotReplayable(f"the driver does not tell what was captured (error {result})")

"""Whether a captured graph can be replayed: it must not look at the host again.

ONNX Runtime lays tables of some operators out in host memory, copies them and has a callback free that memory. Both
become nodes of a graph, and a replay would read and free what is long gone.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_KERNEL, _MEMCPY, _HOST = 0, 1, 3
"""Kinds of nodes, as the driver numbers them."""
_FROM_HOST, _UNIFIED = 1, 4
"""Kinds of memory that is copied from: the host's, and any, which its address tells."""
_KIND_AT, _SOURCE_AT, _PARAMETERS_BYTES = 32, 48, 256
"""Where the description of a copy has the kind and the address of its source; and more room than it needs."""
_MEMORY_TYPE = 2
"""The attribute of an address that tells whose memory it is."""


class NotReplayable(Exception):
    """A graph would look at the host when it is replayed."""


@cache
def driver() -> Any:
    """The interface of the driver itself."""
    return ctypes.CDLL("libcuda.so.1")


def check_replayable(graph: int) -> None:
    """``NotReplayable`` if the graph, as the driver knows it, calls the host or copies from its memory."""
    for node in _nodes(graph):
        kind = _kind(node)
        if kind == _HOST:
            raise NotReplayable("an operator calls the host back")
        if kind == _MEMCPY and _copies_from_host(node):
            raise NotReplayable("an operator copies from host memory")


def kernels_in(graph: int) -> int:
    """How many kernels a graph has."""
    return sum(_kind(node) == _KERNEL for node in _nodes(graph))


def _kind(node: ctypes.c_void_p) -> int:
    kind = ctypes.c_int(-1)
    _checked(driver().cuGraphNodeGetType(node, ctypes.byref(kind)))
    return kind.value


def _nodes(graph: int) -> list[ctypes.c_void_p]:
    count = ctypes.c_size_t(0)
    _checked(driver().cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * max(1, count.value))()
    _checked(driver().cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
    return [ctypes.c_void_p(each) for each in nodes[: count.value]]


def _copies_from_host(node: ctypes.c_void_p) -> bool:
    told = ctypes.create_string_buffer(_PARAMETERS_BYTES)
    _checked(driver().cuGraphMemcpyNodeGetParams(node, told))
    kind = int.from_bytes(told.raw[_KIND_AT : _KIND_AT + 4], "little")
    if kind != _UNIFIED:
        return kind == _FROM_HOST
    address = int.from_bytes(told.raw[_SOURCE_AT : _SOURCE_AT + 8], "little")
    owner = ctypes.c_uint(0)
    failed = driver().cuPointerGetAttribute(ctypes.byref(owner), _MEMORY_TYPE, ctypes.c_uint64(address))
    return bool(failed) or owner.value == _FROM_HOST


def _checked(result: int) -> None:
    if result:
        raise NotReplayable(f"the driver does not tell what was captured (error {result})")

"""Many weight-shared models as one graph, no shared weight copied.

``stitch`` goes from models to a ``Stitched``. Its steps have a place each: ``reading`` makes a ``Net`` of a model and a
``Family`` of nets, ``discovery`` and ``sharing_map`` tell what is shared, ``planning`` chooses forms and groups,
``lowering`` writes the graph, ``running`` and ``onnx_writer`` run it or write it down. ``making`` has models to try.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.stitching.assembly import Stitched, assemble, stitch
    from weft.stitching.counts import count
    from weft.stitching.discovery import discover
    from weft.stitching.family import Family
    from weft.stitching.graph import Graph
    from weft.stitching.lowering import lower
    from weft.stitching.making.generator import generate
    from weft.stitching.net import Net
    from weft.stitching.planning.cost import Machine, Modelled
    from weft.stitching.planning.grouping import group
    from weft.stitching.planning.planner import plan
    from weft.stitching.reading.alignment import align
    from weft.stitching.sharing import Sharing
    from weft.stitching.sharing_map import read_sharing, write_sharing
    from weft.stitching.summary import Summary

_HOMES = {
    "align": "reading.alignment",
    "Stitched": "assembly",
    "assemble": "assembly",
    "stitch": "assembly",
    "Machine": "planning.cost",
    "Modelled": "planning.cost",
    "count": "counts",
    "discover": "discovery",
    "Family": "family",
    "generate": "making.generator",
    "Graph": "graph",
    "group": "planning.grouping",
    "lower": "lowering",
    "Net": "net",
    "plan": "planning.planner",
    "Sharing": "sharing",
    "read_sharing": "sharing_map",
    "write_sharing": "sharing_map",
    "Summary": "summary",
}
"""Where a name is from; it is imported when it is asked for, so that parts of the package can be used on their own."""

__all__ = [
    "Family",
    "Graph",
    "Machine",
    "Modelled",
    "Net",
    "Sharing",
    "Stitched",
    "Summary",
    "align",
    "assemble",
    "count",
    "discover",
    "generate",
    "group",
    "lower",
    "plan",
    "read_sharing",
    "stitch",
    "write_sharing",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

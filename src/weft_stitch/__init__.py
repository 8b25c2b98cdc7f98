"""Many weight-shared models as one graph, no shared weight copied.

``stitch`` goes from models to a ``Stitching``. Its steps have a place each: ``reading`` makes a ``Net`` of a model and
a ``Family`` of nets, ``discovery`` and ``sharing_map`` tell what is shared, ``planning`` chooses forms and groups,
``lowering`` writes the graph, ``running`` runs, races and checks it, ``onnx_writer`` writes it down. ``making`` has
models to try.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft_stitch.assembly import Stitched
    from weft_stitch.making.generator import generate
    from weft_stitch.options import StitchOptions
    from weft_stitch.whole_run import Stitching, stitch

_HOMES = {
    "Stitched": "assembly",
    "generate": "making.generator",
    "StitchOptions": "options",
    "Stitching": "whole_run",
    "stitch": "whole_run",
}
"""Where a name is from; it is imported when it is asked for, so that parts of the package can be used on their own."""

__all__ = ["StitchOptions", "Stitched", "Stitching", "generate", "stitch"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

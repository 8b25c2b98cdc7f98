"""Many weight-shared models as one graph in which no shared weight is stored twice.

``stitch`` turns models into a ``Stitching`` (``stitching_run``). There are two ways to share weights.

*By channels*, for convolutional nets. ``reading`` parses each model to a ``Net`` of nine kinds of operation: a fully
connected layer is a convolution over one position, biases and normalisations are an affine per channel, and any other
operator is an island that keeps its source's form. A ``Family`` aligns the nets layer by layer; ``wire`` finds values
that carry the same channels (the operands of an addition do). ``discovery`` compares weights, or ``sharing_map`` reads
a file, and the result is a ``Sharing``: each such space is cut into blocks of channels, shared by a set of tasks or
owned by one. Every pair of an input block and an output block that some task has is one piece of weights.

``planning`` chooses for each layer a *form* (``forms``): a way to compute the layer for all tasks from its pieces, in
one of the ``layouts``. Costs come from a described machine or from timing (``running.sessions``). ``lowering`` writes
the ``Graph`` of ONNX operators, which ``onnx_writer`` writes to a file and ``running.module`` runs in torch. The form
``fused`` is one Triton kernel per layer (``packing`` lays out its weights, ``running.kernel`` is the kernel,
``running.module`` launches it and has its plain twin).

*By whole weights*, for fine-tuned encoders and models of any operators: ``bodies`` joins them to one backbone, in which
a step whose weights all models share runs once for the rows of all. On a GPU, ``running.body_reading`` extracts the
weights for the kernels of ``running.fused_body``.

``file_description`` and ``bodies.body_description`` store in the file which weights belong to which model, so that
``on_device`` can rebuild the models on a GPU. To the scheduler a stitched file is one model: its requests carry their
task, and the backend sorts a batch by task. ``making`` generates models to try.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft_stitch.assembly import Stitched
    from weft_stitch.making.generator import generate
    from weft_stitch.options import StitchOptions
    from weft_stitch.stitching_run import Stitching, stitch

_HOMES = {
    "Stitched": "assembly",
    "generate": "making.generator",
    "StitchOptions": "options",
    "Stitching": "stitching_run",
    "stitch": "stitching_run",
}
"""Public name -> module of this package, imported at first use so that no part needs another part's dependencies."""

__all__ = ["StitchOptions", "Stitched", "Stitching", "generate", "stitch"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

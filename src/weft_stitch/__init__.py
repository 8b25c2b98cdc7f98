"""Many weight-shared models as one graph, no shared weight copied.

``stitch`` goes from models to a ``Stitching``. Its steps have a place each: ``reading`` makes a ``Net`` of a model and
a ``Family`` of nets, ``discovery`` and ``sharing_map`` tell what is shared, ``planning`` chooses forms and groups,
``lowering`` writes the graph, ``running`` runs, races and checks it, ``onnx_writer`` writes it down. ``making`` has
models to try.

A ``Net`` is a model with its weights in nine kinds of operation; fully connected layers are convolutions over one
position, biases and normalisations an affine per channel, anything else an island in its source's own words. ``Family``
has the nets layer by layer; ``spaces.wire`` says which values carry the same channels (an addition makes them so), and
``Sharing`` cuts each such space into blocks: channels that a set of tasks share, or one task's own. Every pair of an
input block and an output block that some task has is one piece of weights, and all else follows from the pieces. A
*form* (``forms/``, a page each) computes a layer of all tasks from its pieces, in one of the ``layouts.py``; ``Room``
converts between layouts and knows which columns hold garbage. The result is a ``Graph`` of ONNX operators that
``onnx_writer`` spells out and ``running/module.py`` runs in torch. For the form ``fused`` ``packing.py`` lays out
weights and tiles, ``running/kernel.py`` is the Triton kernel, ``fused_plain.py`` its twin. ``planning/`` prices
segments and whole graphs by a model or a clock. ``file_description.py`` has the file say where its models' kernels lie,
``rebuilding.py`` makes the family again of that, and ``running/served.py`` modules of the family, for a GPU. A served
stitched file is one model to the scheduler; its requests carry which task they are, and the backend sorts a batch by
task.

Fine-tuned encoders, and models of any operators, become a *body* (``bodies/``, ``stitching_run.py`` runs all steps):
``body.py`` finds which nodes of their graphs are the same step, ``joining.py`` writes one graph, in which a step whose
weights all of them hold is computed once for the rows of all. How a weight differs from another's say ``nearness.py``,
``low_rank.py`` and ``sparse_differences.py``; ``adapters.py`` reads those of PEFT. ``file_description.py`` has the file
say which steps they are. For a GPU ``running/body_reading.py`` makes weights of a body for ``fused_body.py``, whose
kernels are in ``body_kernels.py`` and their twins in ``body_plain.py``. ``body_ladder.py`` has batches of so many rows,
captured, and ``body_slots.py`` room for models that come later; ``body_serving.py`` asks both from Python, and
``on_device/`` serves them of a file.
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
"""Where a name is from; it is imported when it is asked for, so that parts of the package can be used on their own."""

__all__ = ["StitchOptions", "Stitched", "Stitching", "generate", "stitch"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

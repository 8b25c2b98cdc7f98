"""The papers that weft builds on, reproduced. ``PAPERS`` has the names of the command line.

A published number is in ``data/``, with the sentence that states it. Ours is computed by the module of its figure or
table: ``haxconn/table6_comparison.py`` is Table 6 of HaX-CoNN. What took a GPU or hours is recorded in ``data/`` too.
"""

from __future__ import annotations

from collections.abc import Callable

from weft_papers import fluid_batching, gpu, haxconn, layerweaver, layerweaver_plus, libnumber, mts
from weft_papers.base import Reproduction

PAPERS: dict[str, Callable[..., Reproduction]] = {
    "layerweaver": layerweaver.reproduce,
    "layerweaver-plus": layerweaver_plus.reproduce,
    "fluid-batching": fluid_batching.reproduce,
    "haxconn": haxconn.reproduce,
    "mts": mts.reproduce,
    "libnumber": libnumber.reproduce,
    "gpu": gpu.reproduce,
}
"""To add a paper, write its module and add one line here."""

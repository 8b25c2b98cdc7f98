"""Reproductions of the papers that weft builds on, for ``weft reproduce``.

Published numbers are in ``data/``, each with the sentence that states it. Ours are computed by the module of the figure
or table: ``haxconn/table6_comparison.py`` is Table 6 of HaX-CoNN. Results that took a GPU or hours are recorded in
``data/`` too.
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
"""Name of a paper on the command line -> its reproduction. To add a paper, write its package and add a line here."""

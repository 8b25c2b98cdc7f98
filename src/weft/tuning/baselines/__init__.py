"""Other people's quantizers over the same networks and evaluators, for comparison with our own."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from weft.tuning.baselines.base import Baseline, Progress, Scored
from weft.tuning.baselines.ristretto import relaxed_ristretto, ristretto
from weft.tuning.baselines.stripes import stripes
from weft.tuning.evaluation import Evaluator, Subset
from weft.tuning.network import Network


class Method(Protocol):
    """How every baseline may be called."""

    def __call__(
        self,
        network: Network,
        evaluator: Evaluator,
        *,
        margin: float,
        subset: Subset = ...,
        database: Path | None = ...,
        progress: Progress | None = ...,
    ) -> Baseline: ...


BASELINES: dict[str, Method] = {
    "ristretto": ristretto,
    "relaxed-ristretto": relaxed_ristretto,
    "stripes": stripes,
}
"""The names a user may write. Uniform int8 is not among them: it makes a file, see ``tuning.quantised.int8``."""

__all__ = ["BASELINES", "Baseline", "Method", "Progress", "Scored", "relaxed_ristretto", "ristretto", "stripes"]

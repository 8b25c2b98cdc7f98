"""Other people's quantizers over the same networks and evaluators, for comparison with our own."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from weft_tune.baselines.base import Baseline, Progress, Scored
from weft_tune.baselines.ristretto import relaxed_ristretto, ristretto
from weft_tune.baselines.stripes import stripes
from weft_tune.evaluation import Evaluator, Subset
from weft_tune.network import Network


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

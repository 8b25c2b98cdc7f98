"""What a search for the fastest variant came to, and the JSON file that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weft.base.version import __version__
from weft_tune.runtime_target.choice import FLOAT32, TriedVariant
from weft_tune.runtime_target.timing import Turns

FORMAT = 1


class LayerSpeed(NamedTuple):
    """A layer that might have changed, and what it takes in a run; None where ONNX Runtime joined it with others."""

    name: str
    format: str
    """``int8``, ``float16`` or ``float32``."""
    before_s: float | None
    int8_s: float | None
    """If all layers are in 8 bits."""
    after_s: float | None
    why: str = ""
    """Why it stayed as it was."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RuntimeTuning:
    """The fastest variant of a model that keeps its score, measured in a runtime on this machine."""

    network: str
    target: str
    processor: str
    rows: int
    """Samples in a run that was measured."""
    metric: str
    margin: float
    base: float
    """The score of the model as it was."""
    threshold: float
    score: float
    test_base: float | None = None
    test_score: float | None = None
    """On samples that chose nothing."""
    kind: str
    """``int8``, ``float16``, or ``float32``: nothing was faster, and the result is the model as it was."""
    way: str
    """How numbers became 8-bit integers."""
    before: Turns
    after: Turns
    layers: tuple[LayerSpeed, ...]
    tried: tuple[TriedVariant, ...]
    bytes_before: int
    bytes_after: int
    seconds: float
    """That the search took."""
    files: Mapping[str, Path] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"RuntimeTuning({self.network}: {self.kind}, {self.speedup:.2f} times as fast, score {self.score:.4f})"

    @property
    def changed(self) -> bool:
        """Whether anything was faster than the model as it was."""
        return self.kind != FLOAT32

    @property
    def speedup(self) -> float:
        return self.before.median_s / self.after.median_s

    def as_dict(self) -> dict[str, Any]:
        """What the JSON file says."""
        return {
            "format": FORMAT,
            "weft": __version__,
            "network": self.network,
            "target": self.target,
            "processor": self.processor,
            "metric": self.metric,
            "margin": self.margin,
            "score": {
                "base": self.base,
                "threshold": self.threshold,
                "tuned": self.score,
                "test_base": self.test_base,
                "test": self.test_score,
            },
            "kind": self.kind,
            "way": self.way,
            "rows": self.rows,
            "latency_s": {"before": self.before.median_s, "after": self.after.median_s},
            "turns_s": {"before": list(self.before.seconds), "after": list(self.after.seconds)},
            "speedup": self.speedup,
            "bytes": {"before": self.bytes_before, "after": self.bytes_after},
            "layers": [each._asdict() for each in self.layers],
            "tried": [each._asdict() | {"left_out": list(each.left_out)} for each in self.tried],
            "seconds": self.seconds,
        }

"""What a search for number formats came to, beside other methods, and the JSON file that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from weft.base.version import __version__
from weft.reports.shown import Shown
from weft_tune.baselines.base import Baseline
from weft_tune.evaluation import Subset
from weft_tune.network import ROLES, Network, Target
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.spelling import spell
from weft_tune.objective import total_bits
from weft_tune.trials import FLOAT32_BITS, Trial, Tuning

FORMAT = 1


class OtherMethod(NamedTuple):
    """What another method came to on the same samples."""

    method: str
    formats: str
    """As a configuration's text, or in a word where the method has none."""
    weight_bits: int
    activation_bits: int
    score: float
    feasible: bool
    evaluations: int

    @classmethod
    def of(cls, network: Network, found: Baseline) -> Self:
        weights, activations = total_bits(network, found.configuration)
        return cls(
            found.method, found.configuration.text, weights, activations, found.score, found.feasible,
            found.evaluations,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TuningResult(Shown):
    """A search, and what was measured after it."""

    tuning: Tuning
    objective: str
    bias_rule: str = "repair"
    seconds: float
    """That this run took; less than the search, where it went on from an earlier one."""
    test_base: float | None = None
    test_score: float | None = None
    """On samples that the search has not seen."""
    exported_score: float | None = None
    """Of the file that was written, in ONNX Runtime, on the samples of the search."""
    run_s: tuple[float, float] | None = None
    """Of one sample in ONNX Runtime on this machine, one thread: the source, the file that was written."""
    device: str | None = None
    latency_s: tuple[float, float] | None = None
    """Of one query on the device: before, after."""
    speedups: Mapping[str, float] = field(default_factory=dict)
    """By the name of the model of hardware, estimated."""
    others: tuple[OtherMethod, ...] = ()
    files: Mapping[str, Path] = field(default_factory=dict)
    """What was written, by what it is."""

    def __repr__(self) -> str:
        return f"TuningResult({self.tuning!r}, {self.seconds:.1f} s)"

    @property
    def methods(self) -> tuple[OtherMethod, ...]:
        """All methods beside each other, ours among them, the network as it was first."""
        tuning, formats = self.tuning, self.tuning.configuration.text
        plain = FLOAT32_BITS * tuning.network.weights, FLOAT32_BITS * tuning.network.inputs
        sizes = tuning.weight_bits, tuning.activation_bits
        before = OtherMethod("FLOAT 32", "", *plain, tuning.base["full"], True, 1)
        return before, OtherMethod("weft", formats, *sizes, tuning.score, True, tuning.iterations), *self.others

    @property
    def failures(self) -> list[Trial]:
        """Configurations that could not be scored."""
        return [trial for trial in self.tuning.trials if trial.failure]

    def as_dict(self) -> dict[str, Any]:
        """What the JSON file says."""
        tuning = self.tuning
        return {
            "format": FORMAT,
            "weft": __version__,
            "network": tuning.network.name,
            "platform": tuning.platform,
            "margin": tuning.margin,
            "layerwise": tuning.layerwise,
            "bias_rule": self.bias_rule,
            "objective": {"expression": self.objective, "before": tuning.base_objective, "after": tuning.objective},
            "score": {
                "base": tuning.base["full"],
                "threshold": tuning.thresholds["full"],
                "tuned": tuning.score,
                "small_base": tuning.base.get("small"),
                "small_threshold": tuning.thresholds.get("small"),
                "test_base": self.test_base,
                "test": self.test_score,
                "exported": self.exported_score,
            },
            "weight_bits": tuning.weight_bits,
            "activation_bits": tuning.activation_bits,
            "weight_reduction": tuning.weight_reduction,
            "reduction": tuning.reduction,
            "layers": [_layer(target, tuning.configuration) for target in tuning.network.targets],
            "iterations": tuning.iterations,
            "samples": dict(tuning.samples),
            "reused": tuning.reused,
            "seconds": self.seconds,
            "device": self.device,
            "latency_s": None
            if self.latency_s is None
            else dict(zip(("before", "after"), self.latency_s, strict=True)),
            "run_s": None if self.run_s is None else dict(zip(("before", "after"), self.run_s, strict=True)),
            "speedups": dict(self.speedups),
            "baselines": [other._asdict() for other in self.others],
            "trials": [_trial(trial) for trial in tuning.trials],
            "path": kept_places(tuning),
        }


def kept_places(tuning: Tuning) -> list[int]:
    """Where the steps of the way to the result stand among the trials."""
    places = {(trial.subset, trial.configuration): place for place, trial in enumerate(tuning.trials)}
    return [places[_subset(tuning, kept.phase), kept.configuration] for kept in tuning.path]


def _subset(tuning: Tuning, phase: int) -> Subset:
    return "small" if phase < 3 and "small" in tuning.thresholds else "full"


def _layer(target: Target, configuration: Configuration) -> dict[str, Any]:
    found: dict[str, Any] = {"name": target.name}
    if target.branches:
        found["branches"] = list(target.branches)
    for role in ROLES:
        forms = [configuration[name] for name in target.objects(role)]
        size, bits = target.size(role), max(form.bits for form in forms)
        found[role] = {
            "format": spell(forms[0]),
            "bits": bits,
            "values": size,
            "bytes_before": _bytes(size, FLOAT32_BITS),
            "bytes": _bytes(size, bits),
        }
    return found


def _trial(trial: Trial) -> dict[str, Any]:
    found: dict[str, Any] = {
        "iteration": trial.iteration, "phase": trial.phase, "step": trial.step, "subset": trial.subset,
        "score": trial.score if math.isfinite(trial.score) else None, "exact": trial.exact,
        "feasible": trial.feasible, "chosen": trial.chosen, "objective": trial.objective, "samples": trial.samples,
        "formats": trial.configuration.text,
    }  # fmt: skip
    return found | ({"failure": trial.failure} if trial.failure else {})


def _bytes(values: int, bits: int) -> int:
    return -(-values * bits // 8)

"""The progress and the result of a search for number formats, compared with other methods, and its JSON file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from weft.base.version import __version__
from weft.reports.pictures import Shown
from weft_tune.evaluation import Subset
from weft_tune.network import ROLES, Network, Target
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import spell
from weft_tune.objective import total_bits
from weft_tune.search_space import Layerwise

FORMAT = 1
"""Version of the JSON file."""
Phase = Literal[1, 2, 3, 4]
Step = Literal["base", "coarse", "bias", "width", "type", "recovery"]
FLOAT32_BITS = 32
"""Width of the values before tuning, with which sizes are compared."""
PHASES: dict[int, str] = {1: "coarse", 2: "fine-tuning", 3: "recovery", 4: "fine-tuning"}
"""Phase -> its name."""


class Trial(NamedTuple):
    """One scored configuration."""

    iteration: int
    """Counts new configurations; 0 for the base."""
    phase: Phase
    step: Step
    subset: Subset
    configuration: Configuration
    score: float
    """The score; an upper bound of it if *exact* is false; -inf if the evaluation failed."""
    exact: bool
    feasible: bool
    objective: float
    samples: int = 0
    chosen: bool = False
    """Whether the search continued from this configuration."""
    failure: str = ""


class KeptPoint(NamedTuple):
    """A point from which the search continued, on its way from the base to the result."""

    phase: Phase
    step: Step
    configuration: Configuration
    score: float
    objective: float


class Progress(NamedTuple):
    """The state of a running search."""

    phase: Phase
    step: Step
    iteration: int
    score: float
    """The score of the last configuration, or a bound."""
    threshold: float
    objective: float
    """The objective of the best configuration so far."""


OnSearchProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, repr=False)
class Tuning:
    """The result of a search. A search that was interrupted and resumed gives an equal one."""

    network: Network
    platform: str
    margin: float
    layerwise: Layerwise
    configuration: Configuration
    score: float
    """The score on all samples."""
    objective: float
    base_configuration: Configuration
    base_objective: float
    base: dict[Subset, float]
    """Scores of the base by subset."""
    thresholds: dict[Subset, float]
    trials: tuple[Trial, ...]
    path: tuple[KeptPoint, ...]
    """The points from which the search continued, from the base to the result."""
    samples: dict[Subset, int]
    """The number of samples that were evaluated, by subset."""
    reused: int = field(default=0, compare=False)
    """Scores that came from the database."""

    def __repr__(self) -> str:
        return (
            f"Tuning({self.network.name} on {self.platform}: weights {self.weight_reduction:.1f} times smaller, "
            f"score {self.score:.4f} after {self.base['full']:.4f}, {self.iterations} configurations)"
        )

    @property
    def iterations(self) -> int:
        """The number of new configurations that were scored."""
        return max((trial.iteration for trial in self.trials), default=0)

    @property
    def weight_bits(self) -> int:
        return total_bits(self.network, self.configuration)[0]

    @property
    def activation_bits(self) -> int:
        return total_bits(self.network, self.configuration)[1]

    @property
    def weight_reduction(self) -> float:
        """Ratio of the weights' size in float32 to that in the configuration's formats."""
        return FLOAT32_BITS * self.network.weights / max(1, self.weight_bits)

    @property
    def reduction(self) -> float:
        """Ratio of the size of weights and activations in float32 to that in the configuration's formats."""
        float32_bits = FLOAT32_BITS * (self.network.weights + self.network.inputs)
        return float32_bits / max(1, self.weight_bits + self.activation_bits)


class OtherMethod(NamedTuple):
    """The result of another method on the same samples."""

    method: str
    formats: str
    """The text of the method's configuration, or a description if it has none."""
    weight_bits: int
    """Bits of all weights together."""
    activation_bits: int
    """Bits of all inputs of layers together."""
    score: float
    feasible: bool
    """Whether the score reaches the threshold."""
    evaluations: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TuningResult(Shown):
    """A search, and the measurements after it."""

    tuning: Tuning
    objective: str
    bias_rule: str = "repair"
    seconds: float
    """Duration of this run; less than that of the search if it continued an earlier run."""
    test_base: float | None = None
    """Score of the model before tuning on samples that the search has not seen."""
    test_score: float | None = None
    """Score of the result on the same samples."""
    exported_score: float | None = None
    """Score of the written file in ONNX Runtime, on the samples of the search."""
    run_s: tuple[float, float] | None = None
    """Time of one sample in ONNX Runtime on this machine, one thread: of the source, of the written file."""
    device: str | None = None
    latency_s: tuple[float, float] | None = None
    """Time of one query on the device: before, after."""
    speedups: Mapping[str, float] = field(default_factory=dict)
    """Model of hardware -> estimated speed-up."""
    others: tuple[OtherMethod, ...] = ()
    files: Mapping[str, Path] = field(default_factory=dict)
    """Kind of file (``formats``, ``model`` ...) -> where it was written."""

    def __repr__(self) -> str:
        return f"TuningResult({self.tuning!r}, {self.seconds:.1f} s)"

    @property
    def methods(self) -> tuple[OtherMethod, ...]:
        """All methods: first the original network, then ours, then the others."""
        tuning, formats = self.tuning, self.tuning.configuration.text
        before = OtherMethod(
            "FLOAT 32", formats="", weight_bits=FLOAT32_BITS * tuning.network.weights, evaluations=1,
            activation_bits=FLOAT32_BITS * tuning.network.inputs, score=tuning.base["full"], feasible=True,
        )  # fmt: skip
        ours = OtherMethod(
            "weft", formats, tuning.weight_bits, tuning.activation_bits, tuning.score, feasible=True,
            evaluations=tuning.iterations,
        )  # fmt: skip
        return before, ours, *self.others

    @property
    def failures(self) -> list[Trial]:
        """Configurations that could not be scored."""
        return [trial for trial in self.tuning.trials if trial.failure]

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
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
            "layers": [_target_row(target, tuning.configuration) for target in tuning.network.targets],
            "iterations": tuning.iterations,
            "samples": dict(tuning.samples),
            "reused": tuning.reused,
            "seconds": self.seconds,
            "device": self.device,
            "latency_s": _before_and_after(self.latency_s),
            "run_s": _before_and_after(self.run_s),
            "speedups": dict(self.speedups),
            "baselines": [other._asdict() for other in self.others],
            "trials": [_trial_row(trial) for trial in tuning.trials],
            "path": kept_places(tuning),
        }


def kept_places(tuning: Tuning) -> list[int]:
    """Positions of the kept points among the trials."""
    index_of_trial = {(trial.subset, trial.configuration): index for index, trial in enumerate(tuning.trials)}
    return [index_of_trial[_subset(tuning, kept.phase), kept.configuration] for kept in tuning.path]


def _subset(tuning: Tuning, phase: int) -> Subset:
    """The subset that *phase* scored: the small set in phases 1 and 2 of a search with two passes."""
    return "small" if phase < 3 and "small" in tuning.thresholds else "full"


def _target_row(target: Target, configuration: Configuration) -> dict[str, Any]:
    """The JSON entry of a target: format, bits and sizes of its weights and inputs."""
    row: dict[str, Any] = {"name": target.name}
    if target.branches:
        row["branches"] = list(target.branches)
    for role in ROLES:
        forms = [configuration[name] for name in target.objects(role)]
        size, bits = target.size(role), max(form.bits for form in forms)
        row[role] = {
            "format": spell(forms[0]),
            "bits": bits,
            "values": size,
            "bytes_before": -(-size * FLOAT32_BITS // 8),
            "bytes": -(-size * bits // 8),
        }
    return row


def _trial_row(trial: Trial) -> dict[str, Any]:
    row: dict[str, Any] = {
        "iteration": trial.iteration, "phase": trial.phase, "step": trial.step, "subset": trial.subset,
        "score": trial.score if math.isfinite(trial.score) else None, "exact": trial.exact,
        "feasible": trial.feasible, "chosen": trial.chosen, "objective": trial.objective, "samples": trial.samples,
        "formats": trial.configuration.text,
    }  # fmt: skip
    return row | ({"failure": trial.failure} if trial.failure else {})


def _before_and_after(pair: tuple[float, float] | None) -> dict[str, float] | None:
    return None if pair is None else dict(zip(("before", "after"), pair, strict=True))

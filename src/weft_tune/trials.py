"""What a search tells while it runs and when it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from weft_tune.evaluation import Score, Subset
from weft_tune.network import Network
from weft_tune.numbers.configuration import Configuration
from weft_tune.objective import total_bits
from weft_tune.search_space import Layerwise

Phase = Literal[1, 2, 3, 4]
Step = Literal["base", "coarse", "bias", "width", "type", "recovery"]
FLOAT32_BITS = 32
PHASES: dict[int, str] = {1: "coarse", 2: "fine-tuning", 3: "recovery", 4: "fine-tuning"}
"""What the phases are called."""


class Trial(NamedTuple):
    """One scored configuration."""

    iteration: int
    """Counts new configurations; 0 for the base."""
    phase: Phase
    step: Step
    subset: Subset
    configuration: Configuration
    score: float
    """The score, or a bound that it does not reach, where it is not exact; -inf where it failed."""
    exact: bool
    feasible: bool
    objective: float
    samples: int = 0
    chosen: bool = False
    """Whether the search went on from here."""
    failure: str = ""


class Kept(NamedTuple):
    """One point of the way from the base to the result."""

    phase: Phase
    step: Step
    configuration: Configuration
    score: float
    objective: float


class Progress(NamedTuple):
    """Where a search is."""

    phase: Phase
    step: Step
    iteration: int
    score: float
    """The score of the last configuration, or a bound."""
    threshold: float
    objective: float
    """The best so far."""


Told = Callable[[Progress], None]


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
    path: tuple[Kept, ...]
    """What was kept on the way, each at most as large as the one before within a phase that shrinks."""
    samples: dict[Subset, int]
    """How many samples were evaluated, by subset."""
    reused: int = field(default=0, compare=False)
    """Scores that came from the database."""

    def __repr__(self) -> str:
        return (
            f"Tuning({self.network.name} on {self.platform}: weights {self.weight_reduction:.1f} times smaller, "
            f"score {self.score:.4f} after {self.base['full']:.4f}, {self.iterations} configurations)"
        )

    @property
    def iterations(self) -> int:
        """How many new configurations were scored."""
        return max((trial.iteration for trial in self.trials), default=0)

    @property
    def weight_bits(self) -> int:
        return total_bits(self.network, self.configuration)[0]

    @property
    def activation_bits(self) -> int:
        return total_bits(self.network, self.configuration)[1]

    @property
    def weight_reduction(self) -> float:
        """How many times smaller the weights are than in FLOAT 32."""
        return FLOAT32_BITS * self.network.weights / max(1, self.weight_bits)

    @property
    def reduction(self) -> float:
        """How many times smaller weights and activations are together."""
        whole = FLOAT32_BITS * (self.network.weights + self.network.inputs)
        return whole / max(1, self.weight_bits + self.activation_bits)


class TrialOutcome(NamedTuple):
    """What an evaluation gave, a failure included."""

    score: Score
    failure: str = ""

"""The smallest number format for each layer that keeps a network accurate."""

from weft.tuning.evaluation import Evaluator, Score, Subset
from weft.tuning.network import Network, Target
from weft.tuning.platform import Platform, load_platform, platforms
from weft.tuning.trials import Kept, Progress, Trial, Tuning
from weft.tuning.tuner import tune

__all__ = [
    "Evaluator",
    "Kept",
    "Network",
    "Platform",
    "Progress",
    "Score",
    "Subset",
    "Target",
    "Trial",
    "Tuning",
    "load_platform",
    "platforms",
    "tune",
]

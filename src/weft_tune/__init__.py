"""The smallest number format for each layer that keeps a network accurate.

``tune`` goes from a model to a ``TuningResult``; ``find_formats`` is the search alone, over a ``Network`` and an
``Evaluator`` that scores it.

A ``TuningSetting`` gives every group of objects a type and a width and every object a scale;
``SearchSpace.configuration`` makes formats of it. A phase of the search (``tuner.py``) proposes neighbours
(``search_space.py``) and chooses among them by a rule; the ``Judge`` takes scores from memory, from the database or
from the evaluator, and evaluates only as far as the choice can still change. Evaluators are functions
(``evaluation.py``), commands (``command_evaluator.py``) and ``quantised/``, which cuts an ONNX graph before every
target (``weighted_layers.py``), feeds the weights as inputs, rounds the input of a target between two pieces, and
caches the tensors at each cut for the next configuration that begins alike; ``workers.py`` spreads the batches of a
chunk over processes.
``baselines.py`` has other searches over the same evaluators, and tries everything. ``export/`` writes the
result as ONNX, ``packed.py`` as bits; ``hardware.py`` estimates its value on hardware. ``runtime_target/`` answers
another question, by measurement: which formats ONNX Runtime computes fastest here. ``numbers`` has the formats.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft_tune.command_evaluator import CommandEvaluator
    from weft_tune.evaluation import CallableEvaluator, Evaluator, Score
    from weft_tune.network import Network, Target
    from weft_tune.options import TuneOptions
    from weft_tune.quantised.evaluator import OnnxEvaluator
    from weft_tune.result import Tuning, TuningResult
    from weft_tune.runtime_target.fastest import RuntimeTuning
    from weft_tune.tuner import find_formats
    from weft_tune.tuning_run import tune

_HOMES = {
    "CallableEvaluator": "evaluation", "CommandEvaluator": "command_evaluator", "Evaluator": "evaluation",
    "Score": "evaluation", "Network": "network", "Target": "network", "TuneOptions": "options",
    "OnnxEvaluator": "quantised.evaluator", "TuningResult": "result", "tune": "tuning_run", "Tuning": "result",
    "find_formats": "tuner", "RuntimeTuning": "runtime_target.fastest",
}  # fmt: skip
"""Name -> its module, which is imported on first use, so that a search by a command loads no ONNX Runtime."""

__all__ = [
    "CallableEvaluator", "CommandEvaluator", "Evaluator", "Network", "OnnxEvaluator", "RuntimeTuning", "Score",
    "Target", "TuneOptions", "Tuning", "TuningResult", "find_formats", "tune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

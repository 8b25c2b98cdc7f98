"""The smallest number format for each layer that keeps a network accurate.

``tune`` goes from a model to a ``TuningResult``; ``find_formats`` is the search alone, over a ``Network`` and whatever
scores it, an ``Evaluator``. ``numbers`` has the formats, ``search`` the phases, ``quantised`` runs ONNX models under
formats, ``export`` writes them, ``baselines`` are other methods; ``runtime_target`` finds what a runtime computes
fastest.

A ``TuningSetting`` gives every group of objects a type and a width and every object a scale;
``SearchSpace.configuration`` makes formats of it. A phase of the search (``search/``, a page each) proposes neighbours
(``moves.py``) and says by a rule (``ranking.py``) which it wants; the ``Judge`` finds scores in memory, in the database
or by asking, and asks only for what can still change the choice. What runs the network is behind ``Evaluator``:
``command_evaluator.py``, ``callable_evaluator.py``, or ``quantised/``, which cuts an ONNX graph before every
target, feeds the weights as inputs, rounds what enters a target between two pieces, and keeps what is live there for
the next configuration that begins alike. ``workers.py`` spreads the batches of a chunk over processes.
``runtime_target/`` asks another question, by the clock: which formats ONNX Runtime computes fastest here.
``baselines/`` are other searches over the same evaluators, ``exhaustive.py`` tries everything. ``export/`` writes the
result as ONNX, ``packed.py`` as bits; ``on_device.py`` makes it a model with fewer bits, which
``costs.layer_costs.estimate`` prices as any other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft_tune.callable_evaluator import CallableEvaluator
    from weft_tune.command_evaluator import CommandEvaluator
    from weft_tune.evaluation import Evaluator, Score
    from weft_tune.network import Network, Target
    from weft_tune.options import TuneOptions
    from weft_tune.quantised.evaluator import OnnxEvaluator
    from weft_tune.result import TuningResult
    from weft_tune.runtime_target.result import RuntimeTuning
    from weft_tune.trials import Tuning
    from weft_tune.tuner import find_formats
    from weft_tune.whole_run import tune

_HOMES = {
    "CallableEvaluator": "callable_evaluator", "CommandEvaluator": "command_evaluator", "Evaluator": "evaluation",
    "Score": "evaluation", "Network": "network", "Target": "network", "TuneOptions": "options",
    "OnnxEvaluator": "quantised.evaluator", "TuningResult": "result", "tune": "whole_run", "Tuning": "trials",
    "find_formats": "tuner", "RuntimeTuning": "runtime_target.result",
}  # fmt: skip
"""Where a name is from; it is imported when it is asked for, so that a search by a command loads no ONNX Runtime."""

__all__ = [
    "CallableEvaluator", "CommandEvaluator", "Evaluator", "Network", "OnnxEvaluator", "RuntimeTuning", "Score",
    "Target", "TuneOptions", "Tuning", "TuningResult", "find_formats", "tune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

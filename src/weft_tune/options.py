"""The options of ``weft.tune`` and ``weft tune``: ``TuneOptions``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, get_args

from weft.base.errors import TuneError, unknown_name
from weft.base.settings import OptionPanel, how, out, what

INT8 = "int8"
"""The baseline that is no search: ONNX Runtime's own quantizer."""
TARGETS = ("onnxruntime",)
"""Runtimes that can be measured."""
SCORES = "scores.db"
"""The file of the database in the folder of the results."""

scored = OptionPanel("Scores from a command")
"""Options of networks whose score a command prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """One tuning. The fields are the arguments of ``tune`` and the options of ``weft tune``.

    An option that is None is taken from the network's file; after that there are defaults.
    """

    model: str | Path
    """An .onnx file, a network described in a .toml file, a name of ``weft models list``, or a classifier."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Input or axis -> sizes that the model is priced with, where its file leaves them open and no samples tell."""
    data: Annotated[str | Path | None, what()] = None
    """Labelled samples (.npz): the model's inputs and 'label'.

    ``agreement`` and ``closeness`` need no labels.
    """
    scale: Annotated[float | None, what(text=True)] = None
    """Multiply the samples by it, as 1/255."""
    test: Annotated[str | Path | None, what()] = None
    """Other labelled samples, scored once, at the end."""
    metric: Annotated[str | None, what(shown="top1")] = None
    """top1, top5, or file.py:function; with --target and without labels, agreement or closeness with the model as it
    was."""
    margin: Annotated[float | None, what(shown="0.01")] = None
    """Part of the score that may be lost."""
    network: Annotated[str | Path | None, what()] = None
    """Take layers and settings from a TOML file."""
    layers: Annotated[str | Sequence[str] | None, what(shown="all", text=True)] = None
    """conv, fc, all, or names: conv1,block2.*"""
    groups: Annotated[Mapping[str, Sequence[str]], what("--group")] = field(default_factory=dict)
    """NAME=a,b: layers that share formats; repeatable."""
    scored_output: Annotated[str | None, what(shown="the first")] = None
    """The output that is scored."""
    target: Annotated[str | None, how()] = None
    """Find what a runtime computes fastest on this machine, measured, instead of what is smallest: onnxruntime."""
    platform: Annotated[str | None, how(shown="fpga")] = None
    """The available formats: fpga, int8, small-floats, stripes, or a TOML file."""
    objective: Annotated[str | None, how(shown="weights + activations")] = None
    """What to minimize: an expression over bits and sizes."""
    layerwise: Annotated[str | None, how(shown="WGT-ONLY")] = None
    """What may differ from layer to layer: WGT-ONLY, BOTH, ACT-ONLY or NONE."""
    device: Annotated[str | None, how("-d", completion="devices")] = None
    """A device (weft devices list): the objective may use latency_s, and a profile for the device is written."""
    small: Annotated[float | None, how(shown="0.2")] = None
    """Part of the samples that the first pass uses."""
    bias_rule: Annotated[str, how()] = "repair"
    """When biases are raised: keep (nothing may be lost), repair (also where a width fails), chapter (until the margin
    is spent)."""
    faithful: Annotated[bool, how()] = False
    """Score every candidate in full, with the same result."""
    workers: Annotated[int | None, how(shown="all cores; 1 for a command")] = None
    """Number of parallel processes."""
    baselines: Annotated[Sequence[str], how("--baseline")] = ()
    """Another method to run for comparison: ristretto, relaxed-ristretto, stripes, int8; repeatable."""
    command: Annotated[str | None, scored()] = None
    """A shell command with {config} for the formats' file."""
    small_command: Annotated[str | None, scored()] = None
    """The command that scores few samples, for the first pass."""
    score: Annotated[str | None, scored()] = None
    """Regular expression; its group is the score."""
    timeout_s: Annotated[float | None, scored("--timeout")] = None
    """Seconds a command may take."""
    on_failure: Annotated[str, scored()] = "stop"
    """stop, or skip what cannot be scored and go on."""
    output: Annotated[str | Path | None, out("-o", metavar="FOLDER", shown="MODEL-tuned")] = None
    """Folder for the results.

    In Python nothing is written where it is left out.
    """
    export: Annotated[str, out()] = "qdq"
    """The tuned model as qdq, packed, simulated, qonnx or none."""
    database: Annotated[str | Path | None, out(shown="scores.db in that folder")] = None
    """File that keeps scores, so that no configuration is scored twice."""
    fresh: Annotated[bool, out()] = False
    """Forget the scores of earlier runs."""

    def __post_init__(self) -> None:
        """Raise TuneError for a value that is unknown or out of range."""
        from weft_tune.baselines import BASELINES  # slow to import, and the help of the command does not need it
        from weft_tune.export import STYLES
        from weft_tune.judge import OnFailure

        for argument, value, known in (
            ("export", self.export, (*STYLES, "none")),
            *(("target", target, TARGETS) for target in (self.target,) if target is not None),
            ("on_failure", self.on_failure, get_args(OnFailure)),
            *(("baselines", baseline, (*BASELINES, INT8)) for baseline in self.baselines),
        ):
            if value not in known:
                raise TuneError(f"{argument} = {value}: {unknown_name('choice', value, known)}")
        folder, database = self.folder, Path(self.database) if self.database else None
        for argument, is_valid, advice in (
            ("margin", self.margin is None or 0 <= self.margin < 1, "give a part of the score, as 0.01; 1 is too much"),
            ("small", self.small is None or 0 < self.small <= 1, "give a part of the samples, above 0 and at most 1"),
            ("workers", self.workers is None or self.workers >= 1, "give 1 or more"),
            ("timeout_s", self.timeout_s is None or 0 < self.timeout_s < math.inf, "give seconds above 0"),
            ("output", folder is None or folder.is_dir() or not folder.exists(), "name a folder, it is a file"),
            ("database", database is None or database.parent.is_dir(), "cannot write: there is no such folder"),
            ("database", database is None or not database.is_dir(), "cannot write: it is a folder; name a file"),
        ):
            if not is_valid:
                value = getattr(self, argument)
                raise TuneError(f"{argument} = {value if isinstance(value, str | Path) else f'{value:g}'}: {advice}")

    @property
    def metric_or_default(self) -> str:
        """The metric, or its default."""
        return self.metric or "top1"

    @property
    def folder(self) -> Path | None:
        """The folder of the results."""
        return None if self.output is None else Path(self.output)

    @property
    def scores(self) -> Path | None:
        """The file of the database of scores; None if nothing is written."""
        return Path(self.database) if self.database else self.folder and self.folder / SCORES


def usual_output(model: str | Path) -> Path:
    """The folder that ``weft tune`` writes to by default."""
    name = str(model)
    return Path(f"{Path(name).stem if '.' in name else name}-tuned")

"""What is to be tuned and how: ``TuneOptions``, all that ``weft.tune`` and ``weft tune`` are told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from weft.base.errors import TuneError, unknown_name
from weft_tune.baselines import BASELINES
from weft_tune.export import STYLES
from weft_tune.judge import OnFailure

INT8 = "int8"
"""ONNX Runtime's own way to quantise, beside the baselines that are searches."""
METHODS = (*BASELINES, INT8)
EXPORTS = (*STYLES, "none")
TARGETS = ("onnxruntime",)
"""Runtimes that can be measured."""
SCORES = "scores.db"
"""In the folder of the results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """One tuning. The fields are the arguments of ``tune`` and the options of ``weft tune``.

    What is None may be said by the network's file; after that there are defaults.
    """

    model: str | Path
    """An .onnx file, a network described in a .toml file, or a classifier that comes with weft."""
    data: str | Path | None = None
    """Labelled samples, an .npz file; ``agreement`` and ``closeness`` need no labels."""
    scale: float | None = None
    """What samples in files are multiplied by."""
    test: str | Path | None = None
    """Other labelled samples, scored once, at the end."""
    metric: str | None = None
    """``top1``, ``top5`` or ``file.py:function``; with a target also ``agreement`` and ``closeness``."""
    margin: float | None = None
    """The part of the score that may be lost."""
    network: str | Path | None = None
    """A .toml file that describes the network of an .onnx file."""
    layers: str | Sequence[str] | None = None
    """``conv``, ``fc``, or names; all, if left out."""
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Layers that share formats, by a name for them."""
    scored_output: str | None = None
    """The model's output that is scored; the first, if left out."""
    platform: str | None = None
    """Which formats there are."""
    objective: str | None = None
    """What is made small, an expression."""
    layerwise: str | None = None
    """What may differ from layer to layer."""
    device: str | None = None
    """Where the result is priced; lets the objective say ``latency_s``."""
    small: float | None = None
    """The part of the samples that the first pass uses."""
    bias_rule: str = "repair"
    """When biases are raised."""
    faithful: bool = False
    """Whether every candidate is scored in full."""
    workers: int | None = None
    """Processes; all cores, or one command at a time, if left out."""
    baselines: Sequence[str] = ()
    """Other methods to run beside."""
    target: str | None = None
    """A runtime: what it computes fastest is looked for, not what is smallest."""
    command: str | None = None
    """A shell command that scores, with ``{config}`` for the file of the formats."""
    small_command: str | None = None
    """The same on few samples."""
    score: str | None = None
    """A regular expression whose group is the score in what the command prints."""
    timeout_s: float | None = None
    """What a command may take."""
    on_failure: str = "stop"
    """``stop``, or ``skip`` what cannot be scored."""
    output: str | Path | None = None
    """The folder for the results; nothing is written, if left out."""
    export: str = "qdq"
    """How the tuned model is written into that folder."""
    database: str | Path | None = None
    """A file of scores that are not asked for again; in that folder, if left out."""
    fresh: bool = False
    """Whether scores of earlier runs are forgotten."""

    def __post_init__(self) -> None:
        for argument, value, known in (
            ("export", self.export, EXPORTS),
            *(("target", each, TARGETS) for each in (self.target,) if each is not None),
            ("on_failure", self.on_failure, get_args(OnFailure)),
            *(("baselines", each, METHODS) for each in self.baselines),
        ):
            if value not in known:
                raise TuneError(f"{argument} = {value}: {unknown_name('choice', value, known)}")
        folder, database = self.folder, Path(self.database) if self.database else None
        for argument, fine, way_out in (
            ("margin", self.margin is None or 0 <= self.margin < 1, "give a part of the score, as 0.01; 1 is too much"),
            ("small", self.small is None or 0 < self.small <= 1, "give a part of the samples, above 0 and at most 1"),
            ("workers", self.workers is None or self.workers >= 1, "give 1 or more"),
            ("timeout_s", self.timeout_s is None or 0 < self.timeout_s < math.inf, "give seconds above 0"),
            ("output", folder is None or folder.is_dir() or not folder.exists(), "name a folder, it is a file"),
            ("database", database is None or database.parent.is_dir(), "cannot write: there is no such folder"),
            ("database", database is None or not database.is_dir(), "cannot write: it is a folder; name a file"),
        ):
            if not fine:
                value = getattr(self, argument)
                raise TuneError(f"{argument} = {value if isinstance(value, str | Path) else f'{value:g}'}: {way_out}")

    @property
    def measure(self) -> str:
        """The metric, or its default."""
        return self.metric or "top1"

    @property
    def folder(self) -> Path | None:
        """The folder of the results."""
        return None if self.output is None else Path(self.output)

    @property
    def scores(self) -> Path | None:
        """Where scores are kept."""
        return Path(self.database) if self.database else self.folder and self.folder / SCORES


def usual_output(model: str | Path) -> Path:
    """The folder that ``weft tune`` writes to where none is named."""
    name = str(model)
    return Path(f"{Path(name).stem if '.' in name else name}-tuned")

"""Weight-shared networks that the project trained and zipped itself: ``ZIPPED`` by name.

The files in ``data/zipped`` were written by ``training/zipping.py``: NAME-TASK.onnx is a task's network, NAME.json the
card that says where they come from, how good they were before and after, and at which sharing ratios.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.models.stored import place

_HERE = Path(__file__).parent / "data" / "zipped"


@dataclass(frozen=True, slots=True)
class ZippedTask:
    """One of the networks."""

    name: str
    question: str
    """What it answers about a picture, in words."""
    classes: tuple[int, ...]
    """The class that each label of the data set belongs to."""
    accuracy: float
    """The accuracy on the test images, before it was zipped with the others."""
    path: Path
    """The .onnx file; an installed weft has it only after ``weft models fetch zipped``."""
    sha256: str
    """The sum of the .onnx file."""


@dataclass(frozen=True, slots=True)
class ZippedRatio:
    """What zipping at one ratio came to; accuracies on the test images, per task."""

    sharing: float
    untuned: tuple[float, ...]
    """The accuracies when weights are only merged."""
    accuracy: tuple[float, ...]
    """The accuracies when the tasks were trained together for some steps besides."""
    unique_weights: int
    """Numbers in the kernels of all tasks when none is stored twice."""


@dataclass(frozen=True, slots=True)
class ZippedCard:
    """Networks for several tasks on the same pictures."""

    name: str
    input: str
    shape: tuple[int, int, int]
    """The shape of a picture: channels, height, width."""
    data: str
    licence: str
    training: str
    zipping: str
    seed: int
    versions: dict[str, str]
    tasks: tuple[ZippedTask, ...]
    weights: int
    """Numbers in the kernels of all tasks' own networks."""
    zipped: tuple[ZippedRatio, ...]
    shipped: float
    """The sharing ratio of the files."""

    def at(self, sharing: float) -> ZippedRatio:
        return next(ratio for ratio in self.zipped if ratio.sharing == sharing)


def read_card(name: str) -> ZippedCard:
    """The card of one of ``ZIPPED``."""
    raw: dict[str, Any] = json.loads((_HERE / f"{name}.json").read_text("utf-8"))
    tasks = tuple(_task(**task) for task in raw.pop("tasks"))
    ratios = tuple(ZippedRatio(**_without_lists(ratio)) for ratio in raw.pop("zipped"))
    return ZippedCard(tasks=tasks, zipped=ratios, **_without_lists(raw))


def _task(file: str, **rest: Any) -> ZippedTask:
    return ZippedTask(path=place(f"stitching/making/data/zipped/{file}"), **_without_lists(rest))


def _without_lists(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}


ZIPPED = ("mnist", "cifar")
"""The names a user may write."""

"""Weight-shared networks that the project trained and zipped itself: ``ZIPPED`` by name.

To *zip* networks is to merge similar filters of trained networks and to retrain the rest. The files in ``data/zipped``
were written by ``training/zipping.py``: NAME-TASK.onnx is a task's network, NAME.json the card of all tasks: the source
of the data, and the accuracies before and after zipping at each sharing ratio.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.models.stored import data_path

_CARDS = Path(__file__).parent / "data" / "zipped"


@dataclass(frozen=True, slots=True)
class ZippedTask:
    """One of the zipped networks."""

    name: str
    question: str
    """What it tells about a picture, in words."""
    classes: tuple[int, ...]
    """Label of the data set -> class."""
    accuracy: float
    """The accuracy on test images before zipping."""
    path: Path
    """The .onnx file; an installed weft has it only after ``weft models fetch zipped``."""
    sha256: str
    """The sum of the .onnx file."""


@dataclass(frozen=True, slots=True)
class ZippedRatio:
    """The result of zipping at one sharing ratio; accuracies on test images, by task."""

    sharing: float
    untuned: tuple[float, ...]
    """Accuracies right after weights are merged."""
    accuracy: tuple[float, ...]
    """Accuracies after some more steps of joint training."""
    unique_weights: int
    """Count of the different numbers in the kernels of all tasks."""


@dataclass(frozen=True, slots=True)
class ZippedCard:
    """The card of several networks for tasks on the same pictures: where they come from, and how good they are."""

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
    """Count of the numbers in the kernels of all tasks before zipping."""
    zipped: tuple[ZippedRatio, ...]
    shipped: float
    """The sharing ratio of the files."""

    def at(self, sharing: float) -> ZippedRatio:
        """The result at one sharing ratio."""
        return next(ratio for ratio in self.zipped if ratio.sharing == sharing)


def read_card(name: str) -> ZippedCard:
    """Read the card *name*, one of ``ZIPPED``."""
    raw: dict[str, Any] = json.loads((_CARDS / f"{name}.json").read_text("utf-8"))
    tasks = tuple(_task(**task) for task in raw.pop("tasks"))
    ratios = tuple(ZippedRatio(**_without_lists(ratio)) for ratio in raw.pop("zipped"))
    return ZippedCard(tasks=tasks, zipped=ratios, **_without_lists(raw))


def _task(file: str, **fields: Any) -> ZippedTask:
    """The task with the file *file* and the other *fields* of its entry in the card."""
    return ZippedTask(path=data_path(f"stitching/making/data/zipped/{file}"), **_without_lists(fields))


def _without_lists(raw: dict[str, Any]) -> dict[str, Any]:
    """*raw* with tuples in place of lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}


ZIPPED = ("mnist", "cifar")
"""Names that a user may give."""

"""Networks with exits that the project trained, with their answers on the whole test sets.

The files beside this one were written by ``training/early_exits.py``: NAME.onnx is the network, NAME.npz its answers on
the test set, NAME.samples.npz a few test images, and NAME.json a card with its origin. An installed weft has the files
of ``mnist-vit``; ``weft.models.stored`` fetches the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from weft.base.errors import ModelError
from weft.base.files import replacing
from weft.models.stored import NetworkCard, existing_data_path, pixels


class TestImages(NamedTuple):
    """Sample images of the test set."""

    image: NDArray[np.uint8]
    """(images, channels, height, width)."""
    label: NDArray[np.uint8]
    row: NDArray[np.uint16]
    """The row of each image in the ``TestRecord``."""

    def inputs(self) -> NDArray[np.float32]:
        """The images as inputs of the network, with values from 0 to 1."""
        return pixels(self.image)


class TestRecord(NamedTuple):
    """The answer of every exit to every image of the test set; columns in the order of the exits."""

    confidence: NDArray[np.float32]
    """(images, exits): the largest softmax value."""
    prediction: NDArray[np.uint8]
    """(images, exits): the class with this value."""
    correct: NDArray[np.bool_]
    """(images, exits): whether the prediction is the label."""
    label: NDArray[np.uint8]
    """(images,): the true class."""


class ExitCard(BaseModel, extra="forbid", frozen=True):
    """Cost and accuracy of one exit on the test set."""

    name: str
    macs: int
    """MACs for one image up to this exit, including the heads on the way."""
    accuracy: float
    """Accuracy if all images left at this exit."""
    rate: float
    """Share of the images that leave at this exit with the card's threshold."""
    accuracy_of_leavers: float | None
    """Accuracy of the images that leave at this exit; None if no image leaves."""


class TrainedCard(NetworkCard, frozen=True):
    """The card of a network with exits."""

    exits: tuple[ExitCard, ...]
    threshold: float
    """The confidence at which images leave; chosen on images in neither the training nor the test set."""
    threshold_rule: str
    held_out_accuracy: float
    mean_macs: int
    """Mean MACs per image, with exits at the threshold."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A network of the project's own, in files of this folder."""

    name: str
    shape: tuple[int, int, int]
    """The shape of one image: channels, height, width. The input ``image`` is a batch of them, float32 from 0 to 1."""
    exits: tuple[str, ...]
    """The outputs that are exits, in order; the last is the end of the network."""

    def path(self) -> Path:
        """The ONNX file."""
        return self._file("onnx")

    def record_path(self) -> Path:
        """The file with the answers on the test set, which ``record`` reads."""
        return self._file("npz")

    def record(self) -> TestRecord:
        return TestRecord(**_arrays(self.record_path()))

    def samples(self) -> TestImages:
        return TestImages(**_arrays(self._file("samples.npz")))

    def export(self, path: str | Path) -> tuple[Path, Path, Path]:
        """Write the network to *path*, and its record and test images beside it; return the three paths."""
        model = Path(path)
        record, samples = model.with_suffix(".record.npz"), model.with_suffix(".samples.npz")
        stored = self.samples()
        for target, content in ((model, _read(self.path())), (record, _read(self.record_path()))):
            with replacing(target, ModelError) as draft:
                draft.write_bytes(content)
        with replacing(samples, ModelError) as draft:
            np.savez_compressed(draft, image=stored.inputs(), label=stored.label)
        return model, record, samples

    def card(self) -> TrainedCard:
        return TrainedCard.model_validate_json(self._file("json").read_bytes())

    def _file(self, kind: str) -> Path:
        return existing_data_path(f"models/trained/{self.name}.{kind}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise ModelError(f"{path}: cannot read: {problem.strerror or problem}") from problem


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(BytesIO(_read(path))) as stored:
        return dict(stored)


TRAINED: dict[str, Trained] = {
    network.name: network
    for network in (
        Trained("mnist-vit", (1, 28, 28), ("exit1", "exit2", "logits")),
        Trained("cifar-cnn", (3, 32, 32), ("exit1", "exit2", "exit3", "logits")),
    )
}
"""The names a user may write."""

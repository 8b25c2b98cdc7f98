"""Four small classifiers that the project trained itself: what number formats are tuned on.

The files beside this one were written by ``training/classifiers.py``: NAME.onnx is the network, NAME.json the card that
says where it comes from, and mnist.npz and cifar10.npz are labelled images that no network was trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from weft.errors import ModelError

_HERE = Path(__file__).parent

_DATA = {"mlp-m": "mnist", "lenet": "mnist", "mlp-c": "cifar10", "cuda-convnet": "cifar10"}

NAMES = tuple(_DATA)
"""The names a user may write."""


class Labelled(NamedTuple):
    """Images and what they show."""

    image: NDArray[np.uint8]
    """(images, channels, height, width)."""
    label: NDArray[np.uint8]

    def inputs(self) -> NDArray[np.float32]:
        """The images as the networks take them: from 0 to 1."""
        return self.image.astype(np.float32) / np.float32(255)


class ClassifierCard(BaseModel):
    """Where a network comes from and what it is worth."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    input: str
    data: str
    licence: str
    training: str
    """How: epochs, seed, version and device, optimizer, images."""
    seed: int
    versions: dict[str, str]
    """Of the packages that wrote the files."""
    parameters: int
    validation_accuracy: float
    """On all images kept from training; those that ``validation`` gives are some of them."""
    accuracy: float
    """On the test set."""
    sha256: str
    """Of the .onnx file."""


def model_path(name: str) -> Path:
    """The ONNX file: input ``image``, float32 from 0 to 1 with any batch; output ``logits`` of ten classes."""
    data_of(name)
    return _HERE / f"{name}.onnx"


def card(name: str) -> ClassifierCard:
    data_of(name)
    return ClassifierCard.model_validate_json((_HERE / f"{name}.json").read_bytes())


def validation(name: str) -> Labelled:
    """Images of the network's data set that were neither trained on nor are in its test set."""
    with np.load(_HERE / f"{data_of(name)}.npz") as stored:
        return Labelled(stored["image"], stored["label"])


def data_of(name: str) -> str:
    """The data set of a network: ``mnist`` or ``cifar10``."""
    if name not in _DATA:
        raise ModelError(f"unknown classifier {name!r}; there are {', '.join(NAMES)}")
    return _DATA[name]

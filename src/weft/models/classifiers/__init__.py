"""Four small classifiers that the project trained, on which number formats are tuned.

The files beside this one were written by ``training/classifiers.py``: NAME.onnx is the network, NAME.json a card with
its origin, and mnist.npz and cifar10.npz are labelled images that no network was trained on. An installed weft has
``lenet`` and the images of MNIST; ``weft.models.stored`` fetches the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.base.errors import ModelError
from weft.models.stored import NetworkCard, existing_data_path, pixels

_DATA = {"mlp-m": "mnist", "lenet": "mnist", "mlp-c": "cifar10", "cuda-convnet": "cifar10"}
"""Network -> its data set."""

NAMES = tuple(_DATA)
"""The names a user may write."""


class Labelled(NamedTuple):
    """Images of a data set and their classes."""

    image: NDArray[np.uint8]
    """(images, channels, height, width)."""
    label: NDArray[np.uint8]

    def inputs(self) -> NDArray[np.float32]:
        """The images as inputs of the networks, with values from 0 to 1."""
        return pixels(self.image)


class ClassifierCard(NetworkCard, frozen=True):
    """The card of a classifier."""

    parameters: int
    validation_accuracy: float
    """Accuracy on all images kept from training; ``validation`` returns a part of these images."""


def model_path(name: str) -> Path:
    """The ONNX file: input ``image``, float32 from 0 to 1 with any batch; output ``logits`` of ten classes."""
    data_of(name)
    return existing_data_path(f"models/classifiers/{name}.onnx")


def card(name: str) -> ClassifierCard:
    data_of(name)
    return ClassifierCard.model_validate_json(existing_data_path(f"models/classifiers/{name}.json").read_bytes())


def validation(name: str) -> Labelled:
    """Images of the network's data set that are in neither the training nor the test set."""
    with np.load(existing_data_path(f"models/classifiers/{data_of(name)}.npz")) as stored:
        return Labelled(stored["image"], stored["label"])


def data_of(name: str) -> str:
    """The data set of a network: ``mnist`` or ``cifar10``."""
    if name not in _DATA:
        raise ModelError(f"unknown classifier {name!r}; there are {', '.join(NAMES)}")
    return _DATA[name]
